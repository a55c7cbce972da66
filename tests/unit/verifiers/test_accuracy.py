"""AccuracyReward as TRL and a team meet it: values, carriers, counting, errors, pickling, metrics."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import pytest

from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.math.accuracy import _judgement
from grpo_lab.rewards.math.extraction import extract_answer
from grpo_lab.verifiers import JobOutcome, MathVerdict, Verdict


@pytest.mark.not_fast(cases="\\\\boxed{17, 18}-18-0.0")
@pytest.mark.parametrize(
    ("completion", "solution", "expected"),
    [
        ("<answer>18</answer>", "18", 1.0),
        ("\\boxed{18}", "Janet sells 9.\n#### 18", 1.0),
        ("#### 18", "18", 1.0),
        ("A: 18", "18", 1.0),
        ("The answer is $18.00.", "18", 1.0),
        ("The answer is 17.", "18", 0.0),
        ("So 18.", "18", 0.0),
        ("", "18", 0.0),
        ("\\boxed{25}", "025", 1.0),  # AIME golds keep their leading zeros
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{17 or 18}", "18", 0.0),  # hedging
        ("\\boxed{17, 18}", "18", 0.0),
        ("<answer>either 17 or 18</answer>", "18", 0.0),
        ("<think>\\boxed{18}</think><answer>17</answer>", "18", 0.0),
        ("\\boxed{18}", "", None),
        ("\\boxed{18}", None, None),
        ("\\boxed{???}", "???", None),
        ("\\boxed{1/0}", "1/0", None),
        ("\\boxed{\\frac{1}}", "\\frac{1}", None),
        ("The answer is forty two.", "Answer is forty two.", None),
        ("no answer at all", "???", None),  # None does not depend on what the model wrote
    ],
)
def test_strict(strict: AccuracyReward, completion: str, solution: str | None, expected: float | None) -> None:
    assert strict(completions=[completion], solution=[solution]) == [expected]


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{18}",
        [{"role": "assistant", "content": "\\boxed{18}"}],
        [{"content": "\\boxed{18}"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "\\boxed{18}"}]}],
        [
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "\\boxed{5}"},
            {"role": "assistant", "content": "\\boxed{18}"},
        ],
    ],
)
def test_both_shapes_of_a_completion(strict: AccuracyReward, completion: object) -> None:
    assert strict(prompts=["q"], completions=[completion], solution=["18"]) == [1.0]


@pytest.mark.parametrize("completion", [[], [{"role": "tool", "content": "\\boxed{18}"}], [{"role": "assistant"}]])
def test_a_completion_without_text_of_the_model_is_wrong(strict: AccuracyReward, completion: object) -> None:
    assert strict(completions=[completion], solution=["18"]) == [0.0]


def test_what_trl_passes_along_is_accepted_and_shares_are_logged(strict: AccuracyReward) -> None:
    logged: dict[str, float] = {}
    rewards = strict(
        prompts=["q"] * 4,
        completions=["\\boxed{18}", "\\boxed{17}", "nothing", "\\boxed{18}"],
        completion_ids=[[1]] * 4,
        solution=["18", "18", "18", ""],
        question=["?"] * 4,
        trainer_state=object(),
        log_extra=lambda column, values: None,
        log_metric=logged.__setitem__,
    )
    assert rewards == [1.0, 0.0, 0.0, None]
    assert logged == {  # of 4 rows: one empty gold; one without an answer
        "accuracy_reward/unscorable_gold": 0.25,
        "accuracy_reward/timeout": 0.0,
        "accuracy_reward/unjudged": 0.0,
        "accuracy_reward/no_answer": 0.25,
    }


def test_what_was_not_judged_is_none_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of two readings says no (18 is not 1.5, it may be so many dozens), or where there is no answer."""
    reward = AccuracyReward()
    lost = JobOutcome("unjudged", None, "the process was ended by SIGKILL, twice", 0.1)
    monkeypatch.setattr(reward._verifier.pool, "run", lambda jobs: [lost] * len(jobs))
    logged: dict[str, float] = {}
    completions = ["\\boxed{x+1}", "\\boxed{18}", "nothing", "\\boxed{18}"]
    solutions = ["x^2", "18", "x^2", "19"]
    rewards = reward(completions=completions, solution=solutions, log_metric=logged.__setitem__)
    assert rewards == [None, 1.0, None, 0.0]
    assert reward.counts["unjudged"] == 2
    assert logged["accuracy_reward/unjudged"] == 0.5
    (judged,) = reward.judge(completions[:1], solutions[:1])
    assert (judged.verdict, judged.reason) == (Verdict.UNJUDGED, "the process was ended by SIGKILL, twice")
    unsure = [MathVerdict(Verdict.NOT_EQUAL, "numbers"), MathVerdict(Verdict.UNJUDGED, "lost")]
    assert _judgement("18", extract_answer("\\boxed{1.5}"), unsure).reward is None


