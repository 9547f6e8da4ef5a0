"""Attention of packed texts against a softmax over everything at once, in fp64, and what it may hold in memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafters import attention
from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layout import Layout
from draftsmith.drafters.starts import Starts

LENGTHS = (9, 1, 14, 5)
HEADS, GROUPS, WIDTH = 6, 2, 8


def batch_of(lengths: tuple[int, ...], padding: int = 3) -> TrainingBatch:
    total = sum(lengths) + padding
    ids_1T, mask_1T = torch.zeros(1, total, dtype=torch.int64), torch.ones(1, total, dtype=torch.bool)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    layout = Layout(ids_1T, mask_1T, tuple(zip([0, *ends[:-1]], ends, strict=True)))
    nothing = torch.zeros(1, total)
    return TrainingBatch(ids_1T, mask_1T, nothing[..., None], nothing[..., None], nothing, ids_1T, layout=layout)


def plain(
    starts: Starts, query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor] | None, seen: Any
) -> Tensor:
    """One query at a time; everything it sees in one softmax."""
    out = []
    for n, place in enumerate(starts.place_n.tolist()):
        begin = next(b for b, e in starts.layout.bounds if b <= place < e)
        for q in range(query.shape[1]):
            key, value = (x[begin : place + 1] for x in context)
            if own is not None:
                visible = [m for m in range(own[0].shape[1]) if seen is None or seen[n % len(seen), q, m]]
                key, value = (torch.cat([a, b[n, visible]]) for a, b in zip((key, value), own, strict=True))
            heads = []
            for h in range(HEADS):
                g = h // (HEADS // GROUPS)
                weights = torch.softmax(key[:, g] @ query[n, q, h] / WIDTH**0.5, 0)
                heads.append(weights @ value[:, g])
            out.append(torch.cat(heads))
    return torch.stack(out).unflatten(0, query.shape[:2])


def parts(num_queries: int, num_own: int, masked: bool) -> tuple[Starts, list[Tensor], Tensor | None]:
    torch.manual_seed(0)
    batch = batch_of(LENGTHS)
    starts = Starts(batch, torch.tensor([0, 2, 3, 3, 8, 9, 10, 15, 23, 24, 28]))
    n, total = starts.count, batch.ids_BT.numel()
    shapes = [(n, num_queries, HEADS, WIDTH)] + [(total, GROUPS, WIDTH)] * 2
    shapes += [(n, num_own, GROUPS, WIDTH)] * 2 if num_own else []
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return starts, tensors, torch.rand(n, num_queries, num_own) < 0.6 if masked else None


def written_out(
    query_1HRE: Tensor, key_1GNE: Tensor, value_1GNE: Tensor, *, block_mask: Any, enable_gqa: bool, return_aux: Any
) -> tuple[Tensor, SimpleNamespace]:
    """Flex attention as its documentation defines it, with a gradient, which it lacks on a CPU: a key is seen where its tile is
    listed and the mask says so."""
    assert enable_gqa and return_aux.lse
    rows, places = query_1HRE.shape[2], key_1GNE.shape[2]
    tiles = block_mask.to_dense()[0, 0].bool()
    tile = block_mask.BLOCK_SIZE[0]
    listed = tiles.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :places]
    seen = listed & block_mask.mask_mod(0, 0, torch.arange(rows)[:, None], torch.arange(places))
    key, value = (x.repeat_interleave(query_1HRE.shape[1] // x.shape[1], 1) for x in (key_1GNE, value_1GNE))
    scores = (query_1HRE @ key.transpose(2, 3) / query_1HRE.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


Way = Callable[..., Tensor]
WAYS: dict[str, Way] = {"texts": attention.attend, "flex": lambda *a: attention._flex(*a)}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # the plain form is what is asked for
@pytest.mark.parametrize(("num_queries", "num_own", "masked"), [(1, 0, False), (1, 2, False), (3, 2, True)])
def test_flex_attention_itself_gives_these_values(num_queries: int, num_own: int, masked: bool) -> None:
    starts, tensors, seen = parts(num_queries, num_own, masked)
    query, key, value, *own = (tensor.detach() for tensor in tensors)
    arguments = (starts, query, (key, value), (own[0], own[1]) if own else None, seen)
    torch.testing.assert_close(attention._flex(*arguments), plain(*arguments).flatten(2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("num_queries", "num_own", "masked"), [(1, 0, False), (1, 2, False), (1, 3, True), (4, 4, False), (3, 2, True)]
)
@pytest.mark.parametrize("size", [2, 512])
def test_values_and_gradients_are_those_of_one_softmax_over_text_and_own_keys(
    monkeypatch: pytest.MonkeyPatch, way: str, num_queries: int, num_own: int, masked: bool, size: int
) -> None:
    monkeypatch.setattr(attention, "QUERIES", size)
    monkeypatch.setattr(attention, "TILE", size)
    monkeypatch.setattr(attention, "_flex_attention", lambda device: written_out)
    starts, tensors, seen = parts(num_queries, num_own, masked)
    query, key, value, *own = tensors
    arguments = (starts, query, (key, value), (own[0], own[1]) if own else None, seen)
    ours, expected = WAYS[way](*arguments), plain(*arguments)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    got, right = (torch.autograd.grad((out * weights).sum(), tensors) for out in (ours, expected))
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)


def test_half_precision_stays_close() -> None:
    starts, tensors, _ = parts(1, 2, False)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow]

    def both(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = attention.attend(starts, q, (k, v), (own[0], own[1]))
        return out, torch.autograd.grad(out.sum(), [q, k, v, *own])

    (ours, ours_grads), (exact, exact_grads) = both(*narrow), both(*wide)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.02)
    for a, b in zip(ours_grads, exact_grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05)


def test_starts_that_do_not_exist_leave_a_zero_gradient() -> None:
    for way in WAYS.values():
        batch = batch_of(LENGTHS)
        starts = Starts(batch, torch.zeros(0, dtype=torch.int64))
        key, value = (torch.randn(batch.ids_BT.numel(), GROUPS, WIDTH, requires_grad=True) for _ in range(2))
        out = way(starts, torch.zeros(0, 1, HEADS, WIDTH, requires_grad=True), (key, value), None, None)
        assert out.shape == (0, 1, HEADS * WIDTH)
        out.sum().backward()
        assert key.grad is not None and not key.grad.any() and value.grad is not None


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def footprint(length: int) -> tuple[int, int]:
    """Largest tensor and all that is kept for backward, in elements, of training-time test over one text."""
    batch = batch_of((length,), padding=0)
    starts = Starts(batch, torch.arange(length))
    torch.manual_seed(0)
    query, *context = (torch.randn(length, 1, 2, 4, requires_grad=True) for _ in range(3))
    own = [torch.randn(length, 2, 2, 4, requires_grad=True) for _ in range(2)]
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    largest = Largest()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), largest:
        out = attention.attend(starts, query, (context[0][:, 0], context[1][:, 0]), (own[0], own[1]))
        out.sum().backward()
    return largest.elements, sum(kept.values())


def test_memory_is_linear_in_the_length_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", 64)
    (large, kept), (larger, kept_more) = footprint(512), footprint(1024)
    assert larger <= 2 * large and kept_more <= 2 * kept
    assert larger < 1024 * 1024 // 8  # nothing is as large as a mask of the whole text
