"""Which cache slots a new row of the target sees, and the mask in the form that its modelling code takes.

Letters: B sequences, R rows given to the target (root first), S cache slots.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.tree import Tree
from draftsmith.inference.architecture import setting


def visible(index_BR: Tensor, extent: int, tree: Tree) -> tuple[Tensor, Tensor]:
    """Which cache slots each new row sees, bool (B, R, S), and the position of the token in each slot, int64 (B, S)."""
    batch, num_rows = index_BR.shape
    behind_BS = torch.arange(extent, device=index_BR.device) - index_BR[:, :1]
    new_BS = behind_BS.clamp(0, num_rows - 1)  # which new row a slot holds, where it holds one
    fresh_BS = (behind_BS >= 0) & (behind_BS < num_rows)
    ancestors_BRR = tree.ancestors_bRR.expand(batch, -1, -1)
    seen_BRS = ancestors_BRR.gather(2, new_BS[:, None].expand(-1, num_rows, -1)) & fresh_BS[:, None]
    depth_BS = torch.where(fresh_BS, tree.depth_bR.expand(batch, -1).gather(1, new_BS), behind_BS)
    return (behind_BS < 0)[:, None] | seen_BRS, index_BR[:, :1] + depth_BS


def attention_mask(
    config: Any, dtype: torch.dtype, mask_BRS: Tensor, positions_BR: Tensor, key_positions_BS: Tensor
) -> Any:
    """The mask as the model takes it: bool or additive, and one per layer type where types differ.

    Args:
        config: of the model, whose sliding window counts positions.
        dtype: of an additive mask.
        mask_BRS: bool, what each row may see.
        positions_BR: of the rows.
        key_positions_BS: of the tokens in the slots.
    """
    window = setting(config, "sliding_window")
    types = set(setting(config, "layer_types") or ())
    if setting(config, "use_sliding_window") is False:
        window = None
    full = _typed(config, dtype, mask_BRS[:, None])
    if window is None:
        return full if not types or types == {"full_attention"} else dict.fromkeys(types, full)
    near_BRS = positions_BR[..., None] - key_positions_BS[:, None] < window
    sliding = _typed(config, dtype, (mask_BRS & near_BRS)[:, None])
    if types == {"full_attention", "sliding_attention"}:
        return {"full_attention": full, "sliding_attention": sliding}
    return full if types == {"full_attention"} else sliding


def _typed(config: Any, dtype: torch.dtype, seen: Tensor) -> Tensor:
    """Bool, or additive for eager attention."""
    if config._attn_implementation != "eager":
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
