"""Templates that make prompts of questions.

A base model's score moves by tens of points with the template (arXiv 2503.20783, section 2.2). So a template has a
name, which every data set of ours has in the column ``template``, and a run in its summary. Ours are:

* ``r1`` (text): DeepSeek-R1-Zero, arXiv 2501.12948, table 1: asks for ``<think>…</think> <answer>…``
* ``oat_r1`` (text): sail-sg/understand-r1-zero, ``train_zero_math.py``: its own wording of ``r1``, and it opens
  ``<think>``
* ``qwen_math`` (text): Qwen2.5-Math's ChatML prompt with its system sentence asking for ``\\boxed{}``;
  understand-r1-zero uses the same
* ``qwen_boxed`` (text): SimpleRL-Zoo's "complex" prompt (7B and larger): ChatML, ``\\boxed{}`` asked for in the user's
  turn
* ``abel`` (text): SimpleRL-Zoo's "simple" prompt (0.5B, 1.5B, Llama): question, "Let's think step by step."
* ``harness_gsm8k`` (text): lm-evaluation-harness, ``tasks/gsm8k/gsm8k.yaml``: question, answer; behind solved examples
  if a loader's ``shots`` asks for them
* ``none`` (text): the question and nothing else
* ``chat`` (messages): a user turn, optionally after a system turn; the tokenizer's own chat template renders it
* ``verl_gsm8k`` (messages): verl, ``examples/data_preprocess/gsm8k.py``: asks for the answer after ``####``
* ``tapeagents_boxed`` (messages): ServiceNow/TapeAgents, ``conf/rl_gsm8k.yaml``: asks for ``\\boxed{}``
* ``think``, ``no_think`` (messages): ``chat`` with Qwen3's flag for a mode (arXiv 2505.09388, 4.3) behind the question,
  ``/think`` or ``/no_think``
* ``modes`` (messages): ``chat`` with one of both flags at any place of `with_flag`, both drawn from the question

The wordings are the sources' character by character, slips and all: ``tapeagents_boxed`` has a backslash and an n where
a new line was meant. Text prompts reach the tokenizer as they are. With message prompts, completions are message lists.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from grpo_lab.settings import one_of

Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(frozen=True)
class TextTemplate:
    """A template whose prompt is the text ``before + question + after``, which the tokenizer gets as it is."""

    name: str
    before: str = ""
    after: str = ""

    def prompt(self, question: str) -> Prompt:
        return f"{self.before}{question}{self.after}"


@dataclass(frozen=True)
class ChatTemplate:
    """A template whose prompt is a user message ``before + question + after``, after a system message if ``system`` is
    set. The tokenizer's chat template renders it."""

    name: str = "chat"
    system: str | None = None
    before: str = ""
    after: str = ""

    def prompt(self, question: str) -> Prompt:
        turns = []
        if self.system is not None:
            turns = [{"role": "system", "content": self.system}]
        return [*turns, {"role": "user", "content": f"{self.before}{question}{self.after}"}]


MODES = ("think", "no_think")
"""The modes that a prompt can ask for with the flags ``/think`` and ``/no_think``."""
FlagPlace = Literal["user", "system", "both", "none"]


def with_flag(prompt: Sequence[Message], mode: str, place: FlagPlace) -> list[Message]:
    """Return a copy of ``prompt`` with the flag that asks for ``mode`` (``think`` or ``no_think``) at ``place``.

    The places are ``user`` (behind the text of the last user turn), ``system`` (in the system turn, which is added if
    there is none), ``both`` (there the flag of the other mode, and this one in the user turn, which counts since it is
    the last), and ``none`` (no flag: the model thinks, as by default).
    """
    turns = [dict(message) for message in prompt]
    if place in ("system", "both"):
        if turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        other_mode = "no_think" if mode == "think" else "think"
        flag = mode if place == "system" else other_mode
        turns[0]["content"] = f"{turns[0]['content']} /{flag}".strip()
    if place in ("user", "both"):
        [turn for turn in turns if turn["role"] == "user"][-1]["content"] += f" /{mode}"
    return turns


