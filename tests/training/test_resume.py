"""Resume inside a generation batch: the uninterrupted run and one resumed from each kind of checkpoint, to the bit.

Completions are sampled by the model itself (transformers' ``generate``), so a wrong random state, weight or batch shows
in every later completion. Compared: weights, the optimizer's moments, and every logged value but times.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import KimiTrainer, LabConfig, LabTrainer, PPOTrainer
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.testing import ScriptedRollout, tiny_model
from grpo_lab.trainer.resume.generation_buffer import rows_file
from grpo_lab.trainer.resume.state import STATE, read_state
from grpo_lab.trainer.resume.whole import MARK
from grpo_lab.trainer.row_table import POLICY_VERSION
from parity.harness import arguments, problems, with_entry

pytestmark = pytest.mark.slow

TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
TIMES += ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
TWO_STEPS = {"steps_per_generation": 4}  # of 2 micro-batches each
TWO_ITERATIONS = {"num_iterations": 2}


class Judge:
    """Some right, some wrong, some groups dead; remembers the problems of each generation batch."""

    __name__ = "accuracy_reward"
    measures_correctness = True

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(
        self, completion_ids: list[list[int]], number: list[int], log_extra: Any = None, **_: Any
    ) -> list[float]:
        self.seen.append(sorted(set(number)))
        if log_extra is not None:
            log_extra("first", [ids[0] for ids in completion_ids])
        return [0.0 if n % 5 == 0 else float(sum(ids) % 3 == 0) for n, ids in zip(number, completion_ids, strict=True)]


def noisy(module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Dropout that no setting tells of: seen only in the first step, which is computed before anyone knows."""
    return torch.nn.functional.dropout(output, 0.2, module.training)


def build(
    folder: Path,
    kind: Any = LabTrainer,
    rows: int = 16,
    dropout: float = 0.0,
    noise: bool = False,
    model_of: Callable[[Path], Any] = lambda start: AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
    peft_config: Any = None,
    **changes: Any,
) -> Any:
    start = folder.parent / "start"  # a reference model is loaded from a folder
    if not start.exists():
        made, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, initializer_range=0.2)
        made.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 160)]
        made.save_pretrained(start)
        tokenizer.save_pretrained(start)
    model = model_of(start)
    if noise:
        model.get_input_embeddings().register_forward_hook(noisy)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    model.config.attention_dropout = dropout
    written = {
        "gradient_accumulation_steps": 2, "max_steps": 6, "max_completion_length": 8, "optim": "adamw_torch",
        "learning_rate": 3e-3, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "save_strategy": "steps",
        "save_steps": 1, "seed": 2,
    }  # fmt: skip
    config = GRPOConfig if kind is GRPOTrainer else LabConfig
    return kind(
        model,
        Judge(),
        config(**arguments(folder, **{**written, **changes})),
        problems(rows),
        processing_class=AutoTokenizer.from_pretrained(start),
        peft_config=peft_config,
    )


def weights(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def moments(trainer: Any) -> Tensor:
    state = trainer.optimizer.state_dict()["state"]
    return torch.cat([torch.zeros(0), *(entry["exp_avg"].flatten() for entry in state.values())])


def history(trainer: Any, after: int = 0) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        for row in trainer.state.log_history
        if row["step"] > after and "train_runtime" not in row
    ]


def prompts_seen(trainer: Any) -> list[list[int]]:
    return next(reward for reward in trainer.reward_funcs if isinstance(reward, Judge)).seen


def assert_same(again: Any, whole: Any) -> None:
    assert torch.equal(weights(again), weights(whole))
    assert torch.equal(moments(again), moments(whole))
    assert history(again) == history(whole)
    assert len(history(again)) > 1
    start = AutoModelForCausalLM.from_pretrained(Path(whole.args.output_dir).parent / "start", dtype=torch.float32)
    assert not torch.equal(
        weights(whole), torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    )


def inside(place: Path) -> bool:
    return (place / rows_file(0)).is_file()


