"""`grpo-lab pipeline`: a YAML of stages in the order of their inputs, gone on with where it was killed; a team's own
kind among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main
from grpo_lab.pipelines.runner import KINDS, pipeline_from, plan_of_pipeline, run_pipeline
from grpo_lab.runs.stop import Interrupted
from grpo_lab.stages.train import Merge

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples"
DATA = {"loader": "word_problems", "n": 12, "template": "chat", "largest": 20, "steps": [1, 2]}
TRAINING = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "use_cpu": True}
SAMPLED = {"stage": "sample", "name": "samples", "data": DATA, "reward": "training.curation_rewards:by_digest"}
SAMPLED |= {"n_samples": 6, "max_completion_length": 12, "use_cpu": True, "problems_per_save": 4}


def pairs(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Written in another order than that of their inputs."""
    return {
        "output_dir": str(out),
        "stages": [
            {"stage": "merge", "name": "mean", "model": str(model), "inputs": {"short_model": "student.model"}},
            {"stage": "dpo", "name": "student", "model": str(model), "inputs": {"rows": "chosen.rows"}, **TRAINING},
            {"stage": "select", "name": "chosen", "inputs": {"samples": "samples.samples"}, "contrast": {}},
            {**SAMPLED, "model": str(model), **changes},
        ],
    }


def files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not name.endswith("run.json")}


