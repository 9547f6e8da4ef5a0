"""Every verification rule played out without randomness: the law of the tokens that it emits, to the last digit of fp64.

The rule itself is called once, with a batch that holds all its branches: every row is one set of drafted tokens, one outcome of
every coin and one drawn token, and its weight is the product of their probabilities (`Branches`). What a row emits is followed
by the target's own law, by induction over rounds. Summed up, the joint law of the first P + 1 tokens must be the target's. Laws
depend on all tokens before. New entries of `verify.RULES` are tested without a change here.

The same enumeration measures rules that are known to be wrong, against distances that were worked out in rational arithmetic.

Letters: B branches, N nodes, R = N + 1 rows, P depth, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Drawn, Proposal
from draftsmith.drafters.tree import chain, depths, fixed
from draftsmith.inference import verify
from draftsmith.inference.verify import Keys, Verdict

Laws = list[Tensor]
"""A law that depends on all tokens before: laws[n] is (V**n, V), a row per prefix of n tokens, prefixes counted in base V."""
Siblings = tuple[float, list[int], list[list[float]]]
"""One way the siblings under a node can come out: its probability, their tokens, the law handed over for each."""
Way = Callable[[list[float], int, float], Iterator[Siblings]]
"""(draft law, number of siblings, the number between 0 and 1 that coupled drafts share with the target) -> all outcomes."""
Decide = Callable[[Proposal, Tensor, Keys], Verdict]


# ---- the enumeration ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Branches(Keys):
    """Chance played out. A coin shows what the branch says and weighs it by that outcome's probability, a drawn token likewise.
    The target's own tokens come from one number per depth, as the inverse of the cumulative law: as with the real noise, nodes
    of a depth share it.

    Attributes:
        target_BRV: the target's laws, for which the numbers are chosen.
        numbers_BR: in (0, 1).
        coins: use -> bool (B,).
        drawn_B: the tokens that `draw` returns.
        weights_B: multiplied in place.
        asked: what the rule has asked for.
    """

    target_BRV: Tensor
    numbers_BR: Tensor
    coins: dict[int, Tensor]
    drawn_B: Tensor
    weights_B: Tensor
    asked: list[int | str]

    def emit(self, log_probs_BRV: Tensor) -> Tensor:
        self._ask("emit")
        torch.testing.assert_close(log_probs_BRV.exp(), self.target_BRV, atol=1e-14, rtol=0)
        return (self.target_BRV.cumsum(-1) <= self.numbers_BR[..., None]).sum(-1)

    def accept(self, probability_B: Tensor, use: int) -> Tensor:
        self._ask(use)
        coin_B = self.coins.get(use, torch.zeros_like(probability_B, dtype=torch.bool))
        chance_B = probability_B.clamp(0, 1)  # all that a comparison with a number in (0, 1) sees of it
        self.weights_B.mul_(torch.where(coin_B, chance_B, 1 - chance_B))
        return coin_B

    def draw(self, law_BV: Tensor) -> Tensor:
        self._ask("draw")
        law_BV = law_BV / law_BV.sum(1, keepdim=True)  # as the Gumbel-max trick, which knows no other mass than one
        self.weights_B.mul_(law_BV.gather(1, self.drawn_B[:, None])[:, 0])
        return self.drawn_B

    def _ask(self, what: int | str) -> None:
        assert what not in self.asked, f"{what} was used twice, so it is not independent"
        self.asked.append(what)


def output_law(
    decide: Decide, parents: Sequence[int], target: Laws, draft: Laws, drawn: Drawn, way: Way | None = None
) -> tuple[Tensor, float]:
    """The joint law of the first P + 1 tokens, (V**(P + 1),), and the mean number of accepted tokens."""
    way = way or WAYS[drawn]
    coupled = drawn == "coupled"
    trial, _ = _play(decide, parents, target, drawn, _drafts(parents, target, draft, way, coupled, coupled), [])
    emits = "emit" in trial.asked
    keys, verdict = _play(
        decide, parents, target, drawn, _drafts(parents, target, draft, way, coupled or emits, coupled), trial.asked
    )
    assert keys.asked == trial.asked
    assert float(keys.weights_B.sum()) == pytest.approx(1, abs=1e-11)

    mass, vocab = torch.zeros(1, dtype=torch.float64), target[0].shape[1]
    for length in range(1, len(target) + 1):
        mass = (mass[:, None] * target[length - 1]).flatten()
        ends_B = verdict.num_accepted_B == length - 1
        places = vocab ** torch.arange(length - 1, -1, -1)
        mass.index_add_(0, verdict.emitted_BP[ends_B, :length] @ places, keys.weights_B[ends_B])
    return mass, float((keys.weights_B * verdict.num_accepted_B).sum())


def _play(
    decide: Decide, parents: Sequence[int], target: Laws, drawn: Drawn, drafts: "list[_Draft]", asked: list[int | str]
) -> tuple[Branches, Verdict]:
    """Calls the rule with all drafts x coins x drawn tokens, for the chance that it will ask for."""
    vocab, tree = target[0].shape[1], fixed(tuple(parents))
    depth_R = tree.depth_bR[0]
    uses = [use for use in asked if isinstance(use, int)]
    outcomes = [*itertools.product(*[[False, True]] * len(uses), range(vocab) if "draw" in asked else [0])]
    coins = {use: torch.tensor([o[i] for o in outcomes]).repeat(len(drafts)) for i, use in enumerate(uses)}
    drawn_B = torch.tensor([o[-1] for o in outcomes]).repeat(len(drafts))

    def all_outcomes(values: Tensor) -> Tensor:
        return values.repeat_interleave(len(outcomes), 0)

    tokens_BN = all_outcomes(torch.tensor([draft.tokens for draft in drafts]))
    probs_BNV = all_outcomes(torch.tensor([draft.laws for draft in drafts], dtype=torch.float64))
    numbers_BP = all_outcomes(torch.tensor([draft.numbers for draft in drafts], dtype=torch.float64))
    prefix_BR = torch.zeros(len(tokens_BN), len(parents) + 1, dtype=torch.int64)
    for node, parent in enumerate(parents):
        prefix_BR[:, node + 1] = prefix_BR[:, parent + 1] * vocab + tokens_BN[:, node]
    target_BRV = torch.stack([target[int(depth)][prefix_BR[:, row]] for row, depth in enumerate(depth_R)], 1)
    keys = Branches(
        seeds_B=torch.zeros(len(tokens_BN), dtype=torch.int64),
        positions_BR=depth_R.expand(len(tokens_BN), -1),
        greedy=False,
        target_BRV=target_BRV,
        numbers_BR=numbers_BP[:, depth_R],
        coins=coins,
        drawn_B=drawn_B,
        weights_B=all_outcomes(torch.tensor([draft.weight for draft in drafts], dtype=torch.float64)),
        asked=[],
    )
    proposal = Proposal(tokens_BN, tree, drawn, probs_BNV if drawn == "sampled" else None)
    verdict = decide(proposal, target_BRV.log(), keys)

    # The rows are a path from the root, and the accepted tokens are theirs.
    assert bool((tree.up_bR[0][verdict.rows_BP[:, 1:]] == verdict.rows_BP[:, :-1]).logical_or(
        torch.arange(1, tree.depth + 1) > verdict.num_accepted_B[:, None]
    ).all())  # fmt: skip
    accepted_BP = torch.arange(tree.depth) < verdict.num_accepted_B[:, None]
    along_BP = torch.nn.functional.pad(tokens_BN, (1, 0)).gather(1, verdict.rows_BP[:, 1:])
    assert torch.equal(along_BP[accepted_BP], verdict.emitted_BP[:, :-1][accepted_BP])
    return keys, verdict


@dataclasses.dataclass
class _Draft:
    """One set of drafted tokens: its probability, tokens and laws per node, and a number per depth."""

    weight: float
    tokens: list[int]
    laws: list[list[float]]
    numbers: list[float]


def _drafts(
    parents: Sequence[int], target: Laws, draft: Laws, way: Way, with_numbers: bool, coupled: bool
) -> list[_Draft]:
    """All of them, grown depth by depth. Numbers split at every value at which a token of the target (or the draft) changes."""
    vocab, depth_R = target[0].shape[1], depths(parents)
    target_lists, draft_lists = [law.tolist() for law in target], [law.tolist() for law in draft]
    grown = [_Draft(1.0, [0] * len(parents), [[0.0] * vocab] * len(parents), [])]

    def prefix(tokens: list[int], node: int) -> int:
        return 0 if node < 0 else prefix(tokens, parents[node]) * vocab + tokens[node]

    for depth in range(max(depth_R) + 1):
        here = [node for node in range(-1, len(parents)) if depth_R[node + 1] == depth]
        split = []
        for old in grown:
            at = [prefix(old.tokens, node) for node in here]
            laws = [target_lists[depth][p] for p in at] + ([draft_lists[depth][p] for p in at] if coupled else [])
            for width, number in _intervals(laws) if with_numbers else [(1.0, 0.5)]:
                split.append(_Draft(old.weight * width, old.tokens, old.laws, [*old.numbers, number]))
        grown = split
        for parent in here:
            children = [node for node, above in enumerate(parents) if above == parent]
            if children:
                grown = [
                    _Draft(
                        old.weight * chance,
                        _put(old.tokens, children, tokens),
                        _put(old.laws, children, laws),
                        old.numbers,
                    )
                    for old in grown
                    for chance, tokens, laws in way(
                        draft_lists[depth][prefix(old.tokens, parent)], len(children), old.numbers[-1]
                    )
                ]
    return grown


def _intervals(laws: list[list[float]]) -> list[tuple[float, float]]:
    """Width and middle of the intervals between all cumulative values."""
    cuts = sorted({0.0, 1.0, *(min(value, 1.0) for law in laws for value in itertools.accumulate(law))})
    return [(high - low, (low + high) / 2) for low, high in itertools.pairwise(cuts) if high - low > 1e-14]


def _put(values: list, nodes: list[int], new: list) -> list:
    changed = list(values)
    for node, value in zip(nodes, new, strict=True):
        changed[node] = value
    return changed


# ---- ways of drafting ---------------------------------------------------------------------------------------------------


def top(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    """The most likely tokens; which are fixed by the context."""
    yield 1.0, sorted(range(len(law)), key=lambda token: -law[token])[:count], [[0.0] * len(law)] * count


def without_replacement(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    """Draws without replacement and their laws. Where no token with mass is left any other follows, with a law without mass."""
    grown: list[Siblings] = [(1.0, [], [])]
    for _ in range(count):
        split: list[Siblings] = []
        for chance, tokens, laws in grown:
            left = [0.0 if token in tokens else mass for token, mass in enumerate(law)]
            if total := sum(left):
                left = [mass / total for mass in left]
                split += [(chance * m, [*tokens, t], [*laws, left]) for t, m in enumerate(left) if m]
            else:
                other = next(token for token in range(len(law)) if token not in tokens)
                split.append((chance, [*tokens, other], [*laws, left]))
        grown = split
    yield from grown


def sharing_the_number(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    """The draft's own token for the target's number, and the tokens after it."""
    first = next(
        token for token, value in enumerate(itertools.accumulate(law)) if value > number or token == len(law) - 1
    )
    yield 1.0, [(first + rank) % len(law) for rank in range(count)], [[0.0] * len(law)] * count


WAYS: dict[Drawn, Way] = {"fixed": top, "sampled": without_replacement, "coupled": sharing_the_number}


# ---- laws ---------------------------------------------------------------------------------------------------------------


def random_laws(vocab: int, depth: int, seed: int, support: int | None = None) -> Laws:
    """Weights 1 to 9, normalised; all but `support` tokens, other ones behind every prefix, have no mass."""
    generator = torch.Generator().manual_seed(seed)
    laws = []
    for length in range(depth + 1):
        weights = torch.randint(1, 10, (vocab**length, vocab), generator=generator).double()
        if support is not None:
            order = torch.rand(vocab**length, vocab, generator=generator).argsort(1)
            weights = weights.masked_fill(order >= support, 0)
        laws.append(weights / weights.sum(1, keepdim=True))
    return laws


def opposite(laws: Laws) -> Laws:
    return [(1 / law) / (1 / law).sum(1, keepdim=True) for law in laws]


def pair(kind: str, vocab: int, depth: int, seed: int) -> tuple[Laws, Laws]:
    """Target and draft."""
    target, draft = random_laws(vocab, depth, 2 * seed), random_laws(vocab, depth, 2 * seed + 1)
    few = {n: (random_laws(vocab, depth, 2 * seed, n), random_laws(vocab, depth, 2 * seed + 1, n)) for n in (1, 2, 3)}
    return {
        "random": (target, draft),
        "draft tokens without mass": (target, few[2][1]),
        "target tokens without mass": (few[2][0], draft),
        "both": (few[2][0], few[2][1]),
        "equal": (target, target),
        "opposite": (target, opposite(target)),
        "one token drafted": (target, few[1][1]),
        "one token possible": (few[1][0], draft),
    }[kind]


KINDS = (
    "random", "draft tokens without mass", "target tokens without mass", "both", "equal", "opposite",
    "one token drafted", "one token possible",
)  # fmt: skip


def target_law(target: Laws) -> Tensor:
    mass = torch.ones(1, dtype=torch.float64)
    for law in target:
        mass = (mass[:, None] * law).flatten()
    return mass


def distance(law: Tensor, other: Tensor) -> float:
    """Total variation."""
    return float((law - other).abs().sum() / 2)


# ---- the rules ----------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "chain of 1": (4, chain(1).parents),
    "chain of 2": (4, chain(2).parents),
    "chain of 3": (4, chain(3).parents),
    "three siblings": (4, (-1, -1, -1)),
    "2 x 2": (3, (-1, -1, 0, 0, 1, 1)),
    "irregular": (3, (-1, 0, -1, 1, 0)),  # not depth by depth, siblings of different depths below
}


def cases(lossless: bool) -> list[tuple[str, Drawn, str]]:
    return [
        (name, drawn, shape)
        for name, rule in verify.RULES.items()
        for drawn in rule.drawn
        for shape in SHAPES
        if rule.lossless == lossless and (rule.trees or shape.startswith("chain"))
    ]


@pytest.mark.parametrize("rule, drawn, shape", cases(lossless=True))
def test_the_law_of_the_output_is_the_target_s(rule: str, drawn: Drawn, shape: str) -> None:
    vocab, parents = SHAPES[shape]
    for seed, kind in enumerate(KINDS):
        target, draft = pair(kind, vocab, max(depths(parents)), seed)
        law, _ = output_law(verify.RULES[rule].decide, parents, target, draft, drawn)
        torch.testing.assert_close(
            law, target_law(target), atol=1e-12, rtol=0, msg=lambda text, kind=kind: f"{kind}: {text}"
        )


@pytest.mark.parametrize("rule, drawn, shape", cases(lossless=False))
def test_a_rule_that_is_not_called_lossless_is_not(rule: str, drawn: Drawn, shape: str) -> None:
    vocab, parents = SHAPES[shape]
    found = []
    for seed in range(5):
        target, draft = pair("random", vocab, max(depths(parents)), seed)
        law, _ = output_law(verify.RULES[rule].decide, parents, target, draft, drawn)
        found.append(distance(law, target_law(target)))
    assert max(found) > 0.05


def test_every_rule_takes_some_proposal() -> None:
    assert {case[0] for lossless in (True, False) for case in cases(lossless)} == set(verify.RULES)


# ---- accepted tokens ----------------------------------------------------------------------------------------------------


def mean_accepted(rule: str, drawn: Drawn, parents: Sequence[int], target: Laws, draft: Laws) -> float:
    return output_law(verify.RULES[rule].decide, parents, target, draft, drawn)[1]


def test_one_sampled_token_is_accepted_with_the_overlap_of_the_laws() -> None:
    """Leviathan et al.: the sum of min(target, draft); of fixed siblings, their mass under the target."""
    for seed in range(10):
        target, draft = pair("random", 4, 1, seed)
        overlap = float(torch.minimum(target[0], draft[0]).sum())
        for rule in ("ratio", "block", "rrsw"):
            assert mean_accepted(rule, "sampled", (-1,), target, draft) == pytest.approx(overlap, abs=1e-12)
        mass = float(target[0][0, draft[0][0].argsort(descending=True, stable=True)[:2]].sum())
        for rule in ("coupled", "rrsw", "point_mass"):
            assert mean_accepted(rule, "fixed", (-1, -1), target, draft) == pytest.approx(mass, abs=1e-12)


def test_block_never_accepts_fewer_tokens_than_ratio() -> None:
    gains = []
    for seed in range(40):
        target, draft = pair("random", 3, 3, seed)
        block, ratio = (mean_accepted(rule, "sampled", (-1, 0, 1), target, draft) for rule in ("block", "ratio"))
        gains.append(block - ratio)
    assert min(gains) > -1e-12 and max(gains) > 0.1


def test_a_second_sibling_is_accepted_too() -> None:
    gains = []
    for seed in range(40):
        target, draft = pair("random", 3, 1, seed)
        two, one = (mean_accepted("rrsw", "sampled", parents, target, draft) for parents in ((-1, -1), (-1,)))
        gains.append(two - one)
    assert min(gains) > -1e-12 and sum(gains) / len(gains) > 0.05


# ---- wrong rules --------------------------------------------------------------------------------------------------------


def top_as_if_sampled(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    for chance, tokens, _ in top(law, count, number):
        yield chance, tokens, [law] * count


def without_replacement_unmodified(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    for chance, tokens, _ in without_replacement(law, count, number):
        yield chance, tokens, [law] * count


def independent(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    """With replacement: SpecInfer's siblings, which the ratio test takes one after the other without a bias."""
    for tokens in itertools.product(range(len(law)), repeat=count):
        chance = 1.0
        for token in tokens:
            chance *= law[token]
        yield chance, list(tokens), [law] * count


