"""Resume with groups that wait (``rollout.cut_after``): in the checkpoint they are what they were, and a run that was
killed goes on as the one that was not. The stand-in engine draws each token by what stands before it."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from distributed.launch import RECIPES, accelerate_launch
from grpo_lab import LabConfig
from grpo_lab.trainer.generation.waiting import (
    FILE,
    Segment,
    WaitingCompletion,
    WaitingGroup,
    begin,
    read_groups,
    write_groups,
)
from grpo_lab.trainer.resume.state import STATE
from rollouts.overlap_runs import Rows, build, spec, written
from rollouts.stand_in import ends_at_random, stand_in
from rollouts.test_partial import PARTIAL, trained_rows

SAVED: dict[str, Any] = {**PARTIAL, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0, "max_steps": 8}


def run(folder: Path, tiny: Any, resume: Any = None, **changes: Any) -> tuple[Any, Rows]:
    with stand_in(tiny[0]) as engine:
        engine.stop, engine.end = ends_at_random(0.2), tiny[1].eos_token_id
        trainer = build(folder, copy.deepcopy(tiny[0]), tiny[1], **{**SAVED, **changes})
        rows = Rows(trainer)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, rows


@pytest.fixture(scope="module")
def whole(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, trainer, rows) of a run that was never stopped; groups wait at its checkpoints 1 to 7."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "out", *run(folder, tiny)


@pytest.mark.not_fast
def test_two_resumes_are_the_run_that_was_never_stopped(whole: Any, tiny: Any, tmp_path: Path) -> None:
    """To the bit: rows in their order, log-probs, versions, weights."""
    folder, trainer, rows = whole
    for step in (3, 6):
        resumed, others = run(tmp_path / str(step), tiny, folder / f"checkpoint-{step}")
        assert json.loads((folder / f"checkpoint-{step}" / STATE).read_text())["entries"]["waiting"]["waiting"] > 0
        assert [trained_rows([one]) for one in others.steps] == [trained_rows([one]) for one in rows.steps[step:]]
        weights = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in weights)


@pytest.mark.not_fast
def test_inside_a_generation_batch_that_could_not_be_written(tiny: Any, tmp_path: Path) -> None:
    """The batch is made again as ever; with waiting groups it is the same one: no prompt is begun a second time."""
    shape: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    _, rows = run(tmp_path, tiny, **shape)
    folder = tmp_path / "out" / "checkpoint-3"
    state = json.loads((folder / STATE).read_text())
    assert state["entries"]["waiting"]["in_training"] == 2
    del state["entries"]["generation"]
    (folder / STATE).write_text(json.dumps(state))
    (folder / "grpo_lab_checkpoint.json").unlink()
    _, others = run(tmp_path / "resumed", tiny, folder, **shape)
    of_both = [
        {prompt for step in steps for prompt in step["prompts"]} for steps in (rows.steps[2:4], others.steps[:2])
    ]
    assert of_both[0] == of_both[1]
    first = [sorted(trained_rows(steps)[n][:4] for n in range(8)) for steps in (rows.steps[2:4], others.steps[:2])]
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("damage", "changes", "said"),
    [
        ("missing", {}, r"`waiting`.*grpo_lab_generation_waiting.safetensors.*damaged or missing"),
        ("cut", {}, r"`waiting`.*damaged or missing"),
        ("none", {"num_generations": 2}, r"another run \(num_generations 4 → 2\).*trained on twice"),
        ("none", {"max_completion_length": 9}, r"max_completion_length 8 → 9"),
        ("none", {"temperature": 0.9}, r"temperature 1.0 → 0.9"),
        ("none", {"rollout": {"verify_every": 1}}, r"groups wait there.*`rollout.cut_after` is not set.*are then lost"),
    ],
)
def test_what_cannot_be_gone_on_with_is_said(
    damage: str, changes: dict[str, Any], said: str, whole: Any, tiny: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(whole[0] / "checkpoint-3", folder)
    (folder / "grpo_lab_checkpoint.json").unlink()
    if damage == "missing":
        (folder / FILE).unlink()
    if damage == "cut":
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    with pytest.raises(ValueError, match=said):
        run(tmp_path / "run", tiny, folder, **changes)


@pytest.mark.not_fast
def test_a_longer_budget_may_be_taken_and_stock_s_checkpoint(whole: Any, tiny: Any, tmp_path: Path) -> None:
    """Another `cut_after` changes nothing in what waits; where nothing waits, nothing is missed."""
    _, rows = run(tmp_path / "longer", tiny, whole[0] / "checkpoint-3", rollout={"cut_after": 5})
    before = {prompt for step in whole[2].steps[:3] for prompt in step["prompts"]}
    after = Counter(prompt for step in rows.steps for prompt in step["prompts"])
    assert set(after.values()) == {4}
    assert not before & set(after)
    _, _ = run(tmp_path / "stock", tiny, max_steps=2, rollout={"verify_every": 1})
    _, rows = run(tmp_path / "then", tiny, tmp_path / "stock" / "out" / "checkpoint-2", max_steps=4)
    assert [step["step"] for step in rows.steps] == [3, 4]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "ü"}], "answer": None, "tests": ["x" * 9], "n": 3, "share": math.inf}
    done = WaitingCompletion([5, 7], [-0.1, math.nan], [(3, 1), (4, 1)], whole=True)
    groups = [
        WaitingGroup(row, [1, 2], 9, (done, WaitingCompletion([], [], [], whole=False))),
        begin({"prompt": "a"}, [1], 8, 2),
    ]
    write_groups(tmp_path, groups)
    assert repr(read_groups(tmp_path, torch.device("cpu"))).replace("[3, 1], [4, 1]", "(3, 1), (4, 1)") == repr(groups)


def test_segments_of_one_policy_are_one() -> None:
    one = WaitingCompletion([], [], [], whole=False)
    for segment, version in ((Segment([1, 2], [-1.0, None], False), 4), (Segment([3], [-3.0], False), 4)):
        one = one.continued(segment, version, room=4)
        assert not one.whole
    one = one.continued(Segment([9], [-4.0], False), 6, room=4)  # and no more room
    assert (one.ids, one.segments, one.whole) == ([1, 2, 3, 9], [(4, 3), (6, 1)], True)
    assert math.isnan(one.logprobs[1])
    assert [one.logprobs[n] for n in (0, 2, 3)] == [-1.0, -3.0, -4.0]


def test_a_row_that_no_checkpoint_could_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`rollout.cut_after` keeps.*row\['image'\] is a builtins.object.*drop"):
        begin({"prompt": "a", "image": object()}, [1], 8, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_vllm": False}, r"`rollout.cut_after`.*without `use_vllm` transformers' `generate` hands out none"),
    ({"rollout": {"cut_after": 4, "overlap": 1}, "vllm_mode": "server"}, r"`rollout.overlap`.*`rollout.cut_after`"),
    ({"vllm_importance_sampling_correction": False}, r"`rollout.cut_after`.*as if they were the policy's"),
    ({"vllm_importance_sampling_mode": "sequence_mask"}, r"sequence_mask.*`rollout.cut_after`.*token_truncate"),
    ({"max_completion_length": 4}, r"`rollout.cut_after` is 4 and `max_completion_length` is 4.*ever be put aside"),
    ({"max_completion_length": None}, r"`rollout.cut_after` needs `max_completion_length`"),
    ({"rollout": {"cut_after": 4, "thinking_budget": 8}}, r"thinking_budget.*rollout.cut_after"),
    ({"update": {"dead_groups": "resample"}}, r"resample.*rollout.cut_after"),
    ({"sampler": "prioritized"}, r"`sampler`='prioritized'.*rollout.cut_after"),
    ({"top_p": 0.9}, r"`top_p`=0.9.*renormalised"),
    ({"generation_kwargs": {"stop": ["x"]}}, r"`generation_kwargs.stop`"),
    ({"rollout": {"cut_after": 0}}, r"`rollout.cut_after` is 0; it must be a number of tokens"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_it_cannot_stand_beside_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"use_vllm": True, "rollout": {"cut_after": 4}, "max_completion_length": 64}
    with pytest.raises(ValueError, match=said):
        LabConfig(str(tmp_path), use_cpu=True, bf16=False, objective="dr_grpo", **{**settings, **changes})


def test_rollouts_in_turns_are_refused(tiny: Any, tmp_path: Path) -> None:
    def of_a_team(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise AssertionError

    with (
        stand_in(tiny[0]),
        pytest.raises(ValueError, match=r"`rollout.cut_after` does not combine with `rollout_func`"),
    ):
        build(tmp_path, copy.deepcopy(tiny[0]), tiny[1], rollout_func=of_a_team, **PARTIAL)


def end(folder: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}.end").read_text()))


@pytest.mark.thorough(but="24")
@pytest.mark.slow
@pytest.mark.parametrize("steps", [24, 200])
def test_killed_twice_and_resumed_it_is_the_run_that_was_not(steps: int, saved: Path, tmp_path: Path) -> None:
    """SIGKILL with groups that wait, two steps a generation batch: one checkpoint is inside of one. Every step's rows,
    log-probs and versions, and the last weights."""
    settings = {
        **PARTIAL, "max_steps": steps, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "save_total_limit": 1, "learning_rate": 0.5,
    }  # fmt: skip
    kills = (5, 3 * steps // 4)
    for kill_at in (*kills, 0):
        words = spec(
            tmp_path / "killed", saved, ends=0.2, settings=settings, kill_at=kill_at, resume=kill_at != kills[0]
        )
        assert forked.run(words).returncode == (0 if kill_at == 0 else -9)
    assert forked.run(spec(tmp_path / "whole", saved, ends=0.2, settings=settings)).returncode == 0
    assert written(tmp_path / "killed") == written(tmp_path / "whole")
    assert end(tmp_path / "killed")["weights"] == end(tmp_path / "whole")["weights"]
    counted = Counter(prompt for step in written(tmp_path / "killed")[:24] for prompt in step["prompts"])
    assert (len(counted), set(counted.values())) == (24, {4})


@pytest.mark.slow
def test_two_ranks(saved: Path, tmp_path: Path) -> None:
    """Each has half of the rows of the same groups, and the same weights at the end; killed and resumed likewise."""
    settings = {
        **PARTIAL, "max_steps": 12, "per_device_train_batch_size": 4, "ddp_timeout": 600, "learning_rate": 1.0,
        "save_strategy": "steps", "save_steps": 6,
    }  # fmt: skip
    accelerate_launch(RECIPES / "ddp.yaml", 2, spec(tmp_path / "whole", saved, ends=0.2, settings=settings))
    (tmp_path / "half").mkdir()
    half = str(tmp_path / "whole" / "out" / "checkpoint-6")
    accelerate_launch(RECIPES / "ddp.yaml", 2, spec(tmp_path / "half", saved, ends=0.2, settings=settings, resume=half))
    ends = [end(tmp_path / "whole", rank) for rank in (0, 1)]
    assert [one["end"] for one in ends] == ["", ""]
    assert ends[0]["weights"] == ends[1]["weights"] == end(tmp_path / "half")["weights"]
    assert ends[1]["said"] == []
    both = [written(tmp_path / "whole", rank) for rank in (0, 1)]
    assert [written(tmp_path / "half", rank) for rank in (0, 1)] == [rows[6:] for rows in both]
    counted = Counter(prompt for rows in both for step in rows for prompt in step["prompts"])
    assert (len(counted), set(counted.values())) == (24, {4})
    for mine, theirs in zip(*both, strict=True):
        assert Counter(mine["prompts"] + theirs["prompts"]).most_common()[-1][1] == 4
