"""The multi-token-prediction module against its formulas, written out position by position and head by head in fp64."""

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import mtp, tree
from draftsmith.drafters.base import Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.losses import LossConfig
from draftsmith.drafters.unpack import one_per_row
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

OPTIONS: list[dict[str, Any]] = [
    {"order": order, "normed_state": normed, "norm_output": output}
    for order, normed, output in itertools.product(["state_first", "token_first"], [True, False], [True, False])
] + [{"own_head": True, "attention_bias": True, "draft_vocab_size": 40}, {"draft_vocab_size": None}]
IDS = [7, 3, 50, 21, 4, 33, 18, 60]


def make(toy: SimpleNamespace, **changes: Any) -> TrainableDrafter:
    """An fp64 drafter whose every weight, norms and biases included, is random."""
    drafter = toy.make_drafter("mtp", toy.make_target(num_hidden_layers=2), steps=4, **changes)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
            assert parameter.dtype == torch.float64, name
    return drafter


def make_batch(drafter: TrainableDrafter, sequences: list[list[int]]) -> TrainingBatch:
    rows = [Sequence(ids, [True] * len(ids)) for ids in sequences]
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, rows, drafter.feature_layers).batch(range(len(rows))))


def training_outputs(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, drafter: TrainableDrafter, sequences: list[list[int]]
) -> tuple[list[Tensor], Tensor]:
    """What training feeds to the head, one (B, T, D) per depth, and the target's features."""
    seen: list[Tensor] = []
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(mtp, "distill", lambda hidden, *a: seen.extend(hidden) or SimpleNamespace(parts=None))
        batch = make_batch(drafter, sequences)
        drafter(batch)
    return toy.grids_of(seen, mtp.trained_starts(batch, drafter.training_depth)), batch.features_BTF


