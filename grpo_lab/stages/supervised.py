"""Stages that make a model: train it by TRL's trainers (SFT, DPO, SimPO, rewards) or a teacher, start it, merge two.

Each class is a kind of stage; its docstring begins with its name in a pipeline. `learn` does what all trainings share:
it trains by `trainer/supervised/methods.py`, saves the model, and goes on with a training that was stopped.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from grpo_lab.curation import average_weights
from grpo_lab.curation.weights import check_mergeable
from grpo_lab.data.fusion import CONTINUES, goes_on
from grpo_lab.evaluation.step_accuracy import step_accuracy
from grpo_lab.io import whole_folder
from grpo_lab.recipe.ahead import check_whole_model, known_model, to_come
from grpo_lab.recipe.checks import check_trackers, cold_start_rows
from grpo_lab.recipe.data import load_rows, rows_here
from grpo_lab.recipe.job import NOT_OF_THIS_MACHINE
from grpo_lab.recipe.models import load_model, load_tokenizer
from grpo_lab.recipe.sections import ColdStartSection, DataSection, ModelSection, TemplateKwargs
from grpo_lab.rewards.preference import PreferenceReward, holds_out
from grpo_lab.rewards.token_classification import TokenClassificationSteps
from grpo_lab.runs.console import describe, settings_in_words
from grpo_lab.runs.metrics import MetricsFile, cut_metrics
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.runs.stop_requests import identity_of
from grpo_lab.settings import NULL_IS_DEFAULT, Number, Positive, Whole, settings
from grpo_lab.stages.sample import TEXT, check_lines, read_lines
from grpo_lab.trainer.supervised.methods import (
    COLUMNS,
    FIXED,
    WEIGHT,
    check_training,
    train_by,
    trl_of,
    worked_pairs,
)

MODEL, STOPPED = "model", "stopped"
"""Folders inside a stage's: of the trained model, and of the checkpoint of a training that stopped on request."""
Training = Annotated[Mapping[str, Any], NULL_IS_DEFAULT]


@settings(rest="training")
class Train:
    """``sft``, ``dpo``, ``simpo``: train a model on ``rows``. Other keys: those of TRL's configuration of the method,
    such as ``SFTConfig``."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    method: ClassVar[Any] = "sft"
    model: str
    rows: str
    seed: Whole = 0
    training: Training = field(default_factory=dict)
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)

    def plan(self) -> str:
        check_supervised(self.method, self.training)
        known_model(ModelSection(path=self.model), "model", whole=True)
        check_lines(self.rows, "rows", dict.fromkeys(COLUMNS[self.method], TEXT))
        return f"{self.model} on {self.rows}; {settings_in_words(self.training)}"

    def run(self, workspace: Workspace, reference: Any = None, made_from: Any = None) -> Facts:
        """Train and return the facts.

        Args:
            workspace: the stage's folder and requests to stop.
            reference: DPO's reference model; None: the model as it begins.
            made_from: plain values that tell this training from others on the same rows, so that only its own
                checkpoint is continued; None: all settings of the stage.
        """
        model, tokenizer = load_model(ModelSection(path=self.model), self.seed)
        more = {}
        if reference is not None:
            more = {"ref_model": reference}
        return learn(self, workspace, self.method, model, tokenizer, self.read(), made_from, **more)

    def read(self) -> list[dict[str, Any]]:
        """Return the rows with the method's columns; for ``sft`` also with `CONTINUES` if it is true of any row."""
        columns = COLUMNS[self.method]
        lines = read_lines(Path(self.rows), dict.fromkeys(columns, TEXT))
        rows = [{name: row[name] for name in columns} for row in lines]
        if self.method == "sft" and any(map(goes_on, lines)):
            return [{**row, CONTINUES: goes_on(line)} for row, line in zip(rows, lines, strict=True)]
        return rows


@settings(rest="training")
class Dpo(Train):
    """``dpo``: train on pairs; the reference is the model as it begins."""

    method: ClassVar[Any] = "dpo"


