"""Sample n completions of each problem from a saved model, judge them, and write them to disk batch by batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from grpo_lab.curation import PassRate, Sampled, Written, pass_rates
from grpo_lab.curation.rejection import text_of
from grpo_lab.engines.generators import (
    Completion,
    CompletionGenerator,
    TransformersGenerator,
    VllmGenerator,
    context_of_config,
    in_form_of,
    render_prompt,
    stop_token_ids,
)
from grpo_lab.io import check_place, write_json_lines
from grpo_lab.reading import Fields, json_lines, read_json_lines
from grpo_lab.recipe.ahead import check_file
from grpo_lab.recipe.checks import no_room
from grpo_lab.recipe.job import check_model, questions
from grpo_lab.recipe.models import load_saved_model, load_tokenizer, loading, model_files
from grpo_lab.recipe.sections import STRICT_ACCURACY, DataSection, ModelSection, RewardSection, SamplingSettings
from grpo_lab.runs.console import count_of, describe, model_of
from grpo_lab.runs.folder import problems_in
from grpo_lab.runs.stage import Facts, Words, Workspace, console
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import settings
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

Problem = Mapping[str, Any]
SAMPLES, SAMPLING = "samples.jsonl", "sampling.jsonl"
"""File of all samples, and file of the samples made so far, which is removed once the first is there."""
SAMPLED: dict[str, Any] = {"row": int, **dict.fromkeys(("completions", "scores", "lengths"), list)}
"""Fields of a line of samples. The stage's own file has the `problem` as well."""
OF_A_LINE = {**SAMPLED, "problem": dict}
TEXT = str | list
"""Type of a prompt or a completion: a text, or a list of messages."""


@settings(rest="sampling")
class Sample:
    """``sample``: let ``model`` write completions of each row of ``data``, and judge them by ``reward``. Other keys:
    `SamplingSettings`."""

    leaves: ClassVar[Mapping[str, str]] = {"samples": SAMPLES}
    seed = None  # `sampling.seed` is used
    model: str
    data: DataSection
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def plan(self) -> str:
        found = questions(self.data, self.reward, here_only=True)
        check_model(found, ModelSection(path=self.model), self.sampling, here_only=True, where="model")
        return f"{self.sampling.n_samples} for each of {count_of(found.rows, self.data)}, by {self.model}"

    def run(self, workspace: Workspace) -> Facts:
        asked = questions(self.data, self.reward)
        check_model(asked, ModelSection(path=self.model), self.sampling, where="model")
        rows = {number: dict(row) for number, row in enumerate(asked.rows)}
        said = {"reward": describe(self.reward)}
        lines = sample(workspace, rows, self.model, self.sampling, asked.reward, said, workspace.folder.name)
        write_json_lines(
            workspace.folder / SAMPLES, [{**line, "problem": encodable(rows[line["row"]])} for line in lines]
        )
        return sample_facts(lines, len(rows))


@dataclass(frozen=True)
class LoadedGenerator:
    """A loaded model, ready to generate.

    Attributes:
        generate: returns completions of prompts given as token ids.
        tokenizer: the model's.
        context: most tokens of prompt and completion together; None: no limit is known.
        stops: token ids that end a completion.
    """

    generate: CompletionGenerator
    tokenizer: Any
    context: int | None
    stops: list[int]


