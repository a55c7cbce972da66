"""Ports: what acts on a step gets them in place of the trainer. They are small values, a recorder, and what it may ask
for.

The rooms below ``lab_trainer.py`` do not know ``LabTrainer``: a reader sees here what may pass between them, and a test
can stand in for it. The few that operate TRL's own object take a ``trl.GRPOTrainer`` and say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from grpo_lab.batch import RewardTable, TokenBatch
from grpo_lab.trainer.metrics.book import MetricBook, SamplerCorrection
from grpo_lab.trainer.settings.algorithm import Algorithm
from grpo_lab.trainer.settings.parse import LabSettings

logger = logging.getLogger("grpo_lab")


@dataclass(frozen=True)
class Phase:
    """Place in a generation batch where the run is, counted in micro-batches: ``steps_per_generation`` that a batch is
    cut into, ``num_iterations`` passes over them, ``accumulation`` an optimizer step, ``done`` up to now (TRL's
    ``_step``).
    """

    steps_per_generation: int
    num_iterations: int
    accumulation: int
    done: int = 0

    @staticmethod
    def of(trainer: Any) -> Phase:
        counts = (trainer.args.steps_per_generation, trainer.num_iterations, trainer.args.gradient_accumulation_steps)
        return Phase(*map(int, (*counts, trainer._step)))

    @property
    def every(self) -> int:
        """E: micro-batches that a generation batch serves, all passes."""
        return self.steps_per_generation * self.num_iterations

    @property
    def at_end(self) -> bool:
        """Return whether the generation batch is used up."""
        return self.done % self.every == 0

    @property
    def start(self) -> int:
        """Micro-batches done when the current generation batch was made."""
        return self.done - self.done % self.every

    def here(self, window: int) -> list[int | None]:
        """Places in TRL's buffer of the last ``window`` micro-batches; None for one of an earlier generation batch."""
        numbers = range(self.done - window + 1, self.done + 1)
        return [number % self.steps_per_generation if number >= self.start else None for number in numbers]

    def ahead(self) -> list[int]:
        """Places of the micro-batches that later steps will take from this generation batch, in order."""
        following = self.done + 1
        return [number % self.steps_per_generation for number in range(following, following + -following % self.every)]


#: what may not be finite in a generation batch, as long as it is trained on; loss and gradient are a step's own
OF_BATCH = ("reward", "log_prob", "advantage")


class Faults:
    """Record of what was not finite in the generation batches of this rank, for ``step.guard``. Whatever is made
    between two micro-batches is one batch (TRL's ``_step`` stands still where a subclass writes ``training_step`` by
    itself).

    Attributes:
        batch: number of the batch at hand; 0: none was made yet.
        bad: kinds (``OF_BATCH``) of what is not finite in it.
        step: micro-batches of the optimizer step at hand.
        of_step: kind → number of the latest bad batch that one of them is of.
        said: what was found in the batch at hand, one sentence each.
        names: the rewards, in the order of ``rewards``.
        infinite: row of all and column of a reward → ±inf, until the rows are ``scored``.
        rewards: ``row_key`` of prompt and completion → rewards of the first row that has them, of the batch at hand.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A training begins."""
        self.batch = 0
        self.bad = set[str]()
        self._trained_on = True
        self.said: list[str] = []
        self.end_step()
        self.names: tuple[str, ...] = ()
        self.rewards: dict[int, list[float]] = {}
        self.infinite: dict[tuple[int, int], float] = {}

    def end_step(self) -> None:
        """An optimizer step is taken, or left out."""
        self.step: list[dict[str, Any]] = []
        self.of_step: dict[str, int] = {}

    def trained_on(self, inputs: dict[str, Any]) -> None:
        self._trained_on = True
        self.step.append(inputs)
        self.of_step |= dict.fromkeys(self.bad, self.batch)

    def found(self, kind: str, sentence: str) -> None:
        """The batch that is being made holds something of ``kind`` that is not finite."""
        self.generation()
        self.bad.add(kind)
        self.said.append(sentence)

    def scored(self, names: tuple[str, ...], keys: list[int], values: list[list[float]], first: int = 0) -> None:
        """Note this rank's rows, from number ``first`` of all, and their rewards; infinite ones as they were."""
        self.generation()
        self.names = names
        for number, (key, row) in enumerate(zip(keys, values, strict=True), start=first):
            whole = [self.infinite.get((number, column), value) for column, value in enumerate(row)]
            self.rewards.setdefault(key, whole)
        self.infinite = {}

    def generation(self) -> None:
        """Begin a generation batch: forget what was said of an earlier one; the rounds of one batch (``resample``) stay
        together."""
        if self._trained_on:
            self.batch += 1
            self.bad = set()
            self._trained_on = False
            self.said = []
            self.rewards = {}


def row_key(prompt: Iterable[int], completion: Iterable[int]) -> int:
    """Hash the tokens of a row into one number, which holds within a process."""
    return hash((tuple(map(int, prompt)), tuple(map(int, completion))))


class Recorder:
    """Metrics of training and evaluation (``book``: which definition of a mean; ``mode``: ``train`` or ``eval``, as it
    is now), and what is said once, where this process ``speaks``."""

    #: what was not finite, where a guard is in force (``guard``); None: it is an error at once
    faults: Faults | None = None

    def __init__(self, book: type[MetricBook], mode: Callable[[], str], speaks: Callable[[], bool]) -> None:
        self.books = {name: book() for name in ("train", "eval")}
        self.mode = mode
        self._speaks = speaks
        self._said: set[str] = set()

    @property
    def faults_in_training(self) -> Faults | None:
        """``faults``; None in an evaluation, where there is nothing to leave out."""
        if self.mode() == "train":
            return self.faults
        return None

    def book(self, mode: str | None = None) -> MetricBook:
        """The pairs of a mode; of the one that the run is in by default."""
        return self.books[self.mode() if mode is None else mode]

    def say(self, message: str, key: str | None = None, level: int = logging.INFO) -> None:
        """Log ``message`` once (per ``key``), on the main process only."""
        if self.has_said(key or message):
            return
        self._said.add(key or message)
        if self._speaks():
            logger.log(level, message)

    def has_said(self, key: str) -> bool:
        """Return whether this was said, on processes that do not speak, too: the same answer on every rank."""
        return key in self._said


class StepPort(Protocol):
    """Everything that scoring and the update may ask of the run; mypy holds ``scoring/`` and ``step/`` to this list
    (``pyproject.toml``). ``LabTrainer`` is one."""

    algorithm: Algorithm
    lab_settings: LabSettings
    recorder: Recorder
    exact_update: Any  # ``step.exact_update.ExactUpdate``, of a room above
    phase: Phase
    correction: SamplerCorrection | None
    team_overrides_token_loss: bool
    replaces_trls_advantages: bool

    accelerator: Any
    args: Any
    model: Any
    state: Any
    optimizer: Any
    train_dataset: Any
    is_deepspeed_enabled: bool
    current_gradient_accumulation_steps: Any
    _tr_loss: Any
    _globalstep_last_logged: int

    num_generations: int
    num_iterations: int
    max_completion_length: Any
    beta: float
    ref_model: Any
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: Tensor
    rollout_func: Any
    eos_token_ids: Any
    _tokenizer: Any
    _step: int
    _buffered_inputs: Any
    _metrics: Any
    _scoring: Any
    _generate: Any
    _calculate_rewards: Any
    _group_size: Any

    def sampled_by(self, rows: int) -> Tensor: ...

    def token_loss(self, batch: TokenBatch) -> Tensor: ...

    def compute_advantages(self, table: RewardTable) -> Tensor: ...
