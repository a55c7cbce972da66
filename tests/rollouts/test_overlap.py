"""``rollout: {overlap: 1}``: who sampled what is read from the rows and from the engine, which counts its syncs.

The engine is a stand-in behind our client (``stand_in.py``), which refuses weights and requests while it generates;
with a real server: ``test_overlap_live.py``.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import forked
from distributed.launch import RECIPES, accelerate_launch
from grpo_lab import LabConfig
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.background import BackgroundRequest
from grpo_lab.trainer.generation.read_ahead import ReadAhead
from rollouts.overlap_runs import Rows, build, column, log_probs, rows_drawn, spec, written
from rollouts.stand_in import stand_in


def trained(folder: Path, tiny: Any, **changes: Any) -> tuple[Any, Rows, Any]:
    """(trainer, its rows, engine) after a training."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    with stand_in(model) as engine:
        trainer = build(folder, model, tokenizer, **changes)
        rows = Rows(trainer)
        trainer.train()
    return trainer, rows, engine


@pytest.mark.not_fast
def test_staleness_is_one_generation_batch_by_the_rows_and_by_the_engine(tiny: Any, tmp_path: Path) -> None:
    trainer, rows, engine = trained(tmp_path, tiny)
    assert rows.versions == [0, 0, 1, 2, 3, 4]  # the first is generated then and there
    for version, step in zip(rows.versions, rows.steps, strict=True):
        drawn = rows_drawn(engine, step["fields"])
        assert {syncs for syncs, _ in drawn} == {version + 1}  # step s begins with sync s + 1
        for (_, scores), carried in zip(drawn, step["fields"]["sampling_per_token_logps"], strict=True):
            torch.testing.assert_close(carried[: len(scores)], torch.tensor(scores))
    assert column(trainer, "rollout/staleness") == [0, 1, 1, 1, 1, 1]
    waited = column(trainer, "rollout/waited_s")
    assert waited[0] == 0  # nothing was begun before the first
    assert all(seconds >= 0 for seconds in waited)
    assert trainer.args.vllm_importance_sampling_mode == "token_truncate"
    assert {"sampling/kept_share/len_q4", "sampling/ratio_mean/len_q4"} <= set(trainer.state.log_history[1])


@pytest.mark.not_fast
def test_what_is_said_to_the_engine_and_when(tiny: Any, tmp_path: Path) -> None:
    """Wait, sync, prove, ask for the next; every prompt of the training is asked for once, and none in vain."""
    _, _, engine = trained(tmp_path, tiny, max_steps=3)
    first = ["sync 1", "generate 1", "done 1", "probe 1", "done 1"]
    later = [
        "generate 1",
        "done 1",
        "sync 2",
        "probe 2",
        "done 2",
        "generate 2",
        "done 2",
        "sync 3",
        "probe 3",
        "done 3",
    ]
    assert engine.said == first + later


