#!/usr/bin/env bash
# How τ grows with training tokens: EAGLE-3, one pass over 50, 100, 200 and 400 thousand answer tokens (bundled and
# self-invented prompts mixed at random), τ on 48 held-out prompts. Needs scripts/quickstart.sh first; about 20 minutes on two cores.
#   scripts/scaling.sh OUT        writes OUT/table.md and OUT/scaling.png
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/scaling.sh OUT}
mkdir -p "$out"
. scripts/setup.sh
setup gguf,wandb,plot
. scripts/environment.sh
answers=configs/answers
common="data.train=[$answers/smollm2_greedy.jsonl,$answers/smollm2_self.jsonl];loop.epochs=1;eval.num_prompts=48;eval.max_new=64;eval.batch_size=48"
common="$common;features.store=online;features.folder=null"
variants=() runs=()
for thousand in 50 100 200 400; do
  variants+=("$thousand:data.max_answer_tokens=${thousand}000;$common")
  runs+=("$out/$thousand")
done
python -m draftsmith.scripts.study configs/eagle3_smollm2.yaml --runs "$out" --out "$out/table.md" "${variants[@]}"
python -m draftsmith.scripts.plot_scaling "$out/scaling.png" "EAGLE-3, one pass=$(IFS=,; echo "${runs[*]}")"
