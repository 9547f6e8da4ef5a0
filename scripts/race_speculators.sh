#!/usr/bin/env bash
# Trains EAGLE-3 with draftsmith and with speculators 0.9.0, taking turns on two cores; writes a dated table. Makes one environment for
# both in .cache/race/venv (about 2 GB), the target in .cache/smollm2, and stores features once (`--prepare` does only that).
#   scripts/race_speculators.sh --out docs/results/2026-12-01-race.md
#   scripts/race_speculators.sh --out race.md --steps 24 --seeds 3       shorter, with three starts; options: --help
# Run nothing else beside it: a busy core falsifies everything.
set -euo pipefail
cd "$(dirname "$0")/.."
race=.cache/race
python=${RACE_PYTHON:-$race/venv/bin/python} # an environment that is there already
if [ ! -e "${RACE_PYTHON:-$race/stamp}" ]; then
  mkdir -p "$race"
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$race/venv"
  "$python" -m pip install --quiet --disable-pip-version-check "torch==2.13.*" "transformers==5.19.*" "datasets>=4,<6" \
    pydantic pydantic-settings loguru openai rich typer accelerate pyyaml httpx jinja2 gguf setuptools
  # Without dependencies: it wants an older transformers, and an accelerator's packages.
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps speculators==0.9.0 hs-connectors==0.9.0
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps -e .
  touch "$race/stamp"
fi
. scripts/environment.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1
[ -e .cache/smollm2/config.json ] || "$python" -m draftsmith.scripts.smollm2 .cache/smollm2
exec "$python" -m draftsmith.scripts.race_speculators "$@"