@pytest.mark.not_fast
def test_the_next_batch_is_generated_while_this_one_trains(tiny: Any, tmp_path: Path) -> None:
    """Its generation ends after the optimizer step: whoever waited for it before would wait for ever."""
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        trainer = build(tmp_path, model, tiny[1], max_steps=3)
        engine.gates = {2: threading.Event(), 3: threading.Event()}

        class Opens(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step < 3:
                    assert engine.generations == state.global_step + 1 or not engine.busy
                    engine.gates[state.global_step + 1].set()

        trainer.add_callback(Opens())
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.not_fast
def test_with_learning_rate_0_it_is_the_synchronous_training(tiny: Any, tmp_path: Path) -> None:
    """Equal to the bit: same prompts in the same order, same completions, losses and gradients."""
    same = {"learning_rate": 0.0, "vllm_importance_sampling_mode": "token_truncate"}
    ahead, rows, _ = trained(tmp_path / "ahead", tiny, **same)
    now, others, _ = trained(tmp_path / "now", tiny, **same, rollout={"verify_every": 1})
    assert [step["prompts"] for step in rows.steps] == [step["prompts"] for step in others.steps]
    for step, other in zip(rows.steps, others.steps, strict=True):
        assert step["fields"].keys() == other["fields"].keys()
        for name, value in step["fields"].items():
            if "policy_version" not in name:
                assert torch.equal(value, other["fields"][name]), name
    for name in ("loss", "grad_norm", "reward"):
        assert column(ahead, name) == column(now, name)
    assert max(column(ahead, "grad_norm")) > 0
    assert others.versions == [0, 1, 2, 3, 4, 5]
    assert "rollout/staleness" not in now.state.log_history[0]


def loop(model: Any, steps: list[dict[str, Any]], corrected: bool, rate: float, cap: float, limit: int) -> list[float]:
    """Dr. GRPO by SGD in float64 on the completions of ``steps``, each sampled by the policy of the step before; the
    largest |behaviour − what the trainer carries| of each step. ``model`` ends as the last step leaves it."""
    before, gaps = copy.deepcopy(model), list[float]()
    for step in steps:
        fields = step["fields"]
        with torch.no_grad():
            behaviour = log_probs(before, fields)
        gaps.append(float((behaviour - fields["sampling_per_token_logps"] * fields["completion_mask"]).abs().max()))
        logps = log_probs(model, fields)
        weights = (logps.detach() - behaviour).exp().clamp(max=cap) if corrected else 1.0
        surrogate = weights * (logps - logps.detach()).exp() * fields["advantages"].double().unsqueeze(1)
        loss = -(surrogate * fields["completion_mask"]).sum() / (len(logps) * limit)
        before = copy.deepcopy(model)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
    return gaps


def farthest(model: Any, trainer: Any) -> float:
    mine, theirs = dict(model.named_parameters()), dict(trainer.model.named_parameters())
    return max(float((mine[name] - theirs[name].double()).detach().abs().max()) for name in mine)


@pytest.mark.not_fast
def test_against_a_float64_loop_with_the_stale_samplers_log_probs(tiny: Any, tmp_path: Path) -> None:
    """Twelve steps within 1e-5. The loop's sampler is its own policy of one step before, so staleness is in the
    numbers, too; without the correction the same loop ends far off."""
    bound: dict[str, Any] = {"vllm_importance_sampling_clip_max": 1.1}
    trainer, rows, _ = trained(tmp_path, tiny, **bound, max_steps=12)
    right, wrong = (copy.deepcopy(tiny[0]).double().eval() for _ in range(2))
    gaps = loop(right, rows.steps, True, rate=5.0, cap=1.1, limit=6)
    loop(wrong, rows.steps, False, rate=5.0, cap=1.1, limit=6)
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in trainer.state.log_history if "loss" in row]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert max(ratios[1:]) == pytest.approx(1.1)  # the bound acts
    assert max(gaps) < 1e-5
    assert farthest(right, trainer) < 1e-5
    assert farthest(wrong, trainer) > 1e-2


@pytest.mark.not_fast
def test_each_epoch_begins_with_a_batch_of_its_own_step(tiny: Any, tmp_path: Path) -> None:
    """12 batches an epoch; after its end nobody knows the next one's prompts."""
    _, rows, engine = trained(tmp_path, tiny, max_steps=15)
    assert rows.versions == [0, *range(11), 12, 12, 13]
    assert engine.generations == 15
    prompts = [prompt for step in rows.steps[:12] for prompt in set(step["prompts"])]
    assert len(prompts) == len(set(prompts)) == 24


@pytest.mark.not_fast
def test_a_batch_that_serves_several_steps(tiny: Any, tmp_path: Path) -> None:
    """Two steps a pass, two passes: the sampler is one generation batch older, which is four optimizer steps."""
    shape = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 12}
    trainer, rows, engine = trained(tmp_path, tiny, **shape, learning_rate=1.0)
    assert rows.versions == [0] * 4 + [0] * 4 + [4] * 4
    assert engine.generations == 3
    assert [value for value in (row.get("rollout/staleness") for row in trainer.state.log_history) if value] == [4, 4]