@dataclass
class Case:
    name: str
    settings: dict[str, Any]
    kind: Any = LabTrainer
    stop: int = 3
    inside: bool = True
    more: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("two steps a generation", {**TWO_STEPS, "objective": "dr_grpo"}),
    Case("token denominator of the whole batch", {**TWO_STEPS, "objective": "dapo"}),
    Case("two iterations", {**TWO_ITERATIONS, "objective": "grpo"}),
    Case("generation batches that end inside an optimizer "
        "step", {"steps_per_generation": 3, "objective": "dapo"}, stop=2),
    Case("kimi", TWO_ITERATIONS, KimiTrainer),
    Case("reference model", {**TWO_ITERATIONS, "beta": 0.1, "objective": "grpo"}),
    Case("resample", {**TWO_STEPS, "objective": "dr_grpo", "update": {"dead_groups": "resample"}}),
    Case(
        "KL per token",
        {
            **TWO_STEPS,
            "objective": "dr_grpo",
            "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.2, "per": "token", "gamma": 0.95},
        },
    ),
    Case(
        "critic, inside a generation batch, KL per token",
        {
            **TWO_STEPS, "num_iterations": 2, "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.2},
            "value": {"model": "copy", "learning_rate": 0.01, "warmup_steps": 1},
        },
        PPOTrainer,
    ),
    Case("update off", {**TWO_ITERATIONS, "objective": "dapo", "update": "off"}),
    Case("TRL's loss", {**TWO_STEPS, "beta": 0.1}),
    Case("TRL's loss, micro-batches as TRL cuts them", {**TWO_STEPS, "update": "off"}),
    Case("log every 4 steps", {**TWO_STEPS, "objective": "dapo", "logging_steps": 4, "max_steps": 8}),
    Case(
        "log every 4 steps, TRL's means, at a batch's end", {**TWO_STEPS, "logging_steps": 4, "max_steps": 8},
        stop=2, inside=False,
    ),
    Case("second epoch", {**TWO_STEPS, "objective": "grpo", "max_steps": 8}, stop=7, more={"rows": 8}),
    Case("dropout, masks of live rows", {**TWO_ITERATIONS, "objective": "grpo"}, more={"dropout": 0.2}),
    Case(
        "dropout, stock's draws", {**TWO_ITERATIONS, "objective": "grpo", "update": {"randomness": "same_draws"}},
        more={"dropout": 0.2},
    ),
    Case("a forward that was seen to be random", {**TWO_STEPS, "objective": "grpo"}, more={"noise": True}),
    Case("our sampler", {**TWO_STEPS, "objective": "grpo", "sampler": "prioritized"}),
]  # fmt: skip


@pytest.mark.thorough(
    cases=[
        "token denominator of the whole batch",
        "two iterations",
        "KL per token",
        "update off",
        "second epoch",
        "dropout, stock's draws",
        "log every 4 steps",
        "TRL's loss",
        "reference model",
        "a forward that was seen to be random",
        "our sampler",
        "kimi",
    ]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_resumed_run_is_the_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", case.kind, **case.settings, **case.more)
    whole.train()
    place = tmp_path / "whole" / f"checkpoint-{case.stop}"
    assert inside(place) is case.inside
    again = build(tmp_path / "again", case.kind, **case.settings, **case.more)
    again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole)
    made = prompts_seen(again)
    assert made == prompts_seen(whole)[len(prompts_seen(whole)) - len(made) :]
    assert len(made) < len(prompts_seen(whole))


