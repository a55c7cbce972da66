"""The critic as a module and on disk: ``critic/`` beside the policy's files, which stay those of a plain causal model.

critic.json         format, whether it has a network of its own, width of the hidden states
critic.safetensors  its tensors
config.json         of its own network, where it has one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_MAPPING, AutoConfig, TrainerCallback

from grpo_lab.io import write_whole, write_whole_text
from grpo_lab.trainer.resume.going_on import mismatch
from grpo_lab.trainer.trl_bridge import CRITIC, is_critics

FOLDER = "critic"
MANIFEST, TENSORS = "critic.json", "critic.safetensors"
FORMAT = 1


class ValueHead(nn.Linear):
    """``V = w·h + b``, computed in float32 or better whatever the hidden states come in; starts at V = 0, and draws no
    random number."""

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(hidden, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """``[…, H]`` → ``[…]`` in units of the reward."""
        with torch.autocast(states.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            weight, bias = self.weight.to(wide), self.bias.to(wide)
            return functional.linear(states.to(weight.device, wide), weight, bias).squeeze(-1)


class Critic(nn.Module):
    """Values of the states in which tokens are chosen.

    Args:
        hidden: width of the hidden states.
        trunk: a network without LM head, called with the policy's inputs; ``None``: the policy's own states are read.
    """

    def __init__(self, hidden: int, trunk: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden, dtype)

    def forward(self, states: Tensor, inputs: dict[str, Any]) -> Tensor:
        """``[B, L - 1]``: place t holds the value before token t + 1, as log-probs have it."""
        if self.trunk is not None:
            states = self.trunk(**{**inputs, "use_cache": False}).last_hidden_state
        values: Tensor = self.head(states)[:, :-1]
        return values


def is_critic_folder(folder: str) -> bool:
    return (Path(folder) / MANIFEST).is_file()


def critic_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The critic's tensors among a policy module's, under their own names, each with memory of its own."""
    found = {name.split(f"{CRITIC}.", 1)[1]: value for name, value in state.items() if is_critics(name)}
    return {name: value.detach().cpu().contiguous().clone() for name, value in found.items()}


def save_critic(folder: Path, critic: Critic, state: Mapping[str, Any]) -> None:
    """Write ``critic`` with the tensors that a policy module's ``state`` holds of it (gathered, where they are
    sharded).

    Raises:
        ValueError: the state does not hold all of them.
    """
    tensors = critic_tensors(state)
    missing = sorted(set(critic.state_dict()) - set(tensors))
    if missing:
        raise ValueError(f"the critic cannot be saved: the model's state lacks {missing[:3]} of it")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TENSORS, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    if critic.trunk is not None:
        critic.trunk.config.save_pretrained(folder)
    told = {"format": FORMAT, "own_network": critic.trunk is not None, "hidden_size": critic.head.in_features}
    write_whole_text(folder / MANIFEST, json.dumps(told))


def load_critic(folder: str | Path) -> Critic:
    """A critic that ``save_critic`` wrote.

    Raises:
        ValueError: a file is missing or damaged, or of another format.
    """
    place = Path(folder)
    try:
        told = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}, and this version reads {FORMAT}")
        tensors = load_file(place / TENSORS)
        trunk = _network(AutoConfig.from_pretrained(place)) if told["own_network"] else None
        critic = Critic(int(told["hidden_size"]), trunk)
        critic.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{place} holds no critic that can be loaded: {error}") from error
    return critic


def _network(config: Any) -> nn.Module:
    """As ``AutoModel.from_config``, which under ZeRO-3 gives a rank empty parameters that take no tensors; DeepSpeed
    splits it later."""
    network: nn.Module = MODEL_MAPPING[type(config)](config)
    return network


def save_beside(trainer: Any, critic: Critic | None, folder: str | None, state: Mapping[str, Any] | None) -> None:
    """``critic/`` in the folder that the policy was just saved to; where it was not (sharded states of DeepSpeed),
    nothing. From transformers 5.20 on every rank comes here.

    Args:
        state: of the whole module, as HF hands it over for the policy; ``None``: it is in memory.
    """
    if critic is not None and state != {} and trainer.args.should_save:
        whole = trainer.model.state_dict() if state is None else state
        save_critic(Path(folder or trainer.args.output_dir) / FOLDER, critic, whole)


@torch.no_grad()
def take_up(
    trainer: Any, critic: Critic | None, checkpoint: str | None, setting: str = "resume_from_checkpoint"
) -> None:
    """The critic's tensors of a checkpoint, into the one that trains. FSDP and DeepSpeed have them in their own states,
    and loaded.

    Raises:
        ValueError: the checkpoint holds none, or another kind.
    """
    if checkpoint is None or critic is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    folder = Path(checkpoint) / FOLDER
    if not is_critic_folder(str(folder)):
        raise ValueError(
            f"`{setting}`: {checkpoint} holds no critic ({FOLDER}/{MANIFEST}), and this run has one (`value`): "
            "resume a "
            "checkpoint of a run with a critic, or start from the model in it"
        )
    try:
        critic.load_state_dict(load_file(folder / TENSORS))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        why = mismatch(error) if isinstance(error, RuntimeError) else error
        raise ValueError(f"`{setting}`: the critic of {checkpoint} does not fit `value.model`: {why}") from error


class WithTheBest(TrainerCallback):  # type: ignore[misc]
    """``load_best_model_at_end``: HF loads the policy of the best checkpoint; its critic comes with it, before anybody
    saves."""

    def __init__(self, trainer: Any, critic: Critic) -> None:
        self.trainer, self.critic = trainer, critic

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end:
            take_up(self.trainer, self.critic, state.best_model_checkpoint, "load_best_model_at_end")