@pytest.mark.slow
def test_bombs_are_wrong_answers_and_counted() -> None:
    reward = AccuracyReward(workers=1, timeout_s=0.5)
    bombs = ["\\boxed{9^{9^{9^9}}}", "<answer>" + "{" * 1000 + "x</answer>", "\\boxed{" + "x+" * 50_000 + "1}"]
    logged: dict[str, float] = {}
    rewards = reward(completions=[*bombs, "\\boxed{0.5}"], solution=["\\frac{1}{2}"] * 4, log_metric=logged.__setitem__)
    assert rewards == [0.0, 0.0, 0.0, 1.0]
    assert reward.counts["timeout"] >= 1
    assert reward.counts["equal"] == 1
    assert logged["accuracy_reward/timeout"] == (reward.counts["timeout"] + reward.counts["crash"]) / 4
    reward.close()


def test_judge_says_what_was_read_and_why(strict: AccuracyReward) -> None:
    right, lost = strict.judge(["so \\boxed{18}", "so 18"], ["#### 18", "#### 18"])
    assert (right.gold, right.answer, right.marker, right.verdict.value) == ("18", "18", "boxed", "equal")
    assert (lost.answer, lost.verdict.value, lost.reward) == (None, "unparseable_answer", 0.0)


def test_check_golds_reports_what_no_answer_could_satisfy(strict: AccuracyReward) -> None:
    report = strict.check_golds(["18", "#### 18", "", "\\frac{1}{2}", "\\text{Evelyn}", "???", None, 7, "1/0"])
    assert [row for row, _, _ in report.unusable] == [2, 5, 6, 8]
    assert report.total == 9
    assert report.share_unusable == pytest.approx(4 / 9)
    assert "4 of 9 golds (44.4%)" in str(report)
    assert strict.check_golds([]).share_unusable == 0.0


@pytest.mark.not_fast
def test_picklable_named_and_usable_from_a_thread(strict: AccuracyReward) -> None:
    strict(completions=["\\boxed{0.5}"], solution=["\\frac{1}{2}"])  # its worker runs
    copy = pickle.loads(pickle.dumps(strict))
    assert copy.__name__ == "accuracy_reward"
    assert copy.mode == "strict"
    results: list[list[float | None]] = []
    thread = threading.Thread(
        target=lambda: results.append(copy(completions=["\\boxed{0.25}"], solution=["\\frac{1}{4}"]))
    )
    thread.start()
    thread.join()
    assert results == [[1.0]]
    copy.close()


def test_a_trainer_warms_its_accuracy_reward_up_before_it_loads_a_model() -> None:
    """Imports start only for golds that may need them."""
    from datasets import Dataset

    from grpo_lab.trainer.arguments import warm_up

    reward, numbers = AccuracyReward(workers=1), AccuracyReward(workers=1)
    warm_up([reward, len], Dataset.from_dict({"solution": ["18", "$x^2+1$"]}))
    golds = ["18", "#### 1,000", "$\\frac{1}{2}$", "\\text{Evelyn}", None, ""]
    warm_up(numbers, Dataset.from_dict({"solution": golds}))
    warm_up(numbers, None)
    assert reward._verifier.pool.fork_server_pid is not None
    assert numbers._verifier.pool.fork_server_pid is None
    reward.close()


@pytest.mark.not_fast
def test_equal_texts_are_read_once_and_equal_pairs_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = AccuracyReward(workers=1, fast_path=False)
    read, judged = [], []
    own_read, own_run = reward.read, reward._verifier.pool.run
    monkeypatch.setattr(reward, "read", lambda text: read.append(text) or own_read(text))
    monkeypatch.setattr(reward._verifier.pool, "run", lambda jobs: judged.extend(jobs) or own_run(jobs))
    group = ["\\boxed{19}", "so \\boxed{18}", "\\boxed{19}", "then \\boxed{18}"]
    assert reward(completions=group, solution=["18"] * 4) == [0.0, 1.0, 0.0, 1.0]
    assert (len(read), len(judged)) == (3, 2)
    assert reward(completions=group, solution=["18"] * 4) == [0.0, 1.0, 0.0, 1.0]
    assert len(judged) == 2  # known from the first call
    reward.close()


def test_errors_name_the_column_and_the_setting(strict: AccuracyReward) -> None:
    with pytest.raises(ValueError, match=r"column 'solution'.*\['answer'\]"):
        strict(prompts=["q"], completions=["18"], answer=["18"])
    with pytest.raises(ValueError, match="completions"):
        strict(solution=["18"])
    with pytest.raises(ValueError, match="2 completions, 1 solutions"):
        strict(completions=["a", "b"], solution=["18"])
    with pytest.raises(ValueError, match="'strict' or 'lenient'"):
        AccuracyReward(mode="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu_seconds"):
        AccuracyReward(timeout_s=0)
    with pytest.raises(ValueError, match="must be a string or a list of message dicts"):
        strict(completions=[18], solution=["18"])


@pytest.mark.not_fast
def test_importing_and_using_it_loads_neither_sympy_nor_torch() -> None:
    program = (
        "import sys\nfrom grpo_lab.rewards import AccuracyReward, ThinkFormatReward\n"
        "print(AccuracyReward()(completions=['A: 18'], solution=['18']))\n"
        "print([m for m in ('trl', 'torch', 'transformers', 'sympy', 'math_verify', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split("\n")[:2] == ["[1.0]", "[]"]
