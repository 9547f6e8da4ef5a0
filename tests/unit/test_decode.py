"""The decode loop: speculative decoding gives the tokens of plain decoding, for every drafter, depth, batch and sampler.

That plain decoding in turn equals transformers' `generate` is shown in tests/reference/test_generate.py.
"""

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith import drafters
from draftsmith.drafters.tree import Fixed, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output, Seconds
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22], [30, 31, 32]]
SEEDS = [3, 141, 59, 26, 5]
TREE = (-1, -1, 0, 0, 1, 4, 5)
DRAFTERS = (*drafters.kinds(), "scripted", "constant", "random")
# Every drafter with two families, every family with two drafters: what a drafter proposes does not depend on the family.
PAIRS = [
    *((family, name) for family in ("llama", "gemma2") for name in DRAFTERS),
    *((family, name) for family in ("qwen2", "qwen3", "mistral", "gemma", "gpt2") for name in ("eagle3", "scripted")),
]
SAMPLERS = [Sampler(0.7), Sampler(1.3, None, 0.9), Sampler(1.0, 10)]


def mostly_right(row: int, position: int, siblings: int) -> int:
    """Where a scripted drafter puts the true token: at four of five positions, in a tree under alternating siblings."""
    wrong = random.Random(100 * row + position).random() < 0.2
    return siblings if wrong else position % siblings


def always_right(row: int, position: int, siblings: int) -> int:
    return 0


def make(name: str, toy: SimpleNamespace, stubs: SimpleNamespace, target: Any, texts: list[list[int]]) -> Any:
    if name == "scripted":
        return stubs.Scripted(texts, mostly_right)
    if name in ("constant", "random"):
        torch.manual_seed(0)
        return {"constant": stubs.Constant, "random": stubs.Random}[name]()
    changes = {"layers": [1, 2]} if name in ("dflash", "eagle3", "p_eagle") else {}
    return toy.make_drafter(name, target, **changes)


def texts_of(outputs: list[Output], prompts: list[list[int]]) -> list[list[int]]:
    return [prompt + output.ids for prompt, output in zip(prompts, outputs, strict=True)]


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.ids for output in outputs]


def check_rounds(outputs: list[Output]) -> None:
    """Counts that any decoding must obey: the prefill's token is in no round."""
    for output in outputs:
        assert 1 + sum(committed for _, _, committed, _ in output.rounds) == len(output.ids)
        for proposed, accepted, committed, _ in output.rounds[:-1]:
            assert 0 <= accepted <= proposed and committed == accepted + 1
        for proposed, accepted, committed, _ in output.rounds[-1:]:
            assert 1 <= committed <= accepted + 1 <= proposed + 1


# ---- the same tokens ----------------------------------------------------------------------------------------------

_targets: dict[str, tuple[Any, list[Output]]] = {}
_sampled: dict[tuple[str, Sampler], list[Output]] = {}


@pytest.fixture
def greedy(toy: SimpleNamespace, family: str) -> tuple[Any, list[Output]]:
    """An fp64 target of two layers and its plain greedy answers of 14 tokens, made once per family."""
    if family not in _targets:
        target = toy.make_target(family, num_hidden_layers=2)
        _targets[family] = (target, generate(target, PROMPTS, max_new=14, sampler=Sampler(), stop_at_eos=False))
    return _targets[family]


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("family, name", PAIRS)
def test_greedy_tokens_are_those_of_plain_decoding(
    toy: SimpleNamespace, stubs: SimpleNamespace, greedy: tuple[Any, list[Output]], name: str, depth: int
) -> None:
    """fp64, a batch of five ragged prompts, and the prompt of one token alone."""
    target, plain = greedy
    for rows in ([0, 1, 2, 3, 4], [1]):
        prompts = [PROMPTS[row] for row in rows]
        drafter = make(name, toy, stubs, target, [texts_of(plain, PROMPTS)[row] for row in rows])
        outputs = generate(
            target,
            prompts,
            max_new=10,
            sampler=Sampler(),
            speculation=Speculation(drafter, chain(depth)),
            stop_at_eos=False,
        )
        assert ids(outputs) == [plain[row].ids[:10] for row in rows]
        check_rounds(outputs)
        if name == "scripted" and len(rows) == 5:  # not vacuous: no, some and all drafts accepted
            seen = {accepted for output in outputs for _, accepted, *_ in output.rounds}
            assert seen >= {0, depth} and (depth == 1 or len(seen) > 2)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("family, name", [*PAIRS, *((family, "tree") for family in ("llama", "mistral"))])
