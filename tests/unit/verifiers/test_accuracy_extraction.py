"""Which part of a completion is its answer: markers, priorities, run-on, and hostile text in linear time."""

from __future__ import annotations

import time

import pytest

from grpo_lab.rewards.math.accuracy import gold_answer
from grpo_lab.rewards.math.extraction import closed_boxes, extract_answer
from grpo_lab.rewards.math.run_on import next_turn_start
from grpo_lab.verifiers.canonical import canonical


def read(completion: str, mode: str = "strict") -> str | None:
    answer = extract_answer(completion, mode)  # type: ignore[arg-type]
    return None if answer is None else canonical(answer.text)


#: an answer → completions that mark it; engines cut stop strings off, and a marked answer is not passed over
MARKED = {
    "18": [
        "<answer>18</answer>", "<answer> The total is 18 dollars. </answer>", "<answer>\\boxed{18}</answer>",
        "<answer>18", "so \\boxed{18}", "#### 18", "#### 18 eggs", "A: 18", "**A:** 18", "The answer is 18.",
        "The answer is 18 because 3 + 15 = 18.", "the answer is: **18**", "The answer is $\\boxed{18}$.",
        "**Answer:** 18", "**Final Answer**: $18$", "Final answer: 18 eggs", "The answer to the question is 18",
        "The answer is １８",
    ],
    "\\frac{1}{\\sqrt{2}}": ["so $\\boxed{\\frac{1}{\\sqrt{2}}}$."],
    "\\{1, 2\\}": ["\\boxed{\\{1, 2\\}}"],
    "5": ["\\boxed{\\boxed{5}}", "\\boxed {5}", "\\boxed 5", "The final answer is 5. I hope it is correct."],
    "958": ["\\fbox{958}"],
    "\\text{Evelyn}": ["\\boxed{\\text{Evelyn}}"],
    "1,800.00": ["#### $1,800.00"],
    "-\\frac{1}{2}": ["The answer is $-\\frac{1}{2}$ metres."],
    "\\frac{1}{2}": ["The answer is\n\n\\[ \\frac{1}{2} \\]"],
    "34": ["Final Answer: The largest $n$ is 34."],
    "(C)": ["The correct answer is therefore (C)."],
    "Evelyn": ["The answer is Evelyn."],
    "3 and 4": ["The answers are 3 and 4."],
    "-3": ["The answer is −3"],
    "12345": ["The answer is 12,\\!345."],
    "2, -3": ["x = \\boxed{2} or x = \\boxed{-3}"],
    "5.0": ["\\boxed{5} or, as a decimal number, it is \\boxed{5.0}"],
    "17": ["The answer is 17. 18"],
}  # fmt: skip


@pytest.mark.parametrize("answer", MARKED)
def test_markers(answer: str) -> None:
    for completion in MARKED[answer]:
        assert read(completion) == canonical(answer), completion
        assert read(completion, "lenient") == canonical(answer), completion


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "18",
        "So the total is 18.",
        "\\boxed{}",
        "\\boxed{18",
        "<answer></answer>",
        "The answer is not 18.",
        "Let me check my answer: 17 + 1 = 18",
        "The answer depends on what we know.",
        "#### Step 1: add\n3 + 15 = 18",
        "#### 1. Add the numbers",
        "<think>so it is \\boxed{18}",
        "<think>\\boxed{18}</think>",
    ],
)
def test_strict_reads_marked_answers_only(completion: str) -> None:
    assert read(completion) is None


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("18", "18"),
        ("So 16 - 3 - 4 = 9, and 9 * 2 = $18 a day.", "18"),
        ("so it is $\\frac{1}{2}$ of it", "\\frac{1}{2}"),
        ("She pays $5 and then $10 more", "10"),
        ("x^2 + 2*x + 1", "x^2 + 2*x + 1"),
        ("It is 3 - 5 = -2", "-2"),
        ("AZYUK2A", None),
        ("no number here", None),
        ("18 eggs.\n\nQuestion: how many are 3 eggs and 4 eggs?\n7", "18"),
    ],
)
def test_lenient_falls_back_to_the_last_number(completion: str, answer: str | None) -> None:
    assert read(completion, "lenient") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{17}\n\nWait, that is wrong: it is \\boxed{18}", "18"),
        ("\\boxed{17} wait, actually \\boxed{18}", "18"),
        ("The answer is 17.\n\nHmm, is that right? Let me redo it.\n\n#### 18", "18"),
        ("#### 17\nso, corrected, the answer is 18", "18"),
        ("<think>17 \\boxed{17}</think> <answer>18</answer>", "18"),
        ("\\boxed{17} <answer>18</answer>", "18"),
        ("thinking... \\boxed{17}</think>The answer is 18.", "18"),
        ("The answer is 18 and the reason is given above", "18"),
        ("\\boxed{18}. So we are done with all 3 parts, the answer is indeed correct", "18"),
    ],
)
def test_the_final_answer_wins(completion: str, answer: str) -> None:
    assert read(completion) == answer


