"""AccuracyReward against other people's labels and every gold of GSM8K, MATH-500 and AIME 2024 (real data; see
conftest).

The counts stand in docs/algorithms/accuracy_reward.md; why a label and we differ stands here, row by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.math.accuracy import Judgement

pytestmark = pytest.mark.slow
DOC = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "accuracy_reward.md"

SAME_VALUE = "false label or stricter rule: both sides have the same value, and value decides here"
TOLERANCE = (
    "the suite compares with a tolerance of its own (2 decimals, or 10^33 to 10^34); we keep math-verify's 6 decimals"
)
UNREADABLE = "math-verify cannot read the gold: unscorable (None), not wrong"
WORDS = "a letter in another language's sentence, without a marker; only the last letter is tried"
LABEL = "multiple choice gold without brackets or dot after its letter: taken for prose, unscorable (None)"
EQUATIONS = "two systems of equations joined by words: math-verify finds them different"
PAIR_REASONS = {
    "huggingface/Math-Verify:tests/test_all.py::test_latex_notation::6": SAME_VALUE,
    "huggingface/Math-Verify:tests/test_all.py::test_complex_math_expressions::13": TOLERANCE,
    "huggingface/Math-Verify:tests/test_open_thoughts.py::test_open_thoughts::7": UNREADABLE,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_extraction_abc::7": LABEL,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_multilingual_extraction_abc::0": WORDS,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_multilingual_extraction_abc::2": WORDS,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_latex_notation::6": SAME_VALUE,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_complex_math_expressions::13": TOLERANCE,
    "huggingface/lighteval:tests/unit/metrics/test_extractive_match.py::test_math_numina_cases::26": EQUATIONS,
    "OpenBMB/OlympiadBench:eval/scoring_examples.json::item12::0": UNREADABLE,
    "OpenBMB/OlympiadBench:eval/scoring_examples.json::item20::0": TOLERANCE,
    "OpenBMB/OlympiadBench:eval/scoring_examples.json::item21::0": TOLERANCE,
    "openai/simple-evals:common.py::EQUALITY_TEMPLATE::4": "the suite wants fractions computed out; value decides here",
    "NVIDIA/NeMo-Skills:tests/data/output-rs*.test::symbolic_correct label (automatic)::9": SAME_VALUE,
    "NVIDIA/NeMo-Skills:tests/data/output-rs*.test::symbolic_correct label (automatic)::10": (
        "an equation for a number: its right side is read, as math-verify does"
    ),
}
MATH_REASONS = {"qwen_rm_maj/72/7": f"{SAME_VALUE} (the gold carries a LaTeX thousands separator)"}
INVENTED = "right in its own box; the label judged the question that the model invented"
RUN_ON_REASONS = {
    "nemo_rs0/0": INVENTED,
    "nemo_rs0/38": INVENTED,  # a placeholder there
    "nemo_rs1/38": INVENTED,
    "nemo_rs2/6": INVENTED,  # an empty box there
    "nemo_rs1/48": r"right, in `\fbox`, which the label's grader did not read",
    "nemo_rs2/16": 'right, after "the answer is:" without a box, which the label\'s grader did not read',
}
PHRASINGS = [
    "\\boxed{%s}",
    "We add.\n\nThe answer is $%s$.",
    "<think>adding</think>\n<answer>%s</answer>",
    "So it is\n#### %s",
    "So it is\nA: %s",
    "**Answer:** $%s$",
    "Thus the final answer is \\(\\boxed{%s}\\).\n\nQuestion: what is 1 + 1?\n\\boxed{2}",
]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    with open(folder / name, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def strict() -> Iterator[AccuracyReward]:
    reward = AccuracyReward("strict")
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def lenient() -> Iterator[AccuracyReward]:
    reward = AccuracyReward("lenient")
    yield reward
    reward.close()


def judged(reward: AccuracyReward, data: list[dict[str, Any]]) -> list[Judgement]:
    return reward.judge([row["output_text"] for row in data], [row["gold_answer"] for row in data])


def differing(data: list[dict[str, Any]], judgements: list[Judgement], label: str) -> set[str]:
    return {
        row["id"] for row, judgement in zip(data, judgements, strict=True) if (judgement.reward == 1.0) != row[label]
    }


def documented(name: str, counts: str) -> None:
    """The page has these counts for the file ``name``."""
    assert f"\n- {name}: {counts}\n" in DOC.read_text(encoding="utf-8"), f"{DOC}: {name}: {counts}"


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_every_label_of_the_gsm8k_outputs(grpo_lab_data: Path, mode: str, request: pytest.FixtureRequest) -> None:
    data = rows(grpo_lab_data, "gsm8k/gsm8k_model_outputs.jsonl")
    assert len(data) > 2600
    assert differing(data, judged(request.getfixturevalue(mode), data), "label_correct") == set()
    documented("gsm8k_model_outputs.jsonl", f"{len(data):,} of {len(data):,} labels agree, in both modes.")


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_labels_of_the_math_outputs(grpo_lab_data: Path, mode: str, request: pytest.FixtureRequest) -> None:
    data = rows(grpo_lab_data, "math/math_model_outputs.jsonl")
    differ = differing(data, judged(request.getfixturevalue(mode), data), "label_correct")
    assert 1 - len(differ) / len(data) >= 0.995
    assert differ == set(MATH_REASONS)
    documented("math_model_outputs.jsonl", f"{len(data) - len(differ)} of {len(data)} labels agree, in both modes.")


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_run_on_outputs_are_judged_by_their_own_answer(
    grpo_lab_data: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    data = rows(grpo_lab_data, "math/math_model_outputs_base_runon.jsonl")
    judgements = judged(request.getfixturevalue(mode), data)
    assert differing(data, judgements, "label_correct") == set(RUN_ON_REASONS)
    by_id = {row["id"]: judgement for row, judgement in zip(data, judgements, strict=True)}
    assert {by_id[row].reward for row in RUN_ON_REASONS} == {1.0}  # each time the model's own answer was right
    counts = (
        f"{len(data) - len(RUN_ON_REASONS)} of {len(data)} labels agree, in both modes; in the others the label errs."
    )
    documented("math_model_outputs_base_runon.jsonl", counts)


def test_answer_pairs_of_other_peoples_suites(grpo_lab_data: Path, lenient: AccuracyReward) -> None:
    """Whole sentences as well as bare answers, most without a marker: read leniently, as math-verify's default does."""
    data = rows(grpo_lab_data, "math/answer_pairs.jsonl")
    judgements = lenient.judge([row["pred"] for row in data], [row["gold"] for row in data])
    differ = differing(data, judgements, "expected_equal")
    default_differs = sum(row["math_verify_default"] != row["expected_equal"] for row in data)
    assert len(differ) <= default_differs
    assert differ == set(PAIR_REASONS)
    counts = (
        f"{len(data) - len(differ)} of {len(data)} labels agree (lenient mode, `pred` as the completion); "
        f"math-verify's default agrees with {len(data) - default_differs}."
    )
    documented("answer_pairs.jsonl", counts)