@settings(rest="training")
class Simpo(Train):
    """``simpo``: train on pairs, without a reference."""

    method: ClassVar[Any] = "simpo"


@settings(rest="training")
class RewardModel(Train):
    """``reward_model``: train a model to score a prompt with its completion, from pairs (``rows``), by TRL's
    RewardTrainer. Other keys: TRL's ``RewardConfig``.

    Args:
        held_out: share of the prompts whose pairs are not trained on. They measure how many pairs the model orders
            correctly. A `PreferenceReward` in RL holds out the same prompts.
    """

    method: ClassVar[Any] = "reward"
    held_out: Number = PreferenceReward.held_out

    def __post_init__(self) -> None:
        if self.chat_template_kwargs:
            raise ValueError("`chat_template_kwargs` has no effect on a reward model; leave it out")

    def run(self, workspace: Workspace, reference: Any = None, made_from: Any = None) -> Facts:
        learned, held = divided(self, "pairs")
        tokenizer = load_tokenizer(ModelSection(path=self.model))
        facts = learn(self, workspace, "reward", self.model, tokenizer, learned, made_from)
        right = PreferenceReward(str(workspace.folder / MODEL)).pair_accuracy(held)
        return facts | {"rows": len(learned), "held_out": len(held), "pair_accuracy": right}


@settings(rest="training")
class StepRewardModel(Train):
    """``step_reward_model``: train a process reward model (`StepClassifier`) on labelled steps, the ``rows`` of a stage
    `step_labels`. Other keys: `StepClassifierConfig`.

    Args:
        held_out: share of the prompts whose rows are not trained on. They measure how well the model's scores tell
            right steps from wrong ones (`step_accuracy`).
    """

    method: ClassVar[Any] = "steps"
    held_out: Number = PreferenceReward.held_out

    def __post_init__(self) -> None:
        if self.chat_template_kwargs:
            raise ValueError("`chat_template_kwargs` has no effect on a process reward model; leave it out")

    def run(self, workspace: Workspace, reference: Any = None, made_from: Any = None) -> Facts:
        learned, held = divided(self, "rows")
        tokenizer = load_tokenizer(ModelSection(path=self.model))
        facts = learn(self, workspace, "steps", self.model, tokenizer, learned, made_from)
        facts |= {"rows": len(learned), "held_out": len(held)}
        if held:
            prompts = [row["prompt"] for row in held]
            steps = [row["completions"] for row in held]
            scores = TokenClassificationSteps(workspace.folder / MODEL).score_all(prompts, steps, {})
            facts |= step_facts(held, scores)
        return facts


