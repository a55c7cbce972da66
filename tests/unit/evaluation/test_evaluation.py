"""`evaluate` on real (tiny, random) models: order, padding, stopping, sampling, grading, files."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from grpo_lab.engines.generators import render_prompt
from grpo_lab.evaluation import (
    Completion,
    EvaluationResult,
    EvaluationStopped,
    Outcome,
    TransformersGenerator,
    evaluate,
    paired_gain,
)
from grpo_lab.evaluation.terminal import comparison_rows
from grpo_lab.finite import NumbersError
from grpo_lab.stages.held_out import flat_facts
from grpo_lab.testing import tiny_model

torch.set_num_threads(1)
PROMPTS = ["2 + 2 =", "What is 3 times 7, and why? Say it in full, please.", "A", "9 - 4 =", "Lena has 12 apples and"]


@pytest.fixture(scope="module")
def model_and_tokenizer():
    # Wide weights: a random model at 0.02 repeats one token and every test below would pass by accident.
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, num_heads=2, initializer_range=0.3, seed=3)
    return model.double(), tokenizer


def length_reward(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(text) % 2) for text in texts]


def greedy_by_hand(model, ids, stops, budget):
    """No cache, no padding, no generate(): the oracle."""
    written = []
    while len(written) < budget:
        with torch.no_grad():
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
        if written[-1] in stops:
            break
    return written


def rows_of(prompts):
    return [{"prompt": prompt, "solution": str(place)} for place, prompt in enumerate(prompts)]


# --- greedy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_greedy_is_the_argmax_of_each_prompt_alone_in_the_rows_order(model_and_tokenizer, batch_size):
    model, tokenizer = model_and_tokenizer
    result = evaluate(
        model, tokenizer, rows_of(PROMPTS), reward=length_reward, max_new_tokens=9, batch_size=batch_size,
        progress=False,
    )  # fmt: skip
    assert [o.question for o in result.greedy] == PROMPTS
    assert [o.solution for o in result.greedy] == ["0", "1", "2", "3", "4"]
    for outcome in result.greedy:
        written = greedy_by_hand(model, tokenizer(outcome.question)["input_ids"], {tokenizer.eos_token_id}, 9)
        assert outcome.completion == tokenizer.decode(written, skip_special_tokens=True)
        assert outcome.tokens == len(written)


def test_stops_at_every_eos_and_counts_it(model_and_tokenizer):
    """The third token the model writes is made an end token: three tokens, not truncated, and not in the text."""
    model, tokenizer = model_and_tokenizer
    ids = tokenizer(PROMPTS[1])["input_ids"]
    written = greedy_by_hand(model, ids, set(), 9)
    place = next(i for i in range(2, 9) if written[i] not in written[:i])
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, written[place]]
    try:
        generator = TransformersGenerator(model, tokenizer, batch_size=8, progress=False)
        [[stopped]] = generator([ids], n=1, temperature=0.0, max_new_tokens=9, seed=0)
    finally:
        model.generation_config.eos_token_id = before
    assert (len(stopped.ids), stopped.ended) == (place + 1, True)
    [[cut]] = generator([ids], n=1, temperature=0.0, max_new_tokens=place, seed=0)
    assert (len(cut.ids), cut.ended) == (place, False)


def test_a_batch_mate_that_goes_on_does_not_lengthen_a_finished_answer(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    stop = greedy_by_hand(model, ids[1], set(), 2)[1]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = stop
    try:
        generator = TransformersGenerator(model, tokenizer, batch_size=8, progress=False)
        found = generator(ids, n=1, temperature=0.0, max_new_tokens=9, seed=0)
    finally:
        model.generation_config.eos_token_id = before
    for one, [completion] in zip(ids, found, strict=True):
        written = greedy_by_hand(model, one, {stop, tokenizer.eos_token_id}, 9)
        assert completion.ids == written
        assert completion.ended == (written[-1] in {stop, tokenizer.eos_token_id})
    assert {completion.ended for [completion] in found} == {True, False}


def test_the_models_own_generation_config_bends_nothing(model_and_tokenizer):
    """Qwen2.5-Instruct ships repetition_penalty 1.05, top_k 20, top_p 0.8: an evaluation must not inherit them."""
    model, tokenizer = model_and_tokenizer
    generator = TransformersGenerator(model, tokenizer, batch_size=8, progress=False)
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    calls = [{"n": 1, "temperature": 0.0}, {"n": 3, "temperature": 1.0}]
    plain = [generator(ids, **call, max_new_tokens=8, seed=5) for call in calls]
    own = model.generation_config
    bent = {"repetition_penalty": 9.0, "top_k": 1, "top_p": 0.01, "min_p": 0.99, "no_repeat_ngram_size": 1}
    model.generation_config = type(own).from_dict(own.to_dict() | bent | {"do_sample": True, "num_beams": 2})
    try:
        assert [generator(ids, **call, max_new_tokens=8, seed=5) for call in calls] == plain
    finally:
        model.generation_config = own
    assert plain[1] != [[row[0]] * 3 for row in plain[0]]


def test_log_probs_are_the_model_s_own_at_temperature_1(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    generator = TransformersGenerator(model, tokenizer, batch_size=3, progress=False, logprobs=True)
    for heat in (0.0, 0.5):
        for prompt, [one] in zip(ids, generator(ids, n=1, temperature=heat, max_new_tokens=7, seed=0), strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([prompt + one.ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert one.logprobs == pytest.approx(scores[range(len(one.ids)), one.ids].tolist(), abs=1e-5)


def test_training_mode_comes_back_even_after_an_error(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    model.train()
    generator = TransformersGenerator(model, tokenizer, batch_size=8, progress=False)
    generator([[5, 6]], n=1, temperature=0.0, max_new_tokens=1, seed=0)
    assert model.training
    with pytest.raises(IndexError):
        generator([[10**6]], n=1, temperature=0.0, max_new_tokens=1, seed=0)
    assert model.training
    model.eval()


# --- sampled ------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_samples_follow_from_the_seed_and_leave_the_random_state_alone(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    torch.manual_seed(77)
    state = torch.get_rng_state()

    def sampled(seed):
        result = evaluate(
            model, tokenizer, rows_of(PROMPTS), reward=length_reward, max_new_tokens=8, batch_size=4, n_samples=3,
            temperature=1.5, seed=seed, progress=False,
        )  # fmt: skip
        return [(o.problem, o.sample, o.completion) for o in result.sampled]

    first = sampled(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert sampled(1) == first
    assert sampled(2) != first
    assert [(p, s) for p, s, _ in first] == [(p, s) for p in range(5) for s in range(3)]
    assert len({text for problem, _, text in first if problem == 0}) > 1


@pytest.mark.not_fast
def test_sampling_is_the_softmax_at_the_temperature(model_and_tokenizer):
    """4,000 first tokens against softmax(logits/T). Total variation of a true sample is about √(K/(2πN)) ≤ 0.1 here."""
    model, tokenizer = model_and_tokenizer
    ids = tokenizer(PROMPTS[0])["input_ids"]
    generator = TransformersGenerator(model, tokenizer, batch_size=4000, progress=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    # Batch rows and not texts: several tokens may decode alike.
    (written,) = generator([ids], n=4000, temperature=0.7, max_new_tokens=1, seed=0)
    rows = [one.ids for one in written]
    sampled = torch.bincount(torch.tensor(rows)[:, 0], minlength=len(logits)).double()
    distance = 0.5 * (sampled / 4000 - torch.softmax(logits / 0.7, -1)).abs().sum()
    wrong_heat = 0.5 * (sampled / 4000 - torch.softmax(logits, -1)).abs().sum()
    assert distance < 0.1
    assert wrong_heat > 0.15


# --- prompts ------------------------------------------------------------------------------------------------------


def test_message_prompts_go_through_the_chat_template_as_in_training(model_and_tokenizer):
    _, tokenizer = model_and_tokenizer
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}]
    opened = [*question, {"role": "assistant", "content": "It is"}]  # closed unless it is to be gone on with
    for messages in (question, opened):
        trls = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        rendered = render_prompt(messages, tokenizer)
        assert rendered.ids == trls["input_ids"]
        assert rendered.text == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render_prompt(opened, tokenizer, continues=True).text.endswith("It is")


def test_rewards_get_messages_for_messages_and_every_column(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1.0] * len(prompts)

    prompts = [[{"role": "user", "content": "3 + 4?"}], [{"role": "user", "content": "What is 12 less 5 of them?"}]]
    rows = Dataset.from_list([{"prompt": p, "solution": "7", "level": 2} for p in prompts])
    result = evaluate(model, tokenizer, rows, reward=reward, max_new_tokens=3, batch_size=2, progress=False)
    assert seen["prompts"] == prompts
    assert seen["solution"] == ["7", "7"]
    assert seen["level"] == [2, 2]
    assert [c[0]["role"] for c in seen["completions"]] == ["assistant"] * 2
    assert [c[0]["content"] for c in seen["completions"]] == [o.completion for o in result.greedy]
    assert [o.question for o in result.greedy] == ["3 + 4?", "What is 12 less 5 of them?"]


# --- grading, with a scripted generator ---------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a letter, so that lengths can be counted by hand."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


class Scripted:
    """Completions by temperature and place; stands where vLLM would."""

    def __init__(self, tokenizer, greedy, sampled=()):
        self.encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        self.texts = {True: [[text] for text in greedy], False: sampled}

    def __call__(self, prompts, *, n, temperature, max_new_tokens, seed):
        return [
            [Completion(self.encode(text), ended=not text.endswith("…")) for text in row]
            for row in self.texts[temperature == 0]
        ]


def test_rewards_that_read_tokens_are_given_them(model_and_tokenizer):
    """As TRL gives them to every reward: one that needs them could be a run's reward and no measure of it."""
    model, tokenizer = model_and_tokenizer
    seen = []

    def ends(prompts, completions, completion_ids, **columns):
        seen.extend(completion_ids)
        return [float(len(ids) > 2) for ids in completion_ids]

    found = evaluate(
        model, tokenizer, rows_of(["a b", "c"]), reward=length_reward, measures={"ends": ends}, max_new_tokens=4,
        batch_size=2, progress=False,
    )  # fmt: skip
    assert [len(ids) for ids in seen] == [one.tokens for one in found.outcomes]
    assert [one.measures["ends"] for one in found.outcomes] == [float(len(ids) > 2) for ids in seen]


