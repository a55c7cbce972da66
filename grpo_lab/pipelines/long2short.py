"""`grpo-lab long2short`: make a model right in fewer tokens, by one of four ways of Kimi k1.5 (section 2.4) and SimPO.

    shortest_sft   of n samples the shortest right one → SFT
    dpo            shortest right one against wrong ones and right ones ≥ 1.5 times as long → DPO
    simpo          the same pairs → SimPO (ours in this list: the report names DPO)
    merge          average of the weights with a shorter model, no training

model, data → samples (`samples.jsonl`, a killed run goes on) → rows (`rows.jsonl`) → training → the new model in the
output folder → `evaluation/before` and `/after`, where the numbers that count are accuracy *and* tokens of right
answers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.curation import Sampled, average_weights, sampled
from grpo_lab.curation.weights import check_mergeable
from grpo_lab.evaluation import EvaluationResult, write_report
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import is_local, write_json, write_json_lines
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import count_of, model_of, sampling_of, settings_in_words, told
from grpo_lab.pipelines.long2short_recipe import Long2ShortRecipe
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.recipe.checks import check_trackers
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.models import load_model, model_files
from grpo_lab.runs.differences import plain_settings, refuse_other_rows, refuse_other_settings, rows_fingerprint
from grpo_lab.runs.folder import RUN, check_writable, read_marker, record_of, write_run
from grpo_lab.runs.stage import At, Stage, Words, carry_out, plan_of, working
from grpo_lab.runs.stop import STOP_SETTINGS, StopRequests, identity_of
from grpo_lab.stages.sample import SAMPLES, judged_samples, read_lines, refuse_other_count, samples_in_words
from grpo_lab.stages.select import ROWS, Shorter, Shortest, select
from grpo_lab.stages.train import STOPPED, train_on, training_rows
from grpo_lab.trainer.supervised.preference import check_training
from grpo_lab.visible import encodable

PIPELINE = "long2short"
MAY_CHANGE = ("name", "output_dir", *STOP_SETTINGS)
"""Settings that nothing which is made follows from."""

console = Terminal()


@dataclass(frozen=True)
class Shortened:
    """The new model's folder, rows that it was trained on, and both evaluations (None without the section)."""

    folder: Path
    rows: int
    before: EvaluationResult | None
    after: EvaluationResult | None


