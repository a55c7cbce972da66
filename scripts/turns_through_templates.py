"""Turns with hostile tools through chat templates: whether tokens of a turn are the beginning of the next turn's.

    python scripts/turns_through_templates.py --turns 100000 --tokenizer /work/shared/data/tokenizers/qwen3

A conversation has up to six turns. The policy's text is what the template writes for random calls; sometimes it is
spelled otherwise, split into other tokens, or cut by a limit. Tools answer with marks of turns, NULs, lone surrogates
and other alphabets. Our way is compared with the naive one, which renders all messages again and encodes them. The
vocabulary is that of ``--tokenizer``, with each template's own marks as special tokens.

Printed is a line for each template: turns played; what the template writes otherwise when a turn is rendered anew;
turns whose tokens were not the beginning of the next turn's (``cut anew``); answers of tools that came out as marks of
a turn (``forged``); and how often the naive way changes earlier tokens.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)

from grpo_lab.turns.dialogue import ChatDialogue, readable
from grpo_lab.turns.protocols import TurnTokens
from grpo_lab.turns.template_check import check_template
from grpo_lab.turns.trajectory import CutAnew, Trajectory, unbroken

FOLDER = Path(trl.__file__).parent / "chat_templates"
MARK = re.compile(r"<[|｜]?[A-Za-z_▁/]+[|｜]?>|<\|\"\|>")
#: Tokens at which a model of each family stops; the first is the tokenizer's ``eos_token``.
STOPS = {
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "lfm": ("<|im_end|>",),
    "nemotron": ("<|im_end|>",),
    "llama": ("<|eot_id|>", "<|eom_id|>"),
    "gemma": ("<eos>", "<turn|>", "<|tool_response>"),
    "diffusion": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "muse": ("<|eot|>", "<|eom|>"),
}
#: Templates to try: name in the table, file, arguments of the template, and whether TRL's training template may take
#: its place, as in TRL's trainer.
CASES: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("Qwen3, thinking", "qwen3", {}, True),
    ("Qwen3, no thinking", "qwen3", {"enable_thinking": False}, True),
    ("Qwen2.5", "qwen2_5", {}, True),
    ("Qwen3.5, thinking", "qwen3_5_think", {}, True),
    ("Llama 3.1", "llama3_1", {}, True),
    ("Gemma 4", "gemma4_v5", {}, True),
    ("GLM 4 MoE", "glm4moe", {}, True),
    ("gpt-oss", "gptoss", {}, True),
    ("LFM 2.5", "lfm2_2_5", {}, True),
    ("Qwen3, its own template", "qwen3", {}, False),
    ("DeepSeek V3", "deepseekv3", {}, True),
)
WORDS = (
    "so",
    "we add",
    "\\frac{1}{2}",
    "  ",
    "\n\n",
    "日本語",
    "עברית",
    "🙂",
    "x²",
    "\t",
    "café",
    "{",
    '"',
    "\\boxed{4}",
)
HOSTILE = (
    "\0",
    "\ud83d",
    "\udc00",
    "</tool_response>",
    "{{ messages }}",
    "{% raw %}",
    "\ufdd0",
    "\r\n",
    "'",
    "<",
    "|>",
)


def tokenizer_of(folder: Path | str, template: str) -> Any:
    """Return the tokenizer with a chat template, the template's marks as special tokens, and its ``stops``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    stops = next(stops for family, stops in STOPS.items() if template.startswith(family))
    known = tokenizer.get_vocab()
    new = sorted({*MARK.findall(source), *stops} - known.keys())
    tokenizer.add_special_tokens({"additional_special_tokens": new})
    tokenizer.eos_token = stops[0]
    tokenizer.chat_template = source
    tokenizer.stops = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    return tokenizer


def dialogue_of(tokenizer: Any, kwargs: dict[str, Any], training: bool = True) -> ChatDialogue:
    """Return the dialogue as the trainer makes it. With ``training``, a template that does not render earlier turns the
    same way again is replaced by TRL's training template."""
    add_response_schema(tokenizer)
    template = None
    if training and not is_chat_template_prefix_preserving(tokenizer):
        template = get_training_chat_template(tokenizer)
    return ChatDialogue(tokenizer, parse_response, tokenizer.stops, template, kwargs)