def test_every_checkpoint_of_a_run(tmp_path: Path) -> None:
    """Kimi's four updates on each batch: inside, at the end, and a run that was resumed twice."""
    settings: dict[str, Any] = {"num_iterations": 4, "max_steps": 7}
    whole = build(tmp_path / "whole", KimiTrainer, **settings)
    whole.train()
    emptied = torch.load(tmp_path / "whole" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert emptied["state"] == {}
    for stop in (1, 3, 4, 6):  # each place in a batch of four, and both batches
        place = tmp_path / "whole" / f"checkpoint-{stop}"
        assert inside(place) is (stop != 4)
        again = build(tmp_path / f"again{stop}", KimiTrainer, **settings)
        again.train(resume_from_checkpoint=str(place))
        assert_same(again, whole)
    twice = build(tmp_path / "twice", KimiTrainer, **settings)
    twice.train(resume_from_checkpoint=str(tmp_path / "again1" / "checkpoint-3"))
    assert_same(twice, whole)


@pytest.mark.parametrize("sampler", [None, "prioritized"])
def test_from_a_later_epoch_on(sampler: Any, tmp_path: Path) -> None:
    """Two steps an epoch. TRL's own resume begins with the first epoch's order again."""
    settings: dict[str, Any] = {**TWO_STEPS, "objective": "grpo", "rows": 4}
    if sampler is not None:
        settings["sampler"] = sampler
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    for step in (2, 3):  # an epoch's end, and inside the next one's generation batch
        again = build(tmp_path / f"again-{step}", **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same(again, whole)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TWO_STEPS, "objective": "dapo"}
    saving = build(tmp_path / "a", **settings)
    saving.train()
    silent = build(tmp_path / "b", **{**settings, "save_strategy": "no"})  # building it sets the seed
    silent.train()
    assert_same(silent, saving)


def test_the_completions_table_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **TWO_ITERATIONS,
        "log_completions": True,
        "num_completions_to_print": 1,
        "max_steps": 4,
    }
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    again = build(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for step in (2, 3, 4):
        mine, theirs = (
            pd.read_parquet(tmp_path / who / "completions" / f"completions_0000{step}.parquet")
            for who in ("again", "whole")
        )
        assert len(theirs) == 8
        assert "first" in theirs.columns
        pd.testing.assert_frame_equal(mine, theirs)


# -- without the files -------------------------------------------------------------------------------------------------


DR_GRPO: dict[str, Any] = {**TWO_STEPS, "objective": "dr_grpo"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of six steps, three generation batches, that nothing broke off."""
    trainer = build(tmp_path_factory.mktemp("of") / "whole", **DR_GRPO)
    trainer.train()
    return trainer


def resumed(whole: Any, folder: Path, change: Callable[[Path], None], stop: int = 3, **changes: Any) -> Any:
    """The run that goes on from a copy of the whole run's checkpoint, ``change`` made to it or to the settings."""
    shutil.copytree(Path(whole.args.output_dir).parent, folder, dirs_exist_ok=True)
    place = folder / "whole" / f"checkpoint-{stop}"
    change(place)
    again = build(folder / "again", **{**DR_GRPO, **changes})
    again.train(resume_from_checkpoint=str(place))
    return again


def nothing(_: Path) -> None:
    pass


def without_files(place: Path) -> None:
    with_entry(place, "generation")
    (place / rows_file(0)).unlink(missing_ok=True)


def test_a_checkpoint_of_stock_trl_is_warned_of_and_resumed_as_trl_does(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The test of the tests above: without the files the runs differ. Prompts of the batch are generated again, as TRL
    does."""
    with caplog.at_level("WARNING", logger="grpo_lab"):
        again = resumed(whole, tmp_path, without_files)
    assert not torch.equal(weights(again), weights(whole))
    assert prompts_seen(again)[0] == prompts_seen(whole)[1]
    warned = [
        record.getMessage()
        for record in caplog.records
        if "was written inside a generation batch" in record.getMessage()
    ]
    assert len(warned) == 1
    assert f"does not hold it (no {STATE}: stock TRL" in warned[0]
    assert "trained on for 4 micro-batches, and generations after it come 2 micro-batches late" in warned[0]
    assert "a checkpoint at a multiple of 2 optimizer steps" in warned[0]


def test_it_goes_on_as_stock_trl_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TWO_STEPS, "max_steps": 6}
    stock = build(tmp_path / "stock", GRPOTrainer, **settings)
    stock.train()
    place = tmp_path / "stock" / "checkpoint-3"
    assert not (place / STATE).exists()
    theirs, ours = (
        build(tmp_path / "theirs", GRPOTrainer, **settings),
        build(tmp_path / "ours", update="off", **settings),
    )
    for trainer in (theirs, ours):
        trainer.train(resume_from_checkpoint=str(place))
    assert prompts_seen(ours) == prompts_seen(theirs)
    assert torch.equal(weights(ours), weights(theirs))


def test_at_a_batchs_end_nothing_is_missed(whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Starting at ``_step`` 0 is right there: the sampler, too, is at a batch's start."""
    with caplog.at_level("WARNING", logger="grpo_lab"):
        again = resumed(whole, tmp_path, without_files, stop=2)
    assert_same(again, whole)
    assert "generation batch" not in caplog.text


def test_the_steps_of_a_shifted_run_resume_exactly(whole: Any, tmp_path: Path) -> None:
    """Once shifted, a run keeps its phase: checkpoints of it resume to the bit as well."""
    again = resumed(whole, tmp_path, without_files)
    third = build(tmp_path / "third", **DR_GRPO)
    third.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-4"))
    assert_same(third, again)


def unlisted(file: Path) -> Path:
    """Without the list of files, which holds the checksums: as an earlier version leaves it."""
    (file.parent / MARK).unlink()
    return file


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / rows_file(0)).unlink(), "No such file"),
        (lambda place: unlisted(place / rows_file(0)).write_bytes(b"\x08\0\0\0\0\0\0\0{}"), "cannot be resumed inside"),
        (lambda place: with_entry(place, "generation", {"step": 6}), "cannot be resumed inside"),
        (lambda place: (place / STATE).write_text("{"), "grpo_lab_state.json is damaged"),
        (lambda place: (place / STATE).write_text('{"version": 9}'), "has version 9, and this release reads 1"),
    ],
)
def test_damaged_files_are_an_error(damage: Callable[[Path], None], message: str, whole: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        resumed(whole, tmp_path, damage)
    advice = (
        "take the entry `generation` out of its" if "inside" in str(caught.value) else "remove the file to resume as"
    )
    assert f"; take another checkpoint, or {advice}" in str(caught.value)


def test_every_row_says_which_policy_wrote_it(whole: Any, tmp_path: Path) -> None:
    """The checkpoint after 5 steps is inside a batch that was generated after 4; the resumed run trains on the rest of
    it."""
    again = resumed(whole, tmp_path, nothing, stop=5)
    assert_same(again, whole)
    for run in (again, whole):
        assert {int(version) for batch in run._buffered_inputs for version in batch[POLICY_VERSION]} == {4}


class Strange(LabTrainer):
    """A team's trainer that puts something into its micro-batches which has no place in a file."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return {**super()._generate_and_score_completions(inputs), "strange": [object() for _ in inputs]}


def test_what_cannot_be_written_is_named_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The resumed run generates that batch again and trains the micro-batches on it that were left: the phase stays."""
    settings: dict[str, Any] = {**TWO_STEPS, "update": "off"}
    with caplog.at_level("WARNING", logger="grpo_lab"):
        whole = build(tmp_path / "whole", Strange, **settings)
        whole.train()
    place = tmp_path / "whole" / "checkpoint-3"
    assert (
        caplog.text.count("could not be written (ValueError: micro-batch [0]['strange'][0] is a builtins.object)") == 1
    )
    assert not inside(place)
    caplog.clear()
    again = build(tmp_path / "again", Strange, **settings)
    with caplog.at_level("WARNING", logger="grpo_lab"):
        again.train(resume_from_checkpoint=str(place))
    assert "was written without its generation batch" in caplog.text
    assert prompts_seen(again) == prompts_seen(whole)[1:]
    assert again._step == whole._step == 12


# -- a checkpoint that is written inside an optimizer step (the server is gone) ----------------------------------------


class Going:
    """A scripted rollout whose server is gone at the given call."""

    def __init__(self, tokenizer: Any, gone_at: int | None, calls: int = 0) -> None:
        self.script = ScriptedRollout(range(20, 90), (3, 5, 8), end_id=tokenizer.eos_token_id)
        self.script.calls, self.gone_at = calls, gone_at

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if self.script.calls == self.gone_at:
            raise ServerGone("the server at 127.0.0.1 is gone")
        return self.script(prompts, trainer)


def going(folder: Path, gone_at: int | None = None, calls: int = 0, **settings: Any) -> Any:
    trainer = build(folder, objective="dapo", **{"save_strategy": "no", **settings})
    trainer.rollout_func = Going(trainer.processing_class, gone_at, calls)
    return trainer


def test_a_server_that_goes_inside_an_optimizer_step(tmp_path: Path) -> None:
    """Micro-batches 0 1 | 2 3, generations at 0 and 3: gone at 3, so the checkpoint is of step 1, with its batch still
    there."""
    settings = {"steps_per_generation": 3, "max_steps": 4}
    whole = going(tmp_path / "whole", **settings)
    whole.train()
    ended = going(tmp_path / "ended", gone_at=1, **settings)
    with pytest.raises(ServerGone, match="A checkpoint of step 1 was written"):
        ended.train()
    place = tmp_path / "ended" / "checkpoint-1"
    assert read_state(place).entries["generation"]["step"] == 2
    again = going(tmp_path / "again", calls=1, **settings)
    again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole)


