"""An evaluation with tools and in an environment: the trajectories, who judges them, and what is kept of them."""

import json
from dataclasses import replace

import pytest

from grpo_lab.engines.generators import Completion
from grpo_lab.evaluation import EvaluationResult, evaluate
from grpo_lab.evaluation.in_turns import TurnGenerator, with_observation
from grpo_lab.evaluation.transcript import turns_in
from grpo_lab.rewards import JudgedByEnvironment
from grpo_lab.testing import tiny_tokenizer
from grpo_lab.trainer.generation.trajectories import dialogue_for
from grpo_lab.turns.turn_settings import TurnSettings

CALL = "<tool_call>add<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"


class Counter:
    """Counts up; the goal is the row's ``goal``."""

    def reset(self, goal, **_):
        self.goal, self.at = goal, 0
        return f" Count to {goal}."

    def add(self, a: int) -> str:
        """Add a number.

        Args:
            a: The number.
        """
        self.at += int(a)
        return str(self.at)

    def get_reward(self) -> float:
        return float(self.at == self.goal)

    def turn_rewards(self) -> list[float]:
        raise AssertionError("is no tool, and nobody asks for it here")


class AlwaysCalls:
    """A generator that calls `add(1)` as long as it was answered fewer than ``calls`` times; cut to what is asked."""

    def __init__(self, tokenizer, calls: int) -> None:
        self.tokenizer, self.calls, self.asked = tokenizer, calls, []

    def __call__(self, prompts, *, n, temperature, max_new_tokens, seed):
        self.asked.append((len(prompts), max_new_tokens, seed))
        return [[self.one(ids, max_new_tokens)] for ids in prompts]

    def one(self, ids, limit):
        heard = self.tokenizer.decode(ids).count("<|im_start|>tool")
        text = CALL.format(1) if heard < self.calls else f"done {heard}"
        said = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id][:limit]
        return Completion(said, ended=said[-1] == self.tokenizer.eos_token_id)


def generator(calls: int, **changes) -> tuple[TurnGenerator, AlwaysCalls]:
    tokenizer = tiny_tokenizer(tools=True)
    made = AlwaysCalls(tokenizer, calls)
    dialogue = dialogue_for(tokenizer, [tokenizer.eos_token_id], {})
    turns = TurnGenerator(made, dialogue, TurnSettings(), environment=Counter, context=400, ends=dialogue.ends)
    return replace(turns, **changes), made


ROWS = [{"prompt": [{"role": "user", "content": "Go."}], "goal": goal} for goal in (2, 3)]


def measured(turns: TurnGenerator, **how) -> EvaluationResult:
    asked = {"reward": JudgedByEnvironment(), "max_new_tokens": 300, "batch_size": 2, "context": 400, **how}
    return evaluate(None, turns.dialogue.tokenizer, ROWS, generate=turns, **asked)


def test_the_environment_judges_each_completion_by_itself(tmp_path) -> None:
    turns, made = generator(calls=2)
    result = measured(turns, n_samples=3)
    assert [one.score for one in result.greedy] == [1.0, 0.0]
    assert [one.score for one in result.outcomes if one.kind == "sampled"] == [1.0] * 3 + [0.0] * 3
    assert result.greedy[0].question == "Go. Count to 2."
    assert "Count to 2." in result.greedy[0].prompt
    shown = turns_in(result.greedy[0].transcript)
    assert [one.calls for one in shown] == [["add(a=1)"]] * 2 + [[]]
    assert [one.heading for one in shown] == ["add(a=1) → 1", "add(a=1) → 2", ""]
    assert [one.answers for one in shown] == [["1"], ["2"], []]
    assert shown[-1].text == "done 2"
    own = sum(len(made.one(ids, 300).ids) for ids in ([], []))  # two calls of equal length
    assert result.greedy[0].tokens == own + len(made.tokenizer("done 2")["input_ids"]) + 1
    assert len({seed for _, _, seed in made.asked[-3:]}) == 3  # no round draws what another has drawn
    result.write(tmp_path)
    assert EvaluationResult.read(tmp_path).outcomes == result.outcomes
    assert json.loads(result.greedy[0].transcript)[1] == {"role": "tool", "name": "add", "content": "1"}


def test_a_call_is_shown_with_its_lines_and_a_heading_is_one_short_line() -> None:
    program = "def f(x):\n    return sum(x)"
    call = {"function": {"name": "run", "arguments": {"program": program, "seconds": 2}}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3 of 3 " * 40}]
    (shown,) = turns_in(json.dumps(said))
    assert shown.calls == [f"run(program=\n{program}\n, seconds=2)"]
    called, answered = shown.heading.split(" → ")
    assert called == "run(program= def f(x): return sum(x) , seconds=2)"
    assert len(answered) == 60
    assert answered.endswith("…")
    assert "\n" not in shown.heading


@pytest.mark.parametrize("room", [5, 30, 61])
def test_a_completion_has_no_more_tokens_than_asked(room: int) -> None:
    turns, _ = generator(calls=9)
    result = measured(turns, max_new_tokens=room)
    assert all(one.tokens <= room and one.truncated for one in result.greedy)


def test_limits_of_turns_hold() -> None:
    turns, _ = generator(calls=9, settings=TurnSettings(max_turns=2))
    assert [len(turns_in(one.transcript)) for one in measured(turns).greedy] == [2, 2]


class Shows(Counter):
    """Says its goal in a list of blocks."""

    def reset(self, goal, **row):
        return [{"type": "text", "text": super().reset(goal)}]


@pytest.mark.parametrize("content", ["Go.", [{"type": "text", "text": "Go."}]])
@pytest.mark.parametrize("kind", [Counter, Shows])
def test_what_an_environment_says_is_added_as_trl_adds_it(kind: type, content: object) -> None:
    """TRL's rule: text with text is text; else both are blocks."""
    row = {"prompt": [{"role": "user", "content": content}], "goal": 2}
    (message,) = with_observation(row, kind())
    said = [{"type": "text", "text": "Go."}, {"type": "text", "text": " Count to 2."}]
    both_text = kind is Counter and content == "Go."
    assert message == {"role": "user", "content": "Go. Count to 2." if both_text else said}
    assert row["prompt"][0]["content"] == content


def test_what_an_environment_says_needs_messages() -> None:
    with pytest.raises(ValueError, match=r"Counter.reset says something.*text without messages.*`data.template: chat`"):
        with_observation({"prompt": "Go.", "goal": 2}, Counter())


class Moody(Counter):
    """Says another thing each time."""

    times = 0

    def reset(self, goal, **row):
        Moody.times += 1
        return super().reset(goal) + "!" * Moody.times


@pytest.mark.parametrize(
    ("changes", "how", "said"),
    [
        ({"environment": Moody}, {}, "Moody.reset says another thing each time"),
        ({"environment": None}, {}, "there is none: set `environment_factory`"),
    ],
)
def test_what_cannot_be_judged_is_said(changes, how, said: str) -> None:
    turns, _ = generator(calls=1, **changes)
    with pytest.raises(ValueError, match=said):
        measured(turns, **how)
