"""`grpo-lab pipeline`: a YAML of stages in the order of their inputs, gone on with where it was killed; a team's own
kind among them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import forked
from grpo_lab.cli import main
from grpo_lab.pipelines.kinds import KINDS
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import entries_of, plan_of_pipeline, run_pipeline
from grpo_lab.pipelines.slurm import write_batch_scripts
from grpo_lab.runs.stop_requests import Interrupted
from grpo_lab.stages.supervised import Merge
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples"
DATA = {"loader": "word_problems", "n": 12, "template": "chat", "largest": 20, "steps": [1, 2]}
TRAINING = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "use_cpu": True}
DISTILL = {"stage": "distill", "name": "d", "model": "m", "data": DATA}
SAMPLED = {"stage": "sample", "name": "samples", "data": DATA, "reward": "training.curation_rewards:by_digest"}
SAMPLED |= {"n_samples": 6, "max_completion_length": 12, "use_cpu": True, "problems_per_save": 4}


SBATCH = """account array begin chdir constraint comment cpus-per-task dependency error exclusive export gpus
gpus-per-node gpus-per-task job-name kill-on-invalid-dep mail-type mem nodes ntasks ntasks-per-node open-mode
output parsable partition qos requeue reservation signal time wait wrap"""
"""Options of `sbatch` (slurm.schedmd.com/sbatch.html, 25.11), those that jobs like ours have use for."""


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
    ours = ("run.json", "stage.json", "pipeline.json", "pipeline.yaml", "/train.json", "/evaluate.json")
    return {name: content for name, content in found.items() if not name.endswith(ours) and name != "report.html"}


def unmark(folder: Path) -> None:
    """As a kill before the stage's end leaves it."""
    said = json.loads((folder / "stage.json").read_text())
    (folder / "stage.json").write_text(json.dumps({**said, "status": "running", "results": {}}))


def stages(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((folder / "pipeline.json").read_text())["stages"]}


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
    unmark(recipe.output_dir / "student")
    monkeypatch.setattr(Merge, "run", merged)
    stopped = pipeline_from({**pairs(tiny_folder, tmp_path / "broken"), "max_hours": 1e-9})
    with pytest.raises(Interrupted, match=r"max_hours: stopped .* can be gone on with by the same command"):
        run_pipeline(stopped)
    run_pipeline(recipe)
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    stamp = (tmp_path / "whole" / "mean" / "model" / "model.safetensors").stat().st_mtime_ns
    run_pipeline(pipeline_from(pairs(tiny_folder, tmp_path / "whole")))
    assert (tmp_path / "whole" / "mean" / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "whole" / "pipeline.json").read_text())["finished"] is True


@pytest.mark.slow
def test_whole_commands_are_stages_and_go_on_where_they_were_killed(tiny_folder: Path, tmp_path: Path) -> None:
    """`curate`, `rl`, `rounds` and `long2short`, each on what the one before left."""
    reward, limits = SAMPLED["reward"], {"max_completion_length": 12, "use_cpu": True}
    judged = {"data": DATA, "reward": reward, "n_samples": 6, **limits}
    training = {**TRAINING, "max_length": 256}
    rl = {"rewards": [reward], "objective": "dr_grpo", "num_generations": 4, "per_device_train_batch_size": 4, **limits}
    rl |= {"logging_steps": 1}
    taken = {"model.path": "rl.model", "data.source": "curated.rows"}
    written = {
        "output_dir": str(tmp_path / "out"),
        "stages": [
            {
                "stage": "curate",
                "name": "curated",
                "model": {"path": str(tiny_folder)},
                **judged,
                "filters": {"band": {}},
            },
            {"stage": "rl", "name": "rl", "model": {"path": str(tiny_folder)}, **rl, "bf16": False, "max_steps": 1}
            | {"inputs": {"data.source": "curated.rows"}, "data": {"loader": "file", "template": "chat"}},
            {"stage": "rounds", "name": "rounds", "inputs": taken, "method": "expert_iteration", "rounds": {"count": 1}}
            | {**judged, "data": {"loader": "file", "template": "chat"}, "training": training}
            | {"evaluation": {"data": DATA, "before": False}},
            {"stage": "long2short", "name": "short", "method": "merge", "use_cpu": True}
            | {"inputs": {"model.path": "rl.model", "short_model": "rounds.model"}},
        ],
    }
    recipe = pipeline_from(written)
    assert list(plan_of_pipeline(recipe))[:2] == ["1. curated", "2. rl"]
    done = run_pipeline(recipe)
    assert list(done) == ["curated", "rl", "rounds", "short"]
    assert done["rl"] == {"steps": 1, "tokens": pytest.approx(4 * done["rl"]["length"])} | {
        name: done["rl"][name] for name in ("reward", "length")
    }
    assert {"rounds", "tokens", "accuracy"} == {*done["rounds"]}
    before = files(tmp_path / "out")
    assert {"rl/model.safetensors", "rounds/round-1/model/model.safetensors", "short/model.safetensors"} <= {*before}
    records = {"rounds/round-1/train.json", "rounds/round-1/evaluate.json"}
    for record in records:
        (tmp_path / "out" / record).unlink()
    unmark(tmp_path / "out" / "rounds")
    (tmp_path / "out" / "rounds" / "run.json").write_text(
        (tmp_path / "out" / "rounds" / "run.json").read_text().replace('"finished": true', '"finished": false')
    )
    run_pipeline(recipe)
    assert not [*(tmp_path / "out").glob("*.before-*")]  # what `rl` may leave, and did not, makes nothing again
    pages = {name for name in before if name.endswith("report.html")}
    again = files(tmp_path / "out")
    assert {name for name in before if before[name] != again.get(name)} <= pages | records  # which have seconds
    assert {*again} == {*before}


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
    done = stages(out)
    facts = done["short"]["results"]
    assert 0 < facts["rows"] <= facts["made"] == 64
    assert done["measured"]["results"]["accuracy"] is not None
    before = files(out)
    assert main(words) == 0
    assert files(out) == before
    assert main([*words, "--overwrite"]) == 0
    assert files(out) == before


