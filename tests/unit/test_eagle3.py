"""EAGLE-3 against its numeric contract, written out position by position and head by head (formats of the serving engines)."""

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import eagle3, tree
from draftsmith.drafters.base import Shape, TrainableDrafter
from draftsmith.drafters.unpack import one_per_row
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

NAMES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
OPTIONS = [
    {name: True for name, value in zip(NAMES, values, strict=True) if value}
    for values in itertools.product([False, True], repeat=4)
    if not (values[0] and values[1])  # these two exclude each other
]
IDS = [7, 3, 50, 21, 4, 33, 18, 60]


def make(toy: SimpleNamespace, **changes: Any) -> TrainableDrafter:
    """An fp64 drafter whose every weight, norms included, is random."""
    drafter = toy.make_drafter("eagle3", toy.make_target(), steps=4, **changes)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
            assert parameter.dtype == torch.float64, name
    return drafter


def training_outputs(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, drafter: TrainableDrafter, sequences: list[list[int]]
) -> tuple[list[Tensor], Tensor]:
    """What training feeds to the draft head, one (B, T, D) per depth, and the target's features."""
    seen: list[Tensor] = []
    monkeypatch.setattr(eagle3, "distill", lambda hidden, *a: seen.extend(hidden) or SimpleNamespace(parts=None))
    rows = [Sequence(ids, [True] * len(ids)) for ids in sequences]
    target: Any = drafter.target
    batch = one_per_row(FeatureStore(target, rows, drafter.feature_layers).batch(range(len(rows))))
    with torch.no_grad():
        drafter(batch)
    trained_JBT = eagle3.trained_starts(batch, drafter.training_depth, drafter.config.loss.thin)
    return toy.grids_of(seen, trained_JBT), batch.features_BTF


class Contract:
    """The formulas of one layer with plain vectors; knows the weights by their engine names only."""

    def __init__(self, drafter: TrainableDrafter, options: dict[str, bool]) -> None:
        self.w = {**drafter.state_dict(), **dict(drafter.named_parameters())}
        self.options, self.shape = options, drafter.shape
        self.embedding = drafter.target._embedding.weight  # type: ignore[attr-defined]

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x * x).sum() / len(x) + self.shape.rms_norm_eps)

    def rope(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.zeros_like(x)
        for i in range(half):
            angle = position * self.shape.rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def first_state(self, features_F: Tensor) -> Tensor:
        chunks = list(features_F.split(self.shape.hidden_size))
        if self.options.get("fc_norm"):
            chunks = [self.rms(chunk, self.w[f"fc_norm.{i}.weight"]) for i, chunk in enumerate(chunks)]
        fused = torch.cat(chunks)
        if self.options.get("norm_before_fc"):
            fused = self.rms(fused, self.w["input_norm.weight"])
        return self.w["fc.weight"] @ fused

    def pair(self, token: int, state_D: Tensor, position: int) -> dict[str, Any]:
        """Residual, query, key and value heads of the pair (t_{p+1}, g_p)."""
        normed = self.rms(state_D, self.w["midlayer.hidden_norm.weight"])
        u = torch.cat([self.rms(self.embedding[token], self.w["midlayer.input_layernorm.weight"]), normed])
        width = self.shape.head_dim
        heads = {n: (self.w[f"midlayer.self_attn.{n}_proj.weight"] @ u).split(width) for n in "qkv"}
        return {
            "residual": normed if self.options.get("norm_before_residual") else state_D,
            "q": [self.rope(head, position) for head in heads["q"]],
            "k": [self.rope(head, position) for head in heads["k"]],
            "v": heads["v"],
        }

    def layer(self, query: dict[str, Any], seen: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """rec_p and n_p of one query over the pairs that it sees."""
        mixed = []
        for h in range(self.shape.num_heads):
            kv = h * self.shape.num_kv_heads // self.shape.num_heads
            scores = torch.stack([query["q"][h] @ pair["k"][kv] / math.sqrt(self.shape.head_dim) for pair in seen])
            shares = torch.exp(scores) / torch.exp(scores).sum()
            mixed.append(sum(share * pair["v"][kv] for share, pair in zip(shares, seen, strict=True)))
        a = query["residual"] + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.rms(a, self.w["midlayer.post_attention_layernorm.weight"])
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ x, self.w["midlayer.mlp.up_proj.weight"] @ x
        o = a + self.w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        n = self.rms(o, self.w["norm.weight"])
        return (n if self.options.get("norm_output") else o), n

    def outputs(self, ids: list[int], features_TF: Tensor, start: int, depth: int) -> list[Tensor]:
        """n at depths 0 to depth of the draft that starts at `start`, with the true tokens fed."""
        cached = [self.pair(ids[i + 1], self.first_state(features_TF[i]), i) for i in range(start + 1)]
        state, n = self.layer(cached[-1], cached)
        out = [n]
        for j in range(1, depth + 1):
            cached.append(self.pair(ids[start + 1 + j], state, start + j))
            state, n = self.layer(cached[-1], cached)
            out.append(n)
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "default")
def test_training_forward_equals_the_written_contract(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, bool]
) -> None:
    drafter = make(toy, **options)
    outputs, features_BTF = training_outputs(toy, monkeypatch, drafter, [IDS, IDS[:5]])
    contract = Contract(drafter, options)
    for row, ids in enumerate([IDS, IDS[:5]]):
        for start in range(len(ids) - 2):  # later ones have nothing to predict and are left out
            depth = min(3, len(ids) - 3 - start)  # nor have deeper ones
            for j, expected_D in enumerate(contract.outputs(ids, features_BTF[row], start, depth)):
                # The rotary tables of the code are fp32: that is the difference that is left.
                torch.testing.assert_close(outputs[j][row, start], expected_D, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [OPTIONS[0], {"fc_norm": True, "norm_output": True}], ids=["EAGLE-3", "EAGLE-3.1"])
