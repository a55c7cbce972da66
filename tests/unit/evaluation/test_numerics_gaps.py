"""The arithmetic of `grpo-lab check numerics`, and which cause a pattern of gaps names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_lab.diagnostics.numerics import Evidence, Gap, by_part, likely_cause, quarter_of, verdict


def test_a_gap_by_hand() -> None:
    gap = Gap.between([-1.0, -2.0, -0.5, -3.0], [-1.1, -2.0, -0.2, -3.0])
    assert (gap.tokens, gap.mean, gap.worst) == (4, pytest.approx(0.1), pytest.approx(0.3))


def test_parts_weigh_by_their_tokens() -> None:
    found = by_part([0.0, 0.0, 0.0], [0.5, 0.1, 0.3], [2, 1, 1])
    assert list(found) == [1, 2]
    assert (found[1].tokens, found[1].mean) == (2, pytest.approx(0.2))
    assert found[2].worst == 0.5


def test_quarters() -> None:
    assert [quarter_of(at, 8) for at in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [quarter_of(at, 3) for at in range(3)] == [1, 2, 3]


def gap(mean: float) -> Gap:
    return Gap(10, mean, mean)


RIGHT = Evidence({1: gap(1e-6), 2: gap(1e-6)}, {1: gap(1e-6)}, gap(1e-6), gap(1e-6), gap(1e-6), gap(1e-6))
OFF = replace(RIGHT, turns={1: gap(0.1), 2: gap(0.2)}, anew=gap(0.2), alone=gap(0.1), near=gap(0.1), far=gap(0.2))
CASES = {
    "template": (replace(RIGHT, template="prompt 1 differs"), "messages become other tokens in the engine"),
    "cache": (replace(RIGHT, turns={1: gap(1e-6), 2: gap(0.2)}), "in turn 2. Drawn anew, without its cache"),
    "adapter": (replace(OFF, base=gap(1e-6), unused=gap(0.1)), "the engine holds another adapter than the trainer"),
    "weights": (OFF, "in turn 1, turn 2, what is drawn anew. It is 0.1 after a single token already"),
    "rotary": (replace(OFF, alone=gap(1e-6), near=gap(0.04)), "grows with the distance"),
    "": (replace(OFF, alone=gap(1e-6)), "The gaps name no cause (it is 1e-06 after one token, 0.1 after two"),
}


@pytest.mark.parametrize("cause", CASES)
def test_the_cause_of_a_pattern(cause: str) -> None:
    found, words = CASES[cause]
    assert likely_cause(found, 1e-4)[0] == cause
    train, named, sentence = verdict(found, 1e-4, ["float32", "float32"])
    assert not train
    assert named == cause
    assert sentence.startswith("Do not train: ")
    assert words in sentence


def test_a_single_quarter_over_the_limit_is_enough() -> None:
    assert verdict(RIGHT, 1e-4, ["float32", "float32"])[0]
    assert not verdict(replace(RIGHT, quarters={4: gap(2e-4)}), 1e-4, ["float32", "float32"])[0]


def test_an_adapter_that_is_not_used_is_said() -> None:
    found = replace(OFF, base=gap(1e-6), unused=gap(1e-6))
    assert "does not use the adapter at all" in verdict(found, 1e-4, ["float32", "float32"])[2]
