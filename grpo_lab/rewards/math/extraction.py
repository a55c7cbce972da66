"""Extract the final answer from a completion.

`extract_answer` follows five rules (docs/algorithms/accuracy_reward.md, "What is read"). The text after the thinking
(`_after_thinking`) is cut where another turn begins. Its markers are found, each with the answer that it states
(`_markers`). The text is cut again where the model, after its first answer, runs on into a new task (`run_on.py`). Of
the markers that are left the last one wins (`_final`). Without a marker, mode `lenient` looks for a number or formula
(`_last_resort`). All scans are linear in the length of the completion.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, TypeVar

from grpo_lab.rewards.completion import END_OF_THINK, THINK
from grpo_lab.rewards.math.expression import (
    expressions_in,
    is_expression,
    joined,
    number_in_words,
    stated_expression,
    stated_in_words,
)
from grpo_lab.rewards.math.run_on import next_turn_start, run_on_start
from grpo_lab.verifiers.choices import read_choice

_NUMBERED = re.compile(r"(\d{1,3})[.)]\s+[^\W\d_]")
_HEADING = re.compile(r"(?:step|part|case|solution|question|problem)\b", re.IGNORECASE)
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[-+]?\$?[\d.,/]*\d|\\[a-zA-Z]+[^$\n]{0,80}|[a-zA-Z]\b")
Mode = Literal["strict", "lenient"]
Marker = Literal["answer_tag", "boxed", "hashes", "a_line", "phrase", "whole", "last_expression", "last_letter"]
T = TypeVar("T")
_HASHES = re.compile(r"####[ \t]*")
_A_LINE = re.compile(r"^[ \t>*_#-]{0,8}A[*_]{0,2}:[*_]{0,2}[ \t]*", re.MULTILINE)
_PHRASE = re.compile(
    r"\b(?:answers?|ans)\b[*_]{0,3}(?:[ \t,(][^.:=?!\n$\\]{0,60}?)?[ \t*_]{0,3}"
    r"(?:\bis\b|\bare\b|\bwas\b|\bequals\b|\bwould be\b|\bwill be\b|\bshould be\b|:|=)",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"[\s*_:,]*(?:(?:indeed|therefore|thus|simply|just|now|hence|approximately|about|exactly|equal to|given by|then"
    r"|actually|still|clearly|as follows|option|choice)\b)?[\s*_:,]*",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"(?:not|n't|never|incorrect|wrong|unknown|unclear)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|$|[*\"'])|\n")
_DISPLAY = re.compile(r"\$\$|\\\[|\\begin\{")
_DISPLAY_END = {"$$": "$$", "\\[": "\\]", "\\begin{": "\\end{"}
_CHECKING = re.compile(
    r"(?:check|verif|confirm|test|guess)\w*\s+(?:that\s+)?(?:our|the|this|my|your|an)?\s*$", re.IGNORECASE
)
_LAST_LETTER = re.compile(r"(?<![A-Za-z'\d])(?<!not )(?<!nor )(?<!than )([A-H])(?![A-Za-z'\d])")
_TASK_IN_LINE = re.compile(r"\s(?:Question|Problem|Exercise|Q|User|Human)\s?\d{0,3}:")
_EMPTY_SET = re.compile(r"[\s$]*(?:∅|\\\{\s*\\\})[\s$]*")
_WINDOW = 700
_KEPT = 24
_LONGEST_READ = 4000


def is_heading(line: str, before: str) -> bool:
    """Return whether a `line` behind `####` is a heading and no answer, as in `#### Step 1` and `#### 1. Add`.

    `#### 2. Multiply` is a heading if the text `before` has an item 1; `#### 30. Jeff walks ...` with no item 29 before
    it is the answer 30.
    """
    if line.startswith("#") or _HEADING.match(line):
        return True
    numbered = _NUMBERED.match(line)
    if numbered is None:
        return False
    number = int(numbered[1])
    item = re.compile(rf"^[#*\s]{{0,8}}(?:(?:step|part)\s+)?{number - 1}[.):]", re.MULTILINE | re.IGNORECASE)
    return number <= 1 or item.search(before) is not None


def closed_boxes(text: str) -> list[tuple[int, int, int, int]]:
    r"""Find the outermost closed `\boxed{}` and `\fbox{}`, in one pass with a stack. Each is (start, end, start of its
    inside, end of its inside)."""
    first = min((place for head in ("\\boxed", "\\fbox") if (place := text.find(head)) >= 0), default=-1)
    if first < 0:
        return []
    while first > 0 and text[first - 1] == "\\":
        first -= 1  # `\\\\boxed` is a line break; no brace before it matters
    closed: list[tuple[int, int, int, int]] = []

    def close(start: int, end: int, inside: int, inside_end: int) -> None:
        while closed and closed[-1][0] > start:
            closed.pop()  # it lies inside this one
        closed.append((start, end, inside, inside_end))

    stack: list[tuple[int, int] | None] = []  # (start of the command, start of the inside); None: some other brace
    pending: re.Match[str] | None = None
    for token in _BOX_TOKEN.finditer(text, first):
        mark = token[0]
        head = None
        if pending is not None and pending.end() == token.start():
            head = pending
        pending = None
        if mark.startswith((r"\boxed", r"\fbox")):
            pending = token
            bare = _BARE_BOX.match(text, token.end())
            if bare:
                close(token.start(), bare.end(), *bare.span())
        elif mark == "{":
            stack.append((head.start(), token.end()) if head is not None else None)
        elif mark == "}" and stack:
            opened = stack.pop()
            if opened is not None:
                close(opened[0], token.end(), opened[1], token.start())
    return closed


@dataclass(frozen=True)
class Answer:
    """Answer that a completion gives, and its place.

    Attributes:
        text: the answer without its marker.
        marker: kind of the marker that led to it.
        start: index in the completion's text where its marker begins.
        end: index behind its content and, in `<answer>` and boxes, behind the closing tag or brace.
        weak: whether it is plain words and no expression.
        labelled: the answer with the letter of a choice, `(A) 5 apples`; None without a letter.
    """

    text: str
    marker: Marker
    start: int
    end: int
    weak: bool = False
    labelled: str | None = None


def extract_answer(completion: str, mode: Mode = "strict") -> Answer | None:
    """Return the model's own final answer in a completion, or None if it gives none. Mode `strict` reads answers behind
    markers only; `lenient` also reads unmarked ones, and completions whose thinking is never closed."""
    text = _after_thinking(completion)
    if text is None and mode == "strict":
        return None
    if text is None:
        text = completion
    text = text[: next_turn_start(text)]
    found = _markers(text)
    if not found:
        if mode == "lenient":
            return _last_resort(text)
        return None
    own_end = run_on_start(text, min(found, key=lambda answer: answer.end).end)
    return _final([answer for answer in found if answer.start < own_end], text)


def _after_thinking(completion: str) -> str | None:
    """Return the text in which the answer is looked for: what follows the first closed thinking block, up to another
    block that begins after an answer.

    Without a thinking tag it is the whole completion. If a block is never closed, it is the text before that block if
    this has an answer; else the result is None.
    """
    _, closed, text = completion.partition(END_OF_THINK)
    if not closed:
        opened = completion.find(THINK)
        if opened == -1:
            return completion
        before = completion[:opened]
        return before if _markers(before) else None
    again = text.find(THINK)  # a second round of thinking: run-on if an answer comes before it
    while again != -1 and not _markers(text[:again]):
        _, closed, text = text[again:].partition(END_OF_THINK)
        if not closed:
            return None
        again = text.find(THINK)
    if again == -1:
        return text
    return text[:again]


def _markers(text: str) -> list[Answer]:
    """Find the answers of all markers: those in `<answer>` if there are any, else those of the other markers."""
    return _answer_tags(text) or _untagged_markers(text)


def _untagged_markers(text: str) -> list[Answer]:
    r"""Find the answers of the markers except `<answer>`, in order; of many markers of a kind the first and the last
    `_KEPT`. A marker that overlaps a box does not count, as in "answer is $\boxed{5}$"; other markers may overlap."""
    boxes = boxed_answers(text)
    starts = [box.start for box in boxes]
    found = list(boxes)
    heads = _first_and_last(list(_A_LINE.finditer(text)))
    lines = [one for head in heads for one in _stated(_line(text, head.end()), "a_line", head.start(), head.end())]
    for answer in _hashes(text) + lines + _phrases(text):
        before = bisect_right(starts, answer.end - 1) - 1  # the last box that starts before this ends
        if before < 0 or boxes[before].end <= answer.start:
            found.append(answer)
    return sorted(found, key=lambda answer: (answer.start, answer.end))


def _final(own: list[Answer], text: str) -> Answer:
    """Choose the final answer: the last one, weak ones only if there is no other. Boxes before the last box that belong
    together with it are joined with it into a list."""
    firm = [answer for answer in own if not answer.weak] or own
    last = max(firm, key=lambda answer: (answer.end, answer.start))
    if last.marker != "boxed":
        return last
    boxes = [answer for answer in firm if answer.marker == "boxed"]
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _belong_together(text[box.end : group[0].start]):
            break
        group.insert(0, box)
    if len(group) == 1:
        return group[0]
    return Answer(joined([box.text for box in group]), "boxed", group[0].start, group[-1].end)


def _belong_together(between: str) -> bool:
    """Return whether the text between two boxes makes them one list of answers, as `and` does in `x = 2 and y = 3`."""
    if len(between) > 60 or "\n\n" in between or ". " in between:
        return False
    words = re.findall(r"[^\W\d_]+", re.sub(r"\\[a-zA-Z]+", " ", between))
    connectors = re.findall(r"\band\b|\bor\b|,|;", between)
    others = len([word for word in words if word not in ("and", "or")])
    if "or" in connectors:  # "x = 2 or x = 3" is two solutions; "or, as a mixed number, ..." is one, said twice
        return others <= 1
    if "and" in connectors:
        return others <= 4 and len(connectors) <= 2
    return bool(connectors) and all(len(word) == 1 for word in words)


def _last_resort(text: str) -> Answer | None:
    """Return the answer of a text without markers: all of it if it is one expression, else its last expression before
    a run-on, else its last capital letter A to H."""
    stripped = text.strip()
    one_piece = "\n" not in stripped or stripped.startswith("\\begin{")
    if one_piece and len(stripped) <= _WINDOW and is_expression(stripped.replace("$", "")):
        return Answer(stripped, "whole", 0, len(text))
    first_digit = re.search(r"\d", text)
    if first_digit:
        own = text[: run_on_start(text, first_digit.end())]
    else:
        own = text
    if found := expressions_in(own):
        return Answer(found[-1][1], "last_expression", 0, len(own))
    letters = _LAST_LETTER.findall(own)
    if letters:
        return Answer(letters[-1], "last_letter", 0, len(own))
    return None


def _answer_tags(text: str) -> list[Answer]:
    """Find the answers in `<answer>` blocks, by the markers inside a block or from all of its content. The last block
    may lack `</answer>`, as engines cut a stop string off."""
    found = []
    start = text.find("<answer>")
    while start != -1:
        end = text.find("</answer>", start)
        stop = len(text) if end == -1 else end
        inner_start = text.rfind("<answer>", start, stop) + len("<answer>")
        content = text[inner_start:stop]
        inner = _untagged_markers(content)
        if inner:
            final = _final(inner, content)
            stated = final.text
            labelled = final.labelled
        else:
            stated = _read(content)
            labelled = _labelled(content)
        if stated:
            after = len(text) if end == -1 else end + len("</answer>")
            found.append(Answer(stated, "answer_tag", start, after, labelled=labelled))
        start = -1 if end == -1 else text.find("<answer>", end)
    return found


def _read(content: str) -> str:
    """Return the expression that the content of a box or tag states, or its words as they are."""
    if len(content) > _LONGEST_READ:
        return content.strip()
    said = _behind_label(content)
    return stated_expression(said) or stated_in_words(said) or content.strip()


def _labelled(content: str) -> str | None:
    """Return the content if a choice's letter stands before something, as in `(A) 5 apples`; else None."""
    content = content.strip()
    if len(content) <= _WINDOW and _behind_label(content) != content:
        return content
    return None


