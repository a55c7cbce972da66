"""CodeReward: does the program that the model wrote pass the row's tests?

    all      1[every test passes]
    share    tests passed / tests

Idea: a reward that only a working program earns (HumanEval, arXiv 2107.03374; MBPP, arXiv 2108.07732; RL on unit tests: CodeRL, arXiv
2207.01780). How we differ from graders that run program and tests in one interpreter: there a program can leave before the tests, patch
``assert``'s surroundings, return an object that equals everything or read the expected values off the stack. Here the tests run in a process of
their own, and the program in another one behind walls, which is asked for values and answers with data.
docs/algorithms/code_reward.md says what that protects from and what not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from grpo_lab.rewards.code_tests import read_tests
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.program_text import program_text
from grpo_lab.verifiers.code.client import CodeJudge, Tests, Trial

_LOG = logging.getLogger("grpo_lab")


class CodeReward:
    """The last fenced program of a completion (else all of it) against the row's column ``tests``.

    Args:
        score: ``"all"``: 1.0 for all tests passed, else 0.0; ``"share"``: the share of tests passed.
        timeout_s: processor seconds of one run of the program: all the calls of a text of assertions, or one input/output pair.
        wall_s: seconds on the clock for one completion and all its tests. A verdict comes at most a second later.
        memory_bytes: address space of the program.
        workers: completions judged at once; None: one a core, shared among the ranks of this machine.
        walls: what must stand between the program and this machine (``grpo_lab.verifiers.code.walls``); None: all that the machine gives,
            said in the log when a training starts, else at first use.

    ``counts`` tallies ``passed``, ``failed``, ``limit`` and ``unusable`` since construction.
    """

    columns = ("tests",)  # what `LabTrainer` looks for in the data set before anything is loaded

    def __init__(
        self,
        score: Literal["all", "share"] = "all",
        *,
        timeout_s: float = 5.0,
        wall_s: float = 30.0,
        memory_bytes: int = 1 << 30,
        workers: int | None = None,
        walls: list[str] | None = None,
    ) -> None:
        if score not in ("all", "share"):
            raise ValueError(f"score must be 'all' or 'share'; got {score!r}")
        for name, value in (("timeout_s", timeout_s), ("wall_s", wall_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive seconds; got {value!r}")
        if memory_bytes < 1 << 26:
            raise ValueError(f"memory_bytes must be at least 2**26, what Python itself needs; got {memory_bytes}")
        self.score = score
        self.__name__ = "code_reward"  # TRL names its metrics after this
        self.counts: Counter[str] = Counter()
        self._judge = CodeJudge(
            cpu_seconds=timeout_s, wall_seconds=wall_s, memory_bytes=memory_bytes, workers=workers, walls=walls
        )
        self._said = False

    def __repr__(self) -> str:
        return f"CodeReward(score={self.score!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_said": False}

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        tests: Sequence[Any] | None = None,
        entry_point: Sequence[str | None] | None = None,
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards in order; None where a row's tests cannot be used. With TRL's ``log_metric``, shares are logged."""
        if completions is None:
            raise ValueError("CodeReward needs completions=[...]; got none")
        if tests is None:
            raise ValueError(
                f"CodeReward needs the tests in the column 'tests'; the columns given are {sorted(columns)}"
            )
        trials = self.judge(completions, tests, entry_point)
        if log_metric is not None and trials:
            for name in ("limit", "unusable"):
                log_metric(f"code_reward/{name}", sum(trial.end == name for trial in trials) / len(trials))
            log_metric("code_reward/walls", float(len(self.in_force)))
        return [self._paid(trial) for trial in trials]

    def judge(
        self, completions: Sequence[Any], tests: Sequence[Any], entry_point: Sequence[str | None] | None = None
    ) -> list[Trial]:
        """The same, with how many tests passed and how each trial ended. Equal programs of equal rows are run once."""
        names = [None] * len(tests) if entry_point is None else list(entry_point)
        if not len(completions) == len(tests) == len(names):
            raise ValueError(
                f"got {len(completions)} completions, {len(tests)} tests and {len(names)} entry points; they must be one to one"
            )
        golds = [_tests_or_why(value, name or None) for value, name in zip(tests, names, strict=True)]
        programs = [program_text(completion_text(completion)) for completion in completions]
        keys = [(program, repr(gold)) for program, gold in zip(programs, golds, strict=True)]
        wanted: dict[tuple[str, str], tuple[str, Tests]] = {
            key: (program, gold)
            for key, program, gold in zip(keys, programs, golds, strict=True)
            if isinstance(gold, Tests)
        }
        if wanted:
            self._say_what_is_in_force()
        found = self._judge.judge(list(wanted.values()), stop_early=self.score == "all")
        verdicts = dict(zip(wanted, found, strict=True))
        trials = [verdicts[key] if isinstance(gold, Tests) else gold for key, gold in zip(keys, golds, strict=True)]
        self.counts.update(_word(trial) for trial in trials)
        return trials

    @property
    def in_force(self) -> list[str]:
        """The walls between a program and this machine, as tried out here (``grpo_lab.verifiers.code.walls``)."""
        return self._judge.walls

    def warm_up(self) -> None:
        """Tries the walls, says which stand, and starts the worker's imports. `LabTrainer` calls it before it loads a model.

        Raises:
            ValueError: too few walls stand here, or not those that were asked for.
        """
        self._say_what_is_in_force()
        self._judge.pool.warm_up()

    def _say_what_is_in_force(self) -> None:
        if not self._said:
            self._said = True
            standing = self.in_force
            without = {name: why for name, why in self._judge.missing.items() if name not in standing}
            level = logging.WARNING if without else logging.INFO
            _LOG.log(
                level,
                "CodeReward runs model-written programs behind: %s; not in force: %s",
                standing,
                without or "nothing",
            )

    def _paid(self, trial: Trial) -> float | None:
        if trial.end == "unusable":
            return None
        if self.score == "all":
            return float(trial.all_passed)
        return trial.passed / trial.total if trial.total else 0.0

    def close(self) -> None:
        """End the worker processes now (they also end with this object and at exit)."""
        self._judge.close()


def _tests_or_why(value: Any, entry_point: str | None) -> Tests | Trial:
    try:
        return read_tests(value, entry_point)
    except ValueError as error:
        return Trial(0, 0, "unusable", str(error))


def _word(trial: Trial) -> str:
    return trial.end if trial.end != "done" else "passed" if trial.all_passed else "failed"


__all__ = ["CodeReward"]
