"""A random sweep over advantage × ratio × surrogate × KL × aggregation × batch shape: the real trainer against
formulas.

Each case is one generation batch on scripted rollouts through ``LabTrainer`` (float32, SGD): groups that straddle
micro-batches, dead groups, an unscorable row, a tool's words, cut and masked completions, one or several updates a
batch, every ``update`` mode. Each optimizer step's logged loss and what it did to the weights are compared with
``formulas.py``, which imports nothing of ours and starts every step from the weights that the trainer really had, so
that errors of one step are not multiplied by the next.

Tolerances. A float32 log-prob is off by ``LOG_PROB_ERROR`` = u·√(additions)·size ≈ 2e-5 (measured: 1e-6);
``formulas.update`` carries that, and what it does to an advantage through the KL in a reward and a small standard
deviation, to each token's derivative (``doubt``). A token nearer to a clip's edge than ten of it may fall to either
side: its whole derivative is doubt. Tokens' errors are independent, so their gradients add up as a random walk. Weights
are stored in float32: u·‖w‖/learning rate on top. Nothing here is a number that a machine printed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from sweep.draw import AGGREGATIONS, RULES, SURROGATES, Case, draw
from sweep.runs import Oracle, Steps, U, Weights, distance, gradient_seen, rate, size, trained

CASES = 64
FAST = 16


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Weights:
    """A reference model that is not the policy: its weights with noise, so that no KL term is 0 at the first step."""
    from transformers import AutoModelForCausalLM

    noise = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    return {
        name: value.detach() + 0.03 * torch.randn(value.shape, generator=noise)
        for name, value in model.named_parameters()
    }


@pytest.mark.not_fast
@pytest.mark.thorough(but=["[0-9]", "1[0-9]", "2[0-3]"])
@pytest.mark.parametrize("number", [pytest.param(n, marks=() if n < FAST else pytest.mark.slow) for n in range(CASES)])
def test_trainer_does_what_the_papers_say(number: int, tiny_folder: Path, reference: Weights, tmp_path: Path) -> None:
    case = draw(number)
    steps = trained(case, tiny_folder, reference, tmp_path)
    assert len(steps.losses) == case.windows * case.iterations
    _assert_each_row_is_used_once_a_pass(case, steps)
    oracle = Oracle(case, steps, tiny_folder, reference)
    for step, loss in enumerate(steps.losses):
        found, gradient, doubt = oracle.step(step)
        stored = U * size(steps.weights[step]) / rate(case)
        off = distance(gradient_seen(case, steps, step), gradient)
        print(f"step {step}: loss {loss - found.loss:.1e}, gradient {off:.1e} of {size(gradient):.1e}")
        assert abs(loss - found.loss) <= found.loss_doubt + 8 * U * abs(found.loss), (
            f"loss of step {step}, {case.words}"
        )
        assert off <= doubt + stored + 8 * U * size(gradient), f"gradient of step {step}, {case.words}"


def _assert_each_row_is_used_once_a_pass(case: Case, steps: Steps) -> None:
    """How TRL cuts and shuffles is its business (only the cut is read from the run), but every row counts once a
    pass."""
    for first in range(0, len(steps.rows), case.windows):
        seen = [token for step in steps.rows[first : first + case.windows] for batch in step for token in batch]
        assert sorted(seen) == sorted(ids[0] for ids in steps.completions)
    assert all(len(step) == case.accumulation for step in steps.rows)


def test_the_cases_cover_every_part() -> None:
    """Which parts, KL terms, masks and update modes the drawn cases hold."""
    seen: Counter[str] = Counter()
    for case in map(draw, range(CASES)):
        formula = case.formula
        place = "none" if formula.kl is None else "reward" if formula.kl_in_reward else "loss"
        seen.update((formula.advantage, formula.surrogate, formula.aggregation, formula.ratio))
        seen.update((f"{formula.kl} in the {place}", f"iterations {case.iterations}", f"windows {case.windows}"))
        seen.update([f"update {case.settings['update']}", f"accumulation {case.accumulation}"])
        seen.update(["weighted KL"] if formula.kl_weighted else [])
        seen.update(["bounded"] if formula.delta < float("inf") else [])
        seen.update(["masked"] if case.mask_truncated and any(ids[-1] != -1 for ids in case.completions) else [])
        seen.update(["tool"] if any(0 in own for own in case.own) else [])
        seen.update(["unscorable"] if None in case.rewards else [])
        groups = [case.rewards[i : i + case.group] for i in range(0, len(case.rewards), case.group)]
        seen.update(["dead group"] if any(len(set(values)) == 1 for values in groups) else [])
    wanted = [*RULES, *SURROGATES, *AGGREGATIONS, "mirror_descent", "token", "sequence", "iterations 1", "iterations 2"]
    wanted += [f"k{n} in the {place}" for n in (1, 2, 3) for place in ("loss", "reward")]
    wanted += ["windows 1", "windows 2", "accumulation 1", "accumulation 3", "weighted KL", "bounded", "masked", "tool"]
    wanted += ["unscorable", "dead group", "update off", "update None", "update {'dead_groups': 'keep'}"]
    missing = [name for name in wanted if seen[name] < 2]
    assert not missing, f"drawn less than twice: {missing}; seen {seen}"
