"""Check of what a chat template would write otherwise than the policy wrote it, before the first step.

    seen by the policy     prompt | turn 1 | answers | turn 2 | answers
    rendered anew          template(messages that turns 1 and 2 were parsed to, and the tools' messages)

The loop goes on from what the policy saw, so the two need not be equal. But a model that is later used with the
template alone will see the second. So ``check_template`` reports where a plain call or thinking becomes other text. It
refuses a template with which the loop cannot go on.
"""

from __future__ import annotations

from typing import Any

from grpo_lab.turns.dialogue import PROBE, THOUGHTS, ChatDialogue, calling

#: Text that stands for thinking in the probes.
THOUGHT = "one thought 5e1a"
DROPS_THINKING = "drops thinking of earlier turns"


def check_template(dialogue: ChatDialogue, earlier_thinking: str = "keep") -> tuple[str, ...]:
    """Return a phrase for each thing in earlier turns that the template writes otherwise than the policy.

    Args:
        dialogue: tokenizer and template.
        earlier_thinking: ``rollout.turns.earlier_thinking``, ``keep`` or ``refuse``.

    Raises:
        CutAnew: the template writes a turn differently once it is answered.
        ValueError: a call that the template writes cannot be read back, or it drops thinking and that is refused.
    """
    call = _written(dialogue, {})
    seen, anew = _two_turns(dialogue, call)
    differences: list[str] = []
    if seen != anew:
        at = next((place for place, pair in enumerate(zip(seen, anew, strict=False)) if pair[0] != pair[1]), len(anew))
        was = seen[at : at + 24]
        becomes = anew[at : at + 24]
        differences.append(f"writes {becomes!r} where an earlier turn had {was!r}")
    thought = _written(dialogue, dict.fromkeys(THOUGHTS, THOUGHT))
    if THOUGHT not in thought:
        thought = f"<think>\n{THOUGHT}\n</think>\n\n{call}"
    if _two_turns(dialogue, thought)[1].count(THOUGHT) < 2:
        differences.append(DROPS_THINKING)
    if earlier_thinking == "refuse" and DROPS_THINKING in differences:
        raise ValueError(
            f"the chat template of {dialogue.name} {DROPS_THINKING}, and rollout.turns.earlier_thinking is refuse: "
            "set keep (tokens stay as they were written), or a chat_template or chat_template_kwargs that keeps them"
        )
    return tuple(differences)


def _written(dialogue: ChatDialogue, more: dict[str, Any]) -> str:
    """Return the text of a turn with a call of the probe tool, as a policy writes it behind the header of its turn.
    ``more``: further keys of the message, such as its thinking."""
    asked, called = calling(PROBE)
    called["tool_calls"][0]["function"]["arguments"] = {"text": "two words"}
    header = dialogue.rendered([asked], add_generation_prompt=True)
    whole = dialogue.rendered([asked, {**called, **more}])
    if whole.startswith(header):
        return whole[len(header) :]
    return whole[whole.rindex(dialogue.call_mark, 0, whole.rindex(PROBE)) :]


def _two_turns(dialogue: ChatDialogue, text: str) -> tuple[str, str]:
    """Return two turns of the same text, both answered: as the policy saw them, and as the template renders their
    messages."""
    messages = calling(PROBE)[:1]
    ids = dialogue.encoded(dialogue.rendered(messages, add_generation_prompt=True))
    for _ in range(2):
        turn = dialogue.encoded(text)
        behind = next((place for place, token in enumerate(reversed(turn)) if token in dialogue.ends), 0)
        turn = turn[: len(turn) - behind]
        message = dialogue.parsed(turn, ids, ()).message
        calls = message.get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != [PROBE]:
            raise ValueError(
                f"a call that the chat template of {dialogue.name} writes cannot be read back: {text!r} was parsed to "
                f"{message}; the tokenizer needs a response_template for this chat template"
            )
        answer = {"role": "tool", "name": PROBE, "content": "42"}
        ids = [*ids, *turn]
        ids += dialogue.answers([answer], ids)
        messages += [message, answer]
    return dialogue.tokenizer.decode(ids), dialogue.rendered(messages, add_generation_prompt=True)
