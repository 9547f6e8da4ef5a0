"""Layers that several kinds share: RMS norm, rotary positions, attention, gated MLP, decoder layer, residual block.

Plain torch, with the parameter names of the Llama family, so that exports are renames.

Letters: B sequences, H heads, T positions, R queries, S keys, E head width, D width, I input width.
"""

import torch
from torch import Tensor, nn

from draftsmith.drafters.attention import attend
from draftsmith.drafters.base import Shape, TrainingBatch
from draftsmith.drafters.kv import KeyValues, Slots
from draftsmith.drafters.layout import sent
from draftsmith.drafters.starts import Starts


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


def norm_each(norms: nn.ModuleList, features: Tensor) -> Tensor:
    """Each captured state by its own norm: (…, F) → (…, F), F being so many states of equal width side by side."""
    chunks = features.chunk(len(norms), dim=-1)
    return torch.cat([norm(chunk) for norm, chunk in zip(norms, chunks, strict=True)], dim=-1)


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


class Attention(nn.Module):
    """Llama's grouped-query attention in pieces, for callers that keep keys and masks themselves; its input may be wider than its
    output (EAGLE-3: token and state side by side). With `bias`, queries, keys and values have one (Qwen2)."""

    def __init__(self, shape: Shape, input_width: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = input_width or shape.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def queries(self, x_BRI: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries, (B, R, heads, E)."""
        return rotate(self.q_proj(x_BRI).unflatten(2, (self.heads, self.head_dim)), *tables)

    def keys(self, x_BRI: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, (B, R, kv heads, E) each."""
        key = self.k_proj(x_BRI).unflatten(2, (self.kv_heads, self.head_dim))
        return rotate(key, *tables), self.v_proj(x_BRI).unflatten(2, (self.kv_heads, self.head_dim))

    def mix(self, query_BRHE: Tensor, key_BHSE: Tensor, value_BHSE: Tensor, mask_BRS: Tensor) -> Tensor:
        """Attention under a bool mask (B or 1, R, S), before the output projection: (B, R, heads * E)."""
        # Queries that share keys are put below each other: one product for all of them, and no key is repeated.
        group = self.heads // self.kv_heads
        query_BHRE = query_BRHE.transpose(1, 2).unflatten(1, (self.kv_heads, group)).flatten(2, 3)
        mask_B1RS = mask_BRS.repeat(1, group, 1)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(query_BHRE, key_BHSE, value_BHSE, attn_mask=mask_B1RS)
        return mixed.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).flatten(2)


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


class Block(nn.Module):
    """The parts of Llama's decoder layer behind its first norm, which kinds place differently; arguments as of `Attention`."""

    def __init__(self, shape: Shape, input_width: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(shape, input_width, bias)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def add_mlp(self, attended: Tensor) -> Tensor:
        """The layer's output from its residual plus attention."""
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class DecoderLayer(Block):
    """Llama's decoder layer over consecutive tokens: x + attention(norm x), and that plus its MLP behind a norm; causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.rope_theta = shape.rope_theta
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BRD: Tensor, cache: KeyValues, slots: Slots) -> Tensor:
        """The layer's output (B, R, D) for tokens behind what the cache holds.

        Args:
            x_BRD: R tokens.
            cache: earlier keys and values; the new ones are written into it.
            slots: where they go (`slots_behind`).
        """
        slot_S = torch.arange(slots.extent, device=x_BRD.device)
        tables = rotary_tables(slots.index_BR, self.self_attn.head_dim, self.rope_theta)
        normed = self.input_layernorm(x_BRD)
        key, value = (x_BRHE.transpose(1, 2) for x_BRHE in self.self_attn.keys(normed, tables))
        key, value = cache.write(key, value, slots)
        seen_BRS = slot_S <= slots.index_BR[..., None]
        mixed = self.self_attn.mix(self.self_attn.queries(normed, tables), key, value, seen_BRS)
        return self.add_mlp(x_BRD + self.self_attn.o_proj(mixed))

    def over_texts(self, x_BTD: Tensor, batch: TrainingBatch) -> Tensor:
        """The layer's output (B, T, D) over the texts of a training batch; 0 at padding."""
        tokens = Starts.tokens(batch)
        position_1n = sent(tokens.position_n, x_BTD.device)[None]
        tables = rotary_tables(position_1n, self.self_attn.head_dim, self.rope_theta)
        x_1nD = tokens.pick(x_BTD)[None]
        normed_1nD = self.input_layernorm(x_1nD)
        key, value = (tokens.over_places(x_1nHE[0]) for x_1nHE in self.self_attn.keys(normed_1nD, tables))
        query_n1HE = self.self_attn.queries(normed_1nD, tables).transpose(0, 1)
        mixed_1nX = attend(tokens, query_n1HE, (key, value)).transpose(0, 1)
        out_1nD = self.add_mlp(x_1nD + self.self_attn.o_proj(mixed_1nX))
        return tokens.over_places(out_1nD[0]).view_as(x_BTD)


class ResidualBlock(nn.Module):
    """Medusa's block: x + SiLU(W x + b), the identity at the start because W and b are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))
