"""The metrics of a recorded run, by loops over single numbers; and what records it."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM

from grpo_lab import LabTrainer
from grpo_lab.testing import ScriptedRollout

Row = dict[str, Any]


class ToolRollout(ScriptedRollout):
    """Every third token of a completion is a tool's; the last one never."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.end_id = trainer._tokenizer.eos_token_id
        made = super().__call__(prompts, trainer)
        return {**made, "env_mask": [own(ids) for ids in made["completion_ids"]]}


def own(ids: list[int]) -> list[int]:
    return [int(place % 3 != 1 or place == len(ids) - 1) for place in range(len(ids))]


def accuracy_reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    """Dead groups, unscorable rows, and scores between wrong and right (0.75 is not correct)."""
    values = (0.0, 0.75, 1.0, None, 1.0)
    return [0.75 if n % 3 == 0 else values[sum(ids) % 5] for ids, n in zip(completion_ids, number, strict=True)]


class Recorded(LabTrainer):
    """Keeps, per optimizer step and over all ranks, the rows, the policy before the step, and the tokens it
    forwarded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, Any]] = []
        self._parts: list[dict[str, Any]] = []
        self._forwarded = self._looked = 0
        self._generation: dict[str, Any] = {}
        self.accelerator.unwrap_model(self.model).register_forward_pre_hook(self._count, with_kwargs=True)
        self._loss, self.parts.update.loss = self.parts.update.loss, self._recorded  # type: ignore[method-assign]

    def _count(self, _module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._forwarded += kwargs["input_ids"].numel()
        else:
            self._looked += kwargs["input_ids"].numel()

    def compute_advantages(self, table: Any) -> Any:
        """Keeps the scores, and the completions of all ranks, which the script knows."""
        script = self.args.script
        completions = [script.completion(script.calls - 1, row) for row in range(table.values.size(0))]
        scores = [None if score != score else score for score in table.values[:, 0].tolist()]
        self._generation = {"completions": completions, "scores": scores, "end": script.end_id}
        return super().compute_advantages(table)

    def _recorded(self, model: Any, inputs: Any, *args: Any) -> Any:
        if not self._parts:
            self._forwarded = self._looked = 0
            self._before = in_float64(self.accelerator.unwrap_model(self.model))
        self._parts.append(inputs)
        loss = self._loss(model, inputs, *args)
        if self.accelerator.sync_gradients:
            reference = None if self.ref_model is None else in_float64(self.accelerator.unwrap_model(self.ref_model))
            self.steps.append(
                {
                    "rows": gather_object([row for part in self._parts for row in rows_of(part)]),
                    "shapes": gather_object(
                        [(*p["prompt_ids"].shape, p["completion_ids"].size(1)) for p in self._parts]
                    ),
                    "forwarded": sum(gather_object([self._forwarded])),
                    "looked": sum(gather_object([self._looked])),
                    "policy": self._before,
                    "reference": reference,
                    "generation": self._generation,
                }
            )
            self._parts = []
        return loss


def rows_of(part: dict[str, Any]) -> list[Row]:
    rows = []
    for i in range(part["prompt_ids"].size(0)):
        whole = part["completion_mask"][i].bool()
        rows.append(
            {
                "prompt": part["prompt_ids"][i][part["prompt_mask"][i].bool()].tolist(),
                "ids": part["completion_ids"][i][whole].tolist(),
                "advantage": part["advantages"][i].item(),
            }
        )
    return rows


def in_float64(model: Any) -> Any:
    """The same weights in a new model: a copy would keep the forward that TRL bound to the original."""
    made = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    made.load_state_dict({name: value.detach().double() for name, value in model.state_dict().items()})
    return made.eval()


@torch.no_grad()
def scored(model: Any, row: Row) -> list[tuple[float, float]]:
    """(log-prob, entropy) of each of the policy's own tokens of a row."""
    logits = model(torch.tensor([row["prompt"] + row["ids"]])).logits[0].log_softmax(-1)
    found = []
    for place, (token, mine) in enumerate(zip(row["ids"], own(row["ids"]), strict=True)):
        if mine:
            at = logits[len(row["prompt"]) - 1 + place]
            found.append((at[token].item(), -(at.exp() * at).sum().item()))
    return found


