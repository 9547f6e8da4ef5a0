"""Samples through the real decode loop under every lossless rule, and asks by chi-square whether the tokens have the target's law.

    python -m draftsmith.scripts.chi_square [--rounds N] [--out FILE.md]

A random Llama of six tokens is the target, a bigram model that is unlike it drafts. Each rule runs in every shape of draft that its
own way of drafting allows, at least N rounds each, and once more with a target whose law is off by exactly `BIAS` in total
variation at every place: that much mass moves from the most likely token to the second. A rule that is lossless emits the shifted
law exactly, so the run must be found out. Exits with status 1 if a rule fails or a shifted one passes. The unit tests do the same
with fewer tokens (test_output_law.py) and prove it without chance (test_enumeration.py).

Statistics of a run, all against exact laws: the joint law of tokens 1 to 3 and of tokens 4 to 6 (all prefixes enumerated), and the
ranks: over all tokens that a rule emitted, and separately behind each last token, how often the token was the most likely one given
all before it, the second, … Laws differ from place to place, so counts of ranks vary less than multinomial ones and their p-values
are on the safe side.
"""

import argparse
import dataclasses
import datetime
import itertools
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftsmith.drafters.base import Drafter, Pick, Proposal, TargetHead
from draftsmith.drafters.grow import grow
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.drafting import default_way, drawn_by
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.inference.verify import RULES, Keys, Rule, Verdict

