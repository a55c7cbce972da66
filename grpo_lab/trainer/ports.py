"""Ports: what the parts of a step get in place of the trainer. These are

    ``Phase``, ``Faults``                  values: where the run is in its generation batch; what was not finite in it
    ``Recorder``                           metrics, and messages that are logged once
    ``Numbers``, ``Collectives``, ``Hooks``    protocols: the attributes and methods of the trainer that a part may use

Modules below ``lab_trainer.py`` do not import ``LabTrainer``: a reader sees here what they use of it, and a test can
replace it. mypy checks ``exactness/``, ``step/`` and ``scoring/`` against these protocols (``pyproject.toml``). The few
functions that change TRL's own object take a ``trl.GRPOTrainer``.
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
from grpo_lab.objectives import Correction
from grpo_lab.rewards.steps import StepScores
from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.settings.algorithm import Algorithm
from grpo_lab.trainer.settings.parse import LabSettings

logger = logging.getLogger("grpo_lab")


@dataclass(frozen=True)
class Phase:
    """Position of the run in its current generation batch, counted in micro-batches.

    Attributes:
        steps_per_generation: number of micro-batches into which a generation batch is cut.
        num_iterations: number of passes over them.
        accumulation: number of micro-batches in an optimizer step.
        done: number of micro-batches trained on since the training began (TRL's ``_step``).
    """

    steps_per_generation: int
    num_iterations: int
    accumulation: int
    done: int = 0

    @staticmethod
    def of(trainer: GRPOTrainer) -> Phase:
        """Return the phase in which the trainer is now."""
        counts = (trainer.args.steps_per_generation, trainer.num_iterations, trainer.args.gradient_accumulation_steps)
        return Phase(*map(int, (*counts, trainer._step)))

    @property
    def every(self) -> int:
        """E: number of micro-batches trained on per generation batch, over all passes."""
        return self.steps_per_generation * self.num_iterations

    @property
    def outlives_a_step(self) -> bool:
        """Return whether a generation batch may be trained on in several optimizer steps. From its second step on, the
        log-probs from its generation are those of an older policy."""
        return self.accumulation % self.every != 0

    @property
    def at_end(self) -> bool:
        """Return whether the generation batch is used up, so that the next micro-batch begins a new one."""
        return self.done % self.every == 0

    @property
    def start(self) -> int:
        """Number of micro-batches done when the current generation batch was made."""
        return self.done - self.done % self.every

    def here(self, window: int) -> list[int | None]:
        """Return the places in TRL's buffer of the last ``window`` micro-batches, of which the current one, number
        ``done``, is the last. None stands for a micro-batch of an earlier generation batch."""
        numbers = range(self.done - window + 1, self.done + 1)
        return [number % self.steps_per_generation if number >= self.start else None for number in numbers]

    def ahead(self) -> list[int]:
        """Return the places in TRL's buffer of the micro-batches that are still to come in this generation batch, after
        the current one, in order."""
        following = self.done + 1
        return [number % self.steps_per_generation for number in range(following, following + -following % self.every)]


#: Kinds of values that are checked once per generation batch. Loss and gradient are checked in each step.
OF_BATCH = ("reward", "log_prob", "advantage")


class Faults:
    """Record of values that are not finite in this rank's generation batches, for ``step.guard``.

    Everything generated between two micro-batches counts as one batch. (TRL's ``_step`` could not tell batches apart:
    it does not advance if a subclass replaces ``training_step``.)

    Attributes:
        batch: number of the current generation batch; 0 before the first.
        bad: kinds (``OF_BATCH``) of values in the current batch that are not finite.
        said: a sentence about each of these values.
        names: names of the rewards, in the order of ``rewards``.
        rewards: ``row_key`` of prompt and completion → rewards of the first such row in the current batch.
        infinite: (number of the row over all ranks, column of the reward) → ±inf. The reward table holds NaN in their
            place; ``scored`` puts them back into ``rewards``.
        step: the micro-batches of the current optimizer step.
        of_step: kind → number of the latest batch with such a value from which the step has a micro-batch.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Clear the record; called when a training begins."""
        self.batch = 0
        self.bad = set[str]()
        self._trained_on = True
        self.said: list[str] = []
        self.end_step()
        self.names: tuple[str, ...] = ()
        self.rewards: dict[int, list[float]] = {}
        self.infinite: dict[tuple[int, int], float] = {}

    def end_step(self) -> None:
        """Forget the micro-batches of an optimizer step that was taken or skipped."""
        self.step: list[dict[str, Any]] = []
        self.of_step: dict[str, int] = {}

    def trained_on(self, inputs: dict[str, Any]) -> None:
        """Add a micro-batch to the current optimizer step, and the current batch's faults to the step's."""
        self._trained_on = True
        self.step.append(inputs)
        self.of_step |= dict.fromkeys(self.bad, self.batch)

    def found(self, kind: str, sentence: str) -> None:
        """Record that the batch that is being generated has a value of ``kind`` that is not finite; ``sentence`` says
        which."""
        self.generation()
        self.bad.add(kind)
        self.said.append(sentence)

    def scored(self, names: tuple[str, ...], keys: list[int], values: list[list[float]], first: int = 0) -> None:
        """Record the rewards of this rank's rows, for the report on a bad step.

        Args:
            names: names of the rewards.
            keys: ``row_key`` of each row.
            values: the rewards of each row, with NaN in place of infinities, which are taken from ``infinite``.
            first: number of this rank's first row over all ranks.
        """
        self.generation()
        self.names = names
        for number, (key, row) in enumerate(zip(keys, values, strict=True), start=first):
            whole = [self.infinite.get((number, column), value) for column, value in enumerate(row)]
            self.rewards.setdefault(key, whole)
        self.infinite = {}

    def generation(self) -> None:
        """Begin a new batch if the current one has been trained on; else do nothing, since all rounds of one batch
        (``dead_groups: resample``) count as the same."""
        if self._trained_on:
            self.batch += 1
            self.bad = set()
            self._trained_on = False
            self.said = []
            self.rewards = {}


def row_key(prompt: Iterable[int], completion: Iterable[int]) -> int:
    """Hash the tokens of a row to one number, which is valid within one process."""
    return hash((tuple(map(int, prompt)), tuple(map(int, completion))))


class Recorder:
    """Metrics of training and evaluation, and messages that are logged only once.

    Args:
        book: class of the metric books, which decides how means are taken.
        mode: function that returns the run's current mode, ``train`` or ``eval``.
        speaks: function that returns whether this process logs messages.
        trls: function that returns TRL's own metrics (by mode) and its table of completions.

    Attributes:
        books: mode → metric book.
    """

    #: Record of values that are not finite; None if no guard is in force (``guard``): they then raise an error at once.
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
        """TRL's own metrics since the last log, in the run's current mode."""
        metrics: dict[str, list[Any]] = self._trls()[0][self.mode()]
        return metrics

    @property
    def completions(self) -> dict[str, Any]:
        """TRL's table of prompts, completions, rewards and advantages, which it logs."""
        table: dict[str, Any] = self._trls()[1]
        return table

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Discard all metrics recorded inside the block, such as those that a team's ``token_loss`` records on a toy
        batch."""
        books = self.books
        of_trl = self._trls()[0]
        before = {mode: {name: list(values) for name, values in metrics.items()} for mode, metrics in of_trl.items()}
        self.books = {mode: type(book)() for mode, book in books.items()}
        try:
            yield
        finally:
            self.books = books
            for mode, metrics in of_trl.items():
                metrics.clear()
                metrics.update(before[mode])

    @property
    def faults_in_training(self) -> Faults | None:
        """``faults`` in training; None in evaluation, which has no step to skip."""
        if self.mode() == "train":
            return self.faults
        return None

    def book(self, mode: str | None = None) -> MetricBook:
        """Return the metric book of ``mode``; by default of the run's current mode."""
        return self.books[mode or self.mode()]

    def say(self, message: str, key: str | None = None, level: int = logging.INFO) -> None:
        """Log ``message`` on the main process, unless its ``key`` (by default the message) was logged before."""
        if self.has_said(key or message):
            return
        self._said.add(key or message)
        if self._speaks():
            logger.log(level, message)

    def has_said(self, key: str) -> bool:
        """Return whether ``say`` was called with this key. Every rank remembers the key, also those that log nothing,
        so all ranks give the same answer."""
        return key in self._said


class Numbers(Protocol):
    """The settings, algorithm and progress of a trainer, as far as a part may read them."""

    algorithm: Algorithm
    lab_settings: LabSettings
    args: Any
    state: Any
    phase: Phase
    last_logged_step: int
    vllm_generation: Any  # with `use_vllm`
    exact_update: Any  # ``step.exact_update.ExactUpdate``, which imports this module
    correction: Correction | None
    beta: float
    max_completion_length: Any
    current_gradient_accumulation_steps: Any
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    entropy_coef: float
    last_entropy: float
    text_tokenizer: Any
    end_token_ids: frozenset[int]


class Collectives(Protocol):
    """The attributes of a trainer by which a part talks to other ranks, and those that each rank holds for itself:
    models, optimizer, metrics, buffered micro-batches."""

    accelerator: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    model: Any
    ref_model: Any
    optimizer: Any
    recorder: Recorder
    buffered_micro_batches: list[dict[str, Any]]


class Hooks(Protocol):
    """The data, environments and rewards of a trainer that a part may use, and the methods that a team may override."""

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
    """``Numbers`` and ``Collectives``, for code that computes on the rows of a step."""


class StepPort(UpdatePort, Hooks, Protocol):
    """All three protocols, for code on the way from rewards to the loss; ``LabTrainer`` is one."""
