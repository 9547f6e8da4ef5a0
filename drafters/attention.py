"""Attention in training: queries at some places of packed texts, each of which sees the keys of its own text up to its place, and
keys of its own.

Own keys are those of later depths of the same start (training-time test) or of the same block; there are few. The softmax goes over
both parts: either is done by itself, and their log-sum-exps say how much of the whole it is. With L the log-sum-exp of all scores
and O the whole output, P = exp(S - L) and δ = Σ dO O are the probabilities and the row sums that the backward pass of each part
needs, so PyTorch's own kernel gives the exact gradients of the part in the text if it is handed L and O in place of its own.

On a CPU the part in the text is done text by text, QUERIES queries at a time: memory is linear in the length of a text, and no
mask of a whole text exists. On a GPU it is flex attention with a mask of blocks that is made on the host.

Letters: N places, n blocks of queries (one start each), Q queries of a block, M own keys of a block, H heads, G heads of keys,
g = H / G, S keys seen, R queries of a chunk, E head width.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from draftsmith.drafters.layout import rounded, sent
from draftsmith.drafters.starts import Starts

QUERIES = 512
"""Of a chunk, at most: bounds the mask, and how many keys are scored only to be masked."""
TILE = 128
"""Side of flex attention's blocks."""


def attend(
    starts: Starts,
    query_nQHE: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None = None,
    seen_nQM: Tensor | None = None,
) -> Tensor:
    """What the queries read, before the output projection: (n, Q, H E).

    Args:
        starts: where the n blocks of queries stand.
        query_nQHE: rotated queries.
        context: rotated keys and values at all places, (N, G, E) each.
        own: keys and values that the queries of a block alone see, (n, M, G, E) each.
        seen_nQM: bool, which of its block's own keys a query sees, n may be 1; None: all.
    """
    if query_nQHE.device.type == "cuda":
        return _flex(starts, query_nQHE, context, own, seen_nQM)
    out_nQHE: Tensor = _Texts.apply(starts, query_nQHE, *context, *(own or (None, None)), seen_nQM)
    return out_nQHE.flatten(2)