def test_loss_and_gradients_are_those_of_the_written_contract(toy: SimpleNamespace, options: dict[str, bool]) -> None:
    """-Σ p log q with weights 0.8 ** j, summed over starts, depths and the draft vocabulary; gradients pass through all depths."""
    drafter: Any = make(toy, draft_vocab_size=40, **options)
    ids = IDS[:6]
    batch = one_per_row(FeatureStore(drafter.target, [Sequence(ids, [True] * 6)], drafter.feature_layers).batch([0]))
    parts = drafter(batch)
    parts.sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}

    drafter.zero_grad()
    contract = Contract(drafter, options)
    laws_TV = drafter.target.unembed(batch.last_BTD[0]).softmax(-1).detach()
    total = torch.zeros((), dtype=torch.float64)
    for start in range(len(ids) - 2):
        for j, read_D in enumerate(contract.outputs(ids, batch.features_BTF[0], start, min(3, len(ids) - 3 - start))):
            logs_W = (drafter.lm_head.weight @ read_D).log_softmax(0)
            total = total - 0.8**j * laws_TV[start + 1 + j][drafter.token_ids_W] @ logs_W
    total.backward()
    torch.testing.assert_close(parts.sum, total, rtol=1e-5, atol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_thinning_changes_which_starts_run_but_nothing_at_those_that_do(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace
) -> None:
    sequences = [list(range(3, 33)), list(range(10, 27))]
    full, _ = training_outputs(toy, monkeypatch, make(toy, norm_output=True), sequences)
    thin, _ = training_outputs(toy, monkeypatch, make(toy, norm_output=True, loss={"thin": 0.5}), sequences)
    shares = []
    for ours, whole in zip(thin, full, strict=True):
        ran_BT = ours.abs().sum(-1) > 0
        shares.append(float(ran_BT.sum() / (whole.abs().sum(-1) > 0).sum()))
        torch.testing.assert_close(ours[ran_BT], whole[ran_BT], rtol=1e-12, atol=1e-12)
    assert shares[0] == 1 and 0.2 < shares[1] < 0.8 and 0 < shares[2] < 0.5


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "default")
def test_drafting_feeds_the_head_what_training_did(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, bool]
) -> None:
    """Training-time test is a simulation of drafting; the two must agree for ragged rows and in every round."""
    drafter = make(toy, **options)
    generator = torch.Generator().manual_seed(6)
    sequences = torch.randint(3, toy.VOCAB, (3, 22), generator=generator)
    outputs, features_BTF = training_outputs(toy, monkeypatch, drafter, sequences.tolist())
    expected_logits = [output @ drafter.lm_head.weight.T for output in outputs]

    with torch.inference_mode():
        state = drafter.init(3, 40)
        lengths, checked = [0, 0, 0], 0
        for counts in ([5, 1, 3], [2, 4, 1], [1, 1, 5], [3, 2, 1]):
            ids_BC = torch.randint(3, toy.VOCAB, (3, max(counts)), generator=generator)  # padding is garbage
            features_BCF = torch.randn(3, max(counts), features_BTF.shape[-1], generator=generator, dtype=torch.float64)
            for row, count in enumerate(counts):
                chosen = slice(lengths[row], lengths[row] + count)
                ids_BC[row, :count], features_BCF[row, :count] = sequences[row, chosen], features_BTF[row, chosen]
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
            next_B = torch.tensor([int(sequences[row, length]) for row, length in enumerate(lengths)])
            state = drafter.observe(state, ids_BC, features_BCF, next_B, counts)

            def true_tokens(depth: int, lengths: list[int] = lengths) -> Tensor:
                return torch.tensor([int(sequences[r, length + 1 + depth]) for r, length in enumerate(lengths)])

            for _ in range(2):  # proposing leaves the state as it was
                watch = toy.Watch(true_tokens)
                proposal = drafter.propose(state, tree.chain(4), watch)
                for depth, logits_BW in enumerate(watch.seen):
                    for row, length in enumerate(lengths):
                        expected_W = expected_logits[depth][row, length - 1]
                        torch.testing.assert_close(logits_BW[row], expected_W, rtol=1e-10, atol=1e-10)
                        checked += 1
            assert proposal.tokens_BN.tolist() == [
                sequences[row, length + 1 : length + 5].tolist() for row, length in enumerate(lengths)
            ]
    assert checked == 4 * 2 * 4 * 3


