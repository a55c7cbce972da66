"""Rules of ``diagnose``: for each thing that goes wrong, its sign in the metrics, a sentence, settings to look at.

Thresholds have their source beside them; "ours" where the sources leave the value open. They were tried on runs of this
repository that learn (quick start, two seeds; process supervision) and that do not (random weights, no right answer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

#: One logged row: metric → number (other values are not looked at), with ``step``, the optimizer step.
Window = Mapping[str, object]

#: Windows of training, oldest first.
History = Sequence[Window]

#: Windows that a rule averages: one window alone is a few groups, and one bad batch is no fault of the run. Ours.
PERSISTENCE = 3
#: Share of completions cut off: the trainer's own warning; 256 tokens cut 50–80% of small models' GSM8K (trl #6263).
TRUNCATED = 0.20
#: Nats per token, and share of the first windows' entropy, below both of which hardly anything is left to explore. Ours
#: (the quick start goes healthily from 0.17 to 0.05); the cause is DAPO's (arXiv 2503.14476, clip-higher).
ENTROPY_GONE, ENTROPY_LEFT = 0.01, 0.1
#: Entropy exploding: as many times the first windows' and as many nats per token more. Ours.
ENTROPY_TIMES, ENTROPY_MORE = 2.0, 0.5
#: Reward flat: over as many optimizer steps (published runs need about 100: simpleRL-Zoo's 7B) and at least as many
#: windows, the halves differ by less than 2 standard errors (95%).
FLAT_STEPS = 100
FLAT_WINDOWS = 10
NOISE = 2.0
#: Reward falling: the later half is as many standard errors lower. Ours: more than NOISE, asked at every window.
FALLEN = 5.0
#: Length running away: as many times the first windows' length for as many windows, and reward did not rise by as many
#: standard errors. Ours: on R1-Zero's curve, where both rise, length is often there first. That length alone grows, and
#: of wrong answers, is the length bias of arXiv 2503.20783, App. C.
LENGTH_TIMES = 1.5
LENGTH_WINDOWS = 30
LENGTH_GAIN = 0.5
#: Mean of every reward function at which a flat reward is no warning: most of this package's lie in 0 to 1. Ours.
CEILING = 0.95
#: Nats per token. Ours: at 1 the policy gives its own tokens e times the reference's probability, on average.
KL_HIGH = 1.0
#: Nats per token between engine and trainer: the sync proof's tolerance in bfloat16 (``engines.weights.proof``).
DRIFT = 0.1
#: Share of loss tokens held back by the clip. Ours: PPO and GRPO runs of the field log some hundredths.
CLIPPED = 0.2
#: Share of completions that the correctness reward could not judge. Ours.
UNSCORABLE = 0.2
#: A loss below it prints as 0 with four digits.
ZERO_LOSS = 1e-4


@dataclass(frozen=True)
class Facts:
    """Facts about the run that its metrics do not hold and the rules need; an unknown one is None, or 0."""

    updates: float | None = None  # optimizer steps on one generation batch
    last_step: int = 0  # ``max_steps`` of the run
    own_loss: bool = False  # a team's own loss, whose value says nothing to these rules
    moves: bool | None = None  # whether some parameter group's learning rate is not 0 now
    success: float | None = None  # smallest reward of a success, with a rule that asks for successes (`pass_at_k`)


Seen = Callable[[History, Facts], str | None]


@dataclass(frozen=True)
class Rule:
    """A function that looks for one fault in the windows of a run, with what a diagnosis says of it."""

    name: str
    seen: Seen  # returns a sentence, with the values seen, if the windows show the fault; else None
    settings: str  # the settings to look at
    healthy: bool = False  # whether it explains something that looks wrong and is not


#: Most serious first: in the order of this file.
RULES: list[Rule] = []


def rule(name: str, settings: str, healthy: bool = False) -> Callable[[Seen], Seen]:
    """Return a decorator that adds a function to ``RULES``, as a ``Rule`` with these fields."""

    def listed(seen: Seen) -> Seen:
        RULES.append(Rule(name, seen, settings, healthy))
        return seen

    return listed


@rule("non-finite", "learning_rate, max_grad_norm, bf16/fp16, the rewards")
def not_finite(history: History, facts: Facts) -> str | None:
    """Report a loss, gradient, KL or entropy that is NaN or infinite, or an infinite reward. A reward of NaN only means
    that nothing was scored, which another rule reports."""
    last = history[-1]
    if number(last, "guard/left_out"):
        why = [name[6:] for name in last if name.startswith("guard/") and number(last, name)]
        said = " and ".join(kind for kind in why if kind != "left_out")
        return f"{said} not finite: such steps were left out, and the weights are as before them"
    seen = {name: number(last, name) or 0.0 for name in ("loss", "grad_norm", "kl", "entropy", "reward")}
    found = [n for n, value in seen.items() if math.isinf(value) or (math.isnan(value) and n != "reward")]
    if found:
        return f"{' and '.join(found)} not finite: the weights may be lost"
    return None


@rule("learning rate 0", "learning_rate, lr_scheduler_type, warmup_steps")
def no_learning_rate(history: History, facts: Facts) -> str | None:
    """Report a learning rate of 0 in two windows in a row, before the last step. One window may have it: a warm-up
    begins at 0. The logged rate is that of the first parameter group."""
    rates = [number(window, "learning_rate") for window in history[-2:]]
    ends = facts.last_step and step_of(history[-1]) >= facts.last_step
    if rates != [0.0, 0.0] or ends or facts.moves:
        return None
    return "the learning rate of the first parameter group is 0" + ("" if facts.moves is None else ": nothing moves")


@rule("nothing scored", "rewards, the columns and the answer format that they read")
def nothing_scored(history: History, facts: Facts) -> str | None:
    unscored = no_completion_scored(history)
    if unscored:
        return "no completion was scored, every reward gave None or NaN, so nothing is learned"
    return None


@rule(
    "all groups dead", "rewards and their weights, data (difficulty), num_generations, temperature, update.dead_groups"
)
def all_dead(history: History, facts: Facts) -> str | None:
    """Report that all groups are dead, so that there is no gradient: over three windows, or after fewer if no reward
    was ever other than 0."""
    if not _dead(history) or no_completion_scored(history):
        return None
    reward = recent(history, "reward")
    if len(history) < PERSISTENCE and any(values(history, "reward") or [1.0]):
        return None
    if facts.success is not None:
        said = "" if reward is None else f" (mean reward {reward:.3g})"
        return (
            f"no group teaches{said}: in each, so few or so many completions reach `advantage.success` = "
            f"{facts.success:g} of the weighted reward that all advantages are 0; can any reach it?"
        )
    cause = "too hard" if reward == 0 else "too hard, too easy"
    level = ""
    if reward is not None:
        level = f" (mean reward {reward:.3g}: {cause}, or the reward cannot read the answers)"
    return f"all groups are dead, every completion of a group got the same reward{level}, so nothing is learned"


@rule("no gradient", "mask_truncated_completions, max_completion_length, frozen weights (peft_config)")
def no_gradient(history: History, facts: Facts) -> str | None:
    norms = values(history[-PERSISTENCE:], "grad_norm")
    if len(norms) < PERSISTENCE or max(norms) > 0 or _dead(history) or no_completion_scored(history):
        return None
    if has_critic(history):
        alive = "completions were scored"
    else:
        alive = "groups are alive"
    return f"the gradient is 0 though {alive}: no token carries loss, or no weight is trained"


@rule(
    "sampler drifts",
    "correction (with vLLM also vllm_importance_sampling_correction, rollout.verify_every), dtype/bf16",
)
def drifting(history: History, facts: Facts) -> str | None:
    """Report that the engine's log-probs of the completions differ from the trainer's by more than ``DRIFT`` nats a
    token."""
    gaps = [recent(history, "rollout/sync_gap")]
    if not any(values(history, "rollout/staleness")):  # an older sampler differs by as much as the policy has moved
        gaps.append(lasting(history, "sampling/sampling_logp_difference/mean"))
    worst = max(gap or 0.0 for gap in gaps)
    said = f"sampler and trainer differ by {worst:.2g} nats a token: completions are not the policy's"
    return said if worst > DRIFT else None


@rule("truncation", "max_completion_length, the prompt, mask_truncated_completions")
def truncated(history: History, facts: Facts) -> str | None:
    share = lasting(history, "completions/truncated_share", "completions/clipped_ratio")
    if share is None or share <= TRUNCATED:
        return None
    judged = lasting(history, "rewards/unscorable_share") is not None
    return f"{share:.0%} of the completions are cut off{' and count as wrong' if judged else ''}"


@rule("unscorable", "the gold answers, rewards (mode), the template's answer format")
def unscorable(history: History, facts: Facts) -> str | None:
    share = lasting(history, "rewards/unscorable_share") or 0.0
    if share > UNSCORABLE:
        return f"{share:.0%} of the completions cannot be scored"
    return None


@rule("KL runs away", "beta, learning_rate, sync_ref_model")
def kl_high(history: History, facts: Facts) -> str | None:
    kl = lasting(history, "kl") or 0.0
    if kl > KL_HIGH:
        return f"KL to the reference is {kl:.2g} nats a token: the policy runs away"
    return None


@rule("clip share", "learning_rate, num_iterations, steps_per_generation, epsilon")
def clipped(history: History, facts: Facts) -> str | None:
    of_region = lasting(history, "clip_ratio/region_mean", "cispo_clip_ratio")
    if of_region is None:
        return None
    share = of_region + (lasting(history, "clip_ratio/delta_mean") or 0.0)
    if share <= CLIPPED:
        return None
    return f"{share:.0%} of the tokens are clipped: updates are too large"


@rule("entropy collapses", "epsilon_high, temperature, learning_rate, beta")
def entropy_gone(history: History, facts: Facts) -> str | None:
    start = at_start(history, "entropy")
    now = recent(history, "entropy")
    if start is None or now is None or now >= min(ENTROPY_GONE, ENTROPY_LEFT * start):
        return None
    return f"entropy collapsed from {start:.2g} to {now:.2g} nats a token: samples hardly differ"


@rule("entropy explodes", "learning_rate, temperature, entropy_coef, beta")
def entropy_explodes(history: History, facts: Facts) -> str | None:
    start = at_start(history, "entropy")
    now = recent(history, "entropy")
    if start is None or now is None or now <= max(ENTROPY_TIMES * start, start + ENTROPY_MORE):
        return None
    return f"entropy grew from {start:.2g} to {now:.2g} nats a token: the policy turns into noise"


@rule("length runs away", "objective (dr_grpo has no length bias), rewards (soft_overlong, kimi_length)")
def length_runs_away(history: History, facts: Facts) -> str | None:
    start = at_start(history, "completions/mean_length")
    now = recent(history, "completions/mean_length")
    before = recent(history[: 1 - LENGTH_WINDOWS], "completions/mean_length")
    if len(history) <= LENGTH_WINDOWS or start is None or now is None or before is None:
        return None
    rewards = values(history, "reward")
    gained = len(rewards) >= 4 and rise_in_errors(rewards) > LENGTH_GAIN
    if min(now, before) <= LENGTH_TIMES * start or gained:
        return None
    return f"length grew from {start:.0f} to {now:.0f} tokens and reward did not"


@rule("reward falls", "learning_rate, beta, data (difficulty), the rewards and their schedules")
def reward_falls(history: History, facts: Facts) -> str | None:
    series, steps = _late(history)
    if not series or rise_in_errors(series) > -FALLEN:
        return None
    half = len(series) // 2
    early = fmean(series[:half])
    late = fmean(series[half:])
    why = "expected where problems get harder or a penalty sets in"
    return f"reward fell from {early:.3g} to {late:.3g} within {steps} steps ({why})"


@rule("reward flat", "learning_rate, data (difficulty), num_generations, temperature")
def reward_flat(history: History, facts: Facts) -> str | None:
    series, steps = _late(history)
    if not series or abs(rise_in_errors(series)) >= NOISE or _at_ceiling(history):
        return None
    return f"reward has been flat at {fmean(series):.3g} for {steps} steps (fine if that is all there is to gain)"


@rule("reward full", "data (harder problems), max_steps", healthy=True)
def reward_full(history: History, facts: Facts) -> str | None:
    series, steps = _late(history)
    if not series or abs(rise_in_errors(series)) >= NOISE or not _at_ceiling(history):
        return None
    return f"reward has been {fmean(series):.3g} for {steps} steps: where 1 is the most, there is hardly more to gain"


@rule("loss 0", "none", healthy=True)
def zero_loss(history: History, facts: Facts) -> str | None:
    loss = number(history[-1], "loss")
    norm = number(history[-1], "grad_norm")
    once = facts.updates is not None and facts.updates <= 1
    is_zero = loss is not None and abs(loss) < ZERO_LOSS
    learns = norm is not None and norm != 0 and math.isfinite(norm)
    if facts.own_loss or not once or not is_zero or not learns:
        return None
    return "loss 0 is right: centred advantages sum to 0 at the one update a batch; watch the reward"


def number(window: Window, *names: str) -> float | None:
    """Return the first of these metrics that the window has, finite or not; None if it has none of them. A logged None
    becomes NaN, since TRL logs NaN as None."""
    for name in names:
        value = window.get(name, False)
        if value is None:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def values(history: History, *names: str) -> list[float]:
    """Return the finite values of the first of these metrics that a window has, window by window; others are
    skipped."""
    found = (number(window, *names) for window in history)
    return [value for value in found if value is not None and math.isfinite(value)]


def recent(history: History, *names: str) -> float | None:
    """Average over the last ``PERSISTENCE`` windows, or as many as there are; None if the metric is not logged."""
    found = values(history[-PERSISTENCE:], *names)
    return fmean(found) if found else None


def lasting(history: History, *names: str) -> float | None:
    """Average over the last ``PERSISTENCE`` windows; None if there are fewer, or if the metric is not logged."""
    if len(history) >= PERSISTENCE:
        return recent(history, *names)
    return None


def at_start(history: History, *names: str) -> float | None:
    """Average over the first ``PERSISTENCE`` windows; None until as many have followed."""
    if len(history) >= 2 * PERSISTENCE:
        return recent(history[:PERSISTENCE], *names)
    return None


def no_completion_scored(history: History) -> bool:
    """Return whether no completion of the last windows was scored: the mean of every reward is NaN."""
    means = [number(w, name) for w in history[-PERSISTENCE:] for name in _rewards(w)]
    return _all_alike(history) and bool(means) and all(mean is not None and math.isnan(mean) for mean in means)


def has_critic(history: History) -> bool:
    """Return whether one of the last windows is of PPO with a critic. One alone need not show it: a window that reuses
    a batch logs no reward."""
    return any("ppo/task_reward" in window for window in history[-PERSISTENCE:])


def step_of(window: Window) -> int:
    """Return the optimizer step at the end of the window."""
    return int(number(window, "step") or 0)


def rise_in_errors(series: Sequence[float]) -> float:
    """Compute the mean of the later half minus that of the earlier half, in standard errors of that difference.

    (m₂ − m₁) / √(s₁²/n₁ + s₂²/n₂), Welch's statistic (Biometrika 34, 1947): below about 2 in size a change is within
    the noise. 0 where nothing varies and nothing changed, ±inf where a change has no noise at all. Takes 4 values or
    more: each half has a variance.
    """
    half = len(series) // 2
    early = series[:half]
    late = series[half:]
    change = fmean(late) - fmean(early)
    error = math.sqrt(variance(early) / len(early) + variance(late) / len(late))
    if error == 0:
        if change:
            return math.copysign(math.inf, change)
        return 0.0
    return change / error


def _rewards(window: Window) -> list[str]:
    return [name for name in window if name.startswith("rewards/") and name.endswith("/mean")]


def _all_alike(history: History) -> bool:
    """Return whether in every group of the last windows all completions had the same reward."""
    shares = values(history[-PERSISTENCE:], "groups/dead_share", "frac_reward_zero_std")
    return bool(shares) and min(shares) >= 1


def _dead(history: History) -> bool:
    """Return whether all groups of the last windows are dead. With a critic none is: equal rewards teach, too."""
    return _all_alike(history) and not has_critic(history)


def _late(history: History) -> tuple[list[float], int]:
    """Return the rewards of the last ``FLAT_STEPS`` steps, but at least ``FLAT_WINDOWS`` windows, and how many steps
    they span; ([], 0) if there are too few, or if all groups are dead, which has a rule of its own."""
    end = step_of(history[-1])
    if len(history) < FLAT_WINDOWS or end - step_of(history[0]) < FLAT_STEPS or _dead(history):
        return [], 0
    back = len(history) - FLAT_WINDOWS
    while back and step_of(history[back - 1]) >= end - FLAT_STEPS:
        back -= 1
    series = values(history[back:], "reward")
    if len(series) < FLAT_WINDOWS:
        return [], 0
    return series, end - step_of(history[back])


def _at_ceiling(history: History) -> bool:
    """Return whether every reward function, or the reward where none is logged by name, has a mean of 0.95 to 1."""
    levels = [recent(history, name) for name in _rewards(history[-1]) or ["reward"]]
    return all(level is not None and CEILING <= level <= 1 for level in levels)