def _behind_label(content: str) -> str:
    """Return what stands behind the letter of a choice, `5 apples` of `(A) 5 apples`; the content if it has none."""
    choice = None
    if len(content) <= _WINDOW:
        choice = read_choice(content.strip())
    if choice is not None and choice.behind:
        return choice.behind
    return content


def boxed_answers(text: str) -> list[Answer]:
    r"""Find the answers in the outermost closed `\boxed{}` that are not empty, in order."""
    boxes = [(a, b, text[inside:end]) for a, b, inside, end in _first_and_last(closed_boxes(text))]
    return [
        Answer(_read(inside), "boxed", start, end, labelled=_labelled(inside))
        for start, end, inside in boxes
        if any(map(str.isalnum, inside)) or _EMPTY_SET.fullmatch(inside)
    ]


def _hashes(text: str) -> list[Answer]:
    """Find the answers behind `####`, without headings."""
    found = []
    for head in _first_and_last(list(_HASHES.finditer(text))):
        line = _line(text, head.end()).split("####")[0]
        if not is_heading(line, text[max(0, head.start() - _LONGEST_READ) : head.start()]):
            found += _stated(line, "hashes", head.start(), head.end())
    return found


def _phrases(text: str) -> list[Answer]:
    """Find the answers behind phrases such as `the answer is`, without those that are negated or being checked."""
    found = []
    begin = 0
    if text.isascii():
        begin = text.lower().find("ans")
    for head in _first_and_last(list(_PHRASE.finditer(text, begin)) if begin >= 0 else []):
        start = head.end()
        for _ in range(3):
            start = _FILLER.match(text, start, start + _WINDOW).end()  # type: ignore[union-attr]  # it matches nothing too
        content = _sentence(text[start : start + _WINDOW])
        if not _NEGATED.match(content) and not _CHECKING.search(text[max(0, head.start() - 40) : head.start()]):
            found += _stated(content, "phrase", head.start(), start)
    return found


