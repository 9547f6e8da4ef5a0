#!/usr/bin/env bash
# How τ grows with training tokens: EAGLE-3, one pass over 50, 100, 200 and 400 thousand answer tokens (bundled and
# self-invented prompts mixed at random), τ on 48 held-out prompts. Needs scripts/quickstart.sh first; about half an hour on two cores.
#   scripts/scaling.sh OUT        writes OUT/table.md and OUT/scaling.png
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/scaling.sh OUT}
mkdir -p "$out"
. scripts/setup.sh
setup gguf,wandb,plot
. scripts/environment.sh
answers=configs/answers
sizes=(50000 100000 200000 400000)
draftsmith train configs/eagle3_smollm2.yaml output="$out/eagle3" tracking.tracker=none \
  data.train="[$answers/smollm2_greedy.jsonl,$answers/smollm2_self.jsonl]" loop.epochs=1 \
  eval.num_prompts=48 eval.max_new=64 eval.batch_size=48 features.store=online features.folder=null \
  --grid data.max_answer_tokens="$(IFS=,; echo "${sizes[*]}")" \
  --table "$out/table.md" --eval-num-prompts 48 --eval-max-new 64
runs=("${sizes[@]/#/$out/eagle3-max_answer_tokens-}")
python -m draftsmith.scripts.plot_scaling "$out/scaling.png" "EAGLE-3, one pass=$(IFS=,; echo "${runs[*]}")"
