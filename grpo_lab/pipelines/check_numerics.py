"""`grpo-lab check numerics MODEL`: do engine and trainer give a model's tokens the same log-probs, in every turn?

The engine writes transcripts of several turns at temperature 1, with a tool's answer between two turns. The trainer's
model reads each transcript in one forward, as training does. Then the engine draws tokens after parts of the
transcripts, without its cache. What the gaps say: ``diagnostics/numerics.py``; how large rounding makes them:
``engines/weights/proof.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from grpo_lab.diagnostics.numerics import Evidence, Gap, by_part, quarter_of, verdict
from grpo_lab.engines.forward import Rows, forward_logprobs
from grpo_lab.engines.generators import Messages, render_prompt, stop_token_ids
from grpo_lab.engines.vllm.asked_engine import AskedEngine, ColocatedEngine, ServedEngine
from grpo_lab.engines.vllm.engine import EngineOptions, add_engine_options, engine_factory, engine_options_of
from grpo_lab.engines.vllm.presence import refuse_without_engine
from grpo_lab.engines.weights.adapter import AdapterFiles, adapter_tensors
from grpo_lab.engines.weights.proof import sync_gap, tolerance_for
from grpo_lab.evaluation.terminal import print_table
from grpo_lab.io import write_json
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.models import load_saved_model, loading, refuse_adapter
from grpo_lab.recipe.sections import DataSection
from grpo_lab.turns.protocols import TurnTokens
from grpo_lab.turns.trajectory import Trajectory

#: Tool of the transcripts; its answers stand between two turns.
TOOL = {
    "name": "look_up",
    "description": "Look a table up.",
    "parameters": {"type": "object", "properties": {"table": {"type": "string"}}, "required": ["table"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
#: Id of every call.
CALL = "lookup001"
#: Argument of every call; behind it the end of the turn is looked for.
CALLED_WITH = "sevens"
#: The engine's share of the GPU's memory, which it shares with the trainer's model; TRL's default.
SHARE_OF_GPU = 0.3
#: Most prefixes of transcripts after which the engine draws one token anew.
PREFIXES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `grpo-lab check`."""
    add = parser.add_argument
    add("what", choices=["numerics"], help="numerics: log-probs of trainer and engine")
    add("model", metavar="MODEL", help="folder or hub name")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter of the model; the engine holds it beside the base")
    add("--tokenizer", metavar="FOLDER", help="the trainer's tokenizer and chat template (default: the model's)")
    computes = "float32 weights, bfloat16 ones, or float32 ones under autocast to bfloat16, as `bf16: true` trains"
    add("--trainer", choices=["float32", "bfloat16", "autocast"], default="float32", help=computes)
    add("--server", metavar="URL", help="a server that holds the model (default: an engine in this process)")
    add("--token-file", metavar="FILE", help="the server's token, as in `rollout.server.token_file`")
    add("--turns", type=int, default=4, help="turns of the policy (default: 4)")
    add("--length", type=int, default=1024, help="most tokens of a transcript (default: 1024)")
    add("--prompts", type=int, default=16, help="number of transcripts (default: 16)")
    add("--output", type=Path, default=Path("numerics.json"), help="file for the numbers (default: numerics.json)")
    add_engine_options(parser)


def run(known: argparse.Namespace) -> int:
    """Compare engine and trainer, print the gaps and the verdict, and write them to ``--output``; return 0 if one can
    train with this engine, 1 if not. Raises ValueError for options that do not fit."""
    refuse_adapter(known.model, "MODEL")
    options = engine_options_of(known)
    if known.server is None:
        refuse_without_engine("`grpo-lab check numerics MODEL`")
    elif options != EngineOptions(seed=options.seed):
        raise ValueError("--server: the engine's options are those of `grpo-lab serve`; leave them out here")
    prompts = word_problems(known.prompts)
    model, tokenizer = load_saved_model(known.model, use_cpu=False, tokenizer=known.tokenizer)
    trained_in = torch.float32
    if known.trainer == "bfloat16":
        trained_in = torch.bfloat16
    model = model.to(trained_in)
    files = None
    if known.adapter is not None:
        from peft import PeftModel

        with loading(known.adapter):
            model = PeftModel.from_pretrained(model, known.adapter).eval()
        files = AdapterFiles(model)
    engine = _engine(known, options, model, files)
    if files is not None:
        engine.use(files.write(model, adapter_tensors(model.named_parameters(), files.adapter)))
    template = first_difference(engine, tokenizer, prompts)
    stops = stop_token_ids(model.generation_config, tokenizer)
    transcripts = write_transcripts(engine, tokenizer, stops, prompts, known.turns, min(known.length, engine.context))
    autocast = known.trainer == "autocast"
    if autocast:
        trained_in = torch.bfloat16
    found = measure(model, engine, transcripts, template, autocast)
    return _report(known, engine, found, trained_in)


