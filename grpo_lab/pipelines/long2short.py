"""`grpo-lab long2short`: make a model right in fewer tokens, by one of four ways of Kimi k1.5 (section 2.4) and SimPO.

    shortest_sft   of n samples the shortest right one → SFT
    dpo            shortest right one against wrong ones and right ones ≥ 1.5 times as long → DPO
    simpo          the same pairs → SimPO (ours in this list: the report names DPO)
    merge          average of the weights with a shorter model, no training

model, data → samples (`samples.jsonl`, a killed run goes on) → rows (`rows.jsonl`) → training → the new model in the output
folder → `evaluation/before` and `/after`, where the numbers that count are accuracy *and* tokens of right answers.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.curation import Sampled, average_weights, pass_rates, preference_pairs, sampled, shortest_correct
from grpo_lab.curation.weights import check_mergeable
from grpo_lab.evaluation import EvaluationResult, write_report
from grpo_lab.evaluation.files import write_json_lines
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import told
from grpo_lab.pipelines.long2short_recipe import Long2ShortRecipe, PairSettings
from grpo_lab.pipelines.one_writer import OneWriter, check_writable, is_empty
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.run_folder import read_marker, write_run
from grpo_lab.pipelines.same_run import rows_fingerprint
from grpo_lab.pipelines.sample_counts import refuse_other_count
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.pipelines.stop_requests import STOP_SETTINGS, StopRequests, identity_of
from grpo_lab.recipe.checks import check_trackers
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.models import load_model, model_files
from grpo_lab.trainer.supervised.preference import check_training
from grpo_lab.visible import encodable

OWN_SAMPLES = "samples.jsonl"

console = Terminal()


@dataclass(frozen=True)
class Shortened:
    """The new model's folder, rows that it was trained on, and both evaluations (None without the section)."""

    folder: Path
    rows: int
    before: EvaluationResult | None
    after: EvaluationResult | None


def long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Shortened:
    """Run ``recipe``. Samples that an earlier, killed run left in the folder are used; with ``overwrite`` they go, too (a file
    named by ``samples`` is shared with other runs, and stays).

    Raises:
        ValueError: a finished run or something else in the folder, no rows to train on, or a setting that does not fit.
        Interrupted: asked to stop; what is done is kept, and the same call goes on.
    """
    began = time.perf_counter()
    asked = resolve(recipe, overwrite)
    new = overwrite or not (recipe.output_dir / "run.json").is_file()
    with (
        OneWriter(recipe.output_dir).take(),
        StopRequests(recipe.output_dir, recipe.max_hours, recipe.stop_file) as stop,
    ):
        stop.heed_waiting(new)
        return _shortened(recipe, overwrite, began, stop, asked)


