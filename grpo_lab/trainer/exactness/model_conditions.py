"""Properties of the model that rule out the exact update: randomness in the forward, layers that mix rows, positions.

There are two checks. The functions inspect the model: every module's probabilities of dropout, layer drop and router
noise, whatever the family calls them. ``RandomnessWatch`` does not trust names: in the first optimizer step it compares
the states of the random number generators before and after a forward. A forward that is a function of its inputs does
not change them. What torch's dropout draws can be excepted (``bin_probe``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

_LAYER_DROP = re.compile(r"layer_?drop|drop_?path|stochastic_depth")
_NOISE = re.compile(r"jitter")
_SHARED = re.compile(r"(rank|module)_?drop")
_DROPOUT = re.compile(r"drop")
#: Modules that drop whole channels. A row has masks of its own only if the first of three dimensions is the rows.
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


def dropout_rate(model: nn.Module) -> float:
    """Return the largest probability with which single values are dropped: by ``nn.Dropout`` modules, functional
    dropout, adapters' dropout."""
    modules = (float(m.p) for m in _dropouts(model) if not isinstance(m, _CHANNELS))
    others = (_LAYER_DROP, _NOISE, _SHARED)
    return max([_largest(model, _DROPOUT, others), *modules])


def shared_dropout_rate(model: nn.Module) -> float:
    """Return the largest probability with which something that rows share is dropped: channels, an adapter's ranks or
    whole modules (PEFT's LoHa)."""
    modules = (float(m.p) for m in _dropouts(model) if isinstance(m, _CHANNELS))
    return max([_largest(model, _SHARED), *modules])


def _dropouts(model: nn.Module) -> Iterator[nn.modules.dropout._DropoutNd]:
    return (m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))


def layer_drop_rate(model: nn.Module) -> float:
    """Return the largest probability that a whole layer is skipped in training (OPT's, BART's ``layerdrop``; drop
    path)."""
    return _largest(model, _LAYER_DROP)


def router_noise(model: nn.Module) -> float:
    """Return the largest noise on routers' or experts' inputs in training (``jitter_noise``; DBRX:
    ``moe_jitter_eps``)."""
    return _largest(model, _NOISE)


def mixes_rows(model: nn.Module, mixed_precision: str) -> str:
    """Return what makes a row's output depend on the other rows of its batch; "" if nothing does."""
    if mixed_precision == "fp8":
        return (
            "in fp8 activations are scaled by the whole batch's largest (accelerate's `mixed_precision`; in bf16 not)"
        )
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"the model has batch norm ({type(module).__name__}; no setting changes that)"
        if getattr(module, "expert_capacity", None) is not None:
            return "the model's experts drop the tokens that find them full (`expert_capacity` in its config)"
    return ""


def moves_positions(model: nn.Module) -> str:
    """Return why bins cannot give a row the positions that it has in TRL's padded batch; "" if no reason is known."""
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if getattr(adapter, "is_prompt_learning", False):
            name = type(adapter).__name__
            return f"virtual tokens stand before it, and PEFT drops position ids (`{name}`; LoRA keeps them)"
    for module in model.modules():
        if isinstance(module, nn.Embedding) and "attention_mask" in signature(module.forward).parameters:
            return "the model counts learned positions from the attention mask (OPT, BioGPT; no setting changes that)"
    text = _text_config(model)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for kind in (rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if isinstance(r, dict))):
        if kind in ("dynamic", "longrope"):
            return f"rotary angles follow the longest row of its batch (rope_type {kind!r} in the model's config)"
    return ""


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


def position_limit(model: nn.Module) -> int | None:
    """Return the number of positions in the model's config; None if it gives none (ALiBi, recurrent models)."""
    limit = getattr(_text_config(model), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        return limit
    return None


def padding_reaches_state(model: nn.Module) -> bool:
    """Return whether a recurrent state runs through a row's padding, so that its log-probs depend on how far TRL padded
    it.

    transformers marks models with a state (``_is_stateful``). Those that set padding to zero use one function for that,
    ``apply_mask_to_padding_states`` (Mamba, gated DeltaNet); models without it let padding through (RWKV,
    RecurrentGemma, xLSTM). A model that masks in another way is counted among these, too: the price is a slower update,
    not a wrong one.
    """
    stateful = [module for module in model.modules() if getattr(module, "_is_stateful", False)]
    homes = {type(module).__module__ for module in stateful}
    return any(not hasattr(sys.modules[home], "apply_mask_to_padding_states") for home in homes)


def takes_positions(model: nn.Module) -> bool:
    """Return whether the model's forward accepts position ids, and they can stand for the positions that padding gives
    a row."""
    forward = getattr(model, "get_base_model", lambda: model)().forward
    return not moves_positions(model) and "position_ids" in signature(forward).parameters


def _largest(model: nn.Module, kind: re.Pattern[str], others: tuple[re.Pattern[str], ...] = ()) -> float:
    """Return the largest positive number that a module keeps in an attribute whose name matches ``kind`` and none of
    ``others``; 0 if there is none. A value that the module never uses is counted too: the price is a slower update, not
    a wrong one."""
    rates = [0.0]
    for module in model.modules():
        for name, value in vars(module).items():
            if kind.search(name) and not any(other.search(name) for other in others):
                rates += _positive_numbers(value)
    return max(rates)


def _positive_numbers(value: Any) -> list[float]:
    """Return the numbers > 0 in an attribute: the value itself, or the values of a dict (adapter name → rate)."""
    values = value.values() if isinstance(value, dict) else [value]
    return [float(one) for one in values if isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0]


class RandomnessWatch:
    """Watches whether this process draws a random number between ``start`` and ``stop``, by the generators' states
    before and after. ``drawn`` is then True, and stays so."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[Tensor] = []
        self.drawn = False

    def start(self) -> None:
        self._before = self._states()

    def stop(self) -> None:
        self.drawn |= not all(torch.equal(old, new) for old, new in zip(self._before, self._states(), strict=True))

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            accelerator: Any = torch.get_device_module(self._device)
            states.append(accelerator.get_rng_state(self._device))
        return states

    def drawn_anywhere(self, accelerator: Any) -> bool:
        """Return whether a number was drawn on any rank, the same answer on all of them. A collective."""
        flag = torch.tensor([self.drawn], dtype=torch.long, device=accelerator.device)
        return bool(accelerator.gather(flag).any())
