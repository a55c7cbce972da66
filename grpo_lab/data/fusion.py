"""Rows for Qwen3's thinking mode fusion: one model that thinks, or answers at once, as the prompt asks.

Source: Qwen3 Technical Report (arXiv 2505.09388), section 4.3 and table 9. The rows are made of answers with reasoning
(rejection-sampled from the model that reasons) and of answers without:

    thinking       …question /think      <think>\\nreasoning\\n</think>\\n\\nanswer    some without a flag: the default
    non-thinking   …question /no_think   <think>\\n\\n</think>\\n\\nanswer             an empty block before the answer

**The empty block is part of the completion, and is trained on.** The prompts of `/no_think` and `/think` differ only in
the flag, so writing the empty block *is* the choice of the mode. A model for which it is masked never learns to write
it. Only `enable_thinking=False`, a switch of the chat template, puts it into the prompt.

A flag is in the user turn or in the system turn, and the last one decides, in dialogues too. Answers of earlier turns
have no reasoning, as chat templates show them. The report does not say how many rows are of which kind. Qwen3 can
answer when a budget has cut its reasoning, without training for it. A small model needs rows of this kind: `cut`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from grpo_lab.data.prompts import MODES, FlagPlace, Message, with_flag
from grpo_lab.settings import Share, Whole, must_be, settings

Row = dict[str, Any]
CONTINUES = "continues"
"""Column of rows for `sft`: true if the completion continues the assistant's message with which the prompt ends."""
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
"""What stands before an answer without thinking."""
_THINK = "<think>"
_END = "</think>"


@settings()
class FusionShares:
    """How many rows of a fusion are of which kind. Shares are between 0 and 1; the kind is drawn row by row.

    Args:
        unflagged: share of the thinking rows that have no flag.
        in_system: share of the flagged rows of one turn that have the flag in the system turn.
        in_both: share of the flagged rows of one turn with two flags: the other mode's in the system turn, and their
            own, which decides, in the user turn.
        dialogues: share of the rows with further questions and their answers before their own.
        most_turns: largest number of questions in a dialogue, its own included.
        cut: number of extra copies of each thinking row. In a copy the reasoning is cut behind a random word, digit or
            sign, perhaps its last, and closed in the prompt (as by ``budget_text: "\\n</think>\\n\\n"``), so that
            only the answer is trained on.
    """

    unflagged: Share = 0.2
    in_system: Share = 0.3
    in_both: Share = 0.2
    dialogues: Share = 0.2
    most_turns: Annotated[int, Field(ge=2), must_be("a whole number of at least 2")] = 3
    cut: Whole = 0

    def __post_init__(self) -> None:
        if self.in_system + self.in_both > 1.0:
            raise ValueError(f"`in_system` and `in_both` are {self.in_system + self.in_both:g} together; at most 1")


def thought_through(text: str) -> bool:
    """Return whether ``text`` is one closed, non-empty block of reasoning with an answer behind it."""
    before, _, rest = text.partition(_THINK)
    reasoning, _, answer = rest.partition(_END)
    single = _THINK not in rest and _END not in answer
    return bool(single and not before.strip() and reasoning.strip() and answer.strip())


def goes_on(row: Mapping[str, Any]) -> bool:
    """Return whether a row's completion continues the assistant's message that its prompt ends with."""
    return bool(row.get(CONTINUES))


def fusion_rows(
    thinking: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], shares: FusionShares, seed: int = 0
) -> tuple[list[Row], dict[str, int]]:
    """Make rows for supervised training on both modes.

    Args:
        thinking: rows with a ``prompt`` of messages and an ``answer``, a text with its reasoning in a block
            (`thought_through`). Other columns are kept.
        plain: the same, but for answers without a block; they get the empty one.
        shares: how many rows are of which kind.
        seed: the same arguments give the same rows.

    Returns:
        the rows, thinking ones first, then plain ones, then cut copies, and the number of rows of each ``flag``. Their
        columns are ``prompt``, ``completion``, ``mode`` (`think`, `no_think`), ``flag``, ``continues`` and those kept.
        ``flag`` is its place (`user`, `system`, `both`), `none`, `dialogue`, or `cut` for a cut copy.

    Raises:
        ValueError: a prompt is no list of messages with text, or has a flag; or an answer is of the other mode.
    """
    every = [*(("think", row) for row in thinking), *(("no_think", row) for row in plain)]
    for number, (mode, row) in enumerate(every, start=1):
        if wrong := _misfit(mode, row["prompt"], row["answer"]):
            raise ValueError(f"row {number} of the fusion: {wrong}")
    built = []
    flags = Counter(user=0, system=0, both=0, none=0, dialogue=0, cut=0)
    for number, (mode, row) in enumerate(every):
        flag, prompt = _asked(mode, row["prompt"], every, shares, random.Random(f"{seed}/{number}"))
        if mode == "think":
            content = row["answer"]
        else:
            content = EMPTY_BLOCK + row["answer"].strip()
        columns = {name: value for name, value in row.items() if name != "answer"}
        completion = [{"role": "assistant", "content": content}]
        built.append(
            {**columns, "prompt": prompt, "completion": completion, "mode": mode, "flag": flag, CONTINUES: False}
        )
        flags[flag] += 1
    rng = random.Random(f"{seed}/cut")
    built += [_cut(row, rng) for row in built[: len(thinking)] for _ in range(shares.cut)]
    return built, {**flags, "cut": len(built) - len(every)}


