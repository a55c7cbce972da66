# Two commands do everything on a bare clone: `make train` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/quickstart/dr_grpo.yaml
PYTEST_WORKERS ?= 2
# The whole suite waits a quarter of its time, for servers, ranks and clocks: one worker more than it has cores.
SUITE_WORKERS ?= 3
BY_FILE = -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup setup-vllm train lab-smoke labs test test-fast test-thorough test-numeric lint types format docs docs-index docs-serve test-versions \
	speedrun bench bench-step bench-accuracy bench-supervised bench-update bench-stock-best bench-shared-prompts bench-overlap bench-rollouts bench-verify gpu-check stress-kill stress-kill-commands stress-hostile stress-soak stress-guards clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## .venv with everything but engines (idempotent; CPU or CUDA torch as the machine has)

$(VENV)/.ready: pyproject.toml scripts/setup_env.sh scripts/constraints.txt
	bash scripts/setup_env.sh "$(PYTHON)" "$(VENV)"
	touch $@

setup-vllm: setup  ## vLLM: the CPU build on a Linux machine without a GPU, else the official package
	$(BIN)/python scripts/setup_vllm.py

train: setup  ## the main job: cold start, Dr.GRPO, held-out evaluation, report
	$(BIN)/grpo-lab train --config $(RECIPE) --overwrite

lab-smoke: setup  ## every preset and trainer, 30 steps each from the quick start's cold start -> runs/lab_smoke/table.md (~10 minutes)
	$(BIN)/python scripts/lab_smoke.py

LABS := kl bias noise controls court entropy difficulty kl_training overoptimisation prm search \
	length language objective process sorting preference reinforce reinforce_discounted capability capability_losses capability_bases
labs: setup  ## what RL does to a model: every lab, resumable -> runs/labs (about 15 minutes each on two cores), tables and figures of docs/labs/
	for lab in $(LABS); do $(BIN)/grpo-lab lab $$lab --jobs 2 || exit 1; done
	$(BIN)/python scripts/lab_tables.py

# Engines get pytest processes of their own: they start torch.distributed and leave variables in the environment.
# Where vLLM cannot be had (exit 2 to 4 of setup_vllm.py), its tests are skipped and say so.
test: setup lint types  ## lint, types and the suite
	$(MAKE) setup-vllm || echo "NOTE: vLLM could not be installed; the engine tests below are skipped"
	$(BIN)/python -m pytest $(BY_FILE) -n $(SUITE_WORKERS) -m "vllm and not thorough" -rs --durations=15
	$(BIN)/python -m pytest $(BY_FILE) -n $(SUITE_WORKERS) -m "not vllm and not thorough" --durations=15
	$(MAKE) test-numeric

test-thorough: setup  ## what `make test` leaves out (marker `thorough`), numeric tests with AVX2 kernels, the drop-in with the oldest
	$(BIN)/python -m pytest $(BY_FILE) -m "thorough and vllm" -rs
	$(BIN)/python -m pytest $(BY_FILE) -m "thorough and not vllm"
	$(MAKE) test-numeric KERNELS=avx2
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(BY_FILE) tests/parity/test_drop_in.py

# Another CPU adds in another order. torch's kernels for older ones are on every x86 machine; elsewhere the setting changes nothing.
NUMERIC := tests/reference/test_oracle.py tests/reference/test_kl_gradients.py \
	$(addprefix tests/conformance/test_,advantage_rules.py aggregation_rows.py loss_proof.py preset_rows.py surrogate_rows.py) \
	$(addprefix tests/parity/test_,presets.py exact_update.py bf16.py log_probs_at_generation.py position_limit.py) \
	tests/training/test_own_token_loss.py tests/unit/update/test_model_conditions.py \
	tests/unit/losses tests/unit/update/test_update_plan_exact.py

KERNELS ?= default

test-numeric: setup  ## the numeric tests with the kernels of another CPU (part of `make test`; KERNELS=avx2)
	for kernels in $(KERNELS); do \
	  echo "ATEN_CPU_CAPABILITY=$$kernels"; \
	  ATEN_CPU_CAPABILITY=$$kernels $(BIN)/python -m pytest $(BY_FILE) -m "not slow and not thorough" $(NUMERIC) || exit 1; \
	done

test-fast: setup  ## the part of the suite that takes under two minutes
	$(BIN)/python -m pytest $(BY_FILE) -m "not slow and not not_fast and not thorough and not vllm"