def exact_reward(prompts, completions, solution, **columns):
    return [
        None if gold is None else float(c.strip("…").endswith(gold))
        for c, gold in zip(completions, solution, strict=True)
    ]


def scripted_result(**kwargs):
    tokenizer = Letters()
    rows = [{"prompt": f"q{i}", "solution": gold} for i, gold in enumerate(["18", "7", "3", None])]
    greedy = ["A: 18", "it is 8", "so then 4…", "x"]
    sampled = [["18", "9", "9", "18", "18"], ["7", "1", "2", "3", "4"], ["4", "4", "5", "3", "4"], ["1"] * 5]
    return evaluate(
        None, tokenizer, rows, reward=exact_reward, max_new_tokens=10, batch_size=1, n_samples=5, progress=False,
        generate=Scripted(tokenizer, greedy, sampled), **kwargs,
    )  # fmt: skip


def test_numbers_by_hand():
    result = scripted_result(answer=lambda text: text)
    assert (result.n_problems, result.accuracy.n) == (4, 3)
    assert result.accuracy.value == pytest.approx(1 / 3)  # q3 is unscorable and in no accuracy
    assert result.numbers["unscorable_share"] == pytest.approx(1 / 4)
    assert result.numbers["truncated_share"] == pytest.approx(1 / 4)
    assert result.mean_length_correct == 5  # "A: 18"
    assert result.numbers["mean_length_incorrect"] == pytest.approx((7 + 10) / 2)
    assert result.mean_length == pytest.approx((5 + 7 + 10 + 1) / 4)
    assert result.sampled_accuracy.value == pytest.approx((3 / 5 + 1 / 5 + 1 / 5) / 3)
    assert result.pass_at[1].to_dict() == pytest.approx(result.sampled_accuracy.to_dict())
    # pass@2 = 1 − C(n−c,2)/C(5,2): c=3 -> 1 − 1/10; c=1 -> 1 − 6/10, twice
    assert result.pass_at[2].value == pytest.approx((0.9 + 0.4 + 0.4) / 3)
    assert result.pass_at[5].value == 1.0
    # maj@5: 18 wins 3:2 -> right; five single votes -> 1/5; 4 wins -> wrong
    assert result.majority_at[5].value == pytest.approx((1 + 0.2 + 0) / 3)
    assert sorted(result.pass_at) == [1, 2, 4, 5]
    assert scripted_result().majority_at == {}  # without a reader of answers there is no vote


