"""ThinkFormatReward: 1.0 for R1's layout and nothing around it, else 0.0.

Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2 (format reward) and table 1 (template). Two layouts:

    form="think_answer"   <think> reasoning </think> <answer> answer </answer>
    form="think"          <think> reasoning </think> answer

Each tag occurs exactly once, in this order; white space is allowed around and between; both parts hold more than white
space. How we differ: TRL's `think_format_reward` knows the second layout only and accepts empty parts.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from grpo_lab.rewards.completion import END_OF_THINK, THINK, RowReward

_TAG = re.compile(r"</?(?:think|answer)>")
_TAGS = [THINK, END_OF_THINK, "<answer>", "</answer>"]
_LAYOUTS = {"think_answer": (_TAGS, [False, True, False, True, False]), "think": (_TAGS[:2], [False, True, True])}
"""form → its tags in order, and which of the texts around them say something."""


class ThinkFormatReward(RowReward):
    """Checks the layout of a completion.

    Args:
        form: `"think_answer"` or `"think"`, see the module.
        think_opened: who writes the first `<think>`. `"completion"`: the model. `"prompt"`: the chat template did, so
            the completion must not repeat it.
    """

    def __init__(
        self,
        form: Literal["think_answer", "think"] = "think_answer",
        *,
        think_opened: Literal["completion", "prompt"] = "completion",
    ) -> None:
        if form not in _LAYOUTS:
            raise ValueError(f"form must be 'think_answer' or 'think'; got {form!r}")
        if think_opened not in ("completion", "prompt"):
            raise ValueError(f"think_opened must be 'completion' or 'prompt'; got {think_opened!r}")
        self.form = form
        self.think_opened = think_opened
        self.__name__ = "think_format_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"ThinkFormatReward(form={self.form!r}, think_opened={self.think_opened!r})"

    def score(self, text: str, *row: Any) -> float:
        text = THINK + text if self.think_opened == "prompt" else text
        tags, filled = _LAYOUTS[self.form]
        return float(_TAG.findall(text) == tags and [bool(part.strip()) for part in _TAG.split(text)] == filled)
