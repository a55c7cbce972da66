"""GRPO, Dr.GRPO and the KL choices on one page, from the data set to the optimizer. No import of grpo_lab, no trainer.

    python scripts/grpo_flat.py --model MODEL --data gsm8k/train.jsonl --method dr_grpo --steps 100

It stands in the order of a step: draw questions, sample G answers to each, score them, compare them within their group,
update the weights. It prints a line for each step, and saves the model. The library has more: other losses, ranks,
vLLM, resume. ``tests/reference/test_grpo_flat.py`` compares it with ``LabTrainer`` on the same completions.

GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2. Dr.GRPO: arXiv 2503.20783, §3.2. KL estimators: Schulman, 2020.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "{question}\nThink step by step and end with a line '#### ' and the answer.\n"


@dataclass
class Settings:
    model: str = "Qwen/Qwen2.5-0.5B"
    data: str = "train.jsonl"  # rows with `question` and `answer`, which ends in `#### gold`
    output: str = "runs/grpo_flat"
    method: str = "grpo"  # grpo: z-scores, mean over each answer's tokens | dr_grpo: centred, divided by a constant
    kl: str = "none"  # none | k1 | k2 | k3: distance to the start model
    kl_in: str = "loss"  # loss: β·KL of each token | reward: minus β·KL of the whole answer, before the comparison
    beta: float = 0.04
    epsilon: float = 0.2  # clip of the ratio
    questions: int = 8  # in a step
    group: int = 8  # answers to each question
    updates: int = 1  # optimizer steps on the same answers
    rows_at_once: int = 8  # answers a forward; memory only, changes nothing
    tokens: int = 512  # longest answer
    temperature: float = 1.0
    lr: float = 1e-6
    clip_norm: float = 1.0
    steps: int = 100
    seed: int = 0


# -- 1. questions ------------------------------------------------------------------------------------------------------


def questions(path: str, count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield ``count`` questions for each step, shuffled anew in each epoch, with their ``prompt`` and ``gold``
    answer."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": PROMPT.format(**row), "gold": row["answer"].split("####")[-1].strip()} for row in rows]
    if len(rows) < count:
        raise ValueError(f"--questions is {count}, and {path} has {len(rows)} rows")
    rng = random.Random(seed)
    while True:
        rng.shuffle(rows)
        for start in range(0, len(rows) - count + 1, count):
            yield rows[start : start + count]


# -- 2. answers --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[list[int]], s: Settings) -> list[list[int]]:
    """Sample one answer to each prompt; return its tokens, up to and with the end token (or cut at the limit)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    made = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=s.temperature, top_k=0, top_p=1.0,
        max_new_tokens=s.tokens, pad_token_id=tokenizer.pad_token_id,
    )[:, width:]  # fmt: skip
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return [until_end(row, ends) for row in made.tolist()]


def until_end(row: list[int], ends: set[int]) -> list[int]:
    return next((row[: t + 1] for t, token in enumerate(row) if token in ends), row)


# -- 3. rewards --------------------------------------------------------------------------------------------------------


def accuracy(text: str, gold: str) -> float:
    """Return 1 if the last number after ``####`` is the gold answer, else 0."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(gold.replace(",", "")))


# -- 4. advantages -----------------------------------------------------------------------------------------------------


def advantages(rewards: Tensor, s: Settings) -> Tensor:
    """Return each reward less its group's mean, ``[N]``; GRPO divides by the group's standard deviation, too."""
    group = rewards.double().view(-1, s.group)
    centred = group - group.mean(1, keepdim=True)
    if s.method == "grpo":
        centred = centred / (group.std(1, keepdim=True) + 1e-4)
    return centred.flatten().float()


# -- 5. log-probs ------------------------------------------------------------------------------------------------------


def log_probs(model: Any, prompts: list[list[int]], answers: list[list[int]], s: Settings) -> tuple[Tensor, Tensor]:
    """Return log π of each answer token in nats, and a mask of those that are no padding, both ``[B, T]``."""
    rows = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    length, width = max(map(len, rows)), max(map(len, answers))
    ids = torch.stack([pad(row, (0, length - len(row))) for row in rows]).to(model.device)
    logits = model(input_ids=ids).logits[:, :-1].float() / s.temperature  # padding is on the right: nothing sees it
    everywhere = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    answered = [
        everywhere[i, len(p) - 1 : len(p) - 1 + len(a)] for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    mask = torch.tensor([[t < len(a) for t in range(width)] for a in answers], device=model.device)
    return torch.stack([pad(row, (0, width - len(row))) for row in answered]), mask


def kl(estimator: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π‖π_ref) at each sampled token: k1 = −x, k2 = x²/2, k3 = eˣ − x − 1 with x = log π_ref − log π."""
    x = reference - policy
    return {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - x - 1}[estimator]


