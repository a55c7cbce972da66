"""The main job: rows → (cold start) → RL → evaluation → report. Each stage takes the previous stage's result."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.evaluation.run_record import last_verdict, left_out, read_run
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.context_room import evaluation_tokens
from grpo_lab.pipelines.in_words import rewards_in_force
from grpo_lab.pipelines.job import Job, start_is_whole
from grpo_lab.pipelines.recipe import Recipe
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.resume import going_on, refuse_another_run
from grpo_lab.pipelines.run_folder import claim, fingerprint, is_begun
from grpo_lab.pipelines.saved_model import evaluate_saved_model
from grpo_lab.runs.differences import rows_fingerprint
from grpo_lab.runs.folder import OneWriter, read_marker, write_run
from grpo_lab.runs.metrics_file import MetricsFile
from grpo_lab.runs.stop import Interrupted, asked_by_signals, ended_by_signals, heed_stop_file

console = Terminal()


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its folder, report and accuracies."""

    folder: Path
    report: Path | None
    before: EvaluationResult | None
    after: EvaluationResult | None


def train(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> Outcome:
    """Run ``recipe`` from beginning to end, or go on with it where its folder has begun (``resume`` or not). Every process calls this;
    the main one evaluates and writes.

    Raises:
        ValueError: a setting that cannot be, or a folder that is not this run's.
        Interrupted: asked to stop, by a signal, the stop file or ``max_hours``; the run can be resumed.
    """
    recipe = parts.numbers_read(recipe)
    config = parts.lab_config(recipe)
    resume = is_begun(recipe, overwrite, resume)
    with ended_by_signals(recipe.output_dir, config), OneWriter(recipe.output_dir) as writer:
        job = Job.resolve(recipe, config, overwrite, resume)  # a mistake in it leaves the folder as it was
        return _stages(job, overwrite, resume, writer)


def _stages(job: Job, overwrite: bool, resume: bool, writer: OneWriter) -> Outcome:
    state, recipe, config = PartialState(), job.recipe, job.config
    if state.is_main_process:
        if resume:
            refuse_another_run(recipe.output_dir, job.rows, state.num_processes, config.max_steps)
        writer.take()
        claim(recipe, overwrite)
    state.wait_for_everyone()
    folder = recipe.output_dir
    record = read_marker(folder / "run.json")
    if resume and record.get("finished"):
        return _as_it_is(folder)
    if resume:
        heed_stop_file(config, folder)
    seconds: dict[str, float] = dict(record.get("seconds") or {}) if resume else {}
    trained = bool(resume and record.get("trained"))
    checkpoint = going_on(folder, config.max_steps, record, console) if resume and not trained else None
    start = _start_model(job, resume, seconds)
    before = _before(recipe, start, folder, seconds, resume) if state.is_main_process else None
    if trained:
        console.print(f"{folder} is trained: only the evaluation is left", soft_wrap=True)
    else:
        record = _reinforce(job, start, checkpoint, seconds)
    if not state.is_main_process:
        return Outcome(folder, None, None, None)
    after = _evaluate(recipe, str(folder), folder / "evaluation" / "after", seconds, "after")
    write_run(folder, {**record, "seconds": seconds, "finished": True})
    report = write_report(folder)
    if after is None:
        console.print(f"model: {folder}\nreport: {report}", soft_wrap=True)
    else:
        _show_samples(before, after)
        told: dict[str, Any] = {
            "health": last_verdict(folder),
            "left_out": left_out(folder),
            "seconds": sum(seconds.values()),
        }
        terminal_summary(before, after, report=report, model_path=folder, **told)
    return Outcome(folder, report, before, after)


def _as_it_is(folder: Path) -> Outcome:
    """A finished run is left alone: no step more, no evaluation again."""
    console.print(f"{folder} is finished: nothing to do. A larger `max_steps` goes on with it", soft_wrap=True)
    record, report = read_run(folder), folder / "report.html"
    return Outcome(folder, report if report.is_file() else write_report(folder), record.before, record.after)


def _start_model(job: Job, resume: bool, seconds: dict[str, float]) -> str:
    """Folder or hub name of the model that RL starts from; made here where it is tiny or has a cold start."""
    recipe, config, start = job.recipe, job.config, job.recipe.output_dir / "cold_start"
    if recipe.cold_start is None and recipe.model.path is not None and recipe.model.tokenizer is None:
        return recipe.model.path
    if resume and start_is_whole(recipe):
        return str(start)
    model, tokenizer = parts.load_model(recipe.model, config.seed)
    if recipe.cold_start is not None:
        from grpo_lab.trainer.supervised.cold_start import cold_start

        console.rule("cold start")
        began = time.perf_counter()
        alike = ("seed", "use_cpu", "bf16", "save_on_each_node")
        arguments = {**{name: getattr(config, name) for name in alike}, **recipe.cold_start.arguments}
        cold_start(model, tokenizer, job.cold_rows, start, arguments)
        seconds["cold_start"] = round(time.perf_counter() - began, 1)
    elif config.should_save:
        model.save_pretrained(start)
    if config.should_save:
        tokenizer.save_pretrained(start)
    PartialState().wait_for_everyone()  # the others read what the main process has written
    return str(start)


def _reinforce(job: Job, start: str, checkpoint: Path | None, seconds: dict[str, float]) -> dict[str, Any]:
    """Train, save the model; what ``run.json`` says of it."""
    from grpo_lab.trainer.ranks.places import at
    from grpo_lab.trainer.resume.checkpoint import save_final
    from grpo_lab.trainer.resume.which import WasRead

    recipe, folder = job.recipe, job.recipe.output_dir
    console.rule(f"reinforcement: {recipe.trainer}")
    began = time.perf_counter()
    trainer = _build_trainer(job, start)
    with at("start: the main process measures the start model alone, the others wait"):
        trainer.accelerator.wait_for_everyone()
    record = {**_summary(recipe, trainer, job.rows, seconds), "finished": False}
    main = trainer.accelerator.is_main_process
    if main:
        write_run(folder, record)
    asked_by_signals(trainer)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else WasRead(checkpoint))
    except KeyboardInterrupt:
        _end_if_asked(trainer, trainer.parts.stop.broke_off_a_wait, folder, record)
        raise
    seconds["reinforcement"] = round(seconds.get("reinforcement", 0.0) + time.perf_counter() - began, 1)
    _end_if_asked(trainer, trainer.parts.stop.reason, folder, record)
    save_final(trainer, folder)
    trainer.create_model_card(model_name=recipe.name)
    record["trained"] = trainer.state.global_step
    if main:
        write_run(folder, record)
    late = next(filter(None, gather_object([trainer.parts.stop.late])), None)
    if late is not None:  # the training is done and kept; what is left is the evaluation
        raise Interrupted(late, None, folder)
    return record


