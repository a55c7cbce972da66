"""The adapter for token-classification reward models: against one forward a step in float64, in its own tokens, and
what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.sections import RewardSection
from grpo_lab.rewards import TokenClassificationSteps, steps_as_outcome
from grpo_lab.testing import tiny_model, tiny_tokenizer
from step_judge import byte_tokenizer, judge_model, saved_judge

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PROMPTS = ["Ann has 3 packs of 4.", "Ben has 20.", "Ben has 20."]
TEXTS = ["3 * 4 = 12\n  so she has 12.  \n\n#### 12", "20 - 5 = 16", "first\nsecond\nthird\nfourth ½ × 6 = 3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_judge(tmp_path_factory.mktemp("judge"))


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False))


def call(reward: Any, prompts: Any = PROMPTS, texts: list[str] = TEXTS, **columns: Any) -> Any:
    return reward(prompts=prompts, completions=texts, completion_ids=[ids_of(text) for text in texts], **columns)


def one_forward_a_step(prompt: str, text: str, separator: str = "\n", good: int = 1) -> list[float]:
    """Bytes by hand, no batch, no padding; each step on the text up to it and not a letter further. float64."""
    model, vocabulary = judge_model().double().eval(), byte_tokenizer().get_vocab()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found, ids = [], [vocabulary["<s>"], *(vocabulary[c] for c in bytes_of.pre_tokenize_str(prompt)[0][0])]
    for line in [line.strip() for line in text.split("\n") if line.strip()]:
        ids = ids + [vocabulary[c] for c in bytes_of.pre_tokenize_str(line + separator)[0][0]]
        with torch.no_grad():
            found.append(float(model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[good]))
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize(("separator", "good"), [("\n", 1), (" ## ", "bad")])
def test_against_one_forward_a_step(batch_size: int, separator: str, good: int | str, folder: Path) -> None:
    reward = TokenClassificationSteps(
        str(folder), separator=separator, good=good, batch_size=batch_size, tokenizer=tiny_tokenizer()
    )
    found = call(reward)
    assert [len(row) for row in found] == [3, 1, 4]
    for row, prompt, text in zip(found, PROMPTS, TEXTS, strict=True):
        expected = one_forward_a_step(prompt, text, separator, 1 if good == 1 else 0)
        # float32 against float64: two layers of width 32 on logits of about 1; a wrong place is off by 1e-2 and more
        assert [score for _, score in row] == pytest.approx(expected, abs=1e-4)
        assert len({round(score, 3) for _, score in row}) == len(row)


def test_the_end_is_the_policys_token(folder: Path) -> None:
    reward, words = TokenClassificationSteps(str(folder)), tiny_tokenizer()
    with pytest.raises(ValueError, match="tokenizer"):
        call(reward)
    reward.tokenizer = words
    ids = ids_of(TEXTS[2])
    for (end, _), line in zip(call(reward)[2], ("first", "second", "third", "fourth ½ × 6 = 3"), strict=True):
        assert line in words.decode(ids[: end + 1])
        assert line not in words.decode(ids[:end])
    assert len(ids) != len(byte_tokenizer().encode(TEXTS[2]))
    outcome = steps_as_outcome(reward)(PROMPTS, TEXTS, completion_ids=[ids_of(text) for text in TEXTS])
    assert outcome[1] == call(reward)[1][0][1]


def test_loading_leaves_the_random_state_and_dropout_is_off(folder: Path) -> None:
    before = torch.get_rng_state()
    reward = TokenClassificationSteps(folder, tokenizer=tiny_tokenizer())
    assert reward._model is None, "the weights are read when they are first needed"
    assert call(reward) == call(reward)
    assert torch.equal(torch.get_rng_state(), before)
    assert not reward._model.training
    given = TokenClassificationSteps(judge_model().train(), byte_tokenizer(), tokenizer=tiny_tokenizer())
    assert call(given) == call(reward)
    assert call(pickle.loads(pickle.dumps(reward))) == call(reward)


def test_no_step_and_no_token(folder: Path) -> None:
    reward = TokenClassificationSteps(folder, tokenizer=tiny_tokenizer())
    assert call(reward, PROMPTS[:2], ["", " \n "]) == [[], []]


def test_steps_beyond_the_models_length_are_counted_and_not_scored(folder: Path) -> None:
    logged: dict[str, float] = {}
    whole = call(TokenClassificationSteps(folder, tokenizer=tiny_tokenizer()))
    # <s> + 11 bytes of "Ben has 20." + "first\n" + "second\n" = 25; "third\n" would make 31
    short = TokenClassificationSteps(folder, tokenizer=tiny_tokenizer(), max_length=30)
    found = call(short, PROMPTS[1:], TEXTS[1:], log_metric=logged.__setitem__)
    assert [len(row) for row in found] == [1, 2]
    assert [score for _, score in found[1]] == pytest.approx([score for _, score in whole[2][:2]], abs=1e-6)
    assert logged == {"token_classification_steps/beyond_share": 2 / 5}
    with pytest.raises(ValueError, match=r"a prompt has 22 tokens .* reads 20 \(`max_length`\)"):
        call(TokenClassificationSteps(folder, tokenizer=tiny_tokenizer(), max_length=20))
    with pytest.raises(ValueError, match="reads 256"):
        call(TokenClassificationSteps(folder, tokenizer=tiny_tokenizer()), ["x" * 300], TEXTS[:1])


def test_messages_need_a_template_or_a_column(folder: Path) -> None:
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    reward = TokenClassificationSteps(folder, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match=r"no chat template.*`column`"):
        call(reward, messages)
    by_column = TokenClassificationSteps(folder, column="question", tokenizer=tiny_tokenizer())
    assert call(by_column, messages, question=PROMPTS, steps=[1, 2, 2]) == call(reward)
    assert (by_column.columns, reward.columns) == (("question",), ())  # looked for before training
    with pytest.raises(ValueError, match=r"reads the column 'question' .* rows have \['solution'\]"):
        call(by_column, messages, solution=PROMPTS)
    words = byte_tokenizer()
    words.chat_template = TEMPLATE
    chat = TokenClassificationSteps(folder, words, tokenizer=tiny_tokenizer())
    words.bos_token = None  # a template writes its own
    plain = TokenClassificationSteps(folder, words, tokenizer=tiny_tokenizer())
    assert call(chat, messages) == call(plain, [f"<user>{prompt}<a>" for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"good": 2}, r"`good` is 2; .* has 2 labels: \{'bad': 0, 'good': 1\}"),
        ({"good": "right"}, "`good` is 'right'"),
        ({"separator": ""}, "`separator` ''"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"max_length": 0}, "`max_length` is 0"),
        ({"split": "sentence"}, r"`split` is 'sentence'; it must be one of \['line', 'paragraph'\]"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        TokenClassificationSteps(folder, **settings)


def test_models_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder with a saved model here nor one that the hub gives"):
        TokenClassificationSteps(tmp_path / "nowhere")
    policy, words = tiny_model()
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"holds Qwen2ForCausalLM; .*`AutoModelForTokenClassification`"):
        TokenClassificationSteps(tmp_path / "policy")
    with pytest.raises(ValueError, match="give its tokenizer"):
        TokenClassificationSteps(judge_model())
    judge_model().save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match="has no tokenizer beside it"):
        TokenClassificationSteps(tmp_path / "alone")
    headless = judge_model()
    weights = {name: value for name, value in headless.state_dict().items() if not name.startswith("score")}
    headless.save_pretrained(tmp_path / "headless", state_dict=weights)
    with pytest.raises(ValueError, match=r"lack \['score.bias', 'score.weight'\]"):
        call(TokenClassificationSteps(tmp_path / "headless", byte_tokenizer(), tokenizer=words))
    flat = TokenClassificationSteps(Flat(policy.config), words, tokenizer=words)
    with pytest.raises(ValueError, match=r"gave logits \(3, 2\), not \[3, \d+, labels\]"):
        call(flat)


class Flat(torch.nn.Module):
    """Classifies texts: its configuration has two labels, as a token classifier's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.one = config, torch.nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(len(input_ids), 2))


def test_by_name_from_a_recipe(folder: Path) -> None:
    section = RewardSection(
        "token_classification_steps",
        0.5,
        {"model": str(folder), "split": "paragraph", "batch_size": "4", "good": "good"},
    )
    reward = build_reward(section)
    assert (reward.scope, reward.batch_size, reward.good) == ("step", 4, 1)
    reward.tokenizer = tiny_tokenizer()
    assert [len(row) for row in call(reward)] == [2, 1, 1]
    with pytest.raises(ValueError, match=r"has no setting .batch.; did you mean .batch_size."):
        build_reward(RewardSection("token_classification_steps", 1.0, {"model": str(folder), "batch": 4}))
    assert build_reward(RewardSection("equation_steps", 1.0, {"split": "paragraph"})).name == "equation_steps"
