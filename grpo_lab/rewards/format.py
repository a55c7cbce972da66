"""ThinkFormatReward: 1.0 for R1's layout and nothing around it, else 0.0.

Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2 (format reward) and table 1 (template). Two layouts:

    form="think_answer"   <think> reasoning </think> <answer> answer </answer>
    form="think"          <think> reasoning </think> answer

Each tag occurs exactly once, in this order; white space is allowed around and between; both parts hold more than white
space. How we differ: TRL's `think_format_reward` knows the second layout only and accepts empty parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from grpo_lab.rewards.completion import completion_text

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class ThinkFormatReward:
    """Checks the layout of a completion.

    Args:
        form: `"think_answer"` or `"think"`, see the module.
        think_opened: who writes the first `<think>`. `"completion"`: the model. `"prompt"`: the chat template did, as the
            R1 template does, so the completion must not repeat it. `"auto"`: it may be in either place, once; where
            prompts are given, a completion without it passes only if its prompt ends with `<think>`.
    """

    def __init__(
        self,
        form: Literal["think_answer", "think"] = "think_answer",
        *,
        think_opened: Literal["completion", "prompt", "auto"] = "completion",
    ) -> None:
        if form not in ("think_answer", "think"):
            raise ValueError(f"form must be 'think_answer' or 'think'; got {form!r}")
        if think_opened not in ("completion", "prompt", "auto"):
            raise ValueError(f"think_opened must be 'completion', 'prompt' or 'auto'; got {think_opened!r}")
        self.form = form
        self.think_opened = think_opened
        self.__name__ = "think_format_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"ThinkFormatReward(form={self.form!r}, think_opened={self.think_opened!r})"

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """1.0 or 0.0 per completion. Prompts are read only with `think_opened="auto"`."""
        if completions is None:
            raise ValueError("ThinkFormatReward needs completions=[...]; got none")
        if prompts is not None and len(prompts) != len(completions):
            raise ValueError(f"got {len(prompts)} prompts and {len(completions)} completions; they must be one to one")
        texts = [completion_text(completion) for completion in completions]
        return [float(self._well_formed(text, self._opened(text, prompts, i))) for i, text in enumerate(texts)]

    def _opened(self, text: str, prompts: Sequence[Any] | None, row: int) -> bool:
        """Whether the prompt, not the completion, opened the thinking."""
        if self.think_opened != "auto":
            return self.think_opened == "prompt"
        if text.lstrip().startswith("<think>"):
            return False
        return prompts is None or _prompt_end(prompts[row]).endswith("<think>")

    def _well_formed(self, text: str, opened_by_prompt: bool) -> bool:
        if opened_by_prompt:
            text = "<think>" + text
        expected = _TAGS if self.form == "think_answer" else _TAGS[:2]
        if any(text.count(tag) != (tag in expected) for tag in _TAGS):
            return False
        before, _, rest = text.partition("<think>")
        thinking, closed, rest = rest.partition("</think>")
        if before.strip() or not closed or not thinking.strip():
            return False
        if self.form == "think":
            return bool(rest.strip())
        between, opened, rest = rest.partition("<answer>")
        answer, closed, after = rest.partition("</answer>")
        return bool(opened and closed and answer.strip()) and not between.strip() and not after.strip()


def _prompt_end(prompt: Any) -> str:
    """The end of a prompt: of a message list, of an assistant message that the completion continues."""
    if isinstance(prompt, str):
        return prompt.rstrip()
    last = prompt[-1] if prompt else {}
    return completion_text([last]).rstrip() if last.get("role") == "assistant" else ""
