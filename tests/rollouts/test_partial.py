"""``rollout: {cut_after: c}``: what was sampled, by whom, is read from a stand-in engine (``stand_in.py``) that draws
each token by what stands before it, and is set beside what was trained on. With a real vLLM: ``test_partial_vllm.py``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_lab.engines.vllm.talk import ServerGone
from rollouts.overlap_runs import PROMPTS, Rows, Weights, build, column, copied, log_probs
from rollouts.stand_in import Engine, ends_at_random, stand_in

CUT, LONGEST = 3, 8
PARTIAL = {"rollout": {"cut_after": CUT, "verify_every": 1}, "max_completion_length": LONGEST}


def trained(
    folder: Path, tiny: Any, stop: Callable[..., bool] | None = None, **changes: Any
) -> tuple[Any, Any, Engine]:
    """(trainer, its rows, engine) after a training."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    with stand_in(model) as engine:
        engine.stop, engine.end = stop or ends_at_random(0.2), tokenizer.eos_token_id
        trainer = build(folder, model, tokenizer, **{**PARTIAL, **changes})
        engine.step = lambda: int(trainer.state.global_step)
        rows = Weights(trainer) if stop else Rows(trainer)
        trainer.train()
    return trainer, rows, engine


def trained_rows(steps: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[int, ...], list[float], int, int]]:
    """(prompt, completion, log-probs of its sampler, version, step) of each row."""
    found = []
    for step in steps:
        fields = step["fields"]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps")
        for prompt, seen, ids, mask, told, version in zip(
            *(fields[name] for name in names), step["versions"], strict=True
        ):
            length = int(mask.sum())
            assert mask[:length].all()  # grown with each segment, without a hole
            row = tuple(prompt[seen.bool()].tolist()), tuple(ids[:length].tolist())
            found.append((*row, told[:length].tolist(), version, step["step"]))
    return found