# -- 6. the loss -------------------------------------------------------------------------------------------------------


def loss_of(
    new: Tensor, old: Tensor, reference: Tensor | None, advantage: Tensor, mask: Tensor, rows: int, s: Settings
) -> Tensor:
    """Return what B answers add to the loss of a step with ``rows`` answers: the clipped surrogate of each token plus
    β·KL, averaged as the method says. ``new``, ``old``, ``reference`` (log-probs) and ``mask`` are ``[B, T]``."""
    ratio = (new - old).exp()
    push = advantage[:, None] * ratio
    limited = advantage[:, None] * ratio.clamp(1 - s.epsilon, 1 + s.epsilon)
    per_token = -torch.minimum(push, limited)
    if reference is not None and s.kl_in == "loss":
        per_token = per_token + s.beta * kl(s.kl, new, reference)
    total = (per_token * mask).sum(1)
    if s.method == "grpo":  # each answer counts the same, however long
        return (total / mask.sum(1)).sum() / rows
    return total.sum() / (rows * s.tokens)  # each token counts the same, in every step


# -- 7. one step -------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What stays fixed while the N answers of a step are trained on; ``old``, ``reference``: log-probs of `chunks`."""

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards: Tensor
    old: list[Tensor]
    reference: list[Tensor | None]
    advantage: Tensor


def prepare(
    model: Any, reference: Any, prompts: list[list[int]], answers: list[list[int]], rewards: list[float], s: Settings
) -> Batch:
    """Compute the log-probs before the weights move, the rewards less their KL (if it is in them), and advantages."""
    old: list[Tensor] = []
    ref: list[Tensor | None] = []
    paid = torch.tensor(rewards, dtype=torch.float64)
    for rows in chunks(len(answers), s.rows_at_once):
        p, a = [prompts[i] for i in rows], [answers[i] for i in rows]
        with torch.no_grad():
            here, mask = log_probs(model, p, a, s)
            there = None if reference is None else log_probs(reference, p, a, s)[0]
        old.append(here)
        ref.append(there)
        if there is not None and s.kl_in == "reward":
            paid[rows] -= s.beta * (kl(s.kl, here, there) * mask).sum(1).double().cpu()
    return Batch(prompts, answers, paid, old, ref, advantages(paid, s).to(model.device))


def update(model: Any, optimizer: Any, batch: Batch, s: Settings) -> float:
    """Take one optimizer step on the whole batch, some rows at a time, and return its loss."""
    total = 0.0
    for place, rows in enumerate(chunks(len(batch.answers), s.rows_at_once)):
        new, mask = log_probs(model, [batch.prompts[i] for i in rows], [batch.answers[i] for i in rows], s)
        loss = loss_of(
            new, batch.old[place], batch.reference[place], batch.advantage[rows], mask, len(batch.answers), s
        )
        loss.backward()
        total += loss.item()
    if s.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def chunks(count: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


# -- 8. all of it ------------------------------------------------------------------------------------------------------


def train(s: Settings, report: Callable[[str], None] = print) -> None:
    torch.manual_seed(s.seed)
    tokenizer = AutoTokenizer.from_pretrained(s.model)
    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32).to(
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    reference = (
        None if s.kl == "none" else AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32).to(model.device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.95), weight_decay=0.0)
    data = questions(s.data, s.questions, s.seed)
    for step in range(s.steps):
        rows = [row for row in next(data) for _ in range(s.group)]
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        answers = sample(model, tokenizer, prompts, s)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = [accuracy(text, row["gold"]) for text, row in zip(texts, rows, strict=True)]
        batch = prepare(model, reference, prompts, answers, rewards, s)
        losses = [update(model, optimizer, batch, s) for _ in range(s.updates)]
        length = sum(map(len, answers)) / len(answers)
        report(f"step {step}: accuracy {sum(rewards) / len(rewards):.3f}, {length:.1f} tokens, loss {losses[-1]:+.5f}")
    model.save_pretrained(s.output)
    tokenizer.save_pretrained(s.output)


def read(words: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = {"method": ["grpo", "dr_grpo"], "kl": ["none", "k1", "k2", "k3"], "kl_in": ["loss", "reward"]}
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), default=field.default, choices=choices.get(field.name)
        )
    return Settings(**vars(parser.parse_args(words)))


if __name__ == "__main__":
    train(read())