NEXT_QUESTIONS = [
    "\n\nQuestion: Tom has 5 apples. How many?\nThe answer is 5.",
    "\n\nQuestion:\n\\[ 2 + 3 \\]\n\nMy solution: \\boxed{5}",
    "\n\nQ: Tom has 5 apples. How many?\nA: 5",
    "\nQ: Tom has 5 apples. How many?\nA: 5",
    "\n\n### Problem 2\nAdd 2 and 3.\n#### 5",
    "\n\n**Problem 2:** Add 2 and 3.\n\\boxed{5}",
    "\n\nTom has 2 apples and gets 3 more. How many apples does he have?\n\\boxed{5}",
    "\n\nYour turn:\nCompute 2 + 3 and write $\\boxed{[answer]}$.",
    "\n\n# Please answer this question:\nWhat is 2 + 3?\n\\boxed{5}",
    "\n\nHere is another example:\n2 + 3 = \\boxed{5}",
    "\n\nNow let's solve another one.\n\\boxed{5}",
    "\n\nUser: and 2 + 3?\nAssistant: \\boxed{5}",
    "\nHuman: and 2 + 3?\n\nThe answer is 5",
    "<|im_end|>\n<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n\\boxed{5}",
    "<|eom_id|><|start_header_id|>user: \\boxed{5}",
    "</s> [INST] 2 + 3 [/INST] \\boxed{5}",
    "\n\nExample 2. \\boxed{5}",
    "\n\nSimilar question: \\boxed{5}",
    " Question: what is 2 + 3? \\boxed{5}",
]


@pytest.mark.parametrize("own", ["so \\boxed{18}.", "so\n#### 18", "A: 18", "The answer is 18.", "<answer>18</answer>"])
@pytest.mark.parametrize("next_question", NEXT_QUESTIONS)
@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_run_on_text_does_not_count(own: str, next_question: str, mode: str) -> None:
    assert read(own + next_question, mode) == "18"


def test_a_new_round_after_the_answer_is_run_on() -> None:
    assert read("<think>a</think><answer>18</answer>\n<think>b</think><answer>5</answer>") == "18"
    assert read("<think>a</think>\\boxed{18}\n<think>b</think>\\boxed{5}") == "18"


def test_a_question_before_the_answer_is_the_models_own_way_of_solving() -> None:
    assert read("Question: how many eggs are left?\n16 - 7 = 9\nHow much does she make a day?\n\\boxed{18}") == "18"


UNITS = [
    "\\boxed{", "\\boxed{5}", "\\boxed 5 ", "{", "}", "$", "$$", "$5 and ", "\\(", "\\[", "\\", "answer:",
    "answer is 5 ", "the answer is $", "answer " * 3 + "x" * 50 + " ", "#### ", "####5\n", "#", "A: 5\n", "A*",
    "<answer>", "<answer>5</answer>", "<think>", "</think>", "<think></think>", "<|x|>", "1", "1,", "1 ", "1/", "1:",
    "1{,}", "-", " ", "\u00a0", "\n", ".", "?\n", "Question:", "= ", "a = b is ", "\\frac{1}", "\\text{", "*", "**",
    "> ", "%", "\\!", "½", "١",
]  # fmt: skip


