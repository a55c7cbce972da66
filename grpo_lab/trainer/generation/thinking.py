"""The thinking budget inside the trainer: TRL's rollouts, cut and continued.

With ``rollout.thinking_budget`` the trainer gets a ``rollout_func`` that calls TRL's own generation up to three times
with another length limit (``engines/thinking_budget.py``), whichever engine TRL drives.

Its ``env_mask`` says which tokens the policy wrote. TRL makes it the ``tool_mask``, which multiplies the loss, the
sampler correction and every denominator that counts tokens, while ``completion_mask`` keeps the inserted tokens as
context. Their sampler log-probs are NaN: a use of them would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpo_lab.engines.sampler import Completion
from grpo_lab.engines.thinking_budget import Continue, ThinkingBudget, budgeted_generate
from grpo_lab.trainer.generation.in_step import generate_in_step

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from grpo_lab.trainer.settings.parse import RolloutSettings


def thinking_rollout(trainer: GRPOTrainer, settings: RolloutSettings, environment_factory: Any) -> Any:
    """The ``rollout_func`` for the constructed ``trainer``: its own where no budget is set, else a ``ThinkingRollout``.

    Raises:
        ValueError: the inserted text does not fit or does not close the thinking; a rollout function, tools or an
            environment of the team, which make completions in their own way.
    """
    if settings.thinking_budget is None:
        return trainer.rollout_func
    taken = {"rollout_func": trainer.rollout_func, "tools": trainer.tools, "environment_factory": environment_factory}
    for name, value in taken.items():
        if value:
            own = "which makes completions in a way of its own; leave one of them out"
            raise ValueError(f"`rollout.thinking_budget` does not combine with `{name}`, {own}")
    ends: dict[str, Any] = {"max_completion_length": trainer.max_completion_length, "eos_ids": trainer.eos_token_ids}
    asked = settings.thinking_budget
    return ThinkingRollout(ThinkingBudget.for_tokenizer(trainer._tokenizer, asked, text=settings.budget_text, **ends))


class ThinkingRollout:
    """TRL's ``rollout_func(prompts, trainer)`` under a budget; logs ``rollout/cut_share``."""

    #: completions come from the engine that TRL drives, so its limits hold for them
    drives_trls_engine = True

    def __init__(self, budget: ThinkingBudget) -> None:
        self.budget = budget

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        tokenized, images, multimodal = trainer._tokenize_prompts(prompts)
        if images is not None or multimodal:
            raise ValueError("`rollout.thinking_budget` handles text only, and these prompts have images")
        prompt_ids = [list(ids) for ids in tokenized]
        several = trainer.accelerator.num_processes > 1
        done = budgeted_generate(prompt_ids, self._generating(trainer, prompt_ids), self.budget, in_step=several)
        counts = torch.tensor([[sum(one.was_cut for one in done), len(done)]], device=trainer.accelerator.device)
        trainer.recorder.book().add_alike("rollout/cut_share", *trainer.accelerator.gather(counts).sum(0))
        unscored = any(completion.logprobs is None for completion in done)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion.ids for completion in done],
            "logprobs": None if unscored else [completion.logprobs for completion in done],
            "env_mask": [completion.mask for completion in done],
        }

    def _generating(self, trainer: GRPOTrainer, batch: list[list[int]]) -> Continue:
        """``generate(prompt_ids, max_new_tokens)`` by TRL's own generation. The thinking of a ``batch`` is asked for in
        groups (a server gets one request with ``n = G``); rows that go on differ within a group, and are asked for one
        by one."""

        def generate(prompt_ids: list[list[int]], max_new_tokens: int) -> list[Completion]:
            group = trainer._group_size() if self.budget.budget > 0 and prompt_ids == batch else 1
            return generate_in_step(trainer, prompt_ids, batch[:1], group, max_new_tokens)

        return generate
