#!/usr/bin/env bash
# serve.sh --model-path DIR --port N [SGLang flags]: unmodified SGLang on a CPU, from .venv-sglang
# (`make sglang`; another environment: SGLANG_VENV=…). For tests: tens of times slower than a GPU.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
venv=${SGLANG_VENV:-$repository/.venv-sglang}
test -x "$venv/bin/python" || { echo "no SGLang in $venv: run 'make sglang'" >&2; exit 2; }
# With more threads than free cores OpenMP's barriers spin, ten times slower.
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# No warm-up: its English prompt kills the server when a small tokenizer encodes it to no token.
# float32, or an fp32 checkpoint is served in float16. Later flags win: all can be overridden.
exec "$venv/bin/python" -m sglang.launch_server --host 127.0.0.1 --device cpu --dtype float32 \
  --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --enable-metrics \
  --mem-fraction-static 0.1 --max-total-tokens 65536 --max-running-requests 64 "$@"
