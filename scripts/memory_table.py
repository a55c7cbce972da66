"""Memory and time of GRPO on Qwen2.5 models, worked out on paper: prints the tables of docs/from_laptop_to_cluster.md.

    python scripts/memory_table.py

It takes no time and needs nothing but Python. Nothing here was measured on a GPU: shapes are those of the models'
config.json, and the arithmetic stands in the functions below. `tests/unit/scripts/test_memory_table.py` checks what can
be checked on a CPU: parameter counts against transformers, and activations against what autograd keeps for a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
RANKS = 8


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen2.5 model. `key_value` is the width of all keys, key/value heads × head size; the width of all
    queries is `hidden`. `tied`: the LM head is the embedding."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of a layer: attention (q, o, k, v and the biases of q, k, v), gated MLP, two norms."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.key_value + self.hidden + 2 * self.key_value
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters, N."""
        return self.layers * self.layer_parameters + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters with which every token is multiplied: all layers and the LM head. Looking up an
        embedding costs nothing."""
        return self.layers * self.layer_parameters + self.embedding


SHAPES = (
    Shape("0.5B", 24, 896, 4864, 2 * 64, 151_936, True),
    Shape("1.5B", 28, 1536, 8960, 2 * 128, 151_936, True),
    Shape("3B", 36, 2048, 11008, 2 * 128, 151_936, True),
    Shape("7B", 28, 3584, 18944, 4 * 128, 152_064, False),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU by its vendor's data sheet: `flops` in bf16 without sparsity, per second; `bandwidth` in bytes per second;
    `memory` in bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float


GPUS = (Gpu("A100 80 GB", 312e12, 2.04e12, 80e9), Gpu("H100 80 GB", 989e12, 3.35e12, 80e9))
MFU = 0.35  # assumed share of the peak in forward and backward
BANDWIDTH_SHARE = 0.5  # assumed share of the peak bandwidth while decoding
STEP_FLOOR = 0.004  # assumed seconds that a decoding step takes however small the model: scheduling, launches, sampling


@dataclass(frozen=True)
class Workload:
    """One optimizer step of recipes/gsm8k, with the lengths assumed for it in tokens. `prompt` and `completion` are
    means; `budget` is max_completion_length."""

    rows: int = 128
    micro_batch: int = 16
    group: int = 8
    prompt: int = 120
    completion: int = 300
    longest_prompt: int = 250
    budget: int = 1024
    live_share: float = 0.4  # the exact update leaves the others out
    steps: int = 467  # one pass over 7,473 questions


WORK = Workload()


# -- memory, bytes -----------------------------------------------------------------------------------------------------


def state_bytes(shape: Shape, layout: str, ranks: int = RANKS) -> float:
    """Return the bytes on each GPU of weights, gradients, AdamW's two moments and working copies.

    With N parameters and R ranks, and float32 weights under bf16 autocast (TRL's default dtype with `bf16: true`):

    - single: 4N weights + 4N gradients + 8N AdamW + 2N bf16 copies that autocast makes for a forward
    - ddp: as single, + 4N for DDP's gradient buckets
    - zero2 (DeepSpeed in bf16): 2N weights + 2N gradients while they are reduced + 12N/R float32 weights and AdamW
    - fsdp2: 16N/R + the bf16 weights and gradients of the layer at work and of the embedding (4 bytes for each)
    - single, bf16 weights (`model_init_kwargs: {dtype: bfloat16}`): 2N weights + 2N gradients + 4N AdamW. Steps are
      coarser: small learning rates may round to nothing.
    - single, LoRA: 2N frozen bf16 weights + adapters of some 1% of N in float32 (16 bytes for each)
    """
    n = shape.parameters
    working = 4 * (shape.layer_parameters + shape.embedding * (1 if shape.tied else 2))
    return {
        "single": 18.0 * n,
        "single, bf16 weights": 8.0 * n,
        "single, LoRA": 2.0 * n + 16 * 0.01 * n,
        "ddp": 22.0 * n,
        "zero2": 4.0 * n + 12.0 * n / ranks,
        "fsdp2": 16.0 * n / ranks + working,
    }[layout]


def layer_activation_bytes(shape: Shape) -> int:
    """Return the bytes that one layer keeps of one token for the backward, under bf16 autocast over float32 weights and
    with fused attention (no T × T matrix).

    With the widths h (hidden), k (all keys) and I (MLP):

    - in float32: input and normalised value of each of two norms, 4 × 4h
    - in bf16: the norms' outputs, cast anew for each of the projections q, k, v, gate and up, 5 × 2h; q and the
      attention's output, 2 × 2h; k and v, 2 × 2k; of the MLP gate, SiLU(gate), up and their product, 4 × 2I

    Left out are 8 + 4 × heads bytes of norms and softmax.
    """
    h = shape.hidden
    k = shape.key_value
    i = shape.intermediate
    return 16 * h + 10 * h + 4 * h + 4 * k + 8 * i


def activation_bytes(shape: Shape, tokens: int, checkpointing: bool) -> int:
    """Return the bytes that all layers keep of ``tokens`` tokens for the backward. With gradient checkpointing each
    layer keeps only its float32 input (4h), and one layer at a time is recomputed."""
    layer = layer_activation_bytes(shape)
    if not checkpointing:
        return tokens * shape.layers * layer
    return tokens * (shape.layers * 4 * shape.hidden + layer)


def logits_bytes(shape: Shape, tokens: int, fused: bool) -> int:
    """Return the bytes that the LM head needs, for a vocabulary of V tokens. Plain: float32 logits, their log-softmax
    and their gradient, 12 V for each token. Fused (TRL's): the float32 sum of the head's gradient, 4 V h once, for any
    number of tokens; the tiles are small beside it."""
    return 4 * shape.embedding if fused else 12 * shape.vocabulary * tokens


def kv_bytes(shape: Shape) -> int:
    """Return the bytes of one token in the KV cache, in bf16: 2 (K and V) × layers × key/value width × 2 bytes."""
    return 2 * shape.layers * shape.key_value * 2


# -- time, seconds -----------------------------------------------------------------------------------------------------


def attention_flops(shape: Shape, context: float) -> float:
    """Return the operations of attention for one token in a forward, over all layers: scores and weighted sum, 2 × 2 h
    × context, halved by the causal mask."""
    return shape.layers * 2 * shape.hidden * context


def update_seconds(shape: Shape, gpu: Gpu, work: Workload, *, exact: bool, ranks: int = 1) -> float:
    """Return the seconds of the update of one optimizer step: for each token 2N operations of the forward, 4N of the
    backward and 2N of the recomputation by checkpointing, and those of attention.

    ``exact``: our update computes live rows only, without padding. Otherwise stock TRL's, which computes all rows,
    padded to the longest prompt and completion of the batch.
    """
    if exact:
        length = work.prompt + work.completion
        tokens = work.rows * work.live_share * length
    else:
        length = work.longest_prompt + work.budget
        tokens = work.rows * length
    flops = tokens * 4 * (2 * shape.matmul_parameters + attention_flops(shape, length))
    return flops / (MFU * gpu.flops) / ranks


def generation_seconds(shape: Shape, gpu: Gpu, work: Workload, ranks: int = 1) -> float:
    """Return the seconds of generation of one optimizer step: the prefill of each prompt, once for its group, and
    decoding until the longest completion ends.

    There are `budget` decoding steps. Each takes the longest of three: reading all weights in bf16 and the KV cache of
    the rows that are still going (on average the share `completion / budget` of all rows), at the memory's bandwidth;
    computing 2N operations for each of these rows; the scheduler's own time, ``STEP_FLOOR``.
    """
    prefill = 2 * shape.matmul_parameters * work.prompt * work.rows / work.group / (MFU * gpu.flops)
    rows = work.rows / ranks
    going = rows * work.completion / work.budget
    read = 2 * shape.parameters + going * kv_bytes(shape) * (work.prompt + work.completion / 2)
    compute = going * 2 * shape.matmul_parameters / (MFU * gpu.flops)
    decode = max(read / (BANDWIDTH_SHARE * gpu.bandwidth), compute, STEP_FLOOR)
    return prefill / ranks + work.budget * decode


# -- tables ------------------------------------------------------------------------------------------------------------


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def states_table() -> str:
    layouts = ("single", "single, bf16 weights", "single, LoRA", "ddp", "zero2", "fsdp2")
    head = ("model", "parameters", *(f"{name}, 8 GPUs" if name in ("zero2", "fsdp2") else name for name in layouts))
    return table(
        head,
        [[s.name, f"{s.parameters:,}", *(f"{state_bytes(s, layout) / GB:.1f}" for layout in layouts)] for s in SHAPES],
    )


def tokens_table() -> str:
    tokens = WORK.micro_batch * (WORK.longest_prompt + WORK.budget)
    head = (
        "model", "activations", "with checkpointing", "logits, plain", "LM head, fused", "KV cache, KB a token",
        "KV, 128 rows × 1,274 tokens",
    )  # fmt: skip
    return table(
        head,
        [
            [
                s.name,
                f"{activation_bytes(s, tokens, False) / GB:.1f}",
                f"{activation_bytes(s, tokens, True) / GB:.1f}",
                f"{logits_bytes(s, tokens, False) / GB:.1f}",
                f"{logits_bytes(s, tokens, True) / GB:.1f}",
                f"{kv_bytes(s) / 1e3:.1f}",
                f"{kv_bytes(s) * WORK.rows * (WORK.longest_prompt + WORK.budget) / GB:.1f}",
            ]
            for s in SHAPES
        ],
    )


def peak_bytes(shape: Shape, layout: str, ranks: int, checkpointing: bool = True) -> float:
    """Return the peak of memory on each GPU, in bytes: state, activations of one micro-batch of the recipe, fused LM
    head, and the bf16 weights and cache of an engine in the same process."""
    tokens = WORK.micro_batch * (WORK.longest_prompt + WORK.budget)
    update = activation_bytes(shape, tokens, checkpointing) + logits_bytes(shape, tokens, fused=True)
    cache = kv_bytes(shape) * WORK.rows // ranks * (WORK.longest_prompt + WORK.budget)
    return state_bytes(shape, layout, ranks) + update + 2 * shape.parameters + cache


def fits_table() -> str:
    layouts = (("single", 1), ("ddp", RANKS), ("zero2", RANKS), ("fsdp2", RANKS))
    rows = []
    for s in SHAPES:
        peaks = [peak_bytes(s, layout, ranks) / GB for layout, ranks in layouts]
        rows.append([s.name, *(f"{peak:.0f}" if peak < 72 else f"{peak:.0f} ✗" for peak in peaks)])
    return table(("model", "single GPU", "ddp, 8 GPUs", "zero2, 8 GPUs", "fsdp2, 8 GPUs"), rows)


def time_table() -> str:
    rows = []
    for gpu in GPUS:
        for s in SHAPES:
            exact = update_seconds(s, gpu, WORK, exact=True)
            stock = update_seconds(s, gpu, WORK, exact=False)
            generation = generation_seconds(s, gpu, WORK)
            hours = WORK.steps * (generation + exact) / 3600
            eight = WORK.steps * (
                generation_seconds(s, gpu, WORK, RANKS) + update_seconds(s, gpu, WORK, exact=True, ranks=RANKS)
            )
            cells = (generation, exact, stock, hours, eight / 3600)
            rows.append([gpu.name, s.name, *(f"{cell:.1f}" for cell in cells)])
    head = ("generation, s", "update, s", "update of stock TRL, s", "one epoch, 1 GPU, h", "one epoch, 8 GPUs, h")
    return table(("GPU", "model", *head), rows)


def main() -> None:
    print("States, GB a GPU\n")
    print(states_table())
    print("\nOne micro-batch of the recipe (16 rows × (250 + 1,024) tokens = 20,384 tokens), GB a GPU\n")
    print(tokens_table())
    print("\nPeak with gradient checkpointing and a colocated engine, GB a GPU (✗: more than 72 of 80 GB)\n")
    print(fits_table())
    print("\nTime of one optimizer step (128 rows) and of one epoch of GSM8K (467 steps)\n")
    print(time_table())


if __name__ == "__main__":
    main()