docs-index: setup  ## what of the docs is made: file index, pictures of the rooms and of a step, command line, settings, measured runs
	$(BIN)/python scripts/file_index.py
	$(BIN)/python scripts/rooms_picture.py
	$(BIN)/python scripts/step_picture.py
	$(BIN)/python scripts/reference_pages.py
	$(BIN)/python scripts/measured_runs.py

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict on the pure rooms
	$(BIN)/mypy

format: setup  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[docs]"
	touch $@

docs: $(VENV)/.docs  ## the site, into site/ (builds and reads without a network; a warning is an error)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs  ## the site at http://127.0.0.1:8001, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

test-versions: setup  ## fresh environments with the oldest, newest and mixed releases: docs/compatibility.md
	$(BIN)/python scripts/test_versions.py

DATA := ../shared/data
bench: setup-vllm  ## every table in short, under 15 minutes on two idle cores; bench-*: each at its length
	$(BIN)/python scripts/bench_step.py --rounds 1 --steps 4
	$(BIN)/python scripts/bench_update.py --quick
	$(BIN)/python scripts/bench_shared_prompts.py --cells 256:128:8 8:256:8 --rounds 1 --steps 1
	test ! -d $(DATA) || $(BIN)/python scripts/bench_shared_prompts.py --few-shot $(DATA) --rounds 1 --steps 1
	$(BIN)/python scripts/bench_overlap.py --cells 5:1 --batches 3
	$(BIN)/python scripts/bench_rollouts.py --repeats 1
	$(BIN)/python scripts/bench_verify.py --rounds 1
	$(BIN)/python scripts/bench_accuracy.py --seeds 0 --arms stock ours --updates 1 --rates 3e-4 --steps 12 --dense 0 --every 2 --problems 250 --folder runs/bench_accuracy/short

bench-step: setup  ## the whole step by part, stock TRL against ours, from the quick start's cold start (made once)
	$(BIN)/python scripts/bench_step.py

bench-accuracy: setup-vllm  ## time to accuracy, stock TRL against ours, part by part, and overlapped rollouts: 90 minutes
	$(BIN)/python scripts/bench_accuracy.py

speedrun: setup  ## seconds from random weights to a target accuracy, stock TRL and ours: docs/speedrun.md (two to five minutes an entry)
	$(BIN)/python scripts/speedrun.py --all

bench-supervised: setup  ## supervised training against TRL's SFTTrainer, on the cold starts of three recipes: 10 minutes
	$(BIN)/python scripts/bench_supervised.py

bench-update: setup  ## the policy update against stock TRL, on fixed rollouts
	$(BIN)/python scripts/bench_update.py

bench-stock-best: setup  ## the policy update against stock TRL with the settings that make it fastest, found by a search
	$(BIN)/python scripts/bench_stock_best.py

bench-shared-prompts: setup  ## the policy update with each prompt once, prompts of 64 to 1,024 tokens: 10 minutes
	$(BIN)/python scripts/bench_shared_prompts.py

bench-overlap: setup-vllm  ## a vLLM server on one core, the trainer on the other: stock, synchronous, overlapped: 15 minutes
	$(BIN)/python scripts/bench_overlap.py

bench-rollouts: setup-vllm  ## transformers against vLLM, n = G against G requests
	$(BIN)/python scripts/bench_rollouts.py

bench-verify: setup  ## verification against TRL's accuracy_reward on real model outputs (needs ../shared/data)
	$(BIN)/python scripts/bench_verify.py

gpu-check: setup  ## one GPU, 4 minutes: parity, update, engine, whole step -> runs/gpu_check.{json,md} (TINY=1: small, also on a CPU)
	$(BIN)/python scripts/gpu_check.py $(if $(TINY),--tiny)

# What docs/reliability.md measured, at full length (tests/stress has each with small numbers as a test).
stress-kill: setup  ## 30 kills by -9 of each kind of training run, to the bit
	$(BIN)/python tests/stress/kill_anywhere.py

stress-kill-commands: setup  ## 10 kills each of curate, rounds, long2short, evaluate
	$(BIN)/python tests/stress/kill_commands.py

stress-hostile: setup  ## 20,000 hostile completions and all real ones through every reward (real ones: ../shared/data)
	$(BIN)/python tests/stress/hostile_text.py

stress-soak: setup-vllm  ## 4,000 optimizer steps: memory, descriptors, processes
	$(BIN)/python tests/stress/soak.py --steps 4000

stress-guards: setup  ## each guard of tests/stress/guards.yaml removed once, its test failing
	$(BIN)/python tests/stress/mutate_guards.py

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
