"""Is it working? One row a thing that goes wrong: what is seen in the metrics, the sentence, the settings to look at.

Thresholds have their source beside them; "ours" where the sources leave the value open. They were tried on runs of this
repository that learn (quick start, two seeds; process supervision) and that do not (random weights, no right answer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.diagnostics.windows import (
    PERSISTENCE,
    History,
    all_alike,
    at_start,
    has_critic,
    last_steps,
    lasting,
    no_completion_scored,
    not_zero,
    number,
    recent,
    rise_in_errors,
    step_of,
    values,
)

TRUNCATED = 0.20
"""Share of completions cut off. The trainer's own warning has the same; 256 tokens cut off 50–80% of small models'
GSM8K answers (trl #6263)."""

ENTROPY_GONE, ENTROPY_LEFT = 0.01, 0.1
"""Nats per token, and share of the first windows' entropy, below both of which there is hardly anything left to
explore. Ours: the quick start goes healthily from 0.17 to 0.05; the cause that is named is DAPO's (arXiv 2503.14476,
clip-higher against collapse)."""

ENTROPY_TIMES, ENTROPY_MORE = 2.0, 0.5
"""Entropy exploding: as many times the first windows' and as many nats per token more. Ours: e^0.5 is 1.6 times the
choices a token."""

FLAT_STEPS, FLAT_WINDOWS, NOISE = 100, 10, 2.0
"""Reward flat: over as many optimizer steps (published runs need about 100: simpleRL-Zoo's 7B) and at least as many
windows, the halves differ by less than 2 standard errors (95%)."""

FALLEN = 5.0
"""Reward falling: over the same steps, the later half is as many standard errors lower. Ours: more than NOISE, since it
is asked at every window."""

LENGTH_TIMES, LENGTH_WINDOWS, LENGTH_GAIN = 1.5, 30, 0.5
"""Length running away: as many times the first windows' length for as many windows, and reward did not rise by as many
standard errors. Ours: on R1-Zero's curve, where length and reward rise together, length is often there first, and few
windows do not tell a slow rise from noise. That length alone grows, and of wrong answers, is the length bias of arXiv
2503.20783, App. C."""

CEILING = 0.95
"""Mean of every reward function at which a flat reward is no warning: most of this package's lie in 0 to 1. Ours."""

KL_HIGH = 1.0
"""Nats per token. Ours: at 1 the policy gives its own tokens e times the reference's probability, on average."""

DRIFT = 0.1
"""Nats per token between engine and trainer: the tolerance of the sync proof in bfloat16
(``grpo_lab.engines.weights.proof``)."""

CLIPPED = 0.2
"""Share of loss tokens held back by the clip. Ours: PPO and GRPO runs of the field log some hundredths."""

UNSCORABLE = 0.2
"""Share of completions that the correctness reward could not judge. Ours."""

ZERO_LOSS = 1e-4
"""A loss below it prints as 0 with four digits."""


@dataclass(frozen=True)
class Facts:
    """What of the settings the rules must know.

    Args:
        updates: optimizer steps on one generation batch; None where it is not known.
        last_step: ``max_steps`` of the run; 0 where it is not known.
        moves: whether some parameter group's learning rate is not 0 now; None where it is not known.
    """

    updates: float | None = None
    last_step: int = 0
    moves: bool | None = None


Seen = Callable[[History, Facts], str | None]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        name: what it looks for.
        seen: the sentence, with what was seen, where the history shows it; else None.
        settings: where to look.
        healthy: it explains something that looks wrong and is not.
    """

    name: str
    seen: Seen
    settings: str
    healthy: bool = False


def not_finite(history: History, facts: Facts) -> str | None:
    """A reward of NaN says that a window scored nothing: a row of its own. Steps that the guard left out lost
    nothing."""
    if number(history[-1], "guard/left_out"):
        why = [kind for kind in not_zero(history[-1], "guard/") if kind != "left_out"]
        return f"{' and '.join(why)} not finite: such steps were left out, and the weights are as before them"
    seen = {name: number(history[-1], name) or 0.0 for name in ("loss", "grad_norm", "kl", "entropy", "reward")}
    found = [n for n, value in seen.items() if math.isinf(value) or (math.isnan(value) and n != "reward")]
    return f"{' and '.join(found)} not finite: the weights may be lost" if found else None


def no_learning_rate(history: History, facts: Facts) -> str | None:
    """Twice in a row: a warm-up begins at 0. The last step of a schedule may end there. What is logged is the first
    group's."""
    rates = [number(window, "learning_rate") for window in history[-2:]]
    ends = facts.last_step and step_of(history[-1]) >= facts.last_step
    if rates != [0.0, 0.0] or ends or facts.moves:
        return None
    return "the learning rate of the first parameter group is 0" + ("" if facts.moves is None else ": nothing moves")


def _dead(history: History) -> bool:
    """With a critic a group of equal rewards teaches like any other."""
    return all_alike(history) and not has_critic(history)


def nothing_scored(history: History, facts: Facts) -> str | None:
    if not no_completion_scored(history):
        return None
    return "no completion was scored, every reward gave None or NaN, so nothing is learned"


def all_dead(history: History, facts: Facts) -> str | None:
    """Over three windows; before that only where nothing has ever been rewarded: no gradient can come out of such a
    start."""
    if not _dead(history) or no_completion_scored(history):
        return None
    reward = recent(history, "reward")
    if len(history) < PERSISTENCE and any(values(history, "reward") or [1.0]):
        return None
    cause = "too hard" if reward == 0 else "too hard, too easy"
    level = "" if reward is None else f" (mean reward {reward:.3g}: {cause}, or the reward cannot read the answers)"
    return f"all groups are dead, every completion of a group got the same reward{level}, so nothing is learned"


def no_gradient(history: History, facts: Facts) -> str | None:
    norms = values(history[-PERSISTENCE:], "grad_norm")
    if len(norms) < PERSISTENCE or max(norms) > 0 or _dead(history) or no_completion_scored(history):
        return None
    alive = "completions were scored" if has_critic(history) else "groups are alive"
    return f"the gradient is 0 though {alive}: no token carries loss, or no weight is trained"


def drifting(history: History, facts: Facts) -> str | None:
    gap = recent(history, "rollout/sync_gap")
    difference = lasting(history, "sampling/sampling_logp_difference/mean")
    worst = max(gap or 0.0, difference or 0.0)
    return (
        f"sampler and trainer differ by {worst:.2g} nats a token: completions are not the policy's"
        if worst > DRIFT
        else None
    )


def truncated(history: History, facts: Facts) -> str | None:
    share = lasting(history, "completions/truncated_share", "completions/clipped_ratio")
    if share is None or share <= TRUNCATED:
        return None
    judged = lasting(history, "rewards/unscorable_share") is not None
    return f"{share:.0%} of the completions are cut off{' and count as wrong' if judged else ''}"


def unscorable(history: History, facts: Facts) -> str | None:
    share = lasting(history, "rewards/unscorable_share")
    return None if share is None or share <= UNSCORABLE else f"{share:.0%} of the completions cannot be scored"


def kl_high(history: History, facts: Facts) -> str | None:
    kl = lasting(history, "kl")
    return (
        None if kl is None or kl <= KL_HIGH else f"KL to the reference is {kl:.2g} nats a token: the policy runs away"
    )


def clipped(history: History, facts: Facts) -> str | None:
    share = lasting(history, "clip_ratio/region_mean", "cispo_clip_ratio")
    if share is None or (share := share + (lasting(history, "clip_ratio/delta_mean") or 0.0)) <= CLIPPED:
        return None
    return f"{share:.0%} of the tokens are clipped: updates are too large"


def entropy_gone(history: History, facts: Facts) -> str | None:
    start, now = at_start(history, "entropy"), recent(history, "entropy")
    if start is None or now is None or now >= min(ENTROPY_GONE, ENTROPY_LEFT * start):
        return None
    return f"entropy collapsed from {start:.2g} to {now:.2g} nats a token: samples hardly differ"


def entropy_explodes(history: History, facts: Facts) -> str | None:
    start, now = at_start(history, "entropy"), recent(history, "entropy")
    if start is None or now is None or now <= max(ENTROPY_TIMES * start, start + ENTROPY_MORE):
        return None
    return f"entropy grew from {start:.2g} to {now:.2g} nats a token: the policy turns into noise"


def length_runs_away(history: History, facts: Facts) -> str | None:
    start, now = (seen(history, "completions/mean_length") for seen in (at_start, recent))
    before = recent(history[: 1 - LENGTH_WINDOWS], "completions/mean_length")
    if len(history) <= LENGTH_WINDOWS or start is None or now is None or before is None:
        return None
    rewards = values(history, "reward")
    gained = len(rewards) >= 4 and rise_in_errors(rewards) > LENGTH_GAIN
    if min(now, before) <= LENGTH_TIMES * start or gained:
        return None
    return f"length grew from {start:.0f} to {now:.0f} tokens and reward did not"


def _late(history: History) -> tuple[list[float], int]:
    """The rewards that ``reward_falls`` and ``reward_flat`` look at, and how many steps they span; nothing where they
    are too few."""
    rows = last_steps(history, FLAT_STEPS, FLAT_WINDOWS)
    series = values(rows, "reward")
    return (series, step_of(rows[-1]) - step_of(rows[0])) if len(series) >= FLAT_WINDOWS else ([], 0)


def reward_falls(history: History, facts: Facts) -> str | None:
    series, steps = _late(history)
    if not series or _dead(history) or rise_in_errors(series) > -FALLEN:
        return None
    half = len(series) // 2
    early, late = sum(series[:half]) / half, sum(series[half:]) / (len(series) - half)
    why = "expected where problems get harder or a penalty sets in"
    return f"reward fell from {early:.3g} to {late:.3g} within {steps} steps ({why})"


def _flat_at(history: History, facts: Facts) -> tuple[float, int] | None:
    """Level and steps of a flat reward; None where it moves, and where all groups are dead: that has a row of its
    own."""
    series, steps = _late(history)
    if not series or _dead(history) or abs(rise_in_errors(series)) >= NOISE:
        return None
    return sum(series) / len(series), steps


def _at_ceiling(history: History) -> bool:
    """Whether every reward function, or the reward where none is logged by name, has a mean of 0.95 to 1 in the last
    windows."""
    names = [name for name in history[-1] if name.startswith("rewards/") and name.endswith("/mean")] or ["reward"]
    levels = [recent(history, name) for name in names]
    return all(level is not None and CEILING <= level <= 1 for level in levels)


def reward_flat(history: History, facts: Facts) -> str | None:
    found = _flat_at(history, facts)
    if found is None or _at_ceiling(history):
        return None
    return f"reward has been flat at {found[0]:.3g} for {found[1]} steps (fine if that is all there is to gain)"


def reward_full(history: History, facts: Facts) -> str | None:
    found = _flat_at(history, facts)
    if found is None or not _at_ceiling(history):
        return None
    return f"reward has been {found[0]:.3g} for {found[1]} steps: where 1 is the most, there is hardly more to gain"


def zero_loss(history: History, facts: Facts) -> str | None:
    loss, norm = number(history[-1], "loss"), number(history[-1], "grad_norm")
    once = facts.updates is not None and facts.updates <= 1
    if loss is None or not abs(loss) < ZERO_LOSS or not norm or not once or not math.isfinite(norm):
        return None
    return "loss 0 is right: centred advantages sum to 0 at the one update a batch; watch the reward"


RULES: tuple[Rule, ...] = (
    Rule("non-finite", not_finite, "learning_rate, max_grad_norm, bf16/fp16, the rewards"),
    Rule("learning rate 0", no_learning_rate, "learning_rate, lr_scheduler_type, warmup_steps"),
    Rule("nothing scored", nothing_scored, "rewards, the columns and the answer format that they read"),
    Rule("all groups dead", all_dead, "rewards, data (difficulty), num_generations, temperature, update.dead_groups"),
    Rule("no gradient", no_gradient, "mask_truncated_completions, max_completion_length, frozen weights (peft_config)"),
    Rule("sampler drifts", drifting, "vllm_importance_sampling_correction, dtype/bf16, rollout.verify_every"),
    Rule("truncation", truncated, "max_completion_length, the prompt, mask_truncated_completions"),
    Rule("unscorable", unscorable, "the gold answers, rewards (mode), the template's answer format"),
    Rule("KL runs away", kl_high, "beta, learning_rate, sync_ref_model"),
    Rule("clip share", clipped, "learning_rate, num_iterations, steps_per_generation, epsilon"),
    Rule("entropy collapses", entropy_gone, "epsilon_high, temperature, learning_rate, beta"),
    Rule("entropy explodes", entropy_explodes, "learning_rate, temperature, entropy_coef, beta"),
    Rule(
        "length runs away",
        length_runs_away,
        "objective (dr_grpo has no length bias), rewards (soft_overlong, kimi_length)",
    ),
    Rule("reward falls", reward_falls, "learning_rate, beta, data (difficulty), the rewards and their schedules"),
    Rule("reward flat", reward_flat, "learning_rate, data (difficulty), num_generations, temperature"),
    Rule("reward full", reward_full, "data (harder problems), max_steps", healthy=True),
    Rule("loss 0", zero_loss, "none", healthy=True),
)
"""Most serious first."""
