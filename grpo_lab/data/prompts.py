"""How a question becomes a prompt.

A base model's score moves by tens of points with the template (arXiv 2503.20783, section 2.2), so a template has a
name, every data set of ours carries it in the column ``template``, and a run states it in its summary.

=============  ==========  ==========================================================================================
name           prompt is   source
=============  ==========  ==========================================================================================
``r1``         text        DeepSeek-R1-Zero, arXiv 2501.12948, table 1: asks for ``<think>…</think> <answer>…</answer>``
``qwen_math``  text        Qwen2.5-Math's ChatML prompt with its system sentence asking for ``\\boxed{}``
``none``       text        the question and nothing else
``chat``       messages    a user turn, optionally after a system turn; the tokenizer's own chat template renders it
=============  ==========  ==========================================================================================

Text prompts reach the tokenizer as they stand (TRL adds no chat template to them). Message prompts make completions
message lists as well; every reward of ours takes both.
"""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(frozen=True)
class TextTemplate:
    """``before + question + after``, passed to the tokenizer as it is."""

    name: str
    before: str = ""
    after: str = ""

    def prompt(self, question: str) -> Prompt:
        return f"{self.before}{question}{self.after}"


@dataclass(frozen=True)
class ChatTemplate:
    """A user message with the question, after a system message where ``system`` is set."""

    name: str = "chat"
    system: str | None = None

    def prompt(self, question: str) -> Prompt:
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*turns, {"role": "user", "content": question}]


PromptTemplate = TextTemplate | ChatTemplate

_R1_INSTRUCTION = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>."
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
    )
}


def find_template(template: str | PromptTemplate, system_prompt: str | None = None) -> PromptTemplate:
    """The template of that name; ``system_prompt`` is for ``chat`` alone, the others bring their own instruction.

    Raises:
        ValueError: an unknown name, or a system prompt beside a template that cannot carry it.
    """
    if isinstance(template, str):
        if template not in TEMPLATES:
            raise ValueError(f"unknown template {template!r}; allowed: {', '.join(TEMPLATES)} (setting: template)")
        template = TEMPLATES[template]
    if system_prompt is None:
        return template
    if not isinstance(template, ChatTemplate):
        raise ValueError(
            f"system_prompt has no effect with template {template.name!r}, which brings its own instruction; "
            "unset system_prompt or set template to 'chat'"
        )
    return ChatTemplate(template.name, system_prompt)


def apply_template(question: str, template: str | PromptTemplate, system_prompt: str | None = None) -> Prompt:
    """``question`` as a prompt: a string, or a message list for ``chat``."""
    return find_template(template, system_prompt).prompt(question)