def test_the_same_seeds_give_the_same_tokens_at_any_temperature(
    toy: SimpleNamespace, stubs: SimpleNamespace, greedy: tuple[Any, list[Output]], name: str, sampler: Sampler
) -> None:
    """Keyed noise under the coupled rule: an equality of tokens, no statistics."""
    target, _ = greedy
    key = (target.config.model_type, sampler)
    if key not in _sampled:
        _sampled[key] = generate(target, PROMPTS, max_new=14, sampler=sampler, seeds=SEEDS, stop_at_eos=False)
    plain = _sampled[key]
    texts = texts_of(plain, PROMPTS)
    drafter = make("scripted" if name == "tree" else name, toy, stubs, target, texts)
    plan = Fixed(TREE) if name == "tree" else chain(4)
    outputs = generate(
        target,
        PROMPTS,
        max_new=10,
        sampler=sampler,
        speculation=Speculation(drafter, plan),
        seeds=SEEDS,
        stop_at_eos=False,
    )
    assert ids(outputs) == [output.ids[:10] for output in plain]
    assert ids(plain) != ids(_targets[target.config.model_type][1])  # it was sampled
    check_rounds(outputs)
    if name in ("scripted", "tree"):
        seen = {accepted for output in outputs for _, accepted, *_ in output.rounds}
        assert seen >= {0, 1, 2, 4}


@pytest.mark.parametrize("name", ["scripted", "tree"])
def test_greedy_trees_and_chains_equal_plain_decoding_in_fp32(
    toy: SimpleNamespace, stubs: SimpleNamespace, name: str
) -> None:
    target = toy.make_target("llama", torch.float32)
    plain = generate(target, PROMPTS, max_new=40, sampler=Sampler(), stop_at_eos=False)
    drafter = stubs.Scripted(texts_of(plain, PROMPTS), mostly_right)
    plan = Fixed(TREE) if name == "tree" else chain(4)
    outputs = generate(
        target, PROMPTS, max_new=36, sampler=Sampler(), speculation=Speculation(drafter, plan), stop_at_eos=False
    )
    assert ids(outputs) == [output.ids[:36] for output in plain]
    assert max(accepted for output in outputs for _, accepted, *_ in output.rounds) >= 3


def test_a_drafter_that_is_always_right_gives_depth_plus_one_tokens_a_round(
    toy: SimpleNamespace, stubs: SimpleNamespace
) -> None:
    target = toy.make_target("llama")
    plain = generate(target, PROMPTS, max_new=30, sampler=Sampler(), stop_at_eos=False)
    drafter = stubs.Scripted(texts_of(plain, PROMPTS), always_right)
    outputs = generate(
        target, PROMPTS, max_new=21, sampler=Sampler(), speculation=Speculation(drafter, chain(4)), stop_at_eos=False
    )
    assert all(output.rounds == [(4, 4, 5, 4)] * 4 for output in outputs)


def test_a_draft_equal_to_the_target_is_always_accepted_under_coupled_noise(
    toy: SimpleNamespace, stubs: SimpleNamespace
) -> None:
    """A bigram target (no attention, no MLP): the table of its logits is a perfect draft model."""
    target, table = bigram_target(toy)
    outputs = generate(
        target,
        PROMPTS,
        max_new=21,
        sampler=Sampler(0.9, 12, 0.95),
        speculation=Speculation(stubs.Table(table), chain(4)),
        seeds=SEEDS,
        stop_at_eos=False,
    )
    assert all(output.rounds == [(4, 4, 5, 4)] * 4 for output in outputs)


def bigram_target(toy: SimpleNamespace) -> tuple[Any, torch.Tensor]:
    target = toy.make_target("llama", num_hidden_layers=2)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    logits = target.forward(torch.arange(64)[:, None], target.new_cache(64, 1)).logits[:, 0]
    return target, logits