def test_accuracy_rewards_own_reader_votes(model_and_tokenizer):
    from grpo_lab.rewards.math.accuracy import AccuracyReward

    rows = [{"prompt": "q", "solution": "1200"}]
    sampled = [["#### 1,200", r"\boxed{1200}", "#### 3", "#### 5", "no answer"]]
    reward = AccuracyReward(mode="strict")
    try:
        result = evaluate(
            None, model_and_tokenizer[1], rows, reward=reward, max_new_tokens=10, batch_size=1, n_samples=5,
            generate=Scripted(model_and_tokenizer[1], ["#### 1200"], sampled), progress=False,
        )  # fmt: skip
    finally:
        reward.close()
    assert result.accuracy.value == 1.0
    assert result.sampled_accuracy.value == pytest.approx(2 / 5)
    assert result.majority_at[5].value == 1.0
    assert result.settings["reward"] == "accuracy_reward"


def test_all_unscorable_has_no_accuracy_and_says_so(model_and_tokenizer):
    rows = [{"prompt": "q", "solution": None}]
    result = evaluate(
        None, model_and_tokenizer[1], rows, reward=exact_reward, max_new_tokens=1, batch_size=1,
        generate=Scripted(model_and_tokenizer[1], ["a"]),
    )  # fmt: skip
    assert result.accuracy is None
    assert result.numbers["unscorable_share"] == 1.0
    assert result.mean_length_correct is None


