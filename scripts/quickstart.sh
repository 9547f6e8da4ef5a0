#!/usr/bin/env bash
# From nothing to two trained drafters with measured acceptance and speed, on a CPU, without a model hub.
# Interrupted, it continues where it was. 14 to 23 minutes on two cores after the downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup gguf,wandb
. scripts/environment.sh
runs=runs/quickstart
mkdir -p "$runs"

step() { printf '\n== %s\n' "$*"; }

step "1/4  the bundled answers are the target's own: some are made again"
python -m draftsmith.scripts.check_answers configs/answers/smollm2_greedy.jsonl --target .cache/smollm2

for kind in eagle3 medusa; do
  step "2/4  train $kind"
  draftsmith train "configs/${kind}_smollm2.yaml"
done

step "3/4  measure both on held-out prompts"
if [ ! -e "$runs/eagle3/eval.json" ] || [ ! -e "$runs/medusa/eval.json" ]; then
  draftsmith eval "$runs/eagle3" "$runs/medusa" --target .cache/smollm2 --prompts configs/prompts/heldout.jsonl \
    --num-prompts 32 --max-new 128 --k 5 --temperature 0,1 \
    --speed-k 2 --speed-tree dynamic:12,4 --speed-prompts 8 --speed-max-new 48 --speed-temperatures 0 \
    --json "$runs/eagle3/eval.json" --json "$runs/medusa/eval.json"
fi

step "4/4  result"
python -m draftsmith.scripts.summary "$runs"
