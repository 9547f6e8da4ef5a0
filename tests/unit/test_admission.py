"""Rows that come and go: waiting prompts take over free rows, and no sequence notices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith import drafters
from draftsmith.drafters.tree import Dynamic, Fixed, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

torch.manual_seed(0)
PROMPTS = [torch.randint(3, 64, (length,)).tolist() for length in (4, 1, 11, 2, 3, 7, 5)]
BUDGETS = [9, 1, 14, 5, 2, 20, 3]
SAMPLERS = [Sampler(t, *more) for t, *more in ((0.0,), (1.0,), (0.7, 10), (0.0,), (1.3, None, 0.9), (1.0,), (0.0,))]
SEEDS = [7, 7, 1, 2, 3, 4, 5]


def decode(target: Any, chosen: list[int], **options: Any) -> list[Output]:
    return generate(
        target,
        [PROMPTS[i] for i in chosen],
        max_new=[BUDGETS[i] for i in chosen],
        sampler=[SAMPLERS[i] for i in chosen],
        seeds=[SEEDS[i] for i in chosen],
        stop_at_eos=False,
        log_probs=True,
        **options,
    )


@pytest.mark.parametrize("max_batch", [1, 2, 3, None])
@pytest.mark.parametrize("plan", [None, chain(3), Fixed((-1, -1, 0, 0, 1)), Dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize("kind", drafters.kinds())
def test_a_sequence_is_the_same_alone_and_among_others_that_come_and_go(
    toy: SimpleNamespace, max_batch: int | None, plan: Any, kind: str
) -> None:
    """Every prompt has its own budget, settings and seed; the outputs equal plain decoding of each prompt alone."""
    target = toy.make_target("llama")
    drafter = toy.make_drafter(kind, target)
    speculation = None if plan is None else Speculation(drafter, plan)
    together = decode(target, list(range(7)), max_batch=max_batch, speculation=speculation)
    for i, output in enumerate(together):
        alone = decode(target, [i])[0]
        assert output.ids == alone.ids and len(output.ids) == BUDGETS[i]
        assert output.log_probs == pytest.approx(alone.log_probs, abs=1e-9)
        assert 1 + sum(r.committed for r in output.rounds) == len(output.ids)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_other_rules_give_a_sequence_what_it_gets_alone(toy: SimpleNamespace, rule: str) -> None:
    """Their noise is keyed by seed and position, so that not even these depend on the batch."""
    target = toy.make_target("llama")
    speculation = Speculation(toy.make_drafter("eagle3", target), chain(3), rule)
    together = decode(target, list(range(7)), max_batch=3, speculation=speculation)
    for i, output in enumerate(together):
        assert output.ids == decode(target, [i], speculation=speculation)[0].ids


def test_several_samples_of_a_prompt_differ_by_their_seeds(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    outputs = generate(
        target, [PROMPTS[0]] * 4, max_new=12, sampler=Sampler(1.0), seeds=[1, 2, 1, 3], stop_at_eos=False
    )
    assert outputs[0].ids == outputs[2].ids
    assert len({tuple(output.ids) for output in outputs}) == 3


def test_the_drafter_s_limit_ends_drafting_and_not_the_text(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama")
    drafter = toy.make_drafter("eagle3", target)
    drafter.max_positions = 16
    plain = decode(target, [0, 2, 5])
    outputs = decode(target, [0, 2, 5], speculation=Speculation(drafter, chain(3)))
    assert [output.ids for output in outputs] == [output.ids for output in plain]
    drafted = [[r.proposed for r in output.rounds] for output in outputs]
    assert drafted[2][0] == 3 and drafted[2][-1] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new": [3, 4]}, "2 budgets for 3 prompts"),
        ({"max_new": [3, 0, 3]}, "max_new is 0"),
        ({"sampler": [Sampler()]}, "1 samplers for 3 prompts"),
        ({"seeds": [1]}, "1 seeds for 3 prompts"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_new": [3, 300, 3]}, "a prompt of 1 tokens and 300 new ones exceed the target's 256 positions"),
    ],
)
def test_wrong_counts_are_refused(toy: SimpleNamespace, options: dict[str, Any], message: str) -> None:
    arguments = {"max_new": 4, "sampler": Sampler(), **options}
    with pytest.raises(ValueError, match=message):
        generate(toy.make_target(), PROMPTS[:3], **arguments)
