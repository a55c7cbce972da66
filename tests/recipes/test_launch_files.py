"""Every accelerate file by accelerate's own launcher, and the Slurm script with stand-ins for Slurm's commands."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from grpo_lab.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
SLURM = ROOT / "scripts" / "slurm" / "train.sbatch"
RECIPE = "recipes/gsm8k/qwen2.5-0.5b-dr_grpo.yaml"


Sbatch = Callable[..., tuple[int, str, str]]


def as_launched(path: Path, *words: str) -> argparse.Namespace:
    """The launcher's arguments, after it has read ``path`` and checked it."""
    chosen = launch_command_parser().parse_args(["--config_file", str(path), *words, "scripts/train.py"])
    chosen, _, _ = _validate_launch_command(chosen)
    return chosen


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_the_launcher_takes_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = as_launched(path)
    kinds = {"single": None, "ddp": "multi_gpu", "fsdp2": "use_fsdp", "multi_node": "use_fsdp"}
    kind = kinds.get(path.stem, "use_deepspeed")
    assert [name for name in ("multi_gpu", "use_fsdp", "use_deepspeed") if getattr(chosen, name)] == [kind] * bool(kind)
    assert chosen.mixed_precision == "bf16"
    if kind == "use_deepspeed":
        assert chosen.zero_stage == int(path.stem[-1])
    if kind == "use_fsdp":
        monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
        environment = prepare_multi_gpu_env(chosen)
        assert environment["FSDP_VERSION"] == "2"
        assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"
        assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
        assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"  # models are saved whole


def test_the_first_line_of_each_file_is_its_launch_line() -> None:
    for path in LAUNCH:
        head = path.read_text(encoding="utf-8").split("compute_environment")[0]
        assert f"accelerate launch --config_file recipes/accelerate/{path.name}" in head


def test_a_machine_of_a_multi_node_run_gets_its_place() -> None:
    words = ["--num_machines", "3", "--num_processes", "24", "--machine_rank", "2", "--main_process_ip", "10.0.0.1"]
    chosen = as_launched(ROOT / "recipes" / "accelerate" / "multi_node.yaml", *words)
    assert (chosen.num_machines, chosen.num_processes, chosen.machine_rank) == (3, 24, 2)
    assert (chosen.main_process_ip, chosen.main_process_port, chosen.rdzv_backend) == ("10.0.0.1", 29500, "static")


# -- Slurm -------------------------------------------------------------------------------------------------------------

STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; printf "n1\\nn2\\nn3\\n" | head -n "$NODES"',
    # drops its own options, runs the rest once, as the task of rank 1
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec env SLURM_PROCID=1 "$@"',
    "hostname": "echo 10.0.0.3 fe80::1",
    "grpo-lab": 'echo "$GRPO_LAB_SERVER_TOKEN" >> "$LOG.server"; echo "grpo-lab $*" >> "$LOG"; exec sleep 3600',
    # the training: leaves with 75 if it is asked to while it may be, as the launcher does with 1 then
    "accelerate": '[[ ${ROLLOUT_NODES:-1} == 0 ]] || until grep -q ^grpo-lab "$LOG"; do sleep 0.02; done; '
    'echo "${GRPO_LAB_SERVER_TOKEN:-}" >> "$LOG.trainer"; echo "accelerate $*" >> "$LOG"; '
    '[[ -z ${ASKED:-} ]] || { touch "$ASKED"; exec python -c "'
    "import os, signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1)); "
    "open(os.environ['ASKED'] + '.up', 'w').close(); time.sleep(3600)\"; }; "
    'exit "${FAIL:-0}"',
}


@pytest.fixture
def sbatch(tmp_path: Path) -> Sbatch:
    """(words, nodes, **environment) -> (exit status, what was printed, the commands in their order)."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "python").symlink_to(shutil.which("python3") or "python3")
    log = tmp_path / "log"

    def submit(*words: str, nodes: int = 3, signal_when: str | None = None, **more: str) -> tuple[int, str, str]:
        log.write_text("")
        environment = {
            "PATH": "/usr/bin:/bin", "LOG": str(log), "NODES": str(nodes), "VENV": str(tmp_path / "venv"),
            "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_GPUS_ON_NODE": "4",
            "MODEL": "org/model", **more,
        }  # fmt: skip
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(["bash", str(SLURM), *words], env=environment, **pipes) as job:
            if signal_when is not None:
                while not Path(signal_when).exists() and job.poll() is None:
                    time.sleep(0.05)
                job.send_signal(signal.SIGUSR1)
            printed = "".join(job.communicate(timeout=600))
        return job.returncode, printed, log.read_text()

    return submit


@pytest.mark.slow
def test_two_train_and_one_serves(sbatch: Sbatch) -> None:
    status, printed, commands = sbatch(RECIPE, "--max_steps", "5")
    assert status == 0, printed
    lines = commands.splitlines()
    (serve,) = (line for line in lines if line.startswith("grpo-lab"))
    assert serve == "grpo-lab serve --model org/model --host 10.0.0.3 --port 8000 --tensor-parallel-size 1"
    assert _parser().parse_args(serve.split()[1:]).model == "org/model"  # it takes what the script gives it
    assert "--nodelist=n3" in next(line for line in lines if "grpo-lab serve" in line and line.startswith("srun"))
    (launch,) = (line for line in lines if line.startswith("accelerate"))
    assert launch == (
        "accelerate launch --machine_rank 1 --config_file recipes/accelerate/multi_node.yaml --num_machines 2 "
        "--num_processes 8 --main_process_ip n1 --main_process_port 29500 scripts/train.py --config "
        f"{RECIPE} --use_vllm true --vllm_mode server --vllm_server_base_url http://10.0.0.3:8000 "
        "--vllm_server_timeout 900 --enable_jit_checkpoint true --max_steps 5"
    )
    assert "--nodes=2 --ntasks=2" in next(line for line in lines if line.startswith("srun") and "accelerate" in line)
    assert "to whoever has its token" in printed


@pytest.mark.slow
def test_both_sides_have_the_token_and_nobody_reads_it(sbatch: Sbatch, tmp_path: Path) -> None:
    for given in ({}, {"GRPO_LAB_SERVER_TOKEN": "mine-" * 8}):
        status, printed, commands = sbatch(RECIPE, **given)
        assert status == 0, printed
    (made, mine) = (tmp_path / "log.server").read_text().split()
    assert (tmp_path / "log.trainer").read_text().split() == [made, mine]
    assert mine == "mine-" * 8
    assert len(made) == 44
    assert not any(token in printed + commands for token in (made, mine))
    sbatch(RECIPE, ROLLOUT_NODES="0")
    assert (tmp_path / "log.trainer").read_text().splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], "Qwen/Qwen2.5-0.5B"),
        (["--model.path", "org/other"], "org/other"),
        (["--model.path=x", "--model.path=org/other"], "org/other"),
    ],
)
@pytest.mark.slow
def test_the_server_has_the_model_of_recipe_and_command_line(words: list[str], model: str, sbatch: Sbatch) -> None:
    """It served the recipe's, and the trainer sent it weights of another shape."""
    status, printed, commands = sbatch(RECIPE, *words, MODEL="")
    assert status == 0, printed
    assert f"--model {model} --host" in commands


