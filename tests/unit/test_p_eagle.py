"""P-EAGLE against its numeric contract: every start written out as one causal list, position by position and head by head."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import p_eagle, tree
from draftsmith.drafters.base import Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

DEPTH = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 1},
    {"fc_norm": True},
    {"norm_before_residual": True},
    {"loss": {"thin": 0.6}},
]
SEQUENCES = [
    Sequence([7, 3, 50, 21, 4, 33, 18, 60, 9, 12, 41], [False] * 3 + [True] * 4 + [False] + [True] * 3),
    Sequence([11, 29, 5, 37, 8, 44], [False, False, True, True, True, True]),
    Sequence([2, 6], [True, True]),  # nothing to draft
]


def make(toy: SimpleNamespace, **changes: Any) -> TrainableDrafter:
    """An fp64 drafter whose every weight, norms included, is random."""
    settings = {"depth": DEPTH, "num_layers": 3, "loss": {"thin": 1.0}, **changes}
    drafter = toy.make_drafter("p_eagle", toy.make_target(), **settings)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
            assert parameter.dtype == torch.float64, name
    return drafter


def make_batch(drafter: TrainableDrafter, sequences: list[Sequence]) -> TrainingBatch:
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, sequences, drafter.feature_layers).batch(range(len(sequences))))


def training_hidden(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, drafter: TrainableDrafter, batch: TrainingBatch
) -> tuple[Tensor, ...]:
    """What training feeds to the draft head, one (B, T, D) per depth."""
    seen: list[Tensor] = []
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(p_eagle, "distill", lambda hidden, *a: seen.extend(hidden) or SimpleNamespace(parts=None))
        drafter(batch)
    return tuple(toy.grids_of(seen, p_eagle.trained_starts(batch, DEPTH, drafter.config.loss.thin)))


class Contract:
    """The formulas with plain vectors; differentiable in the drafter's own parameters."""

    def __init__(self, drafter: TrainableDrafter) -> None:
        self.w, self.config, self.shape = dict(drafter.named_parameters()), drafter.config, drafter.shape
        self.embedding = drafter.target._embedding.weight  # type: ignore[attr-defined]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] * x / torch.sqrt((x * x).sum() / len(x) + self.shape.rms_norm_eps)

    def rope(self, x: Tensor, position: int) -> Tensor:
        half, out = len(x) // 2, []
        angles = [position * self.shape.rope_theta ** (-2 * i / len(x)) for i in range(half)]
        out += [x[i] * math.cos(angles[i]) - x[i + half] * math.sin(angles[i]) for i in range(half)]
        out += [x[i + half] * math.cos(angles[i]) + x[i] * math.sin(angles[i]) for i in range(half)]
        return torch.stack(out)

    def fuse(self, features_F: Tensor) -> Tensor:
        chunks = list(features_F.split(self.shape.hidden_size))
        if self.config.fc_norm:
            chunks = [self.rms(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)]
        return self.w["fc.weight"] @ torch.cat(chunks)

    def layer(self, name: str, reads: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
        """A causal decoder layer over a list; entry i has position i."""
        width, out, keys, values = self.shape.head_dim, [], [], []
        for position, (u, residual) in enumerate(zip(reads, residuals, strict=True)):
            q, k, v = ((self.w[f"{name}.self_attn.{n}_proj.weight"] @ u).split(width) for n in "qkv")
            keys.append([self.rope(head, position) for head in k])
            values.append(v)
            mixed = []
            for h in range(self.shape.num_heads):
                kv = h * self.shape.num_kv_heads // self.shape.num_heads
                query = self.rope(q[h], position)
                scores = torch.stack([query @ key[kv] / math.sqrt(width) for key in keys])
                shares = torch.exp(scores) / torch.exp(scores).sum()
                mixed.append(sum(share * value[kv] for share, value in zip(shares, values, strict=True)))
            a = residual + self.w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
            x = self.rms(a, f"{name}.post_attention_layernorm")
            gate, up = self.w[f"{name}.mlp.gate_proj.weight"] @ x, self.w[f"{name}.mlp.up_proj.weight"] @ x
            out.append(a + self.w[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
        return out

    def hidden(self, ids: list[int], features_TF: Tensor, start: int, depth: int = DEPTH) -> list[Tensor]:
        """What the head reads at depths 0, 1, … of one start: `ids` go up to start + 1, then masks follow."""
        pairs = [(self.embedding[ids[i + 1]], self.fuse(features_TF[i])) for i in range(start + 1)]
        pairs += [(self.w["mask_embedding"], self.w["mask_state"])] * (depth - 1)
        normed = [self.rms(state, "midlayer.hidden_norm") for _, state in pairs]
        tokens = [self.rms(embedded, "midlayer.input_layernorm") for embedded, _ in pairs]
        joint = [torch.cat(both) for both in zip(tokens, normed, strict=True)]
        x = self.layer("midlayer", joint, normed if self.config.norm_before_residual else [s for _, s in pairs])
        for i in range(self.config.num_layers - 1):
            x = self.layer(f"layers.{i}", [self.rms(entry, f"layers.{i}.input_layernorm") for entry in x], x)
        return [self.rms(entry, "norm") for entry in x[start:]]


def trained(sequence: Sequence, start: int, depth: int) -> bool:
    """Whether the target generated token start + 2 + depth."""
    position = start + 2 + depth
    return position < len(sequence.ids) and sequence.loss_mask[position]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_forward_equals_the_written_contract(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    drafter = make(toy, **options)
    batch = make_batch(drafter, SEQUENCES)
    hidden, contract, checked = training_hidden(toy, monkeypatch, drafter, batch), Contract(drafter), 0
    share_JBT = p_eagle.trained_starts(batch, DEPTH, drafter.config.loss.thin)
    for row, sequence in enumerate(SEQUENCES):
        for start in range(len(sequence.ids) - 2):
            expected = contract.hidden(sequence.ids, batch.features_BTF[row], start)
            for j in range(DEPTH):
                if trained(sequence, start, j) and share_JBT[j, row, start]:
                    # The rotary tables of the code are fp32: that is the difference that is left.
                    torch.testing.assert_close(hidden[j][row, start], expected[j], rtol=1e-5, atol=1e-5)
                    checked += 1
    assert checked == int(share_JBT.sum()) > 15


@pytest.mark.parametrize("settings", [{}, {"loss": {"thin": 0.6, "decay": 0.5}}], ids=str)
def test_loss_and_gradients_equal_those_of_the_written_contract(toy: SimpleNamespace, settings: dict[str, Any]) -> None:
    """-Σ p log q over the draft vocabulary, weighted by decay ** j / thin ** j; every weight has a gradient."""
    drafter = make(toy, num_layers=2, fc_norm=True, **settings)
    batch, loss = make_batch(drafter, SEQUENCES), drafter.config.loss
    parts = drafter(batch)
    parts.sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}  # type: ignore[union-attr]

    drafter.zero_grad()
    contract, total = Contract(drafter), torch.zeros((), dtype=torch.float64)
    share_JBT = p_eagle.trained_starts(batch, DEPTH, loss.thin)
    for row, sequence in enumerate(SEQUENCES):
        for start in range(len(sequence.ids) - 2):
            depths = [j for j in range(DEPTH) if trained(sequence, start, j) and share_JBT[j, row, start]]
            hidden = contract.hidden(sequence.ids, batch.features_BTF[row], start) if depths else []
            for j in depths:
                law_V = drafter.target.unembed(batch.last_BTD[row, start + 1 + j]).detach().softmax(0)
                log_draft_W = (drafter.lm_head.weight @ hidden[j]).log_softmax(0)
                total = total - (law_V[drafter.token_ids_W] * log_draft_W).sum() * (loss.decay / loss.thin) ** j
    total.backward()
    torch.testing.assert_close(parts.sum, total.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in drafter.named_parameters():
        assert float(gradients[name].abs().max()) > 1e-4, name
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_thinning_changes_which_entries_run_but_nothing_at_those_that_do(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace
) -> None:
    drafter, thinned = make(toy), make(toy, loss={"thin": 0.5})
    batch = make_batch(drafter, [Sequence(list(range(3, 63)), [True] * 60), Sequence(list(range(10, 27)), [True] * 17)])
    full, thin = (training_hidden(toy, monkeypatch, model, batch) for model in (drafter, thinned))
    shares = []
    for ours, whole in zip(thin[1:], full[1:], strict=True):
        ran_BT = ours.abs().sum(-1) > 0
        shares.append(float(ran_BT.sum() / (whole.abs().sum(-1) > 0).sum()))
        torch.testing.assert_close(ours[ran_BT], whole[ran_BT], rtol=1e-12, atol=1e-12)
    assert 0.3 < shares[0] < 0.7 and 0.1 < shares[1] < 0.4 and 0 < shares[2] < 0.3
    torch.testing.assert_close(thin[0], full[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_drafting_feeds_the_head_what_training_did(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    """For ragged rows, in every round, and both as the contract says."""
    drafter = make(toy, **options)
    generator = torch.Generator().manual_seed(6)
    sequences = torch.randint(3, toy.VOCAB, (3, 22), generator=generator)
    batch = make_batch(drafter, [Sequence(ids, [True] * 22) for ids in sequences.tolist()])
    features_BTF, contract, checked = batch.features_BTF, Contract(drafter), 0
    trained_logits = [h @ drafter.lm_head.weight.T for h in training_hidden(toy, monkeypatch, drafter, batch)]

    with torch.inference_mode():
        state, lengths = drafter.init(3, 22), [0, 0, 0]
        for counts in ([5, 1, 3], [2, 4, 1], [1, 1, 5], [3, 2, 1]):
            ids_BC = torch.randint(3, toy.VOCAB, (3, max(counts)), generator=generator)  # padding is garbage
            features_BCF = torch.randn(3, max(counts), features_BTF.shape[-1], generator=generator, dtype=torch.float64)
            for row, count in enumerate(counts):
                chosen = slice(lengths[row], lengths[row] + count)
                ids_BC[row, :count], features_BCF[row, :count] = sequences[row, chosen], features_BTF[row, chosen]
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            next_B = torch.tensor([int(sequences[row, length]) for row, length in enumerate(lengths)])
            state = drafter.observe(state, ids_BC, features_BCF, next_B, counts)
            for plan in (tree.chain(DEPTH), tree.chain(2)):  # proposing leaves the state as it was
                watch = toy.Watch()
                drafter.propose(state, plan, watch)
                assert len(watch.seen) == plan.depth
                for depth, logits_BW in enumerate(watch.seen):
                    for row, length in enumerate(lengths):
                        expected_W = trained_logits[depth][row, length - 1]
                        torch.testing.assert_close(logits_BW[row], expected_W, rtol=1e-10, atol=1e-10)
                        checked += 1
        for row, length in enumerate(lengths):
            hidden = contract.hidden(sequences[row].tolist(), features_BTF[row], length - 1)
            torch.testing.assert_close(state.hidden_BKD[row], torch.stack(hidden), rtol=1e-5, atol=1e-5)
    assert checked == 4 * (DEPTH + 2) * 3


@pytest.mark.parametrize("plan", [tree.chain(2), tree.Dynamic(6, 3, 2)], ids=str)
def test_after_every_round_the_caches_hold_committed_tokens_as_a_fresh_observation_does(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, plan: tree.Plan
) -> None:
    """Keys of mask entries are overwritten, never committed; the fresh observation has room for the committed tokens alone."""
    drafter = make(toy)
    target: Any = drafter.target
    plain_observe, select, audits = drafter.observe, drafter.select, 0
    prompts = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [21, 22]]
    texts: list[list[int]] = [[] for _ in prompts]

    def observe(state: Any, ids_BC: Tensor, features: Tensor, next_B: Tensor, counts: list[int]) -> Any:
        nonlocal audits
        state = plain_observe(state, ids_BC, features, next_B, counts)
        for row, count in enumerate(counts):
            if count == 0:  # done, and waiting for its neighbours: nothing was observed
                continue
            texts[row] += ids_BC[row, :count].tolist()
            ids, length = torch.tensor([texts[row]]), len(texts[row])
            features_1TF, _ = target.hidden(ids, drafter.feature_layers)
            fresh = plain_observe(drafter.init(1, length), ids, features_1TF, next_B[row : row + 1], [length])
            assert state.lengths[row] == length
            for ours, expected in zip(state.caches, fresh.caches, strict=True):
                for name in ("keys_BHSE", "values_BHSE"):
                    held = getattr(ours, name)[row, :, :length]
                    torch.testing.assert_close(held, getattr(expected, name)[0, :, :length], atol=1e-10, rtol=0)
            torch.testing.assert_close(state.hidden_BKD[row], fresh.hidden_BKD[0], atol=1e-10, rtol=0)
            audits += 1
        return state

    def chosen(state: Any, rows_B: Tensor) -> Any:
        texts[:] = [texts[row] for row in rows_B.tolist()]
        return select(state, rows_B)

    monkeypatch.setattr(drafter, "observe", observe)
    monkeypatch.setattr(drafter, "select", chosen)
    speculation = Speculation(drafter, plan)
    generate(target, prompts, max_new=9, sampler=Sampler(1.5), speculation=speculation, stop_at_eos=False)
    assert audits > 16


def test_memory_per_token_is_that_of_the_caches(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    state = drafter.init(1, 10)
    held = sum(cache.keys_BHSE.nbytes + cache.values_BHSE.nbytes for cache in state.caches)
    assert drafter.bytes_per_token == held / (10 + DEPTH - 1)


def test_rows_can_be_dropped_and_replaced(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    ids_BC, next_B = torch.randint(3, toy.VOCAB, (3, 6)), torch.tensor([3, 4, 5])
    features = torch.randn(3, 6, drafter.fc.in_features, dtype=torch.float64)
    with torch.inference_mode():
        whole = drafter.observe(drafter.init(3, 20), ids_BC, features, next_B, [6, 2, 4])
        expected = whole.hidden_BKD.clone()
        kept = drafter.select(whole, torch.tensor([2, 0]))
        torch.testing.assert_close(kept.hidden_BKD, expected[[2, 0]], rtol=0, atol=0)
        other = drafter.observe(drafter.init(1, 20), ids_BC[1:2], features[1:2], next_B[1:2], [2])
        mixed = drafter.replace(kept, torch.tensor([0]), other)
        assert mixed.lengths == [2, 6]
        torch.testing.assert_close(mixed.hidden_BKD, expected[[1, 0]], rtol=1e-12, atol=1e-12)
        more = drafter.observe(mixed, ids_BC[:2], features[:2], next_B[:2], [1, 3])
        alone = drafter.observe(other, ids_BC[:1], features[:1], next_B[:1], [1])
        torch.testing.assert_close(more.hidden_BKD[0], alone.hidden_BKD[0], rtol=1e-12, atol=1e-12)


def test_it_starts_from_the_target_with_masks_that_are_not_zero(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    counts_V = torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    drafter = drafters.build("p_eagle", {"layers": [1, 2, 3], "draft_vocab_size": 4}, target.shape)
    drafter.initialise(target, counts_V)
    assert drafter.token_ids_W.tolist() == [2, 9, 12, 60]  # by hand: 33 is the rarest of the five
    torch.testing.assert_close(drafter.lm_head.weight.data, target.head_weight()[[2, 9, 12, 60]].float())
    for vector in (drafter.mask_embedding, drafter.mask_state):
        assert 0.01 < float(vector.detach().std()) < 0.04
    random = toy.make_drafter("p_eagle", target, initialise_head="random", draft_vocab_size=None)
    assert float(random.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert random.token_ids_W is None


def test_the_loss_is_thinned_as_in_the_paper_unless_another_one_is_given() -> None:
    assert p_eagle.Config().loss.thin == 0.7
    assert drafters.build("p_eagle", {"loss": {"decay": 0.9}}, SHAPE).config.loss.thin == 1.0


def test_it_drafts_as_deep_as_it_was_built_and_no_deeper() -> None:
    drafter = drafters.build("p_eagle", {"depth": 3}, SHAPE)
    assert drafter.max_depth == drafter.training_depth == 3
    Speculation(drafter, tree.chain(3))
    with pytest.raises(ValueError, match=re.escape("draft depth K is 4; this drafter proposes at most 3")):
        Speculation(drafter, tree.chain(4))


SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"depth": 1}, "depth is 1; give 2 or more (one token at a time: eagle3)"),
        ({"num_layers": 0}, "num_layers is 0; give 1 or more"),
        ({"loss": {"thin": 0.0}}, "thin is 0.0; give a value above 0, at most 1"),
        ({"layers": [3, 2]}, "layers is [3, 2]; give distinct layer ids in ascending order"),
        ({"layers": [1, 9]}, "the target has 8 layers: give ids from 1 to 8"),
        ({"layers": []}, "layers is []"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; give 1 or more, or leave it out"),
        ({"initialise_head": "zero"}, "'zero' is not one of"),
        ({"dept": 3}, "unknown key 'dept'; did you mean 'depth'?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("p_eagle", settings, SHAPE)
