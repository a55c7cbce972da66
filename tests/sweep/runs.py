"""A case through ``LabTrainer``, with what it really did to the weights; and the same step by the formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from grpo_lab import LabConfig, LabTrainer
from sweep.draw import BUDGET, Case
from sweep.formulas import Row, Update, advantages, penalised, update

#: so that one step moves ratios by some percent: sums over responses have the larger gradients
LEARNING_RATE, LEARNING_RATE_OF_SUMS = 0.1, 0.005
U = 2.0**-24
#: a float32 log-prob is off by about u · √(additions on the way: 747 words, 2 layers of 7 products over 32 to 128) ·
#: its size
LOG_PROB_ERROR = U * (747 + 2 * 7 * 64) ** 0.5 * 8.0

Weights = dict[str, torch.Tensor]


def rate(case: Case) -> float:
    return LEARNING_RATE_OF_SUMS if case.formula.aggregation == "sequence_sum" else LEARNING_RATE


@dataclass
class Steps:
    """What a run did. ``weights``: before the first step and after each; ``rows``: first tokens per step and
    micro-batch."""

    weights: list[Weights] = field(default_factory=list)
    rows: list[list[list[int]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)


class _Watch(TrainerCallback):
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.weights = self.steps.weights or [_copied(model)]
        self.steps.rows.append([])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.weights.append(_copied(model))


def _copied(model: Any) -> Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class _Script:
    """``rollout_func`` and reward in one: row i gets completion i, its mask and its reward."""

    __name__ = "scripted"

    def __init__(self, case: Case, end: int, steps: Steps) -> None:
        self.case, self.steps = case, steps
        steps.completions = [[end if t == -1 else t for t in ids] for ids in case.completions]
        self.reward_of = {ids[0]: reward for ids, reward in zip(case.completions, case.rewards, strict=True)}

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert not self.steps.prompts, "one generation batch a case"
        self.steps.prompts = [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
        fields = {"prompt_ids": self.steps.prompts, "completion_ids": self.steps.completions, "logprobs": None}
        return {**fields, "env_mask": self.case.own} if any(0 in mine for mine in self.case.own) else fields

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [self.reward_of[ids[0]] for ids in completion_ids]


def trained(case: Case, model_folder: Path, reference: Weights, out: Path) -> Steps:
    """The real thing: our trainer on this case's rollouts, plain SGD."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    steps = Steps()
    script = _Script(case, tokenizer.eos_token_id, steps)
    config = LabConfig(
        output_dir=str(out), learning_rate=rate(case), optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, seed=case.number,
        disable_tqdm=True, **case.settings,
    )  # fmt: skip
    trainer = LabTrainer(
        model=model, reward_funcs=script, args=config, processing_class=tokenizer, rollout_func=script.rollout,
        train_dataset=Dataset.from_dict({"prompt": [f"{'Add ' * (i % 4)}{i} and {i + 1}." for i in range(12)]}),
        callbacks=[_Watch(steps)],
    )  # fmt: skip
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(reference, strict=False)
    compute = trainer.parts.update.loss

    def watched(model: Any, inputs: Any, *args: Any) -> Any:
        steps.rows[-1].append(inputs["completion_ids"][:, 0].tolist())
        return compute(model, inputs, *args)

    trainer.parts.update.loss = watched
    trainer.train()
    steps.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return steps