class _Texts(torch.autograd.Function):
    """The way of the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        starts: Starts,
        query_nQHE: Tensor,
        key_NGE: Tensor,
        value_NGE: Tensor,
        own_key_nMGE: Tensor | None,
        own_value_nMGE: Tensor | None,
        seen_nQM: Tensor | None,
    ) -> Tensor:
        out_nQHE = torch.empty_like(query_nQHE)
        wide = torch.promote_types(query_nQHE.dtype, torch.float32)
        lse_nQH = torch.empty(query_nQHE.shape[:3], dtype=wide)
        for blocks, keys, mask_11RS in _chunks(starts, query_nQHE):
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _by_head(query_nQHE[blocks], key_NGE, mask_11RS.shape[2]),
                *(_shared(x_NGE[keys], query_nQHE) for x_NGE in (key_NGE, value_NGE)),
                attn_mask=mask_11RS,
            )
            num = (blocks.stop - blocks.start) * query_nQHE.shape[1]
            out_nQHE[blocks] = _by_block(part[:, :, :num], out_nQHE)
            lse_nQH[blocks] = lse[:, :, :num].permute(2, 0, 1).reshape(-1, *lse_nQH.shape[1:])
        if own_key_nMGE is not None and own_value_nMGE is not None:
            with torch.autocast("cpu", enabled=False):
                out_nQHE, lse_nQH = _merge(out_nQHE, lse_nQH, query_nQHE, own_key_nMGE, own_value_nMGE, seen_nQM)
        ctx.starts = starts
        ctx.save_for_backward(query_nQHE, key_NGE, value_NGE, own_key_nMGE, own_value_nMGE, seen_nQM, out_nQHE, lse_nQH)
        return out_nQHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nQHE: Tensor) -> tuple[Tensor | None, ...]:
        query_nQHE, key_NGE, value_NGE, own_key, own_value, seen_nQM, out_nQHE, lse_nQH = ctx.saved_tensors
        grad_nQHE = grad_nQHE.contiguous()
        grad_query_nQHE = torch.empty_like(query_nQHE)
        grad_key_NGE, grad_value_NGE = (torch.zeros_like(x_NGE, dtype=lse_nQH.dtype) for x_NGE in (key_NGE, value_NGE))
        for blocks, keys, mask_11RS in _chunks(ctx.starts, query_nQHE):
            num_rows = mask_11RS.shape[2]
            query, out, grad = (
                _by_head(x_nQHE[blocks], key_NGE, num_rows) for x_nQHE in (query_nQHE, out_nQHE, grad_nQHE)
            )
            lse_RH = lse_nQH[blocks].flatten(0, 1)
            num, filling = len(lse_RH), (0, 0, 0, num_rows - len(lse_RH))
            # Queries that only fill up have no probabilities, and no gradient that could reach the keys.
            lse_GgR = nn.functional.pad(lse_RH, filling, value=torch.inf).T.unflatten(0, query.shape[:2])
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                query,
                *(_shared(x_NGE[keys], query_nQHE) for x_NGE in (key_NGE, value_NGE)),
                out,
                lse_GgR.contiguous(),
                0.0,
                False,
                attn_mask=mask_11RS,
            )
            grad_query_nQHE[blocks] = _by_block(grads[0][:, :, :num], grad_query_nQHE)
            for into_NGE, grad_GgSE in zip((grad_key_NGE, grad_value_NGE), grads[1:], strict=True):
                into_NGE[keys] += grad_GgSE.sum(1, dtype=into_NGE.dtype).transpose(0, 1)
        grad_own: tuple[Tensor | None, Tensor | None] = (None, None)
        if own_key is not None:
            with torch.autocast("cpu", enabled=False):
                more_nQHE, *grad_own = _own_gradients(  # type: ignore[assignment]
                    grad_nQHE, out_nQHE, lse_nQH, query_nQHE, own_key, own_value, seen_nQM
                )
            grad_query_nQHE += more_nQHE
        return (
            None,
            grad_query_nQHE,
            grad_key_NGE.to(key_NGE.dtype),
            grad_value_NGE.to(value_NGE.dtype),
            *grad_own,
            None,
        )


def _chunks(starts: Starts, query_nQHE: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of one text, keys among which are all that any of them sees, and the mask (1, 1, R, S) to be added to their scores;
    both R and S are round numbers, so R may be more queries than the blocks have."""
    num_queries, total = query_nQHE.shape[1], starts.layout.ids_BT.numel()
    size = max(1, QUERIES // num_queries)
    edges = torch.searchsorted(starts.place_n, torch.tensor([end for _, end in starts.layout.bounds])).tolist()
    for first, last, (text_begin, _) in zip([0, *edges], edges, starts.layout.bounds, strict=False):
        for begin in range(first, last, size):
            blocks = slice(begin, min(begin + size, last))
            place_b = starts.place_n[blocks]
            num_keys = min(total, rounded(int(place_b[-1]) + 1 - text_begin))
            first_key = min(text_begin, total - num_keys)
            key_S = torch.arange(first_key, first_key + num_keys)
            hidden_bS = (key_S > place_b[:, None]) | (key_S < text_begin)
            mask_bS = torch.zeros(hidden_bS.shape, dtype=query_nQHE.dtype).masked_fill_(hidden_bS, -torch.inf)
            mask_RS = mask_bS.repeat_interleave(num_queries, 0)
            mask_RS = nn.functional.pad(mask_RS, (0, 0, 0, rounded(len(mask_RS)) - len(mask_RS)))
            yield blocks, slice(first_key, first_key + num_keys), mask_RS[None, None]


def _by_head(x_bQHE: Tensor, key_NGE: Tensor, num_rows: int) -> Tensor:
    """(b, Q, H, E) → (G, g, R, E), filled up with 0 where R is above b Q."""
    x_RHE = x_bQHE.flatten(0, 1)
    x_RHE = nn.functional.pad(x_RHE, (0, 0, 0, 0, 0, num_rows - len(x_RHE)))
    return x_RHE.unflatten(1, (key_NGE.shape[1], -1)).permute(1, 2, 0, 3)


def _by_block(x_GgRE: Tensor, like_nQHE: Tensor) -> Tensor:
    """The inverse: (b, Q, H, E)."""
    return x_GgRE.permute(2, 0, 1, 3).reshape(-1, *like_nQHE.shape[1:])


def _shared(x_SGE: Tensor, query_nQHE: Tensor) -> Tensor:
    """Keys or values as each of the heads that share them sees them: (G, g, S, E), without a copy."""
    x_G1SE = x_SGE.to(query_nQHE.dtype).transpose(0, 1)[:, None]
    return x_G1SE.expand(-1, query_nQHE.shape[2] // x_SGE.shape[1], -1, -1)


def _own_scores(
    query_nQHE: Tensor, key_nMGE: Tensor, seen_nQM: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (n, G, g, Q, M) in `dtype`, and the queries (n, G, g, Q, E) and keys (n, G, 1, M, E) they come from."""
    query_nGgQE = _by_group(query_nQHE, key_nMGE).to(dtype)
    key_nG1ME = key_nMGE.transpose(1, 2)[:, :, None].to(dtype)
    scores_nGgQM = query_nGgQE @ key_nG1ME.transpose(3, 4) * query_nQHE.shape[-1] ** -0.5
    if seen_nQM is not None:
        scores_nGgQM = scores_nGgQM.masked_fill(~seen_nQM[:, None, None], -torch.inf)
    return scores_nGgQM, query_nGgQE, key_nG1ME


def _merge(
    out_nQHE: Tensor,
    lse_nQH: Tensor,
    query_nQHE: Tensor,
    key_nMGE: Tensor,
    value_nMGE: Tensor,
    seen_nQM: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the text and a block's own keys, from those over the text alone."""
    scores_nGgQM, _, _ = _own_scores(query_nQHE, key_nMGE, seen_nQM, lse_nQH.dtype)
    text_nGgQ = _by_group(lse_nQH[..., None], key_nMGE)[..., 0]
    lse_nGgQ = torch.logaddexp(text_nGgQ, scores_nGgQM.logsumexp(-1))
    share_nQH = _per_query((text_nGgQ - lse_nGgQ).exp()[..., None])
    own_nGgQE = (scores_nGgQM - lse_nGgQ[..., None]).exp() @ value_nMGE.transpose(1, 2)[:, :, None].to(lse_nQH.dtype)
    return (out_nQHE * share_nQH + _per_query(own_nGgQE)).to(out_nQHE.dtype), _per_query(lse_nGgQ[..., None])[..., 0]


def _by_group(x_nQHE: Tensor, key_nMGE: Tensor) -> Tensor:
    """By the groups of heads that share keys: (n, Q, H, E) → (n, G, g, Q, E)."""
    return x_nQHE.unflatten(2, (key_nMGE.shape[2], -1)).permute(0, 2, 3, 1, 4)


def _per_query(x_nGgQE: Tensor) -> Tensor:
    """The inverse: (n, Q, H, E)."""
    return x_nGgQE.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _own_gradients(
    grad_nQHE: Tensor,
    out_nQHE: Tensor,
    lse_nQH: Tensor,
    query_nQHE: Tensor,
    key_nMGE: Tensor,
    value_nMGE: Tensor,
    seen_nQM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries (the part through their own keys), and of the own keys and values."""
    dtype, scale = lse_nQH.dtype, query_nQHE.shape[-1] ** -0.5
    scores_nGgQM, query_nGgQE, key_nG1ME = _own_scores(query_nQHE, key_nMGE, seen_nQM, dtype)
    probs_nGgQM = (scores_nGgQM - _by_group(lse_nQH[..., None], key_nMGE)).exp()
    grad_nGgQE = _by_group(grad_nQHE, key_nMGE).to(dtype)
    row_nGgQ1 = (grad_nGgQE * _by_group(out_nQHE, key_nMGE).to(dtype)).sum(-1, keepdim=True)
    grad_probs_nGgQM = grad_nGgQE @ value_nMGE.transpose(1, 2)[:, :, None].to(dtype).transpose(3, 4)
    grad_scores_nGgQM = probs_nGgQM * (grad_probs_nGgQM - row_nGgQ1) * scale
    grad_query_nQHE = _per_query(grad_scores_nGgQM @ key_nG1ME)
    grad_key_nMGE, grad_value_nMGE = (
        (weights_nGgQM.flatten(2, 3).transpose(2, 3) @ x_nGgQE.flatten(2, 3)).transpose(1, 2)
        for weights_nGgQM, x_nGgQE in ((grad_scores_nGgQM, query_nGgQE), (probs_nGgQM, grad_nGgQE))
    )
    return grad_query_nQHE.to(query_nQHE.dtype), grad_key_nMGE.to(key_nMGE.dtype), grad_value_nMGE.to(value_nMGE.dtype)


def _flex(
    starts: Starts,
    query_nQHE: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None,
    seen_nQM: Tensor | None,
) -> Tensor:
    """The way of the GPU; its own part is merged by autograd."""
    from torch.nn.attention.flex_attention import AuxRequest

    if starts.count == 0:  # the parameters must have a gradient all the same
        return (query_nQHE + sum(x_NGE.sum() for x_NGE in context) * 0).flatten(2)
    key_1GNE, value_1GNE = (x_NGE.to(query_nQHE.dtype).transpose(0, 1)[None] for x_NGE in context)
    mask = _block_mask(starts, query_nQHE.shape[1], key_1GNE.shape[2])
    query_1HRE = query_nQHE.flatten(0, 1).transpose(0, 1)[None]
    out_1HRE, aux = _flex_attention(query_1HRE.device.type)(
        query_1HRE, key_1GNE, value_1GNE, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    out_nQHE = out_1HRE[0].transpose(0, 1).unflatten(0, query_nQHE.shape[:2])
    if own is None:
        return out_nQHE.flatten(2)
    lse_nQH = aux.lse[0].T.unflatten(0, query_nQHE.shape[:2])
    with torch.autocast(query_nQHE.device.type, enabled=False):
        return _merge(out_nQHE, lse_nQH, query_nQHE, *own, seen_nQM)[0].flatten(2)


@functools.cache
def _flex_attention(device: str) -> Any:
    """Compiled for GPUs; its plain form, which holds all scores at once, serves tests on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _block_mask(starts: Starts, num_queries: int, num_places: int) -> Any:
    """Flex attention's mask, from the host: which tiles of keys each tile of queries sees any of."""
    from torch.nn.attention.flex_attention import BlockMask

    device = starts.device
    place_R = starts.place_n.repeat_interleave(num_queries)
    begin_R = starts.layout.begins_N[place_R]
    tiles = torch.arange(0, len(place_R), TILE)
    first_t = begin_R[tiles] // TILE  # places ascend, so a tile's first query sees the first keys and its last the last
    last_t = place_R[(tiles + TILE - 1).clamp_max(len(place_R) - 1)] // TILE
    index_tk = first_t[:, None] + torch.arange(int((last_t - first_t).max()) + 1)
    num_tiles = -(-num_places // TILE)
    index_tk = torch.nn.functional.pad(index_tk, (0, num_tiles - index_tk.shape[1])).clamp_max(num_tiles - 1)
    place_R, begin_R = sent(place_R, device), sent(begin_R, device)

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (begin_R[query] <= key) & (key <= place_R[query])

    return BlockMask.from_kv_blocks(
        sent((last_t - first_t + 1).int()[None, None], device),
        sent(index_tk.int()[None, None], device),
        BLOCK_SIZE=TILE,
        mask_mod=seen,
        seq_lengths=(len(place_R), num_places),
    )
