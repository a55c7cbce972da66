"""Conflicts between the engine's sampling distribution and other settings: rows of ``conflicts.BEFORE``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_lab.trainer.settings.limits import MOST_KEPT, kept_by_engine

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "extra_args": (None, {}),
    "vllm_xargs": (None, {}),
    "vllm_structured_outputs_regex": (None,),
}
"""Settings that change the distribution that the engine samples from → the values by which they do not."""
CUTS = ("top_p", "top_k", "min_p")
"""Those of them that leave tokens out of the distribution. With a ``top_k`` of at most ``MOST_KEPT`` the trainer
computes its log-probs, too, among the tokens that stayed (``generation.kept_sets``)."""
LOWEST = 0.01
"""Lowest temperature. vLLM raises a lower one (other than 0, greedy) to this one without an error."""
HIGHEST = 2.0
"""Highest temperature that vLLM takes."""


def _cut(case: Any) -> tuple[str, Any, Any] | None:
    """Return a setting that changes the engine's distribution although the sampler correction compares its log-probs
    with the trainer's: (its name, its value, a value without effect). None if there is no such setting.

    The engine's log-probs are of the distribution that it sampled from, truncated and renormalised; the trainer's are
    not. So the ratio would be below 1 at every token even on-policy. See ``docs/algorithms/sampler_correction.md``.
    """
    if not case.corrects:
        return None
    extra = case.args.generation_kwargs or {}
    exact: tuple[str, ...] = ()
    if kept_by_engine(case.args):
        exact = CUTS
    for name, allowed in NEUTRAL.items():
        if name in exact and name not in extra:
            continue
        setting = name
        value = getattr(case.args, name, None)
        if name in extra:
            setting = f"generation_kwargs.{name}"
            value = extra[name]
        if value not in allowed:
            return setting, value, allowed[-1]
    return None


BESIDE_KEPT: dict[str, Callable[[Any], Any]] = {
    "vllm_mode: server": lambda c: c.args.vllm_mode == "server",
    "update: off": lambda c: c.ours.update.is_off,
    "beta": lambda c: c.args.beta != 0,
    "kl": lambda c: c.ours.kl is not None,
    "eval_strategy": lambda c: str(getattr(c.args.eval_strategy, "value", c.args.eval_strategy)) != "no",
    "update.dead_groups: resample": lambda c: c.ours.update.dead_groups == "resample",
    "rollout.thinking_budget": lambda c: c.thinks,
    "rollout.cut_after": lambda c: c.ours.rollout.cut_after,
    "rollout.turns": lambda c: c.ours.rollout.turns is not None,
    "torch_compile": lambda c: c.args.torch_compile,
}
"""Settings that do not combine with log-probs among the kept tokens → whether a case has them."""

#: Rows (condition on a ``conflicts.Case``, message), as ``conflicts.Conflict`` describes them.
OF_SAMPLING: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda c: c.args.use_vllm and not LOWEST <= c.args.temperature <= HIGHEST,
        f"`temperature` is {{args.temperature!r}}: vLLM samples at {LOWEST} to {HIGHEST}. Below it takes {LOWEST} "
        "instead, while the trainer computes its log-probs at the value written; above it refuses",
    ),
    (
        _cut,
        "`{found[0]}`={found[1]!r} does not combine with `vllm_importance_sampling_correction`: the engine's log-probs "
        "are renormalised over the tokens that it keeps, the trainer's are not, so the ratio would be below 1 even "
        "where both agree. Leave `{found[0]}` at {found[2]!r}, or set `vllm_importance_sampling_correction: false`; "
        f"with `objective`, `top_p` and `min_p` are exact beside a `top_k` of 1 to {MOST_KEPT}",
    ),
    (
        lambda c: next((name for name, holds in BESIDE_KEPT.items() if kept_by_engine(c.args) and holds(c)), None),
        "`top_k`={args.top_k} and `{found}` do not combine: log-probs are among the tokens that the engine kept, which "
        "is done in the exact update of completions of one turn, of an engine in this process, without a reference. "
        "Leave one of them out, or set `vllm_importance_sampling_correction: false`",
    ),
)
