"""A critic inside the policy's module: the policy's forward returns values beside log-probs, and code that handles the
policy does not see the critic.

DDP, FSDP2 and DeepSpeed wrap one module and hook its forward. So the critic is a sub-module of the policy model and is
called inside its forward, on the hidden states of that very forward (``head``). TRL's ``is_peft_model(self.model)`` and
HF's ``isinstance(PreTrainedModel)`` hold as before, which a wrapper around the policy would break. Code that walks over
the policy's parameters leaves out those under ``CRITIC``: ``save_pretrained`` (here), the engine's weight sync, a
moving reference (``followed_by_policy_only``).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import FusedCausalLMOutput

#: Name of the sub-module in the names of parameters and states.
CRITIC = "grpo_lab_critic"
#: Arguments of the forward that are for the LM head; the layers below it, and the critic, do not take them.
_OF_THE_HEAD = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch", "output_router_logits")


@dataclass
class ValuedOutput(FusedCausalLMOutput):  # type: ignore[misc]
    """TRL's output with ``state_values`` ``[B, L - 1]``. Entry t is the value of the state in which token t + 1 is
    chosen."""

    state_values: Tensor | None = None


def is_critics(name: str) -> bool:
    """Return whether a parameter or state of this name belongs to the critic."""
    return f"{CRITIC}." in name


def inside(model: Any) -> Any:
    """Return the causal model inside PEFT's wrapper, or ``model`` itself without one."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def policy_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the model's parameters without the critic's."""
    return (parameter for name, parameter in model.named_parameters() if not is_critics(name))


def without_critic(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield named parameters or states without the critic's. The critic's are read from ``named``, too: reading may
    gather a sharded tensor, which all ranks must do together."""
    return ((name, value) for name, value in named if not is_critics(name))


def give_critic(model: Any, critic: nn.Module) -> None:
    """Put a critic into a policy model, inside PEFT's wrapper and before the model is wrapped by DDP or the like.

    Afterwards ``model(…, state_values="attached")`` returns a `ValuedOutput`; with ``"detached"`` no gradient flows
    from the critic into the policy's hidden states. ``critic`` maps hidden states ``[B, L, H]`` and the forward's other
    inputs to values ``[B, L - 1]``. The model must have TRL's fused head already.
    """
    policy = inside(model)
    policy.add_module(CRITIC, critic)
    fused = policy.forward

    @functools.wraps(type(policy).forward)  # `generate` inspects the signature
    def forward(self: Any, *args: Any, state_values: str | None = None, **kwargs: Any) -> Any:
        if state_values is None:
            return fused(*args, **kwargs)
        seen: list[Tensor] = []

        def keep(_module: Any, _args: Any, output: Any) -> None:
            seen.append(output.last_hidden_state)

        with self.base_model.register_forward_hook(keep, prepend=True):  # before hooks that select scored positions
            output = fused(*args, **kwargs)
        if state_values == "detached":
            states = seen[0].detach()
        else:
            states = seen[0]
        inputs = {name: value for name, value in kwargs.items() if name not in _OF_THE_HEAD}
        made = {field.name: getattr(output, field.name) for field in fields(FusedCausalLMOutput)}
        return ValuedOutput(**made, state_values=getattr(self, CRITIC)(states, inputs))

    policy.forward = types.MethodType(forward, policy)
    policy.save_pretrained = types.MethodType(_save_policy, policy)
    policy.register_load_state_dict_post_hook(_policy_alone)


def _policy_alone(module: nn.Module, keys: Any) -> None:
    """Remove the critic's names from the ``keys`` that HF reports as missing after loading, if all of them are missing:
    then the file is the policy's own, since the critic has other files."""
    if sum(map(is_critics, keys.missing_keys)) == len(getattr(inside(module), CRITIC).state_dict()):
        keys.missing_keys[:] = [name for name in keys.missing_keys if not is_critics(name)]


def _save_policy(self: Any, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """``save_pretrained`` of a policy model that leaves out the critic."""
    state = dict(without_critic((self.state_dict() if state_dict is None else state_dict).items()))
    return type(self).save_pretrained(self, save_directory, *args, state_dict=state, **kwargs)


@contextlib.contextmanager
def values_heard(accelerator: Any, model: nn.Module, trunk_learns: bool = True) -> Iterator[list[Tensor]]:
    """Make every fused forward of ``model`` inside the block compute values, too, and append them, ``[B, L - 1]`` of
    each forward, to the list that is yielded.

    Values are read from the output of the outermost wrapper, whose hooks for the backward (FSDP2's) must have seen
    them. Unless ``trunk_learns``, no gradient flows from the values into the policy's hidden states.
    """
    heard: list[Tensor] = []
    how = "attached" if trunk_learns else "detached"

    def ask(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "state_values": how}

    def listen(_module: Any, _args: Any, output: Any) -> None:
        heard.append(output.state_values)

    policy = accelerator.unwrap_model(model)
    with policy.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(listen):
        yield heard


def followed_by_policy_only(callbacks: Iterable[Any]) -> None:
    """Make TRL's ``sync_ref_model``, which walks both models' parameters side by side, leave out the critic's."""
    for callback in callbacks:
        if isinstance(callback, SyncRefModelCallback):
            plain = type(callback).sync_target_model

            def sync(model: Any, target: Any, alpha: float, plain: Any = plain) -> None:
                policy = types.SimpleNamespace(parameters=functools.partial(policy_parameters, model))
                plain(policy, target, alpha)

            vars(callback)["sync_target_model"] = sync
