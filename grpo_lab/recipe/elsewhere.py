"""Settings of TRL's scripts and of open-r1 → what is written here instead, in a recipe and in a supervised training.

Whoever comes from there is told the new word, and not only that the old one is unknown. ``TELLING`` does the same for a
recipe that is handed to another command of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo_lab.settings import UnknownSettingError

_LORA = {
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
"""TRL's flat setting → the field of ``peft.LoraConfig``."""
_BITS = ("load_in_4bit", "load_in_8bit")

RECIPE = {
    "model_name_or_path": "`model: {path: …}`",
    "dataset_name": "`data: {loader: …, source: …}`, with a loader for its columns (`gsm8k`, `math`, `file`, a team's)",
    "dataset_config": "an argument of the loader in `data`",
    "dataset_mixture": "a stage `build` of a pipeline, or a loader of your own",
    "dataset_prompt_column": "an argument of the loader in `data`",
    **dict.fromkeys(("dataset_train_split", "dataset_split"), "`data: {split: …}`"),
    "dataset_test_split": "`evaluation: {data: {split: …}}`, or `eval_dataset`",
    "reward_funcs": "`rewards: [accuracy, …]`",
    "reward_model_name_or_path": "a folder or hub name in `rewards`",
    **dict.fromkeys(("torch_dtype", "dtype"), "`model_init_kwargs: {dtype: …}`"),
    "attn_implementation": "`model_init_kwargs: {attn_implementation: …}`",
    **dict.fromkeys(_BITS, "`model_init_kwargs: {quantization_config: …}`"),
    "use_peft": "`model: {lora: {…}}`, or nothing",
    **{name: f"`model: {{lora: {{{field}: …}}}}`" for name, field in _LORA.items()},
    "system_prompt": "`data: {template: …}`",
    "chat_template": "a tokenizer's folder that holds it, `model: {tokenizer: …}`",
}
"""Foreign setting → what to write in its place in a recipe of `grpo-lab train`."""

SAVED = {
    **RECIPE,
    "dataset_test_split": "`evaluation: {data: {split: …}}`",
    **dict.fromkeys(("reward_funcs", "reward_model_name_or_path"), "`reward: …`, one that judges answers"),
    **dict.fromkeys(("torch_dtype", "dtype", "attn_implementation"), "nothing: a model is loaded as it was saved"),
    **dict.fromkeys((*_BITS, "use_peft", *_LORA), "nothing: whole weights are asked, and trained"),
}
"""Foreign setting → what to write in its place in a recipe of the other commands, which take a saved model."""

SUPERVISED = {
    **SAVED,
    "model_name_or_path": "`model: …`, a folder or hub name",
    "teacher_model_name_or_path": "`teacher: …`, a folder or hub name",
    "dataset_name": "`rows: …`, a file that a stage leaves, or `data: {loader: …, source: …}`",
    "dataset_test_split": "a stage `evaluate`",
    **dict.fromkeys(("torch_dtype", "dtype"), "`bf16: true`, or nothing: a model is loaded as it was saved"),
    "system_prompt": "a message of the rows, or `data: {template: …}`",
    "chat_template": "a tokenizer's folder that holds it, beside the model",
}
"""Foreign setting → what to write in its place in a stage of a pipeline, or among the settings of a supervised
training."""


def refuse_words_from_elsewhere(
    written: Iterable[str], where: str = "the recipe", words: Mapping[str, str] = RECIPE
) -> None:
    """Raise one UnknownSettingError for all keys of ``written`` that are settings of another framework, with what to
    write instead. ``where``: what has the keys, for the message; ``words``: one of the tables above."""
    if found := [f"{key!r} is {words[key]}" for key in written if key in words]:
        raise UnknownSettingError(
            f"{where} has words of another framework; here {'; '.join(found)} (docs/coming_from_trl.md)"
        )


TELLING = {
    "rewards": "train",
    "filters": "curate",
    "rounds": "rounds",
    "short_model": "long2short",
    **dict.fromkeys(("rft", "online_rft", "expert_iteration"), "rounds"),
    **dict.fromkeys(("shortest_sft", "merge"), "long2short"),
    "mixture": "train",
}
"""Key of a recipe, or value of its ``method`` → the only command whose recipes have it."""