@pytest.mark.thorough(but="*boxed{%s}")
@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_gsm8k_gold_is_right_and_every_changed_one_wrong(
    grpo_lab_data: Path, strict: AccuracyReward, phrasing: str
) -> None:
    raw = [row["answer"] for split in ("train", "test") for row in rows(grpo_lab_data, f"gsm8k/{split}.jsonl")]
    golds = [solution.rsplit("#### ", 1)[1] for solution in raw]
    changed = [str(int(gold.replace(",", "")) + (1 if i % 2 else -1)) for i, gold in enumerate(golds)]
    assert len(raw) == 8792
    assert strict(completions=[phrasing % gold for gold in golds], solution=raw) == [1.0] * len(raw)
    assert strict(completions=[phrasing % other for other in changed], solution=raw) == [0.0] * len(raw)


def changed_gold(gold: str) -> str:
    """Another answer of the same kind: other letters, or another last digit, or one more."""
    if gold.startswith("\\text{"):
        return "\\text{(D)}" if len(gold) <= 10 and gold != "\\text{(D)}" else "\\text{Mary}"
    for i in range(len(gold) - 1, -1, -1):
        # a digit of the value, not of a unit's power or a subscripted base, which math-verify does not look at
        if gold[i].isdigit() and gold[i - 1 : i] not in ("^", "_") and gold[i - 2 : i] not in ("^{", "_{"):
            return gold[:i] + str((int(gold[i]) + 1) % 10) + gold[i + 1 :]
    return gold + " + 1"


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_math500_and_aime_gold_is_right_and_every_changed_one_wrong(
    grpo_lab_data: Path, strict: AccuracyReward, phrasing: str
) -> None:
    golds = [row["gold_answer"] for name in ("math500", "aime24") for row in rows(grpo_lab_data, f"math/{name}.jsonl")]
    assert len(golds) == 530
    own = strict.judge([phrasing % gold for gold in golds], golds)
    assert [judgement for judgement in own if judgement.reward != 1.0] == []
    other = strict.judge([phrasing % changed_gold(gold) for gold in golds], golds)
    assert [judgement for judgement in other if judgement.reward != 0.0] == []


def test_every_verifier_accepts_its_own_golds(grpo_lab_data: Path, strict: AccuracyReward) -> None:
    columns = [
        [row["answer"] for row in rows(grpo_lab_data, "gsm8k/train.jsonl")],
        [row["gold_answer"] for row in rows(grpo_lab_data, "math/math500.jsonl")],
        [row["solution"] for row in rows(grpo_lab_data, "math/math500.jsonl")],
        [row["gold_answer"] for row in rows(grpo_lab_data, "math/aime24.jsonl")],
    ]
    assert [strict.check_golds(column).unusable for column in columns] == [[], [], [], []]


@pytest.mark.thorough(cases="all")
@pytest.mark.parametrize("every", [pytest.param(1, id="all"), pytest.param(8, id="a sample")])
def test_the_fast_path_changes_no_verdict_on_any_of_the_data(grpo_lab_data: Path, every: int) -> None:
    """The same completions once with and once without the fast path: gold numbers against every answer in the files."""
    data = [
        row
        for name in ("gsm8k/gsm8k_model_outputs", "math/math_model_outputs", "math/math_model_outputs_base_runon")
        for row in rows(grpo_lab_data, f"{name}.jsonl")
    ]
    completions, golds = [row["output_text"] for row in data], [row["gold_answer"] for row in data]
    pairs = rows(grpo_lab_data, "math/answer_pairs.jsonl")
    completions += [row["pred"] for row in pairs]
    golds += [row["gold"] for row in pairs]
    gsm8k = [row["answer"] for row in rows(grpo_lab_data, "gsm8k/test.jsonl")]
    completions += [solution.replace("####", "A:") for solution in gsm8k]
    golds += gsm8k
    asked = (completions[::every], golds[::every])
    fast, slow = AccuracyReward("lenient"), AccuracyReward("lenient", fast_path=False)
    with_fast, without = fast.judge(*asked), slow.judge(*asked)
    assert sum(judgement.reason == "exact numbers" for judgement in with_fast) > 3000 / every
    assert not any(judgement.reason == "exact numbers" for judgement in without)
    assert [judgement.verdict for judgement in with_fast] == [judgement.verdict for judgement in without]
    fast.close()
    slow.close()
