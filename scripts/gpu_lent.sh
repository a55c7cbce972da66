#!/usr/bin/env bash
# gpu_check on a machine that is lent for minutes and reaches no network: two calls of at most five minutes.
#
#   bash scripts/gpu_lent.sh first      all that needs no engine; vLLM stays off the path
#   bash scripts/gpu_lent.sh second     the engines, and what the first call has not answered
#   bash scripts/gpu_lent.sh prepare    nothing but taking in parts of the kit: a transfer holds 64 MiB
#
# It needs in .kit/ what scripts/offline_kit.py has packed (docs/gpu_check.md): manifest.json, unpack.py and the parts of
# `packages`, for `second` also those of `engine`. What one call has brought is kept for the next. Each archive is
# verified and unpacked whole or not at all. Results are in $OUT after every section.
#
# With a tool that carries at most 64 MiB a call:
#   prepare, carry .kit/manifest.json .kit/unpack.py .kit/packages.tar.xz.000 .kit/engine.tar.xz.000    14 s
#   second, carry .kit/engine.tar.xz.001 .002 .003, a limit of 325 s                                    255 s of checks
#   second once more, with nothing in carry                                                            what is left
# BUDGET=… is for more seconds, --only says what comes first. A machine that is given back in between is begun anew:
# `prepare`, with the earlier runs/gpu_check.json in carry.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=${KIT:-/tmp/kit}
site=${SITE:-/tmp/site}
out=${OUT:-runs}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=WARNING

mkdir -p "$kit"
[ -d .kit ] && cp .kit/* "$kit" # a call that brings other parts leaves none of these in the checkout

need() {
  for file in "$@"; do
    [ -e "$file" ] || { echo "gpu_lent: $file is not here: name it in carry, of this call or of first or prepare" >&2; exit 3; }
  done
}

unpack() { # what a part is missing of, unpack.py says
  [ -d "$site/$1" ] && return
  need $kit/manifest.json $kit/unpack.py
  $python $kit/unpack.py --to "$site" --only "$1" --no-check || exit 3
}

check() {
  mkdir -p runs "$out"
  local code=0 path=$site/packages/site-packages
  [ "$1" = engine ] && path=$site/engine/site-packages:$path
  shift
  PYTHONPATH="$PWD:$path" $python scripts/gpu_check.py "$@" --output "$out/gpu_check.json" 2>&1 | tee "$out/gpu_check.log" || code=$?
  [ "$out" = runs ] || cp "$out"/gpu_check.{json,md} runs/ 2>/dev/null || true # for `second`, while the machine is warm
  exit $code
}

case ${1:-} in
first)
  unpack packages
  check plain --budget 260
  ;;
second)
  unpack packages
  unpack engine
  earlier=()
  [ -e runs/gpu_check.json ] && earlier=(--resume runs/gpu_check.json)
  check engine --budget "${BUDGET:-255}" "${earlier[@]}"
  ;;
prepare)
  (unpack packages) || echo "gpu_lent: packages are not whole yet"
  (unpack engine) || echo "gpu_lent: the engine is not whole yet"
  ;;
*)
  sed -n '2,9p' "$0"
  exit 2
  ;;
esac
