"""`grpo-lab long2short`: make a model right in fewer tokens, by one of four ways of Kimi k1.5 (section 2.4) and SimPO.

    shortest_sft   of n samples the shortest right one → SFT
    dpo            shortest right one against wrong ones and right ones ≥ 1.5 times as long → DPO
    simpo          the same pairs → SimPO (ours in this list: the report names DPO)
    merge          average of the weights with a shorter model, no training

The new model is in the output folder, beside `samples.jsonl`, `rows.jsonl` and `evaluation/before` and `/after`: what
counts is accuracy *and* tokens of right answers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lab.curation import sampled
from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.evaluation.run_record import gone_from, in_few_words
from grpo_lab.io import write_json
from grpo_lab.pipelines.standing import again_in_words, left_in
from grpo_lab.recipe.ahead import check_whole_model
from grpo_lab.recipe.checks import check_trackers
from grpo_lab.recipe.elsewhere import SUPERVISED, refuse_words_from_elsewhere
from grpo_lab.recipe.job import Questions, check_model, questions
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
from grpo_lab.runs import differences
from grpo_lab.runs.console import count_of, describe, settings_in_words
from grpo_lab.runs.differences import OF_NO_FILE, earlier_run, refuse_other_rows, rows_fingerprint
from grpo_lab.runs.folder import check_writable
from grpo_lab.runs.stage import Facts, Stage, Words, Workspace, carry_out, console, plan_of, staged_run
from grpo_lab.runs.stop_requests import identity_of
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, Number, read, settings
from grpo_lab.stages.held_out import EVALUATION, Evaluate
from grpo_lab.stages.sample import SAMPLES, ModelGenerator, plan_of_samples, refuse_other_count, with_room
from grpo_lab.stages.select import ROWS, Shorter, Shortest, choose
from grpo_lab.stages.supervised import MODEL, STOPPED, Dpo, Merge, Simpo, Train, check_merged
from grpo_lab.trainer.supervised.methods import check_training

LONG2SHORT = "long2short"
EVALUATION_THEN = ("data", "reward", "max_new_tokens", "batch_size", "n_samples", "temperature", "before")


@settings(rest="sampling")
class Long2ShortRecipe:
    """A whole long2short run; every key that is no section is one of `SamplingSettings`.

    Args:
        model: the long-winded one, a saved model.
        short_model, alpha: for ``merge``: the other model, and the share of ``model`` in the average.
        data: problems to sample on; not for ``merge``.
        samples: file of the samples, which several methods may share; default: ``samples.jsonl`` in the folder.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``.
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
        """The rule that chooses rows out of the samples."""
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
    """A recipe from a plain mapping. ValueError for an unknown key or a missing section."""
    check_command(written, "long2short")
    return read(Long2ShortRecipe, {"n_samples": 8, **with_name(written, default_name)})


@dataclass(frozen=True)
class Shortened:
    """The new model's folder, rows that it was trained on, and both evaluations (None without the section)."""

    folder: Path
    rows: int
    before: EvaluationResult | None
    after: EvaluationResult | None