@settings(rest="training")
class ColdStart:
    """``cold_start``: train a model, saved or new and tiny, on worked solutions (``data``). Without ``data`` the model
    is only saved. Other keys: TRL's ``SFTConfig``."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    model: ModelSection
    data: DataSection | None = None
    seed: Whole = 0
    training: Training = field(default_factory=dict)
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model.refuse("model", lora="a cold start trains all weights")
        unread = [*self.training, *(["chat_template_kwargs"] if self.chat_template_kwargs else [])]
        if self.data is None and unread:
            raise ValueError(f"`{unread[0]}` has no effect: without `data` nothing is trained; leave it out, or add it")

    def plan(self) -> str:
        check_supervised("sft", self.training, "cold_start")
        known = known_model(self.model, whole=True)
        if self.data is None:
            return self.model.name
        cold_start_rows(ColdStartSection(self.data, self.training), known, here_only=True, where="data")
        return f"{self.model.name} on {describe(self.data)}; {settings_in_words(self.training)}"

    def run(self, workspace: Workspace, rows: Any = None) -> Facts:
        """Train and return the facts. ``rows``: the data set of ``data``, if it is loaded already."""
        model, tokenizer = load_model(self.model, self.seed)
        if self.data is None:
            with whole_folder(workspace.folder / MODEL) as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            return {"steps": 0, "loss": None}
        if rows is None:
            rows = load_rows(self.data, "data")
        return learn(self, workspace, "sft", model, tokenizer, worked_pairs(rows), where="cold_start")


@settings(rest="training")
class Distill:
    """``distill``: train a model on its own answers to the prompts of ``data``, by a ``teacher`` of the same
    vocabulary. Other keys: TRL's ``DistillationConfig``. With ``tokens`` the training ends, if not before, at the first
    log by which the model has generated so many tokens."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    model: str
    teacher: str
    data: DataSection
    tokens: Positive | None = None
    seed: Whole = 0
    training: Training = field(default_factory=dict)

    def plan(self) -> str:
        check_supervised("distill", self.training)
        student = known_model(ModelSection(path=self.model), "model", whole=True)
        teacher = known_model(ModelSection(path=self.teacher), "teacher", whole=True)
        if student is not None and teacher is not None:
            self._check_vocabulary(student[0], teacher[0])
        rows_here(self.data, "data")
        words = f"{self.model} by {self.teacher} on {describe(self.data)}; {settings_in_words(self.training)}"
        if self.tokens is None:
            return words
        return f"{words}; to {self.tokens:,} generated tokens"

    def run(self, workspace: Workspace) -> Facts:
        from grpo_lab.trainer.supervised.distillation import TokenBudget

        student, tokenizer = load_model(ModelSection(path=self.model), self.seed)
        teacher, teacher_tokenizer = load_model(ModelSection(path=self.teacher), self.seed)
        self._check_vocabulary(tokenizer, teacher_tokenizer)
        rows = load_rows(self.data, "data").select_columns(["prompt"]).to_list()
        budget = TokenBudget(self.tokens)
        parts: Any = {"callbacks": [budget], "teacher_model": teacher.eval()}
        facts = learn(self, workspace, "distill", student, tokenizer, rows, **parts)
        return {**facts, "tokens": budget.generated}

    def _check_vocabulary(self, tokenizer: Any, teacher_tokenizer: Any) -> None:
        """Raise ValueError if the teacher's tokenizer has other tokens than the student's."""
        if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"`teacher` is {self.teacher}, whose tokenizer has other tokens than that of {self.model}: what it "
                "says of a token is about another one. Take a teacher of the same family, or `sft` on its samples"
            )


@settings()
class Merge:
    """``merge``: average the weights of two models, alpha · ``model`` + (1 − alpha) · ``short_model``, with alpha in
    [0, 1] (`average_weights`)."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    model: str
    short_model: str
    alpha: Number = 0.5

    def plan(self) -> str:
        check_merged(self.model, self.short_model, self.alpha)
        return f"{self.alpha:g} of {self.model}, the rest of {self.short_model}"

    def run(self, workspace: Workspace) -> Facts:
        shutil.rmtree(workspace.folder / MODEL, ignore_errors=True)  # left by a run that was killed before it was done
        average_weights(self.model, self.short_model, workspace.folder / MODEL, self.alpha)
        return {}


def divided(stage: RewardModel | StepRewardModel, what: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that a stage trains on, and those that it holds out. Raises ValueError, in which the rows are
    called ``what``, if all are held out."""
    learned = []
    held = []
    for row in stage.read():
        if holds_out(row["prompt"], stage.held_out):
            held.append(row)
        else:
            learned.append(row)
    if not learned:
        raise ValueError(f"of {len(held)} {what} in {stage.rows} all are held out (`held_out` {stage.held_out:g})")
    return learned, held


def step_facts(rows: Sequence[Mapping[str, Any]], scores: Sequence[Sequence[float | None]]) -> Facts:
    """Measure how well the scores of steps tell right steps from wrong ones. ``rows`` have ``labels``, ``scores`` one
    number for each of them (None: not scored). Intervals treat the rows of a prompt as one unit."""
    of_prompt: dict[str, list[tuple[float, float]]] = {}
    for row, own in zip(rows, scores, strict=True):
        pairs = [(score, label) for score, label in zip(own, row["labels"], strict=True) if score is not None]
        of_prompt.setdefault(repr(row["prompt"]), []).extend(pairs)
    found = step_accuracy([*of_prompt.values()])
    return {
        "step_accuracy": found.accuracy.value,
        "step_accuracy_low": found.accuracy.low,
        "step_accuracy_high": found.accuracy.high,
        "majority": found.majority,
        "auc": found.auc.value,
    }


