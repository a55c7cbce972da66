"""Two and four real processes (accelerate, gloo, CPU) with the same global batch end at the weights of one.

The scripted rollout knows the global row, so the completions of a run are the same however many processes make them.
Differences come from the order of float32 sums only. DDP runs with ``find_unused_parameters`` off: every rank makes
every backward, with a dummy row where the plan has nothing for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed.cases import OBJECTIVES, TRAINED, TRLS, Case
from distributed.launch import World
from parity.harness import ONE_ROW_IN_A_HUNDRED
from tolerance import loss_gap, metric_gap, movement_gap, two_walks

pytestmark = pytest.mark.slow
SEVERAL = (2, 4)
SPREAD = [pytest.param(case, n, id=f"{n}-{case.name}") for case in TRAINED for n in SEVERAL if n in case.worlds]
spread = pytest.mark.parametrize(("case", "processes"), SPREAD)


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    gap = sum((ours[name].double() - value.double()).square().sum().item() for name, value in theirs.items())
    size = sum(value.double().square().sum().item() for value in theirs.values())
    return float((gap / size) ** 0.5)


def rounding(expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor], steps: int) -> float:
    """What another order of float32 sums may make of two trainings, relative to the movement: ranks add the gradients
    of other rows."""
    return movement_gap(torch.float32, 1.0, relative_difference(start, expected), steps)


def first_weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def logged_gaps(case: Case) -> tuple[float, float]:
    """Absolute for losses, relative for gradient norms and entropies, for terms of float32 over at most 16 rows of 30
    tokens.

    The mean |Â| is at most 1 (rewards within [−1, 1], or a z-score); a term of CISPO is w·|Â|·|log π|, 6 nats. An
    entropy and a norm are sums over the vocabulary and the largest tensor: 747 · 32 numbers, and half of it, for the
    root.
    """
    steps = case.args.get("max_steps", 4)
    terms = 6.0 if case.name == "cispo" else 1.0
    loss = loss_gap(torch.float32, terms, additions=16 * 30, steps=steps)
    return loss, metric_gap(torch.float32, steps) + two_walks(torch.float32, 747 * 32) / 2


#: means of exact values (rewards, lengths, shares) of at most 16 rows, of size 1 or relative to it
FEW = two_walks(torch.float32, 16)


def dead_rows(world: World, case: Case) -> list[list[bool]]:
    """Per generation batch: which rows sit in a group whose rewards are all equal."""
    found = []
    for table in world.report(case.name)["ranks"][0]["tables"]:
        totals = [row[0] for row in table["values"]]
        groups = [totals[start : start + 4] for start in range(0, len(totals), 4)]
        found.append([len(set(group)) == 1 for group in groups for _ in group])
    return found


@spread
def test_same_weights(case: Case, processes: int, worlds: dict[int, World], tiny_folder: Path) -> None:
    assert worlds[1].report(case.name)["world"] == 1
    assert worlds[processes].report(case.name)["world"] == processes
    steps = case.args.get("max_steps", 4)
    assert len(worlds[1].steps(case.name)) == len(worlds[processes].steps(case.name)) == steps
    found, expected = worlds[processes].weights(case.name), worlds[1].weights(case.name)
    difference = relative_difference(found, expected)
    start = first_weights(tiny_folder)
    moved = relative_difference(expected, start)
    print(
        f"{case.name}, {processes} ranks: weights differ by {difference:.1e} relative; training moved them {moved:.1e}"
    )
    bound = rounding(expected, start, steps)
    assert bound < ONE_ROW_IN_A_HUNDRED, "hardly trained: rounding hides what was to be compared"
    assert difference / moved <= bound


def test_exact_equals_off_where_the_rows_of_a_step_depend_on_the_world(
    worlds: dict[int, World], tiny_folder: Path
) -> None:
    """Two steps a generation: TRL shuffles each rank's rows before it cuts them, so only the same world can be
    compared."""
    names = [f"two-steps-a-generation-{update}" for update in ("exact", "off", "stock")]
    exact, off, stock = (worlds[2].weights(name) for name in names)
    start = first_weights(tiny_folder)
    moved, bound = relative_difference(start, stock), rounding(stock, start, steps=4)
    assert relative_difference(exact, stock) / moved <= bound, "stock TRL in the same world"
    assert relative_difference(off, stock) / moved <= bound
    other = relative_difference(worlds[1].weights(names[0]), stock) / moved
    assert other > 10 * bound, "then it could join the cases above"
    assert all(row["update/computed_share"] < 1 for row in worlds[2].steps(names[0]))
    assert all(row["update/computed_share"] == 1 for row in worlds[2].steps(names[1]))


@pytest.mark.parametrize("name", [*TRLS, "chosen-tokens"])
def test_trls_settings_beside_an_objective_are_trls(name: str, worlds: dict[int, World], tiny_folder: Path) -> None:
    """On two ranks, each against stock TRL in the same world; the coefficient that TRL logs, too."""
    ours, stock = (worlds[2].weights(f"trls-{name}{kind}") for kind in ("", "-stock"))
    start = first_weights(tiny_folder)
    gap, moved = relative_difference(ours, stock), relative_difference(start, stock)
    print(f"{name}: weights differ by {gap:.1e}, training moved them {moved:.1e}")
    assert gap <= 1e-6
    assert gap / moved <= rounding(stock, start, steps=4)
    logged = [
        [row.get("entropy_coef", 0.0) for row in worlds[2].steps(f"trls-{name}{kind}")] for kind in ("", "-stock")
    ]
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)


def test_prompts_are_shared_on_two_ranks(worlds: dict[int, World]) -> None:
    """The rows of a group lie on different ranks before the update; without padding and with each prompt once, a step
    computes fewer tokens than in bins of rows. (Four ranks cut the three groups to be even.)"""
    shared, plain = (worlds[2].steps(name) for name in ("shared-prompts", "dr_grpo"))
    tokens = "update/tokens_computed"
    assert all(one[tokens] < other[tokens] for one, other in zip(shared, plain, strict=True))
    assert sum(row["update/padding_share"] for row in worlds[4].steps("shared-prompts-twice-beta")) == 0


@spread
def test_same_loss_rewards_and_metrics(case: Case, processes: int, worlds: dict[int, World]) -> None:
    """Means are (sum, count) pairs over ranks, so one process and several log the same numbers."""
    loss, relative = logged_gaps(case)
    for one, several in zip(worlds[1].steps(case.name), worlds[processes].steps(case.name), strict=True):
        of_generation = ("reward", "reward_std", "groups/dead_share", "completions/mean_length")
        assert several["loss"] == pytest.approx(one["loss"], rel=0, abs=loss)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=relative)
        assert [name in several for name in of_generation] == [name in one for name in of_generation]
        for name in (name for name in of_generation if name in one):  # a reused batch logs none of them
            assert several[name] == pytest.approx(one[name], rel=FEW, abs=FEW), name
        if "objective" in case.args:  # TRL's own definition averages micro-batch means, and those differ
            if case.exact and not one["update/live_share"]:
                assert not several["update/live_share"]
            else:
                assert several["entropy"] == pytest.approx(one["entropy"], rel=relative)
        if case.exact:
            assert several["update/live_share"] == pytest.approx(one["update/live_share"], rel=FEW)


@pytest.mark.parametrize(("name", "processes"), [("grpo", 2), ("dr_grpo", 2), ("dr_grpo", 4), ("gspo", 4)])
def test_advantages_are_of_whole_groups(name: str, processes: int, worlds: dict[int, World]) -> None:
    """The middle group lies on two ranks, or all groups do; advantages are those of one process, to the bit on any CPU:
    every rank computes them from the same whole table, with the same shapes."""
    one, several = (worlds[n].report(name)["advantages"] for n in (1, processes))
    assert len(one) == 12
    assert several == one


def test_every_objective_and_no_search_for_unused_parameters(worlds: dict[int, World]) -> None:
    asked = [case.args.get("objective") for case in TRAINED]
    assert {one["name"] if isinstance(one, dict) else one for one in asked} >= set(OBJECTIVES)
    for case in TRAINED:
        for processes in {*case.worlds} - {1}:
            assert worlds[processes].report(case.name)["find_unused_parameters"] is False


def test_the_cases_hold_dead_groups_dead_ranks_and_dead_steps(worlds: dict[int, World]) -> None:
    """What the equalities above are about really happens in the runs."""
    (mixed,) = (case for case in TRAINED if case.name == "dr_grpo")
    (sparse,) = (case for case in TRAINED if case.name == "dr_grpo-sparse")
    assert any(any(step) and not all(step) for step in dead_rows(worlds[1], mixed))
    for processes in SEVERAL:
        steps = dead_rows(worlds[processes], sparse)
        assert steps == dead_rows(worlds[1], sparse)
        share = len(steps[0]) // processes
        ranks = [[all(step[r * share : (r + 1) * share]) for r in range(processes)] for step in steps]
        assert any(any(step) and not all(step) for step in ranks), "a rank all dead while another is not"
        assert any(all(step) for step in ranks), "a step without a live row"
    dead = [all(step) for step in dead_rows(worlds[1], sparse)]
    norms = [row["grad_norm"] for row in worlds[4].steps(sparse.name)]
    assert [norm == 0.0 for norm in norms] == dead  # the optimizer stepped on zeros there, and only there


@pytest.mark.parametrize("processes", SEVERAL)
def test_rows_move_between_ranks_only_when_the_update_is_exact(processes: int, worlds: dict[int, World]) -> None:
    """The exact update computes fewer tokens than stock on the same batch, in the sum over ranks."""
    for row in worlds[processes].steps("dr_grpo"):
        assert row["update/tokens_computed"] < row["update/tokens_stock"]
    assert all(row["update/computed_share"] == 1 for row in worlds[processes].steps("dr_grpo-off"))
