"""The table of ``test_drop_in.py``: one row per option of ``GRPOConfig`` and of ``GRPOTrainer``'s constructor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from grpo_lab.testing import ScriptedRollout
from parity.multiplication import multiply
from parity.sampler import NoisySampler, as_with_vllm
from parity.stock_like import Case, prompts, spread_reward
from parity.tiny_vlm import with_images

Models = dict[str, Path]


# -- rewards -----------------------------------------------------------------------------------------------------------


async def awaited_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [value**2 for value in spread_reward(completion_ids)]


def length_reward(completions: list[Any], scale: float = 0.1, **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [scale * len(text) for text in texts]


def partly_none_reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
    """``None`` for every third completion, and for whole groups."""
    return [
        None if n % 5 == 0 or sum(ids) % 3 == 0 else (sum(ids) % 7) / 6.0
        for n, ids in zip(number, completion_ids, strict=True)
    ]


def sometimes_none_reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float | None]:
    """``None`` for the whole batch in the second step."""
    return [None if trainer_state.global_step == 1 else value for value in spread_reward(completion_ids)]


def two_level_reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Whole groups alike: dead groups."""
    return [0.5 if n % 2 == 0 else (sum(ids) % 7) / 6.0 for n, ids in zip(number, completion_ids, strict=True)]


def dead_batch_reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Every group dead in the second and third step."""
    return [0.5 if trainer_state.global_step in (1, 2) else value for value in spread_reward(completion_ids)]


def logging_reward(completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    log_extra("first_token", [ids[0] for ids in completion_ids])
    log_metric("first_token_mean", sum(ids[0] for ids in completion_ids) / len(completion_ids))
    return spread_reward(completion_ids)


def rewards(*functions: Any) -> Callable[[Models], dict[str, Any]]:
    return lambda models: {"reward_funcs": list(functions)}


def reward_model(models: Models, as_path: bool = False, chat: bool = False) -> dict[str, Any]:
    folder = models["reward"]
    reward = str(folder) if as_path else AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call: dict[str, Any] = {"reward_funcs": [reward, spread_reward]}
    if not as_path:
        call["reward_processing_classes"] = [tokenizer, None]
    return {**call, "train_dataset": chats()} if chat else call


# -- data, models, adapters --------------------------------------------------------------------------------------------


def chats(n: int = 16) -> Dataset:
    rows = prompts(n)
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def streamed(models: Models) -> dict[str, Any]:
    return {"train_dataset": prompts().to_iterable_dataset()}


def evaluated(models: Models) -> dict[str, Any]:
    return {"eval_dataset": prompts(4)}


def evaluated_on_two(models: Models) -> dict[str, Any]:
    return {"eval_dataset": {"one": prompts(4), "two": prompts(2).to_iterable_dataset()}}


def new_adapter(models: Models, **changes: Any) -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **changes)}


def virtual_tokens(models: Models, kind: str) -> dict[str, Any]:
    import peft

    return {"peft_config": getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)}


def existing_adapter(models: Models) -> dict[str, Any]:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(models["text"], dtype=torch.float32)
    return {"model": PeftModel.from_pretrained(base, models["adapter"], is_trainable=True)}


def by_path(models: Models) -> dict[str, Any]:
    return {"model": str(models["text"])}


def own_optimizer(models: Models) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(models["text"], dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    return {"model": model, "optimizers": (optimizer, None), "callbacks": [StopEarly()]}


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


# -- rollouts, tools, environments -------------------------------------------------------------------------------------


class RolloutWithFeedback(ScriptedRollout):
    """Some tokens of each completion come from an environment (``env_mask`` 0), and a column is made for the
    rewards."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        rows = output["completion_ids"]
        masks = [[0 if 1 < t < 4 else 1 for t in range(len(row))] for row in rows]
        return {**output, "env_mask": masks, "score": [len(row) / 10 for row in rows]}


class SometimesFeedback(RolloutWithFeedback):
    """As an environment that speaks in every other generation batch only, and else gives no mask at all."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        if self.calls % 2:
            del output["env_mask"]
        return output


class RolloutInTensors(RolloutWithFeedback):
    """Completions as tensors, as ``model.generate`` gives them; stock TRL takes them."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return {**output, "completion_ids": [torch.tensor(row) for row in output["completion_ids"]]}


def score_reward(completions: list[Any], score: list[float], **_: Any) -> list[float]:
    return [value + (len(text) % 13) / 17 for value, text in zip(score, completions, strict=True)]


