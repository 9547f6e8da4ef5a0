"""Starting values by ridge regression: where the target's state will be, as a linear map of where it is.

A head that starts as a copy of the target's predicts the *next* token, one that has to look further starts far off and
spends its first steps on what a linear map already knows. With h_p the state after the target's final norm at position p,

    A_k = argmin_A  Σ_p |A h_p - h_(p + k)|² + λ |A - 1|²,      λ = RIDGE · mean of the squared entries · number of p

is the best linear guess of the state k places later, in closed form and in one pass over a few batches. The target's head
behind it, U A_k, guesses the token that follows there (linear short cuts inside a transformer predict later tokens well: Din et al.
2023, arXiv 2303.09435; Pal et al. 2023, arXiv 2311.04897).

Letters: B sequences, T positions, n rows, D width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainingBatch
from draftsmith.drafters.losses import trained_starts

RIDGE = 1e-3


def later_states(batches: Iterable[TrainingBatch], depth: int, width: int) -> list[Tensor]:
    """The maps A_1 to A_depth, fp32 (D, D) each, from all starts at which a draft depth is trained.

    Without a batch they are the identity, towards which λ pulls.
    """
    squares_JDD, products_JDD = torch.zeros(2, depth, width, width)
    with torch.no_grad():
        for batch in batches:
            last_BTD = batch.last_BTD.float()
            squares_JDD, products_JDD = squares_JDD.to(last_BTD.device), products_JDD.to(last_BTD.device)
            for j, starts_BT in enumerate(trained_starts(batch, depth)):
                rows_n, columns_n = starts_BT.nonzero(as_tuple=True)
                here_nD, later_nD = last_BTD[rows_n, columns_n], last_BTD[rows_n, columns_n + j + 1]
                squares_JDD[j] += here_nD.T @ here_nD
                products_JDD[j] += later_nD.T @ here_nD
    return [_solve(square, product) for square, product in zip(squares_JDD, products_JDD, strict=True)]


def _solve(square_DD: Tensor, product_DD: Tensor) -> Tensor:
    """(product + λ) (square + λ)⁻¹; the identity where nothing was seen."""
    identity_DD = torch.eye(len(square_DD), dtype=torch.float64, device=square_DD.device)
    pull_DD = RIDGE * square_DD.diagonal().double().mean() * identity_DD
    if not pull_DD.any():
        return identity_DD.float()
    return torch.linalg.solve(square_DD.double() + pull_DD, product_DD.double() + pull_DD, left=False).float()