@pytest.mark.slow
def test_what_depends_on_a_change_is_done_again_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the reason is said, and the old folder stands beside."""
    out = tmp_path / "out"

    def ran(**changes: Any) -> dict[str, str]:
        """Stage → why, of those that ran."""
        before = {name: (out / name / "stage.json").stat().st_mtime_ns for name in names if (out / name).is_dir()}
        run_pipeline(pipeline_from({**pairs(tiny_folder, out), **changes}))
        after = {name: (out / name / "stage.json").stat().st_mtime_ns for name in names}
        return {name: one["why"] for name, one in stages(out).items() if after[name] != before.get(name)}

    names = ("samples", "chosen", "student", "mean")
    assert ran() == dict.fromkeys(names, "new")
    assert ran() == {}
    table = capsys.readouterr().out
    assert "4 of 4 stages done" in table
    merged = [
        {**one, **({"alpha": 0.25} if one["stage"] == "merge" else {})} for one in pairs(tiny_folder, out)["stages"]
    ]
    assert ran(stages=merged) == {"mean": "again: alpha: not set → 0.25"}
    assert (out / "mean.before-1" / "model" / "model.safetensors").is_file()
    # an edited output is an input that has changed; what is made anew from it, and is the same, changes nothing more
    rows = (out / "chosen" / "rows.jsonl").read_text().splitlines(keepends=True)
    (out / "chosen" / "rows.jsonl").write_text("".join(rows[:-1]))
    assert ran(stages=merged) == {
        "student": "again: chosen.rows has changed",
        "mean": "again: student.model has changed",
    }
    shutil.rmtree(out / "mean" / "model")
    assert ran(stages=merged) == {"mean": "again: its model is gone"}
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    moved = [{**one, **({"model": str(model)} if "model" in one else {})} for one in merged]
    assert ran(stages=moved)["samples"].startswith("again: model: ")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "max_length": 77}))
    assert ran(stages=moved)["samples"] == f"again: {model} has changed"
    # killed with other settings than now: its folder stays, beside
    unmark(out / "mean")
    again = [{**one, **({"alpha": 0.5} if one["stage"] == "merge" else {})} for one in moved]
    assert ran(stages=again) == {"mean": "again: alpha: 0.25 → 0.5"}
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "status", str(out)]) == 0
    assert main(["pipeline", "show", str(out)]) == 0
    drawn = capsys.readouterr().out
    assert "← samples.samples" in drawn
    before = files(out)
    assert main(["pipeline", "resume", str(out)]) == 0
    assert files(out) == before


@pytest.mark.thorough(cases="two ranks")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2], ids=["not launched", "two ranks"])
def test_a_stage_is_launched_on_its_processes_alone_or_from_a_file(
    processes: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``launch`` (accelerate, two ranks), ``recipe`` with settings over it, ``--only``."""
    accelerate = yaml.safe_load((ROOT / "recipes" / "accelerate" / "ddp.yaml").read_text())
    accelerate |= {"num_processes": 2, "main_process_port": free_port(), "mixed_precision": "no"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(accelerate))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rl = {"model": {"path": str(tiny_folder)}, "data": DATA, "rewards": ["accuracy"], "objective": "dr_grpo"}
    rl |= {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 9}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump({**rl, "use_cpu": True, "bf16": False, "logging_steps": 1}))
    entry = {"stage": "rl", "name": "rl", "recipe": "rl.yaml", "max_steps": 1, "data.n": 8}
    second = {"stage": "rl", "name": "more", "recipe": "rl.yaml", "max_steps": 1, "inputs": {"model.path": "rl.model"}}
    if processes > 1:
        entry["launch"] = "two.yaml"
    written = {"output_dir": str(tmp_path / "out"), "stages": [entry, second]}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(written))
    with pytest.raises(ValueError, match="stage 'rl', which it reads, is not done"):
        run_pipeline(pipeline_from(written, beside=tmp_path), only="more")
    assert main(["pipeline", "run", str(file), "--only", "rl"]) == 0
    assert json.loads((tmp_path / "out" / "rl" / "run.json").read_text())["processes"] == processes
    assert stages(tmp_path / "out")["rl"]["status"] == "done"
    assert stages(tmp_path / "out")["more"]["status"] == "waiting"
    assert main(["pipeline", "run", str(file)]) == 0
    assert stages(tmp_path / "out")["more"]["why"] == "new"