@pytest.mark.slow
def test_killed_or_stopped_between_any_two_stages_the_same_call_leaves_the_same_files(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_pipeline(pipeline_from(pairs(tiny_folder, tmp_path / "whole")))
    assert list(whole) == ["samples", "chosen", "student", "mean"]
    assert whole["chosen"]["rows"] > 0
    assert whole["student"]["steps"] == 2
    recipe = pipeline_from(pairs(tiny_folder, tmp_path / "broken"))
    merged = Merge.run
    monkeypatch.setattr(Merge, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        run_pipeline(recipe)
    (recipe.output_dir / "student.json").unlink()  # killed before its marker
    monkeypatch.setattr(Merge, "run", merged)
    stopped = pipeline_from({**pairs(tiny_folder, tmp_path / "broken"), "max_hours": 1e-9})
    with pytest.raises(Interrupted, match=r"max_hours: stopped .* can be gone on with by the same command"):
        run_pipeline(stopped)
    run_pipeline(recipe)
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"other settings: stages\.samples\.settings\.temperature: not set → 0\.5"):
        run_pipeline(pipeline_from(pairs(tiny_folder, tmp_path / "whole", temperature=0.5)))
    stamp = (tmp_path / "whole" / "mean" / "model" / "model.safetensors").stat().st_mtime_ns
    run_pipeline(pipeline_from(pairs(tiny_folder, tmp_path / "whole")))
    assert (tmp_path / "whole" / "mean" / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["finished"] is True


@pytest.mark.slow
def test_whole_commands_are_stages_and_go_on_where_they_were_killed(tiny_folder: Path, tmp_path: Path) -> None:
    """`filter`, `rl`, `rounds`, `long2short` and `simpo`, each on what the one before left."""
    reward, limits = SAMPLED["reward"], {"max_completion_length": 12, "use_cpu": True}
    judged = {"data": DATA, "reward": reward, "n_samples": 6, **limits}
    training = {**TRAINING, "max_length": 256}
    rl = {"rewards": [reward], "objective": "dr_grpo", "num_generations": 4, "per_device_train_batch_size": 4, **limits}
    taken = {"model.path": "rl.model", "data.source": "curated.rows"}
    written = {
        "output_dir": str(tmp_path / "out"),
        "stages": [
            {
                "stage": "filter",
                "name": "curated",
                "model": {"path": str(tiny_folder)},
                **judged,
                "filters": {"band": {}},
            },
            {"stage": "rl", "name": "rl", "model": {"path": str(tiny_folder)}, **rl, "bf16": False, "max_steps": 1}
            | {"inputs": {"data.source": "curated.rows"}, "data": {"loader": "file", "template": "chat"}},
            {"stage": "rounds", "name": "rounds", "inputs": taken, "method": "expert_iteration", "rounds": {"count": 1}}
            | {**judged, "data": {"loader": "file", "template": "chat"}, "training": training},
            {"stage": "long2short", "name": "short", "method": "merge", "use_cpu": True}
            | {"inputs": {"model.path": "rl.model", "short_model": "rounds.model"}},
            {**SAMPLED, "inputs": {"model": "short.model"}},
            {"stage": "select", "name": "chosen", "inputs": {"samples": "samples.samples"}, "contrast": {}},
            {
                "stage": "simpo",
                "name": "student",
                "inputs": {"model": "short.model", "rows": "chosen.rows"},
                **TRAINING,
            },
        ],
    }
    recipe = pipeline_from(written)
    assert list(plan_of_pipeline(recipe))[:2] == ["1. curated", "2. rl"]
    done = run_pipeline(recipe)
    assert list(done) == ["curated", "rl", "rounds", "short", "samples", "chosen", "student"]
    assert done["student"]["steps"] == 2
    before = files(tmp_path / "out")
    assert {"rl/model.safetensors", "rounds/round-1/model/model.safetensors", "short/model.safetensors"} <= {*before}
    for marker in ("rounds.json", "rounds/round-1/train.json", "rounds/round-1/evaluate.json", "student.json"):
        (tmp_path / "out" / marker).unlink(missing_ok=True)
    (tmp_path / "out" / "rounds" / "run.json").write_text(
        (tmp_path / "out" / "rounds" / "run.json").read_text().replace('"finished": true', '"finished": false')
    )
    run_pipeline(recipe)
    pages = {name for name in before if name.endswith("report.html")}
    again = files(tmp_path / "out")
    assert {name for name in before if before[name] != again.get(name)} <= pages


@pytest.mark.slow
def test_a_kind_outside_the_package_is_run_by_a_yaml_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/recipes.md, "Adding a stage": by the real command, in a working folder that holds the team's file alone."""
    assert len((EXAMPLE / "short_solutions.py").read_text().splitlines()) <= 60
    for name in ("short_solutions.py", "short_solutions.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["pipeline", "--config", "short_solutions.yaml"]
    assert main([*words, "--dry-run"]) == 0
    assert "solutions of at most 30 words out of 64 problems" in " ".join(capsys.readouterr().out.split())
    assert not Path("runs").exists()
    assert main(words) == 0
    out = Path("runs/short_solutions")
    facts = json.loads((out / "short.json").read_text())
    assert 0 < facts["rows"] <= facts["made"] == 64
    assert json.loads((out / "measured.json").read_text())["accuracy"] is not None
    before = files(out)
    assert main(words) == 0
    assert files(out) == before
    assert main([*words, "--overwrite"]) == 0
    assert files(out) == before


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"stage": "smaple", "name": "a"}], r"`stages\.a\.stage` is 'smaple'; did you mean 'sample'"),
        ([{"stage": "math:pi", "name": "a"}], r"is 'math:pi'; a kind of stage is a class"),
        ([{"stage": "merge", "name": "a b"}], r"`stages\.0\.name` is 'a b'"),
        ([{"stage": "merge", "name": "run"}], "'run' twice, or it is a name of the folder's own"),
        ([{"stage": "merge", "name": "a", "model": "m", "short_model": "n", "alhpa": 1}], "did you mean 'alpha'"),
        (
            [{"stage": "merge", "name": "a", "model": "m", "inputs": {"short_model": "b.model"}}],
            "no stage is called 'b'",
        ),
        (
            [
                {"stage": "merge", "name": "a", "model": "m", "inputs": {"short_model": "b.model"}},
                {"stage": "merge", "name": "b", "model": "m", "inputs": {"short_model": "a.model"}},
            ],
            r"each of \['.', '.', '.'\] waits for the next",
        ),
        (
            [
                {"stage": "merge", "name": "a", "model": "m", "short_model": "n"},
                {"stage": "sft", "name": "b", "model": "m", "inputs": {"rows": "a.rows"}},
            ],
            r"'b' takes 'a\.rows'; 'a' leaves \['model'\]",
        ),
        ([{"stage": "select", "name": "a", "samples": "s"}], "exactly one of `keep`"),
        ([{"stage": "sft", "name": "a", "model": "m", "rows": "r", "max_setps": 1}], "did you mean 'max_steps'"),
        ([{"stage": "rl", "name": "a", "model": {"path": "m"}}], "needs `data`"),
        ([], "`stages` is "),
    ],
)
def test_mistakes_are_named_before_a_stage_is_done(stages: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of_pipeline(pipeline_from({"output_dir": str(tmp_path / "o"), "stages": stages}))
    assert not (tmp_path / "o").exists()


def test_every_kind_says_what_it_is_and_leaves() -> None:
    for name, kind in KINDS.items():
        assert any(f"``{name}``" in str(base.__doc__) for base in kind.__mro__), name
        assert getattr(kind, "leaves", {}) or name == "evaluate"
