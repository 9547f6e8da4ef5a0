"""Chi-square through the real decode loop: the joint law of six sampled tokens is the target's under every rule, drafted as a
chain, a static tree or a dynamic tree, and the same test catches each known wrong rule.

A random Llama of six tokens; its exact law of the next six tokens is enumerated by asking it for all 6**5 prefixes. 6,000 rows
with the same prompt and seeds 0, 1, 2, … go through `generate` with a bigram draft model that is unlike the target, so that every
round rejects often; six tokens take at least two rounds and up to five.

Statistics of a run: the joint law of tokens 1-3 (216 cells), of tokens 4-6, and of tokens 3-4, which different rounds emit (36).
False alarm: each statistic fails a correct loop with chance 1e-9, and there are 48 of them: below 1e-7 in all. Seeds are
fixed, not tuned. Power: with chance 99.9 % a bias is found that moves 11 % of the mass evenly over 216 cells or 8 % over 36
(noncentral chi-square, normal approximation), and every wrong rule below is found with p < 1e-12. Smaller ones are for
test_enumeration.py, which is exact, and for scripts/chi_square.py, which takes minutes.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Pick, Picked, Proposal
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain
from draftsmith.inference import decode, noise, verify
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Round
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.verify import Keys, Verdict

VOCAB, LENGTH, ROWS = 6, 6, 6000
PROMPT = [1, 4, 2]
LIMIT = 1e-9
HOT = Sampler(1.0)


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Any:
    """fp32, one layer, uneven laws that depend on more than the last token."""
    return toy.make_target(
        "llama", torch.float32, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, initializer_range=0.25, seed=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def draft_logits() -> Tensor:
    torch.manual_seed(11)
    return 1.2 * torch.randn(VOCAB, VOCAB)


def exact_law(target: Any, sampler: Sampler) -> Tensor:
    """Joint law of the next six tokens, (6, 6, 6, 6, 6, 6)."""
    prefixes = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH - 1)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], 1)
    with torch.no_grad():
        logits = target.model(ids, use_cache=False).logits[:, len(PROMPT) - 1 :]
    steps = sampler.log_probs(logits.double()).exp()  # prefix, position, next token
    law = torch.ones(len(prefixes), dtype=torch.float64)
    for position in range(LENGTH - 1):
        law = law * steps[torch.arange(len(prefixes)), position, prefixes[:, position]]
    return (law[:, None] * steps[:, -1]).view([VOCAB] * LENGTH)


def sample(target: Any, sampler: Sampler, speculation: Speculation) -> tuple[Tensor, list[Round]]:
    outputs = generate(
        target,
        [PROMPT] * ROWS,
        max_new=LENGTH,
        sampler=sampler,
        speculation=speculation,
        seeds=range(ROWS),
        stop_at_eos=False,
    )
    return torch.tensor([o.ids for o in outputs]), [round_ for o in outputs for round_ in o.rounds]


def p_values(tools: SimpleNamespace, tokens: Tensor, law: Tensor) -> list[float]:
    values = []
    for places in ((0, 1, 2), (3, 4, 5), (2, 3)):
        cell = torch.zeros(len(tokens), dtype=torch.int64)
        for place in places:
            cell = cell * VOCAB + tokens[:, place]
        marginal = law.sum([i for i in range(LENGTH) if i not in places]).flatten()
        values.append(tools.chi_square_p_value(torch.bincount(cell, minlength=len(marginal)), marginal))
    return values


SAMPLERS = {"as it is": HOT, "top-k": Sampler(0.7, 4), "top-p": Sampler(1.3, None, 0.9)}
PLANS: dict[str, Plan] = {
    "chain": chain(3),
    "chain of 2": chain(2),
    "tree": Fixed((-1, -1, 0, 0, 1, 2)),
    "five siblings": Fixed((-1,) * 5),
    "dynamic tree": Dynamic(6, 3, 2),
}
RUNS = [
    ("ratio", "sample", "chain", "as it is"),
    ("ratio", "sample", "chain", "top-p"),
    ("ratio", "argmax", "chain of 2", "top-k"),
    ("block", "sample", "chain", "as it is"),
    ("block", "sample", "chain", "top-k"),
    ("rrsw", "sample", "tree", "as it is"),
    ("rrsw", "sample", "tree", "top-p"),
    ("rrsw", "sample", "five siblings", "top-k"),  # more than the tokens that pass
    ("point_mass", "argmax", "tree", "as it is"),
    ("point_mass", "argmax", "dynamic tree", "top-k"),
    ("coupled", "coupled", "chain", "top-p"),
    ("coupled", "coupled", "tree", "as it is"),
    ("coupled", "coupled", "dynamic tree", "top-k"),
    ("coupled", "sample", "tree", "top-p"),
]


@pytest.mark.parametrize("rule, way, plan, sampler", RUNS)
def test_the_joint_law_of_six_tokens_is_the_target_s(
    tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor,
    rule: str, way: str, plan: str, sampler: str,
) -> None:  # fmt: skip
    speculation = Speculation(stubs.Table(draft_logits), PLANS[plan], rule, way)
    tokens, rounds = sample(target, SAMPLERS[sampler], speculation)
    accepted = torch.bincount(torch.tensor([round_.accepted for round_ in rounds]), minlength=PLANS[plan].depth + 1)
    assert int(accepted.min()) > 30  # not vacuous: rejections at every place and full acceptance
    assert min(p_values(tools, tokens, exact_law(target, SAMPLERS[sampler]))) > LIMIT


def test_every_lossless_rule_went_through_the_loop() -> None:
    assert {run[0] for run in RUNS} == {name for name, rule in verify.RULES.items() if rule.lossless}


@pytest.mark.parametrize("rule, plan", [("ratio", "chain"), ("rrsw", "tree")])
def test_a_reduced_draft_vocabulary_leaves_the_law_alone(
    tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor, rule: str, plan: str
) -> None:
    kept = torch.tensor([0, 2, 3, 5])
    drafter = stubs.Table(draft_logits[:, kept], kept)
    tokens, _ = sample(target, HOT, Speculation(drafter, PLANS[plan], rule))
    assert min(p_values(tools, tokens, exact_law(target, HOT))) > LIMIT


# ---- wrong rules ----------------------------------------------------------------------------------------------------


def resample_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """With siblings: a rejected one is not taken out of the law."""
    monkeypatch.setattr(verify, "residual", lambda target_BV, draft_BV: target_BV)


def reversed_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.residual
    monkeypatch.setattr(verify, "residual", lambda target_BV, draft_BV: right(draft_BV, target_BV))


def argmax_draft_with_raw_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(logits_BMW: Tensor, picked: Picked) -> Picked:
        tokens_BMk = logits_BMW.topk(picked.tokens_BMk.shape[2]).indices
        return Picked(tokens_BMk, picked.scores_BMk, picked.probs_BMkV)

    replace_pick(monkeypatch, change)


def law_of_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(logits_BMW: Tensor, picked: Picked) -> Picked:
        probs_BMkV = (logits_BMW / 1.5).softmax(-1)[:, :, None].expand_as(picked.probs_BMkV)  # type: ignore[arg-type]
        return Picked(picked.tokens_BMk, picked.scores_BMk, probs_BMkV)

    replace_pick(monkeypatch, change)


def unmodified_law_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(logits_BMW: Tensor, picked: Picked) -> Picked:
        assert picked.probs_BMkV is not None
        return Picked(picked.tokens_BMk, picked.scores_BMk, picked.probs_BMkV[:, :, :1].expand_as(picked.probs_BMkV))

    replace_pick(monkeypatch, change)


def replace_pick(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Picked], Picked]) -> None:
    right = decode.make_pick

    class Changed:
        def __init__(self, pick: Pick) -> None:
            self.drawn, self._pick = pick.drawn, pick

        def __call__(self, logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
            return change(logits_BMW, self._pick(logits_BMW, depth, token_ids_W, count))

    monkeypatch.setattr(decode, "make_pick", lambda *args: Changed(right(*args)))


def draft_noise_reused_for_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "RESIDUAL", noise.DRAFT)


def lenient_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.accept_probability
    monkeypatch.setattr(verify, "accept_probability", lambda *args: (1.5 * right(*args)).clamp_max(1))


def one_coin_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Keys.accept
    monkeypatch.setattr(Keys, "accept", lambda self, probability_B, use: right(self, probability_B, 0))


def block_chance_is_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.block_step
    monkeypatch.setattr(verify, "block_step", lambda weight_B, *laws: (weight_B, right(weight_B, *laws)[1]))


def block_weight_without_its_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight_B: Tensor, token_B: Tensor, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        target_B, draft_B = (law_BV.gather(1, token_B[:, None])[:, 0] for law_BV in (target_BV, draft_BV))
        return weight_B * target_B / draft_B

    monkeypatch.setattr(verify, "block_weight", wrong)


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Verdict]) -> None:
    """`change` is called with the right function before what a rule is called with."""
    right = verify.RULES[name]
    wrong = verify.Rule(lambda *args: change(right.decide, *args), right.drawn, right.trees, right.lossless)
    monkeypatch.setitem(verify.RULES, name, wrong)


def sample_compare_and_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa's nucleus rule: the sample that was compared is thrown away at the end of the path."""

    def wrong(right: Callable[..., Verdict], proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
        verdict = right(proposal, log_probs_BRV, keys)
        again_BR = Keys(keys.seeds_B + 10**9, keys.positions_BR, keys.greedy).emit(log_probs_BRV)
        end_B1 = verdict.num_accepted_B[:, None]
        emitted_BP = verdict.emitted_BP.scatter(1, end_B1, again_BR.gather(1, verdict.rows_BP.gather(1, end_B1)))
        return Verdict(verdict.num_accepted_B, verdict.rows_BP, emitted_BP)

    replace_rule(monkeypatch, "coupled", wrong)


def the_same_noise_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the place in the block instead of the absolute position: each token's own law stays right."""

    def wrong(right: Callable[..., Verdict], proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
        relative = Keys(keys.seeds_B, keys.positions_BR - keys.positions_BR[:, :1], False)
        return right(proposal, log_probs_BRV, relative)

    replace_rule(monkeypatch, "coupled", wrong)


@pytest.mark.parametrize(
    "rule, plan, wrong",
    [
        ("ratio", "chain", resample_from_target),
        ("ratio", "chain", reversed_residual),
        ("ratio", "chain", argmax_draft_with_raw_law),
        ("ratio", "chain", law_of_another_temperature),
        ("ratio", "chain", draft_noise_reused_for_the_residual),
        ("ratio", "chain", lenient_acceptance),
        ("block", "chain", block_chance_is_the_weight),
        ("block", "chain", block_weight_without_its_ceiling),
        ("rrsw", "tree", unmodified_law_for_all_siblings),
        ("rrsw", "tree", one_coin_for_all_siblings),
        ("point_mass", "tree", resample_from_target),
        ("point_mass", "dynamic tree", one_coin_for_all_siblings),
        ("coupled", "dynamic tree", sample_compare_and_draw_again),
        ("coupled", "chain", the_same_noise_in_every_round),
    ],
)
def test_the_same_test_catches_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor,
    rule: str, plan: str, wrong: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    wrong(monkeypatch)
    tokens, _ = sample(target, HOT, Speculation(stubs.Table(draft_logits), PLANS[plan], rule))
    assert min(p_values(tools, tokens, exact_law(target, HOT))) < 1e-12  # and not just below the limit
