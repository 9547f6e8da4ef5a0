"""DFlash and DSpark against their formulas, written out start by start and head by head; where blocks are trained; what depends on
drafted tokens."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import anchors, attention, dflash, tree
from draftsmith.drafters.base import Picked, Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.starts import Starts, start_numbers, trained_starts
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.speculation import Speculation
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

PLAIN = {"markov_rank": 0, "confidence_weight": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": PLAIN,
    "dflash, own head": {**PLAIN, "own_head": True},
    "dspark": {"anchor_predicts": True},
    "dspark, own head": {"anchor_predicts": True, "own_head": True, "draft_vocab_size": None},
    "confidence alone": {**PLAIN, "confidence_weight": 0.5},
}
ROWS = [
    Sequence([7, 3, 50, 21, 4, 33, 18, 60], [False, False, False, True, True, True, False, True]),
    Sequence([5, 9, 40, 12, 7], [False, True, True, True, True]),
]
SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


def make(toy: SimpleNamespace, **changes: Any) -> TrainableDrafter:
    """An fp64 drafter whose every weight is random."""
    drafter = toy.make_drafter("dflash", toy.make_target(), **{"block_size": 4, **changes})
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return drafter


def make_batch(drafter: TrainableDrafter, rows: list[Sequence]) -> TrainingBatch:
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, rows, drafter.feature_layers).batch(range(len(rows))))


class Contract:
    """The formulas with plain vectors, from a drafter's weights by name; autograd flows to them."""

    def __init__(self, drafter: TrainableDrafter) -> None:
        self.w = {**dict(drafter.named_parameters()), **dict(drafter.named_buffers())}
        self.config, self.shape, self.target = drafter.config, drafter.shape, drafter.target
        ids = drafter.token_ids_W
        self.kept = list(range(drafter.shape.vocab_size)) if ids is None else ids.tolist()

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] * x / torch.sqrt((x * x).sum() / len(x) + self.shape.rms_norm_eps)

    def heads(self, x: Tensor, name: str, position: int | None) -> list[Tensor]:
        out = []
        for head in (self.w[f"{name}.weight"] @ x).split(self.shape.head_dim):
            half, turned = len(head) // 2, [None] * len(head)
            for i in range(half):
                angle = 0.0 if position is None else position * self.shape.rope_theta ** (-2 * i / len(head))
                turned[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)  # type: ignore[call-overload]
                turned[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)  # type: ignore[call-overload]
            out.append(torch.stack(turned))  # type: ignore[arg-type]
        return out

    def states(self, ids: list[int], features_TF: Tensor, start: int) -> list[Tensor]:
        """What predicts depth 0, 1, … of the block behind `start`."""
        context = [self.rms(self.w["fc.weight"] @ features_TF[q], "hidden_norm") for q in range(start + 1)]
        entries = [self.target._embedding.weight[ids[start + 1]].detach()]  # type: ignore[attr-defined]
        entries += [self.w["mask_embedding"]] * (self.config.block_size - 1)
        for number in range(self.config.num_layers):
            name = f"layers.{number}"
            normed = [self.rms(x, f"{name}.input_layernorm") for x in entries]
            seen = [*context, *normed]  # positions 0 to start, and start + 1 and on: no gap
            keys = [self.heads(x, f"{name}.self_attn.k_proj", q) for q, x in enumerate(seen)]
            values = [self.heads(x, f"{name}.self_attn.v_proj", None) for x in seen]
            after = []
            for i, x in enumerate(entries):
                queries, mixed = self.heads(normed[i], f"{name}.self_attn.q_proj", start + 1 + i), []
                for h, query in enumerate(queries):
                    kv = h * self.shape.num_kv_heads // self.shape.num_heads
                    scores = torch.stack([query @ key[kv] / math.sqrt(self.shape.head_dim) for key in keys])
                    shares = torch.exp(scores) / torch.exp(scores).sum()
                    mixed.append(sum(share * value[kv] for share, value in zip(shares, values, strict=True)))
                x = x + self.w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
                y = self.rms(x, f"{name}.post_attention_layernorm")
                gate = self.w[f"{name}.mlp.gate_proj.weight"] @ y
                up = self.w[f"{name}.mlp.up_proj.weight"] @ y
                after.append(x + self.w[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
            entries = after
        first = 0 if self.config.anchor_predicts else 1
        return [self.rms(x, "norm") for x in entries[first:]]

    def logits(self, state: Tensor, previous: int) -> Tensor:
        own = self.config.own_head
        head_WD = self.w["lm_head.weight"] if own else self.target.head_weight().detach()[self.kept]
        logits_W = head_WD @ state
        if self.config.markov_rank:
            row_r = self.w["lm_head_markov.previous.weight"][previous]
            logits_W = logits_W + self.w["lm_head_markov.next.weight"] @ row_r
        return logits_W

    def loss(self, batch: TrainingBatch, row: int, start: int) -> Tensor:
        """KL up to the target's entropy, and the confidence head's cross entropy, of one block."""
        total, ids = torch.zeros((), dtype=torch.float64), batch.ids_BT[row].tolist()
        for j, state in enumerate(self.states(ids, batch.features_BTF[row], start)):
            if start + 2 + j >= len(ids) or not batch.loss_mask_BT[row, start + 2 + j]:
                continue
            logits_W = self.logits(state, ids[start + 1 + j])
            draft_W = torch.exp(logits_W) / torch.exp(logits_W).sum()
            law_V = torch.exp(self.target.unembed(batch.last_BTD[row, start + 1 + j]))
            law_W = (law_V / law_V.sum()).detach()[self.kept]
            loss = -(law_W * draft_W.log()).sum()
            if self.config.confidence_weight:
                alpha = float(torch.minimum(law_W, draft_W.detach()).sum())
                score = self.w["confidence_head.weight"][0] @ state + self.w["confidence_head.bias"][0]
                sure = 1 / (1 + torch.exp(-score))
                wrong = -alpha * sure.log() - (1 - alpha) * (1 - sure).log()
                loss = loss + self.config.confidence_weight * wrong
            total = total + 0.7**j * loss
        return total


@pytest.mark.parametrize("anchor_predicts", [False, True])
def test_training_states_equal_the_written_contract_at_every_start(toy: SimpleNamespace, anchor_predicts: bool) -> None:
    drafter = make(toy, anchor_predicts=anchor_predicts)
    batch, contract = make_batch(drafter, ROWS), Contract(drafter)
    inside_BT = torch.zeros_like(batch.loss_mask_BT)
    for row, sequence in enumerate(ROWS):
        inside_BT[row, : len(sequence.ids) - 1] = True
    with torch.no_grad():
        starts = Starts.where(batch, inside_BT)
        states_nJD = drafter.train_blocks(batch, starts)
        for n, (row, start) in enumerate(inside_BT.nonzero().tolist()):
            expected = contract.states(ROWS[row].ids, batch.features_BTF[row], start)
            # The rotary tables of the code are fp32: that is the difference that is left.
            torch.testing.assert_close(states_nJD[n], torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_equal_those_of_the_written_contract(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    drafter = make(toy, loss={"decay": 0.7}, **options)
    batch, contract = make_batch(drafter, ROWS), Contract(drafter)
    parts = drafter(batch)
    parts.sum.backward()
    ours = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    starts = [(0, 1), (0, 2), (0, 3), (0, 5), (1, 0), (1, 1), (1, 2)]  # by hand: token start + 2 is supervised
    expected = torch.stack([contract.loss(batch, row, start) for row, start in starts]).sum()
    expected.backward()
    torch.testing.assert_close(parts.sum.detach(), expected.detach(), rtol=1e-6, atol=0)
    assert int(parts.count) == 4 + 3
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-6, name
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_drawn_anchor_stands_for_the_starts_that_were_not(toy: SimpleNamespace) -> None:
    drafter = make(toy, anchors=2, loss={"decay": 0.7})
    batch, contract = make_batch(drafter, ROWS), Contract(drafter)
    number_BT = start_numbers(batch)
    expected = torch.zeros((), dtype=torch.float64)
    for row, starts in enumerate([[1, 2, 3, 5], [0, 1, 2]]):
        drawn = sorted(starts, key=lambda start, row=row: float(number_BT[row, start]))[:2]
        expected += len(starts) / 2 * sum(contract.loss(batch, row, start) for start in drawn).detach()
    torch.testing.assert_close(drafter(batch).sum.detach(), expected, rtol=1e-6, atol=0)


def test_every_start_is_drawn_equally_often_and_epochs_differ() -> None:
    ids_BT = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    batch = TrainingBatch(ids_BT, mask_BT, *(ids_BT[..., :0],) * 4)
    weights = torch.stack(
        [anchors.anchor_weights(dataclasses.replace(batch, epoch=epoch), 3, 8) for epoch in range(1500)]
    )
    trained_JBT = trained_starts(batch, 3)
    assert ((weights > 0) <= trained_JBT).all() and ((weights[:, 0] > 0).sum((1, 2)) == 8).all()
    # A start is drawn with chance 8/38; five standard errors, 110 weights: a false alarm less than once in 10,000.
    error = math.sqrt((38 / 8 - 1) / 1500)
    torch.testing.assert_close(weights.mean(0), trained_JBT.double(), rtol=0, atol=5 * error)
    assert anchors.anchor_weights(batch, 3, 38).equal(trained_JBT.double())


@pytest.mark.parametrize("queries", [1, 9])
def test_how_blocks_are_grouped_for_attention_changes_nothing(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    drafter = make(toy)
    batch = make_batch(drafter, ROWS)
    with torch.no_grad():
        expected = drafter(batch).sum
        monkeypatch.setattr(attention, "QUERIES", queries)
        torch.testing.assert_close(drafter(batch).sum, expected, rtol=1e-12, atol=0)


def test_a_batch_without_supervised_tokens_has_no_loss(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    batch = make_batch(drafter, ROWS)
    parts = drafter(dataclasses.replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT), layout=None))
    parts.sum.backward()
    assert float(parts.sum.detach()) == 0 and float(parts.count) == 0
    assert not any(p.grad is not None and p.grad.isnan().any() for p in drafter.parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_drafting_feeds_the_head_what_training_did(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    """Ragged rows, every round, on the same tokens."""
    drafter = make(toy, block_size=5, **{**options, "confidence_weight": 0.0})
    depth = drafter.training_depth
    generator = torch.Generator().manual_seed(6)
    sequences = torch.randint(3, toy.VOCAB, (3, 22), generator=generator)
    batch = make_batch(drafter, [Sequence(ids, [True] * len(ids)) for ids in sequences.tolist()])
    expected: list[Tensor] = []
    monkeypatch.setattr(
        dflash,
        "distill",
        lambda hidden, heads, *a: expected.extend(h @ heads[0].T for h in hidden) or SimpleNamespace(parts=None),
    )
    with torch.inference_mode():
        drafter(batch)
        expected = toy.grids_of(expected, anchors.anchor_weights(batch, depth, drafter.config.anchors))
        state = drafter.init(3, 12)  # no room to spare: 11 tokens and a root
        lengths, checked = [0, 0, 0], 0
        for counts in ([5, 1, 3], [2, 4, 1], [1, 1, 5], [3, 2, 1]):
            ids_BC = torch.randint(3, toy.VOCAB, (3, max(counts)), generator=generator)  # padding is garbage
            features_BCF = torch.randn(3, max(counts), 3 * toy.WIDTH, generator=generator, dtype=torch.float64)
            for row, count in enumerate(counts):
                chosen = slice(lengths[row], lengths[row] + count)
                ids_BC[row, :count], features_BCF[row, :count] = sequences[row, chosen], batch.features_BTF[row, chosen]
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            next_B = torch.tensor([int(sequences[row, length]) for row, length in enumerate(lengths)])
            state = drafter.observe(state, ids_BC, features_BCF, next_B, counts)

            def true_tokens(depth: int, lengths: list[int] = lengths) -> Tensor:
                return torch.tensor([int(sequences[r, length + 1 + depth]) for r, length in enumerate(lengths)])

            for deep in (
                depth,
                2,
                depth,
            ):  # proposing leaves the state as it was, and a short chain is the long one's beginning
                watch = toy.Watch(true_tokens)
                drafter.propose(state, tree.chain(deep), watch)
                assert len(watch.seen) == deep
                for j, logits_BW in enumerate(watch.seen):
                    for row, length in enumerate(lengths):
                        torch.testing.assert_close(logits_BW[row], expected[j][row, length - 1], rtol=1e-10, atol=1e-10)
                        checked += 1
    assert checked == 4 * (2 * depth + 2) * 3


class Spread:
    """A `Pick` that keeps all logits and gives the children of every node other tokens."""

    drawn = "fixed"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
        self.seen.append(logits_BMW)
        shape = (len(logits_BMW), logits_BMW.shape[1], count)
        tokens_BMk = torch.arange(math.prod(shape)).reshape(shape) + 20 * depth
        return Picked(tokens_BMk, torch.zeros(shape), None)


@pytest.mark.parametrize("rank", [0, 4])
def test_only_the_markov_term_tells_the_nodes_of_a_depth_apart(toy: SimpleNamespace, rank: int) -> None:
    drafter = make(toy, anchor_predicts=True, markov_rank=rank)
    pick, roots_B = Spread(), torch.tensor([4, 5])
    with torch.inference_mode():
        features = torch.randn(2, 6, 3 * toy.WIDTH, dtype=torch.float64)
        state = drafter.observe(drafter.init(2, 20), torch.zeros(2, 6, dtype=torch.int64), features, roots_B, [6, 3])
        drafter.propose(state, tree.branching([3, 2, 1]), pick)
        base_BJW = drafter.draft_states(state) @ drafter.head_weight().T
    weights = drafter.state_dict()
    nodes_BM = [roots_B[:, None], torch.arange(6).reshape(2, 3), torch.arange(12).reshape(2, 6) + 20]
    assert [logits.shape[1] for logits in pick.seen] == ([1, 3, 6] if rank else [1, 1, 1])
    for depth, (logits_BMW, tokens_BM) in enumerate(zip(pick.seen, nodes_BM, strict=True)):
        for b in range(2):
            for m, token in enumerate(tokens_BM[b, : logits_BMW.shape[1]].tolist()):
                expected_W = base_BJW[b, depth]
                if rank:
                    row_r = weights["lm_head_markov.previous.weight"][token]
                    expected_W = expected_W + weights["lm_head_markov.next.weight"] @ row_r
                torch.testing.assert_close(logits_BMW[b, m], expected_W, rtol=1e-10, atol=1e-10)


def test_rows_that_leave_and_come_draft_as_they_did(toy: SimpleNamespace) -> None:
    drafter, watch = make(toy), toy.Watch()
    ids_BC, features = torch.randint(3, toy.VOCAB, (3, 6)), torch.randn(3, 6, 3 * toy.WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        state = drafter.observe(drafter.init(3, 20), ids_BC, features, torch.tensor([3, 4, 5]), [6, 2, 4])
        drafter.propose(state, tree.chain(3), watch)
        alone = drafter.observe(drafter.init(1, 20), ids_BC[1:2], features[1:2], torch.tensor([4]), [2])
        state = drafter.select(state, torch.tensor([0, 2]))
        drafter.propose(state, tree.chain(3), watch)
        drafter.propose(drafter.replace(state, torch.tensor([0]), alone), tree.chain(3), watch)
    for whole, two, mixed in zip(watch.seen[:3], watch.seen[3:6], watch.seen[6:], strict=True):
        torch.testing.assert_close(two, whole[[0, 2]], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixed, whole[[1, 2]], rtol=1e-12, atol=1e-12)


def test_confidence_is_the_sigmoid_of_a_linear_map_of_each_state(toy: SimpleNamespace) -> None:
    drafter = make(toy, confidence_weight=1.0)
    hidden_BJD = torch.randn(2, 3, toy.WIDTH, dtype=torch.float64)
    weights = drafter.state_dict()
    score_BJ = hidden_BJD @ weights["confidence_head.weight"][0] + weights["confidence_head.bias"]
    torch.testing.assert_close(drafter.confidence(hidden_BJD), 1 / (1 + torch.exp(-score_BJ)))


def test_at_the_start_heads_are_the_targets_rows_and_the_markov_term_is_nothing(toy: SimpleNamespace) -> None:
    counts_V = torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    target = toy.make_target()
    for own_head in (True, False):
        settings = {"layers": [1, 3], "draft_vocab_size": 4, "own_head": own_head, "markov_rank": 3}
        drafter = drafters.build("dflash", settings, target.shape)
        drafter.initialise(target, counts_V)
        drafter.to(torch.float64)
        assert drafter.token_ids_W.tolist() == [2, 9, 12, 60]
        torch.testing.assert_close(
            drafter.head_weight().detach(), target.head_weight()[[2, 9, 12, 60]].detach(), rtol=1e-6, atol=1e-6
        )
        assert ("lm_head.weight" in drafter.state_dict()) == own_head
        assert not drafter.lm_head_markov(torch.arange(toy.VOCAB)).any()
        assert drafter.lm_head_markov.previous.weight.any() and drafter.mask_embedding.any()


@pytest.mark.parametrize(
    "num_layers, expected",
    [
        (36, (2, 10, 18, 26, 34)),
        (32, (2, 9, 16, 23, 30)),
        (30, (2, 9, 15, 21, 28)),
        (6, (2, 3, 4)),
        (4, (2,)),
        (2, (2,)),
    ],
)
def test_default_layers_are_even_from_two_to_two_before_the_end(num_layers: int, expected: tuple[int, ...]) -> None:
    assert dflash.default_layers(num_layers) == expected


def test_it_drafts_what_a_block_predicts_and_no_deeper() -> None:
    for anchor_predicts, depth in ((False, 5), (True, 6)):
        drafter = dflash.Model(dflash.Config(block_size=6, anchor_predicts=anchor_predicts), SHAPE)
        assert drafter.max_depth == drafter.training_depth == depth
        Speculation(drafter, tree.chain(depth))
        with pytest.raises(ValueError, match=f"this drafter proposes at most {depth}"):
            Speculation(drafter, tree.chain(depth + 1))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_layers": 0}, "num_layers is 0 and anchors 512; give 1 or more of each"),
        ({"anchors": 0}, "anchors 0; give 1 or more"),
        ({"block_size": 1}, "block_size is 1, which predicts nothing; give 2 or more"),
        ({"block_size": 0, "anchor_predicts": True}, "block_size is 0, which predicts nothing; give 1 or more"),
        ({"markov_rank": -1}, "markov_rank is -1 and confidence_weight 0.0; give numbers above 0"),
        ({"confidence_weight": -0.5}, "confidence_weight -0.5"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; give 1 or more"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"layers": [3, 2]}, "layers is [3, 2]; give distinct layer ids in ascending order"),
        ({"layers": [1, 9]}, "the target has 8 layers: give ids from 1 to 8"),
        ({"layers": []}, "layers is []"),
        ({"loss": {"thin": 0.5}}, "loss.thin is 0.5; a block has all its depths: leave it out and lower `anchors`"),
        ({"loss": {"decay": 0.0}}, "decay is 0.0; give a value above 0, at most 1"),
        ({"anchor": 3}, "unknown key 'anchor'; did you mean 'anchors'?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("dflash", settings, SHAPE)
