"""Keys and values: ragged writes, commits along a tree path, roll-back, and an audit of every round of a real decode.

The audit: what a cache holds for the committed tokens equals what one fresh pass over these tokens would put there. A rejected
draft, a wrong position or a wrong feature shows as a difference of order one.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.kv import KeyValues, slots_behind
from draftsmith.inference.cache import KVCache
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

CPU = torch.device("cpu")
PARENTS = (-1, -1, 0, 0, 1, 4)  # drawn in test_tree.py
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22], [30, 31, 32]]


def test_new_entries_land_behind_each_row_s_own_length() -> None:
    cache = KeyValues(2, 1, 6, 1, torch.float64, CPU)
    keys = torch.tensor([[[[1.0], [2.0]]], [[[3.0], [4.0]]]], dtype=torch.float64)
    seen, values = cache.write(keys, -keys, slots_behind([0, 3], 2, CPU))
    assert seen[..., 0].tolist() == [[[1, 2, 0, 0, 0]], [[0, 0, 0, 3, 4]]]
    assert torch.equal(values, -seen)


def test_equal_and_ragged_lengths_write_the_same() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    sliced, indexed = (KeyValues(3, 2, 9, 5, torch.float32, CPU) for _ in range(2))
    slots = slots_behind([2, 2, 2], 4, CPU)
    assert slots.start == 2 and slots_behind([2, 3, 2], 4, CPU).start is None
    one = sliced.write(keys, values, slots)
    ragged = type(slots)(None, slots.index_BR, slots.extent)
    for a, b in zip(one, indexed.write(keys, values, ragged), strict=True):
        assert torch.equal(a, b) and a.shape == (3, 2, 6, 5)


def test_a_move_reads_everything_before_it_writes() -> None:
    cache = KeyValues(1, 1, 4, 1, torch.float64, CPU)
    cache.keys_BHSE[0, 0, :, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    cache.move(torch.tensor([[2, 1, 3]]), torch.tensor([[1, 2, 3]]))
    assert cache.keys_BHSE[0, 0, :, 0].tolist() == [0, 2, 1, 3]


def test_select_keeps_the_asked_rows_in_the_asked_order(toy: SimpleNamespace, tools: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    cache = target.new_cache(3, 16)
    target.forward(torch.tensor([[5, 6, 7], [8, 9, 0], [10, 0, 0]]), cache)
    cache.commit([3, 2, 1])
    cache.select(torch.tensor([2, 0]))
    assert cache.lengths == [1, 3]
    for row, ids in enumerate(([10], [5, 6, 7])):
        assert_same_contents(cache, row, tools.prefill(target, ids)[0])


def test_a_cache_that_is_too_small_says_so(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    cache = target.new_cache(1, 4)
    with pytest.raises(ValueError, match="the cache holds 4 tokens and is asked for 5"):
        target.forward(torch.tensor([[1, 2, 3, 4, 5]]), cache)


@pytest.mark.parametrize("end_row", [0, 3, 4, 6])
def test_a_committed_tree_path_equals_a_fresh_pass(
    toy: SimpleNamespace, tools: SimpleNamespace, family: str, end_row: int
) -> None:
    """Two rows of unequal length accept different paths of the tree, then read on."""
    target = toy.make_target(family)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [21, 22, 23]]
    cache = target.new_cache(2, 32)
    target.forward(torch.tensor([prompts[0], prompts[1] + [0] * 7]), cache)
    cache.commit([10, 3])
    new_BR = torch.tensor([[30, 31, 32, 33, 34, 35, 36], [40, 41, 42, 43, 44, 45, 46]])
    shape = tree.fixed(PARENTS)
    target.forward(new_BR, cache, tree=shape)
    rows_BP = shape.paths(torch.tensor([end_row, 5]))
    counts = [tree.depths(PARENTS)[end_row] + 1, 3]
    cache.commit(counts, rows_BP)
    for row in range(2):
        prompts[row] += new_BR[row, rows_BP[row, : counts[row]]].tolist()
        assert_same_contents(cache, row, tools.prefill(target, prompts[row])[0], tools.atol(family))
    after = target.forward(torch.tensor([[50, 51], [52, 53]]), cache).logits
    for row, more in enumerate(([50, 51], [52, 53])):
        whole = tools.prefill(target, prompts[row] + more)[1].logits[0, -2:]
        torch.testing.assert_close(after[row], whole, atol=tools.atol(family), rtol=0)


def test_what_lies_behind_a_row_s_length_is_never_read(toy: SimpleNamespace, family: str) -> None:
    """Every slot that is not committed is overwritten with large numbers before each pass; a zeroed key would still attend."""
    target = toy.make_target(family)
    ids = torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]])
    logits = []
    for poison in (False, True):
        cache = target.new_cache(2, 24)
        target.forward(ids, cache)
        cache.commit([4, 1])
        for counts in ([1, 3], [2, 1], [1, 1]):
            if poison:
                poison_free_slots(cache)
            out = target.forward(torch.tensor([[20, 21, 22], [23, 24, 25]]), cache)
            cache.commit(counts)
            logits.append(out.logits)
    for clean, poisoned in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(poisoned, clean, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_after_every_round_the_target_s_cache_equals_a_fresh_pass(
    toy: SimpleNamespace, stubs: SimpleNamespace, tools: SimpleNamespace, dtype: torch.dtype, atol: float, shape: str
) -> None:
    target = toy.make_target("llama", dtype, num_hidden_layers=2)
    plain = generate(target, PROMPTS, max_new=14, sampler=Sampler(), stop_at_eos=False)
    texts = [prompt + output.ids for prompt, output in zip(PROMPTS, plain, strict=True)]
    plan = tree.Fixed(PARENTS) if shape == "tree" else tree.chain(3)
    drafter = stubs.Scripted(texts, mostly_right)
    drafter.feature_layers = (1, "last")
    audited = Audited(target, tools, atol)
    outputs = generate(
        audited, PROMPTS, max_new=10, sampler=Sampler(), speculation=Speculation(drafter, plan), stop_at_eos=False
    )
    assert [output.ids for output in outputs] == [output.ids[:10] for output in plain]
    assert {accepted for output in outputs for _, accepted, *_ in output.rounds} >= {0, 1, 2}
    assert audited.audits > 15
    committed = [text[: len(prompt) + 9] for text, prompt in zip(texts, PROMPTS, strict=True)]
    for text in committed:  # by another way than the audit: the cache read what was emitted
        assert any(tokens[: len(text)] == text for tokens in audited.finished)
    for row, begin, features in drafter.observed:  # what the drafter was shown belongs to the committed tokens too
        expected = target.hidden(torch.tensor([texts[row]]), drafter.feature_layers)[0][
            0, begin : begin + len(features)
        ]
        torch.testing.assert_close(features[: len(expected)], expected, atol=atol, rtol=0)


@pytest.mark.parametrize("plan", [tree.chain(3), tree.Fixed(PARENTS), tree.Dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize(
    "kind, options",
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", {"norm_output": True}),
        ("eagle3", {"fc_norm": True}),
        ("eagle3", {"draft_vocab_size": None}),
    ],
    ids=str,
)
def test_after_every_round_the_eagle_drafter_s_cache_equals_a_fresh_observation(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], plan: tree.Plan
) -> None:
    """Its own keys and values of committed tokens come from the target's features, never from drafted ones."""
    target = toy.make_target("llama")
    drafter = toy.make_drafter(kind, target, **options)
    plain_observe, select = drafter.observe, drafter.select
    texts: list[list[int]] = [[] for _ in PROMPTS]
    audits = 0

    def observe(state: Any, ids_BC: Tensor, features: Tensor, next_B: Tensor, counts: list[int]) -> Any:
        nonlocal audits
        state = plain_observe(state, ids_BC, features, next_B, counts)
        for row, count in enumerate(counts):
            if count == 0:  # done, and waiting for its neighbours: nothing was observed
                continue
            texts[row] += ids_BC[row, :count].tolist()
            ids, length = torch.tensor([texts[row]]), len(texts[row])
            fresh_features, _ = target.hidden(ids, drafter.feature_layers)
            fresh = plain_observe(drafter.init(1, 64), ids, fresh_features, next_B[row : row + 1], [length])
            assert state.lengths[row] == length
            for name in ("keys_BHSE", "values_BHSE"):
                held = getattr(state.cache, name)[row, :, :length]
                torch.testing.assert_close(held, getattr(fresh.cache, name)[0, :, :length], atol=1e-10, rtol=0)
            torch.testing.assert_close(state.output_BD[row], fresh.output_BD[0], atol=1e-10, rtol=0)
            audits += 1
        return state

    def chosen(state: Any, rows_B: Tensor) -> Any:
        texts[:] = [texts[row] for row in rows_B.tolist()]
        return select(state, rows_B)

    monkeypatch.setattr(drafter, "observe", observe)
    monkeypatch.setattr(drafter, "select", chosen)
    generate(
        target,
        PROMPTS,
        max_new=8,
        sampler=Sampler(1.5),
        speculation=Speculation(drafter, plan),
        stop_at_eos=False,
    )
    assert audits > 20