class Drawn:
    """What the engine drew and nobody has accounted for yet."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.left = engine, defaultdict[tuple[int, ...], list[Any]](list)
        for before, *segment in engine.segments:
            self.left[before].append(segment)

    def take(self, prompt: tuple[int, ...], ids: tuple[int, ...], told: list[float]) -> tuple[list[int], list[int]]:
        """(the step that each token was drawn at, tokens of each call) of a completion whose tokens the engine drew
        with these log-probs (float64 there, float32 here); each call is taken once."""
        steps, calls = list[int](), list[int]()
        while len(steps) < len(ids):
            done = len(steps)
            at_hand = self.left[prompt + ids[:done]]
            found = [
                one
                for one in at_hand
                if one[0] == ids[done : done + len(one[0])]
                and one[1] == pytest.approx(told[done : done + len(one[0])], rel=1e-6)
            ]
            assert found, "tokens with log-probs that the engine did not tell, or a second time"
            at_hand.remove(found[0])
            steps += [self.engine.synced_at[found[0][2] - 1]] * len(found[0][0])
            calls.append(len(found[0][0]))
        return steps, calls

    @property
    def tokens(self) -> int:
        return sum(len(ids) for segments in self.left.values() for ids, *_ in segments)


def lengths(tokenizer: Any, wanted: dict[int, int]) -> Callable[[tuple[int, ...]], bool]:
    """A ``stop``: completions of prompt n have ``wanted[n]`` tokens (2 where it is not named), end token included."""
    prompts = {tuple(tokenizer(f"Tom has {n} apples. How many?")["input_ids"]): n for n in range(PROMPTS)}

    def stop(tokens: tuple[int, ...]) -> bool:
        (prompt,) = (ids for ids in prompts if tokens[: len(ids)] == ids)
        return len(tokens) - len(prompt) + 1 >= wanted.get(prompts[prompt], 2)

    return stop


@pytest.mark.not_fast
def test_two_segments_by_hand(tiny: Any, tmp_path: Path) -> None:
    """Segments of 3 tokens, batches of 2 prompts in the data's order; prompt 1 has completions of 8, all others of 2.

    batch 0:  begin 0, 1: 0 is whole, 1 has 3 tokens. Begin 2, 3: whole, 1 has 6. Three are whole: 0, 2 are trained on
    batch 1:  3 is whole, one is missing. Begin 4, 5: whole; 1 has its 8, two of them by the second policy. 1, 3
    batch 2:  4, 5 are whole and wait: no engine is asked. 4, 5
    """
    rate = 5.0
    trainer, rows, engine = trained(
        tmp_path, tiny, lengths(tiny[1], {1: 8}), max_steps=3, shuffle_dataset=False, learning_rate=rate
    )
    text = trainer.processing_class.decode
    prompts = [sorted({text(prompt).split()[2] for prompt, *_ in trained_rows([step])}) for step in rows.steps]
    assert prompts == [["0", "2"], ["1", "3"], ["4", "5"]]
    assert [set(step["versions"]) for step in rows.steps] == [{0}, {0}, {1}]
    assert column(trainer, "rollout/staleness") == [0, 1, 1]
    assert column(trainer, "rollout/segments") == [1, 1.5, 1]  # half of the second batch's rows have two
    assert column(trainer, "rollout/waiting") == [2, 2, 0]
    drawn = Drawn(engine)
    for prompt, ids, told, _, _ in trained_rows(rows.steps[1:2]):
        steps, calls = drawn.take(prompt, ids, told)
        assert (steps, calls) == (([0] * 6 + [1] * 2, [3, 3, 2]) if len(ids) == 8 else ([0, 0], [2]))
    fields = rows.steps[1]["fields"]
    assert sorted(fields["completion_mask"].sum(1).tolist()) == [2] * 4 + [8] * 4
    with torch.no_grad():
        first, second = (log_probs(policy, fields) for policy in rows.policies[:2])
    mask, carried = fields["completion_mask"].bool(), fields["sampling_per_token_logps"].double()
    both = torch.cat([first[:, :6], second[:, 6:]], dim=1)
    assert float((both - carried)[mask].abs().max()) < 1e-5  # float32 against float64
    for wrong in (first, second):  # one segment by the other's weights
        assert float((wrong - carried)[mask].abs().max()) > 1e-2
    # the ratio of each token is of the policy that drew it, so that of the second segment is 1
    ratio = (second - both).exp()
    assert torch.equal(ratio[:, 6:], torch.ones_like(ratio[:, 6:]))
    right, wrong = (copied(rows.policies[1]) for _ in range(2))
    for model, behaviour in ((right, both), (wrong, second)):
        one_step(model, fields, behaviour, rate)
    after = dict(rows.policies[2].named_parameters())
    gaps = [
        max(float((w - after[n]).detach().abs().max()) for n, w in model.named_parameters()) for model in (right, wrong)
    ]
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-4


def one_step(model: Any, fields: dict[str, torch.Tensor], behaviour: torch.Tensor, rate: float) -> None:
    """Dr. GRPO by SGD in float64: −Σ min(π/μ, 3) · (π/π) · A / (B · T)."""
    logps = log_probs(model, fields)
    weights = (logps.detach() - behaviour).exp().clamp(max=3.0)
    surrogate = weights * (logps - logps.detach()).exp() * fields["advantages"].double().unsqueeze(1)
    loss = -(surrogate * fields["completion_mask"]).sum() / (len(logps) * LONGEST)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= rate * weight.grad


def is_whole(ids: tuple[int, ...], end: int) -> bool:
    return len(ids) == LONGEST or ids[-1] == end


def check_books(steps: list[dict[str, Any]], engine: Engine, epochs: float) -> None:
    """Nothing is lost or doubled: every token that was sampled is trained on once, with its log-prob."""
    rows = trained_rows(steps)
    assert all(is_whole(ids, engine.end) for _, ids, *_ in rows)
    drawn = Drawn(engine)
    assert sum(len(ids) for _, ids, *_ in rows) == drawn.tokens
    for prompt, ids, told, version, step in rows:
        drawn_at, _ = drawn.take(prompt, ids, told)
        assert version == drawn_at[0]
        assert drawn_at == sorted(drawn_at)
        assert drawn_at[-1] < step  # steps are counted from 1
        assert step - 1 - version <= math.ceil(LONGEST / CUT)  # one step a generation batch
    assert drawn.tokens == 0
    batches = round(epochs * PROMPTS / 2)
    for start in range(0, batches, PROMPTS // 2):
        epoch = steps[start : start + PROMPTS // 2]
        counted = Counter(prompt for step in epoch for prompt in step["prompts"])
        assert set(counted.values()) == {4}  # a group, and whole groups alone: both are in one step
        assert all(set(Counter(step["prompts"]).values()) == {4} for step in epoch)
        assert len(counted) == 2 * len(epoch)


@pytest.mark.not_fast
def test_two_epochs_lose_and_double_nothing(tiny: Any, tmp_path: Path) -> None:
    trainer, rows, engine = trained(tmp_path, tiny, max_steps=24, learning_rate=1.0)
    check_books(rows.steps, engine, 2.0)
    waiting, segments = column(trainer, "rollout/waiting"), column(trainer, "rollout/segments")
    assert [waiting[n] for n in (11, 23)] == [0, 0]  # the end of each epoch
    assert max(waiting) > 0
    assert max(segments) > 1.2
    versions = [step["versions"] for step in rows.steps]
    told = [sum(number - v for v in row) / len(row) for number, row in enumerate(versions)]
    assert column(trainer, "rollout/staleness") == pytest.approx(told)
    assert trainer.args.vllm_importance_sampling_mode == "token_truncate"


class Killed(Exception):
    pass


class KilledAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


@pytest.mark.thorough
@pytest.mark.slow
def test_200_steps_and_two_resumes_lose_and_double_nothing(tiny: Any, tmp_path: Path) -> None:
    """Killed in steps 75 and 143, gone on with from the checkpoints of 70 and 140: the books are of rows that count,
    and of what the engine drew for them. What waits at a checkpoint was drawn before it and is trained on after it."""
    steps, segments, synced_at, resume = list[Any](), list[Any](), list[int](), None
    for first, last, killed in ((0, 70, 75), (70, 140, 143), (140, 200, 0)):
        with stand_in(copy.deepcopy(tiny[0])) as engine:
            engine.stop, engine.end = ends_at_random(0.2), tiny[1].eos_token_id
            saved = {**PARTIAL, "save_strategy": "steps", "save_steps": 70, "max_steps": 200, "learning_rate": 0.5}
            trainer = build(tmp_path / str(first), copy.deepcopy(tiny[0]), tiny[1], **saved)
            engine.step = lambda of=trainer: int(of.state.global_step)
            rows = Rows(trainer)
            trainer.add_callback(KilledAt(killed))
            with pytest.raises(Killed) if killed else contextlib.nullcontext():
                trainer.train(resume_from_checkpoint=resume)
        counts = [sync for sync, step in enumerate(engine.synced_at, 1) if first <= step < last]
        shift = len(synced_at) + 1 - counts[0]
        segments += [(*drawn, sync + shift) for *drawn, sync in engine.segments if sync in counts]
        synced_at += [engine.synced_at[sync - 1] for sync in counts]
        steps += [step for step in rows.steps if first < step["step"] <= last]
        resume = str(tmp_path / str(first) / "out" / f"checkpoint-{last}")
    assert [step["step"] for step in steps] == [*range(1, 201)]
    books: Any = SimpleNamespace(segments=segments, synced_at=synced_at, end=tiny[1].eos_token_id)
    check_books(steps, books, 200 / 12)


@pytest.mark.not_fast
def test_the_oldest_are_trained_on_first(tiny: Any, tmp_path: Path) -> None:
    """All completions of 2 tokens but those of prompt 0, of 8: it waits for its third segment alone, and the others
    come in the loader's order."""
    _, rows, _ = trained(tmp_path, tiny, lengths(tiny[1], {0: 8}), max_steps=12, shuffle_dataset=False)
    order = [sorted({int(prompt.split()[2]) for prompt in step["prompts"]}) for step in rows.steps]
    assert order[:3] == [[1, 2], [0, 3], [4, 5]]
    assert order[3:] == [[n, n + 1] for n in range(6, 24, 2)]