def long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Shortened:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder. ``overwrite`` begins anew (a file
    named by ``samples`` is shared with other runs, and stays). ValueError: another run or something else in the folder,
    no rows to train on, or a setting that does not fit; Interrupted: asked to stop."""
    asked = resolve(recipe, overwrite)
    folder = recipe.output_dir
    about = {
        "pipeline": LONG2SHORT,
        "method": recipe.method,
        "model": recipe.model.path,
        "short_model": recipe.short_model,
        "data": describe(recipe.data),
        "data_digest": None if asked.rows is None else rows_fingerprint(asked.rows),
        "recipe": settings_of(recipe),
        "sampling": describe(recipe.sampling),
        "training": dict(recipe.training),
    }
    stages = ("before", "select", "train", "merge", "after")
    forget = [*(folder / f"{stage}.json" for stage in stages), folder / STOPPED, folder / SAMPLES]
    if overwrite and recipe.samples_file.is_file() and recipe.samples is not None:
        console.print(f"samples: {recipe.samples} is kept, as it is no file of this run; remove it to sample anew")

    def earlier() -> Facts:
        found = check_folder(recipe, overwrite)
        if found and "recipe" not in found:
            _mark_stages(recipe, found)
        if make_again(recipe, gone_from(folder, found)):
            found["finished"] = False
        return found

    with staged_run(recipe, earlier, about, forget if overwrite else ()) as run:
        workspace = Workspace(folder, run.stop)
        carry_out(_stages(recipe, asked), workspace, run.report)
        count = workspace.facts.get("select", {}).get("rows", 0)
        page = None
        run.write(rows=count)
        if run.about["finished"]:
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


def make_again(recipe: Long2ShortRecipe, gone: Sequence[str]) -> bool:
    """Return whether something is ``gone`` from the folder of a finished run: the stage that made it has no marker any
    more."""
    folder = recipe.output_dir
    for which in {one.split("/")[1] for one in gone if one.startswith(f"{EVALUATION}/")}:
        shutil.rmtree(folder / EVALUATION / which, ignore_errors=True)
        (folder / f"{which}.json").unlink(missing_ok=True)
    if any(not one.startswith(f"{EVALUATION}/") for one in gone):
        if (folder / ROWS).is_file():
            stages = ["merge", "train"]
        else:
            stages = ["merge", "train", "select"]
        for stage in stages:
            (folder / f"{stage}.json").unlink(missing_ok=True)
    if gone:
        console.print(f"{folder}: {in_few_words(gone)} gone, and made again", soft_wrap=True)
    return bool(gone)


def _stages(recipe: Long2ShortRecipe, asked: Questions, overwrite: bool = False) -> list[Stage]:
    """List the stages: List the stages: before? → select → train, or merge → after?"""
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
        stage = kind(path, str(workspace.folder / ROWS), sampling.seed, training, sampling.chat_template_kwargs)
        return _delivered(workspace, stage.run(workspace, made_from=_fingerprint(recipe)))

    def measure(name: str, model: str) -> Stage:
        assert recipe.evaluation is not None
        section = recipe.evaluation.rendered_as(sampling.chat_template_kwargs)
        kind = Evaluate(model, section, sampling.seed, sampling.use_cpu, sampling.max_completion_length)
        return Stage(name, lambda workspace: kind.measured(workspace.folder / EVALUATION / name), whole=True)

    if recipe.method == "merge":
        merge = Merge(path, str(recipe.short_model), recipe.alpha)
        merged = {"short model": str(recipe.short_model), "share of the model": f"{recipe.alpha:g}"}
        stages = [Stage("merge", lambda workspace: _delivered(workspace, merge.run(workspace)), lambda: merged)]
    else:
        stages = [
            Stage("select", select, lambda: _plan_of_rows(recipe, asked, overwrite)),
            Stage("train", train, lambda: {"training": settings_in_words(recipe.training)}, inputs=("select",)),
        ]
    if recipe.evaluation is None:
        return stages
    before = []
    if recipe.evaluation.before:
        before = [measure("before", path)]
    return [*before, *stages, measure("after", str(recipe.output_dir))]


def _delivered(workspace: Workspace, facts: Facts) -> Facts:
    """The files of `model/` into the run's own folder, where every other command looks for a model."""
    for file in (workspace.folder / MODEL).iterdir():
        if file.name != "run.json":
            shutil.move(file, workspace.folder / file.name)
    shutil.rmtree(workspace.folder / MODEL)
    return facts


