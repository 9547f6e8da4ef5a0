"""The same seed gives the same tokens with and without speculation: every drafter kind, chains and trees, temperatures, batches.

fp64 toys, so that rounding cannot part them. The last test holds that all kinds of rounds were seen.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith import drafters
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, branching, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22], [30, 31, 32]]
SEEDS = [3, 141, 59, 26, 5]
PLANS: dict[str, Plan] = {
    "chain 1": chain(1),
    "chain 3": chain(3),
    "chain 7": chain(7),
    "static": Fixed((-1, -1, 0, 0, 1, 4, -1, 5)),
    "static, in depth order": branching([3, 2, 1]),
    "width only": Fixed((-1,) * 6),
    "dynamic": Dynamic(12, 4, 3),
    "dynamic, one node": Dynamic(1, 3, 2),
}
SAMPLERS = [Sampler(), Sampler(0.7), Sampler(1.3, None, 0.9)]
CHANGES: dict[str, dict[str, Any]] = {
    "dflash": {"layers": [1, 2]},
    "eagle3": {"layers": [1, 2]},
    "hydra": {"num_heads": 7},
    "medusa": {"num_heads": 7},
    "medusa2": {"num_heads": 7},
    "p_eagle": {"layers": [1, 2], "depth": 7},
}

ROWS = [(row, sampler) for sampler in SAMPLERS for row in range(len(PROMPTS))]

_plain: list[Output] = []
_seen: Counter[str] = Counter()


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Any:
    return toy.make_target("llama", num_hidden_layers=2)


def decode(target: Any, rows: list[tuple[int, Sampler]], speculation: Speculation | None = None) -> list[Output]:
    return generate(
        target,
        [PROMPTS[row] for row, _ in rows],
        max_new=13,
        sampler=[sampler for _, sampler in rows],
        speculation=speculation,
        seeds=[SEEDS[row] for row, _ in rows],
        stop_at_eos=False,
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", drafters.kinds())
def test_speculative_and_plain_decoding_give_the_same_tokens(
    toy: SimpleNamespace, target: Any, kind: str, plan: str
) -> None:
    """All prompts at all temperatures in one batch, and a prompt alone."""
    if not _plain:
        _plain.extend(decode(target, ROWS))
    drafter = toy.make_drafter(kind, target, **CHANGES.get(kind, {}))
    alone = len(PROMPTS) * (len(plan) % len(SAMPLERS)) + 2
    for numbers in (range(len(ROWS)), [alone]):
        outputs = decode(target, [ROWS[number] for number in numbers], Speculation(drafter, PLANS[plan]))
        assert [output.ids for output in outputs] == [_plain[number].ids for number in numbers]
        for output in outputs:
            for proposed, accepted, committed, nodes in output.rounds:
                assert accepted <= proposed <= nodes
                assert 1 <= committed <= accepted + 1
                _seen["none" if accepted == 0 else "all" if accepted == proposed else "some"] += 1


def test_rounds_accepted_nothing_something_and_everything() -> None:
    if not _seen:
        pytest.skip("counts what the tests above saw")
    assert min(_seen["none"], _seen["some"], _seen["all"]) >= 5, _seen
