#!/usr/bin/env bash
# Makes the virtual environment: setup_env.sh PYTHON VENV. Safe to run again.
# `uv` installs what comes after torch where it is found (UV= leaves it out); elsewhere pip does. pip compiles nothing
# ahead: Python compiles a module when it is first imported, and most are never imported.
# torch comes first, so that nothing else pulls a build that the machine cannot use: with a GPU the default build,
# without one the CPU build (its index is asked once, quickly; a local wheel or mirror serves as well).
set -euo pipefail
python="$1" venv="$2" here="$(cd "$(dirname "$0")" && pwd)"

"$python" - <<'PY' || { echo "grpo_lab needs Python >= 3.11: make setup PYTHON=python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
uv="${UV-$(command -v uv || true)}"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade "pip>=24"

torch="$(grep -E '^torch==' "$here/constraints.txt")"
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        "${pip[@]}" install --quiet --no-compile "$torch"
    else
        "${pip[@]}" install --quiet --no-compile --retries 0 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
    fi
fi
if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python "$venv/bin/python" -c "$here/constraints.txt" -e "$here/..[dev]"
else
    "${pip[@]}" install --quiet --no-compile -c "$here/constraints.txt" -e "$here/..[dev]"
fi
"$venv/bin/python" -c 'import torch, transformers, trl; print(f"environment ready: torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")'
