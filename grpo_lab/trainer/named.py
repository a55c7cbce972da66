"""Named trainers: declarations of a few lines."""

from __future__ import annotations

from grpo_lab.trainer.lab_trainer import LabTrainer


class DrGRPOTrainer(LabTrainer):
    """Dr.GRPO (arXiv 2503.20783): no division by the standard deviation, and a constant normaliser."""

    objective = "dr_grpo"