def check_merged(model: str, short_model: str, alpha: float, where: str = "model") -> None:
    """Raise ValueError if two models cannot be averaged; what does not exist yet is not checked."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"`alpha` is {alpha:g}; it must be a share between 0 and 1")
    for path, setting in ((model, where), (short_model, "short_model")):
        check_whole_model(ModelSection(path=path), setting)
    if not to_come([model, short_model]):
        check_mergeable(model, short_model)


def check_supervised(method: str, training: Mapping[str, Any], where: str = "training") -> None:
    """Raise ValueError if TRL's configuration would refuse the settings."""
    settings = check_training(method, training, where)
    check_trackers(settings.get("report_to"), f"{where}.report_to")
    with tempfile.TemporaryDirectory() as folder:
        trl_of(method)[0](**{"output_dir": folder, **FIXED.get(method, {}), **settings, **NOT_OF_THIS_MACHINE})


def learn(
    stage: Train | ColdStart | Distill,
    workspace: Workspace,
    method: str,
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    made_from: Any = None,
    callbacks: Sequence[Any] = (),
    **more: Any,
) -> Facts:
    """Train, save model and tokenizer to `model/`, and return the facts.

    A training that was stopped goes on from its checkpoint in `stopped/`, if it had the same ``rows`` and ``made_from``
    (None: the stage's settings). ``method``, ``model`` and ``tokenizer`` are as in `train_by`, which also gets
    ``callbacks``, beside ours, and ``more``.
    """
    from datasets import Dataset

    counted = TrainingFacts(workspace.folder / "metrics.jsonl")
    template = getattr(stage, "chat_template_kwargs", {})
    own = {name: value for name, value in asdict(stage).items() if value or name != "chat_template_kwargs"}
    with workspace.stop.training(workspace.folder / STOPPED, identity_of(rows, made_from or own)) as training:
        counted.begin(training.step)
        with whole_folder(workspace.folder / MODEL) as place:
            more |= {"callbacks": [counted, *callbacks], "train": training, "chat_template_kwargs": template}
            more["tracked_in"] = workspace.folder
            arguments = {"seed": stage.seed, **stage.training}
            train_by(method, model, tokenizer, Dataset.from_list(rows), place, arguments, **more)
            tokenizer.save_pretrained(place)
            (place / "training_args.bin").unlink(missing_ok=True)  # a pickle that names this machine
    training.done()
    return counted.facts()


class TrainingFacts(MetricsFile):
    """Callback that writes `metrics.jsonl` of one training and collects the facts for its stage's marker."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: Facts = {"steps": 0, "loss": None}
        self.weights: list[float] = []

    def begin(self, step: int) -> None:
        """Begin a training that has done ``step`` steps: keep the file's lines up to there, or none for a new one."""
        if step:
            cut_metrics(self.path, step)
            self.weights = [line[WEIGHT] for line in read_lines(self.path) if WEIGHT in line]
        else:
            self.path.unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        super().on_log(args, state, control, logs, **more)
        logged = logs or {}
        self.found["loss"] = logged.get("train_loss", self.found["loss"])
        if WEIGHT in logged:
            self.weights.append(logged[WEIGHT])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found["steps"] = state.global_step

    def facts(self) -> Facts:
        """Return the number of optimizer steps and the mean loss; for DPO and SimPO also the mean weight of a pair,
        w(θ), in the first and the last log."""
        if not self.weights:
            return dict(self.found)
        return {**self.found, "weight_first": self.weights[0], "weight_last": self.weights[-1]}