QUICK = ("\\boxed{", "$", "answer is 5 ", "a = b is ", "<answer>5</answer>")


@pytest.mark.not_fast(cases=["<answer>5</answer>", "\\\\boxed{"])
@pytest.mark.parametrize(
    "unit", [unit if unit in QUICK else pytest.param(unit, marks=pytest.mark.slow) for unit in UNITS]
)
def test_hostile_text_is_read_in_linear_time(unit: str) -> None:
    """50 kB of anything, in any position: milliseconds when linear, a minute when quadratic. Processor time is
    measured."""
    junk = (unit * (50_000 // len(unit) + 1))[:50_000]
    nested = junk[:25_000] + "5" + "}" * 25_000
    for text in (
        junk,
        junk + "\\boxed{5}",
        "\\boxed{5} " + junk,
        f"<answer>{junk}</answer>",
        nested,
        "answer is " + junk,
    ):
        for mode in ("strict", "lenient"):
            begun = time.process_time()
            extract_answer(text, mode)  # type: ignore[arg-type]
            assert time.process_time() - begun < 5.0


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("18", "18"),
        (18, "18"),
        (18.0, "18"),
        (0.5, "0.5"),
        ("She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"),
        ("She makes <<9*2=18>>18.\n#### 1,800", "1,800"),
        ("We get $x = 3$, so the sum is $\\boxed{18}$.", "18"),
        ("She makes 18 a day.\nA: 18", "18"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("$125$ miles", "125"),
        ("$1$ and $2$ and $3$", "1, 2, 3"),
        ("\\text{Evelyn}", "\\text{Evelyn}"),
        ("(D) Alina", "(D) Alina"),
        ("025", "025"),
    ],
)
def test_gold(solution: object, gold: str) -> None:
    found = gold_answer(solution)
    assert found is not None
    assert canonical(found) == canonical(gold)


@pytest.mark.parametrize(
    "solution",
    [None, "", "  ", float("nan"), float("inf"), True, [], {}, "Proof by induction on the size.", 10**5000],
    ids=range(10),
)
def test_no_gold(solution: object) -> None:
    assert gold_answer(solution) is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("{ \\boxed{1} } }", ["1"]),
        ("{{{ \\boxed{1", []),
        (r"a \\boxed{1}", []),  # a line break and a word
        (r"a \\\boxed{1}", ["1"]),  # a line break and a box
        (r"\{ \boxed{\}1} x", [r"\}1"]),
        (r"\fbox{2} \boxed{3}", ["2", "3"]),
        (r"\boxedness \boxed{\boxed{4}}", [r"\boxed{4}"]),
    ],
)
def test_boxes_are_found_from_the_first_one_on(text: str, inside: list[str]) -> None:
    assert [text[start:end] for _, _, start, end in closed_boxes(text)] == inside


@pytest.mark.parametrize(
    "mark",
    [
        "<|im_end|>", "<|x|>", "</s>", "<s>", "<EOS>", "<pad>", "<start_of_turn>", "</end_of_turn>", "<bos>", "[INST]",
        "[/inst]", "<<SYS>>", "<</SYS>>", "</answer> <think>", "\nUser:", "\n## human:", "\n**Instruction**:",
    ],
)  # fmt: skip
def test_no_sign_of_another_turn_is_passed_over(mark: str) -> None:
    """Texts without any sign are not searched: each kind of mark must count as one."""
    assert next_turn_start(f"It is 18. {mark} What") == 10 + (mark[0] == "\n")
    assert next_turn_start("It is <<3+4=7>> 18 [a] x") == 24
