"""How much an update has to compute: FLOPs of the rows that teach something, for the MFU.

    needed = passes × Σ over live rows of [ T · (2 · P + a(T)) + C · 2 · V · h ]      MFU = needed / (seconds × peak)

T: tokens of a row, C: of its completion; P: parameters of all layers; a(T) = L · 2 · h · T: causal attention, scores
and weighted sum; V · h: the LM head, on completion tokens alone. passes = 3: forward, and a backward of twice that
(with an adapter 2: no gradient of the frozen matrices). Dead rows, padding and what checkpointing computes again are
not counted, the same for both sides, so a side that computes them has the lower MFU; ``computed`` of a row tells how
many tokens it sent through the model.
"""

from __future__ import annotations

from bench_shapes import SHAPES
from bench_update_sides import GROUP, Rollouts
from memory_table import Shape, attention_flops

#: rows of one generation batch as (prompt tokens, completion tokens)
Lengths = list[tuple[int, int]]


def shape_of(name: str) -> Shape:
    """The arithmetic's view of a model of ``bench_shapes``."""
    sizes = SHAPES[name]
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return Shape(
        name, sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"],
        sizes["num_key_value_heads"] * head, sizes["vocab_size"], True,
    )  # fmt: skip


def lengths(rollouts: Rollouts, call: int) -> Lengths:
    return [(len(prompt), len(made)) for prompt, made in (rollouts.row(call, r) for r in range(rollouts.rows))]


def live(rollouts: Rollouts, call: int) -> Lengths:
    return lengths(rollouts, call)[rollouts.dead * GROUP :]


def needed_flops(shape: Shape, rows: Lengths, adapter: bool) -> float:
    total = 0.0
    for prompt, completion in rows:
        tokens = prompt + completion
        total += tokens * (2 * shape.layers * shape.layer_parameters + attention_flops(shape, tokens))
        total += completion * 2 * shape.embedding
    return (2 if adapter else 3) * total
