"""Random settings, stops, batches and drafters against plain decoding of each prompt alone.

A short profile runs here; `DRAFTSMITH_EXAMPLES=2000 pytest tests/reference/test_property.py` runs a long one.
"""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor

from draftsmith import drafters
from draftsmith.drafters.language_model import DraftLM
from draftsmith.drafters.ngram import NGram
from draftsmith.drafters.suffix import Suffix
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.target import Target

EXAMPLES = int(os.environ.get("DRAFTSMITH_EXAMPLES", "60"))
VOCAB = 320
tokens = st.integers(3, VOCAB - 1)


def even_after_odd(ids: list[int]) -> list[int]:
    """A grammar: the parity of the ids alternates."""
    return list(range(1 - ids[-1] % 2 + 2, VOCAB, 2))


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    return Sampler(
        temperature=draw(st.sampled_from([0.0, 1e-4, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([None, None, 1, 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.6])),
        min_p=draw(st.sampled_from([None, None, 0.1])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        no_repeat_ngram=draw(st.sampled_from([0, 0, 2])),
        bad_words=draw(st.sampled_from([(), (), ((7,), (8, 9)), ((100, 101),)])),
        logit_bias=draw(st.sampled_from([(), (), (((11,), 4.0), ((12, 13), -2.0))])),
        allowed=draw(st.sampled_from([None, None, None, even_after_odd])),
        processors=draw(st.sampled_from([(), (), (MinNewTokensLengthLogitsProcessor(2, 6, [5, 6]),)])),
    )


@st.composite
def plans(draw: st.DrawFn, trees: bool, deepest: int) -> Plan:
    if not trees or draw(st.booleans()):
        return chain(draw(st.integers(1, deepest)))
    if draw(st.booleans()):
        return Dynamic(draw(st.integers(1, 8)), draw(st.integers(3, deepest)), draw(st.integers(2, 4)))
    parents: list[int] = []
    depth = [0]
    for _ in range(draw(st.integers(1, 8))):
        shallow = [row for row, d in enumerate(depth) if d < deepest]
        row = draw(st.sampled_from(shallow))
        parents.append(row - 1)
        depth.append(depth[row] + 1)
    return Fixed(tuple(parents))


@dataclasses.dataclass(frozen=True)
class Case:
    prompts: list[list[int]]
    samplers: list[Sampler]
    seeds: list[int]
    budgets: list[int]
    stop_ids: list[int]
    stopping: Stopping
    max_batch: int | None
    drafter: str
    plan: Plan
    way: str | None


def long_enough(prompt: Any, ids: Any) -> bool:
    return sum(ids) % 11 == 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 4))
    name = draw(st.sampled_from([*drafters.kinds(), "another model", "itself", "ngram", "suffix"]))
    letters = st.text("aeiou nrst", min_size=1, max_size=2)
    return Case(
        prompts=draw(st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=size, max_size=size)),
        samplers=draw(st.lists(samplers(), min_size=size, max_size=size)),
        seeds=draw(st.lists(st.integers(-(2**62), 2**62), min_size=size, max_size=size)),
        budgets=draw(st.lists(st.integers(1, 14), min_size=size, max_size=size)),
        stop_ids=draw(st.lists(tokens, max_size=30)),
        stopping=Stopping(
            strings=tuple(draw(st.lists(letters, max_size=2))),
            criteria=draw(st.sampled_from([(), (), (long_enough,)])),
        ),
        max_batch=draw(st.sampled_from([None, 1, 2])),
        drafter=name,
        plan=draw(plans(trees=name != "ngram", deepest=5)),
        way=draw(st.sampled_from([None, None, "argmax"])),
    )


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    return load(toy_folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def made(toy: SimpleNamespace, toy_folder: Path, target: Target) -> dict[str, Any]:
    other = load(toy_folder, dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    trained = {
        kind: toy.make_drafter(kind, target, **({"draft_vocab_size": 200} if kind in toy.KIND_SETTINGS else {}))
        for kind in drafters.kinds()
    }
    return {
        **trained,
        "another model": DraftLM(other),
        "itself": DraftLM(target),
        "ngram": NGram(),
        "suffix": Suffix(50),
    }


def decode(target: Target, case: Case, chosen: list[int], **options: Any) -> list[Output]:
    return generate(
        target,
        [case.prompts[i] for i in chosen],
        max_new=[case.budgets[i] for i in chosen],
        sampler=[case.samplers[i] for i in chosen],
        seeds=[case.seeds[i] for i in chosen],
        stopping=case.stopping,
        log_probs=True,
        **options,
    )


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_speculation_changes_nothing(target: Target, made: dict[str, Any], case: Case) -> None:
    target.eos_ids = tuple(case.stop_ids)
    speculation = Speculation(made[case.drafter], case.plan, way=case.way)
    everyone = list(range(len(case.prompts)))
    for i, fast in enumerate(decode(target, case, everyone, speculation=speculation, max_batch=case.max_batch)):
        plain = decode(target, case, [i])[0]
        assert (fast.ids, fast.reason, fast.text) == (plain.ids, plain.reason, plain.text)
        assert fast.log_probs == pytest.approx(plain.log_probs, abs=1e-8)
        assert 1 + sum(r.committed for r in fast.rounds) == len(fast.ids)
        assert all(1 <= r.committed <= r.accepted + 1 <= r.proposed + 1 for r in fast.rounds)
