"""Hydra against its numeric contract, written out head by head and path by path, for chains and for trees."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import hydra, tree
from draftsmith.drafters.base import Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.regression import RIDGE, later_states
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.drafting import make_pick
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

OPTIONS: list[dict[str, Any]] = [
    {"prefix_attention": False},
    {"prefix_attention": True, "num_layers": 3, "own_head": False},
    {"prefix_attention": True, "draft_vocab_size": None},
]
IDS = [[7, 3, 50, 21, 4, 33, 18, 60], [11, 3, 50, 21, 9]]
SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


def make(toy: SimpleNamespace, *, random: bool = True, **changes: Any) -> TrainableDrafter:
    """An fp64 drafter with four heads whose every weight, norms included, is random."""
    drafter = toy.make_drafter("hydra", toy.make_target(), **{"num_heads": 4, **changes})
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in drafter.parameters() if random else ():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (1.0 if parameter.dim() == 1 else 0.0))
    return drafter


def make_batch(drafter: TrainableDrafter, sequences: list[list[int]], prompt: int = 0) -> TrainingBatch:
    rows = [Sequence(ids, [False] * prompt + [True] * (len(ids) - prompt)) for ids in sequences]
    target: Any = drafter.target
    return one_per_row(FeatureStore(target, rows, ("last",)).batch(range(len(rows))))


class Contract:
    """The formulas for one position with plain vectors; knows the weights by name only."""

    def __init__(self, drafter: TrainableDrafter) -> None:
        self.w: dict[str, Tensor] = dict(drafter.named_parameters())
        self.config, self.shape, self.target = drafter.config, drafter.shape, drafter.target

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"prefix.{name}.weight"] * x / (x.square().mean() + self.shape.rms_norm_eps).sqrt()

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Turns each pair (i, i + half) by its angle, as a complex number."""
        half = len(x) // 2
        angle = torch.tensor([position * self.shape.rope_theta ** (-i / half) for i in range(half)], dtype=x.dtype)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag])

    def hidden(self, last_TD: Tensor) -> Tensor:
        """h at the last of T positions."""
        here = last_TD[-1]
        if not self.config.prefix_attention:
            return here
        normed = [self.rms(x, "input_layernorm") for x in last_TD]
        width = self.shape.head_dim

        def heads(name: str, position: int) -> list[Tensor]:
            parts = (self.w[f"prefix.self_attn.{name}_proj.weight"] @ normed[position]).split(width)
            return [part if name == "v" else self.rope(part, position) for part in parts]

        keys = [heads("k", position) for position in range(len(normed))]
        values = [heads("v", position) for position in range(len(normed))]
        mixed = []
        for h, query in enumerate(heads("q", len(normed) - 1)):
            kv = h * self.shape.num_kv_heads // self.shape.num_heads
            shares = torch.stack([query @ key[kv] / math.sqrt(width) for key in keys]).softmax(0)
            mixed.append(sum(share * value[kv] for share, value in zip(shares, values, strict=True)))
        a = here + self.w["prefix.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.rms(a, "post_attention_layernorm")
        gate, up = self.w["prefix.mlp.gate_proj.weight"] @ x, self.w["prefix.mlp.up_proj.weight"] @ x
        return a + self.w["prefix.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, hidden_D: Tensor, path: list[int]) -> Tensor:
        """For the token behind a path, which starts with the token behind h."""
        k = len(path) - 1
        z = self.w[f"bodies.{k}.project.weight"] @ torch.cat([hidden_D, *(self.target.embed(torch.tensor(path)))])
        for i in range(self.config.num_layers):
            x = self.w[f"bodies.{k}.blocks.{i}.linear.weight"] @ z + self.w[f"bodies.{k}.blocks.{i}.linear.bias"]
            z = z + x / (1 + torch.exp(-x))
        return self.w[f"lm_heads.{k if self.config.own_head else 0}.weight"] @ z


def training_logits(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, drafter: TrainableDrafter, batch: TrainingBatch
) -> list[Tensor]:
    """The draft logits of training, one (B, T, W) per depth."""
    seen: list[Tensor] = []

    def distill(reads: list[Tensor], heads: list[Tensor], *_: Any) -> SimpleNamespace:
        seen.extend(read @ heads[k % len(heads)].T for k, read in enumerate(reads))
        return SimpleNamespace(parts=None)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(hydra, "distill", distill)
        drafter(batch)
    return toy.grids_of(seen, hydra.trained_starts(batch, drafter.training_depth))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_forward_equals_the_written_contract(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    drafter = make(toy, **options)
    batch = make_batch(drafter, IDS)
    logits = training_logits(toy, monkeypatch, drafter, batch)
    contract, checked = Contract(drafter), 0
    with torch.no_grad():
        for row, ids in enumerate(IDS):
            for start in range(len(ids) - 2):  # later ones have nothing to predict and are left out
                hidden_D = contract.hidden(batch.last_BTD[row, : start + 1])
                for k in range(min(4, len(ids) - 2 - start)):  # nor have deeper ones
                    expected_W = contract.logits(hidden_D, ids[start + 1 : start + 2 + k])
                    # The rotary tables of the code are fp32: that is the difference that is left.
                    torch.testing.assert_close(logits[k][row, start], expected_W, rtol=1e-5, atol=1e-5)
                    checked += 1
    assert checked == 18 + 6


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1]], ids=str)
def test_loss_and_gradients_equal_those_of_the_written_contract(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    drafter = make(toy, **options, draft_vocab_size=None, loss={"decay": 0.7})
    batch = make_batch(drafter, IDS, prompt=3)
    total = drafter(batch).sum
    total.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}

    contract = Contract(drafter)
    expected = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(IDS):
        for start in range(len(ids)):
            for k in range(4):
                if 3 <= start + 2 + k < len(ids):  # the target itself generated the token that is predicted
                    teacher_V = drafter.target.unembed(batch.last_BTD[row, start + 1 + k]).softmax(0)
                    hidden_D = contract.hidden(batch.last_BTD[row, : start + 1])
                    draft_V = contract.logits(hidden_D, ids[start + 1 : start + 2 + k]).log_softmax(0)
                    expected = expected - 0.7**k * (teacher_V * draft_V).sum()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for name, gradient in zip(gradients, torch.autograd.grad(expected, list(drafter.parameters())), strict=True):
        assert float(gradient.abs().max()) > 1e-3, name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def observed(
    drafter: TrainableDrafter, sequences: list[list[int]], last_BTD: Tensor, rounds: list[list[int]]
) -> tuple[Any, list[int]]:
    """The state after so many tokens of each row were read in each round, and what has been read; padding is garbage."""
    rows, generator = len(sequences), torch.Generator().manual_seed(6)
    state, lengths = drafter.init(rows, 40), [0] * rows
    for counts in rounds:
        ids_BC = torch.randint(3, 60, (rows, max(counts)), generator=generator)
        features_BCD = torch.randn(rows, max(counts), last_BTD.shape[2], generator=generator, dtype=torch.float64)
        for row, count in enumerate(counts):
            chosen = slice(lengths[row], lengths[row] + count)
            ids_BC[row, :count] = torch.tensor(sequences[row][chosen])
            features_BCD[row, :count] = last_BTD[row, chosen]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        next_B = torch.tensor([sequences[row][length] for row, length in enumerate(lengths)])
        state = drafter.observe(state, ids_BC, features_BCD, next_B, counts)
    return state, lengths


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafting_the_true_tokens_gives_the_teacher_forced_logits_round_after_round(
    monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace, options: dict[str, Any]
) -> None:
    drafter = make(toy, **options)
    sequences = torch.randint(3, toy.VOCAB, (3, 22), generator=torch.Generator().manual_seed(6)).tolist()
    batch = make_batch(drafter, sequences)
    expected = training_logits(toy, monkeypatch, drafter, batch)
    rounds = [[5, 1, 3], [2, 4, 1], [1, 1, 5], [3, 2, 1]]
    for done in range(1, 5):
        with torch.inference_mode():
            state, lengths = observed(drafter, sequences, batch.last_BTD, rounds[:done])

            def true_tokens(depth: int, lengths: list[int] = lengths) -> Tensor:
                return torch.tensor([sequences[row][length + 1 + depth] for row, length in enumerate(lengths)])

            for _ in range(2):  # proposing leaves the state as it was
                watch = toy.Watch(true_tokens)
                proposal = drafter.propose(state, tree.chain(4), watch)
                for depth, logits_BW in enumerate(watch.seen):
                    for row, length in enumerate(lengths):
                        expected_W = expected[depth][row, length - 1]
                        torch.testing.assert_close(logits_BW[row], expected_W, rtol=1e-10, atol=1e-10)
        assert proposal.tokens_BN.tolist() == [
            sequences[row][length + 1 : length + 5] for row, length in enumerate(lengths)
        ]


