"""``rollout: {cut_after: c}`` where something goes wrong: an answer without log-probs, a server that comes back, a
checkpoint at an unusual place, an engine with a smaller context. The stand-in engine draws each token by what stands
before it, so what is asked for again is the same again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.trainer.generation.partial import TURNS, PartialRollouts
from grpo_lab.trainer.generation.trl_engine import SyncProof
from grpo_lab.trainer.generation.waiting import Segment
from grpo_lab.trainer.ranks import NumbersError
from rollouts.overlap_runs import Rows, build
from rollouts.stand_in import Engine, stand_in
from rollouts.test_partial import LONGEST, PARTIAL, Drawn, lengths, trained_rows

BY_HAND: dict[str, Any] = {**PARTIAL, "max_steps": 3, "shuffle_dataset": False, "learning_rate": 0.0}


class Counts(TrainerCallback):
    """Tokens that are counted as generated, after each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.seen = trainer, list[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(self.trainer.generated_tokens)


def by_hand(
    folder: Path,
    tiny: Any,
    before: Callable[[Any, Engine], None] = lambda trainer, engine: None,
    resume: Path | None = None,
    context: int = 256,
    **changes: Any,
) -> tuple[Any, Rows, Engine, list[int]]:
    """A run in which completions of prompt 1 have 8 tokens, all others 2; segments of 3, and batches of 2 prompts:

    batch 0:  begin 0, 1; begin 2, 3. Trained on: 0, 2
    batch 1:  begin 4, 5. Trained on: 1, 3
    batch 2:  4, 5, without a call
    """
    with stand_in(tiny[0]) as engine:
        engine.stop, engine.end, engine.context = lengths(tiny[1], {1: LONGEST}), tiny[1].eos_token_id, context
        trainer = build(folder, copy.deepcopy(tiny[0]), tiny[1], **{**BY_HAND, **changes})
        rows, counts = Rows(trainer), Counts(trainer)
        trainer.add_callback(counts)
        before(trainer, engine)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, rows, engine, counts.seen


@pytest.fixture(scope="module")
def whole(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, trainer, rows, engine, tokens) of the run in which nothing goes wrong, with its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "out", *by_hand(folder, tiny, save_strategy="steps", save_steps=1)


def numbers(rows: Rows) -> list[list[int]]:
    return [sorted({int(prompt.split()[2]) for prompt in step["prompts"]}) for step in rows.steps]


def left_out(trainer: Any) -> list[float]:
    return [row.get("guard/left_out", 0.0) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.not_fast
def test_tokens_are_counted_when_they_are_written(whole: Any, tiny: Any, tmp_path: Path) -> None:
    """4 rows a prompt. Batch 0: 2 + 3 tokens of 0 and 1, then 2 + 2 + 3 of 2, 3 and 1: 4 · 12 = 48. Batch 1: 2 + 2 of
    4 and 5, the last 2 of 1: 4 · 6 more. A resumed run counts none of those that wait a second time."""
    folder, _, rows, engine, counted = whole
    assert numbers(rows) == [[0, 2], [1, 3], [4, 5]]
    assert counted == [48, 72, 72]
    assert counted[-1] == sum(len(ids) for _, ids, *_ in engine.segments)
    *_, after = by_hand(tmp_path, tiny, resume=folder / "checkpoint-1")
    assert after == [72, 72]


def faulty(*calls: int) -> Callable[[Any, Engine], None]:
    """The engine's log-probs are NaN at these requests; each is drawn once more, without them."""

    def plant(trainer: Any, engine: Engine) -> None:
        engine.faults |= {f"generate {call}": EngineFault("the engine returned log-prob nan") for call in calls}

    return plant


@pytest.mark.not_fast
def test_an_answer_without_log_probs_costs_one_batch(whole: Any, tiny: Any, tmp_path: Path) -> None:
    """In the second turn of batch 0, where 2, 3 are begun and 1 is gone on with: none of it is taken over. A third
    turn begins 4, 5, and asks for all others again. That batch is left out, and no other."""
    trainer, rows, engine, counted = by_hand(tmp_path, tiny, faulty(2))
    assert numbers(rows) == [[0, 2], [1, 3], [4, 5]]
    assert left_out(trainer) == [1, 0, 0]
    assert trained_rows(rows.steps)[0][4] == 1
    drawn = Drawn(engine)
    for prompt, ids, told, *_ in trained_rows(rows.steps):
        assert all(math.isfinite(value) for value in told)
        drawn.take(prompt, ids, told)
    assert drawn.tokens == 4 * (2 + 2 + 3)  # of the answer that nobody took
    of_both = [[row[:3] for row in trained_rows(one.steps)] for one in (rows, whole[2])]
    assert of_both[0] == of_both[1]
    assert counted == [92, 100, 100]  # 20, the 28 that nobody took, 28 again with 4 · 4 of 4 and 5; 4 · 2 of 1
    # before it is asked again the engine gets the weights anew, and clears its cache with them
    assert [engine.synced_at[:2], engine.said.count("sync 2")] == [[-1, -1], 1]


@pytest.mark.not_fast
def test_an_engine_that_never_gives_them_is_not_asked_for_ever(tiny: Any, tmp_path: Path) -> None:
    """Of 1 to 7 after three turns: 2 to 7 are whole then, and what trains on them is left out, three batches in a
    row."""
    assert TURNS == 3
    asked: list[Engine] = []

    def plant(trainer: Any, engine: Engine) -> None:
        faulty(2, 4, 6)(trainer, engine)
        asked.append(engine)

    with pytest.raises(NumbersError, match=r"^3 optimizer steps in a row .* log_prob not finite"):
        by_hand(tmp_path, tiny, plant, max_steps=6)
    assert not asked[0].faults


@pytest.mark.not_fast
def test_a_row_without_log_probs_is_asked_again_alone(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine in the process: of one row's tokens one has none, and all other rows are taken over."""
    real, calls = PartialRollouts._made, list[int]()

    def made(self: Any, rows: Any, limit: int) -> Any:
        found = real(self, rows, limit)
        calls.append(len(rows))
        if len(calls) == 1:
            ids, logprobs, ended = found[7]  # the last of prompt 1
            found[7] = Segment(ids, [*logprobs[:1], None, *logprobs[2:]], ended)
        return found

    monkeypatch.setattr(PartialRollouts, "_made", made)
    trainer, rows, engine, _ = by_hand(tmp_path, tiny)
    # 0, 1; 2, 3 and all of 1; then in batch 1 4, 5 and three of 1 for 2 tokens, the fourth for 3
    assert calls == [8, 12, 9, 3, 1]
    assert numbers(rows) == [[0, 2], [3, 4], [1, 5]]  # the fourth of 1 has six tokens in batch 1, and is whole in 2
    assert left_out(trainer) == [0, 0, 0]
    drawn = Drawn(engine)
    for prompt, ids, told, *_ in trained_rows(rows.steps):
        drawn.take(prompt, ids, told)
    assert drawn.tokens == 3


@pytest.mark.not_fast
def test_a_checkpoint_of_a_users_callback_is_of_its_step(whole: Any, tiny: Any, tmp_path: Path) -> None:
    """Written in ``on_step_end``, by a callback that was there before the trainer's own: the resumed run is the one
    that was not stopped. Before, it had the groups of one step before."""

    class Writes(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)

    def before(trainer: Any, engine: Engine) -> None:
        writes.trainer = trainer
        handler = trainer.callback_handler
        place = next(n for n, one in enumerate(handler.callbacks) if type(one).__name__ == "DefaultFlowCallback")
        handler.callbacks.insert(place + 1, writes)  # where transformers puts those of the constructor

    writes = Writes()
    by_hand(tmp_path / "writes", tiny, before)
    _, rows, *_ = by_hand(tmp_path / "resumed", tiny, resume=tmp_path / "writes" / "out" / "checkpoint-1")
    assert numbers(rows) == [[1, 3], [4, 5]]
    assert trained_rows(rows.steps) == trained_rows(whole[2].steps[1:])


@pytest.mark.not_fast
def test_a_server_that_came_back_is_proven_with_prompts(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost while prompt 1 and the three tokens after it are in the engine."""
    real, proven = SyncProof.prove, list[tuple[int, ...]]()

    def prove(self: Any, prompts: list[list[int]], *, strict: bool = False) -> None:
        proven.extend(tuple(ids) for ids in prompts if strict)
        real(self, prompts, strict=strict)

    monkeypatch.setattr(SyncProof, "prove", prove)

    def lose(trainer: Any, engine: Engine) -> None:
        engine.faults["generate 2"] = ServerGone("it went")

    rollout = {**PARTIAL["rollout"], "server": {"return_timeout": 5}}  # type: ignore[dict-item]
    _, rows, *_ = by_hand(tmp_path, tiny, lose, rollout=rollout)
    assert numbers(rows) == [[0, 2], [1, 3], [4, 5]]
    asked = {tuple(tiny[1](f"Tom has {n} apples. How many?")["input_ids"]) for n in (1, 2, 3)}
    assert set(proven) == asked


@pytest.mark.not_fast
def test_a_resume_with_an_engine_of_a_smaller_context(
    whole: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits may have had 8 tokens more than its prompt; one of a larger context is none the worse. Before, the
    run ended in its first turn with advice to shorten prompts. As with streamed data, which nobody reads beforehand."""
    monkeypatch.setattr("grpo_lab.trainer.step_components.check_training_prompts", lambda *_: None)
    needed = len(tiny[1]("Tom has 1 apples. How many?")["input_ids"]) + LONGEST
    again: dict[str, Any] = {"resume": whole[0] / "checkpoint-1"}
    again["rollout"] = {**PARTIAL["rollout"], "verify_every": 0}  # type: ignore[dict-item]  # a probe needs more room
    with pytest.raises(
        ValueError, match=rf"begun for {needed} tokens.*context is {needed - 1} tokens(.|\n)*`rollout.engine.max_model"
    ):
        by_hand(tmp_path / "smaller", tiny, context=needed - 1, **again)
    for context in (needed, 512):
        _, rows, *_ = by_hand(tmp_path / str(context), tiny, context=context, **again)
        assert numbers(rows) == [[1, 3], [4, 5]]