def _stated(content: str, marker: Marker, start: int, content_start: int) -> list[Answer]:
    """Return, in a list, the answer that the content behind a marker states; else up to three plain words, as a weak
    answer; else an empty list. `start` and `content_start` are the places of the marker and of the content."""
    said = _behind_label(content)
    answer = stated_expression(said)
    words = content.strip(" \t*_.\"'")
    if answer is None:
        words = stated_in_words(words) or words
    if answer is None and number_in_words(words) is None and not 0 < len(words.split()) <= 3:
        return []
    end = content_start + len(content)
    labelled = _labelled(content)
    return [Answer(answer or words, marker, start, end, weak=answer is None, labelled=labelled)]


def _line(text: str, start: int) -> str:
    """Return the rest of the line from `start` on, up to a new task that begins within it."""
    window = text[start : start + _WINDOW].partition("\n")[0]
    task = _TASK_IN_LINE.search(window)
    if task:
        return window[: task.start()]
    return window


def _first_and_last(places: list[T]) -> list[T]:
    """Keep the first and the last `_KEPT` places: the first show where run-on text begins, and the last hold the final
    answer. This bounds the work on hostile text."""
    if len(places) <= 2 * _KEPT:
        return places
    return places[:_KEPT] + places[-_KEPT:]


def _sentence(window: str) -> str:
    """Return the first sentence or line of `window`; a displayed formula is kept to its own end."""
    display = _DISPLAY.match(window)
    if display:
        end = window.find(_DISPLAY_END[display[0]], display.end())
        if end != -1 and display[0] != "\\begin{":
            return window[: end + 2]
        return window
    end_match = _SENTENCE_END.search(window)
    if end_match:
        return window[: end_match.start()]
    return window
