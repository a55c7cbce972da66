"""Ports: what acts on a step gets them in place of the trainer. They are small values, a recorder, and three lists of
what it may ask for: ``Numbers``, ``Collectives``, ``Hooks``.

The rooms below ``lab_trainer.py`` do not know ``LabTrainer``: a reader sees here what may pass between them, and a test
can stand in for it. mypy holds ``exactness/``, ``step/`` and ``scoring/`` to these lists (``pyproject.toml``). The few
that operate TRL's own object take a ``trl.GRPOTrainer`` and say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from trl import GRPOTrainer

from grpo_lab.batch import RewardTable, TokenBatch
from grpo_lab.rewards.steps import StepScores
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
    def of(trainer: GRPOTrainer) -> Phase:
        counts = (trainer.args.steps_per_generation, trainer.num_iterations, trainer.args.gradient_accumulation_steps)
        return Phase(*map(int, (*counts, trainer._step)))

    @property
    def every(self) -> int:
        """E: micro-batches that a generation batch serves, all passes."""
        return self.steps_per_generation * self.num_iterations

    @property
    def outlives_a_step(self) -> bool:
        """Return whether a generation batch is trained on after an update, so that its log-probs are an older
        policy's."""
        return self.accumulation % self.every != 0

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
    is now), and what is said once, where this process ``speaks``. ``trls``: metrics and completions table that TRL
    writes by itself, once it is there."""

    #: what was not finite, where a guard is in force (``guard``); None: it is an error at once
    faults: Faults | None = None

    def __init__(
        self,
        book: type[MetricBook],
        mode: Callable[[], str],
        speaks: Callable[[], bool],
        trls: Callable[[], tuple[Any, Any]],
    ) -> None:
        self.books = {name: book() for name in ("train", "eval")}
        self.mode = mode
        self._speaks = speaks
        self._trls = trls
        self._said: set[str] = set()

    @property
    def trl_metrics(self) -> dict[str, list[Any]]:
        """TRL's own metrics since the last log, of the mode that the run is in."""
        metrics: dict[str, list[Any]] = self._trls()[0][self.mode()]
        return metrics

    @property
    def completions(self) -> dict[str, Any]:
        """TRL's completions table."""
        table: dict[str, Any] = self._trls()[1]
        return table

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside the block nothing reaches the log: a team's ``token_loss`` may record metrics, of a toy batch, too."""
        books = self.books
        trls = self._trls()[0]
        then = {mode: {name: list(values) for name, values in metrics.items()} for mode, metrics in trls.items()}
        self.books = {mode: type(book)() for mode, book in books.items()}
        try:
            yield
        finally:
            self.books = books
            for mode, metrics in trls.items():
                metrics.clear()
                metrics.update(then[mode])

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


class Numbers(Protocol):
    """What the run was set to, what its numbers mean, and how far it is."""

    algorithm: Algorithm
    lab_settings: LabSettings
    args: Any
    state: Any
    phase: Phase
    last_logged_step: int
    exact_update: Any  # ``step.exact_update.ExactUpdate``, of a room above
    correction: SamplerCorrection | None
    beta: float
    max_completion_length: Any
    current_gradient_accumulation_steps: Any
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    text_tokenizer: Any
    end_token_ids: frozenset[int]


class Collectives(Protocol):
    """The ranks, and what lies on each of them."""

    accelerator: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    model: Any
    ref_model: Any
    optimizer: Any
    recorder: Recorder
    buffered_micro_batches: list[dict[str, Any]]


class Hooks(Protocol):
    """What a team brings, and may put in the place of ours."""

    train_dataset: Any
    environments: Any
    rollout_func: Any
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: Tensor
    step_scores: dict[int, list[StepScores]]
    current_group_size: int
    replaces_trls_advantages: bool

    def sampled_by(self, rows: int) -> Tensor: ...

    def compute_advantages(self, table: RewardTable) -> Tensor: ...

    def token_loss(self, batch: TokenBatch) -> Tensor: ...


class UpdatePort(Numbers, Collectives, Protocol):
    """Both, for what computes on the rows of a step."""


class StepPort(UpdatePort, Hooks, Protocol):
    """All three, for what goes from rewards to the loss; ``LabTrainer`` is one."""