def test_selected_rows_draft_as_they_did_in_the_batch(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    ids_BC = torch.randint(3, toy.VOCAB, (3, 6))
    features = torch.randn(3, 6, drafter.fc.in_features, dtype=torch.float64)
    watch = toy.Watch()

    with torch.inference_mode():
        state = drafter.observe(drafter.init(3, 20), ids_BC, features, torch.tensor([3, 4, 5]), [6, 2, 4])
        drafter.propose(state, tree.chain(3), watch)
        drafter.propose(drafter.select(state, torch.tensor([0, 2])), tree.chain(3), watch)
    for before, after in zip(watch.seen[:3], watch.seen[3:], strict=True):
        torch.testing.assert_close(after, before[[0, 2]], rtol=1e-12, atol=1e-12)


def test_the_vocabulary_map_holds_the_most_frequent_tokens_as_offsets(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    drafter = drafters.build("eagle3", {"layers": [1, 2, 3], "draft_vocab_size": 4}, target.shape)
    counts_V = torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    drafter.initialise(target, counts_V)
    kept = [2, 9, 12, 60]  # by hand: 33 is the rarest of the five
    assert drafter.d2t.tolist() == [2, 8, 10, 57]  # id - position
    assert drafter.token_ids_W.tolist() == kept
    assert [v for v in range(toy.VOCAB) if drafter.t2d[v]] == kept
    torch.testing.assert_close(drafter.lm_head.weight.data, target.head_weight()[kept].float())


def test_a_full_vocabulary_needs_no_map(toy: SimpleNamespace) -> None:
    drafter = toy.make_drafter("eagle3", toy.make_target(), draft_vocab_size=None)
    assert drafter.token_ids_W is None and not drafter.d2t.any() and drafter.t2d.all()
    torch.testing.assert_close(
        drafter.lm_head.weight.detach(), drafter.target.head_weight().detach(), rtol=1e-6, atol=1e-6
    )


def test_a_random_head_does_not_start_as_the_targets(toy: SimpleNamespace) -> None:
    drafter = toy.make_drafter("eagle3", toy.make_target(), initialise_head="random", draft_vocab_size=None)
    assert not torch.allclose(drafter.lm_head.weight, drafter.target.head_weight(), atol=0.1)
    assert float(drafter.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("num_layers, expected", [(32, (2, 16, 29)), (30, (2, 15, 27)), (6, (2, 3, 3)), (4, (2, 2, 1))])
def test_default_layers_are_two_the_middle_and_three_before_the_end(num_layers: int, expected: tuple[int, ...]) -> None:
    if len(set(expected)) == 3:
        assert eagle3.default_layers(num_layers) == expected
    else:
        with pytest.raises(ValueError, match=re.escape(f"collide for a target of {num_layers} layers ({expected})")):
            eagle3.default_layers(num_layers)


SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "steps is 0; give 1 or more"),
        ({"loss": {"decay": 0.0}}, "decay is 0.0; give a value above 0, at most 1"),
        ({"loss": {"decay": 1.5}}, "decay is 1.5"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc exclude each other"),
        ({"layers": [3, 2]}, "layers is [3, 2]; give distinct layer ids in ascending order"),
        ({"layers": [2, 2, 3]}, "give distinct layer ids"),
        ({"layers": [1, 9]}, "the target has 8 layers: give ids from 1 to 8"),
        ({"layers": [0, 2]}, "give ids from 1 to 8"),
        ({"layers": []}, "layers is []"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65, above the target's vocabulary of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": -3}, "draft_vocab_size is -3"),
        ({"loss": {"divergence": "klx"}}, "'klx' is not one of"),
        ({"norm_ouput": True}, "unknown key 'norm_ouput'; did you mean 'norm_output'?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("eagle3", settings, SHAPE)
