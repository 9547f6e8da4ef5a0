"""EAGLE-3 trained by draftsmith and by speculators, taking turns on one machine: tokens/s, peak memory, and acceptance afterwards.

    scripts/race_speculators.sh --out FILE.md [--steps N] [--seeds N]         (makes the environment that both need, then runs this)

Both train a drafter of the same parts (one norm over the captured states, normalised output fed back: the peer's defaults) from the
same weights on the same conversations in the same packs: bf16 autocast over fp32 weights, AdamW with the same rate, linear schedule
and clipping. What the target says about the conversations is computed once, ahead of the race, and stored for both; the clock
runs for optimizer steps alone, whose batches lie ready. Three contestants live in processes of their own and wait for each other;
a round gives each the same packs, in an order that rotates. Ours trains twice: as it comes, with the draft head in training, and
with the head left as the target's, which is all that the peer does. Rounds in which every token counts, prompts included, follow.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import datasets
import safetensors.torch
import torch

from draftsmith import drafters
from draftsmith.configs import locate
from draftsmith.drafters.checkpoint import build, write_text
from draftsmith.inference import metrics
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.evaluate import draft_and_verify, spread
from draftsmith.inference.load_target import load
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.target import Target
from draftsmith.train.captured import capture, to_record
from draftsmith.train.data import Sequence, count_answer_tokens, load_sequences, plan_epoch

PEER = "speculators"
OURS, FROZEN = "draftsmith", "draftsmith, head frozen"
DEPTHS = 3
DECAY = 0.8
CAPTURED_TOGETHER = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Training EAGLE-3: draftsmith beside speculators.")
    parser.add_argument("--out", required=True, metavar="FILE.md")
    parser.add_argument("--target", default=".cache/smollm2", metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=Path(".cache/race/work"), metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="optimizer steps of each contestant")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="packed into a step, at most")
    parser.add_argument("--round", type=int, default=4, metavar="N", help="steps of a turn")
    parser.add_argument("--all-rounds", type=int, default=3, metavar="N", help="rounds in which every token counts")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="whole repeats, with other weights and packs")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=12_288, metavar="W")
    parser.add_argument(
        "--prompts", type=int, default=48, metavar="N", help="held-out prompts that acceptance is measured on"
    )
    parser.add_argument("--prepare", action="store_true", help="compute what is stored, and stop")
    options = parser.parse_args()
    races = []
    for seed in range(options.seeds):
        folder = options.work / f"seed{seed}"
        if not (folder / "race.json").exists():
            prepare(folder, options, seed)
        if not options.prepare:
            races.append(race(folder, options))
    if races:
        lines = report(options, races)
        write_text(Path(options.out), "\n".join([*lines, ""]))
        print("\n".join(lines))


def prepare(folder: Path, options: argparse.Namespace, seed: int) -> None:
    """Packs, starting weights, and the target's view of the conversations, in a form for each side."""
    target = load(options.target, dtype=torch.bfloat16)
    assert target.tokenizer is not None
    sequences = load_sequences(
        [str(locate("configs/answers/smollm2_greedy.jsonl"))],
        target.tokenizer,
        max_length=options.tokens,
        max_answer_tokens=None,
        seed=seed,
    )
    counts_V = count_answer_tokens(sequences, target.shape.vocab_size)
    plan = plan_epoch([len(s.ids) for s in sequences], None, 1, seed, 0, options.tokens)[: options.steps]
    used = sorted(index for pack in plan for index in pack)
    place = {index: number for number, index in enumerate(used)}
    sequences = [sequences[index] for index in used]

    shutil.rmtree(folder, ignore_errors=True)
    for name in ("ours", "theirs/hidden_states"):
        (folder / name).mkdir(parents=True)
    torch.manual_seed(seed)
    settings = {
        "draft_vocab_size": options.draft_vocab_size,
        "steps": DEPTHS,
        "loss": {"divergence": "kl", "decay": DECAY},
        "norm_before_fc": True,
        "norm_output": True,
    }
    drafter = build("eagle3", settings, target.shape)
    drafter.initialise(target, counts_V)
    drafters.save(drafter, folder / "start")
    store(folder, target, sequences, drafter.feature_layers)
    (folder / "sequences.jsonl").write_text("".join(json.dumps(dataclasses.asdict(s)) + "\n" for s in sequences))
    plan_file = {
        "target": str(Path(options.target).resolve()),
        "tokens": options.tokens,
        "packs": [[place[index] for index in pack] for pack in plan],
        "layers": drafter.feature_layers,
        "depths": DEPTHS,
        "decay": DECAY,
        "learning_rate": options.learning_rate,
        "warmup_steps": max(1, options.steps // 25),
        "steps": options.steps,
        "draft_vocab_size": options.draft_vocab_size,
    }
    write_text(folder / "race.json", json.dumps(plan_file))  # last: it says that all is there


def store(folder: Path, target: Target, sequences: SequenceOf[Sequence], layers: SequenceOf[Any]) -> None:
    """Ours takes the state behind the final norm and the law's normaliser, theirs the state before that norm."""
    leaving = target.shape.num_layers
    for begin in range(0, len(sequences), CAPTURED_TOGETHER):
        some = [dataclasses.replace(s, loss_mask=[True] * len(s.ids)) for s in sequences[begin:][:CAPTURED_TOGETHER]]
        captured = capture(target, some, [*layers, leaving], together=CAPTURED_TOGETHER)
        for index, (sequence, view) in enumerate(zip(some, captured, strict=True), begin):
            states = {f"layer{layer}": to_record(view, layer)["codes"] for layer in layers}
            last = to_record(view, "last")
            ours = {**states, "last": last.pop("codes"), **last}
            theirs = {
                "hidden_states": torch.stack([*states.values(), to_record(view, leaving)["codes"]], dim=1),
                "token_ids": torch.tensor(sequence.ids),
            }
            safetensors.torch.save_file(ours, folder / "ours" / f"{index}.safetensors")
            safetensors.torch.save_file(theirs, folder / "theirs" / "hidden_states" / f"hs_{index}.safetensors")
        print(f"features: {begin + len(some)} of {len(sequences)} conversations", file=sys.stderr)
    rows = [{"input_ids": s.ids, "loss_mask": s.loss_mask, "seq_len": len(s.ids)} for s in sequences]
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(str(folder / "theirs"))


class Runner:
    """A contestant in a process of its own."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"draftsmith.scripts.{module}", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant has ended with status {self.process.wait()}; see what it printed above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.communicate()


@dataclasses.dataclass
class Race:
    """What one seed gave: rounds by contestant, as they answered; tokens of each round, all and supervised ones; acceptance."""

    answers: dict[str, list[dict[str, Any]]]
    all_answers: dict[str, list[dict[str, Any]]]
    tokens: list[int]
    supervised: list[int]
    all_tokens: list[int]
    acceptance: dict[str, dict[str, Any]]
    plan: dict[str, Any]


def race(folder: Path, options: argparse.Namespace) -> Race:
    plan = json.loads((folder / "race.json").read_text())
    wanted = (options.steps, options.tokens, options.learning_rate, options.draft_vocab_size)
    there = (plan["steps"], plan["tokens"], plan["learning_rate"], plan["draft_vocab_size"])
    if wanted != there:
        raise SystemExit(f"{folder} was prepared with other settings ({there}, not {wanted}); delete it")
    sequences = [Sequence(**json.loads(line)) for line in (folder / "sequences.jsonl").open()]
    start = str(folder / "start")
    runners = {
        PEER: Runner("race_theirs", str(folder), start),
        OURS: Runner("race_ours", str(folder), start),
        FROZEN: Runner("race_ours", str(folder), start, "--freeze-head"),
    }
    rounds = [plan["packs"][i : i + options.round] for i in range(0, len(plan["packs"]), options.round)]
    answers = turns(runners, rounds, all_supervised=False)
    for name, runner in runners.items():
        runner.ask({"save": str(folder / _file(name))})
    extra = rounds[: 1 + options.all_rounds] if options.all_rounds else []
    all_answers = turns(runners, extra, all_supervised=True)
    for runner in runners.values():
        runner.close()

    def count(packs: list[list[int]], supervised: bool) -> int:
        some = [sequences[index] for pack in packs for index in pack]
        return sum(s.num_answer_tokens if supervised else len(s.ids) for s in some)

    acceptance = {name: measure(plan["target"], folder / _file(name), options.prompts) for name in runners}
    return Race(
        answers,
        all_answers,
        [count(packs, False) for packs in rounds],
        [count(packs, True) for packs in rounds],
        [count(packs, False) for packs in extra],
        acceptance,
        plan,
    )


def turns(runners: dict[str, Runner], rounds: list[Any], all_supervised: bool) -> dict[str, list[dict[str, Any]]]:
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    names, first = list(runners), 0
    for number, packs in enumerate(rounds):
        rotation = number % len(names)
        for name in names[rotation:] + names[:rotation]:
            time.sleep(0.5)  # the threads of the one before may still be waiting for work, busily
            order = {"packs": packs, "first": first, "all_supervised": all_supervised}
            answers[name].append(runners[name].ask(order))
            print(f"round {number + 1} of {len(rounds)}, {name}: {answers[name][-1]['seconds']:.1f} s", file=sys.stderr)
        first += len(packs)
    return answers


def measure(path: str, drafter: Path, num_prompts: int) -> dict[str, Any]:
    """Real acceptance on held-out prompts at temperature 0."""
    target = load(path, dtype=torch.bfloat16)
    assert target.tokenizer is not None
    conversations = read_conversations(locate("configs/prompts/heldout.jsonl"))
    chosen = [conversations[i] for i in spread(len(conversations), num_prompts)]
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in chosen]
    model = drafters.load(drafter, dtype=torch.bfloat16)
    model.bind(target)
    return metrics.acceptance(
        draft_and_verify(target, model, prompts, depth=5, temperature=0.0, max_new=64, batch_size=32)
    )


def report(options: argparse.Namespace, races: SequenceOf[Race]) -> list[str]:
    names = ("torch", "transformers", "speculators", "hs-connectors", "accelerate")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    plan = races[0].plan
    tokens, supervised = (sum(sum(getattr(r, name)) for r in races) for name in ("tokens", "supervised"))
    lines = [
        f"# Training EAGLE-3: draftsmith beside speculators, {time.strftime('%Y-%m-%d')}",
        "",
        "```bash",
        f"scripts/race_speculators.sh {' '.join(sys.argv[1:])}",
        "```",
        "",
        f"Python {platform.python_version()}, {versions}; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')} of "
        f"{os.cpu_count()} cores. SmolLM2-135M sizes, draft vocabulary {plan['draft_vocab_size']:,}, {plan['depths']} depths, "
        f"packs of at most {plan['tokens']:,} tokens, {len(races)} seed(s) of {plan['steps']} steps "
        f"({tokens:,} tokens, {supervised:,} of them supervised).",
        "",
        "The first round warms up and is left out of the speeds. Median [least, most] over rounds. Peak memory: MiB of the "
        "process above what it took before the model was made (weights, optimizer, gradients, batches, everything), and above "
        "what it holds at rest between two rounds.",
        "",
        *_speeds("Answers supervised, as they are", [(r.answers, r.tokens, r.supervised) for r in races]),
        "",
        *_speeds("Every token supervised", [(r.all_answers, r.all_tokens, r.all_tokens) for r in races]),
        "",
        f"Acceptance on {options.prompts} held-out prompts (temperature 0, K = 5, 64 tokens), after the first table's steps:",
        "",
        "| | τ of each seed [95 %] | mean τ | accepted given the one before, first seed | training accuracy, last round |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in races[0].acceptance:
        taus = [r.acceptance[name]["tokens_per_round"] for r in races]
        shown = ", ".join(f"{t['value']:.3f} [{t['low']:.3f}, {t['high']:.3f}]" for t in taus)
        rates = " ".join("-" if a is None else f"{a:.2f}" for a in races[0].acceptance[name]["cond_accept"])
        said = races[0].answers[name][-1]["said"]
        accuracies = " ".join(f"{statistics.mean(s[f'accuracy/{j}'] for s in said):.2f}" for j in range(plan["depths"]))
        mean = statistics.mean(t["value"] for t in taus)
        lines.append(f"| {name} | {shown} | {mean:.3f} | {rates} | {accuracies} |")
    return lines + [
        "",
        "What differs: the peer leaves the draft head as the target's, computes logits and losses of all tokens and masks them, "
        "renormalises the teacher inside the draft vocabulary, decays all parameters (ours: matrices alone), and divides the loss "
        "of each depth by its own count. Its batches are made exactly as long as a pack is, so it computes nothing for padding; "
        "it logs nothing. Attention is `sdpa` and the loss `eager`, the only ones of its that run on a CPU.",
    ]


def _speeds(title: str, races: list[tuple[dict[str, list[dict[str, Any]]], list[int], list[int]]]) -> list[str]:
    """A table; ratios are of the same packs, round by round."""
    lines = [
        f"{title}:",
        "",
        "| | tokens/s | supervised tokens/s | times the peer's | peak, everything | peak, above rest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in races[0][0]:
        speeds, taught, ratios, peaks, above = list[float](), list[float](), list[float](), list[float](), list[float]()
        for answers, tokens, supervised in races:
            for number in range(1, len(tokens)):
                answer, other = answers[name][number], answers[PEER][number]
                speeds.append(tokens[number] / answer["seconds"])
                taught.append(supervised[number] / answer["seconds"])
                ratios.append(other["seconds"] / answer["seconds"])
                peaks.append(answer["peak"])
                above.append(answer["peak"] - answer["rest"])
        if speeds:
            cells = [_spread(speeds), _spread(taught), _spread(ratios, 2), f"{max(peaks):.0f}", f"{max(above):.0f}"]
            lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return lines


def _spread(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def _file(name: str) -> str:
    return "after-" + name.replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    main()
