"""Operations that an update needs for the rows that teach something, for its model FLOPs utilization (MFU).

    needed = passes × Σ over live rows of [ T · (2 · P + a(T)) + C · 2 · V · h ]      MFU = needed / (seconds × peak)

T is the number of tokens of a row and C that of its completion, P the number of parameters of all layers, a(T) =
L · 2 · h · T causal attention (scores and weighted sum), and V · h the LM head, which completion tokens alone need.
``passes`` is 3, a forward and a backward of twice its operations; with an adapter it is 2, since frozen matrices need
no gradient. Dead rows, padding and the recomputation by checkpointing are not counted. So a side that computes them has
a lower MFU; how many tokens it computed is in the column ``computed``.
"""

from __future__ import annotations

from bench_shapes import SHAPES
from bench_update_sides import GROUP, Rollouts
from memory_table import Shape, attention_flops

#: rows of one generation batch as (prompt tokens, completion tokens)
Lengths = list[tuple[int, int]]


def shape_of(name: str) -> Shape:
    """Return the shape of a model of ``bench_shapes`` as ``memory_table`` describes it."""
    sizes = SHAPES[name]
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return Shape(
        name, sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"],
        sizes["num_key_value_heads"] * head, sizes["vocab_size"], True,
    )  # fmt: skip


def lengths(rollouts: Rollouts, call: int) -> Lengths:
    """Return the lengths of all rows in generation batch number ``call``."""
    return [(len(prompt), len(made)) for prompt, made in (rollouts.row(call, r) for r in range(rollouts.rows))]


def live(rollouts: Rollouts, call: int) -> Lengths:
    """Return the lengths of the rows of live groups in generation batch number ``call``."""
    return lengths(rollouts, call)[rollouts.dead * GROUP :]


def needed_flops(shape: Shape, rows: Lengths, adapter: bool) -> float:
    """Return the operations that an update of ``rows`` needs; ``adapter``: whether only an adapter is trained."""
    total = 0.0
    for prompt, completion in rows:
        tokens = prompt + completion
        total += tokens * (2 * shape.layers * shape.layer_parameters + attention_flops(shape, tokens))
        total += completion * 2 * shape.embedding
    return (2 if adapter else 3) * total