@pytest.mark.not_fast
def test_the_end_of_the_training_is_an_end_of_waiting(tiny: Any, tmp_path: Path) -> None:
    """Five steps of an epoch of twelve: ten prompts are begun, and no other."""
    trainer, rows, engine = trained(tmp_path, tiny, max_steps=5)
    check_books(rows.steps, engine, 5 / 12)
    assert column(trainer, "rollout/waiting")[-1] == 0


@pytest.mark.not_fast
def test_with_learning_rate_0_the_same_rows_are_trained_on(tiny: Any, tmp_path: Path) -> None:
    """As without it, over an epoch: tokens, log-probs to rounding, advantages (a group's rewards alone make them)."""
    same = {"learning_rate": 0.0, "vllm_importance_sampling_mode": "token_truncate", "max_steps": 12}
    _, cut, _ = trained(tmp_path / "cut", tiny, **same)
    _, whole, _ = trained(tmp_path / "whole", tiny, **same, rollout={"verify_every": 1})
    both = []
    for rows in (cut, whole):
        advantages = [value for step in rows.steps for value in step["fields"]["advantages"].tolist()]
        found = zip(trained_rows(rows.steps), advantages, strict=True)
        both.append(sorted((prompt, ids, told, advantage) for (prompt, ids, told, *_), advantage in found))
    assert [row[:2] for row in both[0]] == [row[:2] for row in both[1]]
    for mine, theirs in zip(*both, strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], abs=1e-6)
    assert [step["prompts"] for step in cut.steps] != [step["prompts"] for step in whole.steps]


