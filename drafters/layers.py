"""Layers that several kinds share: RMS norm, rotary positions, gated MLP, residual block.

Plain torch, with the parameter names of the Llama family, so that exports are renames.

Letters: B sequences, H heads, T positions, E head width, D width.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x²) + eps), computed in fp32 or wider and cast back (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 (…, E), for integer positions (…) (Su et al. 2021, arXiv 2104.09864; Llama's half layout)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BTHE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Applies rotary positions; tables may have batch size 1."""
    first, second = x_BTHE.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos, sin = cos_BTE[:, :, None].to(x_BTHE.dtype), sin_BTE[:, :, None].to(x_BTHE.dtype)
    return x_BTHE * cos + turned * sin


class MLP(nn.Module):
    """Llama's gated MLP: down(SiLU(gate x) * up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ResidualBlock(nn.Module):
    """Medusa's block: x + SiLU(W x + b), the identity at the start because W and b are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))
