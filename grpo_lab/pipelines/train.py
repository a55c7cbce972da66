"""`grpo-lab train` as a list of stages: start, evaluation before, reinforcement, evaluation after; then the report.

Each stage but the reinforcement is optional. ``train`` reads from top to bottom: look at the output folder, check the
recipe and load what it names, lock the folder, do the stages that are left, write the report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_lab.evaluation import EvaluationResult, terminal_summary
from grpo_lab.evaluation.blocks import Blocks
from grpo_lab.evaluation.run_health import last_verdict, left_out
from grpo_lab.evaluation.run_page import page_of
from grpo_lab.evaluation.run_record import DONE, read_run
from grpo_lab.io import saving
from grpo_lab.pipelines.open_run import OpenRun, claimed
from grpo_lab.pipelines.run_folder import RunFolder, State
from grpo_lab.pipelines.stage_engine import Caller, Stage, Work, carry_out
from grpo_lab.pipelines.stage_record import StageRecord, digests_of
from grpo_lab.pipelines.standing import left_in
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model, load_tokenizer
from grpo_lab.recipe.sections import ColdStartSection, EvaluationSection, ModelSection, Recipe, RewardSection
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.runs.differences import versions
from grpo_lab.runs.metrics import MetricsFile
from grpo_lab.runs.stage import Workspace, console, plain_facts
from grpo_lab.runs.stop_requests import SIGNALS, Interrupted, StopRequests, ended_by_signals
from grpo_lab.stages.held_out import HeldOutRows, evaluate_saved_model
from grpo_lab.stages.sample import LoadedGenerator
from grpo_lab.trainer.generation.in_step import PolicyGenerator
from grpo_lab.trainer.metrics.trackers import tracked
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.scoring.preference_training import FOLDER as PREFERENCE
from grpo_lab.trainer.step_components import has_own_loss

REINFORCEMENT = "reinforcement"
NOTHING_TO_SHARE = "the recipe has no `cold_start` to share among the arms; name a model to start from"


@dataclass(frozen=True)
class TrainingOutcome:
    """Result of a training run: its folder, its report page, and the evaluations before and after (None: not asked for,
    or this is not the main process)."""

    folder: Path
    report: Path | None
    before: EvaluationResult | None
    after: EvaluationResult | None


def train(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> TrainingOutcome:
    """Run ``recipe`` from beginning to end, or resume its run if the output folder holds one.

    Every process calls this and takes its share of the evaluations; the main one writes the results.

    Args:
        recipe: what to train, and how.
        overwrite: replace the run in the folder.
        resume: changes nothing, since a run that has begun is always resumed; refused together with ``overwrite``.

    Raises:
        ValueError: a setting is not possible, or the folder is not this run's.
        Interrupted: a stop was requested; the run can be resumed.
    """
    recipe = numbers_read(recipe)
    config = lab_config(recipe)
    with ended_by_signals(recipe.output_dir, config):
        folder = RunFolder.open(recipe, overwrite, resume)
        job = Job.resolve(recipe, config, cold_start=not folder.start_is_whole)  # a mistake leaves the folder as it was
        with claimed(folder, job) as run:
            if folder.state is State.FINISHED:
                return _left_alone(run)
            carry_out(_stages(job, run), Workspace(job.folder, StopRequests(job.folder)), TrainingRun(job, run))
            return _report(job, run)


def _stages(job: Job, run: OpenRun) -> list[Stage]:
    """List the stages that are left of the run. They leave no marker: the files of a model, checkpoint or evaluation
    say whether it is complete."""
    place = job.folder / "cold_start"
    cold = job.cold_start is not None
    made = cold or job.model.path is None or job.model.tokenizer is not None  # else RL starts from the model itself
    start = str(place if made else job.model.path)
    left = []

    def add(name: str, work: Callable[[Workspace], None]) -> None:
        left.append(Stage(name, Work(work, whole=True), job.folder, remembered=False))

    if made and not run.folder.start_is_whole:
        add("cold_start" if cold else "start", lambda _: _make_start(job, place))
    if job.evaluation is not None and job.evaluation.before:
        if run.folder.is_measured:
            console.print("evaluation before reinforcement: as it was made")
        else:
            add("evaluation_before", lambda _: _evaluate(job, start, "before"))
    if run.folder.trained is not None:
        console.print(f"{job.folder} is trained: only the evaluation is left", soft_wrap=True)
    else:
        add(REINFORCEMENT, lambda _: _reinforce(job, start, run))
    if job.evaluation is not None:
        add("evaluation_after", lambda _: _evaluate(job, str(job.folder), "after"))
    return left


@dataclass
class TrainingRun(Caller):
    """A run of `grpo-lab train`: prints a heading before each stage, and writes its seconds into ``run.json``."""

    job: Job
    opened: OpenRun

    def begins(self, stage: Stage, record: StageRecord) -> None:
        of = ""
        if stage.name == REINFORCEMENT:
            of = f": {self.job.trainer.__name__}"
        console.rule(f"{stage.name.replace('_', ' ')}{of}")

    def ends(self, stage: Stage, seconds: float) -> None:
        if stage.name != REINFORCEMENT:  # reinforcement records its own seconds, over all resumes
            self.opened.seconds[stage.name] = round(seconds, 1)
            self.opened.write()


def _report(job: Job, run: OpenRun) -> TrainingOutcome:
    """Record in ``run.json`` that the run is finished, write its page and print its results, on the main process."""
    folder = job.folder
    if not PartialState().is_main_process:
        return TrainingOutcome(folder, None, None, None)
    run.write(left=left_in(folder, ["critic", PREFERENCE, "evaluation"]), finished=True)
    found = read_run(folder, plain_facts(run.record))
    page = page_of(found).write(folder / "report.html")
    if found.after is None:
        console.print(f"model: {folder}\nreport: {page}", soft_wrap=True)
    else:
        _show_samples(found.before, found.after)
        about: Any = {"health": last_verdict(found), "left_out": left_out(found), "seconds": sum(run.seconds.values())}
        terminal_summary(found.before, found.after, report=page, model_path=folder, **about)
    return TrainingOutcome(folder, page, found.before, found.after)


def _left_alone(run: OpenRun) -> TrainingOutcome:
    """Return the results of a run that is finished already, without training or evaluating anything."""
    folder = run.folder.place
    console.print(f"{folder} is finished: nothing to do. A larger `max_steps` goes on with it", soft_wrap=True)
    found = read_run(folder, run.record)
    page = folder / "report.html"
    if not page.is_file():
        page_of(found).write(page)
    return TrainingOutcome(folder, page, found.before, found.after)


def shared_start(
    model: ModelSection,
    cold: ColdStartSection | None,
    start: Path,
    seed: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Path:
    """Return ``start``, the folder of a model after a cold start, from which several trainings begin.

    The model is made once. If the one that is there was made from something else, it is made again, and the earlier one
    is kept beside it (``stage_record``).

    Args:
        model: the model before the cold start.
        cold: the cold start; raises ValueError if it is None.
        start: folder of the result.
        seed: seed of the model's weights, where it has none yet, and of the training.
        chat_template_kwargs: further arguments of the chat template.
    """
    if cold is None:
        raise ValueError(NOTHING_TO_SHARE)
    from grpo_lab.trainer.supervised.methods import cold_start

    def make() -> None:
        loaded, tokenizer = load_model(model, seed)
        rows = load_rows(cold.data, "cold_start.data")
        arguments = {"seed": seed, "use_cpu": True, "bf16": False, **cold.arguments}
        cold_start(loaded, tokenizer, rows, start, arguments, chat_template_kwargs=chat_template_kwargs)
        tokenizer.save_pretrained(start)

    settings: dict[str, Any] = {"model": asdict(model), "cold_start": asdict(cold), "seed": seed}
    if chat_template_kwargs:
        settings["chat_template_kwargs"] = dict(chat_template_kwargs)
    plain = plain_facts(settings)
    record = StageRecord.read(start, start.name, "start")
    if record.begin(start, plain, digests_of(plain, {}), ["tokenizer_config.json"]):
        console.print(f"{start}: {record.why}", soft_wrap=True)
        with saving(start):
            make()
        record.status = DONE
        record.write(start)
    return start


def _make_start(job: Job, start: Path) -> None:
    """Make the model that RL starts from, in the folder ``start``: one without a path (a tiny one), one after a cold
    start, or one with another tokenizer. Every process calls this."""
    config = job.config
    model, tokenizer = load_model(job.model, config.seed)
    if job.cold_start is not None:
        from grpo_lab.trainer.supervised.methods import cold_start

        alike = ("seed", "use_cpu", "bf16", "save_on_each_node")
        arguments = {**{name: getattr(config, name) for name in alike}, **job.cold_start.arguments}
        template_kwargs = config.chat_template_kwargs
        with saving(start):
            cold_start(model, tokenizer, job.cold_rows, start, arguments, chat_template_kwargs=template_kwargs)
    elif config.should_save:
        with saving(start):
            model.save_pretrained(start)
    if config.should_save:
        with saving(start):
            tokenizer.save_pretrained(start)
    PartialState().wait_for_everyone()  # the others read what the main process has written


def _reinforce(job: Job, start: str, run: OpenRun) -> None:
    """Train by reinforcement from the model at ``start`` or from the run's checkpoint, save the final model, and record
    both in ``run.json``. Raises Interrupted if a stop was requested."""
    from grpo_lab.trainer.resume.going_on import VerifiedCheckpoint
    from grpo_lab.trainer.trl_bridge import policy_parameters

    folder = job.folder
    began = time.perf_counter()
    given = {name: one for name, one in job.arguments.items() if one is not None}
    log = MetricsFile(folder / "metrics.jsonl")
    trainer: Any = job.trainer(
        model=start,
        reward_funcs=job.rewards or None,
        args=job.config,
        train_dataset=job.rows,
        eval_dataset=job.eval_rows,
        processing_class=None if job.model.tokenizer is None else load_tokenizer(job.model),
        **{**given, "callbacks": [*given["callbacks"], log]},
    )
    log.beside = lambda: {"rollout/generated": trainer.generated_tokens}
    if job.evaluation is not None and job.evaluation.every is not None:
        trainer.add_callback(EvaluationOnTheWay(trainer, job.evaluation, folder))
    with named_place("start: all processes begin together"):
        trainer.accelerator.wait_for_everyone()
    run.record = {
        **job.facts,
        "fingerprint": run.folder.fingerprint,
        "parameters": sum(p.numel() for p in policy_parameters(trainer.accelerator.unwrap_model(trainer.model))),
        "data": f"{job.facts['data']} ({len(job.rows)} rows)",
        "objective": trainer.algorithm.with_hooks(trainer).names,
        "rewards": [asdict(reward) for reward in rewards_in_force(job.reward_sections, trainer)],
        "rows": run.rows,
        "processes": trainer.accelerator.num_processes,
        "seed": trainer.args.seed,
        "exact_update": trainer.exact_update.described(),
        **({"own_loss": True} if has_own_loss(trainer) else {}),
        "versions": versions(),
        "seconds": run.seconds,
        "finished": False,
    }
    run.write()
    # after a stop by signal or stop file, train() returns instead of ending the process
    trainer.stop_request.signals = list(SIGNALS)
    trainer.stop_request.returns = True
    with tracked(trainer, folder):
        with _ended_as_asked(trainer, run):
            trainer.train(resume_from_checkpoint=None if run.checkpoint is None else VerifiedCheckpoint(run.checkpoint))
        run.seconds[REINFORCEMENT] = round(run.seconds.get(REINFORCEMENT, 0.0) + time.perf_counter() - began, 1)
        _end_if_asked(trainer, trainer.stop_request.reason, run)
        trainer.save_final(folder)
        trainer.create_model_card(model_name=job.name)
    run.record["exact_update"] |= trainer.exact_update.budget.described()
    run.write(
        trained=trainer.state.global_step,
        tokens=trainer.generated_tokens,
        left=left_in(folder, ["critic", PREFERENCE]),
    )
    late = next(filter(None, gather_object([trainer.stop_request.late])), None)
    if late is not None:  # the training is done and kept; what is left is the evaluation
        raise Interrupted(late, None, folder)


@contextmanager
def _ended_as_asked(trainer: Any, run: OpenRun) -> Iterator[None]:
    """Context around ``trainer.train()``: an error that ends the training after a stop was requested (a wait was broken
    off, or the server is lost) becomes ``Interrupted``."""
    try:
        yield
    except KeyboardInterrupt:
        _end_if_asked(trainer, trainer.stop_request.broke_off_a_wait, run)
        raise
    except ConnectionError as lost:  # the server is lost; a checkpoint was written
        if trainer.stop_request.reason is not None:
            logging.getLogger("grpo_lab").warning("%s", lost)
        _end_if_asked(trainer, trainer.stop_request.reason, run)
        raise


def _end_if_asked(trainer: Any, asked: str | None, run: OpenRun) -> None:
    """Record the request ``asked`` in ``run.json`` and raise ``Interrupted``, on every process; the checkpoint is
    written already. Do nothing without a request, or for Ctrl-C, which raises an error of its own."""
    if asked is None or asked == "SIGINT":
        return
    step = trainer.state.global_step or None
    trainer.accelerator.wait_for_everyone()
    run.record["exact_update"] |= trainer.exact_update.budget.described()
    run.write(interrupted={"signal": asked, "step": step})
    raise Interrupted(asked, step, run.folder.place)


def _evaluate(job: Job, model: str, which: str) -> None:
    """Evaluate the saved ``model`` on the held-out rows, into ``evaluation/<which>``: "before" or "after"."""
    assert job.evaluation is not None
    folder = job.folder / "evaluation" / which
    config = job.config
    evaluate_saved_model(model, job.evaluation, folder, use_cpu=config.use_cpu, seed=config.seed)


class EvaluationOnTheWay(TrainerCallback):  # type: ignore[misc]
    """Callback that evaluates the policy every ``evaluation.every`` optimizer steps, into ``evaluation/step_<n>``.

    It does not evaluate after the last step, since the saved model is evaluated then. Of several conditions it asks
    under the first. The held-out answers are greedy, and are made by all ranks with the engine of the rollouts.
    """

    def __init__(self, trainer: Any, section: EvaluationSection, folder: Path) -> None:
        policy = PolicyGenerator(trainer, bool(section.log_probs))
        self.every = section.every
        self.folder = folder / "evaluation"
        held_out = HeldOutRows(replace(section, n_samples=0), None, 0)
        generator = LoadedGenerator(policy, policy.tokenizer, policy.context, policy.stops)
        own, *_ = held_out.ways.values()
        self.ask = held_out.asking("the policy in training", generator, own, PartialState().num_processes > 1)
        self.blocks = Blocks(section.batch_size, in_step=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step % self.every or step >= state.max_steps:  # the last model is measured when it is saved
            return
        with named_place(f"evaluation on the way, step {step}"):
            found = self.ask(blocks=self.blocks)
        if state.is_world_process_zero:
            found.write(self.folder / f"step_{step}")


def rewards_in_force(sections: Sequence[RewardSection], trainer: Any) -> list[RewardSection]:
    """List all rewards of a trainer with the weights in force: first the recipe's (``sections``), then those that a
    named trainer declares or an environment owns.

    A reward of the latter that has a schedule of its own is listed with the weight that it has when the schedule is
    over, and with the schedule.
    """
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
    """Print the first ``count`` held-out problems with the model's greedy answers before and after, so that a reader
    sees whether they are solutions."""
    earlier = {}
    if before is not None:
        earlier = {outcome.problem: outcome for outcome in before.greedy}
    console.rule("samples")
    for now in after.greedy[:count]:
        lines = [now.question.strip()]
        for name, outcome in (("before", earlier.get(now.problem)), ("after", now)):
            if outcome is not None:
                mark = {True: "right", False: "wrong", None: "unscorable"}[outcome.correct]
                lines.append(f"  {name} ({mark}): {' / '.join(outcome.completion.strip()[:400].splitlines())}")
        console.print("\n".join(lines))
