"""Training on pairs with TRL: DPO, and SimPO through TRL's CPOTrainer.

    DPO     −log σ(β [log π(y⁺)/π₀(y⁺) − log π(y⁻)/π₀(y⁻)])                          arXiv 2305.18290, eq. 7
    SimPO   −log σ(β log π(y⁺)/|y⁺| − β log π(y⁻)/|y⁻| − γ)                           arXiv 2405.14734, eq. 6

SimPO needs no reference model and divides by the length, so a long answer is not dispreferred for being long but for
being in the second place. TRL's CPO adds a likelihood term to it by default (`cpo_alpha` 1): off here, as in SimPO's
paper, unless it is set. TRL's `simpo_gamma` is γ itself (TRL divides it by β before multiplying by β). γ = 0 is the form in
which lecture notes write it.

Both log `rewards/weight`, the mean of w(θ) = σ(r̂(y⁻) − r̂(y⁺)), see `weighted.implicit_weight`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from trl import SFTConfig

from grpo_lab.trainer.supervised.cold_start import checked

Method = Literal["dpo", "simpo"]
PAIR = ("prompt", "chosen", "rejected")


def prefer(
    method: Method,
    model: Any,
    tokenizer: Any,
    pairs: Dataset,
    output_dir: Path,
    arguments: dict[str, Any],
    callbacks: list[Any] | None = None,
    reference: Any = None,
    train: Callable[[Any], None] | None = None,
) -> None:
    """Train ``model`` to prefer ``chosen`` to ``rejected``. The trainer saves to ``output_dir`` (all processes join in).

    Args:
        pairs: columns ``prompt``, ``chosen``, ``rejected``, all text or all messages; others are not read.
        arguments: fields of ``trl.DPOConfig`` or of TRL's ``CPOConfig``.
        reference: DPO's π₀, a model; None: the model that training begins with.
        train: what trains the trainer; None: its ``train()``.

    Raises:
        ValueError: a reference for SimPO, no pairs, a missing column, or an unknown setting.
    """
    if missing := [name for name in PAIR if name not in pairs.column_names]:
        raise ValueError(f"pairs have no column {missing[0]!r}; they have {pairs.column_names}")
    if reference is not None and method != "dpo":
        raise ValueError(f"`method: {method}` has no reference model; got one")
    config, trainer_class = _trl(method)
    fixed = {"loss_type": "simpo", "cpo_alpha": 0.0, "remove_unused_columns": False} if method == "simpo" else {}
    read = check_training(method, arguments)
    settings = {"output_dir": str(output_dir), "report_to": "none", "save_strategy": "no", **fixed, **read}
    trainer = trainer_class(
        model=model,
        args=config(**settings),
        train_dataset=pairs.select_columns(list(PAIR)),
        processing_class=tokenizer,
        callbacks=callbacks,
        **({} if reference is None else {"ref_model": reference}),
    )
    trainer.train() if train is None else train(trainer)
    trainer.save_model(str(output_dir))


def check_training(method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``checked`` for the trainer of ``method`` (dpo, simpo, shortest_sft); trains nothing."""
    config: Any = SFTConfig if method == "shortest_sft" else _trl("dpo" if method == "dpo" else "simpo")[0]
    found = checked(config, arguments, "training")
    if method == "simpo" and found.get("loss_type", "simpo") != "simpo":
        raise ValueError(f"`training.loss_type` is {found['loss_type']!r}; `method: simpo` means 'simpo'")
    return found


def _trl(method: Method) -> tuple[Any, Any]:
    if method == "dpo":
        from trl import DPOConfig

        from grpo_lab.trainer.supervised.weighted import weighted_dpo

        return DPOConfig, weighted_dpo()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig

    from grpo_lab.trainer.supervised.weighted import weighted_cpo

    return CPOConfig, weighted_cpo()
