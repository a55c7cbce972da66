"""tiny_model: the real architectures, a tokenizer that loses nothing, and both after saving and loading."""

import hashlib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.data import iter_word_problems, word_problems
from grpo_lab.testing import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.mark.not_fast
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_every_text_comes_back(text: str) -> None:
    """Up to NFC, which Qwen's own tokenizer applies too."""
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)


def test_a_number_is_its_digits_wherever_it_stands() -> None:
    assert TOKENIZER.tokenize("12*3=36") == ["1", "2", "*", "3", "=", "3", "6"]
    assert TOKENIZER.tokenize(" 12 andx12.\n#### 12") == [
        "Ġ", "1", "2", "Ġand", "x", "1", "2", ".Ċ", "####", "Ġ", "1", "2",
    ]  # fmt: skip


def test_each_word_of_the_problems_is_one_token() -> None:
    stream = iter_word_problems(0)
    for _ in range(500):
        problem = next(stream)
        for piece in TOKENIZER.tokenize(problem.question + "\n" + problem.worked_solution):
            letters = piece.replace("Ġ", "").replace("Ċ", "")
            assert len(letters) != 1 or not letters.isalpha() or letters in "Aa", (piece, problem.question)


def test_chat_template_is_chatml_and_marks_the_assistants_part() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "12"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n"
    )
    opened = TOKENIZER.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opened)  # what is generated in RL stands where it stood in the cold start
    marked = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assistant = [token for token, own in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if own]
    assert TOKENIZER.decode(assistant) == "12<|im_end|>"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_saved_and_loaded_they_are_the_same(tmp_path: Path, architecture: str, tie_embeddings: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen3ForCausalLM

    model, tokenizer = tiny_model(architecture, hidden_size=32, tie_embeddings=tie_embeddings, num_kv_heads=2)
    assert isinstance(model, {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}[architecture])
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == tie_embeddings
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    prompts, before = (
        [
            t.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in word_problems(4)["prompt"]
        ]
        for t in (words, tokenizer)
    )
    assert prompts == before
    batch, again = (t([*prompts, "Zürich 漢字 #1"], return_tensors="pt", padding=True) for t in (tokenizer, words))
    assert torch.equal(batch["input_ids"], again["input_ids"])
    assert batch["attention_mask"][0, 0] == 0 or batch["attention_mask"][-1, 0] == 0  # padded on the left
    assert (words.pad_token, words.eos_token) == ("<|endoftext|>", "<|im_end|>")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, loaded(**again).logits)


def test_seeds_and_the_global_random_state() -> None:
    def weights(**settings: Any) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(tiny_model(hidden_size=16, num_heads=2, **settings)[0].parameters())

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = weights(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, weights(seed=1))
    assert not torch.equal(first, weights(seed=2))


def test_the_vocabulary_is_the_same_in_every_process() -> None:
    vocabulary = str(sorted(TOKENIZER.get_vocab().items()))
    assert hashlib.sha256(vocabulary.encode()).hexdigest()[:16] == "8bb7bba76d5b05e2"


@pytest.mark.not_fast
def test_around_the_real_qwen3_tokenizer(grpo_lab_data: Path) -> None:
    model, tokenizer = tiny_model(
        "qwen3", tokenizer=grpo_lab_data / "tokenizers" / "qwen3", hidden_size=16, num_heads=2
    )
    assert model.config.vocab_size == len(tokenizer) == 151_669
    assert tokenizer.decode(tokenizer("12 漢字")["input_ids"]) == "12 漢字"
    assert model.config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"architecture": "llama"}, r"unknown architecture 'llama'; allowed: qwen2, qwen3"),
        ({"hidden_size": 30, "num_heads": 4}, r"hidden_size 30 / num_heads 4"),
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_heads 4 is not divisible by num_kv_heads 3"),
        ({"tokenizer": "/no/such/folder"}, r"'/no/such/folder' is no local folder with a tokenizer.json"),
    ],
)
def test_bad_settings_are_named(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(**settings_)