@pytest.mark.not_fast
def test_batches_that_serve_several_steps_and_steps_of_several_batches(tiny: Any, tmp_path: Path) -> None:
    several = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 24}
    trainer, rows, engine = trained(tmp_path / "several", tiny, **several, learning_rate=1.0)
    of_batches = [step for step in rows.steps if step["step"] % 4 in (1, 2)]  # the first of the two passes
    found = Counter((prompt, ids) for prompt, ids, *_ in trained_rows(of_batches))
    assert sum(found.values()) == 12 * 4
    assert sum(len(ids) * n for (_, ids), n in found.items()) == sum(len(ids) for _, ids, *_ in engine.segments)
    assert {version % 4 for step in rows.steps for version in step["versions"]} == {0}
    two = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 6}
    trainer, _, engine = trained(tmp_path / "two", tiny, **two)
    assert column(trainer, "num_tokens")[-1] == sum(len(ids) for _, ids, *_ in engine.segments) + 4 * sum(
        len(tiny[1](f"Tom has {n} apples. How many?")["input_ids"]) for n in range(PROMPTS)
    )


@pytest.mark.not_fast
@pytest.mark.parametrize("changes", [{"objective": None}, {"chat": True}, {"update": "off"}], ids=str)
def test_with_trls_own_loss_and_with_chats(changes: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    trainer, rows, engine = trained(tmp_path, tiny, max_steps=6, **changes)
    check_books(rows.steps, engine, 0.5)
    assert max(column(trainer, "rollout/segments")) > 1


@pytest.mark.not_fast
def test_an_evaluation_in_between_touches_nothing(tiny: Any, tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2}
    both = [
        trained(tmp_path / str(n), tiny, max_steps=6, learning_rate=0.0, **changes)
        for n, changes in enumerate((evaluated, {}))
    ]
    with_it, without = ([sorted(trained_rows([step])) for step in rows.steps] for _, rows, _ in both)
    assert with_it == without
    assert sum("eval_loss" in row for row in both[0][0].state.log_history) == 3


@pytest.mark.not_fast
def test_a_server_that_is_lost_leaves_the_groups_of_the_last_step(tiny: Any, tmp_path: Path) -> None:
    """In a call of the third step, whatever that step had had before: the resumed run is the one that lost nothing."""
    model, kept = copy.deepcopy(tiny[0]), []
    changes: dict[str, Any] = {**PARTIAL, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0}
    for fault in (None, ServerGone("it went")):
        folder = tmp_path / str(fault)
        with stand_in(model) as engine:
            engine.stop, engine.end = ends_at_random(0.2), tiny[1].eos_token_id
            trainer = build(folder, copy.deepcopy(tiny[0]), tiny[1], **changes)
            rows = Rows(trainer)
            if fault is None:
                calls = [0]

                class Counts(TrainerCallback):
                    def on_step_end(
                        self, *_: Any, engine: Engine = engine, calls: list[int] = calls, **__: Any
                    ) -> None:
                        calls.append(engine.generations)

                trainer.add_callback(Counts())
                trainer.train()
            else:
                assert calls[3] - calls[2] > 1  # the third step asks more than once: its second call fails
                engine.faults[f"generate {calls[2] + 2}"] = fault
                with pytest.raises(ServerGone, match=r"A checkpoint of step 2 was written"):
                    trainer.train()
                assert trainer.state.global_step == 2
                trainer.train(resume_from_checkpoint=True)
        kept.append([trained_rows([step]) for step in rows.steps])
    assert kept[0] == kept[1]


@pytest.mark.not_fast
def test_a_second_training_takes_nothing_of_the_first(tiny: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny[0])
    with stand_in(model) as engine:
        engine.stop, engine.end = lengths(tiny[1], dict.fromkeys(range(0, 24, 2), 8)), tiny[1].eos_token_id
        trainer = build(tmp_path, model, tiny[1], **PARTIAL)

        class Ends(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = state.global_step == 2

        trainer.add_callback(Ends())
        trainer.train()
        assert column(trainer, "rollout/waiting")[-1] > 0
        rows = Rows(trainer)
        trainer.train()
    assert rows.steps[0]["versions"] == [0] * 8


@pytest.mark.not_fast
def test_a_mixture_trains_on_what_is_whole_of_each_task(tiny: Any, tmp_path: Path) -> None:
    """Its tasks are begun by their weights; a group waits and is trained on under its task."""
    tasks = {"odd": {"objective": "dapo"}, "third": {"denominators": "own", "weight": 1}}
    trainer, rows, _ = trained(tmp_path, tiny, tasks=tasks, max_steps=8)
    third = {f"Tom has {n} apples. How many?" for n in range(0, PROMPTS, 3)}
    found = Counter[int]()
    for step in rows.steps:
        assert step["fields"]["grpo_lab.task"].tolist() == [int(prompt in third) for prompt in step["prompts"]]
        found.update(step["fields"]["grpo_lab.task"][::4].tolist())
    assert abs(found[0] - found[1]) <= 4  # of 16 groups; those that still wait are missing
    assert any("rollout/waiting" in row for row in trainer.state.log_history)
