"""The main job: rows → (cold start) → RL → evaluation → report. Each stage takes the previous stage's result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.evaluation.run_record import last_verdict, left_out, read_run
from grpo_lab.pipelines.run_folder import claim, fingerprint, going_on, is_begun, refuse_another_run, refuse_folder
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model, load_tokenizer
from grpo_lab.recipe.sections import Recipe, RewardSection
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.runs.differences import rows_fingerprint, versions
from grpo_lab.runs.folder import RUN, OneWriter, read_marker, write_run
from grpo_lab.runs.metrics_file import MetricsFile
from grpo_lab.runs.stage import console
from grpo_lab.runs.stop import SIGNALS, Interrupted, ended_by_signals, heed_stop_file
from grpo_lab.stages.evaluate import evaluate_saved_model
from grpo_lab.trainer.resume.whole import broken_weights


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run gave: its folder, report and accuracies."""

    folder: Path
    report: Path | None
    before: EvaluationResult | None
    after: EvaluationResult | None


def train(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> TrainingOutcome:
    """Run ``recipe`` from beginning to end, or go on with it where its folder has begun (``resume`` or not). Every
    process calls this; the main one evaluates and writes. ValueError: a setting that cannot be, or a folder that is not
    this run's; Interrupted: asked to stop; the run can be resumed."""
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
    """What ``recipe``, its numbers read, names; nothing is written. A dry run (``here_only``) asks it, too. ValueError:
    what cannot be loaded, built or trained, or an output folder that is not this run's."""
    if int(os.environ.get("RANK", "0")) == 0:  # the others may find what it has written
        refuse_folder(recipe, overwrite)
    return Job.resolve(recipe, config, here_only, cold_start=not (resume and start_is_whole(recipe.output_dir)))


def start_is_whole(folder: Path) -> bool:
    """Whether the model that RL starts from was saved to its end: the tokenizer is written after the weights."""
    start = folder / "cold_start"
    return (start / "tokenizer_config.json").is_file() and broken_weights(start) is None


def _stages(job: Job, resume: bool) -> TrainingOutcome:
    state, config, folder = PartialState(), job.config, job.folder
    record = read_marker(folder / RUN)
    if resume and record.get("finished"):  # left alone: no step more, no evaluation again
        console.print(f"{folder} is finished: nothing to do. A larger `max_steps` goes on with it", soft_wrap=True)
        found, report = read_run(folder), folder / "report.html"
        return TrainingOutcome(folder, report if report.is_file() else write_report(folder), found.before, found.after)
    if resume:
        heed_stop_file(config, folder)
    seconds: dict[str, float] = dict(record.get("seconds") or {}) if resume else {}
    trained = bool(resume and record.get("trained"))
    checkpoint = going_on(folder, config.max_steps, record, console) if resume and not trained else None
    start = _start_model(job, resume, seconds)
    before = _evaluate(job, start, seconds, "before", resume) if state.is_main_process else None
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
        about: Any = {"health": last_verdict(folder), "left_out": left_out(folder), "seconds": sum(seconds.values())}
        terminal_summary(before, after, report=report, model_path=folder, **about)
    return TrainingOutcome(folder, report, before, after)


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

        alike = ("seed", "use_cpu", "bf16", "save_on_each_node")
        arguments = {**{name: getattr(config, name) for name in alike}, **job.cold_start.arguments}
        with _timed(job, seconds, "cold_start"):
            cold_start(model, tokenizer, job.cold_rows, start, arguments)
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
    from grpo_lab.trainer.trl_bridge import policy_parameters

    folder = job.folder
    console.rule(f"reinforcement: {job.trainer.__name__}")
    began, given = time.perf_counter(), {name: one for name, one in job.arguments.items() if one is not None}
    trainer: Any = job.trainer(
        model=start,
        reward_funcs=job.rewards or None,
        args=job.config,
        train_dataset=job.rows,
        eval_dataset=job.eval_rows,
        processing_class=None if job.model.tokenizer is None else load_tokenizer(job.model),
        **{**given, "callbacks": [*given["callbacks"], MetricsFile(folder / "metrics.jsonl")]},
    )
    with at("start: the main process measures the start model alone, the others wait"):
        trainer.accelerator.wait_for_everyone()
    record = {
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
        "finished": False,
    }
    main = trainer.accelerator.is_main_process
    if main:
        write_run(folder, record)
    trainer.parts.stop.signals, trainer.parts.stop.returns = list(SIGNALS), True  # it answers both, and comes back here
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


def _evaluate(
    job: Job, model: str, seconds: dict[str, float], which: str, resume: bool = False
) -> EvaluationResult | None:
    """Before the training a resumed run reads what was found, since it has the same start."""
    if job.evaluation is None or (which == "before" and not job.evaluation.before):
        return None
    folder, config = job.folder / "evaluation" / which, job.config
    found = read_run(job.folder).before if resume and (folder / "summary.json").is_file() else None
    if found is not None and found.stopped is None:  # Ctrl-C leaves a part of one
        console.print(f"evaluation {which} reinforcement: as it was made")
        return found
    with _timed(job, seconds, f"evaluation_{which}"):
        return evaluate_saved_model(model, job.evaluation, folder, use_cpu=config.use_cpu, seed=config.seed)


@contextmanager
def _timed(job: Job, seconds: dict[str, float], stage: str) -> Iterator[None]:
    """A rule on the terminal before a stage; its seconds, when it is done, in ``run.json``."""
    console.rule(stage.replace("_", " "))
    began = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - began, 1)
    if PartialState().is_main_process:
        write_run(job.folder, {**read_marker(job.folder / RUN), "seconds": seconds})


def rewards_in_force(sections: Sequence[RewardSection], trainer: Any) -> list[RewardSection]:
    """The recipe's rewards with the weights in force (``reward_weights`` may have set them), then those beside them:
    that a named trainer declares, or an environment owns. One that carries its own weight has that when its schedule is
    over, and the schedule."""
    weights = trainer.args.reward_weights or [reward.weight for reward in sections]
    found = [replace(reward, weight=float(weight)) for reward, weight in zip(sections, weights, strict=False)]
    whole = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True)
    for name, reward, weight in list(whole)[len(found) :]:
        own = getattr(reward, "schedule", None)
        if isinstance(own, Schedule):
            found.append(RewardSection(name, weight * own.final, {"schedule": own.as_mapping()}))
        else:
            found.append(RewardSection(name, weight))
    return found


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
