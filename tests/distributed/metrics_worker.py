"""Trainings on two ranks whose metrics are recomputed by hand on rank 0, and ``update/bytes_moved``:
``metrics_worker.py MODEL OUT``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.exchange_worker import expected_bytes
from forked import as_rank
from grpo_lab import LabConfig
from grpo_lab.trainer.row_table import Carried
from grpo_lab.trainer.step.exact_update import ExactUpdate
from metrics_oracle import Recorded, ToolRollout, accuracy_reward, check_steps
from parity.harness import arguments, problems

KINDS = {
    "token": {"objective": "dr_grpo", "epsilon": 0.03, "epsilon_high": 0.05, "token_weights_every": 1},
    "sequence": {"objective": "gspo", "epsilon": 0.01, "epsilon_high": 0.012},
}


class Counted(ExactUpdate):
    """Counts what comes to this rank by loops over the plan's rows."""

    came: ClassVar[list[int]] = []

    def _rows_of(self, window: list[dict[str, Any]], found: Any) -> Any:
        self.of_step = window
        return super()._rows_of(window, found)

    def _exchanged(self, step: Any, found: Any) -> Any:
        plan, rows = super()._exchanged(step, found)
        window = self.of_step
        accelerator, mine = self.trainer.accelerator, range(sum(part["prompt_ids"].size(0) for part in window))
        total = expected_bytes(window, plan, accelerator)
        if self.prompts.may_be_shared:  # a number of each of the others' rows says which prompt it has
            total += 8 * (accelerator.num_processes - 1) * len(mine)
        unmoved = Carried(window[0]).unmoved
        if unmoved is None or unmoved.all():  # first pass: log-probs come home for the second one, 4 bytes a token
            lengths = [int(n) for part in window for n in part["completion_mask"].sum(1)]
            here = {row for one in plan.bins[accelerator.process_index] for row in one}
            planned = {row for bins in plan.bins for one in bins for row in one}
            places = {place: accelerator.process_index * len(mine) + place for place in mine}
            total += sum(4 * lengths[place] for place, row in places.items() if row in planned - here)
        Counted.came.append(total)
        return plan, rows


def main(model_folder: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for kind, settings in KINDS.items():
        shape = {
            "num_iterations": 2,
            "learning_rate": 1.0,
            "per_device_train_batch_size": 2,
            "update": {"max_tokens": 40, "silent_rows": "keep"},  # a look brings bytes of its own
        }
        config = LabConfig(**arguments(Path(out) / kind, **shape, **settings))
        config.script = ToolRollout(range(20, 90), (1, 1, 5, 9, 14), end_id=0, truncated_share=0.3)
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_funcs=[accuracy_reward],
            args=config,
            train_dataset=problems(),
            processing_class=tokenizer,
            rollout_func=config.script,
        )
        Counted.came = []
        trainer.parts.update.__class__ = Counted
        trainer.train()
        came = [sum(step) / 2 for step in zip(*gather_object([Counted.came]), strict=True)]
        if trainer.accelerator.is_main_process:
            seen = check_steps(trainer.steps, [row for row in trainer.state.log_history if "loss" in row], config)
            assert [row["update/bytes_moved"] for row in trainer.state.log_history if "loss" in row] == came
            assert min(came) > 0
            (Path(out) / f"{kind}.txt").write_text(" ".join(sorted(seen)))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