@pytest.mark.parametrize("kind", ["MULTI_CPU", "NO", "MULTI_GPU"])
def test_a_stage_of_several_processes_is_not_done_by_one(
    kind: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate starts a single process for such files, and says nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch = {"distributed_type": kind, "num_processes": 2, "use_cpu": False}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(launch))
    entry = {"stage": "evaluate", "name": "stage", "model": str(tiny_folder), "data": {**DATA, "n": 4}}
    stages = [{**entry, "max_completion_length": 4, "use_cpu": True, "launch": str(tmp_path / "two.yaml")}]
    recipe = pipeline_from({"output_dir": str(tmp_path / "out"), "stages": stages})
    said = "two.yaml' says `num_processes` 2, and accelerate (starts a single one|has started 1)"
    with pytest.raises(ValueError, match=said):
        run_pipeline(recipe, only="stage", launched=kind == "MULTI_GPU")
    assert not (tmp_path / "out" / "stage" / "evaluation").exists()


def test_a_rank_whose_launcher_ended_while_it_was_starting_ends(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its ranks had asked to be told of its end, the launcher left them behind: they waited for one
    another, or worked on, and the same command was told that the folder is in use."""
    entry = {"stage": "evaluate", "name": "stage", "model": str(tiny_folder), "data": {**DATA, "n": 4}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"distributed_type": "NO", "num_processes": 1, "use_cpu": True}))
    stages = [{**entry, "max_completion_length": 4, "use_cpu": True, "launch": str(tmp_path / "one.yaml")}]
    recipe = pipeline_from({"output_dir": str(tmp_path / "out"), "stages": stages})
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        monkeypatch.setenv("GRPO_LAB_PIPELINE_PROCESS", str(ended.pid))
    with pytest.raises(Interrupted, match="its launcher has ended: stopped outside of the training"):
        run_pipeline(recipe, only="stage", launched=True)
    assert not (tmp_path / "out" / "stage" / "evaluation").exists()


@pytest.mark.thorough(but="evaluate")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "number", "code"), [(1, signal.SIGTERM, 75), (2, signal.SIGINT, 130)], ids=["evaluate", "rl"]
)
def test_a_launched_stage_that_is_asked_to_stop_ends_with_what_it_has(
    ranks: int, number: int, code: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """Of `evaluate`, which is `whole`, the pipeline alone ended; of one process the launcher alone."""
    launch = {"distributed_type": "MULTI_GPU" if ranks > 1 else "NO", "num_processes": ranks, "use_cpu": ranks == 1}
    launch |= {"mixed_precision": "no", "main_process_port": free_port()}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch))
    out, data = tmp_path / "out", {**DATA, "n": 4000}
    entry: dict[str, Any] = {"stage": "evaluate", "model": str(tiny_folder), "batch_size": 4, "use_cpu": True}
    waits, keeps = "stage/evaluation/answers.0.jsonl", "stage/evaluation/answers.0.jsonl"
    if ranks > 1:
        entry = {"stage": "rl", "model": {"path": str(tiny_folder)}, "rewards": ["accuracy"], **TRAINING}
        entry |= {"num_generations": 2, "max_steps": 5000, "logging_steps": 1}
        waits, keeps = "stage/metrics.jsonl", "stage/checkpoint-*/trainer_state.json"
    entry |= {"name": "stage", "data": data, "max_completion_length": 4, "launch": str(tmp_path / "launch.yaml")}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"output_dir": str(out), "stages": [entry]}))
    (tmp_path / "command.py").write_text("import sys\nfrom grpo_lab.cli import main\nsys.exit(main())\n")
    words = [str(tmp_path / "command.py"), "pipeline", "run", str(tmp_path / "pipeline.yaml")]
    log = tmp_path / "log"
    running = forked.start(words, (log, log), {**os.environ, "ACCELERATE_USE_CPU": "true"}, tmp_path)
    children: list[psutil.Process] = []
    try:
        while not (out / waits).is_file() and running.is_alive():
            time.sleep(0.1)
        assert running.pid is not None
        children = psutil.Process(running.pid).children(recursive=True)
        assert [one for one in children if "--launched" in one.cmdline()], log.read_text()
        os.kill(running.pid, number)
        running.join(timeout=300)
        assert running.exitcode == code, log.read_text()
        assert psutil.wait_procs(children, timeout=5)[1] == []
    finally:
        for pid in (running.pid, *(one.pid for one in children)):
            forked.end_with_children(pid)
    assert [*out.glob(keeps)]
    assert stages(out)["stage"]["status"] == "broken off"


def test_batch_scripts_wait_for_what_they_read(tmp_path: Path) -> None:
    """`sbatch`'s options as its reference lists them (slurm.schedmd.com/sbatch.html, 25.11)."""
    known = {*re.findall(r"[a-z-]+", SBATCH)}
    slurm = {"partition": "gpu", "time": "4:00:00"}
    recipe = pipeline_from({**pairs(tmp_path / "m", tmp_path / "out"), "slurm": slurm})
    submit = write_batch_scripts(recipe)
    lines = submit.read_text().splitlines()
    assert [line.partition("=")[0] for line in lines if line.startswith("job_")] == [
        "job_samples",
        "job_chosen",
        "job_student",
        "job_mean",
    ]
    assert any("--dependency=afterok:${job_samples}" in line and "chosen.sbatch" in line for line in lines)
    used = set(re.findall(r" \"?--([a-z-]+)", submit.read_text()))
    for script in submit.parent.glob("*.sbatch"):
        used |= set(re.findall(r"#SBATCH --([a-z-]+)", script.read_text()))
        assert f"--only {script.stem}" in script.read_text()
        subprocess.run(["bash", "-n", script], check=True)
    assert {"dependency", "requeue", "partition", "parsable"} <= used <= known
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\necho "$@" >> calls\nwc -l < calls\n')
    fake.chmod(0o755)
    subprocess.run(["bash", submit], check=True, cwd=tmp_path, env={"PATH": f"{fake.parent}:/usr/bin:/bin"})
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--dependency=afterok:1 " in calls[1]
    assert "--dependency=afterok:3 " in calls[3]


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
        ([{**DISTILL, "teacher": "t", "beta": 1.5}], r"`training\.beta` is 1\.5; it is a number from 0"),
        ([DISTILL], "needs `teacher`"),
        ([{"stage": "rl", "name": "a", "model": {"path": "m"}}], "needs `data`"),
        ([], "`stages` is "),
    ],
)
def test_mistakes_are_named_before_a_stage_is_done(stages: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of_pipeline(pipeline_from({"output_dir": str(tmp_path / "o"), "stages": stages}))
    assert not (tmp_path / "o").exists()


def test_a_seed_of_the_pipeline_is_that_of_every_stage_which_says_none(tmp_path: Path) -> None:
    model = {"stage": "cold_start", "model": {"tiny": {}}, "data": DATA}
    own = {**SAMPLED, "name": "own", "seed": 5, "inputs": {"model": "m.model"}}
    written = [{**model, "name": "m"}, {**SAMPLED, "inputs": {"model": "m.model"}}, own]
    written += [{"stage": "select", "name": "s", "inputs": {"samples": "own.samples"}, "keep": {}}]
    one, *_ = found = entries_of(pipeline_from({"output_dir": str(tmp_path), "seed": 3, "stages": written}))
    assert [entry.section.settings.get("seed") for entry in found] == [3, 3, 5, None]
    assert one.kind.seed == found[1].kind.sampling.seed == 3
    assert "seed" not in entries_of(pipeline_from({"output_dir": str(tmp_path), "stages": written}))[0].section.settings


def test_every_kind_says_what_it_is_and_leaves() -> None:
    for name, kind in KINDS.items():
        assert any(f"``{name}``" in str(base.__doc__) for base in kind.__mro__), name
        assert getattr(kind, "leaves", {}) or name == "evaluate"