@dataclass(frozen=True)
class ModesTemplate(ChatTemplate):
    """A chat template that adds a flag for one of Qwen3's modes. Mode and place are drawn at random; the question is
    the seed, so that a question always gets the same prompt."""

    def prompt(self, question: str) -> Prompt:
        turns: Any = super().prompt(question)
        rng = random.Random(question)
        mode = rng.choice(MODES)
        places = get_args(FlagPlace)
        return with_flag(turns, mode, rng.choice(places if mode == "think" else places[:-1]))


PromptTemplate = TextTemplate | ChatTemplate

_R1_INSTRUCTION = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>."
)
_OAT_R1_INSTRUCTION = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>."
)
_QWEN_MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

TEMPLATES: dict[str, PromptTemplate] = {
    template.name: template
    for template in (
        TextTemplate("r1", before=f"{_R1_INSTRUCTION} User: ", after=" Assistant:"),
        TextTemplate(
            "qwen_math",
            before=f"<|im_start|>system\n{_QWEN_MATH_INSTRUCTION}<|im_end|>\n<|im_start|>user\n",
            after="<|im_end|>\n<|im_start|>assistant\n",
        ),
        TextTemplate("none"),
        ChatTemplate("chat"),
        TextTemplate("oat_r1", before=f"{_OAT_R1_INSTRUCTION}\nUser: ", after="\nAssistant: <think>"),
        TextTemplate("harness_gsm8k", before="Question: ", after="\nAnswer:"),
        TextTemplate("abel", before="Question:\n", after="\nAnswer:\nLet's think step by step.\n"),
        TextTemplate(
            "qwen_boxed",
            before="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
            after=f"\n{_QWEN_MATH_INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n",
        ),
        ChatTemplate("verl_gsm8k", after=' Let\'s think step by step and output the final answer after "####".'),
        ChatTemplate("tapeagents_boxed", after=f"\\n{_QWEN_MATH_INSTRUCTION}"),
        ChatTemplate("think", after=" /think"),
        ChatTemplate("no_think", after=" /no_think"),
        ModesTemplate("modes"),
    )
}


def find_template(template: str | PromptTemplate, system_prompt: str | None = None) -> PromptTemplate:
    """Return the template of that name, or ``template`` itself, with ``system_prompt`` as its system turn if that is
    set. Only a message template can carry one; text templates bring their own instruction.

    Raises:
        ValueError: the name is unknown, or the template cannot carry a system prompt.
    """
    if isinstance(template, str):
        if template not in TEMPLATES:
            raise ValueError(f"`template` is {template!r}{one_of(template, TEMPLATES)}")
        template = TEMPLATES[template]
    if system_prompt is None:
        return template
    if not isinstance(template, ChatTemplate):
        raise ValueError(
            f"system_prompt has no effect with template {template.name!r}, which brings its own instruction; "
            "unset system_prompt or set template to 'chat'"
        )
    return replace(template, system=system_prompt)


def with_shots(template: PromptTemplate, solved: Sequence[tuple[str, str]]) -> PromptTemplate:
    """Return a text template that puts solved examples (question, solution) before each prompt of ``template``.

    An example is its prompt, a space, its solution and an empty line, as in lm-evaluation-harness. Raises ValueError
    for a message template.
    """
    if not isinstance(template, TextTemplate):
        raise ValueError(
            f"`shots` are text before the question, and template {template.name!r} is a list of messages; set "
            "`template` to 'harness_gsm8k' or another text template, or leave `shots` out"
        )
    examples = "".join(f"{template.prompt(question)} {solution}\n\n" for question, solution in solved)
    return replace(template, name=f"{template.name}, {len(solved)} shots", before=examples + template.before)


def apply_template(question: str, template: str | PromptTemplate, system_prompt: str | None = None) -> Prompt:
    """Return ``question`` as a prompt: a string, or a message list for a message template such as ``chat``."""
    return find_template(template, system_prompt).prompt(question)
