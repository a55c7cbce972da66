#!/usr/bin/env bash
# gpu_check on a machine that is lent for minutes and reaches no network: two calls of at most five minutes.
#
#   bash scripts/gpu_lent.sh first      all that needs no engine; vLLM stays off the path
#   bash scripts/gpu_lent.sh second     the engines, and what the first call has not answered
#   bash scripts/gpu_lent.sh prepare    nothing but unpacking: before `second` on a machine that has not seen `first`
#
# It needs in .kit/ what scripts/offline_kit.py has packed (docs/gpu_check.md): manifest.json, unpack.py and the parts of
# `packages` for `first` and `prepare`, the parts of `engine` for `second`: 64 MiB a transfer hold no more. Each archive
# is verified and unpacked whole or not at all. Results are in $OUT after every section.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=.kit
site=${SITE:-/tmp/site}
out=${OUT:-runs}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=WARNING

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
  need runs/gpu_check.json
  unpack packages
  unpack engine
  check engine --budget 255 --resume runs/gpu_check.json
  ;;
prepare) unpack packages ;;
*)
  sed -n '2,9p' "$0"
  exit 2
  ;;
esac
