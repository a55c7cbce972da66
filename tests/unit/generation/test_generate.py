"""Generation by groups: what every token is drawn from is what the model says of the row alone."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

from grpo_lab.engines import generate
from grpo_lab.engines.generate import STRETCH, generate_by_groups, not_by_groups
from grpo_lab.engines.generators import plain_generation_config
from grpo_lab.trainer.generation.in_step import by_groups

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
PAD, END = 39, 38


def model_of(config: type = Qwen2Config, **changes: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(**{**SIZES, **changes})).double().eval()
    if made.config.vocab_size > END:
        with torch.no_grad():
            made.lm_head.weight[END] += 0.4  # some end soon, some never
    return made


def prompts(groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Left-padded, of 3, 4, … tokens; ``size`` equal rows of each."""
    longest = 2 + groups
    rows = [[PAD] * (longest - 3 - g) + [(7 * g + 5 * t) % 30 for t in range(3 + g)] for g in range(groups)]
    ids = torch.tensor([row for row in rows for _ in range(size)])
    return ids, (ids != PAD).long()


class Scores:
    """A logits processor that holds what each token is drawn from against the row alone, unpadded and without cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.rows, self.gap = model, list[int](), 0.0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.rows.append(len(ids))
        for row, found in zip(ids, scores, strict=True):
            begin = int((row != PAD).int().argmax())
            if END not in row[begin:]:  # what is drawn after the end is thrown away
                with torch.no_grad():
                    alone = self.model.forward(input_ids=row[None, begin:]).logits[0, -1]
                self.gap = max(self.gap, float((alone.float().log_softmax(-1) - found.log_softmax(-1)).abs().max()))
        return scores


def made(model: Any, ids: Tensor, mask: Tensor, tokens: int, temperature: float = 1.0) -> tuple[Tensor, Scores]:
    scores, config = Scores(model), plain_generation_config(temperature, tokens, [END], PAD)
    torch.manual_seed(1)
    with torch.no_grad():
        return generate_by_groups(model.generate, model, ids, mask, config, [scores]), scores


def both_ways(model: Any, ids: Tensor, mask: Tensor, config: GenerationConfig) -> tuple[list[Any], list[Any]]:
    """What transformers' ``generate`` writes, and ours, with the same seed."""
    written = []
    for how in (model.generate, partial(generate_by_groups, model.generate, model)):
        torch.manual_seed(0)
        with torch.no_grad():
            written.append(how(input_ids=ids, attention_mask=mask, generation_config=config).tolist())
    return written[0], written[1]


#: `generate` hands scores on in float32: each of two roundings of numbers below 32, and of their logarithm's sum
ROUNDED = 1e-5


