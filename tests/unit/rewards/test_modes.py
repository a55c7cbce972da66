"""Qwen3's two modes: flags in prompts, rewards for following them, fusion rows token by token."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from grpo_lab.data import apply_template, word_problems
from grpo_lab.data.fusion import FusionShares, fusion_rows, goes_on
from grpo_lab.rewards import ModeFollowingReward, ThinkFormatReward
from grpo_lab.rewards.completion import asks_to_think
from grpo_lab.stages.mix import check_rendering
from grpo_lab.testing import tiny_model, tiny_tokenizer

THOUGHT, BLURTED = "<think>\n2+3=5\n</think>\n\n5", "<think>\n\n</think>\n\n5"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        ([user("Q")], True),
        ([user("Q /think")], True),
        ([user("Q /no_think")], False),
        ([system("/no_think"), user("Q")], False),
        ([system("/no_think"), user("Q /think")], True),
        ([system("/think"), user("Q /no_think")], False),
        ([user("Q /no_think"), answer("5"), user("R")], False),
        ([user("Q /no_think"), answer("say /think"), user("R")], False),  # the assistant's own words are no flag
        ([user("Q /no_think"), answer("5"), user("R /think")], True),
        ([user("Q /no_think or rather /think")], True),
        ([user("see docs/no_think, a/think and /thinking, /think/x")], True),
        ([user("Q /no_think.")], False),
        ("</think> Q /no_think", False),
        ("Q", True),
    ],
)
def test_the_last_flag_wins(prompt: Any, thinks: bool) -> None:
    assert asks_to_think(prompt) is thinks
    reward = pickle.loads(pickle.dumps(ModeFollowingReward()))
    assert reward(prompts=[prompt] * 2, completions=[THOUGHT, BLURTED]) == [float(thinks), float(not thinks)]


@pytest.mark.parametrize(
    ("completion", "think", "no_think", "layout"),
    [
        (THOUGHT, 1, 0, 1),
        (BLURTED, 0, 1, 1),
        ("<think></think>5", 0, 1, 1),
        ("5", 0, 1, 0),
        ("", 0, 1, 0),
        ("<think>\n2+3", 1, 0, 0),  # cut while it thinks
        ("<think>\n\n</think>\n\n", 0, 1, 0),
        ("<think>\n\n</think>\n\n<think>2+3=5</think>5", 1, 0, 0),
        ("so <think>2+3=5</think>5", 1, 0, 0),
        ("2+3=5</think>5", 1, 0, 0),
        ([answer(BLURTED)], 0, 1, 1),
        ([{**answer("5"), "reasoning_content": "2+3=5"}], 1, 0, 1),
        ([{**answer("5"), "reasoning_content": ""}], 0, 1, 1),
    ],
)
def test_rewards_by_hand(completion: Any, think: float, no_think: float, layout: float) -> None:
    prompts = [[user("Q /think")], [user("Q /no_think")]]
    assert ModeFollowingReward()(prompts=prompts, completions=[completion] * 2) == [think, no_think]
    assert ThinkFormatReward("modes")(completions=[completion]) == [layout]


def test_templates_ask_for_a_mode() -> None:
    assert apply_template("Q", "think") == [user("Q /think")]
    assert apply_template("Q", "no_think", system_prompt="Be brief.") == [system("Be brief."), user("Q /no_think")]
    prompts = word_problems(400, template="modes")["prompt"]
    assert prompts == word_problems(400, template="modes")["prompt"]
    asked = Counter(map(asks_to_think, prompts))
    assert 170 <= asked[True] <= 230
    several = [one for one in prompts if sum(turn["content"].endswith("think") for turn in one) == 2]
    assert 90 <= len(several) <= 160
    assert {asks_to_think(one) for one in several} == {True, False}
    plain = [one for one in prompts if not any("think" in turn["content"] for turn in one)]
    assert 30 <= len(plain) <= 70
    assert all(map(asks_to_think, plain))


@pytest.fixture(scope="module")
def hybrid() -> Any:
    """TRL's copy of the hybrid Qwen3 models' chat template on the tiny tokenizer, which has its tokens."""
    import trl

    words = tiny_tokenizer(thinking=True)
    words.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return words


DIALOGUE = [user("Q"), answer(THOUGHT), user("Q"), answer("<think>\n\n</think>\n\n#### 5")]


@pytest.mark.parametrize(
    "messages",
    [
        [user("Q")],
        [system("S /think"), user("Q /no_think")],
        [user("Q"), answer(THOUGHT)],
        [user("Q"), answer("5")],
        [user("Q"), answer("\n<think>a</think>5\n")],
        DIALOGUE[:3],
        DIALOGUE,
        [user("Q"), answer(THOUGHT), answer(THOUGHT), answer("5")],
    ],
)
@pytest.mark.parametrize("how", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_the_tiny_models_chat_template_is_qwen3s(messages: Any, how: Any, hybrid: Any) -> None:
    how = {**how, "add_generation_prompt": messages[-1]["role"] == "user", "tokenize": False}
    ours = tiny_tokenizer(thinking=True).apply_chat_template(messages, **how)
    assert ours == hybrid.apply_chat_template(messages, **how)


def test_tags_and_flags_are_tokens_of_the_tiny_tokenizer() -> None:
    words = tiny_tokenizer(thinking=True)
    text = "Ann? /no_think\n<think>\n\n</think>\n\n#### 5"
    assert words.tokenize(text) == [
        "Ann", "?", "Ġ/", "no", "_think", "Ċ", "<think>", "ĊĊ", "</think>", "ĊĊ", "####", "Ġ", "5",
    ]  # fmt: skip
    assert words.decode(words(text)["input_ids"], skip_special_tokens=True) == text
    assert words.tokenize("/think, /think") == ["/think", ",", "Ġ/", "think"]
    assert len(tiny_tokenizer()) < len(words)
    with pytest.raises(ValueError, match="thinking is for the tiny tokenizer"):
        tiny_model(tokenizer=words, thinking=True)


def rows_of(n: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    thinking = [
        {"prompt": [user(f"Q{i}")], "answer": f"<think>\n{i}+0={i}\n</think>\n\n#### {i}", "row": i} for i in range(n)
    ]
    return thinking, [{"prompt": [system("S"), user(f"P{i}")], "answer": f"#### {i}"} for i in range(n)]


ONLY = {"unflagged": 0.0, "in_system": 0.0, "in_both": 0.0, "dialogues": 0.0}


@pytest.mark.parametrize(
    ("shares", "thinking", "plain"),
    [
        ({}, [user("Q0 /think")], [system("S"), user("P0 /no_think")]),
        ({"in_system": 1.0}, [system("/think"), user("Q0")], [system("S /no_think"), user("P0")]),
        ({"in_both": 1.0}, [system("/no_think"), user("Q0 /think")], [system("S /think"), user("P0 /no_think")]),
        ({"unflagged": 1.0}, [user("Q0")], [system("S"), user("P0 /no_think")]),
    ],
)
def test_fusion_rows_by_hand(shares: Any, thinking: Any, plain: Any) -> None:
    built, flags = fusion_rows(*rows_of(1), FusionShares(**{**ONLY, **shares}))
    first, second = built
    assert first["prompt"] == thinking
    assert first["completion"] == [answer("<think>\n0+0=0\n</think>\n\n#### 0")]
    assert (first["mode"], first["row"]) == ("think", 0)
    assert second["prompt"] == plain
    assert second["completion"] == [answer("<think>\n\n</think>\n\n#### 0")]
    assert sum(flags.values()) == 2


def test_in_a_dialogue_the_last_flag_is_the_rows_mode() -> None:
    built, flags = fusion_rows(*rows_of(200), FusionShares(dialogues=1.0, most_turns=4), seed=1)
    assert flags == {"user": 0, "system": 0, "both": 0, "none": 0, "dialogue": 400, "cut": 0}
    lengths = Counter(sum(turn["role"] == "user" for turn in row["prompt"]) for row in built)
    assert set(lengths) == {2, 3, 4}
    for row in built:
        assert asks_to_think(row["prompt"]) == (row["mode"] == "think")
        earlier = [turn["content"] for turn in row["prompt"] if turn["role"] == "assistant"]
        assert all(text.startswith("#### ") for text in earlier)  # without their reasoning
        assert [turn["role"] for turn in row["prompt"]].count("system") == (row["mode"] == "no_think")
    last = [row["prompt"][-1]["content"] for row in built]
    assert 100 < sum(text.endswith("think") for text in last) < 300  # the others go on in the mode before them


def test_fusion_draws_its_shares() -> None:
    built, flags = fusion_rows(*rows_of(500), FusionShares(unflagged=0.25, in_system=0.4, in_both=0.2, dialogues=0.2))
    assert (
        built == fusion_rows(*rows_of(500), FusionShares(unflagged=0.25, in_system=0.4, in_both=0.2, dialogues=0.2))[0]
    )
    expected = {"user": 280, "system": 280, "both": 140, "none": 100, "dialogue": 200}  # of 1,000; 500 of them think
    assert all(abs(flags[name] - count) < 50 for name, count in expected.items()), flags
    assert all(asks_to_think(row["prompt"]) == (row["mode"] == "think") for row in built)


def test_a_row_that_is_there_once_more_with_its_reasoning_cut() -> None:
    whole, _ = fusion_rows(*rows_of(400), FusionShares())
    built, flags = fusion_rows(*rows_of(400), FusionShares(cut=2))
    assert built[:800] == whole  # the others are as without
    assert flags["cut"] == len(built) - 800 == 800
    for row in built[800:]:
        of = next(one for one in whole if one.get("row") == row["row"])
        *asked, opened = row["prompt"]
        assert asked == of["prompt"]
        thought = opened["content"].removeprefix("<think>\n").removesuffix("\n</think>\n\n")
        number = row["row"]
        assert thought
        assert f"{number}+0={number}".startswith(thought)
        assert (row["completion"], row["mode"], row["flag"]) == ([answer(f"#### {number}")], "think", "cut")
    assert [goes_on(row) for row in built] == [False] * 800 + [True] * 800
    lengths = {len(row["prompt"][-1]["content"]) for row in built[800:]}
    assert len(lengths) >= 8  # of "<think>\n" + 1 to 9 characters, digits and signs one by one


@pytest.mark.parametrize(
    ("thinking", "plain", "said"),
    [
        ([{"prompt": "Q", "answer": THOUGHT}], [], r"row 1 of the fusion: its prompt is 'Q'; messages"),
        ([{"prompt": [user("Q")], "answer": BLURTED}], [], r"row 1 .* it needs one closed block of reasoning"),
        ([{"prompt": [user("Q")], "answer": "<think>a"}], [], r"row 1 .* it needs one closed block"),
        ([], [{"prompt": [user("Q")], "answer": THOUGHT}], r"row 1 .* it needs no block"),
        ([], [{"prompt": [user("Q /think")], "answer": "5"}], r"row 1 .* has a flag already"),
    ],
)
def test_rows_that_cannot_be_fused(thinking: Any, plain: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fusion_rows(thinking, plain, FusionShares())


def test_shares_are_shares() -> None:
    with pytest.raises(ValueError, match=r"`dialogues` is 1\.5; it must be a share between 0 and 1"):
        FusionShares(dialogues=1.5)
    with pytest.raises(ValueError, match=r"`in_system` and `in_both` are 1\.2 together; at most 1"):
        FusionShares(in_both=0.9)
    with pytest.raises(ValueError, match="`most_turns` is 1; it must be a whole number of at least 2"):
        FusionShares(most_turns=1)


TURN, END = ["<|im_start|>", "user", "Ċ"], ["<|im_end|>", "Ċ"]
ASKED = ["<|im_start|>", "assistant", "Ċ"]


@pytest.mark.parametrize("tokenizer", ["tiny", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_fusion_rows_token_by_token(tokenizer: str, hybrid: Any, request: pytest.FixtureRequest) -> None:
    """The whole row as TRL's SFTTrainer tokenizes it, and which of its tokens are trained on: the empty block is."""
    if tokenizer == "qwen3":
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(request.getfixturevalue("grpo_lab_data") / "tokenizers" / "qwen3")
        thinks_always, words.chat_template = words.chat_template, hybrid.chat_template
    else:
        words = tiny_tokenizer(thinking=True)
    thinking = [{"prompt": [user("2+3")], "answer": "<think>\n5\n</think>\n\n5"}]
    plain = [{"prompt": [user("2+3")], "answer": "5"}]
    built, _ = fusion_rows(thinking, plain, FusionShares(**ONLY, cut=1))
    think, no_think = ["Ġ/", "think"], ["Ġ/", "no", *(["_think"] if tokenizer == "tiny" else ["_th", "ink"])]
    wanted = [
        ([*TURN, "2", "+", "3", *think, *END, *ASKED], ["<think>", "Ċ", "5", "Ċ", "</think>", "ĊĊ", "5", *END]),
        ([*TURN, "2", "+", "3", *no_think, *END, *ASKED], ["<think>", "ĊĊ", "</think>", "ĊĊ", "5", *END]),
    ]
    closed = ([*wanted[0][0], "<think>", "Ċ", "5", "Ċ", "</think>", "ĊĊ"], ["5", *END])
    wanted = [*wanted, closed]  # the answer of the third is trained on, no more
    assert tokenized_for_training(built, words) == wanted
    assert list(check_rendering(built, words, "m")) == [len(trained) for _, trained in wanted]
    if tokenizer == "qwen3":
        words.chat_template = thinks_always  # Qwen3's later releases think always: their prompt opens the block
        with pytest.raises(ValueError, match=r"chat template of 'm' cannot switch modes: row 1 .*always thinks"):
            list(check_rendering(built, words, "m"))


def tokenized_for_training(rows: list[dict[str, Any]], words: Any) -> list[tuple[list[str], list[str]]]:
    """Prompt's and trained tokens of each row, out of the trainer's own data set."""
    from datasets import Dataset

    from grpo_lab.trainer.supervised.methods import train_by

    found: list[Any] = []

    def train(trainer: Any) -> None:
        trainer.state.global_step = 1  # nothing is saved of a training without a step
        found.append(trainer)

    model, _ = tiny_model(hidden_size=8, num_layers=1, num_heads=1, tokenizer=words)
    with TemporaryDirectory() as folder:
        arguments = {"use_cpu": True, "bf16": False}
        train_by("sft", model, words, Dataset.from_list(rows), Path(folder), arguments, train=train)
    read = words.convert_ids_to_tokens
    (trainer,) = found
    trained = [[label != -100 for label in row["labels"]] for row in trainer.train_dataset]
    return [
        tuple(read([i for i, own in zip(row["input_ids"], mask, strict=True) if own is part]) for part in (False, True))
        for row, mask in zip(trainer.train_dataset, trained, strict=True)
    ]