def load_generator(
    model: str, asked: Any, *, use_cpu: bool, seed: int, tokenizer: str | None = None, logprobs: bool = False
) -> LoadedGenerator:
    """Load a saved model into transformers or vLLM.

    Args:
        model: folder or hub name.
        asked: says by its attributes `use_vllm`, `engine` (vLLM's options) and `batch_size` how the model generates.
        use_cpu: keep the model off the GPU (transformers only).
        seed: vLLM's seed.
        tokenizer: folder or hub name of another tokenizer; None: the model's own.
        logprobs: whether completions carry the log-probs of their tokens.
    """
    if not asked.use_vllm:
        loaded, loaded_tokenizer = load_saved_model(model, use_cpu, tokenizer)
        generate = TransformersGenerator(loaded, loaded_tokenizer, asked.batch_size, progress=False, logprobs=logprobs)
        stops = stop_token_ids(loaded.generation_config, loaded_tokenizer)
        return LoadedGenerator(generate, loaded_tokenizer, context_of_config(loaded.config), stops)
    from transformers import AutoConfig, GenerationConfig

    from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory
    from grpo_lab.engines.vllm.presence import refuse_without_engine

    refuse_without_engine("`use_vllm`")
    loaded_tokenizer = load_tokenizer(ModelSection(path=model, tokenizer=tokenizer))
    with loading(model):
        config: Any = AutoConfig.from_pretrained(model)
    start = engine_factory(EngineOptions.from_mapping(asked.engine), trainer_dtype=getattr(config, "dtype", None))
    started = start(model=model, seed=seed)
    try:
        generation: GenerationConfig | None = GenerationConfig.from_pretrained(model)
    except OSError:  # the folder has none
        generation = None
    stops = stop_token_ids(generation, loaded_tokenizer)
    context = started.llm.llm_engine.model_config.max_model_len
    return LoadedGenerator(VllmGenerator(started, stops, logprobs), loaded_tokenizer, context, stops)