VOCAB, LENGTH, ENUMERATED = 6, 8, 6
PROMPT = [1, 4, 2]
BATCH = 10_000
BIAS = 0.01
FALSE_ALARM = 1e-5
"""Chance that a correct program fails anywhere in a run of this script."""
MIN_EXPECTED = 20
MIN_ROUNDS = 20_000
SAMPLER = Sampler(1.0)
PLANS: dict[str, Plan] = {"chain of 3": chain(3), "tree of 6": Fixed((-1, -1, 0, 0, 1, 2)), "dynamic": Dynamic(6, 3, 2)}
STATISTICS = ("tokens 1-3", "tokens 4-6", "ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description="Chi-square of sampled tokens against the target's exact law.")
    parser.add_argument("--rounds", type=int, default=200_000, help="rounds per rule and shape at least")
    parser.add_argument("--out", help="Markdown file to write")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds is {options.rounds}; chi-square needs {MIN_ROUNDS} or more")
    begin = time.perf_counter()
    target, drafter = toy_target(), Bigram()
    law = joint_law(target)
    runs = []
    cases = [(rule, name) for rule in RULES if RULES[rule].lossless for name in PLANS if fits(rule, PLANS[name])]
    for rule, name in cases:
        runs.append(measure(target, law, drafter, rule, name, options.rounds))
        print(f"{rule}, {name}: {runs[-1].right} {runs[-1].shifted}", file=sys.stderr)
    text = report(runs, options.rounds, time.perf_counter() - begin)
    print(text)
    if options.out:
        Path(options.out).write_text(text)
    if not all(run.passed and run.found for run in runs):
        sys.exit(1)


def fits(rule: str, plan: Plan) -> bool:
    """Whether the rule verifies such plans, drafted in its own way."""
    sampled = drawn_by(default_way(rule), greedy=False) == "sampled"
    return (plan.is_chain or RULES[rule].trees) and not (sampled and isinstance(plan, Dynamic))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One rule in one shape.

    Attributes:
        right, shifted: p-values of `STATISTICS`, with the target's law and with the shifted one.
        power: chance that each statistic finds a distance of `BIAS` between its two largest cells (for ranks: behind every token).
    """

    rule: str
    plan: str
    sequences: int
    rounds: int
    accepted: float
    right: list[float]
    shifted: list[float]
    power: list[float]
    limit: float

    @property
    def passed(self) -> bool:
        return min(self.right) > self.limit

    @property
    def found(self) -> bool:
        return min(self.shifted) < self.limit


def measure(target: Target, law: Tensor, drafter: Drafter, rule: str, name: str, rounds: int) -> Run:
    """Runs a rule twice, as it is and with the shifted law."""
    num_cases = sum(fits(other, plan) for other in RULES if RULES[other].lossless for plan in PLANS.values())
    limit = FALSE_ALARM / (num_cases * len(STATISTICS))
    tokens_NT, num_rounds, num_accepted = sample(target, drafter, rule, rule, PLANS[name], rounds)
    tables = count(target, law, tokens_NT)
    wrong = f"{rule}, shifted"
    RULES[wrong] = dataclasses.replace(RULES[rule], decide=shifted(RULES[rule]), lossless=False)
    try:
        other_NT, _, _ = sample(target, drafter, wrong, rule, PLANS[name], rounds)
    finally:
        del RULES[wrong]
    return Run(
        rule=rule,
        plan=name,
        sequences=len(tokens_NT),
        rounds=num_rounds,
        accepted=num_accepted / num_rounds,
        right=[p_value(table) for table in tables],
        shifted=[p_value(table) for table in count(target, law, other_NT)],
        power=[power(table, limit) for table in tables],
        limit=limit,
    )


def shifted(rule: Rule) -> Any:
    """The rule for a target that is off: `BIAS` of its mass moved from the most likely token to the second at every row."""

    def decide(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
        probs_BRV = log_probs_BRV.exp()
        top_BR2 = probs_BRV.topk(2).indices
        move_BR2 = torch.tensor([-BIAS, BIAS], dtype=probs_BRV.dtype).expand(top_BR2.shape)
        return rule.decide(proposal, probs_BRV.scatter_add(2, top_BR2, move_BR2).log(), keys)

    return decide


def sample(
    target: Target, drafter: Drafter, rule: str, drafted_for: str, plan: Plan, rounds: int
) -> tuple[Tensor, int, int]:
    """Tokens (N, LENGTH) of as many sequences as it takes, seeds 0, 1, 2, …; rounds and accepted tokens."""
    speculation = Speculation(drafter, plan, rule, default_way(drafted_for))
    tokens: list[Tensor] = []
    num_rounds = num_accepted = 0
    while num_rounds < rounds:
        outputs = generate(
            target,
            [PROMPT] * BATCH,
            max_new=LENGTH,
            sampler=SAMPLER,
            speculation=speculation,
            seeds=range(len(tokens) * BATCH, (len(tokens) + 1) * BATCH),
            stop_at_eos=False,
        )
        tokens.append(torch.tensor([output.ids for output in outputs]))
        num_rounds += sum(len(output.rounds) for output in outputs)
        num_accepted += sum(round_.accepted for output in outputs for round_ in output.rounds)
    return torch.cat(tokens), num_rounds, num_accepted


# ---- laws ---------------------------------------------------------------------------------------------------------------


def step_laws(target: Target, tokens_NT: Tensor) -> Tensor:
    """The law of each of the next T tokens, given the prompt and those before it, fp64 (N, T, V)."""
    laws = []
    with torch.no_grad():
        for chunk_nT in tokens_NT.split(BATCH):
            ids_nT = torch.cat([torch.tensor(PROMPT).expand(len(chunk_nT), -1), chunk_nT[:, :-1]], 1)
            logits_nTV = target.model(ids_nT, use_cache=False).logits[:, len(PROMPT) - 1 :]
            laws.append(SAMPLER.log_probs(logits_nTV.double()).exp())
    return torch.cat(laws)


def joint_law(target: Target) -> Tensor:
    """Of the first six tokens, a dimension each."""
    all_NT = torch.tensor(list(itertools.product(range(VOCAB), repeat=ENUMERATED)))
    chances_NT = step_laws(target, all_NT).gather(2, all_NT[..., None])[..., 0]
    return chances_NT.prod(1).view([VOCAB] * ENUMERATED)


# ---- chi-square ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """What was counted in G groups of C cells, and what is expected; a group's total is given."""

    counts_GC: Tensor
    expected_GC: Tensor


def count(target: Target, law: Tensor, tokens_NT: Tensor) -> list[Table]:
    """A table for each of `STATISTICS`."""
    tables = []
    for first in (0, 3):
        cell_N = (tokens_NT[:, first] * VOCAB + tokens_NT[:, first + 1]) * VOCAB + tokens_NT[:, first + 2]
        others = [place for place in range(ENUMERATED) if not first <= place < first + 3]
        counts_C = torch.bincount(cell_N, minlength=VOCAB**3).double()
        tables.append(pooled(counts_C, law.sum(others).flatten() * len(tokens_NT)))
    laws_NTV = step_laws(target, tokens_NT)[:, 1:]  # the first token comes with the prompt, from no rule
    last_n, own_n1 = tokens_NT[:, :-1].flatten(), tokens_NT[:, 1:].flatten()[:, None]
    laws_nV = laws_NTV.flatten(0, 1)
    rank_n = (laws_nV > laws_nV.gather(1, own_n1)).sum(1)
    counts_VC = torch.bincount(last_n * VOCAB + rank_n, minlength=VOCAB**2).double().view(VOCAB, VOCAB)
    ranked_nC = laws_nV.sort(dim=1, descending=True).values
    tables.append(Table(counts_VC, torch.zeros_like(counts_VC).index_add_(0, last_n, ranked_nC)))
    return tables


def pooled(counts_C: Tensor, expected_C: Tensor) -> Table:
    """One group, its cells with a small expectation made one: the statistic's law is chi-square where many are expected."""
    small_C = expected_C < MIN_EXPECTED
    if bool(small_C.any()):
        small_C = small_C | (expected_C == expected_C[~small_C].min())  # so that together they are enough
    values = [torch.cat([x_C[small_C].sum()[None], x_C[~small_C]]) for x_C in (counts_C, expected_C)]
    counts_C, expected_C = (x_C if bool(small_C.any()) else x_C[1:] for x_C in values)
    return Table(counts_C[None], expected_C[None])


def p_value(table: Table) -> float:
    """Chance of counts at least this far from what is expected."""
    statistic = ((table.counts_GC - table.expected_GC) ** 2 / table.expected_GC).sum()
    return tail(float(statistic), degrees(table))


def degrees(table: Table) -> int:
    return table.counts_GC.numel() - len(table.counts_GC)


def tail(statistic: float, degrees: float) -> float:
    """Chance that chi-square exceeds a value."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power(table: Table, limit: float) -> float:
    """Chance that the p-value falls below `limit` if `BIAS` is moved between the two largest cells of every group: the tail of the
    noncentral chi-square, a Poisson mixture of central ones."""
    low, high = 0.0, 10_000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees(table)) > limit else (low, middle)
    moved_G = BIAS * table.expected_GC.sum(1)
    half = float((moved_G**2 * (1 / table.expected_GC.topk(2).values).sum(1)).sum()) / 2
    terms = range(int(half + 20 * math.sqrt(half) + 50))
    weights = [math.exp(i * math.log(half) - half - math.lgamma(i + 1)) for i in terms]
    return sum(weight * tail(low, degrees(table) + 2 * i) for i, weight in enumerate(weights) if weight > 0)


# ---- toys ---------------------------------------------------------------------------------------------------------------


def toy_target() -> Target:
    """A Llama with random weights, whose laws are uneven and depend on more than the last token."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.25, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    return Target(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "toy")


class Bigram(Drafter):
    """Random logits for every last token; its state is the newest token."""

    def __init__(self) -> None:
        self._logits_VV = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11))

    def bind(self, target: TargetHead) -> None:
        pass

    def init(self, batch: int, capacity: int) -> Tensor:
        return torch.zeros(batch, dtype=torch.int64)

    def observe(self, state: Tensor, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Tensor:
        return next_B

    def select(self, state: Tensor, rows_B: Tensor) -> Tensor:
        return state[rows_B]

    def replace(self, state: Tensor, rows_B: Tensor, other: Tensor) -> Tensor:
        return state.index_copy(0, rows_B, other)

    def propose(self, state: Tensor, plan: Plan, pick: Pick) -> Proposal:
        return grow(plan, self._logits_VV[state], lambda frontier: self._logits_VV[frontier.tokens_BM], pick, None)


# ---- report -------------------------------------------------------------------------------------------------------------


def report(runs: list[Run], rounds: int, seconds: float) -> str:
    """The table in Markdown, what it can find, and the verdict."""
    header = ["rule", "draft", "sequences", "rounds", "accepted", *(f"p, {name}" for name in STATISTICS)]
    header += [f"p, {name}, shifted by {BIAS:g}" for name in STATISTICS]
    lines = [
        "# Chi-square of the output law, through the decode loop",
        "",
        f"{datetime.date.today()}; Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {seconds / 60:.1f} minutes. Made by "
        f"`python -m draftsmith.scripts.chi_square --rounds {rounds}`.",
        "",
        f"Target: a random Llama with {VOCAB} tokens, fp32, temperature {SAMPLER.temperature:g}; draft: a random bigram model; "
        f"{LENGTH} tokens a sequence, the first of them from the prompt alone.",
        "",
        "| " + " | ".join(header) + " |",
        "|---|---|" + "---:|" * (len(header) - 2),
    ]
    for run in runs:
        numbers = [f"{run.sequences:,}", f"{run.rounds:,}", f"{run.accepted:.2f}"]
        p_values = [f"{value:.2g}" for value in (*run.right, *run.shifted)]
        lines.append("| " + " | ".join([run.rule, run.plan, *numbers, *p_values]) + " |")
    weakest = [min(run.power[i] for run in runs) for i in range(len(STATISTICS))]
    passed, found = all(run.passed for run in runs), all(run.found for run in runs)
    lines += [
        "",
        f"False alarms: each of the {len(runs) * len(STATISTICS)} p-values of a right rule must exceed {runs[0].limit:.1e}, which "
        f"a correct program misses anywhere with chance {FALSE_ALARM:g}. Seeds are fixed, not tuned.",
        "",
        f"Power: a total-variation distance of {BIAS:g}, moved between the two largest cells (for ranks: behind every token), is "
        "found with chance "
        + ", ".join(f"{value:.6f} ({name})" for name, value in zip(STATISTICS, weakest, strict=True))
        + " in the weakest run (noncentral chi-square). Checked: with exactly that much mass moved from the most likely token to "
        "the second at every place, the columns on the right must fall below the same limit.",
        "",
        f"Verdict: {'all rules pass' if passed else 'A RULE FAILS'}; "
        f"{'every shifted law is found' if found else 'A SHIFTED LAW IS NOT FOUND'}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
