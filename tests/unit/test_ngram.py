"""Prompt lookup: proposals against a search through the whole text, and the tokens of plain decoding."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.ngram import NGram, Text
from draftsmith.drafters.texts import State
from draftsmith.drafters.tree import Fixed, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8, 5, 6], [9], [10, 11, 12, 13, 10, 15, 16, 10, 11, 19, 20], [21, 22], [30, 30, 30]]
SEEDS = [3, 141, 59, 26, 5]


def searched(ids: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """The same by going through the whole text: what stood behind the latest earlier occurrence, as if it went on for ever."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):  # the occurrence is ids[end - n : end], something follows it
            if n < len(ids) and ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for i in range(count):
                    text.append(text[end + i])
                return text[len(ids) :]
    return [ids[-1]] * count


@pytest.mark.parametrize("longest, shortest", [(3, 1), (1, 1), (4, 2)])
def test_proposals_are_those_of_a_search_through_the_whole_text(longest: int, shortest: int) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        text, ids = Text(range(shortest, longest + 1)), []
        for _ in range(40):
            token = draw.randrange(2 + seed % 5)
            text.append(token)
            ids.append(token)
            assert text.continuation(5) == searched(ids, 5, longest, shortest)


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 8, 2, 9, 1, 2], [8, 2, 9, 1]),  # the longer n-gram wins over the later one
        ([2, 8, 2, 9, 3, 2], [9, 3, 2, 9]),  # of equal ones the later; the match goes on into its own draft
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], [3, 3, 3, 3]),  # no match
        ([7], [7, 7, 7, 7]),
    ],
)
def test_worked_examples(ids: list[int], expected: list[int]) -> None:
    drafter = NGram()
    ids_BC = torch.tensor([[*ids[:-1], 0]]) if len(ids) > 1 else torch.zeros(1, 1, dtype=torch.int64)
    state = drafter.init(1, 20)
    if len(ids) > 1:
        state = drafter.observe(state, ids_BC, torch.zeros(1, 1, 0), torch.tensor([ids[-1]]), [len(ids) - 1])
    else:
        state.texts[0].append(ids[0])
    proposal = drafter.propose(state, chain(4), None)  # type: ignore[arg-type]
    assert proposal.tokens_BN.tolist() == [expected] and proposal.drawn == "fixed" and proposal.tree.is_chain


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [1, 4])
def test_tokens_are_those_of_plain_decoding(toy: SimpleNamespace, sampler: Sampler, depth: int) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    for rows in ([0, 1, 2, 3, 4], [1]):
        options: dict[str, Any] = {"max_new": 40, "sampler": sampler, "seeds": [SEEDS[row] for row in rows]}
        prompts = [PROMPTS[row] for row in rows]
        plain = generate(target, prompts, stop_at_eos=False, **options)
        speculation = Speculation(NGram(), chain(depth))
        outputs = generate(target, prompts, stop_at_eos=False, speculation=speculation, **options)
        assert [output.ids for output in outputs] == [output.ids for output in plain]


@pytest.mark.parametrize("rule, way", [("ratio", "argmax"), ("point_mass", None)])
def test_other_rules_that_take_fixed_drafts_verify_it(toy: SimpleNamespace, rule: str, way: str | None) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    speculation = Speculation(NGram(), chain(3), rule, way)
    outputs = generate(target, PROMPTS, max_new=20, sampler=Sampler(0.7), speculation=speculation, stop_at_eos=False)
    assert all(len(output.ids) == 20 for output in outputs)


def cycling(toy: SimpleNamespace, period: int) -> Any:
    """A target that counts 1, 2, …, period, 1, …: no attention, no MLP, and a head that is its embedding shifted."""
    target = toy.make_target("llama", num_hidden_layers=1)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(target.model.model.embed_tokens.weight, dim=-1)
        target.model.model.embed_tokens.weight.copy_(embedding)
        target.model.lm_head.weight.zero_()
        counted = torch.arange(1, period + 1)
        target.model.lm_head.weight[counted % period + 1] = embedding[counted]
    return target


def test_a_repetitive_text_is_accepted_in_full(toy: SimpleNamespace) -> None:
    """Two rows have seen the whole cycle in their prompt, the third has not and catches up once it has."""
    target = cycling(toy, 6)
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2], [4, 5, 6, 1, 2, 3, 4], [3]]
    plain = generate(target, prompts, max_new=21, sampler=Sampler(), stop_at_eos=False)
    assert plain[0].ids[:6] == [3, 4, 5, 6, 1, 2]
    outputs = generate(
        target, prompts, max_new=21, sampler=Sampler(), speculation=Speculation(NGram(), chain(4)), stop_at_eos=False
    )
    assert [output.ids for output in outputs] == [output.ids for output in plain]
    for output in outputs[:2]:
        assert all((r.accepted, r.committed) == (4, 5) for r in output.rounds)
    late = [r.accepted for r in outputs[2].rounds]
    assert late[0] == 0 and late[-2] == 4


def test_rows_that_leave_and_join_keep_their_own_texts(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    seen: list[State[Text]] = []

    class Spy(NGram):
        def observe(self, state: Any, *args: Any) -> State[Text]:
            seen.append(super().observe(state, *args))
            return seen[-1]

    options: dict[str, Any] = {"max_new": [12, 3, 9, 4, 12], "sampler": Sampler(0.7), "seeds": SEEDS}
    plain = generate(target, PROMPTS, stop_at_eos=False, **options)
    for max_batch in (None, 2):
        speculation = Speculation(Spy(), chain(3))
        outputs = generate(target, PROMPTS, stop_at_eos=False, speculation=speculation, max_batch=max_batch, **options)
        assert [output.ids for output in outputs] == [output.ids for output in plain]
        texts = [prompt + output.ids for prompt, output in zip(PROMPTS, plain, strict=True)]
        for state in seen:  # a text may go on where the answer was cut, never differ from it
            for text in state.texts:
                assert any(text.ids[: len(whole)] == whole[: len(text.ids)] for whole in texts)
        seen.clear()


def test_impossible_settings_are_refused() -> None:
    for longest, shortest in ((0, 0), (2, 3)):
        with pytest.raises(ValueError, match=f"min_ngram is {shortest} and max_ngram {longest}; give 1 or more"):
            NGram(longest, shortest)
    with pytest.raises(ValueError, match="this drafter proposes chains only"):
        Speculation(NGram(), Fixed((-1, -1)))