# ---- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, way", [("coupled", None), ("coupled", "argmax"), ("ratio", None), ("ratio", "argmax"), ("block", None)]
)
@pytest.mark.parametrize("name", ["eagle3", "table"])
def test_a_row_s_tokens_do_not_depend_on_its_neighbours(
    toy: SimpleNamespace, stubs: SimpleNamespace, name: str, rule: str, way: str | None
) -> None:
    """Alone, in the batch, and in another order; rows end at different times and leave the batch."""
    target = toy.make_target("llama", num_hidden_layers=2)
    with torch.no_grad():
        for layer in target.model.model.layers:  # the less the context says, the more often a bigram draft is right
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    table = target.forward(torch.arange(64)[:, None], target.new_cache(64, 1)).logits[:, 0]
    drafter = stubs.Table(table) if name == "table" else toy.make_drafter("eagle3", target, layers=[1, 2])

    def run(rows: list[int]) -> list[Output]:
        return generate(
            target,
            [PROMPTS[row] for row in rows],
            max_new=25,
            sampler=Sampler(0.8),
            speculation=Speculation(drafter, chain(3), rule, way),
            seeds=[SEEDS[row] for row in rows],
        )

    target.eos_ids = ()
    free = run([0, 1, 2, 3, 4])
    target.eos_ids = (free[0].ids[6], free[3].ids[12])
    together = run([0, 1, 2, 3, 4])
    assert len({len(output.ids) for output in together}) > 2
    if name == "table":
        assert {a for output in together for _, a, *_ in output.rounds} >= {0, 1}
    for row, output in enumerate(together):
        alone = run([row])[0]
        assert (alone.ids, alone.rounds, alone.finished) == (output.ids, output.rounds, output.finished)
    permuted = run([3, 1, 4, 0, 2])
    assert ids(permuted) == [together[row].ids for row in (3, 1, 4, 0, 2)]


