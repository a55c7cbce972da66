"""The mapping ``value``: the critic of PPO, and what is made of its values."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from grpo_lab.settings import NULL_IS_DEFAULT, Count, Number, Switch, must_be, settings

#: kinds of ``value.model`` that are no folder or hub name
KINDS = ("head", "copy")
Above = Annotated[Number, Field(gt=0, allow_inf_nan=False), must_be("a finite number above 0")]


@settings(bare="model")
class ValueSettings:
    """``value``: the critic. Every field has a default, so that ``value: {}`` is a whole setting.

    Args:
        model: ``head``: a linear layer on the policy's last hidden states (one forward, no further memory). ``copy``: a
            network of its own, which starts as a copy of the policy's. A folder or hub name: that network (a critic
            that a run saved, or any causal or base model with the policy's vocabulary).
        learning_rate: of the critic; ``None``: the policy's ``learning_rate``. The schedule is the same.
        vf_coef: c of policy loss + c · value loss; TRL's deleted ``PPOConfig`` had 0.1, too.
        cliprange_value: how far a value may move from the one at generation before the loss stops pulling; ``None``: no
            clipping.
        gamma: discount per own token; ``None``: the rule's, 1.
        lam: λ of GAE; ``None``: the rule's, 0.95.
        whiten_rewards: divide the tokens' rewards by their standard deviation (their mean stays).
        whiten_advantages: advantages with mean 0 and standard deviation 1, over all ranks' tokens.
        warmup_steps: optimizer steps in which the critic alone learns; the policy's weights stay.
        missing_eos_penalty: > 0, taken off the reward of a completion that did not end by itself (TRL's deleted
            ``PPOConfig``).
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
            if name not in ("model", "gamma", "lam") and getattr(self, name) != getattr(CRITIC, name)
        ]
        return ", ".join([self.model, *changed])


CRITIC = ValueSettings()


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
            "`_compute_loss` is overridden, so that the critic (`value`) would never learn; override `token_loss`, the "
            "policy's loss"
        )
    if optimizers is not None and optimizers[0] is not None:
        raise ValueError(
            "`optimizers` holds an optimizer, which does not know the critic's parameters (`value`); leave it out, and "
            "set `optim`, `learning_rate` and `value.learning_rate`"
        )
