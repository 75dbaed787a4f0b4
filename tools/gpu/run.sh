#!/usr/bin/env bash
# run.sh [options of tools.gpu]: measures the trainer on this machine's first GPU, without network.
# Leaves gpu.jsonl and gpu.log in $OUT, or here.
set -euo pipefail
out=$(realpath "${OUT:-.}")
cd "$(dirname "$0")"
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" wheels/*.whl ||
    echo 'run.sh: the wheels do not fit this Python; what needs them is skipped' >&2
export PYTHONPATH="$site:services:." PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec python3 -m tools.gpu --out "$out/gpu.jsonl" "$@"
