"""``rollout: {overlap: 1}``: who sampled what is read from the rows and from the engine, which counts its syncs.

The engine is a stand-in behind our client (``stand_in.py``), which refuses weights and requests while it generates;
with a real server: ``test_overlap_live.py``.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_lab.testing import tiny_model
from rollouts.overlap_runs import Rows, build, rows_drawn
from rollouts.stand_in import stand_in


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model("qwen2", hidden_size=32, num_heads=2, num_layers=2, initializer_range=0.1)


def trained(folder: Path, tiny: Any, **changes: Any) -> tuple[Any, Rows, Any]:
    """(trainer, its rows, engine) after a training."""
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    with stand_in(model) as engine:
        trainer = build(folder, model, tokenizer, **changes)
        rows = Rows(trainer)
        trainer.train()
    return trainer, rows, engine


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def test_staleness_is_one_generation_batch_by_the_rows_and_by_the_engine(tiny: Any, tmp_path: Path) -> None:
    trainer, rows, engine = trained(tmp_path, tiny)
    assert rows.versions == [0, 0, 1, 2, 3, 4]  # the first is generated then and there
    for version, step in zip(rows.versions, rows.steps, strict=True):
        drawn = rows_drawn(engine, step["fields"])
        assert {syncs for syncs, _ in drawn} == {version + 1}  # step s begins with sync s + 1
        for (_, scores), carried in zip(drawn, step["fields"]["sampling_per_token_logps"], strict=True):
            torch.testing.assert_close(carried[: len(scores)], torch.tensor(scores))
    assert column(trainer, "rollout/staleness") == [0, 1, 1, 1, 1, 1]
    assert trainer.args.vllm_importance_sampling_mode == "token_truncate"
    assert {"sampling/kept_share/len_q4", "sampling/ratio_mean/len_q4"} <= set(trainer.state.log_history[1])


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


def log_probs(model: Any, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """``[B, T]`` in float64, 0 where there is no token; row by row, without padding."""
    found = torch.zeros(fields["completion_ids"].shape, dtype=torch.float64)
    for row, (prompt, seen, ids, mask) in enumerate(
        zip(*(fields[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True)
    ):
        prompt, ids = prompt[seen.bool()], ids[mask.bool()]
        logits = model(torch.cat([prompt, ids]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        found[row, : len(ids)] = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    return found


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


def test_against_a_float64_loop_with_the_stale_samplers_log_probs(tiny: Any, tmp_path: Path) -> None:
    """Six steps within 1e-5. The loop's sampler is its own policy of one step before, so staleness is in the numbers,
    too; without the correction the same loop ends elsewhere."""
    bound = {"vllm_importance_sampling_clip_max": 1.1}
    trainer, rows, _ = trained(tmp_path, tiny, **bound)
    arguments = {"rate": 5.0, "cap": 1.1, "limit": 6}
    right, wrong = (copy.deepcopy(tiny[0]).double().eval() for _ in range(2))
    gaps = loop(right, rows.steps, True, **arguments)  # type: ignore[arg-type]
    loop(wrong, rows.steps, False, **arguments)  # type: ignore[arg-type]
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in trainer.state.log_history if "loss" in row]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert max(ratios[1:]) == pytest.approx(1.1)  # the bound acts
    assert max(gaps) < 1e-5
    assert farthest(right, trainer) < 1e-5
    assert farthest(wrong, trainer) > 1e-3