class Formulas:
    """The module with plain vectors; `w` is its state dict, or the parameters where gradients are asked for."""

    def __init__(self, drafter: Any) -> None:
        self.w = {**drafter.state_dict(), **dict(drafter.named_parameters())}
        self.config, self.shape, self.embedding = drafter.config, drafter.shape, drafter.target._embedding.weight

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[name] * x / torch.sqrt((x * x).sum() / len(x) + self.shape.rms_norm_eps)

    def rope(self, x: Tensor, position: int) -> Tensor:
        half, out = len(x) // 2, []
        for i in range(len(x)):
            angle = position * self.shape.rope_theta ** (-2 * (i % half) / len(x))
            turned = -x[i + half] if i < half else x[i - half]
            out.append(x[i] * math.cos(angle) + turned * math.sin(angle))
        return torch.stack(out)

    def pair(self, token: int, state_D: Tensor, position: int) -> dict[str, Any]:
        """Residual, query, key and value heads of the pair (t_{p+1}, h_p)."""
        halves = [self.rms(state_D, "state_norm.weight"), self.rms(self.embedding[token], "token_norm.weight")]
        x = self.w["proj.weight"] @ torch.cat(halves if self.config.order == "state_first" else halves[::-1])
        u = self.rms(x, "block.input_layernorm.weight")
        heads = {}
        for n in "qkv":
            out = self.w[f"block.self_attn.{n}_proj.weight"] @ u
            if self.config.attention_bias:
                out = out + self.w[f"block.self_attn.{n}_proj.bias"]
            heads[n] = out.split(self.shape.head_dim)
        return {
            "residual": x,
            "q": [self.rope(head, position) for head in heads["q"]],
            "k": [self.rope(head, position) for head in heads["k"]],
            "v": heads["v"],
        }

    def block(self, seen: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """What the next depth reads, and what the head reads, of the last pair."""
        query, mixed = seen[-1], []
        for h in range(self.shape.num_heads):
            kv = h * self.shape.num_kv_heads // self.shape.num_heads
            scores = torch.stack([query["q"][h] @ pair["k"][kv] / math.sqrt(self.shape.head_dim) for pair in seen])
            shares = torch.exp(scores) / torch.exp(scores).sum()
            mixed.append(sum(share * pair["v"][kv] for share, pair in zip(shares, seen, strict=True)))
        a = query["residual"] + self.w["block.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.rms(a, "block.post_attention_layernorm.weight")
        gate, up = self.w["block.mlp.gate_proj.weight"] @ x, self.w["block.mlp.up_proj.weight"] @ x
        o = a + self.w["block.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        n = self.rms(o, "norm.weight")
        return (n if self.config.norm_output else o), n

    def reads(self, ids: list[int], features_TD: Tensor, start: int, depth: int) -> list[Tensor]:
        """What the head reads at depths 0 to depth of the draft that starts at `start`, the true tokens fed."""
        cached = [self.pair(ids[i + 1], features_TD[i], i) for i in range(start + 1)]
        state, n = self.block(cached)
        out = [n]
        for j in range(1, depth + 1):
            cached.append(self.pair(ids[start + 1 + j], state, start + j))
            state, n = self.block(cached)
            out.append(n)
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_forward_equals_the_formulas(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    drafter = make(toy, **options)
    outputs, features_BTF = training_outputs(toy, monkeypatch, drafter, [IDS, IDS[:5]])
    formulas = Formulas(drafter)
    with torch.no_grad():
        for row, ids in enumerate([IDS, IDS[:5]]):
            for start in range(len(ids) - 2):  # later ones have nothing to predict and are left out
                depth = min(3, len(ids) - 3 - start)  # nor have deeper ones
                for j, expected_D in enumerate(formulas.reads(ids, features_BTF[row], start, depth)):
                    # The rotary tables of the code are fp32: that is the difference that is left.
                    torch.testing.assert_close(outputs[j][row, start], expected_D, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS[1:10:4], ids=str)
def test_loss_and_gradients_are_those_of_the_formulas(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    """-Σ p log q with weights 0.6 ** j, summed over starts, depths and the draft vocabulary."""
    drafter: Any = make(toy, **options)
    ids = IDS[:6]
    batch = make_batch(drafter, [ids])
    parts = drafter(batch)
    parts.sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}

    drafter.zero_grad()
    formulas, kept_W = Formulas(drafter), drafter.token_ids_W
    laws_TV = drafter.target.unembed(batch.last_BTD[0]).softmax(-1).detach()
    total = torch.zeros((), dtype=torch.float64)
    for start in range(len(ids) - 2):
        depth = min(3, len(ids) - 3 - start)
        for j, read_D in enumerate(formulas.reads(ids, batch.features_BTF[0], start, depth)):
            logs_W = (drafter.head_weight() @ read_D).log_softmax(0)
            law_W = laws_TV[start + 1 + j] if kept_W is None else laws_TV[start + 1 + j][kept_W]
            total = total + 0.6**j * sum(-p * q for p, q in zip(law_W, logs_W, strict=True))
    total.backward()
    torch.testing.assert_close(parts.sum, total, rtol=1e-5, atol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafting_feeds_the_head_what_training_did(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    drafter: Any = make(toy, **options)
    generator = torch.Generator().manual_seed(6)
    sequences = torch.randint(3, toy.VOCAB, (2, 16), generator=generator)
    outputs, features_BTF = training_outputs(toy, monkeypatch, drafter, sequences.tolist())
    expected = [output @ drafter.head_weight().T for output in outputs]
    with torch.inference_mode():
        state, lengths, checked = drafter.init(2, 30), [0, 0], 0
        for counts in ([5, 2], [1, 4], [3, 1]):  # ragged, several rounds
            ids_BC = torch.randint(3, toy.VOCAB, (2, max(counts)), generator=generator)  # padding is garbage
            features_BCF = torch.randn(2, max(counts), toy.WIDTH, generator=generator, dtype=torch.float64)
            for row, count in enumerate(counts):
                chosen = slice(lengths[row], lengths[row] + count)
                ids_BC[row, :count], features_BCF[row, :count] = sequences[row, chosen], features_BTF[row, chosen]
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            next_B = torch.stack([sequences[row, length] for row, length in enumerate(lengths)])
            state = drafter.observe(state, ids_BC, features_BCF, next_B, counts)

            def true_tokens(depth: int, lengths: list[int] = lengths) -> Tensor:
                return torch.stack([sequences[row, length + 1 + depth] for row, length in enumerate(lengths)])

            watch = toy.Watch(true_tokens)
            drafter.propose(state, tree.chain(4), watch)
            for depth, logits_BW in enumerate(watch.seen):
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(logits_BW[row], expected[depth][row, length - 1], rtol=1e-9, atol=1e-9)
                    checked += 1
    assert checked == 3 * 4 * 2


def test_the_shared_head_is_the_targets_frozen_and_an_own_one_starts_there(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    shared, own = (toy.make_drafter("mtp", target, own_head=own, draft_vocab_size=40) for own in (False, True))
    assert "lm_head.weight" not in shared.state_dict() and not shared.head_weight().requires_grad
    for drafter in (shared, own):
        kept_W = drafter.token_ids_W
        torch.testing.assert_close(drafter.head_weight().detach(), target.head_weight()[kept_W], rtol=1e-6, atol=1e-6)
    assert own.lm_head.weight.requires_grad


SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


def test_defaults_are_those_of_fastmtp() -> None:
    config = mtp.Config()
    assert config.loss == LossConfig(decay=0.6) and config.steps == 3
    assert drafters.build("mtp", {}, SHAPE).feature_layers == ("last",)
    assert drafters.build("mtp", {"normed_state": False}, SHAPE).feature_layers == (8,)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "steps is 0; give 1 or more"),
        ({"order": "state"}, "'state' is not one of 'state_first', 'token_first'"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"norm_ouput": True}, "unknown key 'norm_ouput'; did you mean 'norm_output'?"),
        ({"loss": {"decay": 0.0}}, "decay is 0.0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("mtp", settings, SHAPE)