class Audited:
    """A target whose caches are compared with a fresh pass at every commit."""

    def __init__(self, target: Any, tools: SimpleNamespace, atol: float) -> None:
        self.target, self.tools, self.atol, self.audits = target, tools, atol, 0
        self.finished: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, ids_BR: Tensor, cache: Any, *args: Any, **kwargs: Any) -> Any:
        self.ids_BR = ids_BR
        return self.target.forward(ids_BR, cache, *args, **kwargs)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        cache = self.target.new_cache(batch, capacity)
        texts: list[list[int]] = [[] for _ in range(batch)]
        commit, select = cache.commit, cache.select

        def audited_commit(counts: list[int], rows_BA: Tensor | None = None) -> None:
            commit(counts, rows_BA)
            for row, count in enumerate(counts):
                path = range(count) if rows_BA is None else rows_BA[row, :count].tolist()
                texts[row] += [int(self.ids_BR[row, i]) for i in path]
                assert_same_contents(cache, row, self.tools.prefill(self.target, texts[row])[0], self.atol)
                self.audits += 1
            self.finished = [*self.finished, *[list(text) for text in texts]]

        def audited_select(rows_B: Tensor) -> None:
            select(rows_B)
            texts[:] = [texts[row] for row in rows_B.tolist()]

        cache.commit, cache.select = audited_commit, audited_select
        return cache


def mostly_right(row: int, position: int, siblings: int) -> int:
    """Where `Scripted` puts the true token: at three of four positions, in a tree under alternating siblings."""
    return siblings if (row + position) % 4 == 0 else position % siblings


@torch.inference_mode()
def poison_free_slots(cache: KVCache) -> None:
    for buffers in cache._layers.values():
        for row, length in enumerate(cache.lengths):
            buffers.keys_BHSE[row, :, length:] = 1e3
            buffers.values_BHSE[row, :, length:] = 1e3


def assert_same_contents(cache: KVCache, row: int, fresh: KVCache, atol: float = 1e-10) -> None:
    assert cache.lengths[row] == fresh.lengths[0]
    for layer in fresh.used_layers():
        for held, expected in zip(cache.contents(layer, row), fresh.contents(layer, 0), strict=True):
            torch.testing.assert_close(held, expected, atol=atol, rtol=0)