def _engine(known: argparse.Namespace, options: EngineOptions, model: Any, files: AdapterFiles | None) -> AskedEngine:
    """Return the server that ``--server`` names, or start an engine in this process. ``model``: the trainer's, for its
    number format; ``files``: its adapter."""
    if known.server is not None:
        return ServedEngine(known.server, known.token_file)
    room = options.max_model_len or known.length + 1
    rank = None
    if files is not None:
        rank = files.max_rank
    start = engine_factory(replace(options, max_model_len=room), trainer_dtype=model.dtype, max_lora_rank=rank)
    arguments = {"logprobs_mode": "processed_logprobs", "max_num_seqs": max(known.prompts, PREFIXES)}
    return ColocatedEngine(start(model=known.model, gpu_memory_utilization=SHARE_OF_GPU, **arguments))


def word_problems(count: int) -> list[Messages]:
    """Return the messages of ``count`` word problems, with which the transcripts open."""
    section = DataSection("word_problems", arguments={"n": count})
    return list(load_rows(section, "the prompts of transcripts")["prompt"])


def first_difference(engine: AskedEngine, tokenizer: Any, prompts: Sequence[Messages]) -> str | None:
    """Describe the first place where the engine renders messages to other tokens than the trainer's tokenizer; None if
    there is none. All prompts are compared, and one prompt with a call of the tool and its answer."""
    for number, messages in enumerate([*prompts, _with_answer(prompts[0], "7")], start=1):
        ours = rendered(messages, tokenizer)
        theirs = engine.rendered(messages, TOOLS)
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            here = repr(tokenizer.decode(ours[place : place + 8]))
            there = repr(tokenizer.decode(theirs[place : place + 8]))
            which = f"prompt {number}"
            if number > len(prompts):
                which = "a prompt with a tool's answer"
            return f"{which} differs from token {place} on, {here} in the trainer and {there} in the engine"
    return None


def rendered(messages: Messages, tokenizer: Any) -> list[int]:
    """Return the tokens of messages by the trainer's tokenizer, with the description of the tool and the header of the
    next turn."""
    return render_prompt(messages, tokenizer, {"tools": TOOLS}).ids


