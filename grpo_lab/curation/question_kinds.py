"""Classify a question as open, multiple choice, true/false or proof.

Kimi k1.5 (section 2.1, "RL Prompt Set Curation") leaves multiple-choice, true/false and proof-based questions out of
the RL set: the first two can be right by luck, the third cannot be checked by comparing an answer. The rules are ours,
in this order:

1. options to choose from (`A) … B) … C) …`, `Options: - …`, "enter the letter of")  -> multiple_choice, or true_false
   if the only options are yes and no, true and false, valid and invalid;
2. a boolean expression and nothing else                                            -> true_false;
3. else the *last* sentence that asks for something decides: a proof verb           -> proof,
   a question that begins with is/does/can/…, "true or false?", "determine whether" -> true_false,
   a question word, "find", "compute", …                                            -> open;
4. no sentence asks: a general mathematical statement ("every …", "if …, then …")   -> proof, another mathematical
   statement of eight words or more                                                 -> true_false, anything else ->
   open.

English and Chinese are understood; options are recognised in any language that labels them A, B, C.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final, Literal

QuestionKind = Literal["open", "multiple_choice", "true_false", "proof"]
KINDS: Final[tuple[QuestionKind, ...]] = ("open", "multiple_choice", "true_false", "proof")

READ_AT_MOST: Final = 20_000  # characters that are read from each end of a text

DRAWING = re.compile(r"\[asy\].*?(?:\[/asy\]|\Z)", re.DOTALL)  # a program, whose labels look like options
_WRAPPED = r"\\(?:textbf|text|mathrm|mathbf|textrm|textit|bf|rm)\s?\{\s?"
# (A)   \textbf{(A)}   （A）   and not P(A) or f(A): nothing that could name a function directly before it
_PARENTHESES = re.compile(rf"(?:{_WRAPPED}|(?<![\w}}\])'\\^]))[(（]\s?([A-Z])\s?[)）]")
# A)   A.   A、   **A.**   \text{A. }   at the start of a line, or after white space or punctuation
_BARE = re.compile(rf"(?:^|(?<=[\s$*.。;；,，?？:：)）])|{_WRAPPED})([A-Z])\s?[).）．、:：]", re.MULTILINE)
_SMALL = re.compile(r"(?:(?<![\w}\])'\\^])[(（]\s?([a-z])\s?[)）])")
_SMALL_AT_LINE_START = re.compile(r"^[ \t]*([a-z])[).:][ \t]", re.MULTILINE)
_LISTED = re.compile(r"(?ims)^[ \t]*(?:answer )?(?:options|choices|选项)[ \t]*[:：](.*)")
_CUE_TO_CHOOSE = re.compile(
    r"\bwhich\b|\bchoose\b|\bselect\b|\bpick\b|\boptions?\b|\bchoices?\b|\balternatives?\b|[?？]\s*$|_{2,}\W*$",
    re.IGNORECASE,
)
_LETTER_IS_THE_ANSWER = re.compile(
    r"\b(?:enter|give|write|choose|select|pick|with|state)\b(?: only| just| your answer as)? (?:the|one|all)"
    r"(?: correct| right| best)?(?: capital)? (?:letters?\W? (?:of|for|that|corresponding|label)"
    r"|(?:letter|option|choice|alternative)\s*[.:(])"
    r"|\b(?:enter|write|answer|give|use)\W{1,3}[A-Z]\W{1,3}for\b[^.?!\n]{1,40},\W{1,3}[A-Z]\W{1,3}for\b"
    r"|\banswer\b[^.?!\n]{0,12}\b(?:as|with)\b[^.?!\n]{0,12}\$?\(?\bA\)?\$?\s?(?:,|or)\s?\$?\(?B\b",
    re.IGNORECASE,
)
_TWO_VALUED: Final = frozenset(
    "yes|no|true|false|valid|invalid|correct|incorrect|right|wrong|对|错|正确|错误|是|否|√|×".split("|")  # noqa: SIM905
)

_START = (
    r"(?:^|[.,;:!?，。；：)\]}]|\b(?:then|and|also|hence|thus|please|you|must|should|exercise|problem|or)\b)"
    r"[\s*$\"“(]*(?:\w{1,12}ly,? )?"
)
_PROVE = re.compile(
    rf"{_START}(?:(?:dis)?prove\b|verify\b|demonstrate\b|deduce\b|justify\b|(?:give|write) (?:a|another|the) proof\b"
    r"|show\b(?! (?:your|all|each|his|her|their|my|work|steps|up|off|me)\b))|(?<!to )\b(?:show|prove) that\b|证明|求证",
    re.IGNORECASE,
)
_DETERMINE_WHETHER = re.compile(
    rf"{_START}(?:determine|decide|state|tell|say|judge|check)(?: me)? (?:whether|if)\b|判断|是否", re.IGNORECASE
)
_TRUE_OR_FALSE = re.compile(
    r"\b(?:true ?(?:or|/) ?false|false ?(?:or|/) ?true|yes ?(?:or|/) ?no|valid or invalid|correct or incorrect"
    r"|right or wrong)\b|\b(?:yes|true)\b\W{1,6}or\W{1,6}(?:no|false)\b"
    r"|\b(?:is|are) (?:this|it|that|the (?:above |following )?(?:statement|claim|assertion|proposition)s?)"
    r" (?:true|false|correct|valid|right)\s*[?？]|对还是错|[(（]判断对错[)）]"
    r"|[吗嗎]\s*[?？]?\s*$|(?<![什怎多])么\s*[?？]\s*$",
    re.IGNORECASE,
)
_AUXILIARY = (
    r"(?:(?:is|are|was|were|do|does|did|can|could|would|should|has|have|had)(?:n't)?"
    r"|am|will|won't|can't|shall|may|might|must)"
)
_LEADING = r"^(?:question|q|problem|\d+)?\s?[:.)]?[\"“'(*\s]*"
_YES_NO_FIRST = re.compile(rf"{_LEADING}{_AUXILIARY}\s+\S", re.IGNORECASE)
_YES_NO_LATER = re.compile(rf"(?:[,;:，；：]\s*|\bthen ){_AUXILIARY}\s+\S", re.IGNORECASE)
_POLITE = re.compile(
    rf"{_LEADING}(?:can|could|would|will) (?:you|we|anyone|someone) (?:\w+ly |please |help )*"
    r"(?:find (?:the|a|an|all|out|how|what)|compute|calculate|determine|evaluate|solve|tell (?:me|us|how|what)"
    r"|figure out|work out|give (?:me|the)|list|name|say (?:how|what|which)|explain)\b",
    re.IGNORECASE,
)
_QUESTION_WORD = re.compile(r"\b(?:what|how|why|(?<!, )(?:which|whose|whom|who|when|where))\b", re.IGNORECASE)
_ASKED_AFTER = re.compile(r",\s*(?:then )?(?:what|how|why|which|find|compute|calculate|determine)\b", re.IGNORECASE)
_HOW_MANY = re.compile(r"\bhow (?:many|much|long|far|old|tall|often|fast|big|large|heavy|wide|high)\b", re.IGNORECASE)
_MORE_THAN_TWO_ANSWERS = re.compile(r"\bneither\s*[?？)]|, (?:or )?neither\b|,[^,?]{1,60}, or\b", re.IGNORECASE)
_COMMAND = re.compile(
    rf"{_START}(?:if so,? |to )?(?:find|compute|calculate|determine|evaluate|solve|simplify|express|factor|expand"
    r"|estimate|list|round|convert|approximate|count|give|state|write|enter|name|describe|obtain|derive|answer|identify"
    r"|sketch|graph|order|arrange|rank|rewrite|report|complete|fill|reduce|apply|construct|use|minimi[sz]e|maximi[sz]e)\b"
    r"|多少|几(?![何乎])|求(?!证)|计算|化简|解方程|写出|什么|哪",
    re.IGNORECASE,
)
_BLANK = re.compile(r"[(（]\s*(?:\\quad|\s)*\s*[)）]|_{2,}|[=＝:：]\s*[?？]?\s*$")
_ABOUT_THE_FORM = re.compile(
    r"^\W*(?:please )?(?:express|enter|give|write|round|report|leave|submit|provide|answer|represent|note|separate)\b",
    re.IGNORECASE,
)
_GENERAL_STATEMENT = re.compile(
    r"\b(?:every|for (?:all|any|each|every|some)|there (?:exists?|is|are)|if and only if|iff|then|is (?:an? |not )?"
    r"(?:closed|open|dense|compact|connected|continuous|bounded|finite|infinite|isomorphic|cyclic|normal|divisible"
    r"|irreducible|abelian))\b",
    re.IGNORECASE,
)
_MATHEMATICAL = re.compile(
    r"[$\\^∈≤≥∀∃]|\b(?:group|ring|field|set|space|function|sequence|subset|theorem|matrix|prime|integer)s?\b",
    re.IGNORECASE,
)
_WONDERS = re.compile(r"(?i)\b(?:wants? to (?:know|find|figure)|wonders?|needs? to know|asks? (?:how|what))\b")
_BOOLEAN_EXPRESSION = re.compile(r"(?:[\s()]|\b(?:true|false|and|or|not|is|xor)\b)+[=?:]?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(
    r"(?<!\bi\.e)(?<!\be\.g)(?<!\b[MD]r)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\bvs)(?<!\bcf)(?<!\.)[.?!](?=[\s$\"”')]|$)|[。？！]|\n\s*\n"
)


def question_kind(text: str) -> QuestionKind:
    """Return the kind of a question, from its text alone.

    Args:
        text: the question as a model would see it, options included. Of more than 40,000 characters only both ends
            are read.

    Returns one of `KINDS`; an empty text is "open". Raises ValueError if `text` is not a string.
    """
    if not isinstance(text, str):
        raise ValueError(f"question_kind reads one question as a str; got {type(text).__name__}")
    if len(text) > 2 * READ_AT_MOST:
        text = text[:READ_AT_MOST] + "\n" + text[-READ_AT_MOST:]
    text = DRAWING.sub(" ", text).strip()
    options = _options(text)
    if options:
        if _two_valued(options):
            return "true_false"
        return "multiple_choice"
    if _LETTER_IS_THE_ANSWER.search(text):
        return "multiple_choice"
    if re.search(r"true|false", text, re.IGNORECASE) and _BOOLEAN_EXPRESSION.fullmatch(text):
        return "true_false"
    return _requested(text)


def _options(text: str) -> list[str] | None:
    """Return the texts of the options that a question gives to choose from, or None if it gives none."""
    if listed := _LISTED.search(text):
        lines = list(filter(None, (line.strip(" \t-*•") for line in listed[1].split("\n"))))
        if len(lines) == 1:
            lines = [part.strip() for part in re.split(r"[,;/|，、]|\bor\b", lines[0])]
        if len(lines) >= 2:
            return lines
    for marker in (_PARENTHESES, _BARE):
        found = _run_of_letters(text, marker, "A")
        if found and (len(found) >= 3 or _two_valued(found)) and not _parts_of_a_task(found):
            return found
    for marker in (_SMALL, _SMALL_AT_LINE_START):
        found = _run_of_letters(text, marker, "a")
        first = marker.search(text)
        if not found or first is None or _parts_of_a_task(found) or _PROVE.search(found[-1]):
            continue
        stem = text[: first.start()]
        chosen_between = re.search(r"\bwhich\b[^?]*[?]\s*$", stem, re.IGNORECASE) or _two_valued(found)
        if chosen_between or (len(found) >= 3 and (_CUE_TO_CHOOSE.search(stem) or _CUE_TO_CHOOSE.search(found[-1]))):
            return found
    return None


def _run_of_letters(text: str, marker: re.Pattern[str], first: str) -> list[str] | None:
    """Return the texts behind the markers A, B, C, … (beginning with `first`) if there are at least two in order; from
    the third on a letter may be missing, as by a typo. Else None."""
    run: list[tuple[int, int]] = []
    expected = ord(first)
    for match in marker.finditer(text):
        letter = ord(match.group(1))
        if letter == expected or (run and letter == expected + 1 and len(run) >= 2):
            run.append(match.span())
            expected = letter + 1
        elif letter == ord(first) and len(run) < 3:
            run = [match.span()]
            expected = letter + 1
    if len(run) < 2:
        return None
    ends = [begin for begin, _ in run[1:]] + [len(text)]
    return [text[after:end].strip(" \t\n$\\{}.,;*") for (_, after), end in zip(run, ends, strict=True)]


def _two_valued(options: list[str]) -> bool:
    """Return whether the options are words such as yes and no, or true and false, at most three."""
    return all(option.strip(" .'\"\n").lower() in _TWO_VALUED for option in options) and len(options) <= 3


def _parts_of_a_task(options: list[str]) -> bool:
    """Return whether these texts are parts of a task, (a) Show that … (b) Find …, and not options to choose from."""
    tasks = (_PROVE.match(o) or _COMMAND.match(o) or _QUESTION_WORD.match(o) or o.endswith("?") for o in options)
    return sum(map(bool, tasks)) >= 2


def _requested(text: str) -> QuestionKind:
    """Return the kind of the last sentence that asks for something (rule 3); if none does, that of the text as a
    statement (rule 4)."""
    about_the_form = False
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(text)), len(text)]
    pieces = (text[begin:end].strip() for begin, end in pairwise(ends))
    sentences = ["", *(piece for piece in pieces if len(piece) > 1)]
    for before, sentence in reversed(list(pairwise(sentences))):
        kind = _kind_of_sentence(sentence)
        cut_at_an_initial = _YES_NO_FIRST.match(before) and not _QUESTION_WORD.search(sentence)
        if kind == "open" and sentence.endswith("?") and cut_at_an_initial:  # "Did Franklin D. | Roosevelt …?"
            kind = _yes_no(sentence)
        if kind == "open" and _ABOUT_THE_FORM.match(sentence) and not sentence.endswith("?"):
            about_the_form = True  # "Express your answer in …" says how, not what
        elif kind is not None:
            return kind
    states = len(text.split()) >= 8 and _MATHEMATICAL.search(text) and not _WONDERS.search(text)
    if about_the_form or not states:
        return "open"
    if _GENERAL_STATEMENT.search(text):
        return "proof"
    return "true_false"


def _kind_of_sentence(sentence: str) -> QuestionKind | None:
    """Return the kind of one sentence, or None if it asks for nothing."""
    if _POLITE.match(sentence) or _HOW_MANY.search(sentence):
        return "open"
    if _TRUE_OR_FALSE.search(sentence):
        return "true_false"
    if _DETERMINE_WHETHER.search(sentence):
        return _yes_no(sentence)
    if proof := _PROVE.search(sentence):
        asked_after = _QUESTION_WORD.search(sentence, proof.end()) and sentence.endswith("?")
        return "open" if asked_after else "proof"
    if _YES_NO_FIRST.match(sentence):
        return _yes_no(sentence)
    if sentence.endswith(("?", "？")):
        later = _YES_NO_LATER.search(sentence)
        if later is None or _QUESTION_WORD.search(sentence, 0, later.start()):
            return "open"
        if _ASKED_AFTER.search(sentence, later.end()):
            return "open"
        return _yes_no(sentence)
    if _COMMAND.search(sentence) or _BLANK.search(sentence):
        return "open"
    return None


def _yes_no(sentence: str) -> QuestionKind:
    """Return "open" if a yes/no question allows more answers ("Is it even, odd, or neither?"), else "true_false"."""
    if _MORE_THAN_TWO_ANSWERS.search(sentence):
        return "open"
    return "true_false"
