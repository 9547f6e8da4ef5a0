#!/usr/bin/env bash
# The fp32 proof on the real target: speculative and plain outputs of all held-out prompts, greedy (batch 1 and
# batch 8) and at temperature 1 with the same seeds (batch 8), for both quickstart drafters; then every kind of drafter with
# chains and trees at three temperatures, batch 1 and 5. Needs scripts/quickstart.sh first; about 25 minutes on two cores.
#   scripts/exactness.sh OUT        writes OUT/<kind>-batch<N>.json, OUT/<kind>-plans<N>.json and OUT/<kind>-<rule>-<draft>.json
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/exactness.sh OUT}
mkdir -p "$out"
. scripts/environment.sh
common="--target .cache/smollm2 --prompts configs/prompts/heldout.jsonl --k 5 --speed-prompts 0"
both="runs/quickstart/eagle3 runs/quickstart/medusa"
draftsmith eval $both $common --dtype float32 --temperature 0,1 --max-new 16 --batch-size 8 \
  --json "$out/eagle3-batch8.json" --json "$out/medusa-batch8.json"
draftsmith eval $both $common --dtype float32 --temperature 0 --max-new 12 --batch-size 1 \
  --json "$out/eagle3-batch1.json" --json "$out/medusa-batch1.json"
# Every kind, chain and tree. The draft LM is the target itself, so everything it drafts is accepted.
for batch in 1 5; do
  plans="--target .cache/smollm2 --prompts configs/prompts/heldout.jsonl --speed-prompts 0 --dtype float32 --num-prompts 5
    --temperature 0,0.7,1.3 --top-p 0.9 --max-new 12 --batch-size $batch"
  draftsmith eval runs/quickstart/eagle3 .cache/smollm2 $plans --k 1,3,7 --tree dynamic:12,4,3 --tree wide:2,2,1 \
    --json "$out/eagle3-plans$batch.json" --json "$out/draft_lm-plans$batch.json"
  draftsmith eval runs/quickstart/medusa $plans --k 1,3,5 --tree dynamic:12,4,3 --tree wide:2,2,1 \
    --json "$out/medusa-plans$batch.json"
  draftsmith eval ngram $plans --k 1,3,7 --json "$out/ngram-plans$batch.json"
done
# Acceptance at temperature 1 by rule and way of drafting, bf16.
for how in "coupled coupled" "ratio sample" "coupled argmax"; do
  set -- $how
  draftsmith eval $both $common --temperature 1 --num-prompts 48 --batch-size 48 --max-new 48 --rule "$1" --draft "$2" \
    --json "$out/eagle3-$1-$2.json" --json "$out/medusa-$1-$2.json"
done
