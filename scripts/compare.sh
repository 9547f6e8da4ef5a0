#!/usr/bin/env bash
# Every kind on the same target, answers and budget: trained for MINUTES each, then measured together on 48 held-out prompts.
# The answers are the bundled ones and a third part, drawn at temperature 1 and made here once: 663 thousand tokens together.
# Interrupted, it continues with the first run that is not finished. About 25 minutes of preparation, MINUTES for each kind, and
# up to an hour and a half of measuring on two cores; a kill while it measures begins the measurement again.
#   scripts/compare.sh OUT.md [MINUTES] [KIND ...]        for example: scripts/compare.sh table.md 30 eagle3 medusa
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/compare.sh OUT.md [MINUTES] [KIND ...]} minutes=${2:-30}
kinds=("${@:3}")
[ ${#kinds[@]} -gt 0 ] || kinds=(eagle3 eagle mtp p_eagle dflash medusa hydra draft_lm medusa2)
. scripts/setup.sh
setup gguf,wandb,lora
. scripts/environment.sh
runs=runs/compare
mkdir -p "$runs"
[ -e "$runs/sampled.jsonl.meta.json" ] || draftsmith data configs/prompts/train.jsonl --target .cache/smollm2 \
  --temperature 1 --max-new 160 --batch-size 224 --seed 29 --out "$runs/sampled.jsonl"
configs=("${kinds[@]/%/_smollm2.yaml}")
same=(data.train="[configs/answers/smollm2_greedy.jsonl,configs/answers/smollm2_self.jsonl,$runs/sampled.jsonl]"
  features.store=disk features.folder="$runs/features" tracking.tracker=none)
# The draft LM before it is distilled: one step that changes nothing.
draftsmith train configs/draft_lm_smollm2.yaml output="$runs/undistilled" loop.epochs=0.001 optim.learning_rate=1e-12 "${same[@]}"
draftsmith train "${configs[@]/#/configs/}" output="$runs/{kind}" loop.max_minutes="$minutes" loop.epochs=100 "${same[@]}" \
  --beside "$runs/undistilled" --beside ngram --beside suffix --table "$out" --eval-prompts configs/prompts/heldout.jsonl \
  --eval-num-prompts 48