def long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Shortened:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder. ``overwrite`` begins anew (a file
    named by ``samples`` is shared with other runs, and stays).

    Raises:
        ValueError: another run or something else in the folder, no rows to train on, or a setting that does not fit.
        Interrupted: asked to stop; what is done is kept, and the same call goes on.
    """
    began, asked = time.perf_counter(), resolve(recipe, overwrite)
    digest = None if asked.rows is None else rows_fingerprint(asked.rows)
    with working(recipe, new=overwrite or not check_folder(recipe, overwrite)) as stop:
        folder = _claim(recipe, overwrite, digest)
        at, finished = At(folder), bool(read_marker(folder / RUN).get("finished"))
        carry_out(_stages(recipe, asked, stop), at, stop)
        done, count = _summary(recipe, digest), at.facts.get("select", {}).get("rows", 0)
        if finished:
            console.print(f"{folder} is finished: nothing to do", soft_wrap=True)
        else:
            done |= {"rows": count, "seconds": round(time.perf_counter() - began, 1)}
            write_run(folder, done)
            page = write_report(folder)
            write_run(folder, {**done, "finished": True})
            console.print(f"model: {folder}\nreport: {page}", soft_wrap=True)
    before, after = (_measured(folder / "evaluation" / name) for name in ("before", "after"))
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            console.print(f"{name}: {length_line(result)}")
    return Shortened(folder, count, before, after)


def _stages(recipe: Long2ShortRecipe, asked: Questions, stop: StopRequests, overwrite: bool = False) -> list[Stage]:
    """before? → select → train, or merge → after?"""
    path, section = str(recipe.model.path), recipe.evaluation

    def choose(at: At) -> dict[str, int]:
        rows = build_rows(recipe, _samples(recipe, path, stop, asked))
        write_json_lines(at.folder / ROWS, [encodable(row) for row in rows])
        return {"rows": len(rows)}

    def train(at: At) -> None:
        _train(recipe, read_lines(at.folder / ROWS), at.folder, stop)

    if recipe.method == "merge":
        merged = {"short model": str(recipe.short_model), "share of the model": f"{recipe.alpha:g}"}
        stages = [Stage("merge", lambda at: _merge(recipe, path, at.folder), lambda: merged)]
    else:
        training = {"training": settings_in_words(recipe.training)}
        stages = [
            Stage("select", choose, lambda: _plan_of_rows(recipe, asked, overwrite)),
            Stage("train", train, lambda: training, inputs=("select",)),
        ]
    if section is None:
        return stages

    def measure(name: str, model: str) -> Stage:
        return Stage(name, lambda at: _measure(recipe, model, at.folder / "evaluation" / name), whole=True)

    before = [measure("before", path)] if section.before else []
    return [*before, *stages, measure("after", str(recipe.output_dir))]


def resolve(recipe: Long2ShortRecipe, overwrite: bool, here_only: bool = False) -> Questions:
    """What the recipe names; nothing is written. ValueError for what would stop the run; a dry run asks it, too."""
    before = check_folder(recipe, overwrite)
    if recipe.method == "merge":
        check_mergeable(str(recipe.model.path), str(recipe.short_model))
    else:
        settings = check_training(recipe.method, recipe.training)
        check_trackers(settings.get("report_to"), "training.report_to")
        file = samples_file(recipe)
        check_writable(file.parent, "output_dir" if recipe.samples is None else "samples")
        if recipe.samples is not None or not overwrite:
            instead = "remove it, or name another with `--samples`"
            refuse_other_count(file, recipe.sampling.n_samples, "n_samples", instead)
    found = questions(recipe.data, recipe.reward, recipe.evaluation, here_only)
    if found.rows is not None:
        refuse_other_rows(recipe.output_dir, before.get("data_digest"), found.rows)
    check_model(found, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    return found


def plan_of_long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Words:
    """What `grpo-lab long2short` will do, in words. ValueError for what would stop it."""
    asked = resolve(recipe, overwrite, here_only=True)
    facts = {"method": recipe.method, "model": model_of(str(recipe.model.path))}
    facts |= plan_of(_stages(recipe, asked, StopRequests(recipe.output_dir), overwrite))
    if recipe.evaluation is not None:
        when = "before and after" if recipe.evaluation.before else "after"
        count = count_of(asked.held_out, recipe.evaluation.data)
        facts["evaluation"] = f"{when}: {count}, judged by {told(recipe.evaluation.reward)}"
    return {**facts, "output folder": str(recipe.output_dir)}


def _plan_of_rows(recipe: Long2ShortRecipe, asked: Questions, overwrite: bool) -> Words:
    assert recipe.data is not None
    anew = overwrite and recipe.samples is None
    facts = {"rows": count_of(asked.rows, recipe.data), "reward": told(recipe.reward)}
    facts |= sampling_of(recipe.sampling, asked.rows, samples_file(recipe), anew)
    return facts if recipe.method == "shortest_sft" else {**facts, "pairs": told(recipe.pairs or Shorter())}


def kept(recipe: Long2ShortRecipe) -> str:
    """What is there after Ctrl-C."""
    return samples_in_words({"samples": samples_file(recipe)})


def settings_of(recipe: Long2ShortRecipe) -> dict[str, Any]:
    """What the new model and its evaluations follow from, as JSON gives it back; a local model by its content, too."""
    said = {name: value for name, value in plain_settings(recipe).items() if name not in MAY_CHANGE}
    local = [str(path) for path in (recipe.model.path, recipe.short_model) if is_local(path)]
    return {**said, "model_files": {path: model_files(path) for path in local}}


def fingerprint(recipe: Long2ShortRecipe) -> str:
    """Of `settings_of`, in the form of a stopped training's identity and of an earlier version's ``run.json``."""
    said = {name: value for name, value in asdict(recipe).items() if name not in MAY_CHANGE}
    return identity_of(said, [model_files(str(path)) for path in (recipe.model.path, recipe.short_model) if path])


def build_rows(recipe: Long2ShortRecipe, samples: list[Sampled]) -> list[dict[str, Any]]:
    """SFT rows or pairs out of the samples, by the recipe's method."""
    rows, _ = select(samples, Shortest() if recipe.method == "shortest_sft" else recipe.pairs or Shorter())
    if not rows:
        raise ValueError(
            f"no row for `method: {recipe.method}` out of {len(samples)} problems: the model has to be right on "
            "some, and for "
            "pairs also wrong or longer; raise `n_samples`, or take other `data`"
        )
    return rows


def length_line(result: EvaluationResult) -> str:
    """`greedy: 80.0% right, 31.2 tokens a right answer` and the same of the samples, where there are any."""
    pieces = []
    for kind, outcomes in (("greedy", result.greedy), ("sampled", result.sampled)):
        scored = [outcome for outcome in outcomes if outcome.correct is not None]
        right = [outcome.tokens for outcome in scored if outcome.correct]
        if scored:
            tokens = f"{fmean(right):.1f} tokens a right answer" if right else "none right"
            pieces.append(f"{kind}: {len(right) / len(scored):.1%} right, {tokens}")
    return "; ".join(pieces)


