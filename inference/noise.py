"""Keyed noise: random numbers that are a pure function of (seed, absolute position, token), on any device and in any batch.

A counter-based hash. SplitMix64's finaliser (Steele, Lea and Flood 2014) makes two 32-bit words of seed, stream and position,
and two of the token id (with one, some tokens of a large vocabulary would share their noise everywhere). The first words go
through three rounds of a 32-bit finaliser, the second ones entering after the first round (multipliers: Wellons' hash-prospector).
The wide mixing happens once per position and once per token, so a draw costs a few 32-bit operations. The same seed gives the same
noise with or without speculation, whatever the batch, which is what coupled sampling rests on (`verify.coupled`). Different streams
of the same seed are independent.

Letters: B sequences, R positions, V tokens.
"""

import torch
from torch import Tensor

TOKENS, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Streams: the noise shared by target and draft, and the private ones of draft sampling, accept coins and residuals."""

CACHED_ELEMENTS = 1 << 18
"""On a CPU, so many draws are made at a time: their temporaries stay in cache."""


def gumbel(seeds_B: Tensor, positions_BR: Tensor, token_ids_V: Tensor, stream: int = TOKENS) -> Tensor:
    """Standard Gumbel noise, fp32 (B, R, V), for int64 seeds, positions and token ids: -log(-log(1 - u))."""
    return _draw(seeds_B, positions_BR, token_ids_V, stream, to_gumbel=True)


def uniform(seeds_B: Tensor, positions_BR: Tensor, token_ids_V: Tensor, stream: int) -> Tensor:
    """Uniform noise in the open interval (0, 1), fp32 (B, R, V).

    The grid is 2**-31 wide near 0, where `gumbel` needs its resolution: it is large where u is small.
    """
    return _draw(seeds_B, positions_BR, token_ids_V, stream, to_gumbel=False)


def coins(seeds_B: Tensor, positions_BR: Tensor, stream: int) -> Tensor:
    """One uniform number in (0, 1) per position, fp32 (B, R)."""
    zero = torch.zeros(1, dtype=torch.int64, device=positions_BR.device)
    return uniform(seeds_B, positions_BR, zero, stream)[..., 0]


def private(roots: Tensor, use: int) -> Tensor:
    """The place of the `use`-th independent draw in the round whose root stands there: no round sees the noise of another one,
    which rules that look beyond what they accept rely on. For the private streams; `TOKENS` is keyed by absolute position."""
    return roots * 4096 + use


def _draw(seeds_B: Tensor, positions_BR: Tensor, token_ids_V: Tensor, stream: int, to_gumbel: bool) -> Tensor:
    key_BR = _mix64(_mix64(seeds_B[:, None] + torch.tensor(stream + 1) * _GOLDEN) + positions_BR * _GOLDEN)
    key_n1 = key_BR.reshape(-1, 1)
    token64_V = _mix64(token_ids_V * _GOLDEN)
    token_V, other_V = _low32(token64_V), _low32(token64_V >> 32)
    out_nV = torch.empty(len(key_n1), len(token_V), dtype=torch.float32, device=token_V.device)
    rows = max(1, CACHED_ELEMENTS // len(token_V)) if token_V.device.type == "cpu" else len(key_n1)
    for begin in range(0, len(key_n1), max(1, rows)):
        chunk_c1 = key_n1[begin : begin + rows]
        bits_cV = _mix32(token_V ^ _low32(chunk_c1), other_V + _low32(chunk_c1 >> 32))
        out_cV = out_nV[begin : begin + rows]
        # 31 bits: positive integers convert to fp32 without losing the small ones. The clamp keeps 1 itself out.
        out_cV.copy_(bits_cV.bitwise_and_(0x7FFFFFFF)).add_(0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)
        if to_gumbel:
            out_cV.neg_().log1p_().neg_().log_().neg_()
    return out_nV.view(*key_BR.shape, len(token_V))


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit number; products wrap, as they should


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors; `>>` keeps the sign, so the copied sign bits are masked away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(x: Tensor, key: Tensor) -> Tensor:
    """Three products with `key` added behind the first; int32, products wrap. With two products, ids whose words differ in one or
    two bits would get noise that depends on each other's."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = ((x ^ ((x >> 15) & 0x1FFFF)) + key) * (0x846CA68B - (1 << 32))
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x31848BAB
    return x ^ ((x >> 15) & 0x1FFFF)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as signed int32."""
    return ((x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)).to(torch.int32)