def check_steps(steps: list[dict[str, Any]], history: list[dict[str, Any]], config: Any) -> set[str]:
    """Compare every metric of ``history``; returns the names that were compared. Two steps a generation batch."""
    seen: set[str] = set()
    for number, (step, logged) in enumerate(zip(steps, history, strict=True)):
        old = steps[number - number % 2]["policy"]
        looked = "update/tokens_looked" in logged
        expected = {**of_tokens(step, old, config), **of_update(step, config, looked)}
        if number % 2 == 0:
            expected |= of_generation(step)
        for name, value in expected.items():
            assert logged[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (number, name, logged[name], value)
        seen |= expected.keys()
    assert len(steps) == len(history) > 0
    ours = (
        "clip_ratio",
        "cispo",
        "groups/",
        "update/",
        "kl",
        "entropy",
        "completions/truncated",
        "completions/mean_length_",
    )
    unknown = {name for row in history for name in row if name.startswith(ours)} - seen
    unknown -= {"update/bytes_moved"}  # of several ranks: distributed/metrics_worker.py
    assert not unknown, "logged, and not computed by hand"
    return seen


def of_tokens(step: dict[str, Any], old: Any, config: Any) -> dict[str, float]:
    chosen = config.lab_settings.objective
    sequence = chosen.name == "gspo"
    low, high = 1 - config.epsilon, 1 + (config.epsilon_high or config.epsilon)
    clips: dict[str, list[list[float]]] = {"low": [], "high": [], "region": [], "cispo": [], "delta": []}
    entropies, kls, quiet = [], [], list[tuple[list[bool], int]]()
    all_rows = config.lab_settings.update.is_off or config.lab_settings.update.dead_groups == "keep" or config.beta > 0
    for row in step["rows"]:
        now, then = scored(step["policy"], row), scored(old, row)
        moved = [new - was for (new, _), (was, _) in zip(now, then, strict=True)]
        if sequence:
            moved = [sum(moved) / len(moved)]
        ratios = [torch.tensor(m, dtype=torch.float64).exp().item() for m in moved]
        advantage = row["advantage"]
        for bound in (low, high, config.epsilon_high or high, config.delta or high):
            assert all(abs(ratio - bound) > 1e-5 for ratio in ratios), "too near to a bound to be compared in float32"
        clips["low"].append([float(r < low and advantage < 0) for r in ratios])
        clips["high"].append([float(r > high and advantage > 0) for r in ratios])
        clips["region"].append([a + b for a, b in zip(clips["low"][-1], clips["high"][-1], strict=True)])
        clips["delta"].append([float(config.delta is not None and r > config.delta and advantage < 0) for r in ratios])
        clips["cispo"].append([float(r > (config.epsilon_high or 0) and advantage > 0) for r in ratios])
        row["silent"] = False
        if advantage != 0 and now:
            outside = [
                chosen.name != "cispo" and config.beta == 0 and bool(a + b)
                for a, b in zip(clips["region"][-1], clips["delta"][-1], strict=True)
            ]
            quiet.append((outside * (len(now) // len(outside)), len(row["prompt"]) + len(row["ids"])))
            row["silent"] = all(outside)
        if advantage != 0 or all_rows:
            entropies += [entropy for _, entropy in now]
        if config.beta > 0:
            reference = scored(step["reference"], row)
            for (new, _), (ref, _), ratio in zip(now, reference, ratios, strict=True):
                x = torch.tensor(ref - new, dtype=torch.float64)
                kls.append(((x.exp() - x - 1) * ratio).item())
    flat = {name: [value for row in rows for value in row] for name, rows in clips.items()}
    shares = {name: [statistics.fmean(row) for row in rows] for name, rows in clips.items()}
    if chosen.name == "cispo":
        found = {"cispo_clip_ratio": statistics.fmean(flat["cispo"])}
    else:
        names = ("low", "high", "region", *(["delta"] if config.delta else []))
        found = {f"clip_ratio/{name}_mean": statistics.fmean(flat[name]) for name in names}
        found |= {"clip_ratio/low_min": min(shares["low"]), "clip_ratio/high_max": max(shares["high"])}
    if entropies:
        found["entropy"] = statistics.fmean(entropies)
    if quiet:
        tokens = sum(length for _, length in quiet)
        found["update/no_gradient_share"] = statistics.fmean(one for row, _ in quiet for one in row)
        found["update/silent_share"] = sum(length for row, length in quiet if all(row)) / tokens
    return found | ({"kl": statistics.fmean(kls)} if kls else {})


def of_update(step: dict[str, Any], config: Any, looked: bool) -> dict[str, float]:
    """``looked``: rows that ``of_tokens`` found silent are left out."""
    rows, off = step["rows"], config.lab_settings.update.is_off
    everything = off or config.lab_settings.update.dead_groups == "keep" or config.beta > 0
    live = [row for row in rows if everything or (row["advantage"] != 0 and not (looked and row["silent"]))]
    stock = sum(count * (prompt + width) for count, prompt, width in step["shapes"])
    useful = sum(len(row["prompt"]) + len(row["ids"]) for row in live)
    computed = stock if off else step["forwarded"]  # the count is of bins
    more = {"update/tokens_looked": step["looked"]} if looked else {}
    return {
        **more,
        "update/live_share": len(live) / len(rows),
        "update/tokens_computed": computed,
        "update/tokens_stock": stock,
        "update/computed_share": computed / stock,
        "update/padding_share": 1 - useful / computed,
    }


def of_generation(step: dict[str, Any]) -> dict[str, float]:
    """From the completions and their scores; tool tokens are not counted, and correct is a score of 1."""
    made, scores = step["generation"]["completions"], step["generation"]["scores"]
    lengths = [sum(own(ids)) for ids in made]
    right = [n for n, score in zip(lengths, scores, strict=True) if score is not None and score >= 1]
    wrong = [n for n, score in zip(lengths, scores, strict=True) if score is not None and score < 1]
    groups = [[s for s in scores[start : start + 4] if s is not None] for start in range(0, len(scores), 4)]
    found = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/truncated_share": statistics.fmean(ids[-1] != step["generation"]["end"] for ids in made),
        "rewards/unscorable_share": statistics.fmean(score is None for score in scores),
        "groups/dead_share": statistics.fmean(len(set(group)) <= 1 for group in groups),
        "groups/solved_share": statistics.fmean(max(group, default=0) >= 1 for group in groups),
        "groups/learnable_share": statistics.fmean(bool(group) and min(group) < 1 <= max(group) for group in groups),
    }
    found |= {"completions/mean_length_correct": statistics.fmean(right)} if right else {}
    return found | ({"completions/mean_length_incorrect": statistics.fmean(wrong)} if wrong else {})