@pytest.mark.not_fast
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, LlamaConfig])
def test_each_token_is_drawn_from_what_the_row_alone_says(config: type) -> None:
    model, (ids, mask) = model_of(config), prompts(5, 4)
    out, scores = made(model, ids, mask, 30)
    assert scores.gap < ROUNDED
    written = out[:, ids.size(1) :]
    lengths = [row.index(END) + 1 if END in row else 30 for row in written.tolist()]
    assert min(lengths) < STRETCH < max(lengths), lengths
    assert out.size(1) - ids.size(1) == max(lengths) or max(lengths) % STRETCH == 0 or max(lengths) < 30
    assert all((row[length:] == PAD).all() for row, length in zip(written, lengths, strict=True))
    assert (out[:, : ids.size(1)] == ids).all()
    # after a stretch only rows that have not ended are computed
    expected = [sum(length > step // STRETCH * STRETCH for length in lengths) for step in range(len(scores.rows))]
    assert scores.rows == expected


@pytest.mark.not_fast
@pytest.mark.parametrize("fault", ["rows", "positions", "prompts"])
def test_the_test_sees_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    model, (ids, mask) = model_of(), prompts(5, 4)
    layer = generate._WithRoom
    chosen = layer.batch_select_indices
    if fault == "rows":  # the first rows stay, whichever ended
        monkeypatch.setattr(
            layer, "batch_select_indices", lambda self, of: chosen(self, torch.arange(len(of)) if len(of) < 20 else of)
        )
    elif fault == "prompts":  # a group reads its neighbour's prompt
        monkeypatch.setattr(
            layer, "batch_select_indices", lambda self, of: chosen(self, of.roll(1) if len(of) == 20 else of)
        )
    else:  # as if padding counted where prompts are read
        monkeypatch.setattr(model, "forward", without_positions(model.forward))
    assert made(model, ids, mask, 30)[1].gap > 100 * ROUNDED


def without_positions(forward: Any) -> Any:
    def forwarded(input_ids: Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(input_ids=input_ids, position_ids=None if input_ids.size(1) > 1 else position_ids, **kwargs)

    return forwarded


@pytest.mark.not_fast
@pytest.mark.parametrize("size", [1, 3])
def test_greedy_is_transformers(size: int) -> None:
    model, (ids, mask) = model_of(), prompts(6, size)
    stock, ours = both_ways(model, ids, mask, plain_generation_config(0.0, 40, [END], PAD))
    assert stock == ours


@pytest.mark.not_fast
def test_whole_completions_come_as_often_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary of five, up to three tokens: each completion's probability by the product of its tokens', counted
    over 6,000, with a look at who has ended after each token."""
    monkeypatch.setattr(generate, "STRETCH", 1)
    model = model_of(vocab_size=5, initializer_range=0.6)
    prompt, size, end = torch.tensor([[1, 2, 3]]), 6000, 0
    ids = prompt.repeat(size, 1)
    config = plain_generation_config(1.0, 3, [end], 4)
    torch.manual_seed(0)
    with torch.no_grad():
        out = generate_by_groups(model.generate, model, ids, torch.ones_like(ids), config)
        chance: dict[tuple[int, ...], float] = {}
        for tokens in itertools.chain(*(itertools.product(range(5), repeat=n) for n in (1, 2, 3))):
            if end in tokens[:-1] or (len(tokens) < 3 and tokens[-1] != end):
                continue
            whole = torch.cat([prompt[0], torch.tensor(tokens)])[None]
            said = model(input_ids=whole[:, :-1]).logits[0, 2:].log_softmax(-1)
            chance[tokens] = float(said.gather(1, torch.tensor(tokens)[:, None]).sum().exp())
    assert sum(chance.values()) == pytest.approx(1.0)
    cut = [tuple(row[: row.index(end) + 1] if end in row else row) for row in out[:, 3:].tolist()]
    found = Counter(cut)
    often = [one for one, share in chance.items() if share * size >= 5]
    rest = [size - sum(found[one] for one in often), size - sum(chance[one] * size for one in often)]
    observed, expected = [found[one] for one in often], [chance[one] * size for one in often]
    if rest[1] > 1:
        observed, expected = [*observed, int(rest[0])], [*expected, rest[1]]
    expected = [one * sum(observed) / sum(expected) for one in expected]
    assert chisquare(observed, expected).pvalue > 1e-3


def test_a_draw_is_the_inverse_of_the_cumulated_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: p = (0, 1, 0, 2, 1, 0), cumulated (0, 1, 1, 3, 4, 4). u Σp = 4u is under 1 for the token 1, under 3 for
    the token 3, else 4; tokens without a chance are never drawn, u = 0 and the largest u below 1 included."""
    chances = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    theirs = torch.multinomial
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2.0**-53, 4), (1.0, 4)):
        monkeypatch.setattr(torch, "rand_like", lambda like, u=u: torch.full_like(like, u))
        with generate.one_number_a_draw():
            assert torch.multinomial(chances, 1).tolist() == [[token]], u
    monkeypatch.undo()
    torch.manual_seed(0)
    with generate.one_number_a_draw():
        drawn = torch.multinomial(chances.expand(40_000, -1), 1).flatten().bincount(minlength=6)
        assert torch.multinomial(chances, 2).shape == (1, 2)  # not one token: torch's
        for broken in (float("nan"), float("inf"), -1.0):
            with pytest.raises(RuntimeError, match="probability tensor"):
                torch.multinomial(torch.tensor([[broken, 0.5]]), 1)
        with pytest.raises(RuntimeError, match=r"probability|multinomial"):
            torch.multinomial(torch.zeros(1, 3), 1)
    assert torch.multinomial is theirs
    assert drawn[[0, 2, 5]].sum() == 0
    assert chisquare(drawn[[1, 3, 4]].numpy(), [10_000, 20_000, 10_000]).pvalue > 1e-4


def test_a_draw_of_another_thread_is_torchs() -> None:
    """Whose stream of random numbers, with the same seed, gives the same tokens inside and outside."""
    chances = torch.rand(200, 30, generator=torch.Generator().manual_seed(3))

    def draw() -> list[int]:
        torch.manual_seed(7)
        return torch.multinomial(chances, 1).flatten().tolist()

    outside = threaded(draw)
    with generate.one_number_a_draw():
        assert threaded(draw) == outside != draw()


def threaded(ask: Any) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(ask).result()


def test_what_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = model_of(), plain_generation_config(1.0, 8, [END], PAD)
    assert not_by_groups(model, plain) is None
    assert not_by_groups(model, plain, {"synced_gpus": False, "pixel_values": None}) is None
    assert "['pixel_values']" in str(not_by_groups(model, plain, {"pixel_values": torch.ones(1)}))
    for name, value in {
        "num_beams": 2,
        "min_new_tokens": 3,
        "stop_strings": ["a"],
        "cache_implementation": "static",
    }.items():
        config = plain_generation_config(0.0, 8, [END], PAD)
        setattr(config, name, value)
        assert not_by_groups(model, config) == f"the generation config asks for ['{name}']"
    sliding = model_of(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert "its cache is no plain one: ['DynamicSlidingWindowLayer']" in str(not_by_groups(sliding, plain))
    stock, ours = both_ways(sliding, *prompts(3, 2), plain)
    assert stock == ours
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    assert "sharded" in str(not_by_groups(model, plain))


@pytest.mark.not_fast
def test_what_the_models_own_config_asks_for_counts() -> None:
    """`generate` fills in what the given config leaves open; a minimum of ten counted anew every `STRETCH` tokens would
    forbid the end for ever, and one token forced at the end of each stretch would come every sixth."""
    plain, (ids, mask) = GenerationConfig(max_new_tokens=30, do_sample=False), prompts(5, 3)
    for name, value in {
        "min_new_tokens": 10, "forced_eos_token_id": END, "forced_bos_token_id": 3, "begin_suppress_tokens": [4],
        "exponential_decay_length_penalty": (3, 1.5), "sequence_bias": [[[5], 2.0]],
    }.items():  # fmt: skip
        model = model_of()
        model.generation_config = GenerationConfig(eos_token_id=[END], pad_token_id=PAD, max_length=20)
        assert not_by_groups(model, plain) is None, "a `max_length` does nothing beside `max_new_tokens`"
        setattr(model.generation_config, name, value)
        assert not_by_groups(model, plain) == f"the model's own generation config asks for ['{name}']"
        stock, ours = both_ways(model, ids, mask, plain)
        assert stock == ours, name
        written = [row[ids.size(1) :] for row in ours]
        ended = [row.index(END) + 1 for row in written if END in row]
        assert name != "min_new_tokens" or 10 < min(ended) < 30


@pytest.mark.not_fast(but="39")
@pytest.mark.parametrize("pad", [PAD, None])
def test_ends_padding_and_length_that_only_the_models_config_has(pad: int | None) -> None:
    """Without a padding token `generate` fills up with the first end."""
    model, (ids, mask) = model_of(), prompts(6, 2)
    model.generation_config = GenerationConfig(eos_token_id=[END, 37], pad_token_id=pad, max_new_tokens=40)
    given = GenerationConfig(do_sample=False)
    with torch.no_grad():
        stock = model.generate(input_ids=ids, attention_mask=mask, generation_config=given)
        rows: list[int] = []
        count = [lambda ids, scores: (rows.append(len(ids)), scores)[1]]
        ours = generate_by_groups(model.generate, model, ids, mask, given, count)
    assert stock.tolist() == ours.tolist()
    assert 0 < rows[-1] < rows[0] == 12, "rows that have ended leave"
    assert not_by_groups(model, given) is None
    model.generation_config.max_new_tokens = None
    assert not_by_groups(model, given) == "the generation config has no `max_new_tokens`"


@pytest.mark.parametrize("asked", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.4}])
def test_what_bends_the_distribution_bends_it_alike(asked: dict[str, float]) -> None:
    """A row alone with the same random numbers as transformers' is the same row, from the same scores."""
    model, (ids, mask) = model_of(), prompts(1, 3)
    config = plain_generation_config(0.0 if "repetition_penalty" in asked else 1.0, 30, [END], PAD)
    for name, value in asked.items():
        setattr(config, name, value)
    seen: list[list[Tensor]] = []
    for generate_ in (model.generate, None):
        found: list[Tensor] = []

        def note(row_ids: Tensor, scores: Tensor, found: list[Tensor] = found) -> Tensor:
            found.append(scores[0].clone())
            return scores

        torch.manual_seed(0)
        how: dict[str, Any] = {"logits_processor": [note]}
        with torch.no_grad():
            if generate_ is None:
                generate_by_groups(model.generate, model, ids[:1], mask[:1], config, [note])
            else:
                with generate.one_number_a_draw():
                    generate_(input_ids=ids[:1], attention_mask=mask[:1], generation_config=config, **how)
        seen.append(found)
    assert not_by_groups(model, config) is None
    assert len(seen[0]) == len(seen[1])
    for stock, ours in zip(*seen, strict=True):
        assert torch.allclose(stock, ours, atol=ROUNDED)