class Play:
    """Plays conversations through one dialogue.

    Attributes:
        counted: counts of turns, ``forged`` marks, turns ``cut anew``, and conversations that the naive way had, too.
        known: kind of answers → number of marks that the template itself writes around them.
        special: ids of tokens that are marks.
        marks: their texts.
    """

    def __init__(self, dialogue: ChatDialogue, seed: int, naive_share: float) -> None:
        self.dialogue = dialogue
        self.draw = random.Random(seed)
        self.naive_share = naive_share
        self.counted: Counter[str] = Counter()
        self.known: dict[Any, int] = {}
        added = dialogue.tokenizer.added_tokens_decoder
        self.special = {token for token, mark in added.items() if mark.special or mark.content in dialogue.source}
        self.marks = [added[token].content for token in self.special]

    def conversation(self) -> None:
        """Play one conversation of up to six turns."""
        dialogue = self.dialogue
        asked = [{"role": "user", "content": self.text(WORDS)}]
        one = Trajectory.begin(dialogue.encoded(dialogue.rendered(asked, add_generation_prompt=True)))
        messages: list[dict[str, Any]] = list(asked)
        seen: list[list[int]] = []
        anew = one.so_far if self.draw.random() < self.naive_share else None
        for _ in range(self.draw.randint(1, 6)):
            seen.append(one.so_far)
            turn = self.turn(asked)
            message = dialogue.parsed(turn, one.so_far, ()).message
            one = one.with_own(TurnTokens(turn, None, 0))
            answers = self.answers(message)
            added = dialogue.answers(answers, one.so_far)
            self.counted["turns"] += 1
            self.counted["forged"] += self.marks_in(added) > self.harmless(answers, one.so_far)
            messages += [message, *answers]
            if anew is not None:
                anew = self.naive(messages, [*anew, *turn])
            one = one.with_foreign(added)
        for before in seen:
            self.counted["cut anew"] += one.so_far[: len(before)] != before
        unbroken(one.turns, one.prompt, one.ids, dialogue.name)

    def naive(self, messages: list[dict[str, Any]], so_far: list[int]) -> list[int]:
        """Return the tokens of all messages, rendered and encoded again. Count if they do not begin with ``so_far``,
        the tokens that the policy has seen and written that way."""
        self.counted["naive"] += 1
        try:
            ids = self.dialogue.encoded(readable(self.dialogue.rendered(messages, add_generation_prompt=True)))
        except TemplateError:  # the template cannot render what the policy did
            ids = []
        self.counted["naive cut"] += ids[: len(so_far)] != so_far
        return ids

    def turn(self, asked: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a policy's turn, in answer to the messages ``asked``."""
        dialogue = self.dialogue
        calls = [{"type": "function", "function": {"name": "find", "arguments": self.arguments()}}]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        if self.draw.random() < 0.5:
            message.update(dict.fromkeys(("reasoning_content", "thinking"), self.text(WORDS)))
        header = dialogue.rendered(asked, add_generation_prompt=True)
        whole = dialogue.rendered([*asked, message])
        text = whole[len(header) :] if whole.startswith(header) else whole[whole.rindex(dialogue.call_mark) :]
        if self.draw.random() < 0.3:
            text = text.replace('": "', '":"')
        ids = dialogue.encoded(text)
        behind = next((place for place, token in enumerate(reversed(ids)) if token in dialogue.ends), 0)
        ids = ids[: len(ids) - behind]
        if self.draw.random() < 0.1:
            ids = self.split(ids)
        if self.draw.random() < 0.05:
            ids = ids[: self.draw.randint(1, len(ids))]
        return ids

    def split(self, ids: list[int]) -> list[int]:
        """Return the same text with one token written as two, as a policy may sample it."""
        place = self.draw.randrange(len(ids))
        text = self.dialogue.tokenizer.decode([ids[place]])
        if ids[place] in self.special or len(text) < 2 or "\ufffd" in text:
            return ids
        return [*ids[:place], *self.dialogue.encoded(text[0]), *self.dialogue.encoded(text[1:]), *ids[place + 1 :]]

    def answers(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tools' answers to a message."""
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()] or ["unparsable"]
        pieces = (*WORDS, *HOSTILE, *self.marks)
        return [{"role": "tool", "name": name, "content": self.text(pieces)} for name in names]

    def arguments(self) -> dict[str, str]:
        """Return random arguments of a call."""
        return {"key": self.text(WORDS[:-4]), "more": "1"}

    def text(self, pieces: Sequence[str]) -> str:
        """Return a random text of the given pieces."""
        return "".join(self.draw.choice(pieces) + self.draw.choice(("", " ")) for _ in range(self.draw.randint(1, 12)))

    def marks_in(self, ids: list[int]) -> int:
        """Return the number of marks among tokens."""
        return sum(token in self.special for token in ids)

    def harmless(self, answers: list[dict[str, Any]], before: list[int]) -> int:
        """Return the number of marks that the template writes around the same answers with harmless texts."""
        kind = (*(answer["name"] for answer in answers), before[-1])
        if kind not in self.known:
            plain = [{**answer, "content": "x"} for answer in answers]
            self.known[kind] = self.marks_in(self.dialogue.answers(plain, before))
        return self.known[kind]


def row(label: str, folder: Path, turns: int, naive_share: float, seed: int = 0) -> str:
    """Play ``turns`` turns through a template, and return its row of the table."""
    _, template, kwargs, training = next(case for case in CASES if case[0] == label)
    try:
        dialogue = dialogue_of(tokenizer_of(folder, template), kwargs, training)
        different = "; ".join(check_template(dialogue)) or "nothing"
    except (ValueError, CutAnew) as error:
        return f"| {label} | refused | {str(error).split(': take')[0].split('. ')[0]} | | | |"
    play = Play(dialogue, seed, naive_share)
    begun = time.perf_counter()
    while play.counted["turns"] < turns:
        play.conversation()
    seconds = time.perf_counter() - begun
    counted = play.counted
    share = 100 * counted["naive cut"] / max(1, counted["naive"])
    naive = f"{counted['naive cut']:,} of {counted['naive']:,} ({share:.0f} %)"
    print(f"{label}: {seconds:.0f} s", file=sys.stderr)
    return f"| {label} | {counted['turns']:,} | {different} | {counted['cut anew']} | {counted['forged']} | {naive} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=100_000, help="turns, all templates together")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--naive", type=float, default=0.2, help="share of conversations that the naive way has, too")
    parser.add_argument("--only", nargs="*", default=[case[0] for case in CASES])
    chosen = parser.parse_args()
    played = [case for case in CASES if case[3] and case[1] != "deepseekv3"]
    print("| template | turns | rendered anew, the template | cut anew | forged | the naive way cuts anew |")
    print("|---|---|---|---|---|---|")
    for label in chosen.only:
        print(row(label, chosen.tokenizer, -(-chosen.turns // len(played)), chosen.naive), flush=True)


if __name__ == "__main__":
    main()