def _cut(row: Row, rng: random.Random) -> Row:
    """Return a copy of a thinking row whose reasoning is cut behind a random word, digit or sign, and closed. That is
    part of its prompt, as the beginning of the assistant's message, and the completion is the answer alone."""
    reasoning, _, answer = row["completion"][0]["content"].partition(_END)
    words = re.findall(r"\s*(?:[^\W\d]+|\S)", reasoning.partition(_THINK)[2].strip())
    head = f"{_THINK}\n{''.join(words[: rng.randint(1, len(words))])}\n{_END}\n\n"
    prompt = [*row["prompt"], {"role": "assistant", "content": head}]
    completion = [{"role": "assistant", "content": answer.strip()}]
    return {**row, "prompt": prompt, "completion": completion, "flag": "cut", CONTINUES: True}


def _misfit(mode: str, prompt: Any, answer: str) -> str | None:
    """Return why a row cannot be used, in words: its prompt has a flag or no messages, or its answer is not of
    ``mode``. None if it can."""
    if isinstance(prompt, str) or not all(isinstance(turn.get("content"), str) for turn in prompt):
        return f"its prompt is {prompt!r:.200}; messages with text are needed"
    if any(word in ("/think", "/no_think") for turn in prompt for word in turn["content"].split()):
        return "its prompt has a flag already; take rows of the template `chat`"
    if mode == "think" and not thought_through(answer):
        return f"its answer is {answer!r:.200}; it needs one closed block of reasoning before it"
    if mode == "no_think" and (_THINK in answer or _END in answer or not answer.strip()):
        return f"its answer is {answer!r:.200}; it needs no block of reasoning"
    return None


def _asked(
    mode: str, prompt: list[Message], every: Sequence[tuple[str, Any]], shares: FusionShares, rng: random.Random
) -> tuple[str, list[Message]]:
    """Draw a row's ``flag`` (see ``fusion_rows``), and return it with the prompt that has it.

    ``every``: all (mode, row), of which a dialogue takes its earlier questions.
    """
    if rng.random() < shares.dialogues:
        earlier = [rng.choice(every)[1] for _ in range(rng.randint(2, shares.most_turns) - 1)]
        return "dialogue", _dialogue(mode, prompt, earlier, rng)
    if mode == "think" and rng.random() < shares.unflagged:
        return "none", with_flag(prompt, mode, "none")
    places: tuple[FlagPlace, ...] = ("system", "both", "user")
    flag = rng.choices(places, (shares.in_system, shares.in_both, 1.0 - shares.in_system - shares.in_both))[0]
    return flag, with_flag(prompt, mode, flag)


def _dialogue(mode: str, prompt: list[Message], earlier: Sequence[Any], rng: random.Random) -> list[Message]:
    """Return a dialogue that ends with the question of ``prompt`` and asks for ``mode`` there.

    Before it come the ``earlier`` rows' questions with their answers and random flags. With even chances the last
    question has the flag itself, or the question before it has it and the last one none.
    """
    carried = rng.random() < 0.5
    turns = [turn for turn in prompt if turn["role"] == "system"]
    for number, row in enumerate(earlier, start=1):
        flag = rng.choice([None, *MODES])
        turns += _question(row["prompt"], mode if carried and number == len(earlier) else flag)
        turns.append({"role": "assistant", "content": row["answer"].rpartition(_END)[2].strip()})
    return turns + _question(prompt, None if carried else mode)


def _question(prompt: list[Message], flag: str | None) -> list[Message]:
    """Return a prompt without its system turn, with ``flag`` behind the user's text (None: without a flag)."""
    asked = [turn for turn in prompt if turn["role"] != "system"]
    if flag is None:
        return asked
    return with_flag(asked, flag, "user")