def test_learnt_prompts_and_lora() -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    plain, (ids, mask) = plain_generation_config(0.0, 30, [END], PAD), prompts(4, 2)
    tuned = get_peft_model(model_of(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "learnt prompts" in str(not_by_groups(tuned, plain))
    lora = get_peft_model(model_of(), LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)).double()
    assert not_by_groups(lora, plain) is None
    stock, ours = both_ways(lora, ids, mask, plain)
    assert stock == ours


def test_groups_that_cannot_be_had_are_an_error_and_a_drop_in_is_left_alone() -> None:
    def inside(how: str, objective: Any, model: Any) -> Any:
        trainer: Any = SimpleNamespace(
            lab_settings=SimpleNamespace(rollout=SimpleNamespace(generate=how), objective=objective),
            use_vllm=False, use_transformers_continuous_batching=False, model_wrapped=model,
            accelerator=SimpleNamespace(unwrap_model=lambda one: one),
            generation_config=plain_generation_config(1.0, 8, [END], PAD),
        )  # fmt: skip
        with by_groups(trainer):
            return model.generate

    model, sliding = model_of(), model_of(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    stock = model.generate
    assert inside("auto", None, model) == inside("stock", "dr_grpo", model) == stock
    for how, objective in (("auto", "dr_grpo"), ("groups", None)):
        assert inside(how, objective, model).func is generate_by_groups
    assert model.generate == stock
    with pytest.raises(ValueError, match=r"`rollout.generate` is 'groups', and its cache is no plain one"):
        inside("groups", "dr_grpo", sliding)
    inside("auto", "dr_grpo", sliding)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert inside("auto", "dr_grpo", model) == stock
    with pytest.raises(ValueError, match="'groups', and dropout is active, which a prompt that is read once would sha"):
        inside("groups", "dr_grpo", model)
    model.eval()
    assert inside("auto", "dr_grpo", model).func is generate_by_groups
    model.generation_config.forced_eos_token_id = END  # the last of every stretch
    with pytest.raises(ValueError, match=r"'groups', and the model's own generation config asks for \['forced_eos_tok"):
        inside("groups", "dr_grpo", model)
    inside("auto", "dr_grpo", model)


def test_one_token_prompts_and_one_token_completions() -> None:
    model = model_of()
    ids = torch.tensor([[3], [3], [5]])
    out, scores = made(model, ids, torch.ones_like(ids), 1)
    assert out.shape == (3, 2)
    assert scores.gap < ROUNDED


def test_threads_that_overlap_leave_torchs_draw_behind() -> None:
    """The second comes before the first goes, and goes after it."""
    theirs, second_in, first_out = torch.multinomial, Event(), Event()

    def second() -> None:
        with generate.one_number_a_draw():
            second_in.set()
            assert first_out.wait(60)

    with ThreadPoolExecutor(1) as other:
        with generate.one_number_a_draw():
            done = other.submit(second)
            assert second_in.wait(60)
        first_out.set()
        done.result()
    assert torch.multinomial is theirs


def test_the_cache_has_room_for_what_is_there_not_for_what_might_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 10,000 tokens and an end within a few: at most twice what is held."""
    rooms, ours = list[tuple[int, int]](), generate._WithRoom.update

    def seen(layer: Any, *given: Any, **more: Any) -> Any:
        found = ours(layer, *given, **more)
        rooms.append((layer.whole[0].size(2), found[0].size(2)))
        return found

    monkeypatch.setattr(generate._WithRoom, "update", seen)
    model, (ids, mask) = model_of(max_position_embeddings=20_000), prompts(2, 2)
    with torch.no_grad():
        model.lm_head.weight[END] += 1.0
    out, _ = made(model, ids, mask, 10_000)
    assert out.size(1) < 1000
    assert all(held <= room <= 2 * held for room, held in rooms)


def small(name: str) -> Any:
    """A small model of an architecture that reads its own past in another way than by a cache of keys and values."""
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    own: dict[str, Any] = {
        "RwkvConfig": {"attention_hidden_size": 32, "context_length": 64},
        "XLMConfig": {"causal": True, "n_langs": 1, "use_lang_emb": False, "pad_index": PAD},
        "XLNetConfig": {"d_inner": 48, "d_head": 8},
        "ReformerConfig": {
            "is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False,
            "attention_head_size": 8, "local_attn_chunk_length": 8, "max_position_embeddings": 64,
        },
        "CpmAntConfig": {"dim_head": 8, "dim_ff": 48},
    }.get(name, {})  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**common, **own)).eval()


WITHOUT_CACHE = ["RwkvConfig", "OpenAIGPTConfig", "XLMConfig", "XLNetConfig", "ReformerConfig"]


@pytest.mark.parametrize("name", [*WITHOUT_CACHE, "CpmAntConfig"])
def test_models_without_a_cache_of_keys_and_values_are_left_to_transformers(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CPM-Ant has one, but puts tokens of its own before a prompt: only the reading shows that."""
    model, plain, (ids, mask) = small(name), plain_generation_config(1.0, 15, [END], PAD), prompts(3, 2)
    generate.say_left_to_stock.cache_clear()
    with caplog.at_level("INFO", "grpo_lab"):
        for _ in range(2):
            stock, ours = both_ways(model, ids, mask, plain)
            assert stock == ours
    own = "it does not keep a prompt's keys and values as they are read"
    said = own if name == "CpmAntConfig" else "has no cache of keys and values"
    assert [said in one.getMessage() for one in caplog.records if one.name == "grpo_lab"] == [True]
    assert (not_by_groups(model, plain) is None) == (name == "CpmAntConfig")


@pytest.mark.not_fast(but="20-given")
@pytest.mark.parametrize("place", ["given", "model's generation config", "model's config"])
@pytest.mark.parametrize("tokens", [STRETCH, 20])
def test_without_the_cache_rows_are_left_to_transformers(place: str, tokens: int) -> None:
    """A stretch would read its whole text again behind the keys and values that are there."""
    model, (ids, mask) = model_of(**({"use_cache": False} if place == "model's config" else {})), prompts(4, 2)
    asked = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=[END], pad_token_id=PAD)
    if place != "model's config":
        (asked if place == "given" else model.generation_config).use_cache = False
    assert not_by_groups(model, asked) == "`use_cache` is false in the generation config, or in the model's own"
    scores, found = Scores(model), []
    with torch.no_grad():
        for how in (model.generate, partial(generate_by_groups, model.generate, model)):
            torch.manual_seed(0)
            out = how(input_ids=ids, attention_mask=mask, generation_config=asked, logits_processor=[scores])
            found.append(out.tolist())
    assert found[0] == found[1]
    assert scores.gap < ROUNDED


def test_padding_is_no_text_under_a_repetition_penalty() -> None:
    """The end is the padding token, as with many base models: transformers holds it down in rows that are padded."""
    model, (ids, mask) = model_of(), prompts(4, 2)
    ids[mask == 0] = END
    config = plain_generation_config(0.0, 40, [END], END)
    config.repetition_penalty = 1.4
    with torch.no_grad():
        model.lm_head.weight[END] += 0.2
        alone = [
            model.generate(
                input_ids=row[None, have.bool()], attention_mask=have[have.bool()][None], generation_config=config
            )
            for row, have in zip(ids, mask, strict=True)
        ]
    stock, ours = both_ways(model, ids, mask, config)

    def written(rows: list[list[int]], widths: list[int]) -> list[list[int]]:
        after = [row[width:] for row, width in zip(rows, widths, strict=True)]
        return [row[: row.index(END) + 1] if END in row else row for row in after]

    padded_widths = [ids.size(1)] * len(ids)
    expected = written([row[0].tolist() for row in alone], mask.sum(1).tolist())
    assert written(ours, padded_widths) == expected
    assert written(stock, padded_widths) != expected, "the test sees the fault"
    assert min(map(len, expected)) < 40
