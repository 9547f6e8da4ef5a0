"""Chi-square through the real decode loop: the joint law of six sampled tokens is the target's, under both rules, and the same test
catches each known wrong rule.

A random Llama of six tokens; its exact law of the next six tokens is enumerated by asking it for all 6**5 prefixes. 20,000 rows
with the same prompt and seeds 0, 1, 2, … go through `generate` with a bigram draft model that is unlike the target, so that every
round rejects often; six tokens take at least two rounds and up to five.

Statistics of a run: the joint law of tokens 1-3 (216 cells), of tokens 4-6, and of tokens 3-4, which different rounds emit (36).
False alarm: each statistic fails a correct loop with chance 1e-9, and there are 33 of them: below 1e-7 in all. Seeds are fixed,
not tuned. Power: with chance 99.9 % a bias is found that moves 6 % of the mass evenly over 216 cells or 4.5 % over 36 (noncentral
chi-square, normal approximation). Every wrong rule below fails all three statistics with p < 1e-12.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Pick, Proposal
from draftsmith.inference import decode, noise, verify
from draftsmith.inference.decode import Speculation, generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.verify import Keys, Verdict

VOCAB, LENGTH, ROWS = 6, 6, 20_000
PROMPT = [1, 4, 2]
LIMIT = 1e-9


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


def sample(target: Any, sampler: Sampler, speculation: Speculation) -> tuple[Tensor, list[tuple[int, int, int]]]:
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


SAMPLERS = [Sampler(1.0), Sampler(0.7, 4), Sampler(1.3, None, 0.9)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize(
    "rule, way, depth", [("ratio", "sample", 3), ("ratio", "argmax", 2), ("coupled", "coupled", 3)]
)
def test_the_joint_law_of_six_tokens_is_the_target_s(
    tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor,
    rule: str, way: str, depth: int, sampler: Sampler,
) -> None:  # fmt: skip
    drafter = stubs.Table(draft_logits)
    tokens, rounds = sample(target, sampler, Speculation(drafter, depth, rule, way))
    accepted = torch.bincount(torch.tensor([a for _, a, _ in rounds]), minlength=depth + 1)
    assert int(accepted.min()) > 500  # not vacuous: rejections at every place and full acceptance
    assert min(p_values(tools, tokens, exact_law(target, sampler))) > LIMIT


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_reduced_draft_vocabulary_leaves_the_law_alone(
    tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor, rule: str
) -> None:
    kept = torch.tensor([0, 2, 3, 5])
    drafter = stubs.Table(draft_logits[:, kept], kept)
    tokens, _ = sample(target, Sampler(1.0), Speculation(drafter, 3, rule))
    assert min(p_values(tools, tokens, exact_law(target, Sampler(1.0)))) > LIMIT


# ---- wrong rules --------------------------------------------------------------------------------------------------


def resample_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)


def reversed_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.residual

    def wrong(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        law = right(torch.cat([draft_probs, target_probs[:, -1:]], 1), target_probs[:, :-1])
        return torch.cat([law[:, :-1], target_probs[:, -1:]], 1)

    monkeypatch.setattr(verify, "residual", wrong)


def argmax_draft_with_raw_law(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pick(monkeypatch, lambda logits, tokens, probs: (logits.argmax(-1), probs))


def law_of_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pick(monkeypatch, lambda logits, tokens, probs: (tokens, (logits / 1.5).softmax(-1)))


def draft_noise_reused_for_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "RESIDUAL", noise.DRAFT)


def lenient_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.accept_probability
    monkeypatch.setattr(verify, "accept_probability", lambda *args: (1.5 * right(*args)).clamp_max(1))


def sample_compare_and_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa's nucleus rule: the sample that was compared is thrown away at the end of the path."""

    def wrong(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
        verdict = verify.coupled(proposal, log_probs_BRV, keys)
        again_BR = verify.emit(log_probs_BRV, Keys(keys.seeds_B + 10**9, keys.positions_BR, keys.greedy))
        end_B1 = verdict.num_accepted_B[:, None]
        emitted_BP = verdict.emitted_BP.scatter(1, end_B1, again_BR.gather(1, end_B1))
        return Verdict(verdict.num_accepted_B, verdict.rows_BP, emitted_BP)

    monkeypatch.setitem(verify.RULES, "coupled", wrong)


def the_same_noise_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the place in the block instead of the absolute position: each token's own law stays right."""
    right = verify.coupled

    def wrong(proposal: Proposal, log_probs_BRV: Tensor, keys: Keys) -> Verdict:
        return right(proposal, log_probs_BRV, Keys(keys.seeds_B, keys.positions_BR - keys.positions_BR[:, :1], False))

    monkeypatch.setitem(verify.RULES, "coupled", wrong)


def replace_pick(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    right = decode.make_pick

    def make(*args: Any) -> Pick:
        pick = right(*args)
        return lambda logits, depth, ids: change(logits, *pick(logits, depth, ids))

    monkeypatch.setattr(decode, "make_pick", make)


@pytest.mark.parametrize(
    "rule, wrong",
    [
        ("ratio", resample_from_target),
        ("ratio", reversed_residual),
        ("ratio", argmax_draft_with_raw_law),
        ("ratio", law_of_another_temperature),
        ("ratio", draft_noise_reused_for_the_residual),
        ("ratio", lenient_acceptance),
        ("coupled", sample_compare_and_draw_again),
        ("coupled", the_same_noise_in_every_round),
    ],
)
def test_the_same_test_catches_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, tools: SimpleNamespace, stubs: SimpleNamespace, target: Any, draft_logits: Tensor,
    rule: str, wrong: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    wrong(monkeypatch)
    tokens, _ = sample(target, Sampler(1.0), Speculation(stubs.Table(draft_logits), 3, rule))
    assert (
        max(p_values(tools, tokens, exact_law(target, Sampler(1.0)))) < 1e-12
    )  # all three, and not just below the limit
