#!/usr/bin/env bash
# Checks and figures on one CUDA GPU, at most ten minutes; --dry-run: all of it at toy sizes on a CPU (a minute or two).
#   scripts/check_cuda.sh --out docs/results/2026-12-01-cuda.md
#   scripts/check_cuda.sh --dry-run
# Uses the environment that is active, or makes .venv; PYTHON=/path/to/python takes another one.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ] && ! python -c 'import draftsmith.train.run' 2>/dev/null; then
  python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[deepspeed]'
  PYTHON=.venv/bin/python
fi
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "${PYTHON:-python}" -m draftsmith.scripts.check_cuda "$@"
