"""EAGLE-1 against its numeric contract, written out position by position and head by head, loss and gradients included."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import eagle, tree
from draftsmith.drafters.base import Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.losses import summarise
from draftsmith.drafters.starts import trained_starts
from draftsmith.drafters.unpack import one_per_row
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

IDS = [7, 3, 50, 21, 4, 33, 18, 60]
SEQUENCES = [Sequence(IDS, [False, False, True, True, False, True, True, True]), Sequence(IDS[2:7], [True] * 5)]


def make(toy: SimpleNamespace, family: str = "llama", **changes: Any) -> TrainableDrafter:
    """An fp64 drafter whose every weight, the norm included, is random."""
    drafter = toy.make_drafter("eagle", toy.make_target(family), **changes)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if "layernorm" in name else 0.0))
            assert parameter.dtype == torch.float64, name
    return drafter


def make_batch(drafter: TrainableDrafter, sequences: list[Sequence], epoch: int = 0) -> TrainingBatch:
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, sequences, drafter.feature_layers).batch(range(len(sequences)), epoch))


class Contract:
    """The formulas of one layer with plain vectors; knows the weights by their engine names only."""

    def __init__(self, drafter: TrainableDrafter) -> None:
        self.w = {name: tensor.detach().clone() for name, tensor in drafter.named_parameters()}
        for tensor in self.w.values():
            tensor.requires_grad_(True)
        self.shape, self.target = drafter.shape, drafter.target
        ids_W = drafter.token_ids_W
        self.kept = list(range(self.shape.vocab_size)) if ids_W is None else ids_W.tolist()

    def rope(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = [position * self.shape.rope_theta ** (-2 * i / len(x)) for i in range(half)]
        first = [x[i] * math.cos(a) - x[i + half] * math.sin(a) for i, a in enumerate(angles)]
        second = [x[i + half] * math.cos(a) + x[i] * math.sin(a) for i, a in enumerate(angles)]
        return torch.stack(first + second)

    def pair(self, token: int, state_D: Tensor, position: int) -> dict[str, Any]:
        """x, query, key and value heads of the pair (t_{p+1}, f_p)."""
        x = self.w["fc.weight"] @ torch.cat([self.target._embedding.weight[token], state_D])
        x = x + self.w.get("fc.bias", 0)
        heads = {n: (self.w[f"layers.0.self_attn.{n}_proj.weight"] @ x).split(self.shape.head_dim) for n in "qkv"}
        q, k = ([self.rope(head, position) for head in heads[n]] for n in "qk")
        return {"x": x, "q": q, "k": k, "v": heads["v"]}

    def layer(self, query: dict[str, Any], seen: list[dict[str, Any]]) -> Tensor:
        mixed = []
        for h in range(self.shape.num_heads):
            kv = h * self.shape.num_kv_heads // self.shape.num_heads
            scores = torch.stack([query["q"][h] @ pair["k"][kv] / math.sqrt(self.shape.head_dim) for pair in seen])
            shares = torch.softmax(scores, 0)
            mixed.append(sum(share * pair["v"][kv] for share, pair in zip(shares, seen, strict=True)))
        a = query["x"] + self.w["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.w["layers.0.post_attention_layernorm.weight"] * a
        x = x / torch.sqrt((a * a).sum() / len(a) + self.shape.rms_norm_eps)
        gate, up = self.w["layers.0.mlp.gate_proj.weight"] @ x, self.w["layers.0.mlp.up_proj.weight"] @ x
        return a + self.w["layers.0.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def outputs(
        self, ids: list[int], features_TD: Tensor, start: int, depth: int, detach: bool = False
    ) -> list[Tensor]:
        """Outputs at depths 0 to depth of the draft that starts at `start`, with the true tokens fed."""
        cached = [self.pair(ids[i + 1], features_TD[i], i) for i in range(start + 1)]
        out = [self.layer(cached[-1], cached)]
        for j in range(1, depth + 1):
            state = out[-1].detach() if detach else out[-1]
            cached.append(self.pair(ids[start + 1 + j], state, start + j))
            out.append(self.layer(cached[-1], cached))
        return out

    def logits(self, output: Tensor) -> Tensor:
        """Of the kept tokens: the target's own arithmetic behind its head."""
        return self.target.unembed(output)[..., self.kept]

    def loss(self, batch: TrainingBatch, inputs_BTD: Tensor, config: eagle.Config) -> Tensor:
        """EAGLE's loss with HASS's steps and top-k term, one start and depth after the other."""
        total = torch.zeros((), dtype=torch.float64)
        for row, start in [(b, p) for b in range(len(batch.ids_BT)) for p in range(batch.ids_BT.shape[1] - 2)]:
            ids, mask_T, last_TD = batch.ids_BT[row].tolist(), batch.loss_mask_BT[row], batch.last_BTD[row]
            depth = min(config.steps, len(ids) - 2 - start)
            outputs = self.outputs(ids, inputs_BTD[row], start, depth - 1, config.detach)
            for j, output in enumerate(outputs):
                if not mask_T[start + 2 + j]:
                    continue
                truth_D = last_TD[start + 1 + j]
                gap_D = (output - truth_D).abs()
                regression = torch.where(gap_D < 1, gap_D**2 / 2, gap_D - 0.5).sum() / len(gap_D)
                target_W = torch.softmax(self.target.unembed(truth_D), -1)[self.kept]
                terms_W = -target_W * torch.log_softmax(self.logits(output), -1)
                best = sorted(range(len(self.kept)), key=lambda w: -float(target_W[w]))[: config.loss.top_k]  # noqa: B023
                soft = terms_W.sum() + config.loss.top_k_weight * terms_W[best].sum()
                weight = config.loss.decay**j
                total = total + weight * (config.regression_weight * regression + config.loss_weight * soft)
        return total


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE": ("llama", {}),
    "full vocabulary and bias": ("llama", {"draft_vocab_size": None, "fc_bias": True}),
    "soft-capped target": ("gemma2", {"steps": 2}),
    "noise": ("llama", {"noise": 0.1, "steps": 2}),
    "steps": ("llama", {"steps": 3, "loss": {"decay": 0.7}}),
    "HASS": ("llama", {"steps": 3, "detach": True, "loss": {"decay": 1.0, "top_k_weight": 10.0, "top_k": 5}}),
    "regression alone": ("llama", {"loss_weight": 0.0, "regression_weight": 0.3}),
    "soft labels alone": ("llama", {"loss_weight": 1.0, "regression_weight": 0.0, "steps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_written_contract(toy: SimpleNamespace, case: str) -> None:
    family, changes = CASES[case]
    drafter = make(toy, family, **changes)
    batch = make_batch(drafter, SEQUENCES)
    parts = drafter(batch)
    parts.sum.backward()
    contract = Contract(drafter)
    expected = contract.loss(batch, drafter.noisy(batch), drafter.config)
    expected.backward()
    # The rotary tables of the code are fp32: that is the difference that is left.
    torch.testing.assert_close(parts.sum, expected, rtol=1e-5, atol=1e-5)
    assert float(parts.count) == 5 + 3  # supervised tokens that have a start: the first two tokens have none
    for name, parameter in drafter.named_parameters():
        assert float(parameter.grad.abs().sum()) > 0, name
        torch.testing.assert_close(parameter.grad, contract.w[name].grad, rtol=1e-4, atol=1e-4, msg=name)


def test_detached_steps_give_the_same_loss_with_other_gradients(toy: SimpleNamespace) -> None:
    drafters_ = [make(toy, steps=3, detach=detach) for detach in (False, True)]
    batch = make_batch(drafters_[0], SEQUENCES)
    sums = [drafter(batch).sum for drafter in drafters_]
    assert torch.equal(*sums)
    for total in sums:
        total.backward()
    assert not torch.allclose(*(drafter.fc.weight.grad for drafter in drafters_))


@pytest.mark.parametrize("loss", [{"weights": "dpace"}, {"thin": 0.5, "decay": 0.9}], ids=str)
def test_the_regression_has_the_starts_and_weights_of_the_soft_labels(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, loss: dict[str, Any]
) -> None:
    """The weights that the loss behind the head was summed with, and the errors worked out one by one."""
    drafter = make(toy, steps=3, loss_weight=1.0, loss=loss)
    batch = make_batch(drafter, [Sequence(list(range(3, 40)), [True] * 37)])
    kept: dict[str, Any] = {}
    plain = eagle.distill

    def spy(*arguments: Any, **named: Any) -> Any:
        kept["distilled"] = plain(*arguments, **named)
        return kept["distilled"]

    monkeypatch.setattr(eagle, "distill", spy)
    drafter(batch)
    loss_JBT, weight_JBT = kept["distilled"].loss_JBT, kept["distilled"].weight_JBT
    assert torch.equal(weight_JBT > 0, trained_starts(batch, 3, drafter.config.loss.thin))
    torch.testing.assert_close((loss_JBT * weight_JBT).sum(), kept["distilled"].parts.sum.detach())
    outputs = [torch.zeros(int((weight_BT > 0).sum()), batch.last_BTD.shape[2]).double() for weight_BT in weight_JBT]
    error, error_J = eagle.regression(outputs, batch, weight_JBT > 0, weight_JBT)
    expected, expected_J = 0.0, [0.0] * 3
    for j, b, p in (weight_JBT > 0).nonzero().tolist():
        gaps = [abs(value) for value in batch.last_BTD[b, p + 1 + j].tolist()]
        one = sum(gap * gap / 2 if gap < 1 else gap - 0.5 for gap in gaps) / len(gaps)
        expected, expected_J[j] = expected + float(weight_JBT[j, b, p]) * one, expected_J[j] + one
    assert float(error) == pytest.approx(expected)
    assert error_J.tolist() == pytest.approx(expected_J)


def test_the_regression_is_reported_as_a_mean_per_depth(toy: SimpleNamespace) -> None:
    drafter = make(toy, steps=2)
    sums = drafter(make_batch(drafter, SEQUENCES)).metrics
    assert summarise(sums)["regression/1"] == pytest.approx(float(sums["regression"][1] / sums["supervised"][1]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("vocab", [None, 48])
def test_a_perfect_guess_of_the_state_has_exactly_the_targets_law(
    toy: SimpleNamespace, family: str, vocab: int | None
) -> None:
    drafter = make(toy, family, draft_vocab_size=vocab)
    state = torch.randn(3, toy.WIDTH, dtype=torch.float64)
    expected = drafter.target.unembed(state)[:, : vocab or toy.VOCAB]
    torch.testing.assert_close(drafter.draft_logits(state), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafting_feeds_the_head_what_training_did(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, family: str
) -> None:
    """The steps of training are a simulation of drafting; the two must agree for ragged rows and in every round."""
    drafter = make(toy, family, steps=4)
    generator = torch.Generator().manual_seed(6)
    sequences = torch.randint(3, toy.VOCAB, (3, 22), generator=generator)
    batch = make_batch(drafter, [Sequence(ids, [True] * len(ids)) for ids in sequences.tolist()])
    outputs: list[Tensor] = []
    plain = eagle.distill
    monkeypatch.setattr(eagle, "distill", lambda hidden, *a, **k: outputs.extend(hidden) or plain(hidden, *a, **k))
    with torch.no_grad():
        drafter(batch)
    outputs = toy.grids_of(outputs, trained_starts(batch, 4))
    expected_logits = [Contract(drafter).logits(output).detach() for output in outputs]

    with torch.inference_mode():
        state = drafter.init(3, 40)
        lengths, checked = [0, 0, 0], 0
        for counts in ([5, 1, 3], [2, 4, 1], [1, 1, 5], [3, 2, 1]):
            ids_BC = torch.randint(3, toy.VOCAB, (3, max(counts)), generator=generator)  # padding is garbage
            features_BCF = torch.randn(3, max(counts), toy.WIDTH, generator=generator, dtype=torch.float64)
            for row, count in enumerate(counts):
                chosen = slice(lengths[row], lengths[row] + count)
                ids_BC[row, :count] = sequences[row, chosen]
                features_BCF[row, :count] = batch.features_BTF[row, chosen]
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            next_B = torch.tensor([int(sequences[row, length]) for row, length in enumerate(lengths)])
            state = drafter.observe(state, ids_BC, features_BCF, next_B, counts)

            def true_tokens(depth: int, lengths: list[int] = lengths) -> Tensor:
                return torch.tensor([int(sequences[r, length + 1 + depth]) for r, length in enumerate(lengths)])

            watch = toy.Watch(true_tokens)
            drafter.propose(state, tree.chain(4), watch)
            for depth, logits_BW in enumerate(watch.seen):
                for row, length in enumerate(lengths):
                    expected_W = expected_logits[depth][row, length - 1]
                    torch.testing.assert_close(logits_BW[row], expected_W, rtol=1e-10, atol=1e-10)
                    checked += 1
    assert checked == 4 * 4 * 3


def test_noise_is_uniform_within_its_bounds_and_less_for_longer_sequences(toy: SimpleNamespace) -> None:
    drafter = make(toy, noise=0.1)
    sequences = [Sequence([3 + i % 50 for i in range(length)], [True] * length) for length in (200, 100, 20)]
    batch = make_batch(drafter, sequences)
    noise_BTD = drafter.noisy(batch) - batch.features_BTF
    for row, length in enumerate((200, 100, 20)):
        share = noise_BTD[row, :length] / (0.1 * 512 / length)
        assert float(share.abs().max()) <= 1
        # Of n uniform values in ±1: mean 0 ± 1/sqrt(3n), mean square 1/3 ± sqrt(4/45n); six standard errors, about 1e-9 each.
        n = share.numel()
        assert abs(float(share.mean())) < 6 / math.sqrt(3 * n)
        assert abs(float(share.square().mean()) - 1 / 3) < 6 * math.sqrt(4 / 45 / n)
    columns = noise_BTD[0, :199].T  # neither neighbouring elements nor neighbouring positions go together
    for pair in (columns[:2], noise_BTD[0, 10:12]):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 6 / math.sqrt(pair.shape[1])


def test_noise_depends_on_text_and_epoch_alone(toy: SimpleNamespace) -> None:
    """Not on padding, neighbours, or any state that resuming would have to restore."""
    drafter = make(toy, noise=0.1, steps=2)
    together = drafter.noisy(make_batch(drafter, SEQUENCES))
    torch.manual_seed(77)
    alone = [drafter.noisy(make_batch(drafter, [sequence])) for sequence in SEQUENCES]
    for row, (sequence, states_BTD) in enumerate(zip(SEQUENCES, alone, strict=True)):
        length = len(sequence.ids) - 1  # nothing is trained at the last position, whose next token is padding
        torch.testing.assert_close(together[row, :length], states_BTD[0, :length])
    later = drafter.noisy(make_batch(drafter, SEQUENCES, epoch=1))
    assert not torch.isclose(later[0], together[0]).any()
    loss = drafter(make_batch(drafter, SEQUENCES)).sum
    torch.testing.assert_close(loss, sum(drafter(make_batch(drafter, [sequence])).sum for sequence in SEQUENCES))
    assert not torch.isclose(loss, make(toy, steps=2)(make_batch(drafter, SEQUENCES)).sum)


def test_drafting_has_no_noise(toy: SimpleNamespace) -> None:
    seen = []
    for noise in (0.0, 0.5):
        drafter, watch = make(toy, noise=noise), toy.Watch()
        batch = make_batch(drafter, [Sequence(IDS, [True] * 8)])
        state = drafter.observe(drafter.init(1, 20), batch.ids_BT, batch.features_BTF, torch.tensor([5]), [8])
        drafter.propose(state, tree.chain(2), watch)
        seen.append(torch.cat(watch.seen))
    assert torch.equal(*seen)


def test_names_and_sizes_are_those_that_engines_load(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    width, inner, heads, kv_heads = toy.WIDTH, 64, 4 * 8, 2 * 8
    assert {name: tuple(tensor.shape) for name, tensor in drafter.named_parameters()} == {
        "fc.weight": (width, 2 * width),
        "layers.0.self_attn.q_proj.weight": (heads, width),
        "layers.0.self_attn.k_proj.weight": (kv_heads, width),
        "layers.0.self_attn.v_proj.weight": (kv_heads, width),
        "layers.0.self_attn.o_proj.weight": (width, heads),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    assert [name for name, _ in drafter.named_buffers()] == ["d2t"]  # neither head nor embedding is stored


def test_the_head_is_the_targets_own_and_stays_frozen(toy: SimpleNamespace) -> None:
    drafter = make(toy, draft_vocab_size=None)
    assert drafter.shared_head_WD.data_ptr() == drafter.target.head_weight().data_ptr()
    assert not drafter.shared_head_WD.requires_grad
    drafter(make_batch(drafter, SEQUENCES)).sum.backward()
    assert drafter.target.head_weight().grad is None and drafter.shared_head_WD.grad is None


def test_a_reduced_vocabulary_keeps_the_frequent_tokens_rows_of_the_head(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    drafter = drafters.build("eagle", {"draft_vocab_size": 4}, target.shape)
    counts_V = torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    drafter.initialise(target, counts_V)
    assert drafter.token_ids_W.tolist() == [2, 9, 12, 60] and drafter.d2t.tolist() == [2, 8, 10, 57]
    torch.testing.assert_close(drafter.shared_head_WD, target.head_weight()[[2, 9, 12, 60]])


SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "steps is 0; give 1 or more"),
        ({"detach": True}, "detach has no effect with steps: 1; give steps of 2 or more"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; give 1 or more"),
        ({"noise": -0.1}, "noise is -0.1; give 0 or more"),
        ({"loss_weight": -1.0}, "loss_weight is -1.0; give 0 or more"),
        ({"regression_weight": float("nan")}, "regression_weight is nan; give 0 or more"),
        ({"loss_weight": 0.0, "regression_weight": 0.0}, "are both 0, so nothing is trained"),
        ({"loss": {"top_k_weight": -1.0}}, "top_k_weight must not be negative"),
        ({"los_weight": 1.0}, "unknown key 'los_weight'; did you mean 'loss_weight'?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("eagle", settings, SHAPE)


def test_the_defaults_are_the_published_recipe() -> None:
    """EAGLE: one step, 1.0 and 0.1, noise of ±0.1."""
    config = dataclasses.asdict(eagle.Config())
    loss = config.pop("loss")
    assert config == {
        "draft_vocab_size": None, "steps": 1, "detach": False, "loss_weight": 0.1, "regression_weight": 1.0, "noise": 0.1,
        "fc_bias": False,
    }  # fmt: skip
    assert (loss["divergence"], loss["top_k_weight"]) == ("kl", 0.0)