@pytest.mark.slow
def test_a_task_has_the_cpus_of_its_node(sbatch: Sbatch) -> None:
    """srun gives one core where nothing is said."""
    for given, expected in (({"SLURM_CPUS_ON_NODE": "96"}, 96), ({"SLURM_CPUS_PER_TASK": "32"}, 32)):
        _, _, commands = sbatch(RECIPE, **given)
        started = [line for line in commands.splitlines() if line.startswith("srun") and "hostname" not in line]
        assert len(started) == 2
        assert all(f"--cpus-per-task={expected} " in line for line in started)


@pytest.mark.slow
def test_a_job_started_again_goes_on(sbatch: Sbatch) -> None:
    words = (RECIPE, "--overwrite", "--max_steps", "5")
    assert "--resume" not in sbatch(*words)[2]
    for count in ("1", "7"):
        _, _, commands = sbatch(*words, SLURM_RESTART_COUNT=count)
        (launch,) = (line for line in commands.splitlines() if line.startswith("accelerate"))
        assert launch.endswith("--enable_jit_checkpoint true --resume --max_steps 5")


@pytest.mark.slow
def test_a_signalled_job_asks_for_a_checkpoint_and_goes_back_into_the_queue(sbatch: Sbatch, tmp_path: Path) -> None:
    """The signal comes to the batch script alone (B:), which passes it on; Slurm's srun, or its stand-in, hands it
    over."""
    head = SLURM.read_text().split("set -euo")[0]
    for line in ("#SBATCH --requeue", "#SBATCH --signal=B:USR1@600", "#SBATCH --open-mode=append"):
        assert line in head.splitlines()
    asked = tmp_path / "asked"
    status, printed, commands = sbatch(RECIPE, SLURM_JOB_ID="17", ASKED=str(asked), signal_when=f"{asked}.up")
    assert status == 1, printed
    assert "asking the training for a checkpoint" in printed
    assert commands.splitlines()[-1] == "scontrol requeue 17"


@pytest.mark.slow
def test_all_train_where_no_node_serves(sbatch: Sbatch) -> None:
    status, printed, commands = sbatch(RECIPE, ROLLOUT_NODES="0")
    assert status == 0, printed
    assert "grpo-lab" not in commands
    assert "--num_machines 3 --num_processes 12" in commands
    assert "--use_vllm true --vllm_mode colocate" in commands


@pytest.mark.slow
def test_a_failure_is_passed_on_ends_the_server_and_is_not_queued_again(sbatch: Sbatch) -> None:
    """The stand-in server would sleep for an hour; the run has a time limit of less."""
    status, _, commands = sbatch(RECIPE, FAIL="3", SLURM_JOB_ID="17")
    assert status == 3
    assert "grpo-lab serve" in commands
    assert "requeue" not in commands


@pytest.mark.parametrize(
    ("words", "nodes", "more", "message"),
    [
        ((), 3, {}, "usage: sbatch"),
        ((RECIPE,), 1, {}, "leave none to train"),
        ((RECIPE,), 3, {"ROLLOUT_NODES": "2"}, "must be 1"),
    ],
)
@pytest.mark.slow
def test_mistakes_are_named(
    words: tuple[str, ...], nodes: int, more: dict[str, str], message: str, sbatch: Sbatch
) -> None:
    status, printed, commands = sbatch(*words, nodes=nodes, **more)
    assert status == 2
    assert message in printed
    assert "accelerate" not in commands


def test_the_script_parses_and_uses_no_unset_variable() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    code = "\n".join(line for line in SLURM.read_text().splitlines() if not line.lstrip().startswith("#"))
    assert "set -euo pipefail" in code
    assigned = set(re.findall(r"(?:^|[;\s])([A-Za-z_]+)=", code)) | {"nodes"}  # by mapfile
    used = set(re.findall(r"\$\{?#?([A-Za-z_]+)", code))
    given = {"SLURM_JOB_NODELIST", "SLURM_PROCID", "PATH"}
    with_default = set(re.findall(r"\$\{([A-Za-z_]+):-", code))
    given |= {"SLURM_JOB_ID"}
    assert used - assigned - given - with_default == set()
    if shutil.which("shellcheck") is not None:
        checked = subprocess.run(["shellcheck", str(SLURM)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