def check_folder(recipe: Long2ShortRecipe, overwrite: bool) -> dict[str, Any]:
    """What marks the folder, `{}` for a new one. ValueError for one that holds something else, or a run of another
    recipe."""
    folder, found = recipe.output_dir, record_of(recipe.output_dir, PIPELINE)
    if overwrite or not found:
        return {}
    if "recipe" in found:
        refuse_other_settings(folder, found["recipe"], settings_of(recipe))
    elif found.get("fingerprint", fingerprint(recipe)) != fingerprint(recipe):  # an earlier version's
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds a run with other settings. Choose another, or give --overwrite"
        )
    return found


def _claim(recipe: Long2ShortRecipe, overwrite: bool, digest: Any = None) -> Path:
    found, folder = check_folder(recipe, overwrite), recipe.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for stage in ("before", "select", "train", "merge", "after"):
            (folder / f"{stage}.json").unlink(missing_ok=True)
        shutil.rmtree(folder / STOPPED, ignore_errors=True)
        (folder / SAMPLES).unlink(missing_ok=True)
        if recipe.samples is not None and Path(recipe.samples).is_file():
            console.print(f"samples: {recipe.samples} is kept, as it is no file of this run; remove it to sample anew")
    elif "recipe" not in found:
        _mark_stages(recipe, found)
    rows = found.get("rows", 0)
    write_run(folder, {**_summary(recipe, digest), "rows": rows, "finished": bool(found.get("finished"))})
    return folder


def _mark_stages(recipe: Long2ShortRecipe, found: Mapping[str, Any]) -> None:
    """The markers of a folder that an earlier version left: it said in ``run.json`` how far it had come."""
    folder = recipe.output_dir
    before, finished = _measured(folder / "evaluation" / "before"), found.get("finished")
    if before is not None and before.stopped is None:
        write_json(folder / "before.json", {})
    if finished or found.get("trained"):
        write_json(folder / "select.json", {"rows": found["rows"]})
        write_json(folder / f"{'merge' if recipe.method == 'merge' else 'train'}.json", {})
    if finished:
        write_json(folder / "after.json", {})


def samples_file(recipe: Long2ShortRecipe) -> Path:
    """Where the samples are: the recipe's ``samples``, else in the output folder."""
    return Path(recipe.samples or recipe.output_dir / SAMPLES)


def _samples(recipe: Long2ShortRecipe, path: str, stop: StopRequests, asked: Questions) -> list[Sampled]:
    sampler = ModelSampler(path, recipe.sampling)
    problems = with_room([dict(row) for row in asked.rows], sampler)
    file, said = samples_file(recipe), {"reward": told(recipe.reward)}
    rates = judged_samples(problems, sampler, asked.reward, file, stop, said, "samples")
    return sampled(problems, rates, sampler.tokens)


def _train(recipe: Long2ShortRecipe, rows: list[dict[str, Any]], folder: Path, stop: StopRequests) -> None:
    """A training that was asked to stop is gone on with from `stopped/`."""
    model, tokenizer = load_model(recipe.model, recipe.sampling.seed)
    data = training_rows(recipe.method, rows)
    arguments = {"seed": recipe.sampling.seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
    with stop.training(folder / STOPPED, identity_of(data, fingerprint(recipe))) as training:
        train_on(recipe.method, model, tokenizer, data, folder, arguments, training)
        tokenizer.save_pretrained(folder)
    training.done()


def _merge(recipe: Long2ShortRecipe, path: str, folder: Path) -> None:
    """`average_weights` wants an empty folder; the run's own has its marker and the first evaluation already."""
    place = folder / "merged.part"
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
    merged = average_weights(path, str(recipe.short_model), place / "merged", recipe.alpha)
    for file in merged.iterdir():
        if file.name != "run.json":
            shutil.move(file, folder / file.name)
    shutil.rmtree(place)


def _measure(recipe: Long2ShortRecipe, path: str, target: Path) -> None:
    assert recipe.evaluation is not None
    sampling, limit = recipe.sampling, recipe.sampling.max_completion_length
    given: dict[str, Any] = {"use_cpu": sampling.use_cpu, "max_new_tokens": limit, "seed": sampling.seed}
    evaluate_saved_model(path, recipe.evaluation, target, **given)


def _measured(folder: Path) -> EvaluationResult | None:
    return EvaluationResult.read(folder) if (folder / "summary.json").is_file() else None


def _summary(recipe: Long2ShortRecipe, digest: Any) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "pipeline": PIPELINE,
        "method": recipe.method,
        "model": recipe.model.path,
        "short_model": recipe.short_model,
        "data": told(recipe.data),
        "data_digest": digest,
        "recipe": settings_of(recipe),
        "sampling": told(recipe.sampling),
        "training": dict(recipe.training),
        "versions": versions(),
    }