def resolve(recipe: Long2ShortRecipe, overwrite: bool, here_only: bool = False) -> Questions:
    """Load what the recipe names; nothing is written. ValueError for what would stop the run; a dry run asks it,
    too."""
    before = check_folder(recipe, overwrite)
    if recipe.method == "merge":
        check_merged(str(recipe.model.path), str(recipe.short_model), recipe.alpha, "model.path")
    else:
        check_whole_model(recipe.model)
        check_trackers(check_training(recipe.method, recipe.training).get("report_to"), "training.report_to")
        file = recipe.samples_file
        check_writable(file.parent, "output_dir" if recipe.samples is None else "samples")
        if recipe.samples is not None or not overwrite:
            instead = "remove it, or name another with `--samples`"
            refuse_other_count(file, recipe.sampling.n_samples, "n_samples", instead)
    found = questions(recipe.data, recipe.reward, recipe.evaluation, here_only)
    if found.rows is not None:
        refuse_other_rows(recipe.output_dir, before.get("data_digest"), rows_fingerprint(found.rows))
    check_model(found, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    return found


def plan_of_long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Words:
    """Say what `grpo-lab long2short` will do. ValueError for what would stop it."""
    asked = resolve(recipe, overwrite, here_only=True)
    facts = {"method": recipe.method, "model": str(recipe.model.path), **plan_of(_stages(recipe, asked, overwrite))}
    if recipe.evaluation is not None:
        when = "before and after" if recipe.evaluation.before else "after"
        count = count_of(asked.held_out, recipe.evaluation.data)
        facts["evaluation"] = f"{when}: {count}, judged by {describe(recipe.evaluation.reward)}"
    return {**facts, **again_in_words(recipe.output_dir, overwrite), "output folder": str(recipe.output_dir)}


def _plan_of_rows(recipe: Long2ShortRecipe, asked: Questions, overwrite: bool) -> Words:
    assert recipe.data is not None
    file = recipe.samples_file
    anew = overwrite and recipe.samples is None
    facts = {"rows": count_of(asked.rows, recipe.data)}
    facts |= plan_of_samples(recipe.model.path, recipe.reward, recipe.sampling, asked.rows, file, anew)
    if recipe.method == "shortest_sft":
        return facts
    return {**facts, "pairs": describe(recipe.way)}


def settings_of(recipe: Long2ShortRecipe) -> dict[str, Any]:
    """Settings that the new model and its evaluations follow from; local models count by their content, too."""
    return differences.settings_of(recipe, recipe.model.path, recipe.short_model)


def check_folder(recipe: Long2ShortRecipe, overwrite: bool) -> dict[str, Any]:
    """Read what marks the folder, `{}` for a new one. ValueError: it holds something else, or a run of another
    recipe."""
    found = earlier_run(recipe, LONG2SHORT, overwrite, settings_of)
    if "recipe" not in found and found.get("fingerprint", "") not in ("", _fingerprint(recipe)):  # an earlier version's
        here = f"`output_dir` {str(recipe.output_dir)!r}"
        raise ValueError(f"{here} holds a run with other settings. Choose another, or give --overwrite")
    return found


def _fingerprint(recipe: Long2ShortRecipe) -> str:
    """Digest that a training that was stopped is known by, as in an earlier version's ``run.json``."""
    said = {name: value for name, value in asdict(recipe).items() if name not in OF_NO_FILE}
    if not said["sampling"]["chat_template_kwargs"]:
        del said["sampling"]["chat_template_kwargs"]
    if asked := said["evaluation"]:  # what it did not know counts where it is set
        said["evaluation"] = {name: value for name, value in asked.items() if value or name in EVALUATION_THEN}
    return identity_of(said, [model_files(str(path)) for path in (recipe.model.path, recipe.short_model) if path])


def _mark_stages(recipe: Long2ShortRecipe, found: Mapping[str, Any]) -> None:
    """The markers of a folder that an earlier version left: ``run.json`` said how far it had come."""
    folder = recipe.output_dir
    before = _measured(folder / EVALUATION / "before")
    finished = found.get("finished")
    if before is not None and before.stopped is None:
        write_json(folder / "before.json", {})
    if finished or found.get("trained"):
        write_json(folder / "select.json", {"rows": found["rows"]})
        write_json(folder / f"{'merge' if recipe.method == 'merge' else 'train'}.json", {})
    if finished:
        write_json(folder / "after.json", {})


def _measured(folder: Path) -> EvaluationResult | None:
    if (folder / "summary.json").is_file():
        return EvaluationResult.read(folder)
    return None
