"""PPO with a critic in float64, number by number: what trainings on scripted completions must end at.

Everything at once: KL per token in the reward (clamped k1, per own token), tokens of an environment in between,
completions that did not end, rewards that could not score, rewards and advantages whitened over the whole batch, a
value clip that acts, learning rates of two groups, two updates on each of two generations.
"""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from grpo_lab.testing import ScriptedRollout, tiny_model
from grpo_lab.trainer.critic import Critic, save_critic
from grpo_lab.trainer.trl_bridge import CRITIC

LR, VALUE_LR, BETA, GAMMA, LAM, VF, CLIP, RANGE, PENALTY, UPDATES = 0.2, 0.05, 0.5, 0.9, 0.8, 0.5, 0.2, 0.02, 0.75, 2
KINDS = ("head", "network")


def settings(critic: Path, **changes: Any) -> dict[str, Any]:
    value = {
        "model": str(critic), "learning_rate": VALUE_LR, "vf_coef": VF, "cliprange_value": RANGE, "gamma": GAMMA,
        "lam": LAM, "whiten_rewards": True, "missing_eos_penalty": PENALTY, **changes,
    }  # fmt: skip
    kl = {"estimator": "k1_clamped", "placement": "reward", "coefficient": BETA}
    return {"objective": "ppo", "kl": kl, "value": value, "num_iterations": UPDATES, "learning_rate": LR}


def own_tokens(ids: list[int]) -> list[int]:
    """1 where the policy made the token; an environment made the others, now and then the last one, too."""
    return [int((token + at) % 5 != 0) for at, token in enumerate(ids)]


def judged(ids: list[int]) -> float | None:
    return None if sum(ids) % 7 == 0 else (sum(ids) % 5) / 4.0


def scripted_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [judged(ids) for ids in completion_ids]


