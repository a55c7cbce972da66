"""DeepSeek-R1's language consistency reward: the share of the reasoning's words that are in the target language.

    reward = words of the reasoning in the target language / words of the reasoning      ∈ [0, 1]

Source: DeepSeek-R1, arXiv 2501.12948, section 2.3.2: RL on a model that mixes languages in its chain of thought; the reward
is added directly to the accuracy reward. It costs a little accuracy (same section), so look at both.

The paper says neither what a word is nor how its language is found. Ours: ``words`` (what counts, and in which script),
``evidence`` and ``shares`` (languages that share a script). How well it works, with figures:
``docs/algorithms/language_consistency.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from grpo_lab.rewards.completion import completion_text, reasoning_in
from grpo_lab.rewards.language.shares import language_shares
from grpo_lab.rewards.language.words import GROUP_OF_LANGUAGE, known_languages
from grpo_lab.rewards.protocol import Scope

FROM_PROMPT = "prompt"


class LanguageConsistencyReward:
    """``(completions=[…]) -> [share, …]``, each in [0, 1].

    Args:
        target: a language code (``en``, ``zh``, …; ``words.known_languages()`` lists them), or ``"prompt"``: the language
            that most words of the row's prompt are in. A prompt whose language is not clear (formulas only, two languages
            in equal parts) makes the row unscorable: ``None``.
        empty: the value of reasoning without a single countable word: nothing at all, or only digits and formulas. 0 by
            default, because a policy finds whatever pays: with 1 the cheapest way out of mixed-language reasoning is no
            reasoning, and with ``None`` such a row would escape the reward.
        prompt_column: with ``target="prompt"``, the data column that holds the question, where the prompt itself begins
            with instructions in another language.
    """

    scope: ClassVar[Scope] = "completion"

    def __init__(self, target: str = "en", empty: float = 0.0, prompt_column: str | None = None) -> None:
        code = str(target).replace("_", "-").split("-")[0].lower()
        if code != FROM_PROMPT and code not in GROUP_OF_LANGUAGE:
            raise ValueError(f"`target` must be 'prompt' or one of {known_languages()}; got {target!r}")
        if not (math.isfinite(empty) and 0.0 <= empty <= 1.0):
            raise ValueError(f"`empty` is the reward of wordless reasoning and must be in [0, 1]; got {empty!r}")
        if prompt_column is not None and code != FROM_PROMPT:
            raise ValueError(
                f"`prompt_column={prompt_column!r}` has no effect with target={target!r}; it needs 'prompt'"
            )
        self.target = code
        self.empty = float(empty)
        self.prompt_column = prompt_column
        self.__name__ = "language_consistency_reward"

    def __repr__(self) -> str:
        return f"LanguageConsistencyReward(target={self.target!r}, empty={self.empty})"

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        if completions is None:
            raise ValueError("LanguageConsistencyReward needs completions=[…]; got none")
        targets = self._targets(prompts, len(completions), columns)
        return [
            None if target is None else self._score(reasoning_in(completion), target)
            for completion, target in zip(completions, targets)
        ]

    def _score(self, reasoning: str, target: str) -> float:
        found = language_shares(reasoning, expected=target)
        if found.words == 0:
            return self.empty
        return min(1.0, found.shares.get(target, 0.0))

    def _targets(
        self, prompts: Sequence[Any] | None, rows: int, columns: Mapping[str, Sequence[Any]]
    ) -> list[str | None]:
        if self.target != FROM_PROMPT:
            return [self.target] * rows
        questions = prompts if self.prompt_column is None else columns.get(self.prompt_column)
        if questions is None or len(questions) != rows:
            where = "`prompts`" if self.prompt_column is None else f"the column {self.prompt_column!r}"
            raise ValueError(
                f"LanguageConsistencyReward(target='prompt') needs {where}, one for each of {rows} completions"
            )
        return [_language_of(_last_question(question)) for question in questions]


@lru_cache(maxsize=4096)
def _language_of(question: str) -> str | None:
    return language_shares(question).dominant()


def _last_question(prompt: Any) -> str:
    """The text of a prompt; of a message list, its last user message."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") == "user"]
    return completion_text([{**asked[-1], "role": "assistant"}]) if asked else ""
