"""Starting values by ridge regression: where the target's state will be, as a linear map of where it is.

A head that starts as a copy of the target's predicts the *next* token, one that has to look further starts far off and
spends its first steps on what a linear map already knows. With h_p the state after the target's final norm at position p,

    A_k = argmin_A  Σ_p |A x_p - h_(p + k)|² + Σ_i λ_i |A_i - 1_i|²,   λ_i = RIDGE · mean square of x_i · number of p

is the best linear guess of the state k places later, in closed form and in one pass over a few batches. x_p is h_p, and for heads
that see tokens their embeddings behind it; A_i is what A makes of part i of x, 1_i the identity for h_p and 0 for the rest. The
target's head behind it, U A_k, guesses the token that follows there (linear short cuts inside a transformer predict later tokens
well: Din et al. 2023, arXiv 2303.09435; Pal et al. 2023, arXiv 2311.04897).

Letters: J depths, B sequences, T positions, n rows, D width, I input width, P tokens.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.starts import Starts, trained_starts

RIDGE = 1e-3


def later_states(
    batches: Iterable[TrainingBatch], depth: int, width: int, embed: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """The maps A_1 to A_depth, fp32 (D, I) each, from all starts at which a draft depth is trained.

    Without a batch they are the identity (on h_p), towards which λ pulls.

    Args:
        batches: what they are fitted to.
        depth: how many maps.
        width: D.
        embed: embeddings (…, D) of ids (…). With it map k also reads tokens p + 1 to p + k: I = (k + 1) D, otherwise D.
    """
    inputs = [width * (1 if embed is None else k + 2) for k in range(depth)]
    squares = [torch.zeros(size, size) for size in inputs]
    products = [torch.zeros(width, size) for size in inputs]
    with torch.no_grad():
        for batch in batches:
            last_BTD = batch.last_BTD.float()
            squares, products = ([x.to(last_BTD.device) for x in sums] for sums in (squares, products))
            for j, starts_BT in enumerate(trained_starts(batch, depth)):
                starts = Starts.where(batch, starts_BT)
                here_nI, later_nD = starts.pick(last_BTD), starts.pick(last_BTD, j + 1)
                if embed is not None:
                    embedded_nPD = embed(starts.paths(j + 1))
                    here_nI = torch.cat([here_nI, embedded_nPD.flatten(1).float()], 1)
                squares[j] += here_nI.T @ here_nI
                products[j] += later_nD.T @ here_nI
    return [_solve(square, product) for square, product in zip(squares, products, strict=True)]


def _solve(square_II: Tensor, product_DI: Tensor) -> Tensor:
    """(product + λ 1) (square + λ)⁻¹; the identity where nothing was seen."""
    width, size = product_DI.shape
    identity_DI = torch.eye(width, size, dtype=torch.float64, device=square_II.device)
    pull_I = RIDGE * square_II.diagonal().double().unflatten(0, (-1, width)).mean(1).repeat_interleave(width)
    if not pull_I.any():
        return identity_DI.float()
    right_DI = product_DI.double() + identity_DI * pull_I
    return torch.linalg.solve(square_II.double() + pull_I.diag(), right_DI, left=False).float()
