"""LanguageConsistencyReward on texts written for one question each. Figures on real data: tests/reference."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.rewards import words
from grpo_lab.rewards.completion import reasoning_in, reasoning_of
from grpo_lab.rewards.language import LanguageConsistencyReward, language_shares, mixture_shares
from grpo_lab.rewards.words import known_languages, words_of

ENGLISH = "First we add the two numbers, and then we divide the result by three because there are three children."
FRENCH = (
    "D'abord nous additionnons les deux nombres, puis nous divisons le résultat par trois, car il y a trois enfants."
)
CHINESE = "首先我们把两个数相加，然后把结果除以三，因为一共有三个孩子。"
TRADITIONAL = "首先我們把兩個數相加，然後把結果除以三，因為這裡一共有三個孩子。"
JAPANESE = "まず二つの数を足して、それから結果を三で割ります。子供が三人いるからです。"
FORMULAS = (
    "$2x + 3 = 11$ \\[x = \\frac{8}{2} = 4\\] <<4*5=20>>20 3.5 12% `for i in range(3): total += i` "
    "```python\ndef solve(n):\n    return the_answer\n``` x1 y2 f(x) sin cos km \\boxed{4}"
)


def score(text: str, target: str = "en", **settings: Any) -> float:
    (value,) = LanguageConsistencyReward(target, **settings)(completions=[text])
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("text", "language"), [(ENGLISH, "en"), (FRENCH, "fr"), (CHINESE, "zh"), (TRADITIONAL, "zh"), (JAPANESE, "ja")]
)
def test_one_language(text: str, language: str) -> None:
    assert score(text, language) >= 0.95
    assert all(
        score(text, other) <= 0.1 for other in ("en", "fr", "es", "de", "zh", "ja", "ru", "ko") if other != language
    )


@pytest.mark.parametrize("text", [ENGLISH, FRENCH, CHINESE, JAPANESE])
@pytest.mark.parametrize("target", ["en", "fr", "zh", "ja"])
def test_digits_formulas_and_code_change_nothing(text: str, target: str) -> None:
    assert score(f"{text} {FORMULAS} {text}", target) == pytest.approx(score(f"{text} {text}", target), abs=0.02)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("小明有5个苹果，Sophia 给他 3 个，John 又给他 2 个。所以他一共有 10 个苹果。", "zh"),
        ("У Alice было 5 яблок, а у Bob в два раза больше. Сколько яблок у них вместе?", "ru"),
        ("José and Jürgen went to São Paulo. Paulo gave each of them three apples, so they have six apples.", "en"),
        ("Let x be the number of apples. Then 2x + 3 = 11, so x = 4, and y is 3 km away from AB and BC.", "en"),
    ],
)
def test_names_and_variables_are_neither_for_nor_against(text: str, target: str) -> None:
    assert score(text, target) >= 0.9


def test_capitals_do_not_hide_a_language() -> None:
    """Names are forgiven; prose In Capitals Like Names is not."""
    assert score("答案是五。" + FRENCH.title(), "zh") <= 0.4
    # 51 Chinese and 19 French words: at most 15% of all 70 are forgiven, 10.5, so at most 51/59.5 = 0.86 is Chinese
    assert score(CHINESE * 3 + FRENCH.title(), "zh") <= 0.9
    # German nouns are no names: lower-case words around explain them. 15 words beside 17 Chinese ones
    german = "Der Hund und die Katze laufen mit dem Vater über die Straße in den Garten."
    assert score(german + CHINESE, "de") == pytest.approx(15 / 32, abs=0.02)
    assert score(FRENCH.title(), "en") <= 0.3
    assert score(FRENCH.upper(), "en") <= 0.3


def test_neutral_places_do_not_hide_another_script() -> None:
    assert score(f"```\n{CHINESE}\n``` so", "en") <= 0.2
    assert score(f"$ {CHINESE} $ so", "en") <= 0.2
    assert score(f"so \\[\\text{{{FRENCH}}}\\]", "en") <= 0.3


@pytest.mark.parametrize("other", [CHINESE, FRENCH])
def test_half_and_half_by_sentence(other: str) -> None:
    assert score(f"{ENGLISH} {other}") == pytest.approx(0.5, abs=0.1)


def test_a_mix_that_changes_at_every_word() -> None:
    """18 English and 18 French words in turn; the separate words, without neighbours of their own, still tell."""
    turns = [word for pair in zip(ENGLISH.split(), FRENCH.split()) for word in pair]
    assert score(" ".join(turns)) == pytest.approx(0.5, abs=0.1)
    assert score(" ".join(turns), "fr") == pytest.approx(0.5, abs=0.1)


def test_words_that_no_list_knows_are_told_by_their_letters() -> None:
    assert score("vaguest indeterminate directionless headwaters unknowingness") >= 0.9
    assert score("umkehrosmose brennstoffzellenkomponenten netzinternen verdampfungsanlage", "de") >= 0.9
    assert score("umkehrosmose brennstoffzellenkomponenten netzinternen verdampfungsanlage", "en") <= 0.1


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>a b</think> answer", "a b"),
        ("no tags", "no tags"),
        ("<think></think> all of it outside", ""),
        ("<think>cut off by the budget", "cut off by the budget"),
        ("opened by the template</think> answer", "opened by the template"),
        ("before <think>in</think> after", "in"),
        ("<think>one</think> and <think>two</think>", "one\ntwo"),
        ("<think>one</think> and <think>two, cut off", "one\ntwo, cut off"),
        ("<think>a<think>b</think>", "a\nb"),
        ("half a <think", "half a <think"),
        ("</think></think>", ""),
        ("", ""),
    ],
)
def test_the_reasoning(text: str, reasoning: str) -> None:
    assert reasoning_of(text).strip() == reasoning


def test_only_the_reasoning_is_judged() -> None:
    assert score(f"<think>{ENGLISH}</think> {CHINESE}") >= 0.95
    assert score(f"<think>{CHINESE}</think> {ENGLISH}") == 0.0


def test_message_lists_parsed_or_not() -> None:
    plain = [{"role": "assistant", "content": f"<think>{ENGLISH}</think> {CHINESE}"}]
    parsed = [{"role": "assistant", "reasoning_content": ENGLISH, "content": CHINESE}]
    assert reasoning_in(plain) == reasoning_in(parsed) == ENGLISH
    assert LanguageConsistencyReward()(completions=[plain, parsed]) == [score(ENGLISH)] * 2


@pytest.mark.parametrize("text", ["", "<think></think> forty-two", "<think> \n </think>", "2 + 3 = 5", FORMULAS, "?!…"])
def test_wordless_reasoning_has_a_defined_value(text: str) -> None:
    assert score(text) == 0.0
    assert score(text, empty=0.25) == 0.25


def test_target_from_the_prompt() -> None:
    reward = LanguageConsistencyReward("prompt")
    prompts = [FRENCH, CHINESE, [{"role": "system", "content": ENGLISH}, {"role": "user", "content": FRENCH}], "2+2=?"]
    values = reward(prompts=prompts, completions=[FRENCH, ENGLISH, FRENCH, ENGLISH])
    assert values[0] == values[2] == pytest.approx(1.0, abs=0.05)
    assert values[1] == 0.0
    assert values[3] is None  # a formula is in no language: unscorable, not 0
    by_column = LanguageConsistencyReward("prompt", prompt_column="question")
    instructed = [f"{ENGLISH} {ENGLISH} {question}" for question in (FRENCH, CHINESE)]
    assert by_column(prompts=instructed, completions=[FRENCH, FRENCH], question=[FRENCH, CHINESE]) == [values[0], 0.0]
    with pytest.raises(ValueError, match="needs `prompts`, one for each of 1"):
        reward(completions=[ENGLISH])
    with pytest.raises(ValueError, match="the column 'question'"):
        by_column(prompts=["a"], completions=[ENGLISH])


def test_languages_by_their_codes() -> None:
    assert LanguageConsistencyReward("zh-CN").target == "zh"
    assert {"ar", "de", "en", "es", "fr", "hi", "ja", "ko", "pt", "ru", "vi", "zh"} <= set(known_languages())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": "klingon"}, "`target` must be 'prompt' or one of"),
        ({"empty": 2.0}, r"must be in \[0, 1\]"),
        ({"target": "en", "prompt_column": "question"}, "has no effect"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LanguageConsistencyReward(**settings)


@pytest.mark.not_fast
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_has_a_score_between_0_and_1(text: str) -> None:
    assert 0.0 <= score(text) <= 1.0
    shares = language_shares(text)
    assert shares.words == 0 or sum(shares.shares.values()) == pytest.approx(1.0)


@pytest.mark.not_fast(cases="'\\u4e2da\\u4e2da\\u4e2da\\u4e2da'")
@pytest.mark.parametrize(
    "text",
    [
        *("[asy]" * 20_000, "$" * 100_000, "$a" * 50_000, "`" * 100_001, "\\text{" * 20_000, "\\(" * 50_000),
        *("a" * 100_000, "é" * 100_000, "a\u0301" * 50_000, "a.b@" * 25_000, "<<" * 50_000, "a'" * 50_000),
        *("中a" * 50_000, "<think>" * 15_000, "\\begin{align}" * 8_000, "\ud800" * 100, "$$x" * 30_000),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    began = time.process_time()
    assert 0.0 <= score(text) <= 1.0
    assert time.process_time() - began < 10  # some 0.1 s alone; a quadratic pattern takes minutes


def test_words_of_spaced_and_unspaced_scripts() -> None:
    assert [word.text for word in words_of("Don't l’ami हिन्दी में 2nd café")] == ["don't", "l'ami", "हिन्दी", "में", "café"]
    assert [(word.text, word.group) for word in words_of("是even数")] == [
        ("是", "cjk"),
        ("even", "latin"),
        ("数", "cjk"),
    ]
    assert words_of("cos(x) = AB + \\alpha \\frac{1}{2} <<1+1=2>> my_var camelCase https://a.b/c me@a.org") == []
    assert [word.text for word in words_of("It costs $5 and he pays $7 more")][:3] == ["it", "costs", "and"]
    # 30 Han characters weigh as much as 30 / 1.55 ≈ 19 words, 10 single ones between spaces as 10
    assert language_shares("我" * 30).words == 19
    assert language_shares("我 " * 10).words == 10


def test_mixture_by_hand() -> None:
    # Two languages, words a (only in 1), b (only in 2), c (equal in both): π = (3, 1)/4 with 3 a and 1 b, whatever c
    table = np.array([[1.0, 1e-9], [1e-9, 1.0], [0.5, 0.5]])
    assert mixture_shares(table, np.array([3.0, 1.0, 4.0])) == pytest.approx([0.75, 0.25], abs=1e-3)
    # A word nobody can place goes to the expected language, one that is placed does not
    assert mixture_shares(table[2:], np.array([2.0]), expected=1)[1] > 0.6
    assert mixture_shares(table[:1], np.array([2.0]), expected=1) == pytest.approx([1.0, 0.0], abs=1e-3)
    with pytest.raises(ValueError, match="one row of likelihoods per counted word"):
        mixture_shares(table, np.array([1.0]))


ANOTHER_PROCESS = """
import sys
from grpo_lab.rewards.language import LanguageConsistencyReward
print(LanguageConsistencyReward("en")(completions=[sys.argv[1]]), flush=True)
for name in [name for name in sys.modules if name.startswith("grpo_lab")]:
    del sys.modules[name]
sys.modules["wordfreq"] = None
from grpo_lab.rewards.language import LanguageConsistencyReward
LanguageConsistencyReward("en")(completions=["the cat"])
"""


@pytest.mark.slow
def test_it_is_the_same_in_every_process_and_names_a_missing_library() -> None:
    """Rewards must agree over ranks: no dependence on the hash seed or on what was scored before."""
    mixed = f"{ENGLISH} {FRENCH} {CHINESE} Ελλάδα Москва Anna Bob {JAPANESE}"
    command, environment = [sys.executable, "-c", ANOTHER_PROCESS, mixed], {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.stdout == f"{[score(mixed)]}\n"
    assert done.returncode != 0
    assert "pip install 'grpo_lab[language]'" in done.stderr


def test_a_guess_is_the_same_to_the_bit_each_time() -> None:
    """lingua adds up in the order of a hash map, which is another one in each call."""
    latin = words.LANGUAGES_OF_GROUP["latin"]
    guess = words._guessed.__wrapped__
    assert len({guess(word, latin).tobytes() for word in ["qwertzu"] * 30}) == 1