def resolve(recipe: Long2ShortRecipe, overwrite: bool, here_only: bool = False) -> Questions:
    """What the recipe names; nothing is written. ValueError for what would stop the run; a dry run asks it, too."""
    check_folder(recipe, overwrite)
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
    check_model(found, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    return found


def _shortened(
    recipe: Long2ShortRecipe, overwrite: bool, began: float, stop: StopRequests, asked: Questions
) -> Shortened:
    digest = None if asked.rows is None else rows_fingerprint(asked.rows)
    path, done = str(recipe.model.path), _done_before(recipe, overwrite, digest)
    folder = _claim(recipe, overwrite, digest)
    wanted = recipe.evaluation is not None and recipe.evaluation.before
    before = (done["before"] or _measure(recipe, path, folder / "evaluation" / "before")) if wanted else None
    count = done["trained"]
    if count is None:
        with stop.held():
            count = _made(recipe, path, folder, stop, asked)
            write_run(folder, {**_summary(recipe, count, digest), "trained": True, "finished": False})
    after = _measure(recipe, str(folder), folder / "evaluation" / "after")
    done_now = {**_summary(recipe, count, digest), "seconds": round(time.perf_counter() - began, 1)}
    write_run(folder, done_now)
    page = write_report(folder)
    write_run(folder, {**done_now, "finished": True})  # last: a finished run is refused
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            console.print(f"{name}: {length_line(result)}")
    console.print(f"model: {folder}\nreport: {page}", soft_wrap=True)
    return Shortened(folder, count, before, after)


def _made(recipe: Long2ShortRecipe, path: str, folder: Path, stop: StopRequests, asked: Questions) -> int:
    """The new model in ``folder``; the number of rows that it was trained on."""
    if recipe.method == "merge":
        _merge(recipe, path, folder)
        return 0
    rows = build_rows(recipe, _samples(recipe, path, stop, asked))
    write_json_lines(folder / "rows.jsonl", [encodable(row) for row in rows])
    _train(recipe, rows, folder, stop)
    return len(rows)


def _done_before(recipe: Long2ShortRecipe, overwrite: bool, digest: Any) -> dict[str, Any]:
    """What an earlier run of this very recipe left whole: the first evaluation; the rows that its model was trained on."""
    found = _same(recipe, overwrite, digest)
    nothing: dict[str, Any] = {"before": None, "trained": None}
    if not found:
        return nothing
    place = recipe.output_dir / "evaluation" / "before"
    before = EvaluationResult.read(place) if (place / "summary.json").is_file() else None
    whole = before is not None and before.stopped is None
    return {"before": before if whole else None, "trained": found.get("rows") if found.get("trained") else None}


def _same(recipe: Long2ShortRecipe, overwrite: bool, digest: Any) -> dict[str, Any]:
    """What marks the folder, where it is of this very recipe on these very rows; else empty."""
    found = {} if overwrite else read_marker(recipe.output_dir / "run.json")
    same = found.get("fingerprint") == fingerprint(recipe) and found.get("data_digest", digest) == digest
    return found if same else {}


def fingerprint(recipe: Long2ShortRecipe) -> str:
    """Of all that the new model and its evaluations follow from; a local model by what its files hold."""
    said = {name: value for name, value in asdict(recipe).items() if name not in ("name", "output_dir", *STOP_SETTINGS)}
    return identity_of(said, [model_files(str(path)) for path in (recipe.model.path, recipe.short_model) if path])


def build_rows(recipe: Long2ShortRecipe, samples: list[Sampled]) -> list[dict[str, Any]]:
    """SFT rows or pairs out of the samples, by the recipe's method."""
    if recipe.method == "shortest_sft":
        rows = shortest_correct(samples)
    else:
        settings = recipe.pairs or PairSettings()
        rows = preference_pairs(
            samples,
            settings.ratio,
            wrong_must_be_longer=settings.wrong_must_be_longer,
            pairs_per_problem=settings.pairs_per_problem,
        )
    if not rows:
        raise ValueError(
            f"no row for `method: {recipe.method}` out of {len(samples)} problems: the model has to be right on some, and for "
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


def check_folder(recipe: Long2ShortRecipe, overwrite: bool) -> Path:
    """The output folder. ValueError for one that holds something else, or a finished run without ``overwrite``."""
    folder = recipe.output_dir
    check_writable(folder)
    if folder.is_dir() and not is_empty(folder) and not overwrite:
        found = read_marker(folder / "run.json")
        if found.get("pipeline") != "long2short":
            raise ValueError(f"`output_dir` {str(folder)!r} holds something else; choose another `--output_dir`")
        if found.get("finished"):
            raise ValueError(f"`output_dir` {str(folder)!r} holds a finished run; choose another, or give --overwrite")
    return folder


def _claim(recipe: Long2ShortRecipe, overwrite: bool, digest: Any = None) -> Path:
    folder = check_folder(recipe, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite and read_marker(folder / "run.json").get("pipeline") == "long2short":
        (folder / OWN_SAMPLES).unlink(missing_ok=True)
        if recipe.samples is not None and Path(recipe.samples).is_file():
            console.print(f"samples: {recipe.samples} is kept, as it is no file of this run; remove it to sample anew")
    found = _same(recipe, overwrite, digest)
    kept = {"rows": found["rows"], "trained": True} if found.get("trained") else {}
    write_run(folder, {**_summary(recipe, 0, digest), **kept, "finished": False})
    return folder


def samples_file(recipe: Long2ShortRecipe) -> Path:
    """Where the samples are: the recipe's ``samples``, else in the output folder."""
    return Path(recipe.samples or recipe.output_dir / OWN_SAMPLES)


def _samples(recipe: Long2ShortRecipe, path: str, stop: StopRequests, asked: Questions) -> list[Sampled]:
    sampler = ModelSampler(path, recipe.sampling)
    problems = with_room([dict(row) for row in asked.rows], sampler)
    rates = pass_rates(
        problems,
        stop.before_each(sampler.written),
        asked.reward,
        recipe.sampling.n_samples,
        path=samples_file(recipe),
        settings={**sampler.identity(), "reward": told(recipe.reward)},
        batch_size=recipe.sampling.problems_per_save,
        label="samples",
        rendered=sampler.rendered,
    )
    return sampled(problems, rates, sampler.tokens)


def _train(recipe: Long2ShortRecipe, rows: list[dict[str, Any]], folder: Path, stop: StopRequests) -> None:
    """A training that was asked to stop is gone on with from `stopped/`."""
    from datasets import Dataset

    stop.check()  # before a model is loaded
    model, tokenizer = load_model(recipe.model, recipe.sampling.seed)
    columns = ("prompt", "completion") if recipe.method == "shortest_sft" else ("prompt", "chosen", "rejected")
    data = Dataset.from_list([{name: row[name] for name in columns} for row in rows])
    arguments = {"seed": recipe.sampling.seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
    with stop.training(folder / "stopped", identity_of(data.to_list(), fingerprint(recipe))) as training:
        if recipe.method == "shortest_sft":
            from grpo_lab.trainer.supervised.cold_start import supervised

            supervised(model, tokenizer, data, folder, arguments, train=training)
        else:
            from grpo_lab.trainer.supervised.preference import prefer

            method: Any = recipe.method
            prefer(method, model, tokenizer, data, folder, arguments, train=training)
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


def _measure(recipe: Long2ShortRecipe, path: str, target: Path) -> EvaluationResult | None:
    section = recipe.evaluation
    if section is None:
        return None
    return evaluate_saved_model(
        path,
        section,
        target,
        use_cpu=recipe.sampling.use_cpu,
        max_new_tokens=recipe.sampling.max_completion_length,
        seed=recipe.sampling.seed,
    )


def _summary(recipe: Long2ShortRecipe, rows: int, digest: Any) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "pipeline": "long2short",
        "method": recipe.method,
        "model": recipe.model.path,
        "short_model": recipe.short_model,
        "data": told(recipe.data),
        "rows": rows,
        "data_digest": digest,
        "fingerprint": fingerprint(recipe),
        "sampling": told(recipe.sampling),
        "training": dict(recipe.training),
        "versions": versions(),
    }
