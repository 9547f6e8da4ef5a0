"""What a law owes to the tokens before it: penalties on repeats, and logits processors run along every drafted path.

Row r of the target's logits is about the token behind row r, so its history is the prompt, the output and the drafted tokens on
the path to row r. A law is exact only if every row is given its own history; nothing here may be broadcast over rows.

Rows that cannot be reached are left as they are: below a drafted token that its parent's row gives no mass, and below a row on
which no token is left. Their law is never used, and a grammar is not asked about a text that it has ruled out.

Letters: B sequences, N drafted nodes, R = N + 1 rows (root first), L tokens of a history, M rows of one depth, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.tree import Tree

Processor = Callable[[Tensor, Tensor], Tensor]
"""As Hugging Face's LogitsProcessor: (ids (M, L) int64, scores (M, V)) -> scores (M, V). The rows are histories of one length,
in no fixed place of any batch, so it must work from the ids alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before each row of a batch.

    Attributes:
        prompts: token ids of each sequence.
        outputs: committed new tokens of each sequence, the root being the last; empty where the row is about the first of them.
        ids_BR: int64, the rows that the target read, root first. The root's own entry is not looked at.
        tree: the shape of the rows.
        live: False for a sequence that has ended and whose law nobody will use; None means that all are live.
    """

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]
    ids_BR: Tensor
    tree: Tree
    live: Sequence[bool] | None = None

    def select(self, rows: Sequence[int]) -> "Prefix":
        """The prefix of some of the sequences, in that order."""
        index, tree = torch.tensor(rows, device=self.ids_BR.device), self.tree
        if len(tree.parents_bN) > 1:
            tree = Tree(tree.parents_bN[index], tree.depth, tree.is_chain)
        prompts, outputs = ([each[row] for row in rows] for each in (self.prompts, self.outputs))
        live = None if self.live is None else [self.live[row] for row in rows]
        return Prefix(prompts, outputs, self.ids_BR[index], tree, live)


def penalise(scores_BRV: Tensor, prefix: Prefix, repetition: float, presence: float, frequency: float) -> Tensor:
    """Penalties on tokens that have occurred, new tensor (B, R, V).

    Args:
        scores_BRV: floating point, untouched.
        prefix: the tokens before each row.
        repetition: divides positive scores of tokens in prompt or output, multiplies negative ones (Keskar et al. 2019,
            arXiv 1909.05858; as Hugging Face).
        presence: subtracted once for a token in the output (as OpenAI and vLLM).
        frequency: subtracted for every occurrence in the output (as OpenAI and vLLM).
    """
    vocab_size = scores_BRV.shape[-1]
    counts_BRV = _count(prefix.outputs, scores_BRV)[:, None].expand(-1, scores_BRV.shape[1], -1)
    if prefix.tree.num_nodes:
        on_path_BRN = prefix.tree.ancestors_bRR[..., 1:].expand(len(scores_BRV), -1, -1)
        ids_BRN = prefix.ids_BR[:, None, 1:].clamp(max=vocab_size).expand_as(on_path_BRN)
        counts_BRV = counts_BRV.scatter_add(2, ids_BRN, on_path_BRN.to(scores_BRV.dtype))
    counts_BRV = counts_BRV[..., :vocab_size]
    if repetition != 1:
        seen_BRV = (counts_BRV > 0) | (_count(prefix.prompts, scores_BRV)[:, None, :vocab_size] > 0)
        lower_BRV = torch.where(scores_BRV < 0, scores_BRV * repetition, scores_BRV / repetition)
        scores_BRV = torch.where(seen_BRV, lower_BRV, scores_BRV)
    if presence or frequency:
        occurred_BRV = (counts_BRV > 0).to(scores_BRV.dtype)
        scores_BRV = scores_BRV - presence * occurred_BRV - frequency * counts_BRV
    return scores_BRV


def _count(sequences: Sequence[Sequence[int]], like_BRV: Tensor) -> Tensor:
    """How often each token occurs, (B, V + 1); the last column takes padding and ids that the head does not have."""
    vocab_size = like_BRV.shape[-1]
    longest = max(map(len, sequences))
    ids_BL = torch.tensor([[*ids, *[vocab_size] * (longest - len(ids))] for ids in sequences], dtype=torch.int64)
    ids_BL = ids_BL.clamp(max=vocab_size).to(like_BRV.device)
    counts_BV = like_BRV.new_zeros(len(sequences), vocab_size + 1)
    return counts_BV.scatter_add(1, ids_BL, torch.ones_like(ids_BL, dtype=like_BRV.dtype))


def run(processors: Sequence[Processor], scores_BRV: Tensor, prefix: Prefix) -> Tensor:
    """Applies processors in turn, to every row with its own history, parents before children; a new tensor (B, R, V).

    A drafted row on which they leave no token keeps its scores: plain decoding may never come there (a grammar has nothing to
    say behind an end-of-sequence token).

    Raises:
        ValueError: no token is left at a root, or a processor returned something else than scores.
    """
    scores_BRV = scores_BRV.clone()
    parents_bN: list[list[int]] = prefix.tree.parents_bN.tolist()
    tokens_BR: list[list[int]] = prefix.ids_BR.tolist()
    for b in range(len(scores_BRV)):
        if prefix.live is None or prefix.live[b]:
            parents = parents_bN[b if len(parents_bN) > 1 else 0]
            context = [*prefix.prompts[b], *prefix.outputs[b]]
            _run_one(processors, scores_BRV[b], context, tokens_BR[b], parents)
    return scores_BRV


def _run_one(
    processors: Sequence[Processor], scores_RV: Tensor, context: list[int], tokens: list[int], parents: list[int]
) -> None:
    """`run` for one sequence, depth by depth and in place."""
    depth, level = 0, {0: context}
    while level:
        rows = torch.tensor([*level], device=scores_RV.device)
        ids_ML = torch.tensor([*level.values()], dtype=torch.int64, device=scores_RV.device)
        scores_MV = scores_RV[rows]  # a copy: processors may write in place
        for processor in processors:
            scores_MV = _checked(processor, processor(ids_ML, scores_MV), scores_RV[rows])
        empty_M = scores_MV.isneginf().all(-1)
        empty = empty_M.tolist()
        if depth == 0 and empty[0]:
            raise ValueError(
                f"no token is left behind {len(context)} tokens (the last ones: {context[-8:]}): allowed, bad_words, "
                "no_repeat_ngram, logit_bias and processors rule out all of them; loosen one"
            )
        scores_RV[rows] = torch.where(empty_M[:, None], scores_RV[rows], scores_MV)
        open_rows = {row for row, nothing in zip(level, empty, strict=True) if not nothing}
        children = [node + 1 for node, parent in enumerate(parents) if parent + 1 in open_rows]
        ups = [parents[row - 1] + 1 for row in children]
        banned = scores_RV[ups, [tokens[row] for row in children]].isneginf().tolist() if children else []
        level = {row: [*level[up], tokens[row]] for row, up, out in zip(children, ups, banned, strict=True) if not out}
        depth += 1


def _checked(processor: Processor, result: Any, before_MV: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != before_MV.shape:
        what = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"type {type(result).__name__}"
        raise ValueError(
            f"the logits processor {processor!r} returned {what}; return scores of shape {tuple(before_MV.shape)}"
        )
    return result.to(before_MV.dtype)


def constrain(allowed: Callable[[list[int]], Sequence[int]]) -> Processor:
    """The processor that keeps the tokens which `allowed` names for each history, as Hugging Face's
    PrefixConstrainedLogitsProcessor: if those have no mass they are equally likely."""

    def processor(ids_ML: Tensor, scores_MV: Tensor) -> Tensor:
        vocab_size, mask_MV = scores_MV.shape[-1], torch.full_like(scores_MV, -math.inf)
        for row, history in enumerate(ids_ML.tolist()):
            tokens = torch.as_tensor(allowed(history), dtype=torch.int64, device="cpu")
            if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                raise ValueError(
                    f"allowed named token ids from {int(tokens.min())} to {int(tokens.max())}; "
                    f"the target has 0 to {vocab_size - 1}"
                )
            mask_MV[row, tokens.to(scores_MV.device)] = 0
        kept_MV = scores_MV + mask_MV
        return torch.where(kept_MV.amax(-1, keepdim=True).isneginf(), mask_MV, kept_MV)

    return processor