class ModelGenerator:
    """Generates completions with a saved model (folder or hub name). `generator(prompts, n)` returns n completions for
    each prompt: texts if the prompt is a text, lists of messages if it is one.

    Attributes:
        made: number of completions generated so far by this object.
        context: most tokens of prompt and completion together; None: no limit is known.
    """

    counted: ClassVar[str] = "problems"
    """What the prompts are called in lines of progress."""

    def __init__(self, model: str, settings: SamplingSettings) -> None:
        check_place(model)
        self.settings = settings
        self.name = model
        self.made = 0
        loaded = load_generator(model, settings, use_cpu=settings.use_cpu, seed=settings.seed)
        self.generate = loaded.generate
        self.tokenizer = loaded.tokenizer
        self.context = loaded.context

    def __call__(self, prompts: Sequence[Any], n: int, **how: Any) -> list[list[Any]]:
        """Return n completions for each prompt; ``how``: further arguments of `written`."""
        return [[one.completion for one in group] for group in self.written(prompts, n, **how)]

    def written(
        self,
        prompts: Sequence[Any],
        n: int,
        *,
        max_new_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[Written]]:
        """Sample n completions for each prompt, each with its token ids and whether the token limit cut it off.

        Args:
            prompts: texts or lists of messages.
            n: completions for each prompt.
            max_new_tokens: most tokens of a completion; None: the settings' ``max_completion_length``.
            chat_template_kwargs: arguments of the chat template, beside those of the settings.
        """
        ids = [self.rendered(prompt, chat_template_kwargs) for prompt in prompts]
        # the seed depends on the batch's prompts alone, so that a resumed run draws the same completions
        digest = hashlib.sha256(f"{self.settings.seed}/{json.dumps(ids)}".encode()).digest()
        limit = max_new_tokens or self.settings.max_completion_length
        seed = int.from_bytes(digest[:4], "big") >> 1
        temperature = self.settings.temperature
        groups: list[list[Completion]] = self.generate(
            ids, n=n, temperature=temperature, max_new_tokens=limit, seed=seed
        )
        decode = self.tokenizer.decode
        self.made += sum(len(group) for group in groups)
        return [
            [
                Written(in_form_of(prompt, decode(one.ids, skip_special_tokens=True)), not one.ended, list(one.ids))
                for one in group
            ]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def rendered(self, prompt: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids that the model gets for a prompt, by its chat template and tokenizer."""
        template_kwargs = {**self.settings.chat_template_kwargs, **(chat_template_kwargs or {})}
        return render_prompt(prompt, self.tokenizer, template_kwargs).ids

    def tokens(self, completion: Any) -> int:
        """Return the length of a completion's text in this model's tokens, without an end token."""
        return len(self.tokenizer(text_of(completion), add_special_tokens=False)["input_ids"])

    def judged(
        self,
        problems: Sequence[Problem],
        reward: Any,
        file: Path,
        stop: StopRequests,
        said: Mapping[str, Any],
        label: str = "pass rates",
    ) -> list[PassRate]:
        """Return completions of every problem with ``reward``'s scores.

        Args:
            problems: rows with a ``prompt`` and the columns that the reward reads.
            reward: judges the completions.
            file: keeps the scored completions, batch by batch. Those that an earlier call left there are used again; a
                file of other samples is refused with ValueError.
            stop: asked before each batch whether to stop.
            said: what the samples depend on besides this generator, for the file's header.
            label: name of the work in lines of progress.
        """

        def written(prompts: Sequence[Any], n: int) -> list[list[Written]]:
            stop.check()  # here every earlier batch is on disk
            return self.written(prompts, n)

        how: Any = {
            "path": file,
            "batch_size": self.settings.problems_per_save,
            "label": label,
            "counted": self.counted,
        }
        how |= {"settings": {**self.identity(), **said}, "rendered": self.rendered}
        return pass_rates(problems, written, reward, self.settings.n_samples, **how)

    def identity(self) -> dict[str, Any]:
        """Return what the samples depend on, for the header of their file: the model's files, the settings, and the
        engine, since another one rounds differently. The chat template is left out: each problem's key in the file
        holds the token ids that `rendered` returns for its prompt."""
        settings = self.settings
        return {
            "model": self.name,
            "files": model_files(self.name),
            "temperature": settings.temperature,
            "max_completion_length": settings.max_completion_length,
            "seed": settings.seed,
            "engine": {"vllm": dict(settings.engine)} if settings.use_vllm else "transformers",
        }


def with_room(problems: Mapping[int, Problem], generator: ModelGenerator) -> dict[int, Problem]:
    """Return the problems whose prompt leaves room for a completion in the model's context; print how many do not."""
    context = generator.context
    completion = generator.settings.max_completion_length
    if context is None:
        return dict(problems)
    room = context - completion
    fitting = {number: one for number, one in problems.items() if len(generator.rendered(one["prompt"])) <= room}
    if problems and not fitting:
        raise no_room(completion, context)
    if len(fitting) < len(problems):
        console.print(
            f"left out {len(problems) - len(fitting):,} of {len(problems):,} {generator.counted}: their prompts leave "
            f"no room for max_completion_length={completion} tokens in the model's context of {context}"
        )
    return fitting


def sample(
    workspace: Workspace,
    problems: Mapping[int, Problem],
    model: str,
    settings: SamplingSettings,
    reward: Any,
    said: Mapping[str, Any],
    label: str,
) -> list[dict[str, Any]]:
    """Return the lines of `samples.jsonl` in the stage's folder; make the file first if it does not exist.

    A line belongs to one problem: its number (``row``), its ``completions``, their ``scores`` and ``lengths`` in
    tokens, and how many of them the token limit ``cut`` off. Problems whose prompt leaves no room for a completion have
    no line. ``said`` and ``label``: as in `ModelGenerator.judged`.
    """
    file = workspace.folder / SAMPLES
    progress = workspace.folder / SAMPLING
    if not file.is_file():
        generator = ModelGenerator(model, settings)
        fitting = with_room(problems, generator)
        rates = generator.judged([*fitting.values()], reward, progress, workspace.stop, said, label)
        lines = [
            {
                "row": row,
                "scores": list(rate.scores),
                "lengths": [generator.tokens(one) for one in rate.completions],
                "cut": rate.cut,
                "completions": [encodable(one) for one in rate.completions],
            }
            for row, rate in zip(fitting, rates, strict=True)
        ]
        write_json_lines(file, lines)
    progress.unlink(missing_ok=True)
    return read_lines(file, SAMPLED)


def sample_facts(lines: Sequence[Mapping[str, Any]], asked: int) -> Facts:
    """Return the facts of a stage that sampled ``asked`` problems: counts, lengths in tokens, and the share of right
    completions among the scored ones. ``tokens`` counts an end token for each completion that was not cut off."""
    each = [(length, score) for line in lines for length, score in zip(line["lengths"], line["scores"], strict=True)]
    cut = sum(line["cut"] or 0 for line in lines)
    scored = [score for _, score in each if score is not None]
    right = [length for length, score in each if score is not None and score >= CORRECT_FROM]
    return {
        "questions": asked,
        "left_out": asked - len(lines),
        "samples": len(each),
        "right_share": len(right) / len(scored) if scored else None,
        "cut": cut,
        "tokens": sum(length for length, _ in each) + len(each) - cut,
        "mean_length": fmean(length for length, _ in each),
        "mean_length_right": fmean(right) if right else None,
    }


def samples_in(file: Path, rows: Sequence[Mapping[str, Any]] | None = None) -> list[Sampled]:
    """Read a file of samples that `sample` or the stage `sample` wrote. ``rows``: the problems, by their number in the
    file; None: the file holds them itself."""
    return [
        Sampled(row["prompt"], line["completions"], line["scores"], line["lengths"], row)
        for line in read_lines(file, OF_A_LINE if rows is None else SAMPLED)
        for row in [line["problem"] if rows is None else rows[line["row"]]]
    ]


def check_lines(place: str, where: str, needs: Fields) -> None:
    """Check the JSON-lines file at ``place``, which the setting ``where`` names, by its first line.

    Raises ValueError if there is no file or no line, or if the first line is damaged or lacks a field of ``needs``
    (name → type). A file that an earlier stage has still to write is not checked.
    """
    file = check_file(place, where)
    if file is None:
        return
    try:
        if next(read_json_lines(file, needs), None) is None:
            raise ValueError(f"{place} has no line")
    except ValueError as error:
        raise ValueError(f"`{where}`: {error}") from error


def lines_in(file: Path) -> int:
    """Return the number of lines of a file, without parsing them."""
    with file.open("rb") as opened:
        return sum(block.count(b"\n") for block in iter(lambda: opened.read(1 << 20), b""))


def read_lines(file: Path, needs: Fields | None = None) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; each must have the fields that it ``needs``."""
    return [row for _, row in read_json_lines(file, needs)]


def plan_of_samples(
    model: Any, reward: RewardSection, settings: SamplingSettings, rows: Any, file: Path, overwrite: bool
) -> Words:
    """Describe for `--dry-run` what will be sampled, and how many problems an earlier run has left in ``file``."""
    each = f"{settings.n_samples} a problem at temperature {settings.temperature:g}"
    total = ""
    if rows is not None:
        total = f", at most {settings.n_samples * len(rows):,} in all"
    tokens = f"of at most {settings.max_completion_length} tokens each"
    there = problems_in(file)
    forgotten = ""
    if overwrite and there:
        forgotten = " (--overwrite makes them anew)"
    return {
        "reward": describe(reward),
        "model": model_of(str(model)),
        "completions": f"{each}{total}, {tokens}; by {'vLLM' if settings.use_vllm else 'transformers'}",
        "samples that are there": f"of {there:,} problems in {file}{forgotten}" if there else "none",
    }


def refuse_other_count(file: Path, n: int, setting: str, instead: str) -> None:
    """Raise ValueError if ``file`` holds another number of samples per problem than ``n``; no model has to be loaded to
    learn it. ``setting`` is the setting that ``n`` comes from, and ``instead`` says what to do, both for the error."""
    if not file.is_file():
        return
    _, first = next(json_lines(file), (1, ""))
    if isinstance(first, str):  # damaged, or another kind of file: reported when it is read
        there = n
    else:
        there = first.get("n", n)
    if there != n:
        raise ValueError(f"`{setting}` is {n} and {file} holds {there} samples a problem; {instead}")
