"""Medusa against its numeric contract: residual blocks, one head per depth, and where they start."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import medusa, tree
from draftsmith.drafters.base import Shape, TrainableDrafter
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.speculation import Speculation
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

HEADS = [{"own_head": own, "draft_vocab_size": vocab} for own in (True, False) for vocab in (None, 48)]
SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


def make(toy: SimpleNamespace, *, random: bool, **changes: Any) -> TrainableDrafter:
    drafter = toy.make_drafter("medusa", toy.make_target(), **changes)
    if random:
        torch.manual_seed(4)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


def drafted_logits(
    toy: SimpleNamespace, drafter: TrainableDrafter, last_BTD: Tensor, counts: list[int]
) -> list[Tensor]:
    """The logits of every head after one observation."""
    watch = toy.Watch()
    with torch.inference_mode():
        state = drafter.init(len(last_BTD), 40)
        state = drafter.observe(state, torch.zeros(last_BTD.shape[:2], dtype=torch.int64), last_BTD, counts[0], counts)  # type: ignore[arg-type]
        drafter.propose(state, tree.chain(drafter.config.num_heads), watch)
    return watch.seen


@pytest.mark.parametrize("settings", HEADS, ids=str)
def test_without_batches_every_head_starts_as_the_targets_own(toy: SimpleNamespace, settings: dict[str, Any]) -> None:
    drafter = make(toy, random=False, num_layers=2, **settings)
    last_BTD = torch.randn(2, 4, toy.WIDTH, dtype=torch.float64)
    target_logits_BV = drafter.target.unembed(last_BTD[torch.arange(2), torch.tensor([1, 3])])
    kept = range(settings["draft_vocab_size"] or toy.VOCAB)  # all tokens are equally frequent: the lowest ids are kept
    for logits_BW in drafted_logits(toy, drafter, last_BTD, [2, 4]):
        # Own heads are copies in fp32, the drafter's type at the start.
        torch.testing.assert_close(logits_BW, target_logits_BV[:, kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", HEADS, ids=str)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_training_and_drafting_equal_the_written_contract(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, settings: dict[str, Any], num_layers: int
) -> None:
    """z ← z + SiLU(W z + b) block after block, then the head: for each k, from the hidden state of the same position."""
    drafter = make(toy, random=True, num_layers=num_layers, num_heads=3, **settings)
    rows = [Sequence([5, 9, 3, 14, 8, 33], [True] * 6), Sequence([5, 9, 40], [True] * 3)]
    target: Any = drafter.target
    batch = one_per_row(FeatureStore(target, rows, ("last",)).batch([0, 1]))
    seen: dict[str, list[Tensor]] = {}
    monkeypatch.setattr(
        medusa,
        "distill",
        lambda hidden, heads, *a: seen.update(hidden=hidden, heads=heads) or SimpleNamespace(parts=None),
    )
    with torch.no_grad():
        drafter(batch)
    seen["hidden"] = toy.grids_of(seen["hidden"], medusa.trained_starts(batch, drafter.training_depth))
    weights = drafter.state_dict()
    drafted = drafted_logits(toy, drafter, batch.last_BTD, [6, 3])
    for k in range(3):
        for row, position in [(0, 0), (0, 3), (0, 5), (1, 0), (1, 2)]:
            z = batch.last_BTD[row, position]
            for i in range(num_layers):
                x = weights[f"blocks.{k}.{i}.linear.weight"] @ z + weights[f"blocks.{k}.{i}.linear.bias"]
                z = z + x / (1 + torch.exp(-x))
            if position + 2 + k < len(rows[row].ids):  # training leaves out starts that have nothing to predict
                torch.testing.assert_close(seen["hidden"][k][row, position], z, rtol=1e-12, atol=1e-12)
            if position == len(rows[row].ids) - 1:  # drafting starts from the newest position
                head_WD = (
                    weights[f"lm_heads.{k}.weight"]
                    if settings["own_head"]
                    else target.head_weight()[: drafted[k].shape[1]]
                )
                torch.testing.assert_close(drafted[k][row], head_WD @ z, rtol=1e-12, atol=1e-12)
    if settings["own_head"]:
        assert [id(head) for head in seen["heads"]] == [id(linear.weight) for linear in drafter.lm_heads]
    else:
        assert len(seen["heads"]) == 1 and not seen["heads"][0].requires_grad


@pytest.mark.parametrize("settings", HEADS, ids=str)
def test_loss_and_gradients_are_those_of_the_written_contract(toy: SimpleNamespace, settings: dict[str, Any]) -> None:
    """-Σ p log q with weights 0.8 ** k, summed over positions, heads and the draft vocabulary."""
    drafter: Any = make(toy, random=True, num_layers=2, num_heads=3, **settings)
    ids = [5, 9, 3, 14, 8, 33]
    batch = one_per_row(FeatureStore(drafter.target, [Sequence(ids, [True] * 6)], ("last",)).batch([0]))
    parts = drafter(batch)
    parts.sum.backward()
    weights = dict(drafter.named_parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in weights.items()}

    drafter.zero_grad()
    kept = slice(None) if drafter.token_ids_W is None else drafter.token_ids_W
    laws_TV = drafter.target.unembed(batch.last_BTD[0]).softmax(-1).detach()
    total = torch.zeros((), dtype=torch.float64)
    for k in range(3):
        for position in range(len(ids) - 2 - k):
            z = batch.last_BTD[0, position]
            for i in range(2):
                x = weights[f"blocks.{k}.{i}.linear.weight"] @ z + weights[f"blocks.{k}.{i}.linear.bias"]
                z = z + x / (1 + torch.exp(-x))
            head_WD = weights[f"lm_heads.{k}.weight"] if settings["own_head"] else drafter.target.head_weight()[kept]
            total = total - 0.8**k * laws_TV[position + 1 + k][kept] @ (head_WD @ z).log_softmax(0)
    total.backward()
    torch.testing.assert_close(parts.sum, total, rtol=1e-9, atol=1e-9)
    for name, parameter in weights.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-9, msg=name)


def test_a_reduced_vocabulary_keeps_the_frequent_tokens_rows_of_the_head(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    counts_V = torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    for own_head in (True, False):
        drafter = drafters.build("medusa", {"num_heads": 2, "draft_vocab_size": 4, "own_head": own_head}, target.shape)
        drafter.initialise(target, counts_V)
        drafter.to(torch.float64)
        assert drafter.token_ids_W.tolist() == [2, 9, 12, 60]
        last_BTD = torch.randn(1, 1, toy.WIDTH, dtype=torch.float64)
        expected_BW = target.unembed(last_BTD[:, 0])[:, [2, 9, 12, 60]]
        for logits_BW in drafted_logits(toy, drafter, last_BTD, [1]):
            torch.testing.assert_close(logits_BW, expected_BW)


def test_no_two_heads_share_a_module_or_a_weight() -> None:
    drafter = medusa.Model(medusa.Config(num_heads=4, num_layers=3), SHAPE)
    blocks = [block for head in drafter.blocks for block in head]
    assert len(blocks) == 12 and len({id(block) for block in blocks}) == 12
    weights = [p.data_ptr() for p in drafter.parameters()]
    assert len(weights) == 12 * 2 + 4 and len(set(weights)) == len(weights)


def test_a_shared_head_is_not_the_drafters_own_weight(toy: SimpleNamespace) -> None:
    drafter = make(toy, random=False, own_head=False, draft_vocab_size=None)
    assert not [name for name in drafter.state_dict() if "head" in name]
    target_weight = drafter.target.head_weight()
    assert target_weight.data_ptr() not in {p.data_ptr() for p in drafter.parameters()}
    drafter.to(torch.float32)
    assert target_weight.dtype == torch.float64  # converting the drafter leaves the target alone


def test_it_drafts_as_deep_as_it_has_heads_and_no_deeper() -> None:
    drafter = medusa.Model(medusa.Config(num_heads=3), SHAPE)
    assert drafter.max_depth == drafter.training_depth == 3
    Speculation(drafter, tree.chain(3))
    with pytest.raises(ValueError, match=re.escape("draft depth K is 4; this drafter proposes at most 3")):
        Speculation(drafter, tree.chain(4))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_heads": 0}, "num_heads is 0 and num_layers 1; give 1 or more of each"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"loss": {"decay": 0.0}}, "decay is 0.0; give a value above 0, at most 1"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"num_head": 2}, "unknown key 'num_head'; did you mean 'num_heads'?"),
        ({"num_heads": 2.5}, "num_heads: expected int, got 2.5"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("medusa", settings, SHAPE)