@pytest.mark.not_fast
@pytest.mark.parametrize("changes", [{"objective": None}, {"chat": True}, {"update": "off"}], ids=str)
def test_with_trls_own_loss_and_with_chats(changes: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    trainer, rows, _ = trained(tmp_path, tiny, max_steps=3, **changes)
    assert rows.versions == [0, 0, 1]
    ratios = column(trainer, "sampling/importance_sampling_ratio/max")
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert min(ratios[1:]) > 1.01


@pytest.mark.not_fast
def test_two_generation_batches_in_one_step(tiny: Any, tmp_path: Path) -> None:
    """The second batch of each step was asked for in it, by the same weights."""
    trainer, _, engine = trained(tmp_path, tiny, steps_per_generation=1, gradient_accumulation_steps=2, max_steps=3)
    assert column(trainer, "rollout/staleness") == [0, 0.5, 0.5]
    assert [said for said in engine.said if "generate" in said] == [f"generate {n}" for n in (1, 1, 1, 2, 2, 3)]


@pytest.mark.not_fast
def test_an_evaluation_in_between_waits_and_changes_nothing(tiny: Any, tmp_path: Path) -> None:
    """Its sync comes when the running batch is done (the engine would refuse it); the answer is kept."""
    with_it, rows, engine = trained(
        tmp_path / "with", tiny, eval_strategy="steps", eval_steps=2, num_generations_eval=2
    )
    without, others, _ = trained(tmp_path / "without", tiny)
    assert rows.versions == others.versions
    for step, other in zip(rows.steps, others.steps, strict=True):
        rows_of_both = [one["fields"]["completion_ids"].tolist() for one in (step, other)]
        assert sorted(rows_of_both[0]) == sorted(rows_of_both[1])  # its data loader draws a number: another order
    assert column(with_it, "loss") == pytest.approx(column(without, "loss"), rel=1e-3)
    assert sum("eval_loss" in row for row in with_it.state.log_history) == 3
    assert engine.generations > 6


@pytest.mark.not_fast
def test_an_error_in_the_background_ends_the_run_with_its_reason(tiny: Any, tmp_path: Path) -> None:
    """Of the third batch, begun in the first step: met where its completions are wanted, in the third."""
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        engine.faults["generate 3"] = ServerGone("it went")
        trainer = build(tmp_path, model, tiny[1], save_strategy="steps")
        with pytest.raises(ServerGone, match=r"it went.*A checkpoint of step 2 was written"):
            trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.not_fast
@pytest.mark.parametrize("fault", ["generate 3", "sync 3"])
def test_a_server_that_comes_back_is_asked_again(fault: str, tiny: Any, tmp_path: Path) -> None:
    """The lost batch is asked for with the weights of its step, the proof before it; then ahead as before."""
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        engine.faults[fault] = ServerGone("it went")
        server = {"return_timeout": 60}
        trainer = build(tmp_path, model, tiny[1], rollout={"overlap": 1, "verify_every": 1, "server": server})
        rows = Rows(trainer)
        trainer.train()
    assert rows.versions == [0, 0, 2, 2, 3, 4]
    assert sum(column(trainer, "rollout/server_returns")) == 1
    after = engine.said[engine.said.index("wait") :]
    assert after[1].startswith("sync")
    assert after[2].startswith("probe")
    prompts = [prompt for step in rows.steps for prompt in set(step["prompts"])]
    assert len(prompts) == len(set(prompts)) == 12


@pytest.mark.not_fast
def test_weights_that_do_not_arrive_are_found_before_the_next_batch_is_begun(tiny: Any, tmp_path: Path) -> None:
    """The third sync brings nothing: the proof right after it ends the run, before another generation."""
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        load, sent = engine.load, [0]

        def lost(named: Any) -> None:
            sent[0] += 1
            load(engine.model.state_dict().items() if sent[0] == 3 else named)

        engine.load = lost  # type: ignore[method-assign]
        trainer = build(tmp_path, model, tiny[1])
        with pytest.raises(WeightSyncError, match="gap"):
            trainer.train()
    assert trainer.state.global_step == 2
    assert engine.generations == 3
    assert engine.said[-2:] == ["probe 3", "done 3"]


@pytest.mark.not_fast
def test_a_second_training_takes_nothing_of_the_first(tiny: Any, tmp_path: Path) -> None:
    """A run that a callback ends leaves a request behind; the next begins with a batch of its own."""
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        trainer = build(tmp_path, model, tiny[1])

        class Ends(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = state.global_step == 2

        trainer.add_callback(Ends())
        trainer.train()
        assert engine.generations == 3
        rows = Rows(trainer)
        trainer.train()
    assert rows.versions == [0, 0]


@pytest.mark.thorough(but="two")
@pytest.mark.slow
@pytest.mark.parametrize("kills", [(6, 13), (2, 3, 7, 8, 9, 12, 15, 18, 21, 23)], ids=["two", "ten"])
def test_killed_and_resumed_every_prompt_is_trained_on_once(
    kills: tuple[int, ...], saved: Path, tmp_path: Path
) -> None:
    """SIGKILL with the next batch in the engine. One epoch, two steps a batch: a checkpoint inside of one, too.
    What was asked for and not trained on is asked for again."""
    settings = {
        "max_steps": 24, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "save_total_limit": 1,
    }  # fmt: skip
    for kill_at in (*kills, 0):
        words = spec(tmp_path, saved, settings=settings, kill_at=kill_at, resume=kill_at != kills[0])
        assert forked.run(words).returncode == (0 if kill_at == 0 else -9)
    steps = written(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, 25))
    counted = Counter(prompt for step in steps for prompt in step["prompts"])
    assert len(counted) == 24
    assert set(counted.values()) == {4}
    versions = [step["versions"][0] for step in steps]
    ahead = [max(2 * (number // 2) - 2, 0) for number in range(24)]
    for kill_at in kills:  # the first batch that is made after a kill: of its own step
        made = kill_at + kill_at % 2
        ahead[made : made + 2] = [made] * len(ahead[made : made + 2])
    assert versions == ahead


@pytest.mark.slow
def test_two_ranks_and_a_failed_sync(saved: Path, tmp_path: Path) -> None:
    """Only rank 0 talks to the engine, beside the training; the others have their rows, versions and weights. A sync
    that fails ends both with the same error."""
    settings = {"per_device_train_batch_size": 4, "ddp_timeout": 600}
    for name, more in {"whole": {}, "fails": {"fault": "sync 3"}}.items():
        words = spec(tmp_path / name, saved, settings=settings, **more)
        accelerate_launch(RECIPES / "ddp.yaml", 2, words)
    ends = [
        [json.loads((tmp_path / name / f"rank-{r}.end").read_text()) for r in (0, 1)] for name in ("whole", "fails")
    ]
    assert [end["world"] for end in ends[0]] == [2, 2]
    assert [end["end"] for end in ends[0]] == ["", ""]
    assert ends[0][1]["said"] == []
    assert ends[0][0]["weights"] == ends[0][1]["weights"]
    assert ends[0][0]["said"].count("generate 1") == 2
    for rank in (0, 1):
        assert [step["versions"] for step in written(tmp_path / "whole", rank)] == [[n] * 4 for n in (0, 0, 1, 2, 3, 4)]
        assert "WeightSyncError: planted" in ends[1][rank]["end"]
        assert len(written(tmp_path / "fails", rank)) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_vllm": False}, r"overlap.*without `use_vllm` the completions come from the model in training"),
        ({"vllm_mode": "colocate"}, r"overlap.*shares the trainer's process.*vllm_mode: server"),
        ({"vllm_importance_sampling_correction": False}, r"weigh them as if they were the policy's"),
        (
            {"vllm_importance_sampling_mode": "sequence_mask"},
            r"sequence_mask.*the longer the completion.*token_truncate",
        ),
        ({"top_p": 0.9}, r"`top_p`=0.9.*renormalised"),
        ({"repetition_penalty": 1.1}, r"`repetition_penalty`=1.1.*renormalised"),
        ({"update": {"dead_groups": "resample"}}, r"resample.*rollout.overlap"),
        ({"rollout": {"overlap": 1, "thinking_budget": 8}}, r"thinking_budget.*rollout.overlap"),
        ({"sampler": "prioritized"}, r"`sampler`='prioritized'.*one generation batch early"),
        ({"rollout": {"overlap": 2}}, r"`rollout.overlap` is 2; it must be 0, or 1"),
    ],
)
def test_what_overlap_cannot_stand_beside_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "rollout": {"overlap": 1}}
    with pytest.raises(ValueError, match=said):
        LabConfig(str(tmp_path), use_cpu=True, bf16=False, objective="dr_grpo", **{**settings, **changes})


def test_rollouts_in_turns_are_refused(tiny: Any, tmp_path: Path) -> None:
    def of_a_team(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise AssertionError

    model = copy.deepcopy(tiny[0])
    with stand_in(model), pytest.raises(ValueError, match=r"`rollout.overlap` does not combine with `rollout_func`"):
        build(tmp_path, model, tiny[1], rollout_func=of_a_team)


def test_another_batch_than_the_one_read_ahead_is_an_error() -> None:
    begun = BackgroundRequest(lambda: {"completion_ids": [[7]]}, [[1, 2]], version=0)
    with pytest.raises(RuntimeError, match="of other prompts"):
        begun.completions([[1, 3]])
    assert begun.completions([[1, 2]], n=1) == {"completion_ids": [[7]]}


def test_a_client_has_one_request_in_the_background(tiny: Any, tmp_path: Path) -> None:
    with stand_in(tiny[0]):
        client = build(tmp_path, copy.deepcopy(tiny[0]), tiny[1]).vllm_generation.vllm_client
        client.begin([[1, 2]], version=0, n=1, max_tokens=1)
        with pytest.raises(RuntimeError, match="not yet taken"):
            client.begin([[1, 2]], version=0, n=1, max_tokens=1)
        client.wait_until_idle()


def test_read_ahead_gives_what_the_loop_asks_for_and_no_more() -> None:
    ahead, source = ReadAhead(2), iter(range(5))
    assert list(ahead.read(source, 2, 10)) == [0, 1]
    assert [ahead.rows(number) for number in (10, 11, 12, 13, 14)] == [0, 1, 2, 3, None]
    assert list(ahead.read(source, 2, 12)) == [2, 3]
    assert list(ahead.read(source, 2, 14)) == [4]
    assert ahead.rows(15) is None
    assert list(ahead.read(source, 2, 15)) == []
    assert list(ahead.read(iter("ab"), 1, 15)) == ["a"]
    assert ahead.rows(16) == "b"


@pytest.mark.not_fast(but="sync-0")
@pytest.mark.parametrize(("place", "overlap"), [("sync", 0), ("sync", 1), ("proof", 0)])
def test_ctrl_c_is_heard_where_a_server_stands_still(place: str, overlap: int, tiny: Any, tmp_path: Path) -> None:
    """At once, with a checkpoint of the last step; before, when the request had failed: after `silence_timeout`, which
    no scheduler waits for."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    with stand_in(model):
        rollout = {"overlap": overlap, "verify_every": int(place == "proof")}
        trainer = build(tmp_path, model, tokenizer, rollout=rollout, save_strategy="steps", save_steps=100)
        client = trainer.vllm_generation.vllm_client
        owner, name = (client.courier, "push") if place == "sync" else (client, "probe")
        asks = getattr(owner, name)
        calls = itertools.count()

        def stands_still(what: Any) -> Any:
            if next(calls) == 2:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                threading.Event().wait(8)  # as the main thread waits for an answer
            return asks(what)

        setattr(owner, name, stands_still)
        with pytest.raises(KeyboardInterrupt, match=r"interrupted after step 2; a checkpoint was written"):
            trainer.train()
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()


@pytest.mark.not_fast
def test_a_mixture_asks_ahead_for_its_tasks_by_their_weights(tiny: Any, tmp_path: Path) -> None:
    tasks = {"odd": {"objective": "dapo"}, "third": {"denominators": "own"}}
    trainer, rows, _ = trained(tmp_path, tiny, tasks=tasks)
    assert rows.versions == [0, 0, 1, 2, 3, 4]
    assert all(Counter(step["fields"]["grpo_lab.task"].tolist()) == {0: 4, 1: 4} for step in rows.steps)
    assert column(trainer, "tasks/third/prompt_share") == [0.5] * 6
