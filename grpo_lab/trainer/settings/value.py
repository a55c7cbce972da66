"""The mapping ``value``: the critic of PPO, and what is made of its values.

``reference_every``: what it may be, and where it would do nothing; what of ``kl`` depends on batch sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from grpo_lab.advantages import reads_values
from grpo_lab.objectives import KLTerm
from grpo_lab.settings import NULL_IS_DEFAULT, Count, Number, Switch, must_be, settings

#: kinds of ``value.model`` that are no folder or hub name
KINDS = ("head", "copy")
Above = Annotated[Number, Field(gt=0, allow_inf_nan=False), must_be("a finite number above 0")]


@settings(bare="model")
class ValueSettings:
    """``value``: the critic. Every field has a default, so that ``value: {}`` is a whole setting.

    Args:
        model: ``head``: a linear layer on the policy's last hidden states (one forward, no further memory). ``copy``: a network of its
            own, which starts as a copy of the policy's. A folder or hub name: that network (a critic that a run saved, or any causal or
            base model with the policy's vocabulary).
        learning_rate: of the critic; ``None``: the policy's ``learning_rate``. The schedule is the same.
        vf_coef: c of policy loss + c · value loss; TRL's deleted ``PPOConfig`` had 0.1, too.
        cliprange_value: how far a value may move from the one at generation before the loss stops pulling; ``None``: no clipping.
        gamma: discount per own token; ``None``: the rule's, 1.
        lam: λ of GAE; ``None``: the rule's, 0.95.
        whiten_rewards: divide the tokens' rewards by their standard deviation (their mean stays).
        whiten_advantages: advantages with mean 0 and standard deviation 1, over all ranks' tokens.
        warmup_steps: optimizer steps in which the critic alone learns; the policy's weights stay.
        missing_eos_penalty: > 0, taken off the reward of a completion that did not end by itself (TRL's deleted ``PPOConfig``).
    """

    model: Annotated[str, Field(strict=True, min_length=1), must_be("head, copy, a folder or a hub name")] = "head"
    learning_rate: Above | None = None
    vf_coef: Annotated[Above, NULL_IS_DEFAULT] = 0.1
    cliprange_value: Above | None = 0.2
    gamma: Number | None = None
    lam: Number | None = None
    whiten_rewards: Annotated[Switch, NULL_IS_DEFAULT] = False
    whiten_advantages: Annotated[Switch, NULL_IS_DEFAULT] = True
    warmup_steps: Annotated[Count, NULL_IS_DEFAULT] = 0
    missing_eos_penalty: Above | None = None

    def in_words(self) -> str:
        """What is in force and not a default, for ``describe()``."""
        changed = [
            f"{name}={getattr(self, name)}"
            for name, field in self.__dataclass_fields__.items()
            if name not in ("model", "gamma", "lam") and getattr(self, name) != getattr(_DEFAULT, name)
        ]
        return ", ".join([self.model, *changed])


_DEFAULT = ValueSettings()


def with_discounts(rule: Any, value: ValueSettings | None, knobs: dict[str, Any]) -> Any:
    """The rule with ``value.gamma`` and ``value.lam``, where they are set.

    Args:
        knobs: what is written beside the rule's name.

    Raises:
        ValueError: the same number under both names, and different.
    """
    for name in ("gamma", "lam"):
        number = None if value is None else getattr(value, name)
        if number is None:
            continue
        if not hasattr(rule, name):
            raise ValueError(
                f"`value.{name}` is {number}, and the advantage rule in force has no `{name}`; leave it out"
            )
        if name in knobs and knobs[name] != number:
            raise ValueError(
                f"`value.{name}` is {number} and `advantage.{name}` is {knobs[name]}: two names for one number; set one"
            )
        rule = replace(rule, **{name: float(number)})
    return rule


def critic_in_force(args: Any, found: Any, rule: Any, rule_name: str) -> ValueSettings | None:
    """The critic that the rule reads, with everything that it cannot stand beside.

    Args:
        found: ``LabSettings``.
        rule: the advantage rule in force, called ``rule_name``.

    Raises:
        ValueError: what was seen, what is allowed, which setting.
    """
    if not reads_values(rule):
        if found.value is not None:
            raise ValueError(
                f"`value` is set, and no critic is asked for: the advantage rule is {rule_name!r}; set `objective: ppo` (or "
                "`advantage: gae`), or leave `value` out"
            )
        return None
    if found.objective is None:
        raise ValueError("`advantage` is 'gae', which needs a critic: set `objective` (e.g. 'ppo') beside it")
    if found.update.dead_groups == "resample":
        raise ValueError(
            "`update.dead_groups` is 'resample', and with a critic no group is dead: every completion has returns to learn from; "
            "leave it out"
        )
    value = found.value or _DEFAULT
    if value.missing_eos_penalty is not None and args.mask_truncated_completions:
        raise ValueError(
            "`value.missing_eos_penalty` has no effect with `mask_truncated_completions`, which takes the same completions out of "
            "the loss; leave one out"
        )
    if found.kl is not None and found.kl.gamma is not None:
        raise ValueError(
            "`kl.gamma` has no effect with a critic, whose discount is for all rewards: set `value.gamma`, and leave it out"
        )
    return value  # type: ignore[no-any-return]


def check_critic(value: ValueSettings | None, own_loss: str | None, optimizers: Any) -> None:
    """What a trainer's class and its caller bring beside a critic.

    Args:
        own_loss: whose ``_compute_loss`` makes the loss; None: ours.

    Raises:
        ValueError: the critic would not learn.
    """
    if value is None:
        return
    if own_loss is not None:
        raise ValueError(
            "`_compute_loss` is overridden, so that the critic (`value`) would never learn; override `token_loss`, the policy's loss"
        )
    if optimizers is not None and optimizers[0] is not None:
        raise ValueError(
            "`optimizers` holds an optimizer, which does not know the critic's parameters (`value`); leave it out, and set `optim`, "
            "`learning_rate` and `value.learning_rate`"
        )


GENERATION = "generation"


def reference_every(written: Any) -> int | str | None:
    """A number of optimizer steps, ``"generation"`` or ``None``; digits are a number (command lines).

    Raises:
        ValueError: anything else.
    """
    value = int(written) if isinstance(written, str) and written.strip().isdigit() else written
    if value is None or value == GENERATION or (type(value) is int and value >= 1):
        return value
    raise ValueError(
        f"`reference_every` is {written!r}; it must be a number of optimizer steps (at least 1), or {GENERATION!r}: before every "
        "generation batch"
    )


def check_kl(args: Any, kl: KLTerm | None) -> None:
    """Refuse a moving reference that there is none of, that two settings move, or whose KL would always be 0; and a horizon too short.

    Args:
        kl: the KL term of an objective of ours, where there is one.

    Raises:
        ValueError: names both settings.
    """
    if kl is not None and kl.control is not None:
        kl.control.rate_of(args.generation_batch_size)
    every = args.reference_every
    if every is None:
        return
    if args.beta == 0.0:
        raise ValueError(
            f"`reference_every` is {every!r}, but nothing reads a reference (`beta` is 0 and `kl` is not set): set one of them, or leave "
            "it out"
        )
    if args.sync_ref_model:
        raise ValueError(
            f"`reference_every`={every!r} and `sync_ref_model` both move the reference (TRL's with `ref_model_mixup_alpha`="
            f"{args.ref_model_mixup_alpha}): leave one out"
        )
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if not _is_fresh(every, updates):
        return
    if kl is not None and kl.placement == "reward":
        raise ValueError(
            f"`reference_every`={every!r} makes the reference the policy that generates ({updates:g} updates a generation batch), so a KL in "
            "the reward is always 0: raise `reference_every`, or put the KL in the loss (`kl.placement: loss`)"
        )
    if updates <= 1:
        raise ValueError(
            f"`reference_every`={every!r} has no effect but to switch the KL off: a generation batch gets {updates:g} updates, and the "
            "reference is the policy itself; raise it, or raise `steps_per_generation` or `num_iterations`"
        )


def _is_fresh(every: int | str, updates: float) -> bool:
    """Whether the reference is the policy whenever a batch is generated."""
    if every == GENERATION or not isinstance(every, int):
        return True
    return every == 1 if updates < 1 else updates % every == 0
