"""long2short builders on a hand-made problem, and weight averaging on real checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_lab.curation import PassRate, Sampled, average_weights, preference_pairs, sampled, shortest_correct
from grpo_lab.finite import NumbersError

#                        0       1     2       3      4      5     6
LENGTHS = [40, 10, 15, 14, 99, 5, 200]
SCORES = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None]
ROW = Sampled("q", [f"c{k}" for k in range(7)], SCORES, LENGTHS, {"solution": "7"})
HOPELESS = Sampled("never right", ["a", "b"], [0.0, None], [1, 2])


def test_shortest_correct_is_the_shortest_right_one() -> None:
    assert shortest_correct([HOPELESS, ROW]) == [{"solution": "7", "prompt": "q", "completion": "c1", "length": 10}]


def test_pairs_reject_wrong_and_half_as_long_again() -> None:
    pairs = preference_pairs([HOPELESS, ROW])
    # chosen c1 (10). right ones of at least 15: c2 (15, exactly 1.5 times), c0 (40); c3 (14) is neither. wrong: c4, c5
    assert [(p["rejected"], p["rejected_because"]) for p in pairs] == [
        ("c4", "wrong"),
        ("c0", "longer"),
        ("c2", "longer"),
        ("c5", "wrong"),
    ]
    assert {p["chosen"] for p in pairs} == {"c1"}
    assert pairs[0]["chosen_length"] == 10
    assert pairs[0]["rejected_length"] == 99
    assert pairs[0]["solution"] == "7"


def test_settings_of_the_pairs() -> None:
    assert [p["rejected"] for p in preference_pairs([ROW], wrong_must_be_longer=True)] == ["c4", "c0", "c2"]
    assert [p["rejected"] for p in preference_pairs([ROW], 4.0)] == ["c4", "c0", "c5"]
    assert [p["rejected"] for p in preference_pairs([ROW], pairs_per_problem=1)] == ["c4"]
    same = Sampled("q", ["x", "x"], [1.0, 0.0], [3, 9])  # the same text scored twice differently teaches nothing
    assert preference_pairs([same]) == []
    with pytest.raises(ValueError, match=r"ratio=1\.0"):
        preference_pairs([ROW], 1.0)
    with pytest.raises(ValueError, match="pairs_per_problem=0"):
        preference_pairs([ROW], pairs_per_problem=0)


def test_rows_from_pass_rates() -> None:
    rates = [PassRate((1.0, None), ("aa bb", "c"))]
    rows = sampled([{"prompt": "q", "solution": "s"}], rates, lambda completion: len(completion.split()))
    assert rows == [Sampled("q", ("aa bb", "c"), (1.0, None), [2, 1], {"solution": "s"})]
    with pytest.raises(ValueError, match="1 scores"):
        Sampled("q", ["a", "b"], [1.0], [1, 2])


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"made": folder.name}))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: f"model-{1 + place % shards:05}-of-{shards:05}.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_average_by_hand(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", {"w": torch.tensor([1.0, -2.0]), "steps": torch.tensor([3])})
    b = checkpoint(tmp_path / "b", {"w": torch.tensor([3.0, 6.0]), "steps": torch.tensor([3])})
    out = average_weights(a, b, tmp_path / "out", alpha=0.25)
    tensors = load_file(out / "model.safetensors")
    assert tensors["w"].tolist() == [2.5, 4.0]  # 1/4 + 9/4, -1/2 + 18/4
    assert tensors["steps"].tolist() == [3]
    assert json.loads((out / "config.json").read_text()) == {"made": "a"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_average_over_different_shards_and_dtypes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    first = {f"layer.{k}": torch.randn(4, 3, generator=generator).to(torch.bfloat16) for k in range(5)}
    second = {f"layer.{k}": torch.randn(4, 3, generator=generator) for k in range(5)}
    a, b = checkpoint(tmp_path / "a", first, 3), checkpoint(tmp_path / "b", second, 2)
    out = average_weights(a, b, tmp_path / "out", alpha=0.5)
    made: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        made |= load_file(file)
    assert len(list(out.glob("*.safetensors"))) == 3
    for name, tensor in made.items():
        assert tensor.dtype == torch.bfloat16
        expected = (0.5 * first[name].double() + 0.5 * second[name].double()).to(torch.bfloat16)
        torch.testing.assert_close(tensor, expected, rtol=2**-8, atol=0)  # one rounding to bfloat16
    assert all(
        torch.equal(load_file(file)[name], first[name])
        for file in average_weights(a, b, tmp_path / "only_a", alpha=1.0).glob("*.safetensors")
        for name in load_file(file)
    )


@pytest.mark.slow
def test_an_averaged_model_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    models = []
    for name in "ab":
        torch.manual_seed(ord(name))
        models.append(AutoModelForCausalLM.from_config(config))
        models[-1].save_pretrained(tmp_path / name)
    average_weights(tmp_path / "a", tmp_path / "b", tmp_path / "mean")
    mean = AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    pairs = zip(mean.parameters(), models[0].parameters(), models[1].parameters())
    for tensor, of_a, of_b in pairs:
        torch.testing.assert_close(tensor, (of_a + of_b) / 2, rtol=1e-6, atol=1e-7)


def test_only_what_a_model_is_goes_along(tmp_path: Path) -> None:
    """A report on the merged folder would draw the long model's curves, and its README would tell of another
    training."""
    a = checkpoint(tmp_path / "a", {"w": torch.zeros(2)})
    belongs = [
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "vocab.json",
        "merges.txt", "special_tokens_map.json", "modeling_own.py", "LICENSE",
    ]  # fmt: skip
    tells = [
        "README.md", "metrics.jsonl", "run.json", "recipe.yaml", "report.html", "training_args.bin",
        "trainer_state.json", "rows.jsonl", "samples.jsonl", "optimizer.pt", "log.txt",
    ]  # fmt: skip
    for name in belongs + tells:
        (a / name).write_text("x")
    out = average_weights(a, checkpoint(tmp_path / "b", {"w": torch.ones(2)}), tmp_path / "out")
    assert sorted(file.name for file in out.iterdir()) == sorted(["config.json", "model.safetensors", *belongs])


@pytest.mark.parametrize(("number", "dtype"), [(float("nan"), torch.float32), (1e38, torch.float16)])
def test_an_average_that_is_not_finite_is_not_written(number: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """NaN in one of two models, or more than the first one's type can hold: it was a merged model like another."""
    a = checkpoint(tmp_path / "a", {"w": torch.ones(2, dtype=dtype), "n": torch.tensor([1])})
    b = checkpoint(tmp_path / "b", {"w": torch.tensor([1.0, number]), "n": torch.tensor([1])})
    with pytest.raises(NumbersError, match=r"is not written: model.safetensors holds NaN .* in 1 of 2 tensors \(w\)"):
        average_weights(a, b, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", {"w": torch.ones(2), "n": torch.tensor([1])})
    for name, tensors, says in [
        ("names", {"v": torch.ones(2), "n": torch.tensor([1])}, "different tensors"),
        ("shapes", {"w": torch.ones(3), "n": torch.tensor([1])}, "shape"),
        ("buffers", {"w": torch.ones(2), "n": torch.tensor([2])}, "cannot be averaged"),
    ]:
        with pytest.raises(ValueError, match=says):
            average_weights(a, checkpoint(tmp_path / name, tensors), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"alpha=1\.5"):
        average_weights(a, a, tmp_path / "out", alpha=1.5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither"):
        average_weights(a, tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match="not empty"):
        average_weights(a, a, tmp_path / "names")
    outside = checkpoint(tmp_path / "outside", {"w": torch.ones(2), "v": torch.ones(1)}, 2)
    index = {"weight_map": {"w": "../a/model.safetensors", "n": "../a/model.safetensors"}}
    (outside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside"):
        average_weights(a, outside, tmp_path / "out")
