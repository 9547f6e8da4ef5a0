"""How the target's states are stored: as they are, or in eight bits with one scale per token.

`target` keeps every bit. `float8` (e4m3: 4 bits of exponent, 3 of mantissa) and `int8` divide each token's state by a scale that
puts its largest value at the end of the range. What comes back is off by at most

    float8: |x| / 16, or scale / 1024 where that is more          scale = largest |x| of the token / 448
    int8:   scale / 2                                             scale = largest |x| of the token / 127

and by the rounding to the target's dtype. Residual streams have a few channels hundreds of times larger than the rest: float8 keeps
four bits of the small ones all the same, int8 rounds many of them to 0.

Letters: T positions (any leading dimensions), D width.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Name = Literal["target", "float8", "int8"]

EIGHT_BITS: dict[str, tuple[torch.dtype, float]] = {"float8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Type of the codes and the largest of them."""
FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Of each code; on a CPU looking them up is six times as fast as torch's conversion."""


MEASURED = (
    "on SmolLM2 it cost EAGLE-3 no acceptance that could be measured: tau 1.37 with float8 or int8, 1.36 with target"
)
"""What eight bits cost (docs/data_store.md)."""


class Coded(NamedTuple):
    """States as they are stored.

    Attributes:
        codes_TD: in the target's dtype, or eight bits each.
        scale_T: fp32, what the codes are multiplied by; None where they are the values themselves.
    """

    codes_TD: Tensor
    scale_T: Tensor | None


def encode(states_TD: Tensor, name: Name) -> Coded:
    """Finite states to codes."""
    if name == "target":
        return Coded(states_TD, None)
    code_type, largest = EIGHT_BITS[name]
    wide_TD = states_TD.float()
    scale_T = (wide_TD.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled_TD = wide_TD / scale_T[..., None]
    return Coded((scaled_TD.round() if name == "int8" else scaled_TD).to(code_type), scale_T)


def decode(coded: Coded, dtype: torch.dtype) -> Tensor:
    """Codes to states in the target's dtype."""
    if coded.scale_T is None:
        return coded.codes_TD
    codes_TD = coded.codes_TD
    if codes_TD.dtype == torch.float8_e4m3fn:
        index = codes_TD.view(torch.uint8).flatten().int()
        wide_TD = FLOAT8_VALUES.to(codes_TD.device).index_select(0, index).view(codes_TD.shape)
    else:
        wide_TD = codes_TD.float()
    return (wide_TD * coded.scale_T[..., None]).to(dtype)


def types(name: Name, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype | None]:
    """Of the codes and of the scale."""
    return (dtype, None) if name == "target" else (EIGHT_BITS[name][0], torch.float32)
