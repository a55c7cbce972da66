"""The main job: rows → (cold start) → RL → evaluation → report. Each stage takes the previous stage's result."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.evaluation.run_record import last_verdict, left_out, read_run
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import rewards_in_force
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.resume import going_on, refuse_another_run
from grpo_lab.pipelines.run_folder import claim, fingerprint, is_begun, refuse_folder
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model, load_tokenizer
from grpo_lab.recipe.sections import Recipe
from grpo_lab.runs.differences import rows_fingerprint
from grpo_lab.runs.folder import OneWriter, read_marker, write_run
from grpo_lab.runs.metrics_file import MetricsFile
from grpo_lab.runs.stop import Interrupted, asked_by_signals, ended_by_signals, heed_stop_file
from grpo_lab.trainer.resume.whole import broken_weights

console = Terminal()


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run gave: its folder, report and accuracies."""

    folder: Path
    report: Path | None
    before: EvaluationResult | None
    after: EvaluationResult | None


def train(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> TrainingOutcome:
    """Run ``recipe`` from beginning to end, or go on with it where its folder has begun (``resume`` or not). Every
    process calls this; the main one evaluates and writes.

    Raises:
        ValueError: a setting that cannot be, or a folder that is not this run's.
        Interrupted: asked to stop, by a signal, the stop file or ``max_hours``; the run can be resumed.
    """
    recipe = numbers_read(recipe)
    config = lab_config(recipe)
    resume = is_begun(recipe, overwrite, resume)
    with ended_by_signals(recipe.output_dir, config), OneWriter(recipe.output_dir) as writer:
        job = resolve(recipe, config, overwrite, resume)  # a mistake in it leaves the folder as it was
        state = PartialState()
        if state.is_main_process:
            if resume:
                refuse_another_run(job.folder, job.rows, state.num_processes, config.max_steps)
            writer.take()
            claim(recipe, overwrite)
        state.wait_for_everyone()
        job.facts["fingerprint"] = fingerprint(recipe)
        return _stages(job, resume)


def resolve(recipe: Recipe, config: Any, overwrite: bool, resume: bool, here_only: bool = False) -> Job:
    """What ``recipe``, its numbers read, names; nothing is written. A dry run (``here_only``) asks it, too.

    Raises:
        ValueError: what cannot be loaded, built or trained, or an output folder that is not this run's.
    """
    if int(os.environ.get("RANK", "0")) == 0:  # the others may find what it has written
        refuse_folder(recipe, overwrite)
    return Job.resolve(recipe, config, here_only, cold_start=not (resume and start_is_whole(recipe.output_dir)))


def start_is_whole(folder: Path) -> bool:
    """Whether the model that RL starts from was saved to its end: the tokenizer is written after the weights."""
    start = folder / "cold_start"
    return (start / "tokenizer_config.json").is_file() and broken_weights(start) is None


def _stages(job: Job, resume: bool) -> TrainingOutcome:
    state, config, folder = PartialState(), job.config, job.folder
    record = read_marker(folder / "run.json")
    if resume and record.get("finished"):
        return _as_it_is(folder)
    if resume:
        heed_stop_file(config, folder)
    seconds: dict[str, float] = dict(record.get("seconds") or {}) if resume else {}
    trained = bool(resume and record.get("trained"))
    checkpoint = going_on(folder, config.max_steps, record, console) if resume and not trained else None
    start = _start_model(job, resume, seconds)
    before = _before(job, start, seconds, resume) if state.is_main_process else None
    if trained:
        console.print(f"{folder} is trained: only the evaluation is left", soft_wrap=True)
    else:
        record = _reinforce(job, start, checkpoint, seconds)
    if not state.is_main_process:
        return TrainingOutcome(folder, None, None, None)
    after = _evaluate(job, str(folder), seconds, "after")
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
    return TrainingOutcome(folder, report, before, after)


def _as_it_is(folder: Path) -> TrainingOutcome:
    """A finished run is left alone: no step more, no evaluation again."""
    console.print(f"{folder} is finished: nothing to do. A larger `max_steps` goes on with it", soft_wrap=True)
    record, report = read_run(folder), folder / "report.html"
    return TrainingOutcome(folder, report if report.is_file() else write_report(folder), record.before, record.after)


def _start_model(job: Job, resume: bool, seconds: dict[str, float]) -> str:
    """Folder or hub name of the model that RL starts from; made here where it is tiny or has a cold start."""
    config, start = job.config, job.folder / "cold_start"
    if job.cold_start is None and job.model.path is not None and job.model.tokenizer is None:
        return job.model.path
    if resume and start_is_whole(job.folder):
        return str(start)
    model, tokenizer = load_model(job.model, config.seed)
    if job.cold_start is not None:
        from grpo_lab.trainer.supervised.cold_start import cold_start

        console.rule("cold start")
        began = time.perf_counter()
        alike = ("seed", "use_cpu", "bf16", "save_on_each_node")
        arguments = {**{name: getattr(config, name) for name in alike}, **job.cold_start.arguments}
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
    from grpo_lab.trainer.ranks import at
    from grpo_lab.trainer.resume.checkpoint import save_final
    from grpo_lab.trainer.resume.going_on import WasRead

    folder = job.folder
    console.rule(f"reinforcement: {job.trainer.__name__}")
    began = time.perf_counter()
    trainer = _build_trainer(job, start)
    with at("start: the main process measures the start model alone, the others wait"):
        trainer.accelerator.wait_for_everyone()
    record = {**_summary(job, trainer, seconds), "finished": False}
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
    trainer.create_model_card(model_name=job.name)
    record["trained"] = trainer.state.global_step
    if main:
        write_run(folder, record)
    late = next(filter(None, gather_object([trainer.parts.stop.late])), None)
    if late is not None:  # the training is done and kept; what is left is the evaluation
        raise Interrupted(late, None, folder)
    return record


def _build_trainer(job: Job, start: str) -> Any:
    given = dict(job.arguments)
    own = [MetricsFile(job.folder / "metrics.jsonl")]
    return job.trainer(
        model=start,
        reward_funcs=job.rewards or None,
        args=job.config,
        train_dataset=job.rows,
        eval_dataset=job.eval_rows,
        processing_class=None if job.model.tokenizer is None else load_tokenizer(job.model),
        callbacks=[*given.pop("callbacks"), *own],
        **{name: value for name, value in given.items() if value is not None},
    )


def _end_if_asked(trainer: Any, asked: str | None, folder: Path, record: dict[str, Any]) -> None:
    """Raise ``Interrupted`` on every process if one was asked to stop; the checkpoint is written. Ctrl-C says so
    itself."""
    if asked is None or asked == "SIGINT":
        return
    step = trainer.state.global_step or None
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        write_run(folder, {**record, "interrupted": {"signal": asked, "step": step}})
    raise Interrupted(asked, step, folder)


def _before(job: Job, start: str, seconds: dict[str, float], resume: bool) -> EvaluationResult | None:
    """The model that RL starts from, measured once: a resumed run has the same start, and reads what was found."""
    if job.evaluation is None or not job.evaluation.before:
        return None
    if resume and (job.folder / "evaluation" / "before" / "summary.json").is_file():
        found = read_run(job.folder).before
        if found is not None and found.stopped is None:  # Ctrl-C leaves a part of one
            console.print("evaluation before reinforcement: as it was made")
            return found
    return _evaluate(job, start, seconds, "before")


def _evaluate(job: Job, model: str, seconds: dict[str, float], which: str) -> EvaluationResult | None:
    if job.evaluation is None:
        return None
    console.rule(f"evaluation {which} reinforcement")
    began = time.perf_counter()
    result = evaluate_saved_model(
        model, job.evaluation, job.folder / "evaluation" / which, use_cpu=job.config.use_cpu, seed=job.config.seed
    )
    seconds[f"evaluation_{which}"] = round(time.perf_counter() - began, 1)
    return result


def _summary(job: Job, trainer: Any, seconds: dict[str, float]) -> dict[str, Any]:
    from grpo_lab.trainer.trl_bridge import policy_parameters

    return {
        **job.facts,
        "parameters": sum(p.numel() for p in policy_parameters(trainer.accelerator.unwrap_model(trainer.model))),
        "data": f"{job.facts['data']} ({len(job.rows)} rows)",
        "objective": trainer.algorithm.with_hooks(trainer).names,
        "rewards": [asdict(reward) for reward in rewards_in_force(job.reward_sections, trainer)],
        "rows": rows_fingerprint(job.rows),
        "processes": trainer.accelerator.num_processes,
        "seed": trainer.args.seed,
        "exact_update": trainer.exact_update.described(),
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
