"""Penalties worked by hand, processors along drafted paths, and what is never asked of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.tree import Tree, chain, fixed
from draftsmith.inference.penalties import Prefix, constrain, penalise, run
from draftsmith.inference.sampling import Sampler

CHAIN = fixed(chain(2).parents)


def prefix(ids_BR: list[list[int]], tree: Tree = CHAIN, **changes: Any) -> Prefix:
    """One sequence: prompt 0 1, output 2 2 by default."""
    settings: dict[str, Any] = {"prompts": [[0, 1]], "outputs": [[2, 2]]}
    return Prefix(ids_BR=torch.tensor(ids_BR), tree=tree, **(settings | changes))


def test_penalties_worked_by_hand_along_a_chain() -> None:
    """Prompt 0 1, output 2 2, drafted 3 then 2. Repetition 2 halves 4 and doubles -4; presence 1 and frequency 0.5 leave the
    prompt alone; each row counts what is drafted up to it."""
    scores = torch.tensor([4.0, -4.0, 4.0, -4.0, 4.0]).expand(1, 3, 5)
    law = penalise(scores, prefix([[2, 3, 2]]), repetition=2.0, presence=0.0, frequency=0.0)
    assert law[0].tolist() == [[2, -8, 2, -4, 4], [2, -8, 2, -8, 4], [2, -8, 2, -8, 4]]
    law = penalise(scores, prefix([[2, 3, 2]]), repetition=1.0, presence=1.0, frequency=0.5)
    assert law[0].tolist() == [[4, -4, 2, -4, 4], [4, -4, 2, -5.5, 4], [4, -4, 1.5, -5.5, 4]]
    law = penalise(scores, prefix([[2, 3, 2]]), repetition=2.0, presence=1.0, frequency=0.5)
    assert law[0, 2].tolist() == [2, -8, -0.5, -9.5, 4]  # repetition first


def test_branches_do_not_see_each_other() -> None:
    """3 and 4 are siblings, 0 hangs under 4: the row of 3 has not seen 4, that of 0 has seen 4 but not 3."""
    law = penalise(torch.zeros(1, 4, 5), prefix([[2, 3, 4, 0]], fixed((-1, -1, 1))), 1.0, 1.0, 0.0)
    assert (law[0] < 0).int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [1, 0, 1, 0, 1]]


def test_an_empty_output_and_ids_beyond_the_head_are_fine() -> None:
    """Padded embeddings have ids that the head lacks; as in transformers they are not penalised."""
    scores = torch.ones(1, 1, 3)
    before = prefix([[0]], fixed(()), prompts=[[1, 7]], outputs=[[]])
    assert penalise(scores, before, 2.0, 1.0, 1.0).tolist() == [[[1, 0.5, 1]]]


def test_sequences_of_other_lengths_do_not_change_a_law() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 8)
    both = Prefix([[0, 1], [5] * 40], [[2, 2], [6] * 9], torch.tensor([[2, 3, 2], [6, 6, 7]]), CHAIN)
    for row in range(2):
        alone = penalise(scores[row : row + 1], both.select([row]), 1.3, 0.2, 0.1)
        assert torch.equal(penalise(scores, both, 1.3, 0.2, 0.1)[row : row + 1], alone)


def test_a_selected_prefix_keeps_the_trees_of_its_sequences() -> None:
    tree = Tree(torch.tensor([[-1, 0], [-1, -1], [-1, 0]]), 2)
    whole = Prefix([[1], [2], [3]], [[4], [5], []], torch.arange(9).view(3, 3), tree, [True, False, True])
    part = whole.select([2, 1])
    assert (part.prompts, part.outputs, part.live) == ([[3], [2]], [[], [5]], [True, False])
    assert part.ids_BR.tolist() == [[6, 7, 8], [3, 4, 5]] and part.tree.parents_bN.tolist() == [[-1, 0], [-1, -1]]
    assert prefix([[2, 3, 2]]).select([0]).tree is CHAIN


def test_processors_see_every_path_once_grouped_by_depth() -> None:
    seen: list[list[list[int]]] = []

    def spy(ids_ML: Tensor, scores_MV: Tensor) -> Tensor:
        assert ids_ML.dtype == torch.int64 and len(ids_ML) == len(scores_MV)
        seen.append(ids_ML.tolist())
        return scores_MV

    run([spy], torch.zeros(1, 5, 6), prefix([[2, 3, 4, 5, 0]], fixed((-1, -1, 1, 0))))
    context = [0, 1, 2, 2]
    assert seen == [[context], [context + [3], context + [4]], [context + [4, 5], context + [3, 0]]]


def test_a_processor_that_writes_in_place_changes_its_own_rows_only() -> None:
    def ban_next(ids_ML: Tensor, scores_MV: Tensor) -> Tensor:
        scores_MV[:, :] += 1
        return scores_MV.scatter_(1, (ids_ML[:, -1:] + 1) % 6, -math.inf)

    logits = torch.arange(18.0).view(1, 3, 6)
    for sampler in (Sampler(1.0, processors=(ban_next,)), Sampler(0.0, processors=(ban_next,))):
        law = sampler.log_probs(logits, prefix([[2, 4, 2]])).exp()
        assert torch.equal(logits, torch.arange(18.0).view(1, 3, 6))
        assert [row.index(0.0) for row in law[0].tolist()] == ([3, 5, 3] if not sampler.greedy else [0, 0, 0])
        if sampler.greedy:
            assert law[0].argmax(-1).tolist() == [5, 4, 5]


def test_below_a_banned_token_nothing_is_asked_and_the_law_stays_finite() -> None:
    """3 is not allowed at the root, so the path 3 4 does not exist; 1 5 does, and 1 4 ends at 4."""
    asked: list[list[int]] = []

    def allowed(ids: list[int]) -> list[int]:
        asked.append(ids)
        return [1, 5] if ids[-1] == 2 else [5]

    tree = fixed((-1, 0, -1, 2, 2, 4))
    law = Sampler(1.0, allowed=allowed).log_probs(torch.zeros(1, 7, 6), prefix([[2, 3, 4, 1, 5, 4, 5]], tree)).exp()
    context = [0, 1, 2, 2]
    assert asked == [context, context + [1], context + [1, 5]]
    assert law[0, 0].tolist() == pytest.approx([0, 0.5, 0, 0, 0, 0.5])
    assert law[0, 3].tolist() == law[0, 4].tolist() == [0, 0, 0, 0, 0, 1]
    torch.testing.assert_close(law[0, [1, 2, 5, 6]], torch.full((4, 6), 1 / 6))


def test_no_token_left_is_an_error_at_the_root_and_no_matter_below() -> None:
    """A grammar has nothing to say behind an end-of-sequence token (5), nor below."""
    asked: list[list[int]] = []

    def allowed(ids: list[int]) -> list[int]:
        asked.append(ids)
        return [] if 5 in ids else [4, 5]

    sampler = Sampler(1.0, allowed=allowed)
    law = sampler.log_probs(torch.zeros(1, 3, 6), prefix([[2, 5, 4]])).exp()
    assert law[0].tolist() == [
        pytest.approx([0, 0, 0, 0, 0.5, 0.5]),
        pytest.approx([1 / 6] * 6),
        pytest.approx([1 / 6] * 6),
    ]
    assert asked == [[0, 1, 2, 2], [0, 1, 2, 2, 5]]
    ended = prefix([[5, 4, 4]], outputs=[[2, 5]])
    with pytest.raises(
        ValueError, match=r"no token is left behind 4 tokens \(the last ones: \[0, 1, 2, 5\]\): allowed, "
    ):
        sampler.log_probs(torch.zeros(1, 3, 6), ended)


def test_a_sequence_that_has_ended_is_not_looked_at() -> None:
    def never(ids: list[int]) -> list[int]:
        raise AssertionError(ids)

    dead = prefix([[5, 4, 4]], live=[False])
    law = Sampler(1.0, allowed=never).log_probs(torch.zeros(1, 3, 6), dead)
    assert law.isfinite().all()


def test_allowed_tokens_without_mass_are_equally_likely() -> None:
    """As in transformers: what must be said is said, whatever else bans it."""
    scores = torch.tensor([[1.0, -math.inf, -math.inf, 2.0]])
    assert constrain(lambda ids: [1, 2])(torch.tensor([[0]]), scores).tolist() == [[-math.inf, 0, 0, -math.inf]]
    assert constrain(lambda ids: [2, 3])(torch.tensor([[0]]), scores).tolist() == [[-math.inf] * 3 + [2]]


@pytest.mark.parametrize("token", [6, -1])
def test_allowed_tokens_beyond_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"allowed named token ids from .* to .*; the target has 0 to 5"):
        Sampler(1.0, allowed=lambda ids: [0, token]).log_probs(torch.zeros(1, 3, 6), prefix([[2, 3, 4]]))


@pytest.mark.parametrize(
    "broken, what",
    [(lambda ids, scores: None, "type NoneType"), (lambda ids, scores: scores[0], r"shape \(6,\)")],
)
def test_a_processor_that_returns_no_scores_is_refused(broken: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"the logits processor .* returned {what}; return scores of shape \(1, 6\)"):
        Sampler(1.0, processors=(broken,)).log_probs(torch.zeros(1, 3, 6), prefix([[2, 3, 4]]))


def test_repeated_ngrams_are_banned_across_prompt_output_and_draft() -> None:
    """0 1 2 2, then 0 drafted: behind it 1 would repeat "0 1" of the prompt; behind "0 2" the pair "2 2" would repeat."""
    law = Sampler(1.0, no_repeat_ngram=2).log_probs(torch.zeros(1, 3, 6), prefix([[2, 0, 2]])).exp()
    assert [[token for token in range(6) if row[token] == 0] for row in law[0].tolist()] == [[2], [1], [0, 2]]


def test_a_bad_word_and_a_bias_of_several_tokens_act_on_the_last() -> None:
    """Bad is 2 3, and 1 4 is worth log 3 more: 3 is banned behind 2, and behind a drafted 1 token 4 has 3 of 8 parts."""
    sampler = Sampler(1.0, bad_words=((2, 3),), logit_bias=(((1, 4), math.log(3)),))
    law = sampler.log_probs(torch.zeros(1, 3, 6, dtype=torch.float64), prefix([[2, 1, 4]])).exp()
    assert law[0].tolist() == [
        pytest.approx([0.2, 0.2, 0.2, 0, 0.2, 0.2]),
        pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 8, 3 / 8, 1 / 8]),
        pytest.approx([1 / 6] * 6),
    ]