def test_what_generate_and_reward_raise_comes_through(model_and_tokenizer):
    def broken(prompts, **settings):
        raise RuntimeError("CUDA out of memory")

    def broken_reward(prompts, completions, **columns):
        raise KeyError("verifier bug")

    tokenizer = model_and_tokenizer[1]
    rows = [{"prompt": "q"}]
    common = {"max_new_tokens": 1, "batch_size": 1, "progress": False}
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(None, tokenizer, rows, reward=length_reward, generate=broken, **common)
    with pytest.raises(KeyError, match="verifier bug"):
        evaluate(None, tokenizer, rows, reward=broken_reward, generate=Scripted(tokenizer, ["a"]), **common)


# --- prompts that do not fit, Ctrl-C ------------------------------------------------------------------------------


def test_a_prompt_without_room_is_left_out_counted_and_said(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rows = rows_of(["2 + 2 =", "word " * 600, "7 - 3 ="])
    common = {"reward": length_reward, "max_new_tokens": 8, "batch_size": 4, "progress": False}
    found = evaluate(model, tokenizer, rows, **common)
    assert [outcome.problem for outcome in found.greedy] == [0, 2]  # the rows' own numbers, so that runs can be paired
    assert found.settings["prompts_too_long"] == 1
    assert found.gaps == [
        "1 of 3 problems were left out: their prompts leave no room for max_new_tokens=8 in the model's context"
    ]
    assert [o.completion for o in found.greedy] == [
        o.completion for o in evaluate(model, tokenizer, [rows[0], rows[2]], **common).greedy
    ]


def test_no_advice_that_cannot_be_followed(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    common = {"reward": length_reward, "batch_size": 4, "progress": False}
    with pytest.raises(ValueError, match="No max_new_tokens makes room after it"):
        evaluate(model, tokenizer, rows_of(["word " * 600]), max_new_tokens=8, **common)
    with pytest.raises(ValueError, match=r"the shortest prompt has \d+ tokens.*Lower max_new_tokens to at most 50\d"):
        evaluate(model, tokenizer, rows_of(["2 + 2 =", "word " * 600]), max_new_tokens=512, **common)
    with pytest.raises(ValueError, match="No max_new_tokens"):
        TransformersGenerator(model, tokenizer, 2)([[5] * 600], n=1, temperature=0.0, max_new_tokens=4, seed=0)


@pytest.mark.parametrize("number", [math.nan, 3e38])
def test_a_model_whose_scores_are_not_finite_is_no_bad_model(number):
    """Greedy took token 0 for each, and the accuracy was 0%; sampled, torch said "probability tensor"."""
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=1)
    with torch.no_grad():
        model.model.norm.weight.fill_(number)
    for temperature in (0.0, 1.0):
        with pytest.raises(NumbersError, match="scores of the next token are not finite"):
            TransformersGenerator(model, tokenizer, 2)([[5, 6]], n=1, temperature=temperature, max_new_tokens=4, seed=0)


@pytest.mark.not_fast(but="3")
@pytest.mark.parametrize("after", [1, 3])
def test_ctrl_c_keeps_the_answers_that_are_there(model_and_tokenizer, monkeypatch, after):
    """The third batch is the first of the sampled round: then the greedy ones are whole."""
    model, tokenizer = model_and_tokenizer
    rows = rows_of(["2 + 2 =", "7 - 3 =", "a longer one: 9 * 9 =", "1 ="])
    common = {"reward": length_reward, "max_new_tokens": 4, "batch_size": 2, "n_samples": 2, "progress": False}
    whole = evaluate(model, tokenizer, rows, **common)
    generate, calls = model.generate, []

    def interrupted(**words):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(words)
        return generate(**words)

    monkeypatch.setattr(model, "generate", interrupted)
    with pytest.raises(EvaluationStopped) as stop:
        evaluate(model, tokenizer, rows, **common)
    kept = stop.value.result
    assert set(kept.outcomes) < set(whole.outcomes)
    assert (len(kept.greedy), len(kept.sampled)) == ((2, 0) if after == 1 else (4, 2))
    said = "after 2 of 4 greedy answers" if after == 1 else "after 2 of 8 sampled answers"
    assert kept.stopped == f"{said}, the longest prompts first"
    assert "no fair sample" in kept.gaps[0]


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": []}, "no rows to evaluate"),
        ({"rows": [{"question": "q"}]}, r"no column `prompt`; its columns are \['question'\]"),
        ({"rows": [{"prompt": "q"}, {"prompt": "q", "x": 1}]}, "row 1 has the columns"),
        ({"rows": [{"prompt": 7}]}, "row 0: `prompt` must be a string or a non-empty list of messages"),
        ({"rows": [{"prompt": []}]}, "non-empty list of messages"),
        ({"rows": [{"prompt": [{"role": "user"}]}]}, "`role` and `content`"),
        ({"rows": [{"prompt": ""}]}, "row 0: the prompt '' has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number of at least 1, got 1.5"),
        ({"n_samples": -1}, "n_samples must be a whole number of at least 0, got -1"),
        ({"n_samples": 2, "temperature": 0.0}, "temperature must be above 0 to draw n_samples=2"),
        ({"n_samples": 2, "temperature": math.nan}, "temperature must be above 0"),
        ({"model": None}, "needs a model, or generate="),
        ({"max_new_tokens": 512}, r"together 51\d, but the model's context \(max_position_embeddings\) is 512"),
        ({"reward": lambda prompts, completions, **_: [1.0, 0.0]}, "returned 2 rewards for 1 completions"),
        ({"reward": lambda prompts, completions, **_: [math.inf]}, "returned inf for completion 0"),
        ({"reward": lambda prompts, completions, **_: [math.nan]}, "returned nan for completion 0"),
        (
            {"reward": lambda prompts, completions, **_: ["0.5"]},
            "the reward '<lambda>' returned '0.5' for completion 0; allowed are",
        ),
        (
            {"reward": lambda prompts, completions, **_: 0.5},
            "the reward '<lambda>' returned a float; it must return a list",
        ),
        ({"generate": lambda prompts, **_: []}, "returned 0 lists"),
    ],
)
def test_bad_input_is_named(model_and_tokenizer, change, said):
    model, tokenizer = model_and_tokenizer
    settings = {
        "model": model, "tokenizer": tokenizer, "rows": [{"prompt": "2 + 2 ="}], "reward": length_reward,
        "max_new_tokens": 2, "batch_size": 2, "progress": False,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=said):
        evaluate(settings.pop("model"), settings.pop("tokenizer"), settings.pop("rows"), **settings)


