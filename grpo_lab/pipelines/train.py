"""The main job: rows → (cold start) → RL → evaluation → report. Each stage takes the previous stage's result."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from grpo_lab.evaluation import EvaluationResult, terminal_summary, write_report
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.recipe import Recipe
from grpo_lab.pipelines.run_folder import MetricsFile, claim, fingerprint, versions, write_run
from grpo_lab.pipelines.saved_model import evaluate_saved_model

console = Console()


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its folder, report and accuracies."""

    folder: Path
    report: Path | None
    before: EvaluationResult | None
    after: EvaluationResult | None


def train(recipe: Recipe, overwrite: bool = False, resume: bool = False) -> Outcome:
    """Run ``recipe`` from beginning to end. Every process calls this; the main one evaluates and writes."""
    config = parts.lab_config(recipe)
    state = PartialState()
    if state.is_main_process:
        claim(recipe, overwrite, resume)
    state.wait_for_everyone()
    folder = recipe.output_dir
    seconds: dict[str, float] = {}
    rewards = [parts.build_reward(section) for section in recipe.rewards]
    rows = parts.load_rows(recipe.data)
    parts.check_golds(rows, rewards)
    parts.check_evaluation(recipe.evaluation)
    start = _start_model(recipe, folder, config, resume, seconds)
    before = (
        _evaluate(recipe, start, folder / "evaluation" / "before", seconds, "before") if state.is_main_process else None
    )
    trainer = _reinforce(recipe, config, start, rewards, rows, folder, resume, seconds)
    summary = _summary(recipe, trainer, rows, seconds)
    if not state.is_main_process:
        return Outcome(folder, None, None, None)
    after = _evaluate(recipe, str(folder), folder / "evaluation" / "after", seconds, "after")
    write_run(folder, {**summary, "seconds": seconds, "finished": True})
    report = write_report(folder)
    if after is None:
        console.print(f"report: {report}", soft_wrap=True)
    else:
        _show_samples(before, after)
        terminal_summary(before, after, report=report, model_path=folder, seconds=sum(seconds.values()))
    return Outcome(folder, report, before, after)


def _start_model(recipe: Recipe, folder: Path, config: Any, resume: bool, seconds: dict[str, float]) -> str:
    """Folder or hub name of the model that RL starts from; made here where it is tiny or has a cold start."""
    start = folder / "cold_start"
    if recipe.cold_start is None and recipe.model.path is not None and recipe.model.tokenizer is None:
        return recipe.model.path
    if resume and (start / "config.json").is_file():
        return str(start)
    model, tokenizer = parts.load_model(recipe.model, config.seed)
    if recipe.cold_start is not None:
        from grpo_lab.trainer.cold_start import cold_start

        console.rule("cold start")
        began = time.perf_counter()
        rows = parts.load_rows(recipe.cold_start.data, "cold_start.data")
        alike = ("seed", "use_cpu", "bf16", "save_on_each_node")
        arguments = {**{name: getattr(config, name) for name in alike}, **recipe.cold_start.arguments}
        cold_start(model, tokenizer, rows, start, arguments)
        seconds["cold_start"] = round(time.perf_counter() - began, 1)
    elif config.should_save:
        model.save_pretrained(start)
    if config.should_save:
        tokenizer.save_pretrained(start)
    PartialState().wait_for_everyone()  # the others read what the main process has written
    return str(start)


def _reinforce(
    recipe: Recipe,
    config: Any,
    start: str,
    rewards: list[Any],
    rows: Any,
    folder: Path,
    resume: bool,
    seconds: dict[str, float],
) -> Any:
    console.rule(f"reinforcement: {recipe.trainer}")
    began = time.perf_counter()
    trainer = parts.trainer_class(recipe)(
        model=start,
        reward_funcs=rewards,
        args=config,
        train_dataset=rows,
        processing_class=None if recipe.model.tokenizer is None else parts.load_tokenizer(recipe.model),
        peft_config=parts.lora_config(recipe.model),
        callbacks=[MetricsFile(folder / "metrics.jsonl")],
    )
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        write_run(folder, {**_summary(recipe, trainer, rows, seconds), "finished": False})
    trainer.train(resume_from_checkpoint=resume and _has_checkpoint(folder))
    seconds["reinforcement"] = round(time.perf_counter() - began, 1)
    trainer.save_model(str(folder))
    trainer.create_model_card(model_name=recipe.name)
    return trainer


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoint-*"))


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
        max_new_tokens=int(recipe.arguments.get("max_completion_length", 512)),
        seed=int(recipe.arguments.get("seed", 42)),
    )
    seconds[f"evaluation_{which}"] = round(time.perf_counter() - began, 1)
    return result


def _summary(recipe: Recipe, trainer: Any, rows: Any, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "fingerprint": fingerprint(recipe),
        "model": recipe.model.name,
        "parameters": sum(p.numel() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()),
        "expected": recipe.model.expected,
        "data": f"{recipe.data.loader} ({len(rows)} rows)",
        "template": recipe.data.template,
        "objective": trainer.algorithm.names,
        "rewards": [asdict(reward) for reward in recipe.rewards],
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
        console.print("\n".join(lines), markup=False, highlight=False)
