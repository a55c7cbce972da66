"""Trainers and their configuration: the only package of grpo_lab that imports ``trl``."""

from grpo_lab.trainer.trl_import import import_trl

import_trl()  # before anything else imports it

# ruff: noqa: E402
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.config import LabConfig
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.trainer.named import DrGRPOTrainer, KimiTrainer, PPOTrainer, R1ZeroTrainer

__all__ = ["DrGRPOTrainer", "KimiTrainer", "LabConfig", "LabTrainer", "PPOTrainer", "R1ZeroTrainer", "trl_bridge"]
