#!/usr/bin/env bash
# Everything that must hold before a change lands: format, lint, types, tests. Sets itself up on a fresh machine.
#   scripts/test.sh [pytest arguments]      for example: scripts/test.sh tests/unit -x
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup dev
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false WANDB_MODE=offline WANDB_SILENT=true
ruff format --check .
ruff check .
# mypy does not see through the editable install, so it reads a plain one.
typed=$(mktemp -d)
trap 'rm -rf "$typed"' EXIT
pip install --quiet --disable-pip-version-check --no-deps --target "$typed" .
rm -rf build
MYPYPATH="$typed" mypy -p draftsmith
# Two workers with a thread each: the tests are many and small. Files in their order, because the longest one comes first.
OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
