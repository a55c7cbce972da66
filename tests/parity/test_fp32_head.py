"""TRL's ``cast_lm_head_to_fp32`` on a bfloat16 model: in the update's head, at generation, in the reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import utils

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout, tiny_model
from grpo_lab.trainer import trl_bridge
from parity.harness import arguments, mixed_reward, problems

pytestmark = pytest.mark.not_fast
PROMPT, WHOLE = 5, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """bfloat16 models by whether their head is tied."""
    made = {tied: tmp_path_factory.mktemp("tied" if tied else "untied") for tied in (True, False)}
    for tied, folder in made.items():
        small: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "initializer_range": 0.2}
        model, tokenizer = tiny_model("qwen2", tie_embeddings=tied, **small)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return made


def build(folder: Path, out: Path, cast: bool = True, lora: bool = False, scripted: bool = True, **changes: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = {"objective": "grpo", "beta": 0.1, "max_steps": 1, "gradient_checkpointing": False, **changes}
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        reward_funcs=mixed_reward(),
        args=LabConfig(**arguments(out, cast_lm_head_to_fp32=cast, **written)),
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), (7,), end_id=tokenizer.eos_token_id) if scripted else None,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=2) if lora else None,
    )


def both(trainer: Any, model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs of completions by TRL's forward and by ours, on rows without padding: equal inputs to every layer."""
    ids = torch.randint(20, 90, (3, WHOLE), generator=torch.Generator().manual_seed(0))
    prompt, completion = ids[:, :PROMPT], ids[:, PROMPT:]
    rows = {"prompt_ids": prompt, "completion_ids": completion}
    rows |= {"prompt_mask": torch.ones_like(prompt), "completion_mask": torch.ones_like(completion)}
    theirs = trl_bridge.stock_forward(trainer, model, rows)[0]
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    positions = torch.arange(WHOLE).expand(3, WHOLE)
    ours = trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, positions)[0]
    return theirs, ours[:, PROMPT - 1 :]


@pytest.mark.parametrize(
    ("tied", "lora", "changes"),
    [(True, False, {}), (False, False, {}), (False, True, {}), (True, False, {"bf16": True})],
    ids=["tied", "untied", "adapter", "autocast"],
)
def test_log_probs_and_gradients_are_trls(
    tied: bool, lora: bool, changes: dict[str, Any], folders: dict[bool, Path], tmp_path: Path
) -> None:
    found = {}
    for cast in (True, False):
        trainer = build(folders[tied], tmp_path, cast, lora, **changes)
        for model in (trainer.model, trainer.ref_model):
            if model is None:  # an adapter's reference is the model without it
                continue
            theirs, ours = both(trainer, model)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        theirs, ours = both(trainer, trainer.model)
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        of_each = [torch.autograd.grad(one.sum(), weights, allow_unused=True) for one in (theirs, ours)]
        for expected, gradient in zip(*of_each, strict=True):
            if expected is not None:
                torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
        found[cast] = ours.detach()
    assert (found[True] - found[False]).abs().max() > 1e-3  # what a bfloat16 head rounds away


def test_generation_draws_from_float32_logits(folders: dict[bool, Path], tmp_path: Path) -> None:
    for generate in ("groups", "stock"):
        trainer, kinds = build(folders[True], tmp_path, scripted=False, rollout={"generate": generate}), set()
        head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings()
        head.register_forward_hook(lambda _module, args, logits, kinds=kinds: kinds.add((args[0].dtype, logits.dtype)))
        trainer.train()
        assert kinds == {(torch.bfloat16, torch.float32)}


def test_every_log_prob_of_a_run_with_shared_prompts(
    folders: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, reference and stored log-probs. The first weight is the tied embedding, in float32; by its dtype shared
    prompts were held to float32's tolerance."""
    kinds = set()

    def seen(hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        kinds.add((hidden.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return plain.apply(hidden, weight, *rest)

    plain = utils._ChunkedLogProbFunction
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=seen))
    trainer = build(folders[True], tmp_path, update={"share_prompts": "on"}, num_iterations=2, max_steps=4)
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert trl_bridge.coarsest(trainer.model) == torch.bfloat16
    trainer.train()
    assert kinds == {(torch.float32, torch.float32, False)}


def test_a_tied_head_under_an_adapter_is_refused_with_the_reason(folders: dict[bool, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`cast_lm_head_to_fp32` and a head that is tied to the embeddings"):
        build(folders[True], tmp_path, lora=True)