def test_equal_prompts_and_seeds_give_equal_tokens_and_other_seeds_give_others(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    outputs = generate(target, [[5, 6]] * 4, max_new=12, sampler=Sampler(1.0), seeds=[7, 7, 8, 9], stop_at_eos=False)
    assert outputs[0].ids == outputs[1].ids
    assert len({tuple(output.ids) for output in outputs}) == 3


def test_a_finished_row_that_waits_in_the_batch_takes_no_more_room(
    toy: SimpleNamespace, stubs: SimpleNamespace
) -> None:
    """One row of five is drafted perfectly and is done long before the others, which accept nothing; it stays in the batch
    (less than a quarter is done), and must neither outgrow the cache nor disturb them."""
    target = toy.make_target("llama", num_hidden_layers=2)
    plain = generate(target, PROMPTS, max_new=90, sampler=Sampler(), stop_at_eos=False)
    drafter = stubs.Scripted(texts_of(plain, PROMPTS), lambda row, position, n: 0 if row == 2 else n)
    outputs = generate(
        target, PROMPTS, max_new=24, sampler=Sampler(), speculation=Speculation(drafter, chain(3)), stop_at_eos=False
    )
    assert ids(outputs) == [output.ids[:24] for output in plain]
    assert [len(output.rounds) for output in outputs] == [23, 23, 6, 23, 23]
    check_rounds(outputs)


# ---- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [always_right, mostly_right], ids=["all accepted", "most accepted"])
def test_an_end_of_sequence_token_in_any_slot_ends_the_row_there(
    toy: SimpleNamespace, stubs: SimpleNamespace, place: Any
) -> None:
    """Every token of the answer in turn is made the end: the first token, each drafted slot, the target's own token."""
    target = toy.make_target("llama", num_hidden_layers=2)
    prompts = [PROMPTS[0], PROMPTS[1]]
    plain = generate(target, prompts, max_new=24, sampler=Sampler(1.5), seeds=[1, 2], stop_at_eos=False)
    answer = plain[0].ids
    firsts = [i for i, token in enumerate(answer[:18]) if token not in answer[:i]]
    assert {i % 4 for i in firsts} == {0, 1, 2, 3} and 0 in firsts and len(firsts) > 8
    slots = set()
    for end in firsts:
        target.eos_ids = (answer[end],)
        drafter = stubs.Scripted(texts_of(plain, prompts), place)
        speculation = Speculation(drafter, chain(3))
        outputs = generate(target, prompts, max_new=20, sampler=Sampler(1.5), speculation=speculation, seeds=[1, 2])
        assert outputs[0].ids == answer[: end + 1]
        assert outputs[0].finished
        other = plain[1].ids[:20]
        stop = next((i for i, token in enumerate(other) if token == answer[end]), None)
        assert outputs[1].ids == (other if stop is None else other[: stop + 1])
        assert outputs[1].finished == (stop is not None)
        check_rounds(outputs)
        slots.add((outputs[0].rounds or [(0, 0, 0)])[-1][2])
        alone = generate(target, prompts, max_new=20, sampler=Sampler(1.5), seeds=[1, 2])
        assert ids(alone) == ids(outputs) and [o.finished for o in alone] == [o.finished for o in outputs]
    assert slots == {0, 1, 2, 3, 4}  # 0: the first token; 4: the token behind a fully accepted block


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_budget_is_kept_exactly(toy: SimpleNamespace, stubs: SimpleNamespace, depth: int) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    plain = generate(target, PROMPTS, max_new=20, sampler=Sampler(), stop_at_eos=False)
    for budget, place in itertools.product(range(1, depth + 3), (always_right, mostly_right)):
        drafter = stubs.Scripted(texts_of(plain, PROMPTS), place)
        outputs = generate(
            target,
            PROMPTS,
            max_new=budget,
            sampler=Sampler(),
            speculation=Speculation(drafter, chain(depth)),
            stop_at_eos=False,
        )
        assert ids(outputs) == [output.ids[:budget] for output in plain]
        assert not any(output.finished for output in outputs)
        check_rounds(outputs)


def test_an_end_of_sequence_token_behind_the_budget_is_not_seen(toy: SimpleNamespace, stubs: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    plain = generate(target, [PROMPTS[0]], max_new=20, sampler=Sampler(1.5), seeds=[1], stop_at_eos=False)
    answer = plain[0].ids
    end = next(i for i in range(2, 12) if answer[i] not in answer[:i])
    target.eos_ids = (answer[end],)
    drafter = stubs.Scripted(texts_of(plain, [PROMPTS[0]]), always_right)
    for budget, finished in ((end, False), (end + 1, True)):
        output = generate(
            target,
            [PROMPTS[0]],
            max_new=budget,
            sampler=Sampler(1.5),
            speculation=Speculation(drafter, chain(5)),
            seeds=[1],
        )[0]
        assert output.ids == answer[:budget] and output.finished == finished


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompt_and_budget_may_fill_the_target_s_positions(
    toy: SimpleNamespace, stubs: SimpleNamespace, family: str
) -> None:
    """Drafts reach beyond the last position that the target knows; GPT-2's learned positions have nothing there."""
    sizes = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
    target = toy.make_target(family, **sizes)
    assert target.shape.max_positions == 32
    plain = generate(target, PROMPTS, max_new=21, sampler=Sampler(), stop_at_eos=False)
    for place in (always_right, lambda row, position, n: 0 if row == 2 else n):
        drafter = stubs.Scripted(texts_of(plain, PROMPTS), place)
        outputs = generate(
            target,
            PROMPTS,
            max_new=21,
            sampler=Sampler(),
            speculation=Speculation(drafter, chain(5)),
            stop_at_eos=False,
        )
        assert ids(outputs) == ids(plain)


# ---- structure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
def test_a_round_costs_one_target_pass_and_one_drafter_step_per_drafted_token(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The prefill is one pass too; the drafter's step for the newest token is its observation. Rows given to the target: K + 1."""
    target = toy.make_target("llama")
    drafter = toy.make_drafter("eagle3", target)
    calls: Counter[str] = Counter()
    widths: list[int] = []

    def count(owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[method] += 1
            if method == "forward":
                widths.append(args[0].shape[1])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, counted)

    count(target, "forward")
    count(drafter, "_step")
    count(drafter, "propose")
    seconds = Seconds()
    outputs = generate(
        target,
        PROMPTS,
        max_new=8,
        sampler=Sampler(),
        speculation=Speculation(drafter, chain(depth)),
        stop_at_eos=False,
        seconds=seconds,
    )
    rounds = max(len(output.rounds) for output in outputs)
    assert seconds.rounds == rounds
    assert calls == {"forward": rounds + 1, "propose": rounds, "_step": rounds * depth + 1}
    assert widths == [11] + [depth + 1] * rounds


def test_plain_decoding_counts_one_token_a_round(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    outputs = generate(target, PROMPTS, max_new=6, sampler=Sampler(), stop_at_eos=False)
    assert all(output.rounds == [(0, 0, 1, 0)] * 5 for output in outputs)


def test_streaming_brings_every_token_once_and_in_order(toy: SimpleNamespace, stubs: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    plain = generate(target, PROMPTS, max_new=16, sampler=Sampler(1.5), stop_at_eos=False)
    target.eos_ids = (plain[1].ids[5], plain[3].ids[2])
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    drafted = [0] * len(PROMPTS)

    def on_tokens(row: int, tokens: list[int], num_drafted: int) -> None:
        assert 0 <= num_drafted <= len(tokens)
        streamed[row] += tokens
        drafted[row] += num_drafted

    outputs = generate(
        target,
        PROMPTS,
        max_new=12,
        sampler=Sampler(1.5),
        speculation=Speculation(stubs.Scripted(texts_of(plain, PROMPTS), mostly_right), chain(3)),
        on_tokens=on_tokens,
    )
    assert streamed == ids(outputs)
    assert len({len(output.ids) for output in outputs}) > 1
    assert drafted == [sum(min(a, c) for _, a, c, _ in output.rounds) for output in outputs]


def test_times_are_split_into_parts_that_are_all_counted(toy: SimpleNamespace, stubs: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    seconds = Seconds()
    generate(
        target,
        PROMPTS,
        max_new=6,
        sampler=Sampler(),
        speculation=Speculation(stubs.Constant(), chain(2)),
        seconds=seconds,
    )
    assert min(seconds.prefill, seconds.draft, seconds.verify, seconds.other) > 0
    assert seconds.decode == seconds.draft + seconds.verify + seconds.other


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, budget, seeds, message",
    [
        ([], 4, None, "every prompt needs at least one token"),
        ([[5], []], 4, None, "every prompt needs at least one token"),
        ([[5]], 0, None, "max_new is 0; give 1 or more"),
        ([[5], [6]], 4, [1], "1 seeds for 2 prompts; give one each"),
        ([[5] * 250], 7, None, "a prompt of 250 tokens and 7 new ones exceed the target's 256 positions"),
    ],
)
def test_an_impossible_request_is_refused(
    toy: SimpleNamespace, prompts: list[list[int]], budget: int, seeds: list[int] | None, message: str
) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match=message):
        generate(target, prompts, max_new=budget, sampler=Sampler(), seeds=seeds)


def test_an_impossible_speculation_is_refused(toy: SimpleNamespace, stubs: SimpleNamespace) -> None:
    medusa = toy.make_drafter("medusa", toy.make_target("llama"))
    with pytest.raises(ValueError, match="unknown verification rule 'ratios'; did you mean 'ratio'"):
        Speculation(stubs.Constant(), chain(2), "ratios")
    with pytest.raises(ValueError, match="the plan drafts nothing; give a draft depth K of 1 or more"):
        Speculation(stubs.Constant(), chain(0))
    with pytest.raises(ValueError, match="draft depth K is 6; this drafter proposes at most 5"):
        Speculation(medusa, chain(6))
    with pytest.raises(ValueError, match="unknown way of drafting 'sampel'; did you mean 'sample'"):
        Speculation(stubs.Constant(), chain(2), way="sampel")
    with pytest.raises(ValueError, match="the rule 'ratio' cannot verify a coupled chain; use 'coupled'"):
        Speculation(stubs.Constant(), chain(2), "ratio", "coupled")


def test_a_drafter_of_another_target_is_refused(toy: SimpleNamespace) -> None:
    drafter = toy.make_drafter("eagle3", toy.make_target("llama", seed=1))
    with pytest.raises(ValueError, match="this drafter was made for another target .*fingerprint"):
        generate(
            toy.make_target("llama"), PROMPTS, max_new=4, sampler=Sampler(), speculation=Speculation(drafter, chain(2))
        )


def test_a_lossy_rule_is_reported_as_such(stubs: SimpleNamespace) -> None:
    assert Speculation(stubs.Constant(), chain(2)).lossless
    assert not Speculation(stubs.Constant(), chain(2), "typical").lossless