def feedback(models: Models, kind: type[RolloutWithFeedback] = RolloutWithFeedback) -> dict[str, Any]:
    rollout = kind(range(20, 90), (3, 5, 8, 10), end_id=1, truncated_share=0.2)
    return {"rollout_func": rollout, "reward_funcs": score_reward}


def sampled_elsewhere(models: Models) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(models["text"], dtype=torch.float32)
    rollout = ScriptedRollout(range(20, 90), (3, 5, 8, 10), sampler_logps=NoisySampler(model))
    return {"model": model, "rollout_func": rollout}


class CallsATool:
    """Rollout whose first turn calls ``name`` in three of four completions, once of them with a wrong argument; the
    turn after the tool's answer is made by the model itself."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.tokenizer, self.calls = name, AutoTokenizer.from_pretrained(folder), 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        self.calls += 1
        texts = [self._turn(i) for i in range(len(prompts))]
        ids = [self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id] for text in texts]
        return {"prompt_ids": [list(row) for row in prompt_ids], "completion_ids": ids, "logprobs": None}

    def _turn(self, row: int) -> str:
        if row % 4 == 3:
            return f"I say {row * self.calls}."
        b = '"x"' if row % 4 == 2 else row + self.calls
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {{"a": {row}, "b": {b}}}}}\n</tool_call>'


def tool_reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    values = spread_reward(completion_ids)
    return [len(turns) / 4 + value for turns, value in zip(completions, values, strict=True)]


def with_tools(models: Models) -> dict[str, Any]:
    rollout = CallsATool("multiply", models["tools"])
    return {"tools": [multiply], "rollout_func": rollout, "reward_funcs": tool_reward, "train_dataset": chats()}


class Counter:
    """An environment: counts, and rewards the count."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, number: int = 0, **_: Any) -> str:
        self.total = number
        return f" Start at {number}."

    def multiply(self, a: int, b: int) -> str:
        """Adds the product to the total.

        Args:
            a: first factor
            b: second factor

        Returns:
            The total.
        """
        self.total += int(a) * int(b)
        return str(self.total)

    def get_reward(self) -> float:
        return (self.total % 5) / 4.0


class Silent(Counter):
    """An environment without a reward."""

    get_reward = None  # type: ignore[assignment]


def in_environment(models: Models) -> dict[str, Any]:
    return {
        "environment_factory": Counter,
        "rollout_func": CallsATool("multiply", models["tools"]),
        "reward_funcs": None,
        "train_dataset": chats(),
    }


# -- the table ---------------------------------------------------------------------------------------------------------

TWICE = {"num_iterations": 2, "max_steps": 4}