def test_a_server_that_goes_when_the_batch_is_gone_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Micro-batches 0–4 | 5–9, two a generation: step 1 ends inside the third batch, and at 8 the fourth is in
    memory."""
    settings = {"gradient_accumulation_steps": 5, "steps_per_generation": 2, "max_steps": 2}
    ended = going(tmp_path / "ended", gone_at=4, **settings)
    with caplog.at_level("WARNING", logger="grpo_lab"), pytest.raises(ServerGone):
        ended.train()
    place = tmp_path / "ended" / "checkpoint-1"
    assert "later ones were generated since the optimizer step that the checkpoint is of" in caplog.text
    assert not inside(place)
    again = going(tmp_path / "again", calls=2, **settings)
    again.train(resume_from_checkpoint=str(place))
    assert again._step == 10
    assert again.rollout_func.script.calls == 2 + 3  # the third batch again, the fourth and the fifth


# -- other settings of TRL and HF --------------------------------------------------------------------------------------


def test_ignore_data_skip_finishes_the_batch_first(whole: Any, tmp_path: Path) -> None:
    """The data set starts again, and the open batch is trained to its end before: no prompts twice in a row, none
    skipped."""
    again = resumed(whole, tmp_path, nothing, ignore_data_skip=True)
    assert history(again)[3] == {**history(whole)[3], "epoch": history(again)[3]["epoch"]}  # step 4: the open batch
    assert prompts_seen(again) == [prompts_seen(whole)[0]]


def test_save_total_limit_and_weights_only(tmp_path: Path) -> None:
    limited = build(tmp_path / "limited", **TWO_STEPS, save_total_limit=1, max_steps=3)
    limited.train()
    assert [path.name for path in (tmp_path / "limited").glob("checkpoint-*")] == ["checkpoint-3"]
    assert inside(tmp_path / "limited" / "checkpoint-3")
    build(tmp_path / "only", **TWO_STEPS, save_only_model=True, max_steps=1).train()
    assert not list((tmp_path / "only" / "checkpoint-1").glob("grpo_lab_generation*"))


def test_a_checkpoint_that_lacks_a_tensor_of_the_adapter_is_refused(tmp_path: Path) -> None:
    """PEFT warns, and the tensor stays as a new adapter has it."""
    settings: dict[str, Any] = {
        "peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
        "max_steps": 1,
    }
    build(tmp_path / "whole", **settings).train()
    place = tmp_path / "whole" / "checkpoint-1"
    (place / MARK).unlink()  # stock TRL's has none
    held = load_file(place / "adapter_model.safetensors")
    left_out = min(held)
    save_file({name: value for name, value in held.items() if name != left_out}, place / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"the checkpoint lacks 1 of 4 tensors of the model \({left_out}"):
        build(tmp_path / "again", **settings).train(resume_from_checkpoint=str(place))


@pytest.mark.parametrize("missing", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_what_starts_anew_is_said(missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the path was given, as in TRL; `True` passes over it."""
    build(tmp_path / "whole", max_steps=1).train()
    place = tmp_path / "whole" / "checkpoint-1"
    for name in (MARK, missing):
        (place / name).unlink()
    again = build(tmp_path / "whole", max_steps=1)
    with caplog.at_level("WARNING", logger="grpo_lab"):
        again.train(resume_from_checkpoint=str(place))
    assert f"checkpoint-1 holds no {missing} (" in caplog.text
    with pytest.raises(ValueError, match=rf"no checkpoint in .* is whole: checkpoint-1 \({missing} is missing\)"):
        again.train(resume_from_checkpoint=True)


