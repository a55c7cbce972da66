"""The critic that ``value.model`` names, made and put into the policy's module before anybody wraps it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from trl.trainer.utils import disable_dropout_in_model

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.critic.files import Critic, is_critic_folder, load_critic
from grpo_lab.trainer.settings.inputs import check_model
from grpo_lab.trainer.settings.parse import ValueSettings


def with_critic(trainer: Any, value: ValueSettings | None) -> Critic | None:
    """Build the critic into the trainer's policy; what walks over the policy's parameters goes on seeing the policy
    alone."""
    if value is None:
        return None
    model = trainer.model
    critic = _made(trainer, model, value)
    critic.to(next(trl_bridge.policy_parameters(model)).device)
    critic.train(model.training)
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    trl_bridge.give_critic(model, critic)
    trl_bridge.followed_by_policy_only(trainer.callback_handler.callbacks)
    return critic


def _made(trainer: Any, model: Any, value: ValueSettings) -> Critic:
    policy = trl_bridge.inside(model)
    hidden, dtype = int(policy.config.get_text_config().hidden_size), _float_dtype(model)
    if value.model == "head":
        return Critic(hidden, dtype=dtype)
    if value.model == "copy":
        return Critic(hidden, _copied_trunk(trainer, model), dtype)
    if is_critic_folder(value.model):
        critic = load_critic(value.model)
        if critic.trunk is None and critic.head.in_features != hidden:
            raise ValueError(
                f"`value.model` is {value.model!r}, a head for hidden states of width {critic.head.in_features}, and "
                "the policy's have "
                f"{hidden}: name the critic of a policy of this size, or 'head' or 'copy'"
            )
        critic = critic.to(dtype)
    else:
        _check_named(value.model)
        trunk = AutoModel.from_pretrained(value.model, dtype=dtype)
        critic = Critic(int(trunk.config.get_text_config().hidden_size), trunk, dtype)
    if critic.trunk is not None:
        _check_vocabulary(value.model, critic.trunk, policy)
        if trainer.args.disable_dropout:
            disable_dropout_in_model(critic.trunk)
    return critic


def _float_dtype(model: nn.Module) -> torch.dtype:
    """The trainable weights' own: FSDP2 wants one type in a group. Frozen ones may be packed in any."""
    found = (p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point())
    return next(found, torch.float32)


def _copied_trunk(trainer: Any, model: Any) -> nn.Module:
    """The policy's trunk with adapters merged, trained in full.

    Raises:
        ValueError: its weights are packed, or on other ranks.
    """
    policy = trl_bridge.inside(model)
    if getattr(policy, "is_quantized", False) or any(hasattr(p, "ds_id") for p in policy.parameters()):
        why = "are quantized" if getattr(policy, "is_quantized", False) else "lie on several ranks (DeepSpeed ZeRO-3)"
        raise ValueError(
            f"`value.model` is 'copy', and the policy's weights {why}, so that they cannot be copied: name a folder "
            "or hub name, or "
            "'head'"
        )
    if policy is not model:  # PEFT
        policy = copy.deepcopy(model).merge_and_unload()
    trunk: nn.Module = copy.deepcopy(policy.base_model)
    return trunk


def _check_named(name: str) -> None:
    try:
        check_model(name)
    except ValueError as error:
        raise ValueError(f"{str(error).replace('`model`', '`value.model`')} (or 'head' or 'copy')") from error
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"`value.model` is the folder {name!r}, an adapter; merge it into its base model first")
    AutoConfig.from_pretrained(name)


def _check_vocabulary(name: str, trunk: Any, policy: Any) -> None:
    theirs, ours = (int(m.config.get_text_config().vocab_size) for m in (trunk, policy))
    if theirs < ours:
        raise ValueError(
            f"`value.model` is {name!r} with {theirs} token ids, and the policy has {ours}: the critic reads the "
            "policy's token ids, so "
            "both need one tokenizer"
        )