LOSSES = [
    Case(f"loss_type={kind}", {"loss_type": kind, **TWICE, **extra}, plain=kind == "dr_grpo")
    for kind, extra in {
        "grpo": {},
        "dapo": {},
        "bnpo": {},
        "dr_grpo": {"scale_rewards": "none"},
        "cispo": {"epsilon_high": 1.1},
        "sapo": {"sapo_temperature_neg": 1.2},
        "luspo": {"importance_sampling_level": "sequence"},
        # its metric `vespo/phi_seq_mean` is compared, too, like every one that stock logs
        "vespo": {"vespo_k_pos": 1.5},
    }.items()
]
LOSS_OPTIONS = [
    Case("defaults", plain=True, slow=False),
    Case("sequence-grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.02, **TWICE}),
    Case("sequence-dapo-kl", {"importance_sampling_level": "sequence", "beta": 0.1, **TWICE}),
    Case(
        "sequence-dr_grpo", {"importance_sampling_level": "sequence", "loss_type": "dr_grpo", "epsilon": 0.02, **TWICE}
    ),
    Case("scale_rewards=batch", {"scale_rewards": "batch"}),
    Case("scale_rewards=none", {"scale_rewards": "none"}),
    Case("scale_rewards=False", {"scale_rewards": False}, plain=True),
    Case("delta", {"delta": 1.25, "loss_type": "grpo", **TWICE}),
    Case("delta-within-the-clip", {"delta": 1.1, "loss_type": "grpo", **TWICE}, left_to_trl="delta=1.1"),
    Case("epsilon_high", {"epsilon": 0.05, "epsilon_high": 0.28, **TWICE}),
    Case("beta", {"beta": 0.1, **TWICE}, plain=True, slow=False),
    Case("beta-unweighted", {"beta": 0.1, "use_bias_correction_kl": False, **TWICE}),
    Case("beta-dead-groups", {"beta": 0.1}, rewards(two_level_reward)),
    Case("sync_ref_model", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 4}),
    Case("top_entropy_quantile", {"top_entropy_quantile": 0.5}),
    Case("entropy_coef", {"entropy_coef": 0.05, "loss_type": "grpo"}, slow=False),
    Case(
        "adaptive-entropy",
        {"use_adaptive_entropy": True, "entropy_target": 6.0, "entropy_coef_delta": 0.02, "max_steps": 4},
    ),
    Case("off_policy_mask_threshold", {"off_policy_mask_threshold": 1e-3, **TWICE}),
    Case("dead-groups", {}, rewards(two_level_reward), dead_rows=True, plain=True, slow=False),
    Case("all-groups-dead", {"loss_type": "grpo"}, rewards(dead_batch_reward), slow=False),
    Case(
        "all-groups-dead-reused",
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 4},
        rewards(dead_batch_reward),
    ),
    Case(
        "dead-groups-clipped",
        {"loss_type": "grpo", "epsilon": 0.05, **TWICE},
        rewards(two_level_reward),
        dead_rows=True,
    ),
]
MASKS = [
    Case("mask_truncated", {"mask_truncated_completions": True}, dead_rows=True),
    Case("mask_truncated-grpo", {"mask_truncated_completions": True, "loss_type": "grpo", **TWICE}, dead_rows=True),
    Case("mask_truncated-beta", {"mask_truncated_completions": True, "beta": 0.1, **TWICE}, dead_rows=True),
    Case(
        "mask_truncated-sequence",
        {
            "mask_truncated_completions": True,
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "epsilon": 0.01,
            **TWICE,
        },
        dead_rows=True,
    ),
    Case(
        "mask_truncated-almost-all",
        {"mask_truncated_completions": True, "max_completion_length": 3, "beta": 0.1},
        dead_rows=True,
    ),
    Case(
        "mask_truncated-whole-micro-batches",
        {
            "mask_truncated_completions": True,
            "max_completion_length": 3,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "loss_type": "grpo",
            "max_steps": 6,
        },
        dead_rows=True,
        slow=False,
    ),
    Case("env_mask", {"max_completion_length": 12, **TWICE}, feedback),
    Case(
        "env_mask-in-some-batches",
        {"max_completion_length": 12, "steps_per_generation": 1},
        functools.partial(feedback, kind=SometimesFeedback),
    ),
    Case("rollout-in-tensors", {"max_completion_length": 12}, functools.partial(feedback, kind=RolloutInTensors)),
    Case("pad_to_multiple_of", {"pad_to_multiple_of": 8}),
]
BATCHES = [
    Case("steps_per_generation=4", {"steps_per_generation": 4, "max_steps": 4}, plain=True),
    Case("steps_per_generation=1", {"steps_per_generation": 1}),
    Case("steps_per_generation=3", {"steps_per_generation": 3, "max_steps": 4}),
    Case("generation_batch_size", {"generation_batch_size": 16, "max_steps": 4}),
    Case("num_iterations=3", {"num_iterations": 3, "max_steps": 6}),
    Case("one-row-micro-batches", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
    Case("no-accumulation", {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}),
    Case(
        "last-window-is-shorter",
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": -1, "num_train_epochs": 1},
        lambda models: {"train_dataset": prompts(8)},
    ),
    Case("shuffle_dataset", {"shuffle_dataset": False}),
    Case("streaming", {}, streamed),
    Case("remove_unused_columns", {"remove_unused_columns": True}),
]
SAMPLING = [
    Case("temperature", {"temperature": 0.7, "top_k": 20, "beta": 0.1}),
    Case("top_p", {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}),
    Case("generation_kwargs", {"generation_kwargs": {"min_new_tokens": 3}, "cache_implementation": "dynamic"}),
    *(
        Case(
            f"sampler-correction-{mode}",
            {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5},
            sampled_elsewhere,
            prepare=as_with_vllm,
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    Case(
        "sampler-correction-reused",
        {"vllm_importance_sampling_clip_max": 1.5, "loss_type": "grpo", "beta": 0.1, **TWICE},
        sampled_elsewhere,
        prepare=as_with_vllm,
    ),
    Case(
        "sampler-correction-one-generation-a-micro-batch",
        {"vllm_importance_sampling_clip_max": 1.5, "steps_per_generation": 1},
        sampled_elsewhere,
        prepare=as_with_vllm,
    ),
    Case(
        "sampler-correction-vespo",
        {"vllm_importance_sampling_mode": "token_truncate", "loss_type": "vespo"},
        sampled_elsewhere,
        prepare=as_with_vllm,
    ),
]
TRAINING = [
    Case("gradient_checkpointing", {"gradient_checkpointing": True, "beta": 0.1}),
    Case(
        "gradient_checkpointing-reentrant",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    Case("cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}),
    Case(
        "max_grad_norm", {"max_grad_norm": 0.05, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    ),
    Case("logging_steps=2", {"logging_steps": 2, "max_steps": 4, "beta": 0.1}),
    Case("model-by-path", {"model_init_kwargs": {"dtype": "float32"}}, by_path, plain=True),
    Case("own-optimizer-and-callback", {}, own_optimizer),
    Case("dropout", {"beta": 0.1}, model="dropout"),
    Case("disable_dropout", {"disable_dropout": True}, model="dropout"),
    Case("neftune", {"neftune_noise_alpha": 5.0}),
    Case("qwen3", {"beta": 0.1}, model="qwen3"),
    Case("llama", {**TWICE}, model="llama"),
    Case("gpt2-learned-positions", {}, model="gpt2"),
    Case("opt-positions-from-the-mask", {**TWICE}, model="opt"),
    Case("images", {"beta": 0.1}, with_images, model="llava"),
    Case("images-reused", {**TWICE}, with_images, model="llava"),
    Case("moe", {}, model="moe"),
    Case("moe-aux-loss", {"router_aux_loss_coef": 0.05, "beta": 0.1}, model="moe"),
    Case("moe-without-aux-loss", {"router_aux_loss_coef": 0.0}, model="moe"),
    Case("chat", {"chat_template_kwargs": {"unused": True}}, lambda models: {"train_dataset": chats()}, plain=True),
    Case(
        "eval",
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 4,
            "num_generations_eval": 2,
            "beta": 0.1,
        },
        evaluated,
        plain=True,
    ),
    Case(
        "eval-two-sets-one-generation",
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2, "num_generations_eval": 1},
        evaluated_on_two,
    ),
]
REWARDS = [
    Case("reward-async", {}, rewards(awaited_reward)),
    Case(
        "rewards-weighted", {"reward_weights": [0.7, -0.2, 2.0]}, rewards(spread_reward, length_reward, awaited_reward)
    ),
    Case("reward-partial", {}, rewards(functools.partial(length_reward, scale=0.3), spread_reward), plain=True),
    Case("reward-some-none", {}, rewards(partly_none_reward), dead_rows=True),
    Case("reward-some-none-of-two", {}, rewards(partly_none_reward, length_reward), dead_rows=True),
    Case("reward-none-for-a-batch", {"loss_type": "grpo"}, rewards(sometimes_none_reward), dead_rows=True),
    Case("reward-logs", {}, rewards(logging_reward)),
    Case("reward-model", {}, reward_model),
    Case("reward-model-by-path", {}, functools.partial(reward_model, as_path=True)),
    Case("reward-model-chat", {}, functools.partial(reward_model, chat=True)),
    Case(
        "normalize_then_sum",
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
        rewards(spread_reward, length_reward),
    ),
]
ADAPTERS_AND_TOOLS = [
    Case("peft-new", {}, new_adapter, plain=True),
    Case("peft-new-beta", {"beta": 0.1, **TWICE}, new_adapter),
    Case("peft-prompt-tuning", {}, functools.partial(virtual_tokens, kind="PromptTuningConfig")),
    Case("peft-dropout", {}, functools.partial(new_adapter, lora_dropout=0.1)),
    Case("peft-existing", {}, existing_adapter),
    Case("peft-existing-beta", {"beta": 0.1, **TWICE}, existing_adapter),
    Case("peft-gradient-checkpointing", {"gradient_checkpointing": True}, new_adapter),
    Case("tools", {"max_completion_length": 160, "num_iterations": 2, "max_steps": 2}, with_tools, model="tools"),
    Case("environment", {"max_completion_length": 160, "max_steps": 2}, in_environment, model="tools", dead_rows=True),
]

CASES: list[Case] = [
    *LOSSES,
    *LOSS_OPTIONS,
    *MASKS,
    *BATCHES,
    *SAMPLING,
    *TRAINING,
    *REWARDS,
    *ADAPTERS_AND_TOOLS,
]
