#!/usr/bin/env bash
# gpu_check on a machine that is lent for minutes and reaches no network: two calls of at most five minutes.
#
#   bash scripts/gpu_lent.sh first      all that needs no engine; vLLM stays off the path
#   bash scripts/gpu_lent.sh second     the engines, and what the first call has not answered
#   bash scripts/gpu_lent.sh prepare    nothing but unpacking: before `second` on a machine that has not seen `first`
#
# It needs in .kit/ what the machine lacks (docs/gpu_check.md): site.tar.xz (Python packages, vLLM without its kernels)
# for `first` and `prepare`; attention.xz and kernels.xz, or its parts kernels.xz.*, for `second`: 64 MiB a transfer hold
# no more. Results are in $OUT after every section.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=.kit
site=${SITE:-/tmp/site}
out=${OUT:-runs}
python=${PYTHON:-python3}
export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=WARNING

need() {
  for file in "$@"; do
    [ -e "$file" ] || { echo "gpu_lent: $file is not here: name it in carry, of this call or of first or prepare" >&2; exit 3; }
  done
}

packages() {
  [ -d "$site" ] && return
  need $kit/site.tar.xz
  mkdir -p "$site.part"
  tar xJf $kit/site.tar.xz -C "$site.part" --exclude=./vllm --exclude='./vllm-*'
  mv "$site.part" "$site"
}

engine() { # all of vLLM or nothing: TRL imports it where it finds one, and half of it fails
  [ -d "$site/vllm" ] && return
  need $kit/site.tar.xz $kit/kernels.xz* $kit/attention.xz
  rm -rf "$site.engine"
  mkdir -p "$site.engine"
  tar xJf $kit/site.tar.xz -C "$site.engine" --wildcards './vllm' './vllm-*'
  cat $kit/kernels.xz* | xz -dc >"$site.engine/vllm/_C_stable_libtorch.abi3.so" ||
    { echo "gpu_lent: the parts $kit/kernels.xz.* are not all here: name them in carry" >&2; exit 3; }
  xz -dc $kit/attention.xz >"$site.engine/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
  mv "$site.engine"/vllm-* "$site.engine/vllm" "$site"
}

check() {
  mkdir -p runs "$out"
  local code=0
  $python scripts/gpu_check.py "$@" --output "$out/gpu_check.json" 2>&1 | tee "$out/gpu_check.log" || code=$?
  [ "$out" = runs ] || cp "$out"/gpu_check.{json,md} runs/ 2>/dev/null || true # for `second`, while the machine is warm
  exit $code
}

case ${1:-} in
first)
  packages
  check --budget 260
  ;;
second)
  need runs/gpu_check.json
  packages
  engine
  check --budget 255 --resume runs/gpu_check.json
  ;;
prepare) packages ;;
*)
  sed -n '2,8p' "$0"
  exit 2
  ;;
esac