def independent_with_shrinking_laws(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    assert count == 2
    for chance, (first, second), _ in independent(law, count, number):
        rest = [0.0 if token == first else mass / (1 - law[first]) for token, mass in enumerate(law)]
        yield chance, [first, second], [law, rest]


def duplicates_dropped(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    """A law without mass takes a node out of the tree: it is never accepted and leaves nothing behind."""
    assert count == 2
    for chance, (first, second), _ in independent(law, count, number):
        yield chance, [first, second], [law, [0.0] * len(law) if first == second else law]


def likelier_of_two(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    assert count == 1
    for chance, tokens, _ in independent(law, 2, number):
        yield chance, [max(tokens, key=lambda token: law[token])], [law]


def unlikely_dropped(law: list[float], count: int, number: float) -> Iterator[Siblings]:
    assert count == 1
    for token, mass in enumerate(law):
        yield mass, [token], [law if mass >= 0.3 else [0.0] * len(law)]


def resampling_from_the_target(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "residual", lambda target_BV, draft_BV: target_BV)
        return verify.try_in_turn(proposal, log_probs_BRV, keys)


def shared_node_sampled_once_per_path(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
    """Medusa's rows: every path draws its own token at the root; if none matches, the first path's is emitted."""
    probs_BV, tokens_BN = log_probs_BRV[:, 0].exp(), proposal.tokens_BN
    first_B, second_B = (keys.accept(probs_BV.gather(1, tokens_BN[:, [i]])[:, 0], i) for i in (0, 1))
    end_B = torch.where(first_B, 1, torch.where(second_B, 2, 0))
    rest_BV = probs_BV.scatter(1, tokens_BN[:, :1], 0.0)
    law_BV = torch.where((end_B == 0)[:, None], rest_BV, log_probs_BRV.exp()[torch.arange(len(end_B)), end_B])
    return verify.verdict(proposal, end_B, keys.draw(law_BV))


WRONG: dict[str, tuple[Decide, Way, Sequence[int], float]] = {
    # rule, way of drafting, parents, and the distance that rational arithmetic finds over 200 pairs of laws of three tokens
    "the most likely siblings as if they were sampled": (verify.try_in_turn, top_as_if_sampled, (-1, -1), 0.64),
    "argmax draft, soft law": (verify.try_in_turn, top_as_if_sampled, (-1, 0, 1), 0.82),
    "no replacement, unmodified law": (verify.try_in_turn, without_replacement_unmodified, (-1, -1), 0.18),
    "replacement, shrinking law": (verify.try_in_turn, independent_with_shrinking_laws, (-1, -1), 0.23),
    "duplicates dropped": (verify.try_in_turn, duplicates_dropped, (-1, -1), 0.068),
    "sampled, then the likelier kept": (verify.try_in_turn, likelier_of_two, (-1,), 0.25),
    "sampled, then dropped if unlikely": (verify.try_in_turn, unlikely_dropped, (-1,), 0.27),
    "resampled from the target": (resampling_from_the_target, without_replacement, (-1,), 0.22),
    "a shared node sampled once per path": (shared_node_sampled_once_per_path, top, (-1, -1), 0.24),
}


def largest_distance(decide: Decide, way: Way, parents: Sequence[int], num_pairs: int = 60) -> float:
    drawn: Drawn = "fixed" if way is top else "sampled"
    found = 0.0
    for seed in range(num_pairs):
        target, draft = pair("random", 3, max(depths(parents)), seed)
        found = max(found, distance(output_law(decide, parents, target, draft, drawn, way)[0], target_law(target)))
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_known_wrong_rule_is_as_far_off_as_rational_arithmetic_says(name: str) -> None:
    """At least half of the listed distance, which is the largest of more pairs."""
    decide, way, parents, listed = WRONG[name]
    found = largest_distance(decide, way, parents)
    assert listed / 2 <= found < 1


def test_independent_siblings_are_no_wrong_rule() -> None:
    """So what the list above measures is what each entry changes."""
    assert largest_distance(verify.try_in_turn, independent, (-1, -1)) < 1e-12
