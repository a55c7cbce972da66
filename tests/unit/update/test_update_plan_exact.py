"""The plan's reason to be: the summed gradient over its bins is the gradient of the whole padded batch.

A toy causal policy in float64 (each row's log-probs depend on that row's tokens alone, as in a transformer without
dropout), no trainer. Tolerance 1e-12 relative: only the order of float64 additions differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from grpo_lab.update import Plan, Rows, live_rows, plan_update

VOCABULARY, WIDTH, LONGEST_COMPLETION = 11, 6, 9
LOSSES = ("grpo", "dr_grpo", "dapo")


class ToyPolicy(torch.nn.Module):
    """log π(next token | prefix) from a decaying sum over the prefix: causal, and blind to what comes after."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(WIDTH, VOCABULARY, generator=generator, dtype=torch.float64))

    def row_logps(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[B, L] tokens, right-padded → log-prob of each token given those before it, [B, L] (0 at position 0)."""
        state = torch.zeros(tokens.shape[0], WIDTH, dtype=torch.float64)
        logps = [torch.zeros(tokens.shape[0], dtype=torch.float64)]
        for t in range(tokens.shape[1] - 1):
            state = torch.tanh(0.7 * state + self.embed[tokens[:, t]])
            logps.append((state @ self.head).log_softmax(-1).gather(1, tokens[:, t + 1 : t + 2]).squeeze(1))
        return torch.stack(logps, dim=1) * mask


@dataclass(frozen=True)
class Batch:
    """Rows as [prompt + completion], right-padded to the longest row of the whole batch."""

    tokens: torch.Tensor
    completion: torch.Tensor  # [N, L] 1.0 on completion tokens
    advantages: torch.Tensor
    rows: Rows


def batch(num_rows: int, dead: float) -> Batch:
    generator = torch.Generator().manual_seed(num_rows)
    prompt = torch.randint(1, 7, (num_rows,), generator=generator)
    completion = torch.randint(1, LONGEST_COMPLETION + 1, (num_rows,), generator=generator)
    longest = int((prompt + completion).max())
    at = torch.arange(longest).expand(num_rows, -1)
    inside = ((at >= prompt[:, None]) & (at < (prompt + completion)[:, None])).double()
    advantages = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    advantages[torch.randperm(num_rows, generator=generator)[: round(dead * num_rows)]] = 0
    return Batch(
        tokens=torch.randint(0, VOCABULARY, (num_rows, longest), generator=generator),
        completion=inside,
        advantages=advantages,
        rows=Rows(prompt, completion, live_rows(advantages, inside)),
    )


def denominators(loss: str, mask: torch.Tensor) -> torch.Tensor:
    """What each row's token losses are divided by, [N, 1], from all rows of `mask`."""
    rows = torch.full((mask.shape[0], 1), float(mask.shape[0]), dtype=torch.float64)
    if loss == "grpo":
        return rows * mask.sum(1, keepdim=True)
    return rows * LONGEST_COMPLETION if loss == "dr_grpo" else torch.ones_like(rows) * mask.sum()


def gradient(data: Batch, groups: list[list[int]], divide_by: torch.Tensor) -> torch.Tensor:
    """Σ over groups of the gradient of −Σ A · π/sg(π) / denominator, each group trimmed to its longest row."""
    policy = ToyPolicy()
    total = torch.as_tensor(data.rows.prompt_lengths) + torch.as_tensor(data.rows.completion_lengths)
    for group in groups:
        if not group:
            continue
        width = int(total[group].max())
        mask = data.completion[group, :width]
        logps = policy.row_logps(data.tokens[group, :width], mask)
        ratio = torch.exp(logps - logps.detach())
        (-(ratio * data.advantages[group, None] * mask) / divide_by[group]).sum().backward()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in policy.parameters()]
    )


def flat(plan: Plan) -> list[list[int]]:
    return [one for bins in plan.bins for one in bins]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dead", [0.0, 0.6, 1.0])
def test_the_plan_has_the_gradient_of_the_whole_batch(loss: str, num_ranks: int, dead: float) -> None:
    data = batch(24, dead)
    divide_by = denominators(loss, data.completion)
    everything = gradient(data, [list(range(24))], divide_by)
    planned = gradient(data, flat(plan_update(data.rows, num_ranks, 40, overhead_tokens=1)), divide_by)
    torch.testing.assert_close(planned, everything, rtol=1e-12, atol=1e-14)
    assert bool((everything != 0).any()) == (dead < 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_denominators_counted_after_leaving_rows_out_are_seen(loss: str) -> None:
    """The test of the test: the mistake it must catch gives another gradient, by far more than rounding."""
    data = batch(24, 0.6)
    live = torch.as_tensor(data.rows.live)
    too_late = torch.ones(24, 1, dtype=torch.float64)
    too_late[live] = denominators(loss, data.completion[live])
    everything = gradient(data, [list(range(24))], denominators(loss, data.completion))
    planned = gradient(data, flat(plan_update(data.rows, 2, 40)), too_late)
    assert (planned - everything).norm() > 0.5 * everything.norm()