def _build_trainer(job: Job, start: str) -> Any:
    recipe, given = job.recipe, dict(job.of_trainer)
    own = [MetricsFile(recipe.output_dir / "metrics.jsonl")]
    return parts.trainer_class(recipe)(
        model=start,
        reward_funcs=job.rewards or None,
        args=job.config,
        train_dataset=job.rows,
        eval_dataset=job.eval_rows,
        processing_class=None if recipe.model.tokenizer is None else parts.load_tokenizer(recipe.model),
        callbacks=[*given.pop("callbacks"), *own],
        **{name: value for name, value in given.items() if value is not None},
    )


def _end_if_asked(trainer: Any, asked: str | None, folder: Path, record: dict[str, Any]) -> None:
    """Raise ``Interrupted`` on every process if one was asked to stop; the checkpoint is written. Ctrl-C says so itself."""
    if asked is None or asked == "SIGINT":
        return
    step = trainer.state.global_step or None
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        write_run(folder, {**record, "interrupted": {"signal": asked, "step": step}})
    raise Interrupted(asked, step, folder)


def _before(
    recipe: Recipe, start: str, folder: Path, seconds: dict[str, float], resume: bool
) -> EvaluationResult | None:
    """The model that RL starts from, measured once: a resumed run has the same start, and reads what was found."""
    target = folder / "evaluation" / "before"
    if resume and (target / "summary.json").is_file() and recipe.evaluation is not None and recipe.evaluation.before:
        found = read_run(folder).before
        if found is not None and found.stopped is None:  # Ctrl-C leaves a part of one
            console.print("evaluation before reinforcement: as it was made")
            return found
    return _evaluate(recipe, start, target, seconds, "before")


def _evaluate(
    recipe: Recipe, model: str, target: Path, seconds: dict[str, float], which: str
) -> EvaluationResult | None:
    section = recipe.evaluation
    if section is None or (which == "before" and not section.before):
        return None
    console.rule(f"evaluation {which} reinforcement")
    began = time.perf_counter()
    result = evaluate_saved_model(
        model,
        section,
        target,
        use_cpu=recipe.arguments.get("use_cpu", False),
        max_new_tokens=evaluation_tokens(recipe),
        seed=int(recipe.arguments.get("seed", 42)),
    )
    seconds[f"evaluation_{which}"] = round(time.perf_counter() - began, 1)
    return result


def _summary(recipe: Recipe, trainer: Any, rows: Any, seconds: dict[str, float]) -> dict[str, Any]:
    from grpo_lab.trainer.trl_bridge import policy_parameters

    return {
        "name": recipe.name,
        "fingerprint": fingerprint(recipe),
        "model": recipe.model.name,
        "parameters": sum(p.numel() for p in policy_parameters(trainer.accelerator.unwrap_model(trainer.model))),
        "expected": recipe.model.expected,
        "data": f"{recipe.data.loader} ({len(rows)} rows)",
        "template": recipe.data.template,
        "objective": trainer.algorithm.with_hooks(trainer).names,
        "rewards": [asdict(reward) for reward in rewards_in_force(recipe, trainer)],
        "rows": rows_fingerprint(rows),
        "processes": trainer.accelerator.num_processes,
        "seed": trainer.args.seed,
        "settings": dict(recipe.arguments),
        "exact_update": trainer.exact_update.described(),
        "cold_start": None if recipe.cold_start is None else asdict(recipe.cold_start),
        "versions": versions(),
        "seconds": seconds,
    }


def _show_samples(before: EvaluationResult | None, after: EvaluationResult, count: int = 3) -> None:
    """The first held-out problems with the model's own words, so that a reader sees whether they are solutions."""
    earlier = {} if before is None else {outcome.problem: outcome for outcome in before.greedy}
    console.rule("samples")
    for now in after.greedy[:count]:
        lines = [now.question.strip()]
        for name, outcome in (("before", earlier.get(now.problem)), ("after", now)):
            if outcome is not None:
                mark = {True: "right", False: "wrong", None: "unscorable"}[outcome.correct]
                lines.append(f"  {name} ({mark}): {' / '.join(outcome.completion.strip()[:400].splitlines())}")
        console.print("\n".join(lines))
