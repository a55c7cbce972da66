"""The critic of PPO: how it is built, given to the optimizer, saved and loaded.

It is put into the policy's module before accelerate or DeepSpeed wraps that. On disk it is the folder ``critic/``
beside the policy's files, which stay those of a plain causal model:

    critic.json         format, whether it has a network of its own, width of the hidden states
    critic.safetensors  its tensors
    config.json         config of its own network, if it has one
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import disable_dropout_in_model

from grpo_lab.io import write_whole, write_whole_text
from grpo_lab.reading import read_record
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import Collectives, UpdatePort
from grpo_lab.trainer.resume.going_on import mismatch
from grpo_lab.trainer.settings.inputs import check_model
from grpo_lab.trainer.settings.parse import ValueSettings

FOLDER = "critic"
MANIFEST = "critic.json"
TENSORS = "critic.safetensors"
FORMAT = 1


class ValueHead(nn.Linear):
    """Linear head ``V = w·h + b``, computed in float32 or wider. It starts at V = 0: its initialisation draws no random
    number."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values ``[…]`` of hidden states ``[…, H]``, in units of the reward."""
        with torch.autocast(states.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            weight = self.weight.to(wide)
            bias = self.bias.to(wide)
            return functional.linear(states.to(weight.device, wide), weight, bias).squeeze(-1)


class Critic(nn.Module):
    """Value network of PPO: estimates, before each token, the reward that the completion will still earn.

    Args:
        hidden: width H of the hidden states that the head reads.
        trunk: a network of the critic's own, without an LM head, that is called with the policy's inputs. ``None``: the
            head reads the policy's hidden states.
        dtype: dtype of the head's weights.
    """

    def __init__(self, hidden: int, trunk: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden, 1, dtype=dtype)

    def forward(self, states: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return values ``[B, L - 1]``, in units of the reward. Entry t is the value before token t + 1, just as entry
        t of a causal model's log-probs belongs to token t + 1.

        Args:
            states: hidden states ``[B, L, H]`` of the policy; not read if the critic has a trunk.
            inputs: keyword arguments of the policy's forward, for the trunk.
        """
        if self.trunk is not None:
            states = self.trunk(**{**inputs, "use_cache": False}).last_hidden_state
        values: Tensor = self.head(states)[:, :-1]
        return values


def with_critic(trainer: GRPOTrainer, value: ValueSettings | None) -> Critic | None:
    """Build the critic that ``value.model`` names, put it into the module of the trainer's policy and return it. Return
    None if ``value`` is None.

    The critic has the policy's device and train mode. Saving the policy and TRL's ``sync_ref_model`` still handle the
    policy's own parameters alone.

    Raises:
        ValueError: ``value.model`` names no critic, or one that does not fit the policy.
    """
    if value is None:
        return None
    model = trainer.model
    # the dtype of the trainable weights, since FSDP2 wants one dtype in a group; frozen weights may be quantized
    floats = (p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point())
    critic = _made(model, value.model, next(floats, torch.float32))
    if critic.trunk is not None and value.model != "copy":
        known = _text_config(critic.trunk).vocab_size
        needed = _text_config(trl_bridge.inside(model)).vocab_size
        if known < needed:
            raise ValueError(
                f"`value.model` is {value.model!r} with {known} token ids, and the policy has {needed}: the critic "
                "reads the policy's token ids, so both need one tokenizer"
            )
        if trainer.args.disable_dropout:
            disable_dropout_in_model(critic.trunk)
    critic.to(next(trl_bridge.policy_parameters(model)).device)
    critic.train(model.training)
    critic.requires_grad_(True)
    trl_bridge.give_critic(model, critic)
    trl_bridge.followed_by_policy_only(trainer.callback_handler.callbacks)
    return critic


def _made(policy: Any, name: str, dtype: torch.dtype) -> Critic:
    """Build or load the critic ``name``: ``head``, ``copy``, a folder that ``save_critic`` wrote, or a model's folder
    or hub name, whose trunk is then the critic's.

    Raise ValueError if it is no such name, a damaged critic, an adapter, or a head for hidden states of another width
    than those of ``policy``. Whether a network of its own knows all token ids of the policy is not checked here. For a
    hub name that does not exist transformers raises OSError.
    """
    hidden = _text_config(trl_bridge.inside(policy)).hidden_size
    if name == "head":
        return Critic(hidden, dtype=dtype)
    if name == "copy":
        return Critic(hidden, _copied_trunk(policy), dtype)
    if is_critic_folder(name):
        critic = load_critic(name)
        if critic.trunk is None and critic.head.in_features != hidden:
            raise ValueError(
                f"`value.model` is {name!r}, a head for hidden states of width {critic.head.in_features}, and the "
                f"policy's have {hidden}: name the critic of a policy of this size, or 'head' or 'copy'"
            )
        return critic.to(dtype)
    try:
        check_model(name)
    except ValueError as error:
        raise ValueError(f"{str(error).replace('`model`', '`value.model`')} (or 'head' or 'copy')") from error
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"`value.model` is the folder {name!r}, an adapter; merge it into its base model first")
    trunk = AutoModel.from_pretrained(name, dtype=dtype)
    return Critic(_text_config(trunk).hidden_size, trunk, dtype)


def _text_config(model: Any) -> Any:
    """Return the configuration of a model's text part."""
    return model.config.get_text_config()


def _copied_trunk(model: Any) -> nn.Module:
    """Return a copy of the policy's trunk with adapters merged into it. Raise ValueError if its weights are quantized,
    or spread over ranks by DeepSpeed ZeRO-3."""
    policy = trl_bridge.inside(model)
    why = None
    if getattr(policy, "is_quantized", False):
        why = "are quantized"
    elif any(hasattr(parameter, "ds_id") for parameter in policy.parameters()):
        why = "lie on several ranks (DeepSpeed ZeRO-3)"
    if why is not None:
        raise ValueError(
            f"`value.model` is 'copy', and the policy's weights {why}, so that they cannot be copied: name a folder "
            "or hub name, or 'head'"
        )
    if policy is not model:  # PEFT
        policy = copy.deepcopy(model).merge_and_unload()
    trunk: nn.Module = copy.deepcopy(policy.base_model)
    return trunk


def with_critics_groups(optimizer: Any, critic: nn.Module | None, learning_rate: float | None) -> Any:
    """Move the critic's parameters into parameter groups of their own, with ``learning_rate`` (None: the policy's), and
    return ``optimizer``. HF may ask for the optimizer several times; its groups are split only once.

    Raises:
        ValueError: the optimizer's groups do not hold all of the critic's parameters.
    """
    bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it before a second training begins
    if critic is None or getattr(bare, "grpo_lab_split", False):
        return optimizer
    own = {id(parameter) for parameter in critic.parameters()}
    moved = 0
    for group in list(bare.param_groups):
        critics = [p for p in group["params"] if id(p) in own]
        if critics:
            moved += len(critics)
            settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            group["params"] = [p for p in group["params"] if id(p) not in own]
            if learning_rate is None:
                rate = group["lr"]
            else:
                rate = learning_rate
            bare.add_param_group({**settings, "params": critics, "lr": rate})
    bare.param_groups[:] = [group for group in bare.param_groups if group["params"]]
    if moved != len(own):
        raise ValueError(
            f"`optim`: {type(bare).__name__} holds {moved} of the critic's {len(own)} parameters; choose one that "
            "takes parameter groups (e.g. adamw_torch)"
        )
    bare.grpo_lab_split = True
    return optimizer


def is_warming_up(trainer: UpdatePort) -> bool:
    """Return whether only the critic learns in the current step (``value.warmup_steps``)."""
    value = trainer.algorithm.value
    return value is not None and bool(trainer.model.training) and trainer.state.global_step < value.warmup_steps


class CriticAlone(TrainerCallback):  # type: ignore[misc]
    """Callback that sets the policy's gradients, which are 0 during the critic's warm-up, to None before each optimizer
    step. So AdamW does not count these steps for the policy. Else its bias correction would divide the first real
    gradients by a far too small second moment."""

    def __init__(self, trainer: Collectives, value: ValueSettings) -> None:
        self.trainer = trainer
        self.steps = value.warmup_steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < self.steps:
            for parameter in trl_bridge.policy_parameters(self.trainer.model):
                parameter.grad = None


def is_critic_folder(folder: str | Path) -> bool:
    """Return whether ``save_critic`` has written to this folder."""
    return (Path(folder) / MANIFEST).is_file()


def save_critic(folder: Path, critic: Critic, state: Mapping[str, Any]) -> None:
    """Write the critic's files to ``folder``. Its tensors are taken from ``state``, the whole state dict of the
    policy's module, in which the critic is. Raise ValueError if some of them are missing there."""
    tensors = {
        name.split(f"{trl_bridge.CRITIC}.", 1)[1]: value.detach().cpu().contiguous().clone()
        for name, value in state.items()
        if trl_bridge.is_critics(name)
    }
    if missing := sorted(set(critic.state_dict()) - set(tensors)):
        raise ValueError(f"the critic cannot be saved: the model's state lacks {missing[:3]} of it")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TENSORS, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    if critic.trunk is not None:
        critic.trunk.config.save_pretrained(folder)
    manifest = {"format": FORMAT, "own_network": critic.trunk is not None, "hidden_size": critic.head.in_features}
    write_whole_text(folder / MANIFEST, json.dumps(manifest))


def load_critic(folder: str | Path) -> Critic:
    """Load a critic that ``save_critic`` wrote. Raise ValueError if a file is missing, damaged or of another format."""
    place = Path(folder)
    try:
        manifest = read_record(place / MANIFEST, {"format": int, "own_network": bool, "hidden_size": int})
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, and this version reads {FORMAT}")
        tensors = load_file(place / TENSORS)
        trunk = None
        if manifest["own_network"]:
            config = AutoConfig.from_pretrained(place)
            # `AutoModel.from_config` under ZeRO-3 gives a rank empty parameters, which take no tensors
            trunk = MODEL_MAPPING[type(config)](config)
        critic = Critic(int(manifest["hidden_size"]), trunk)
        critic.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{place} holds no critic that can be loaded: {error}") from error
    return critic


def save_beside(
    trainer: UpdatePort, critic: Critic | None, folder: str | None, state: Mapping[str, Any] | None
) -> None:
    """Write ``critic/`` beside the policy, which was just saved to ``folder`` (None: the output folder).

    ``state`` is the state dict of the whole module, as HF passes it to ``_save``; None: it is read from the model. An
    empty one means that the policy was not saved (DeepSpeed's sharded states), and nothing is written. From
    transformers 5.20 on every rank calls this; one of them writes.
    """
    if critic is not None and state != {} and trainer.args.should_save:
        whole = trainer.model.state_dict() if state is None else state
        save_critic(Path(folder or trainer.args.output_dir) / FOLDER, critic, whole)


@torch.no_grad()
def take_up(
    trainer: Collectives, critic: Critic | None, checkpoint: str | None, setting: str = "resume_from_checkpoint"
) -> None:
    """Load the weights of a checkpoint's critic into ``critic``, the one that trains. Do nothing under FSDP and
    DeepSpeed, which load it with the policy's module.

    Args:
        setting: the setting that chose the checkpoint, for error messages.

    Raises:
        ValueError: the checkpoint holds no critic, or one of other shapes.
    """
    if checkpoint is None or critic is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    folder = Path(checkpoint) / FOLDER
    if not is_critic_folder(folder):
        raise ValueError(
            f"`{setting}`: {checkpoint} holds no critic ({FOLDER}/{MANIFEST}), and this run has one (`value`): resume "
            "a checkpoint of a run with a critic, or start from the model in it"
        )
    try:
        critic.load_state_dict(load_file(folder / TENSORS))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        why = mismatch(error) if isinstance(error, RuntimeError) else error
        raise ValueError(f"`{setting}`: the critic of {checkpoint} does not fit `value.model`: {why}") from error