class Interleaved(ScriptedRollout):
    """Keeps what it made, a pair (prompts, completions) a generation."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = super().__call__(prompts, trainer)
        self.__dict__.setdefault("batches", []).append([made["prompt_ids"], made["completion_ids"]])
        return {**made, "env_mask": [own_tokens(ids) for ids in made["completion_ids"]]}


def critic_folder(folder: Path, kind: str) -> Path:
    """A saved critic that is not 0: ``head`` (width 32), or a ``network`` of another size."""
    model = tiny_model("qwen2", hidden_size=16, num_heads=2, num_layers=1, initializer_range=0.2, seed=5)[0]
    critic = Critic(32) if kind == "head" else Critic(16, model.base_model)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.2, 0.3, critic.head.in_features)[None])
        critic.head.bias.fill_(0.1)
    save_critic(folder, critic, {f"{CRITIC}.{name}": value for name, value in critic.state_dict().items()})
    return folder


def whitened(values: list[list[float | None]], shift: bool) -> list[list[float | None]]:
    numbers = [v for row in values for v in row if v is not None]
    mean = math.fsum(numbers) / len(numbers)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in numbers) / len(numbers) + 1e-8)
    return [[None if v is None else (v - mean) / std + (0 if shift else mean) for v in row] for row in values]


class Oracle:
    """One row after the other, without padding or masks: only own tokens are in the lists."""

    own_tokens = staticmethod(own_tokens)

    def __init__(self, model_folder: Path, critic_folder: Path, kind: str, eos: int) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
        self.start = copy.deepcopy(self.policy)
        from safetensors.torch import load_file

        self.critic = {name: value.double() for name, value in load_file(critic_folder / "critic.safetensors").items()}
        self.trunk = AutoModel.from_pretrained(model_folder, dtype=torch.float64) if kind == "network" else None
        if kind == "network":
            from transformers import AutoConfig

            self.trunk = AutoModel.from_config(AutoConfig.from_pretrained(critic_folder)).double()
            self.trunk.load_state_dict({n.removeprefix("trunk."): v for n, v in self.critic.items() if "trunk." in n})
        self.weight = self.critic["head.weight"].clone().requires_grad_()
        self.bias = self.critic["head.bias"].clone().requires_grad_()
        self.eos = eos
        self.losses: list[tuple[float, float]] = []
        self.approx_kl: list[float] = []
        self.generations: list[dict[str, float]] = []  # what is logged of each

    def forward(self, model: Any, prompt: list[int], ids: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs and values of the own tokens."""
        sequence = torch.tensor([prompt + ids])
        out = model(sequence, output_hidden_states=True)
        at = [t for t, mine in enumerate(self.own_tokens(ids)) if mine]
        places = [len(prompt) - 1 + t for t in at]
        logps = out.logits[0].log_softmax(-1)[places, [ids[t] for t in at]]
        states = out.hidden_states[-1][0] if self.trunk is None else self.trunk(sequence).last_hidden_state[0]
        return logps, (states @ self.weight[0] + self.bias[0])[places]

    def judge(self, prompts: list[Any], completions: list[Any]) -> list[dict[str, Any]]:
        """Old log-probs and values, advantages and returns of a generation."""
        rows, rewards = [], []
        curves = []  # of scorable completions: shaped reward, task reward, −β·KL
        with torch.no_grad():
            for prompt, ids in zip(prompts, completions, strict=True):
                logps, values = self.forward(self.policy, prompt, ids)
                reference, _ = self.forward(self.start, prompt, ids)
                task = judged(ids)
                steps = self.step_scores(prompt, ids)
                earned: list[float | None] = [
                    -BETA * max(a - b, 0.0) for a, b in zip(logps.tolist(), reference.tolist())
                ]
                if task is None and not steps:
                    earned = [None] * len(earned)
                else:
                    charged, cut = math.fsum(earned), PENALTY if ids[-1] != self.eos else 0.0  # type: ignore[arg-type]
                    task = (task or 0.0) + math.fsum(steps.values())
                    curves.append((charged + task - cut, task, charged))
                    for at, score in steps.items():
                        earned[at] = earned[at] + score  # type: ignore[operator]
                    if earned:
                        outcome = task - math.fsum(steps.values())
                        earned[-1] = earned[-1] + outcome - cut  # type: ignore[operator]
                rows.append({"prompt": prompt, "ids": ids, "logps": logps.tolist(), "values": values.tolist()})
                rewards.append(earned)
        advantages = []
        for row, earned in zip(rows, whitened(rewards, shift=False), strict=True):
            advantages.append(self.credited(row["ids"], earned, row["values"]))
        for row, found, pushed in zip(rows, advantages, whitened(advantages, shift=True), strict=True):
            row["returns"] = [None if a is None else a + v for a, v in zip(found, row["values"], strict=True)]
            row["pushed"] = [0.0 if a is None else a for a in pushed]
        names = ("ppo/shaped_reward", "ppo/task_reward", "ppo/kl_reward")
        logged = {name: math.fsum(c) / len(curves) for name, c in zip(names, zip(*curves, strict=True), strict=True)}
        pairs = [(r, v) for row in rows for r, v in zip(row["returns"], row["values"], strict=True) if r is not None]
        errors = statistics.pvariance([r - v for r, v in pairs])
        logged["value/return_mean"] = statistics.fmean(r for r, _ in pairs)
        logged["value/explained_variance"] = 1 - errors / statistics.pvariance([r for r, _ in pairs])
        self.generations.append(logged)
        return rows

    def step_scores(self, prompt: list[int], ids: list[int]) -> dict[int, float]:
        """Scores of steps, by the index among own tokens at which each lies."""
        return {}

    def credited(self, ids: list[int], earned: list[float | None], values: list[float]) -> list[float | None]:
        """Advantages of a row's own tokens."""
        found, ahead, following = [], 0.0, 0.0
        for r, v in reversed(list(zip(earned, values, strict=True))):
            ahead = 0.0 if r is None else r + GAMMA * following - v + GAMMA * LAM * ahead
            following = v
            found.append(None if r is None else ahead)
        return found[::-1]

    def update(self, rows: list[dict[str, Any]]) -> None:
        """One step of SGD on the mean over all own tokens."""
        tokens = sum(len(row["logps"]) for row in rows)
        parameters = [*self.policy.parameters()]
        critics = [self.weight, self.bias, *(self.trunk.parameters() if self.trunk is not None else [])]
        sums, moved = [0.0, 0.0], 0.0
        for parameter in (*parameters, *critics):
            parameter.grad = None
        for row in rows:
            logps, values = self.forward(self.policy, row["prompt"], row["ids"])
            policy = critic = torch.zeros((), dtype=torch.float64)
            for logp, value, old, before, a, r in zip(
                logps, values, row["logps"], row["values"], row["pushed"], row["returns"], strict=True
            ):
                ratio = (logp - old).exp()
                moved += 0.5 * (logp.item() - old) ** 2 / tokens
                policy = policy - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a) / tokens
                if r is not None:
                    clipped = before + (value - before).clamp(-RANGE, RANGE)
                    critic = critic + 0.5 * torch.maximum((value - r) ** 2, (clipped - r) ** 2) / tokens
            if len(row["logps"]):
                (policy + VF * critic).backward()
            sums = [sums[0] + policy.item(), sums[1] + critic.item()]
        self.losses.append((sums[0], sums[1]))
        self.approx_kl.append(moved)
        with torch.no_grad():
            for group, rate in ((parameters, LR), (critics, VALUE_LR)):
                for parameter in group:
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad

    def state(self) -> dict[str, Tensor]:
        """Under the trainer's names."""
        critic = {"head.weight": self.weight.detach(), "head.bias": self.bias.detach()}
        if self.trunk is not None:
            critic |= {f"trunk.{name}": value.detach() for name, value in self.trunk.state_dict().items()}
        return {**self.policy.state_dict(), **{f"{CRITIC}.{name}": value for name, value in critic.items()}}


def replayed(
    model_folder: Path, critic: Path, kind: str, eos: int, batches: list[Any], steps: int, oracle: type[Oracle] = Oracle
) -> Oracle:
    made = oracle(model_folder, critic, kind, eos)
    for prompts, completions in batches:
        rows = made.judge(prompts, completions)
        for _ in range(UPDATES):
            if len(made.losses) < steps:
                made.update(rows)
    return made