STATIC = (-1, -1, 0, 0, 1, 4, -1, 5, 2, 4, 3)


def path_to(parents: list[int], tokens: list[int], node: int) -> list[int]:
    """The tokens from the first drafted one to a node, itself included."""
    return [] if node < 0 else [*path_to(parents, tokens, parents[node]), tokens[node]]


@pytest.mark.parametrize("plan", [tree.chain(4), tree.Fixed(STATIC), tree.branching([3, 2, 1, 2])], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_node_of_a_static_tree_is_drawn_from_the_law_behind_its_own_path(
    toy: SimpleNamespace, options: dict[str, Any], plan: tree.Fixed
) -> None:
    drafter = make(toy, **options)
    contract, last_BTD = Contract(drafter), make_batch(drafter, IDS).last_BTD
    lengths = [6, 3]
    pick = make_pick("sample", Sampler(1.0), torch.tensor([3, 4]), torch.tensor([7, 4]), toy.VOCAB)
    laws: list[tuple[int, int, Tensor]] = []  # row, parent, law of its children
    with torch.inference_mode():
        state, _ = observed(drafter, IDS, last_BTD, [[2, 1], [4, 2]])
        proposal = drafter.propose(state, plan, pick)
        parents = list(plan.parents)
        for row, length in enumerate(lengths):
            hidden_D = contract.hidden(last_BTD[row, :length])
            tokens = proposal.tokens_BN[row].tolist()
            for node, parent in enumerate(parents):
                if parent in parents[:node]:
                    continue  # a later sibling, whose law lacks the earlier ones
                logits_W = contract.logits(hidden_D, [IDS[row][length], *path_to(parents, tokens, parent)])
                expected_V = torch.zeros(toy.VOCAB, dtype=torch.float64)
                expected_V[: len(logits_W)] = logits_W.softmax(
                    0
                )  # all tokens are equally frequent: the lowest are kept
                assert proposal.probs_BNV is not None
                torch.testing.assert_close(proposal.probs_BNV[row, node].double(), expected_V, rtol=1e-4, atol=1e-6)
                laws.append((row, parent, expected_V))
    # The test would see a mix-up: no two parents have the same law.
    for i, (_, _, law_V) in enumerate(laws):
        assert all(float((law_V - other_V).abs().sum()) > 1e-2 for _, _, other_V in laws[:i])


def dynamic_paths(law: Callable[[list[int]], Tensor], plan: tree.Dynamic) -> set[tuple[int, ...]]:
    """The nodes of a dynamic tree as paths, by enumerating and sorting."""
    here: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(plan.depth):
        below = []
        for score, path in here:
            values, ids = law(list(path)).log_softmax(0).topk(plan.width)
            below += [
                (score + value, (*path, token)) for value, token in zip(values.tolist(), ids.tolist(), strict=True)
            ]
        candidates += below
        here = sorted(below, reverse=True)[: plan.width]
    return {path for _, path in sorted(candidates, reverse=True)[: plan.nodes]}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_dynamic_tree_holds_the_likeliest_paths(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    drafter, plan, lengths = make(toy, **options), tree.Dynamic(22, 4, 3), [6, 3]
    contract, last_BTD = Contract(drafter), make_batch(drafter, IDS).last_BTD
    with torch.inference_mode():
        state, _ = observed(drafter, IDS, last_BTD, [lengths])
        proposal = drafter.propose(state, plan, toy.Watch())
        for row, length in enumerate(lengths):
            parents = proposal.tree.parents_bN.expand(2, -1)[row].tolist()
            tokens = proposal.tokens_BN[row].tolist()
            hidden_D = contract.hidden(last_BTD[row, :length])

            def law(path: list[int], row: int = row, length: int = length, hidden_D: Tensor = hidden_D) -> Tensor:
                return contract.logits(hidden_D, [IDS[row][length], *path])

            found = {tuple(path_to(parents, tokens, node)) for node in range(plan.nodes)}
            assert found == dynamic_paths(law, plan) and len(found) == plan.nodes
            assert max(map(len, found)) == 4  # every head has spoken


@pytest.mark.parametrize("prefix_attention", [False, True])
def test_rows_that_leave_or_come_draft_as_they_did(toy: SimpleNamespace, prefix_attention: bool) -> None:
    drafter = make(toy, prefix_attention=prefix_attention)
    last_BTD = make_batch(drafter, IDS).last_BTD
    more_TD = torch.randn(1, 2, toy.WIDTH, dtype=torch.float64)

    def logits(state: Any) -> list[Tensor]:
        watch = toy.Watch()
        drafter.propose(state, tree.chain(3), watch)
        return watch.seen

    def read_on(state: Any) -> Any:
        """Two further tokens, for every row: only right if the cache and the lengths are."""
        rows = len(state.lengths)
        next_B = torch.full((rows,), 9)
        return drafter.observe(state, torch.full((rows, 2), 8), more_TD.expand(rows, -1, -1), next_B, [2] * rows)

    with torch.inference_mode():
        for later in (lambda state: state, read_on):
            whole = logits(later(observed(drafter, IDS, last_BTD, [[6, 3]])[0]))
            for row in (0, 1):
                state, _ = observed(drafter, IDS, last_BTD, [[6, 3]])
                alone = logits(later(drafter.select(state, torch.tensor([row]))))
                for ours, expected in zip(alone, whole, strict=True):
                    torch.testing.assert_close(ours, expected[[row]], rtol=1e-10, atol=1e-10)
            first, _ = observed(drafter, IDS, last_BTD, [[6, 3]])
            other, _ = observed(drafter, IDS[:1], last_BTD[:1], [[4]])
            joined = logits(later(drafter.replace(first, torch.tensor([1]), other)))
            expected_new = logits(later(observed(drafter, IDS[:1], last_BTD[:1], [[4]])[0]))
            for ours, old, new in zip(joined, whole, expected_new, strict=True):
                torch.testing.assert_close(ours, torch.cat([old[:1], new]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_batches_every_head_starts_as_the_targets_own(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    drafter = make(toy, random=False, **options)
    last_BTD = make_batch(drafter, IDS).last_BTD
    watch = toy.Watch()
    with torch.inference_mode():
        drafter.propose(observed(drafter, IDS, last_BTD, [[6, 3]])[0], tree.chain(4), watch)
    target_logits_BV = drafter.target.unembed(last_BTD[torch.arange(2), torch.tensor([5, 2])])
    assert len(watch.seen) == 4
    for logits_BW in watch.seen:
        # Heads are copies in fp32, the drafter's type at the start.
        torch.testing.assert_close(logits_BW, target_logits_BV[:, : logits_BW.shape[1]], rtol=1e-5, atol=1e-5)


def test_the_maps_of_state_and_tokens_are_those_of_plain_least_squares(toy: SimpleNamespace) -> None:
    """Σ |A x - h_(p+k)|² with the ridge as rows of its own, one size per part of x: h_p and each token's embedding."""
    drafter = make(toy, random=False)
    sequences = torch.randint(3, toy.VOCAB, (20, 14), generator=torch.Generator().manual_seed(2)).tolist()
    batch, embed = make_batch(drafter, sequences, prompt=4), drafter.target.embed
    for k, map_DI in enumerate(later_states([batch], 2, toy.WIDTH, embed), start=1):
        here, later = [], []
        for row, ids in enumerate(sequences):
            for p in range(3 - k, len(ids) - k - 1):  # the first of them predicts the first token of the answer
                here.append(torch.cat([batch.last_BTD[row, p], *embed(torch.tensor(ids[p + 1 : p + 1 + k]))]))
                later.append(batch.last_BTD[row, p + k])
        x_nI, y_nD = torch.stack(here), torch.stack(later)
        sizes = [RIDGE * part.square().mean() * len(x_nI) for part in x_nI.split(toy.WIDTH, dim=1)]
        pull_II = torch.stack(sizes).sqrt().repeat_interleave(toy.WIDTH).diag()
        wanted_ID = torch.zeros(len(pull_II), toy.WIDTH, dtype=torch.float64)
        wanted_ID[: toy.WIDTH] = pull_II[: toy.WIDTH, : toy.WIDTH]
        solution = torch.linalg.lstsq(torch.cat([x_nI, pull_II]), torch.cat([y_nD, wanted_ID])).solution
        torch.testing.assert_close(map_DI.double(), solution.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_starts_behind_the_linear_guess_of_state_and_tokens(toy: SimpleNamespace, options: dict[str, Any]) -> None:
    target, losses = toy.make_target(dtype=torch.float32), {}
    for start in ("regression", "target"):
        drafter = drafters.build("hydra", {"num_heads": 3, "initialise_head": start, **options}, target.shape)
        drafter.target = target
        batch = make_batch(drafter, IDS, prompt=2)
        drafter.initialise(target, torch.arange(toy.VOCAB), [batch])
        losses[start] = drafter(batch).sum.item()
        maps = later_states([batch] if start == "regression" else [], 3, toy.WIDTH, target.embed)
        for body, map_DI in zip(drafter.bodies, maps, strict=True):
            torch.testing.assert_close(body.project.weight.detach(), map_DI)
    assert losses["regression"] < 0.8 * losses["target"]  # fitted on the very tokens


def test_a_reduced_vocabulary_keeps_the_frequent_tokens_rows_of_the_head(toy: SimpleNamespace) -> None:
    target, counts_V = toy.make_target(), torch.zeros(toy.VOCAB, dtype=torch.int64)
    counts_V[[60, 9, 33, 12, 2]] = torch.tensor([5, 5, 1, 7, 9])
    drafter = drafters.build("hydra", {"draft_vocab_size": 4}, target.shape)
    drafter.initialise(target, counts_V)
    assert drafter.token_ids_W.tolist() == [2, 9, 12, 60]
    for head in drafter.lm_heads:
        torch.testing.assert_close(head.weight.detach(), target.head_weight()[[2, 9, 12, 60]].float())


@pytest.mark.parametrize("own_head, heads", [(True, 4), (False, 1)])
def test_no_module_is_shared_and_no_embedding_is_stored(own_head: bool, heads: int) -> None:
    drafter = hydra.Model(hydra.Config(num_layers=3, own_head=own_head), SHAPE)
    assert [body.project.in_features for body in drafter.bodies] == [64, 96, 128, 160]
    weights = [parameter.data_ptr() for parameter in drafter.parameters()]
    assert len(set(weights)) == len(weights) == 4 * (1 + 3 * 2) + heads
    assert drafter.bytes_per_token == 0
    with_prefix = hydra.Model(hydra.Config(prefix_attention=True), SHAPE)
    assert with_prefix.bytes_per_token == 2 * 2 * 8 * 4  # keys and values, two heads, width 8, fp32


def test_it_drafts_as_deep_as_it_has_heads_and_no_deeper() -> None:
    drafter = hydra.Model(hydra.Config(num_heads=3), SHAPE)
    assert drafter.max_depth == drafter.training_depth == 3
    Speculation(drafter, tree.branching([2, 2, 1]))
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
        ({"prefix_attenton": True}, "unknown key 'prefix_attenton'; did you mean 'prefix_attention'?"),
        ({"initialise_head": "zeros"}, "'zeros' is not one of 'regression', 'target'"),
        ({"num_heads": 2.5}, "num_heads: expected int, got 2.5"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("hydra", settings, SHAPE)