class Oracle:
    """Log-probs in float64 from the same architecture; everything between them and the loss from ``formulas``."""

    def __init__(self, case: Case, steps: Steps, model_folder: Path, reference: Weights) -> None:
        self.case, self.steps = case, steps
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
        self.ends = {self.model.config.eos_token_id, self.model.config.pad_token_id}
        self.ref = self._values(reference)
        self.old = self._values(steps.weights[0])
        self.counts = [
            [bool(m) and not (case.mask_truncated and ids[-1] not in self.ends) for m in mine]
            for ids, mine in zip(steps.completions, case.own, strict=True)
        ]
        self.advantages = self._advantages()

    def _values(self, weights: Weights) -> list[list[float]]:
        self._load(weights)
        with torch.no_grad():
            return [row.tolist() for row in self._log_probs()]

    def _load(self, weights: Weights) -> None:
        for name, value in self.model.named_parameters():
            value.data.copy_(weights[name].double())

    def _log_probs(self) -> list[torch.Tensor]:
        """One float64 tensor [length] per completion. Rows start at position 0 and are padded at the end, which is
        causal."""
        joined = [p + c for p, c in zip(self.steps.prompts, self.steps.completions, strict=True)]
        width = max(map(len, joined))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in joined])
        scaled = (self.model(input_ids=ids).logits / self.case.temperature).log_softmax(-1)
        return [
            scaled[i, torch.arange(len(p) - 1, len(p) + len(c) - 1), torch.tensor(c)]
            for i, (p, c) in enumerate(zip(self.steps.prompts, self.steps.completions, strict=True))
        ]

    def _row(self, i: int, logp: list[float], micro_batch: int = 0) -> Row:
        return Row(
            self.advantages[i][0] if self.advantages else 0.0,
            logp,
            self.old[i],
            self.ref[i],
            self.counts[i],
            micro_batch,
        )

    def _advantages(self) -> list[tuple[float, float]]:
        self.advantages: list[tuple[float, float]] = []
        formula, rows = self.case.formula, [self._row(i, old) for i, old in enumerate(self.old)]
        rewards = penalised(formula, self.case.rewards, rows)
        error = 4 * U  # of a reward: exact in float32, and its means and sums are not
        if formula.kl_in_reward:
            error += formula.beta * LOG_PROB_ERROR * 2 * max(map(len, self.old)) ** 0.5
        return advantages(formula.advantage, rewards, self.case.group, formula.std_epsilon, error)

    def step(self, number: int) -> tuple[Update, Weights, float]:
        """(loss and slopes, the gradient of every weight, how far a float32 gradient may be off in norm) of a step."""
        case, cut = self.case, self.steps.rows[number]
        names = [ids[0] for ids in self.steps.completions]
        where = [(names.index(first), m) for m, batch in enumerate(cut) for first in batch]
        self._load(self.steps.weights[number])
        logps = self._log_probs()
        rows = [self._row(i, logps[i].tolist(), m) for i, m in where]
        tokens = max(sum(map(sum, self.counts)), 1) / case.windows
        off = [self.advantages[i][1] for i, _ in where]
        found = update(case.formula, rows, tokens, BUDGET, LOG_PROB_ERROR, off)
        chosen = [logps[i] for i, _ in where]
        gradient = self._gradient(chosen, found.slopes)
        spread = self._gradient(chosen, _random_signs(found.doubt, case.number))
        return found, gradient, _norm(spread)

    def _gradient(self, logps: list[torch.Tensor], slopes: list[list[float]]) -> Weights:
        total = sum((torch.tensor(s, dtype=torch.float64) * lp).sum() for s, lp in zip(slopes, logps, strict=True))
        names, values = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(total, values, retain_graph=True), strict=True))


def _random_signs(doubt: list[list[float]], seed: int) -> list[list[float]]:
    signs = torch.Generator().manual_seed(seed)
    return [
        [d * (1.0 if torch.rand((), generator=signs).item() < 0.5 else -1.0) for d in row] for row in doubt
    ]  # errors of tokens are independent: their gradients add up as a random walk


def _norm(weights: Weights) -> float:
    return sum(value.double().square().sum().item() for value in weights.values()) ** 0.5


def gradient_seen(case: Case, steps: Steps, number: int) -> Weights:
    """(before − after) / learning rate: what SGD was handed."""
    before, after = steps.weights[number], steps.weights[number + 1]
    return {name: (before[name].double() - after[name].double()) / rate(case) for name in before}


def distance(one: Weights, other: Weights) -> float:
    return _norm({name: one[name].double() - other[name].double() for name in other})


def size(weights: Weights) -> float:
    return _norm(weights)
