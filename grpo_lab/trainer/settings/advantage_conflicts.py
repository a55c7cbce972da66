"""Conflicts between the advantage rule in force and other settings: rows of ``conflicts.AFTER``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_lab.advantages import reads_token_energy, reads_values, takes_penalty
from grpo_lab.trainer.settings.limits import kept_by_engine

#: Rows (condition on a ``conflicts.Case``, message), as ``conflicts.Conflict`` describes them.
OF_RULES: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda c: c.ours.value is not None and not reads_values(c.algorithm.advantage),
        "`value` is set, and no critic is asked for: the advantage rule is {algorithm.names[advantage]!r}; set "
        "`objective: ppo` (or `advantage: gae`), or leave `value` out",
    ),
    (
        lambda c: c.ours.objective is None and reads_values(c.algorithm.advantage),
        "`advantage` is {algorithm.names[advantage]!r}, which needs a critic: set `objective` (e.g. 'ppo') beside it",
    ),
    (
        lambda c: c.algorithm.value is not None and c.ours.update.dead_groups == "resample",
        "`update.dead_groups` is 'resample', and with a critic, where all have returns, no group is dead: leave it out",
    ),
    (
        lambda c: c.args.num_generations < getattr(c.algorithm.advantage, "least_group", 0),
        "`num_generations` is {args.num_generations}, and with the advantage rule {algorithm.names[advantage]!r} all "
        "advantages are 0 in groups of fewer than {algorithm.advantage.least_group}: raise it, or lower `advantage.k`",
    ),
    (
        lambda c: kept_by_engine(c.args) > 0 and reads_token_energy(c.algorithm.advantage),
        "`top_k`={args.top_k} and the advantage rule {algorithm.names[advantage]!r} do not combine: its squared norms "
        "of scores are over the whole vocabulary, and log-probs among the tokens that the engine kept; leave one of "
        "them out",
    ),
    (
        lambda c: (
            c.ours.kl is not None
            and c.ours.kl.placement == "reward"
            and c.ours.kl.per != "token"
            and not takes_penalty(c.algorithm.advantage)
        ),
        "`kl.placement` is 'reward', and the advantage rule {algorithm.names[advantage]!r} cannot have a KL in a "
        "completion's reward (it asks for successes, or divides each reward by its deviation): set `kl.placement: "
        "loss`, or `kl.per: token`",
    ),
)
