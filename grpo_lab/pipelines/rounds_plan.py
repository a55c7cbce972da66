"""`--dry-run` of `rounds`: every stage of a round in words, with counts."""

from __future__ import annotations

from typing import Any

from grpo_lab.pipelines.in_words import count_of, model_of, settings_in_words, told
from grpo_lab.pipelines.rounds_recipe import IMITATE, ContrastSettings, RoundsRecipe
from grpo_lab.stages.select import Keep

_SAMENESS = {
    "equations": "the list of their equations (their words, where there is none)",
    "words": "their words",
    "text": "their text",
}


def start(recipe: RoundsRecipe, cold_rows: Any) -> str:
    model = recipe.model.name if recipe.model.path is None else model_of(recipe.model.path)
    if recipe.cold_start is None:
        return model
    section = recipe.cold_start
    return f"{model}, after a cold start on {count_of(cold_rows, section.data)}; {settings_in_words(section.arguments)}"


def sample(recipe: RoundsRecipe, rows: int | None) -> str:
    asked, sampling = recipe.rounds.questions, recipe.sampling
    number = rows if asked is None else asked
    which = "all questions" if asked is None else f"{asked:,} questions, other ones until all were asked"
    total = "" if number is None else f", {number * sampling.n_samples:,} completions a round"
    if number is not None:
        total += f" and {number * sampling.n_samples * recipe.rounds.count:,} in all"
    who = "the start model" if recipe.rounds.count == 1 else "the model of the round before"
    return (
        f"{which}, {sampling.n_samples} samples each{total}, of at most {sampling.max_completion_length} tokens, at "
        "temperature "
        f"{sampling.temperature:g}, by {who}; {'vLLM' if sampling.use_vllm else 'transformers'}"
    )


def select(recipe: RoundsRecipe) -> str:
    if recipe.method in IMITATE:
        keep = recipe.keep or Keep()
        most = "all" if keep.per_problem is None else f"at most {keep.per_problem}"
        said = f"right answers, one for each way of solving ({_SAMENESS[keep.distinct]}), {most} a problem"
        said += ", only those whose calculations hold" if keep.right_calculations else ""
        return said + (", beside the rows' gold solutions" if keep.gold else "")
    pairs = recipe.pairs or ContrastSettings()
    most = "all that differ" if pairs.per_problem is None else f"at most {pairs.per_problem}"
    return (
        f"pairs of a right and a wrong answer of one question, {most} a question; one answer for each of "
        f"{_SAMENESS[pairs.distinct]}"
    )


def train(recipe: RoundsRecipe) -> str:
    trainer = {"dpo": "DPOTrainer", "simpo": "CPOTrainer, loss_type simpo"}.get(recipe.method, "SFTTrainer")
    begin = "the model of the round before"
    if recipe.rounds.train_from == "base":
        begin = "the start model" if recipe.base is None else model_of(str(recipe.base.path))
    reference = ""
    if recipe.method == "dpo":
        own = recipe.pairs is None or recipe.pairs.reference == "round"
        model = "the model that the round trains, as it begins" if own else "the start model in every round"
        reference = f"; reference: {model}"
    return f"TRL's {trainer} from {begin}{reference}; {settings_in_words(recipe.training)}"


def evaluation(recipe: RoundsRecipe, held_out: Any) -> str:
    section = recipe.evaluation
    if section is None:
        return ""
    when = "the start model and the model of each round" if section.before else "the model of each round"
    return f"{when} on {count_of(held_out, section.data)}, judged by {told(section.reward)}"


def done(recipe: RoundsRecipe) -> str:
    """The rounds that an earlier run has left, and their stages; empty where there are none."""
    folder, found = recipe.output_dir, []
    for place in (folder / "start", *sorted(folder.glob("round-*"), key=lambda place: int(place.name[6:]))):
        stages = [name for name in ("sample", "select", "train", "evaluate") if (place / f"{name}.json").is_file()]
        found += [f"{place.name} ({', '.join(stages)})"] if stages else []
    return ", ".join(found)
