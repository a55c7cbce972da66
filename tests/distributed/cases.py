"""The trainings that are run in worlds of 1, 2 and 4 processes, and how their rows are spread.

Every case has the same rows in every optimizer step in all its worlds; what differs is which rank holds them.
``SPLIT``: 3 groups of 4 in 12 rows, so that on 2 ranks (6 rows each) the second group lies on both, and on 4 ranks (3
rows each) no rank holds a whole group. ``WHOLE``: 4 groups in 16 rows, whole groups on every rank. ``SCATTERED``: one
group a step, of which each of 4 ranks holds a single row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WORLDS = (1, 2, 4)
TWO = (1, 2)
BESIDE_STOCK = (2,)
"""Compared with stock TRL in the same world."""


@dataclass(frozen=True)
class Layout:
    """Rows a rank and micro-batch, and micro-batches an optimizer step; the same rows a step in all worlds."""

    rows: dict[int, int]
    accumulation: int

    def arguments(self, processes: int) -> dict[str, int]:
        return {"per_device_train_batch_size": self.rows[processes], "gradient_accumulation_steps": self.accumulation}


SPLIT = Layout({1: 4, 2: 2, 4: 1}, accumulation=3)
WHOLE = Layout({1: 8, 2: 4, 4: 2}, accumulation=2)
SCATTERED = Layout({1: 4, 2: 2, 4: 1}, accumulation=1)


@dataclass(frozen=True)
class Case:
    """One training, in each of ``worlds``.

    reward: ``mixed``: a third of the groups dead; ``sparse``: three quarters of them, so that ranks and whole steps are
    dead; ``group``: a correctness reward and group rewards on top of it. stock: stock TRL's trainer instead of ours.
    adapter: LoRA alone is trained.
    per_world: which rows make a step differs by world (TRL shuffles a rank's rows before it cuts them into steps).
    """

    name: str
    layout: Layout
    args: dict[str, Any]
    reward: str = "mixed"
    stock: bool = False
    exact: bool = True
    per_world: bool = False
    adapter: bool = False
    worlds: tuple[int, ...] = WORLDS

    def spec(self, processes: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "args": {**self.args, **self.layout.arguments(processes)},
            "reward": self.reward,
            "stock": self.stock,
            "adapter": self.adapter,
        }


OBJECTIVES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
CHOOSES = {"name": "dapo", "surrogate": "parity.test_silent_rows:TopEntropy"}
TWO_STEPS = {"steps_per_generation": 6}
STEERED = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.01, "entropy_target": 9.0}
#: objective (and TRL's loss), and what stands beside it: a bonus is a mean of a rank's micro-batch, so worlds differ
TRLS: dict[str, dict[str, Any]] = {
    "grpo-steered": {
        **STEERED,
        "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 1e-3,
        "num_iterations": 2,
        "beta": 0.04,
    },
    "dapo-bonus": {"entropy_coef": 0.05},
    "luspo": {"importance_sampling_level": "sequence", "learning_rate": 0.01, "num_iterations": 2},
    "vespo": {"learning_rate": 0.02, "num_iterations": 2},
}
CASES = [
    *(Case(name, SPLIT, {"objective": name}) for name in ("dr_grpo", "gspo")),
    *(Case(name, SPLIT, {"objective": name}, worlds=TWO) for name in ("grpo", "dapo")),
    Case("cispo", SPLIT, {"objective": "cispo", "epsilon_high": 3.0}, worlds=TWO),
    Case(
        "prompt_mean",
        SPLIT,
        {"objective": {"name": "dr_grpo", "aggregation": "prompt_mean"}, "mask_truncated_completions": True},
        worlds=TWO,
    ),
    Case("dr_grpo-sparse", SPLIT, {"objective": "dr_grpo", "weight_decay": 0.01}, reward="sparse"),
    Case("dapo-sparse", SPLIT, {"objective": "dapo", "weight_decay": 0.01}, reward="sparse", worlds=TWO),
    Case("dr_grpo-scattered", SCATTERED, {"objective": "dr_grpo", "max_steps": 6}),
    *(  # one micro-batch a step, the same rows in every world
        Case(name, SCATTERED, {"objective": {"name": name, **knobs}, "max_steps": 6, "num_iterations": 2}, worlds=TWO)
        for name, knobs in (("kl_cov", {"share": 0.1}), ("clip_cov", {"share": 0.1, "cov_low": 0.05, "cov_high": 50.0}))
    ),
    Case("dr_grpo-off", SPLIT, {"objective": "dr_grpo", "update": "off"}, exact=False),
    Case("dapo-twice-beta", SPLIT, {"objective": "dapo", "beta": 0.04, "num_iterations": 2}, worlds=TWO),
    *(
        Case(
            f"silent-rows-{how}",
            SPLIT,
            {"objective": "gspo", "epsilon": 1e-4, "num_iterations": 2, "update": {"silent_rows": how}},
            worlds=TWO,
        )
        for how in ("skip", "keep")
    ),
    Case("trls-chosen-tokens", SPLIT, {"objective": CHOOSES, "num_iterations": 2}, worlds=BESIDE_STOCK, per_world=True),
    Case(
        "trls-chosen-tokens-stock",
        SPLIT,
        {"loss_type": "dapo", "top_entropy_quantile": 0.3, "num_iterations": 2},
        worlds=BESIDE_STOCK,
        stock=True,
    ),
    Case("small-bins", SPLIT, {"objective": "dr_grpo", "update": {"max_tokens": 40}}, worlds=TWO),
    Case(
        "shared-prompts-sparse",
        SCATTERED,
        {"objective": "dr_grpo", "max_steps": 6, "update": {"max_tokens": 2000, "share_prompts": "on"}},
        reward="sparse",
        worlds=TWO,
    ),
    Case(
        "shared-prompts",
        SPLIT,
        {"objective": "dr_grpo", "update": {"max_tokens": 2000, "share_prompts": "on"}},
        worlds=TWO,
    ),
    Case(
        "shared-prompts-twice-beta",
        SCATTERED,
        {"objective": "dapo", "beta": 0.04, "num_iterations": 2, "gradient_checkpointing": True}
        | {"update": {"share_prompts": "on"}, "max_steps": 6},
    ),
    Case(
        "shared-prompts-adapter",
        SPLIT,
        {"objective": "dr_grpo", "update": {"share_prompts": "on"}},
        adapter=True,
        worlds=TWO,
    ),
    Case(
        "clipped-checkpointed",
        SPLIT,
        {"objective": "dapo", "max_grad_norm": 0.1, "gradient_checkpointing": True},
        worlds=TWO,
    ),
    *(
        Case(
            f"mixture-{update.get('share_prompts', 'auto')}",
            SPLIT,
            {"objective": "dapo", "update": update, "beta": 0.01}
            | {"tasks": {"add": {"weight": 2, "denominators": "own"}, "sort": {"objective": "gspo"}}},
            worlds=TWO,
        )
        for update in ({"share_prompts": "on"}, {"share_prompts": "off", "max_tokens": 40})
    ),
    Case("truncated-masked", SPLIT, {"objective": "grpo", "mask_truncated_completions": True}, worlds=TWO),
    *(
        Case(
            f"two-steps-a-generation-{update}",
            SPLIT,
            {"objective": "dr_grpo", **TWO_STEPS, "update": update},
            exact=update == "exact",
            per_world=True,
            worlds=TWO if update == "exact" else BESIDE_STOCK,
        )
        for update in ("exact", "off")
    ),
    Case(
        "two-steps-a-generation-stock",
        SPLIT,
        {**TWO_STEPS, "loss_type": "dr_grpo", "scale_rewards": "none"},
        stock=True,
        worlds=BESIDE_STOCK,
    ),
    Case("batch-normalised", SPLIT, {"objective": "dr_grpo", "correction": "batch_normalised"}, worlds=TWO),
    Case(
        "rejected-by-sequence",
        SPLIT,
        {"objective": "dapo", "correction": {"name": "geometric_rejection", "low": 0.9, "high": 1.1}}
        | {"num_iterations": 2},
        worlds=TWO,
    ),
    Case("trl-settings", SPLIT, {"loss_type": "grpo"}, exact=False, worlds=TWO),
    *(
        Case(
            f"trls-{name}{kind}", SPLIT, {**own, **changes}, stock=kind == "-stock", per_world=True, worlds=BESIDE_STOCK
        )
        for name, changes in TRLS.items()
        for kind, own in (("", {"objective": name.split("-")[0]}), ("-stock", {"loss_type": name.split("-")[0]}))
    ),
    Case("group-split", SPLIT, {"objective": "dr_grpo"}, reward="group"),
    Case("group-scattered", SCATTERED, {"objective": "dr_grpo"}, reward="group"),
    Case("stock-group-split", SPLIT, {"loss_type": "dr_grpo"}, reward="group", stock=True, worlds=TWO),
    Case("stock-group-whole", WHOLE, {"loss_type": "dr_grpo"}, reward="group", stock=True, worlds=TWO),
]
TRAINED = [case for case in CASES if not case.stock and not case.per_world]
#: run with sharded parameters, too
SHARDED = [
    case
    for case in TRAINED
    if case.name
    in (
        "dr_grpo",
        "gspo",
        "cispo",
        "dr_grpo-sparse",
        "small-bins",
        "clipped-checkpointed",
        "dr_grpo-off",
        "dapo-twice-beta",
        "shared-prompts",
        "shared-prompts-twice-beta",
        "group-split",
    )
]