# --- files --------------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>\u2028\u0000\ud800 ﷺ {{7*7}}\r\n" + "x" * 1000


def hostile_result():
    outcomes = [
        Outcome(0, "greedy", 0, "q\u2029?", "q", "1", HOSTILE, 9, True, 1.0, None),
        Outcome(1, "greedy", 0, "other", "other", None, "", 0, False, None, "12"),
    ]
    return EvaluationResult(tuple(outcomes), {"max_new_tokens": 9}, 1.5)


def test_written_results_read_back_and_all_files_agree(tmp_path):
    result = hostile_result()
    folder = result.write(tmp_path / "evaluation" / "after")
    again = EvaluationResult.read(folder)
    assert again.outcomes[0].completion == HOSTILE.replace("\ud800", "\ufffd")  # half a surrogate pair fits in no file
    assert again.outcomes[1] == result.outcomes[1]
    assert again.summary() == result.summary()
    table = pq.read_table(folder / "outcomes.parquet").to_pylist()
    lines = (folder / "outcomes.jsonl").read_bytes().decode().split("\n")[:-1]
    assert table == [json.loads(line) for line in lines]
    assert [row["correct"] for row in table] == [True, None]
    assert sorted(path.name for path in folder.iterdir()) == ["outcomes.jsonl", "outcomes.parquet", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["greedy"]["accuracy"] == result.accuracy.to_dict()
    assert summary["greedy"]["unscorable_share"] == 0.5
    assert summary["sampled"] is None
    assert summary["settings"] == {"max_new_tokens": 9}


def test_accuracy_by_a_column_by_hand(model_and_tokenizer, tmp_path):
    """Groups in the order of their numbers; a sum over groups is the whole; an unscorable answer is in none."""
    model, tokenizer = model_and_tokenizer
    rows = [{"prompt": prompt, "right": right, "steps": steps} for prompt, right, steps in zip(
        PROMPTS, (1.0, 0.0, None, 1.0, 1.0), (10, 9, 9, 10, 3), strict=True)]  # fmt: skip
    asked = {"reward": lambda prompts, completions, right, **_: right, "max_new_tokens": 2, "batch_size": 8}
    result = evaluate(model, tokenizer, rows, **asked, n_samples=1, by="steps", progress=False)
    found = {group: (one.value, one.n) for group, one in result.accuracy_by.items()}
    assert list(found.items()) == [("3", (1.0, 1)), ("9", (0.0, 1)), ("10", (1.0, 2))]
    assert result.summary()["greedy"]["accuracy_by"]["steps"]["10"] == result.accuracy_by["10"].to_dict()
    assert result.settings["by"] == "steps"
    again = EvaluationResult.read(result.write(tmp_path))
    assert again.accuracy_by == result.accuracy_by
    assert [row["group"] for row in pq.read_table(tmp_path / "outcomes.parquet").to_pylist()][:5] == [
        "10", "9", "9", "10", "3"]  # fmt: skip
    assert [row[:3] for row in comparison_rows(result, again)][1:4] == [
        ("steps 3", "100.0% [20.7, 100.0]", "100.0% [20.7, 100.0]"),
        ("steps 9", "0.0% [0.0, 79.3]", "0.0% [0.0, 79.3]"),
        ("steps 10", "100.0% [34.2, 100.0]", "100.0% [34.2, 100.0]"),
    ]
    assert {name: value for name, value in flat_facts(result).items() if name.startswith("accuracy.")} == {
        "accuracy.steps_3": 1.0, "accuracy.steps_9": 0.0, "accuracy.steps_10": 1.0}  # fmt: skip
    with pytest.raises(ValueError, match="`by` is 'level'; the columns of the rows are prompt, right, steps"):
        evaluate(model, tokenizer, rows, **asked, by="level", progress=False)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '"' + "a" * 50, '{"problem": "0"}', "[" * 100_000],
    ids=["half", "list", "bare", "text", "type", "deep"],
)
def test_a_damaged_line_is_named(tmp_path, line):
    folder = hostile_result().write(tmp_path)
    with (folder / "outcomes.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"outcomes\.jsonl, line 3: .*not an outcome"):
        EvaluationResult.read(folder)


def test_gain_is_paired_and_only_over_the_same_questions():
    def result(verdicts, ask="q"):
        return EvaluationResult(
            tuple(Outcome(i, "greedy", 0, f"{ask}{i}", "", "", "", 1, False, v, None) for i, v in enumerate(verdicts))
        )

    gain = paired_gain(result([0.0, 0.0, 1.0, None]), result([1.0, 0.0, 1.0, 1.0]))
    assert (gain.value, gain.n) == (pytest.approx(1 / 3), 3)
    assert paired_gain(result([0.0]), result([1.0], ask="another")) is None
