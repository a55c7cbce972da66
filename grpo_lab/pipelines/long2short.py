"""`grpo-lab long2short`: make a model right in fewer tokens, by a method of Kimi k1.5 (section 2.4) or by SimPO.

    shortest_sft   SFT on the shortest right one of n samples
    dpo            DPO on pairs of the shortest right sample with wrong ones, and with right ones ≥ 1.5 times as long
    simpo          SimPO on the same pairs (added by us: the report names DPO)
    merge          average of the weights with those of a model whose answers are shorter; no training

The new model is in the output folder, beside `samples.jsonl`, `rows.jsonl`, `evaluation/before` and `evaluation/after`.
What counts is accuracy *and* the tokens of right answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lab.curation import sampled
from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.pipelines.stage_engine import Stage, Work, carry_out
from grpo_lab.pipelines.staged_command import Resolved, StagedCommand, plan_of, resolve, running
from grpo_lab.pipelines.standing import left_in
from grpo_lab.recipe.ahead import check_whole_model
from grpo_lab.recipe.checks import check_trackers
from grpo_lab.recipe.elsewhere import SUPERVISED, refuse_words_from_elsewhere
from grpo_lab.recipe.job import Questions, check_model
from grpo_lab.recipe.models import model_files
from grpo_lab.recipe.sections import (
    OF_A_SAMPLED_MODEL,
    STRICT_ACCURACY,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    refuse_every,
    with_name,
)
from grpo_lab.runs.console import count_of, describe, settings_in_words
from grpo_lab.runs.differences import OF_NO_FILE, settings_of
from grpo_lab.runs.folder import check_writable
from grpo_lab.runs.stage import Facts, Words, Workspace, console
from grpo_lab.runs.stop_requests import identity_of
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, Number, read, settings
from grpo_lab.stages.held_out import EVALUATION, Measure
from grpo_lab.stages.sample import SAMPLES, ModelGenerator, plan_of_samples, refuse_other_count, with_room
from grpo_lab.stages.select import ROWS, Shorter, Shortest, choose
from grpo_lab.stages.supervised import MODEL, STOPPED, Dpo, Merge, Simpo, Train, check_merged
from grpo_lab.trainer.supervised.methods import check_training

EVALUATION_THEN = ("data", "reward", "max_new_tokens", "batch_size", "n_samples", "temperature", "before")
"""Settings of an evaluation that always count in the digest of a training (``_made_from``). Those that came in later
releases count only where they are set, so that older digests stay the same."""


@settings(rest="sampling")
class Long2ShortRecipe:
    """A recipe of `grpo-lab long2short`; keys that are no fields are `SamplingSettings`'.

    Attributes:
        method: how the new model is made.
        model: the saved model whose answers are long.
        data: problems to sample on; not for ``merge``.
        reward: the reward that judges the samples.
        sampling: how the model is sampled; 8 answers to a problem by default.
        pairs: which answers are compared; only for ``dpo`` and ``simpo``.
        samples: file of the samples, which several methods may share; default: ``samples.jsonl`` in the folder.
        short_model, alpha: for ``merge``: the other model, and the share of ``model`` in the average.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``.
        evaluation: held-out rows, asked of the old and the new model; None: none are.
        max_hours, stop_file: when to stop, as in a recipe of `grpo-lab train` (docs/resume.md).
    """

    name: str
    output_dir: Path
    method: Literal["shortest_sft", "dpo", "simpo", "merge"]
    model: ModelSection
    data: DataSection | None = None
    reward: Annotated[RewardSection, NULL_IS_DEFAULT] = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(n_samples=8))
    pairs: Shorter | None = None
    samples: str | None = None
    short_model: str | None = None
    alpha: Annotated[Number, NULL_IS_DEFAULT] = 0.5
    training: Annotated[Mapping[str, Any], NULL_IS_DEFAULT] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None
    max_hours: Hours | None = None
    stop_file: str | None = None

    @property
    def samples_file(self) -> Path:
        return Path(self.samples or self.output_dir / SAMPLES)

    @property
    def way(self) -> Shortest | Shorter:
        """The rule that chooses training rows from the samples."""
        if self.method == "shortest_sft":
            return Shortest()
        return self.pairs or Shorter()

    def __post_init__(self) -> None:
        if self.model.path is None:
            raise ValueError("`model` is a saved one: give `path`, a folder or hub name")
        if (self.method == "merge") != (self.short_model is not None):
            raise ValueError("`short_model` is needed with `method: merge`, and has an effect there only")
        if (self.method == "merge") == (self.data is not None):
            raise ValueError("`data` is needed to sample on, and has no effect with `method: merge`")
        if self.method == "merge" and self.training:
            raise ValueError("`training` has no effect with `method: merge`, which trains nothing; leave it out")
        self.model.refuse("model", **OF_A_SAMPLED_MODEL)
        refuse_every(self.evaluation)
        refuse_words_from_elsewhere(self.training, "`training`", SUPERVISED)
        if self.method != "merge" and self.alpha != 0.5:
            raise ValueError(f"`alpha` has an effect only with `method: merge`, not `{self.method}`; leave it out")
        if self.method == "merge" and self.samples is not None:
            raise ValueError("`samples` has no effect with `method: merge`, which samples nothing; leave it out")
        if self.pairs is not None and self.method not in ("dpo", "simpo"):
            raise ValueError(f"`pairs` has no effect with `method: {self.method}`; leave it out")


def long2short_recipe_from(written: Mapping[str, Any], default_name: str = "long2short") -> Long2ShortRecipe:
    """Make a recipe from a plain mapping; ``default_name``: its name if it has none. Raises ValueError for an unknown
    key or a missing section."""
    check_command(written, "long2short")
    return read(Long2ShortRecipe, {"n_samples": 8, **with_name(written, default_name)})


@dataclass(frozen=True)
class Shortened:
    """Result of a long2short run: the new model's folder, the number of rows it was trained on, and both evaluations
    (None: not asked for)."""

    folder: Path
    rows: int
    before: EvaluationResult | None
    after: EvaluationResult | None


def long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Shortened:
    """Run ``recipe``, or continue what an earlier, killed run left in the folder.

    ``overwrite`` begins anew; a file that the recipe names in ``samples`` stays, since other runs may share it. Raises
    ValueError if the folder holds another run or something else, there are no rows to train on, or a setting does not
    fit. Raises Interrupted if a stop was requested.
    """
    ready = resolve(LONG2SHORT, recipe, overwrite)
    folder = recipe.output_dir
    about = {
        "method": recipe.method,
        "model": recipe.model.path,
        "short_model": recipe.short_model,
        "data": describe(recipe.data),
        "data_digest": ready.fingerprint,
        "recipe": LONG2SHORT.settings(recipe),
        "sampling": describe(recipe.sampling),
        "training": dict(recipe.training),
    }
    stages = stages_of(recipe, ready.asked)
    forget = None
    if overwrite:
        forget = [*(folder / stage.marker for stage in stages), folder / STOPPED, folder / SAMPLES]
        if recipe.samples is not None and recipe.samples_file.is_file():
            console.print(f"samples: {recipe.samples} is kept, as it is no file of this run; remove it to sample anew")
    page = None
    with running(LONG2SHORT, recipe, stages, about, forget) as run:
        workspace = Workspace(folder, run.stop)
        carry_out(stages, workspace, run)
        count = workspace.facts.get("select", {}).get("rows", 0)
        run.write(rows=count)
        if run.finished:
            console.print(f"{folder} is finished: nothing to do", soft_wrap=True)
        else:
            page = write_report(folder)
            run.write(left=left_in(folder, [EVALUATION]), finished=True)
    before, after = (_measured(folder / EVALUATION / name) for name in ("before", "after"))
    if after is not None:
        terminal_summary(before, after, report=page, model_path=folder)
    elif page is not None:
        console.print(f"model: {folder}\nreport: {page}", soft_wrap=True)
    return Shortened(folder, count, before, after)


def plan_of_long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Words:
    """Describe what `grpo-lab long2short` will do, for ``--dry-run``. Raises ValueError for what would stop it."""
    return plan_of(LONG2SHORT, recipe, overwrite)


def stages_of(recipe: Long2ShortRecipe, asked: Questions) -> list[Stage]:
    """List the stages: evaluation before, select and train (or merge), evaluation after. The evaluations are
    optional. ``asked``: the problems and their judge."""
    folder = recipe.output_dir
    path = str(recipe.model.path)
    sampling = recipe.sampling

    def select(workspace: Workspace) -> Facts:
        generator = ModelGenerator(path, sampling)
        said = {"reward": describe(recipe.reward)}
        problems = [*with_room({number: dict(row) for number, row in enumerate(asked.rows)}, generator).values()]
        rates = generator.judged(problems, asked.reward, recipe.samples_file, workspace.stop, said, "samples")
        samples = sampled(problems, rates, generator.tokens)
        return choose(samples, recipe.way, workspace.folder, f"`method: {recipe.method}`: ")

    def train(workspace: Workspace) -> Facts:
        kind: Any = {"dpo": Dpo, "simpo": Simpo}.get(recipe.method, Train)
        training = {"use_cpu": sampling.use_cpu, **recipe.training}
        stage = kind(path, str(folder / ROWS), sampling.seed, training, sampling.chat_template_kwargs)
        return _delivered(workspace, stage.run(workspace, made_from=_made_from(recipe)))

    def merge(workspace: Workspace) -> Facts:
        return _delivered(workspace, Merge(path, str(recipe.short_model), recipe.alpha).run(workspace))

    def measure(which: str, model: str) -> list[Stage]:
        if recipe.evaluation is None:
            return []
        return [Stage(which, Measure(model, recipe.evaluation, sampling, f"{EVALUATION}/{which}"), folder)]

    model = {"model": "."}
    if recipe.method == "merge":
        stages = [Stage("merge", Work(merge, model), folder)]
    else:
        stages = [
            Stage("select", Work(select, {"rows": ROWS}), folder),
            Stage("train", Work(train, model), folder, reads=[folder / ROWS]),
        ]
    if recipe.evaluation is not None and recipe.evaluation.before:
        stages = measure("before", path) + stages
    return stages + measure("after", str(folder))


def _delivered(workspace: Workspace, facts: Facts) -> Facts:
    """Move the new model from `model/` into the run's own folder, where every other command looks for it; return
    ``facts``, the results of the stage that made it."""
    for file in (workspace.folder / MODEL).iterdir():
        if file.name != "run.json":
            shutil.move(file, workspace.folder / file.name)
    shutil.rmtree(workspace.folder / MODEL)
    return facts


def _check(recipe: Long2ShortRecipe, overwrite: bool) -> None:
    """Raise ValueError if the training or the merge is not possible, or if there are samples of another number per
    problem already."""
    if recipe.method == "merge":
        check_merged(str(recipe.model.path), str(recipe.short_model), recipe.alpha, "model.path")
        return
    check_whole_model(recipe.model)
    check_trackers(check_training(recipe.method, recipe.training).get("report_to"), "training.report_to")
    file = recipe.samples_file
    check_writable(file.parent, "output_dir" if recipe.samples is None else "samples")
    if recipe.samples is not None or not overwrite:
        instead = "remove it, or name another with `--samples`"
        refuse_other_count(file, recipe.sampling.n_samples, "n_samples", instead)


def _load(recipe: Long2ShortRecipe, asked: Questions, overwrite: bool, here_only: bool) -> None:
    """Load nothing; raise ValueError if there is no such model, or no prompt leaves room for a completion in its
    context."""
    check_model(asked, recipe.model, recipe.sampling, recipe.evaluation, here_only)


def _words(recipe: Long2ShortRecipe, ready: Resolved, overwrite: bool) -> Words:
    """Describe for the dry run how the new model is made, and on what it is measured."""
    asked = ready.asked
    words = {"method": recipe.method, "model": str(recipe.model.path)}
    if recipe.data is None:
        words |= {"short model": str(recipe.short_model), "share of the model": f"{recipe.alpha:g}"}
    else:
        file = recipe.samples_file
        anew = overwrite and recipe.samples is None
        words["rows"] = count_of(asked.rows, recipe.data)
        words |= plan_of_samples(recipe.model.path, recipe.reward, recipe.sampling, asked.rows, file, anew)
        if recipe.method != "shortest_sft":
            words["pairs"] = describe(recipe.way)
        words["training"] = settings_in_words(recipe.training)
    if recipe.evaluation is not None:
        when = "before and after" if recipe.evaluation.before else "after"
        count = count_of(asked.held_out, recipe.evaluation.data)
        words["evaluation"] = f"{when}: {count}, judged by {describe(recipe.evaluation.reward)}"
    return words


def _settings(recipe: Long2ShortRecipe) -> dict[str, Any]:
    """Return the settings that decide the new model and its evaluations (``settings_of``)."""
    return settings_of(recipe, recipe.model.path, recipe.short_model)


LONG2SHORT = StagedCommand("long2short", _check, _load, _words, _settings, rows="data_digest")


def _made_from(recipe: Long2ShortRecipe) -> str:
    """Return the digest by which a training that was stopped is recognised: of the recipe, and of its models' files."""
    said = {name: value for name, value in asdict(recipe).items() if name not in OF_NO_FILE}
    if not said["sampling"]["chat_template_kwargs"]:
        del said["sampling"]["chat_template_kwargs"]
    if asked := said["evaluation"]:
        said["evaluation"] = {name: value for name, value in asked.items() if value or name in EVALUATION_THEN}
    return identity_of(said, [model_files(str(path)) for path in (recipe.model.path, recipe.short_model) if path])


def _measured(folder: Path) -> EvaluationResult | None:
    """Return the evaluation in ``folder``; None if there is none."""
    if (folder / "summary.json").is_file():
        return EvaluationResult.read(folder)
    return None
