"""A section of `check_cuda`: attention of packed texts, values and gradients, against softmax written out over all places.

Letters: N places, n blocks of queries, Q queries of a block, M own keys, H heads, G heads of keys, E head width, S keys of both
parts.
"""

import torch
from torch import Tensor

from draftsmith.drafters.attention import attend
from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.layout import packed
from draftsmith.drafters.starts import Starts
from draftsmith.scripts.check_cuda import check, relative

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def run(device: torch.device, dry: bool) -> None:
    lengths = [17, 1, 40, 6] if dry else [700, 1, 129, 64, 1500, 333]
    for name, queries, own in (("causal", 1, 0), ("training-time test", 1, 2), ("blocks", 4, 4)):
        for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            starts, inputs, grad = _case(device, lengths, queries, own, dtype)
            ours = _with_gradients(starts, inputs, grad, attend)
            right = _with_gradients(starts, [x.double() for x in inputs], grad.double(), plain)
            worst = max(relative(a, b) for a, b in zip(ours, right, strict=True))
            kind = str(dtype).removeprefix("torch.")
            check(f"{name}, {kind}: values and {len(ours) - 1} gradients", worst, allowed)


def plain(
    starts: Starts,
    query_nQHE: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None = None,
    seen_nQM: Tensor | None = None,
) -> Tensor:
    """What `attend` gives, by its definition: every score exists, masked ones are minus infinity."""
    place_n1 = starts.place_n[:, None].to(query_nQHE.device)
    begin_n1 = starts.layout.begins_N[starts.place_n][:, None].to(query_nQHE.device)
    key_N = torch.arange(len(context[0]), device=query_nQHE.device)
    seen_nN = (begin_n1 <= key_N) & (key_N <= place_n1)
    seen_nQS = seen_nN[:, None].expand(-1, query_nQHE.shape[1], -1)
    keys, values = (
        x_NGE.repeat_interleave(HEADS // KV_HEADS, 1)[None].expand(starts.count, -1, -1, -1) for x_NGE in context
    )
    if own is not None:
        assert seen_nQM is not None
        more = [x_nMGE.repeat_interleave(HEADS // KV_HEADS, 2) for x_nMGE in own]
        keys, values = torch.cat([keys, more[0]], 1), torch.cat([values, more[1]], 1)
        seen_nQS = torch.cat([seen_nQS, seen_nQM.expand(starts.count, -1, -1)], 2)
    scores_nHQS = torch.einsum("nqhe,nshe->nhqs", query_nQHE, keys) * WIDTH**-0.5
    probs_nHQS = scores_nHQS.masked_fill(~seen_nQS[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nhqs,nshe->nqhe", probs_nHQS, values).flatten(2)


def _case(
    device: torch.device, lengths: list[int], queries: int, own: int, dtype: torch.dtype
) -> tuple[Starts, list[Tensor], Tensor]:
    """Starts at every third place, with queries, keys, values, own keys and own values; and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    layout = packed([[3] * length for length in lengths], [[True] * length for length in lengths])
    total = sum(lengths)
    none = torch.zeros(1, total, 0)
    batch = TrainingBatch(
        layout.ids_BT.to(device),
        layout.loss_mask_BT.to(device),
        none,
        none,
        none[..., 0:],
        layout.ids_BT,
        layout=layout,
    )
    starts = Starts(batch, torch.arange(0, total, 3))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inputs = [normal(starts.count, queries, HEADS, WIDTH), *(normal(total, KV_HEADS, WIDTH) for _ in range(2))]
    inputs += [normal(starts.count, own, KV_HEADS, WIDTH) for _ in range(2)] if own else []
    return starts, inputs, normal(starts.count, queries, HEADS * WIDTH)


def _with_gradients(starts: Starts, inputs: list[Tensor], grad: Tensor, attention: object) -> list[Tensor]:
    assert callable(attention)
    query, key, value, *own = (x.detach().clone().requires_grad_(True) for x in inputs)
    seen_1QM = None
    if own:  # of a block of queries each sees its own keys up to its own place
        seen_1QM = torch.ones(1, query.shape[1], own[0].shape[1], dtype=torch.bool, device=query.device)
        seen_1QM = seen_1QM.tril(own[0].shape[1] - query.shape[1])
    out = attention(starts, query, (key, value), tuple(own) or None, seen_1QM)
    out.backward(grad)
    gradients = [x.grad for x in (query, key, value, *own)]
    assert all(gradient is not None for gradient in gradients)
    return [out, *(gradient for gradient in gradients if gradient is not None)]