def _with_answer(prompt: Messages, answer: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt, a call of the tool, and the tool's answer."""
    call = {"id": CALL, "type": "function", "function": {"name": TOOL["name"], "arguments": {"table": CALLED_WITH}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [
        *map(dict, prompt),
        calling,
        {"role": "tool", "tool_call_id": CALL, "name": TOOL["name"], "content": answer},
    ]


def tool_tokens(tokenizer: Any, prompt: Messages, stops: Sequence[int], room: int, number: int) -> list[int]:
    """Return the tokens that follow the end token of a turn: a tool's answer and the header of the next turn.

    Unlike ``turns.dialogue`` this takes any chat template, also one that writes earlier turns anew: a check trains on
    nothing.

    Args:
        tokenizer: the trainer's, with its chat template.
        prompt: messages that the answer is rendered after.
        stops: token ids that end a turn.
        room: most tokens to return; the answer is cut to fit.
        number: whole number that makes this answer another than those of other turns.

    Raises:
        ValueError: the template writes no end token or no answer, or its header alone takes more than ``room``.
    """
    table = " ".join(f"{factor} times 7 is {7 * factor}." for factor in range(100 * number, 100 * number + room))
    words = tokenizer(table, add_special_tokens=False)["input_ids"][:room]
    found: list[int] = []
    while words:
        answer = tokenizer.decode(words)
        ids = rendered(_with_answer(prompt, answer), tokenizer)
        said, call, _ = tokenizer.decode(ids).rpartition(CALLED_WITH)
        behind = len(tokenizer(said + call, add_special_tokens=False)["input_ids"])
        end = next((place for place in range(behind, len(ids)) if ids[place] in stops), None)
        if end is None or answer not in tokenizer.decode(ids[end:]):
            raise ValueError("the chat template writes no tool's answer behind an end token: give --turns 1")
        found = ids[end + 1 :]
        if len(found) <= room:
            return found
        words = words[: room - len(found)]
    raise ValueError(f"a turn has {room} tokens, and a tool's answer begins with {len(found)}: give a larger --length")


def write_transcripts(
    engine: AskedEngine, tokenizer: Any, stops: Sequence[int], prompts: Sequence[Messages], turns: int, length: int
) -> list[Trajectory]:
    """Let the engine write a transcript after each prompt: ``turns`` turns at temperature 1, with a tool's answer
    between two of them.

    A transcript has at most ``length`` tokens. Turns and answers share evenly what the longest prompt leaves of them.
    ``stops``: token ids that end a turn. Raises ValueError if fewer than four tokens are left for each.
    """
    found = [Trajectory.begin(rendered(prompt, tokenizer)) for prompt in prompts]
    longest = max(len(one.prompt) for one in found)
    room = (length - 1 - longest) // (2 * turns - 1)
    if room < 4:
        raise ValueError(f"--length {length} leaves {room} tokens a turn after a prompt of {longest}: give more")
    for turn in range(1, turns + 1):
        written = engine.write([one.so_far for one in found], room)
        found = [one.with_own(TurnTokens(ids, logps, 0)) for one, (ids, logps) in zip(found, written, strict=True)]
        if turn < turns:
            for row, one in enumerate(found):
                closing = []
                if one.ids[-1] not in stops:
                    closing = [stops[0]]
                answer = tool_tokens(tokenizer, prompts[row], stops, room - len(closing), turns * row + turn)
                found[row] = one.with_foreign([*closing, *answer])
    return found


@torch.no_grad()
def trainer_reads(model: Any, rows: Rows, written: Rows, autocast: bool = False) -> list[list[float]]:
    """Return the trainer's log-probs, in nats, of the tokens ``written`` after each row. Rows are computed one at a
    time, since the logits of all may not fit into memory. ``autocast``: compute in bfloat16 by autocast."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        return [forward_logprobs(model, [row], [ids])[0] for row, ids in zip(rows, written, strict=True)]


def measure(
    model: Any,
    engine: AskedEngine,
    transcripts: Sequence[Trajectory],
    template: str | None = None,
    autocast: bool = False,
) -> Evidence:
    """Compare engine and trainer on the tokens that the engine wrote, and on tokens that it draws anew.

    The latter are single tokens that it draws, without its cache, after up to ``PREFIXES`` of each of these: prefixes
    of the transcripts, prefixes of at least three quarters of their transcript, pairs of neighbouring tokens, and
    single tokens. If ``model`` has an adapter (a `PeftModel`), the first of these are also compared without it.

    Args:
        model: the trainer's model.
        engine: the engine that wrote the transcripts.
        transcripts: what it wrote (``write_transcripts``).
        template: how it renders messages differently (``first_difference``); None: it does not.
        autocast: compute the trainer's log-probs in bfloat16 by autocast.

    Raises:
        EngineFault: a log-prob is missing, NaN or infinite.
    """

    def drawn(prefixes: Rows, adapted: bool = True) -> tuple[Rows, list[list[float]]]:
        """Let the engine draw one token after each prefix; return these tokens and its log-probs of them."""
        written = engine.write(prefixes, 1, cached=False, adapted=adapted)
        return [ids for ids, _ in written], [logps for _, logps in written]

    def gap(prefixes: Rows, ids: Rows, by_engine: Sequence[Sequence[float]]) -> Gap:
        """Compare the engine's log-probs of the tokens ``ids`` after the prefixes with the trainer's."""
        by_trainer = trainer_reads(model, prefixes, ids, autocast)
        sync_gap(by_engine, by_trainer)  # raises EngineFault
        return Gap.between(np.concatenate(by_engine), np.concatenate(by_trainer))

    read = trainer_reads(model, [one.prompt for one in transcripts], [one.ids for one in transcripts], autocast)
    tokens = [token for one, logps in zip(transcripts, read, strict=True) for token in _own_tokens(one, logps)]
    turn, quarter, by_engine, by_trainer = (list(column) for column in zip(*tokens, strict=True))
    sync_gap([by_engine], [by_trainer])
    whole = [one.so_far for one in transcripts]
    prefixes = _spread([row[:end] for row in whole for end in range(1, len(row))])
    far = _spread([row[:end] for row in whole for end in range(3 * len(row) // 4, len(row))])
    pairs = _spread(list(map(list, dict.fromkeys(pair for row in whole for pair in pairwise(row)))))
    anew = drawn(prefixes)
    alone = [pair[1:] for pair in pairs]
    found = Evidence(
        turns=by_part(by_engine, by_trainer, turn),
        quarters=by_part(by_engine, by_trainer, quarter),
        anew=gap(prefixes, *anew),
        alone=gap(alone, *drawn(alone)),
        near=gap(pairs, *drawn(pairs)),
        far=gap(far, *drawn(far)),
        template=template,
    )
    if not hasattr(model, "disable_adapter"):
        return found
    with model.disable_adapter():
        return replace(found, base=gap(prefixes, *drawn(prefixes, adapted=False)), unused=gap(prefixes, *anew))


def _own_tokens(one: Trajectory, by_trainer: Sequence[float]) -> Iterator[tuple[int, int, float | None, float]]:
    """Yield of each token that the policy wrote: its turn (from 1), its quarter of the transcript (1 to 4), and its
    log-prob by the engine and by the trainer. ``by_trainer``: log-probs of all tokens after the prompt."""
    by_engine = one.logprobs or []
    for number, turn in enumerate(one.turns, start=1):
        for at in range(turn.first, turn.end):
            yield number, quarter_of(len(one.prompt) + at, len(one.so_far)), by_engine[at], by_trainer[at]


def _spread(rows: list[list[int]]) -> list[list[int]]:
    """Return every n-th of the rows, with the smallest n that leaves at most `PREFIXES` of them."""
    return rows[:: -(-len(rows) // PREFIXES)]


def _report(known: argparse.Namespace, engine: AskedEngine, found: Evidence, trainer: torch.dtype) -> int:
    """Print and write what was found; return the exit code. ``trainer``: number format in which it computes."""
    limit = tolerance_for(engine.dtype, trainer, on_gpu=engine.on_gpu)
    dtypes = [str(one).removeprefix("torch.") for one in (engine.dtype, trainer)]
    train, cause, sentence = verdict(found, limit, dtypes)
    gaps = {f"turn {number}": gap for number, gap in found.turns.items()}
    gaps |= {f"quarter {number}": gap for number, gap in found.quarters.items()}
    gaps |= {"drawn anew": found.anew, "after one token": found.alone, "after two": found.near, "far on": found.far}
    if found.base is not None:
        gaps["without the adapter"] = found.base
    table = [(name, gap.tokens, f"{gap.mean:.1e}", f"{gap.worst:.1e}") for name, gap in gaps.items()]
    head = ["engine and trainer", "tokens", "mean, nats", "worst"]
    print_table(Console(), "", head, table)
    asked = {name: getattr(known, name) for name in ("model", "adapter", "server", "turns", "length")}
    said = {"train": train, "cause": cause, "sentence": sentence, "limit": limit, "dtypes": dtypes}
    write_json(known.output, {**said, "asked": asked, "found": asdict(found)})
    print(f"{sentence}\nnumbers: {known.output}")
    return int(not train)