def test_a_folder_that_is_written_again_keeps_no_old_batch(tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoint-1"
    build(tmp_path / "run", **TWO_STEPS, max_steps=1).train()
    assert inside(place)
    build(tmp_path / "run", max_steps=1).train()
    assert not inside(place)
    assert read_state(place).entries["generation"]["step"] == 2


def test_size_of_the_file(tmp_path: Path) -> None:
    """Tensors in their own types and nothing else: the bytes of the batch and a header."""
    trainer = build(tmp_path / "run", **TWO_STEPS, max_steps=1)
    trainer.train()
    file = tmp_path / "run" / "checkpoint-1" / rows_file(0)
    with safe_open(file, framework="pt") as stored:
        held = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    batch = trainer._buffered_inputs
    distinct = {id(v): v.nbytes for rows in batch for v in rows.values() if isinstance(v, Tensor)}
    assert held == sum(distinct.values())
    assert file.stat().st_size < held + 10_000


def of_step_1(place: Path) -> None:
    shutil.copy(place.parent / "checkpoint-1" / STATE, place / STATE)


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (nothing, {"steps_per_generation": 2, "num_iterations": 2}, "steps_per_generation 4 → 2, num_iterations 1 → 2"),
        (of_step_1, {}, "optimizer step 1 → 3"),
    ],
    ids=["another batch shape", "a copied state"],
)
def test_a_generation_batch_of_another_run_is_not_taken(
    change: Any, settings: dict[str, Any], said: str, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="grpo_lab"):
        again = resumed(whole, tmp_path, change, **settings)
    assert f"is of another run ({said})" in caplog.text
    assert again.state.global_step == 6
