"""Evaluation end to end on a toy target with a tokenizer, and its agreement report on a planted divergence."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.base import Drafter, Pick, Proposal, TargetHead
from draftsmith.drafters.tree import Plan
from draftsmith.inference import metrics, noise
from draftsmith.inference.decode import generate
from draftsmith.inference.evaluate import Settings, agreement, draft_and_verify, evaluate, spread
from draftsmith.inference.load_target import load
from draftsmith.inference.output import Output
from draftsmith.inference.records import Conversation, prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.scripts.summary import summary
from draftsmith.scripts.tables import eval_table

CONVERSATIONS = [
    Conversation("a", ({"role": "user", "content": "hello there"},), "greeting"),
    Conversation("b", ({"role": "user", "content": "the quick brown fox"}, {"role": "assistant", "content": "jumps"})),
    Conversation("c", ({"role": "user", "content": "how are you today?"},), "greeting"),
]


@pytest.fixture(scope="module")
def target(toy_folder: Path) -> Target:
    return load(toy_folder)


@pytest.fixture(scope="module")
def report(toy: SimpleNamespace, target: Target) -> dict[str, Any]:
    drafter = toy.make_drafter("eagle3", target, draft_vocab_size=200)
    settings = Settings(
        plans=(
            tree.chain(2),
            tree.chain(4),
        ),
        temperatures=(0.0, 1.0),
        max_new=8,
        batch_size=2,
        speed_prompts=2,
        seed=7,
    )
    return evaluate(target, {"it": drafter}, CONVERSATIONS, settings, say=lambda line: None)["it"]


def test_the_report_has_one_result_per_temperature_and_depth(report: dict[str, Any]) -> None:
    assert [(r["temperature"], r["k"]) for r in report["results"]] == [(0.0, 2), (0.0, 4), (1.0, 2), (1.0, 4)]
    for result in report["results"]:
        for name in ("tokens_per_round", "speedup"):
            interval = result[name]
            assert set(interval) == {"value", "low", "high"}
            assert 0 < interval["low"] <= interval["value"] <= interval["high"]
        assert len(result["cond_accept"]) == len(result["uncond_accept"]) == result["k"]
        assert 1 <= result["tokens_per_round"]["value"] <= result["k"] + 1
        assert set(result["categories"]) == {"all", "greeting"}
        assert set(result["round_cost"]) == {"draft", "verify", "other"}
        assert min(result["round_cost"].values()) > 0
        assert result["tokens_per_second"] > 0 and result["plain_tokens_per_second"] > 0
        assert result["speedup_predicted"] > 0
        assert result["rule"] == "coupled" and result["lossless"] is True


def test_the_report_is_json(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report))["results"][0]["k"] == 2


def test_coupled_decoding_agrees_with_plain_decoding_in_the_report(report: dict[str, Any]) -> None:
    for result in report["results"]:
        agreed = dict(result["agreement"])
        forced = agreed.pop("teacher_forced")
        assert agreed == {"identical": 3, "of": 3, "largest_margin": 0.0, "divergences": []}
        assert forced == {"own_choice": 24, "of": 24, "largest_margin": 0.0, "divergences": []}
    hashes = [result["output_hash"] for result in report["results"]]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]  # by temperature, not by K


def test_the_record_says_where_the_numbers_come_from(report: dict[str, Any], target: Target) -> None:
    record = report["record"]
    assert record["target_fingerprint"] == target.shape.fingerprint
    assert record["drafter"] == "eagle3" and record["dtype"] == "float32" and record["device"] == "cpu"
    assert record["num_prompts"] == 3 and record["settings"]["max_new"] == 8
    assert record["drafter_bytes"] == 4 * record["drafter_parameters"] > 0
    assert {"python", "torch", "transformers"} <= set(record["versions"])


def test_the_ratio_rule_is_evaluated_without_an_agreement(toy: SimpleNamespace, target: Target) -> None:
    drafter = toy.make_drafter("medusa", target, draft_vocab_size=None)
    settings = Settings(plans=(tree.chain(2),), temperatures=(1.0,), rule="ratio", max_new=6, speed_prompts=0)
    (result,) = evaluate(target, {"it": drafter}, CONVERSATIONS, settings, say=lambda line: None)["it"]["results"]
    assert "agreement" not in result and "speedup" not in result and result["lossless"] is True


def test_speed_is_measured_at_the_chosen_temperatures_only(toy: SimpleNamespace, target: Target) -> None:
    drafter = toy.make_drafter("medusa", target)
    settings = Settings(
        plans=(
            tree.chain(1),
            tree.chain(2),
        ),
        temperatures=(0.0, 1.0),
        max_new=6,
        speed_prompts=1,
        speed_temperatures=(1.0,),
    )
    settings = dataclasses.replace(settings, speed_plans=(tree.chain(3),), speed_max_new=4)
    results = evaluate(target, {"it": drafter}, CONVERSATIONS, settings, say=lambda line: None)["it"]["results"]
    found = [(r["temperature"], r["k"], "speedup" in r, "agreement" in r) for r in results]
    whole = [(t, k, t == 1.0, True) for t in (0.0, 1.0) for k in (1, 2)]
    assert found == [*whole, (1.0, 3, True, False)]
    assert len({r["plain_tokens_per_second"] for r in results[2:]}) == 1  # one plain run for all K
    assert [r["speed_only"] for r in results] == [False] * 4 + [True]
    assert results[4]["speed_prompts"] == 1 and results[4]["rounds"] <= 3


class Oracle(Drafter):
    """Drafts what the target will say: the tokens that plain decoding gave, found by their context's length."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.texts = texts  # by prompt

    def bind(self, target: TargetHead) -> None:
        pass

    def init(self, batch: int, capacity: int) -> list[list[int]]:
        return [[] for _ in range(batch)]

    def observe(
        self, state: list[list[int]], ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]
    ) -> list[list[int]]:
        return [seen + row[:count].tolist() for seen, row, count in zip(state, ids_BC, counts, strict=True)]

    def propose(self, state: list[list[int]], plan: Plan, pick: Pick) -> Proposal:
        depth = plan.depth
        rows = []
        for seen in state:
            text = next(
                [*prompt, *answer] for prompt, answer in self.texts.items() if tuple(seen[: len(prompt)]) == prompt
            )
            rows.append(([*text, *[0] * (depth + 1)])[len(seen) + 1 :][:depth])
        return Proposal(torch.tensor(rows), tree.fixed(tree.chain(depth).parents), "fixed")

    def replace(self, state: list[list[int]], rows_B: Tensor, other: list[list[int]]) -> list[list[int]]:
        raise AssertionError("nobody waits here")

    def select(self, state: list[list[int]], rows_B: Tensor) -> list[list[int]]:
        return [state[row] for row in rows_B.tolist()]


def test_drafters_measured_together_share_plain_decoding_and_keep_their_own_acceptance(
    toy: SimpleNamespace, target: Target
) -> None:
    settings = Settings(plans=(tree.chain(2),), max_new=9, speed_prompts=2, speed_plans=(tree.chain(1),))
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages)) for c in CONVERSATIONS]
    answers = generate(target, prompts, max_new=9, sampler=Sampler())
    oracle = Oracle({tuple(prompt): answer.ids for prompt, answer in zip(prompts, answers, strict=True)})
    said: list[str] = []
    pair = {"never": toy.make_drafter("medusa", target), "always": oracle}
    together = evaluate(target, pair, CONVERSATIONS, settings, say=said.append)
    assert sum("plain decoding" in line for line in said) == 1
    assert list(together) == [report["record"]["name"] for report in together.values()] == ["never", "always"]
    assert len({r["plain_tokens_per_second"] for report in together.values() for r in report["results"]}) == 1
    for name, drafter in pair.items():
        alone = evaluate(target, {name: drafter}, CONVERSATIONS, settings, say=lambda line: None)[name]
        assert [r["k"] for r in together[name]["results"]] == [2, 1]
        for result, expected in zip(together[name]["results"], alone["results"], strict=True):
            assert result["uncond_accept"] == expected["uncond_accept"]
            assert result["rounds"] == expected["rounds"]
    deep = [report["results"][0]["uncond_accept"][0] for report in together.values()]
    assert deep[0] < 0.5 and deep[1] == 1.0


def test_a_drafter_may_get_plans_of_its_own(toy: SimpleNamespace, target: Target) -> None:
    pair = {"deep": toy.make_drafter("medusa", target), "flat": toy.make_drafter("medusa", target, num_heads=2)}
    settings = Settings(plans=(tree.chain(4),), max_new=4, speed_prompts=0)
    own = {"flat": (tree.chain(2), tree.Dynamic(4, 2, 2))}
    reports = evaluate(target, pair, CONVERSATIONS, settings, own, say=lambda line: None)
    expected = {"deep": ["4"], "flat": ["2", "dynamic:4,2,2"]}
    assert {name: [r["plan"] for r in report["results"]] for name, report in reports.items()} == expected
    assert {name: report["record"]["settings"]["plans"] for name, report in reports.items()} == expected


def test_a_drafter_that_does_not_fit_is_named(toy: SimpleNamespace, target: Target) -> None:
    pair = {"good": toy.make_drafter("medusa", target), "bad": toy.make_drafter("medusa", target, num_heads=2)}
    with pytest.raises(ValueError, match="^bad: draft depth K is 4; this drafter proposes at most 2$"):
        evaluate(target, pair, CONVERSATIONS, Settings(plans=(tree.chain(4),)), say=lambda line: None)


def test_tables_say_on_how_many_prompts_a_number_rests(toy: SimpleNamespace, target: Target, tmp_path: Path) -> None:
    drafter = toy.make_drafter("medusa", target)
    settings = Settings(
        plans=(tree.chain(1),),
        temperatures=(0.0, 1.0),
        max_new=6,
        speed_plans=(tree.chain(3), tree.parse_plan("dynamic:6,2,4")),
        speed_temperatures=(0.0,),
    )
    settings = dataclasses.replace(settings, speed_prompts=1, speed_max_new=5)
    report = evaluate(target, {"it": drafter}, CONVERSATIONS, settings, say=lambda line: None)["it"]
    printed = eval_table(report)
    assert "3 prompts" in printed and "1 of the prompts, up to 5 tokens each" in printed
    assert printed.count("on the speed prompts") == 2 and printed.count("outputs identical") == 2

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text(json.dumps(report))
    (tmp_path / "run" / "finished.json").write_text('{"seconds": 60, "trained_tokens": 1000}')
    greedy, sampled = [line for line in summary([tmp_path / "run"]).splitlines() if line.startswith("| run")]
    deep = report["results"][0]["tokens_per_round"]["value"]
    assert f"| {deep:.2f} [" in greedy  # of all prompts at K = 1, not of the speed prompts at K = 3
    fastest = max((r for r in report["results"] if "speedup" in r), key=lambda r: r["speedup"]["value"])
    assert f"| {fastest['plan']} | {fastest['plain_tokens_per_second']:.1f} |" in greedy
    assert sampled.endswith("| - | - | - | - |")


def test_answers_of_one_token_are_evaluated(toy: SimpleNamespace, target: Target) -> None:
    """Nothing to measure is no error: with a budget of one token there is no round."""
    drafter = toy.make_drafter("medusa", target)
    settings = Settings(plans=(tree.chain(2),), max_new=1, speed_prompts=1)
    (result,) = evaluate(target, {"it": drafter}, CONVERSATIONS, settings, say=lambda line: None)["it"]["results"]
    assert result["rounds"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_agreement_lists_a_planted_divergence_with_its_margin(toy: SimpleNamespace, temperature: float) -> None:
    """The second output is changed at its fifth token; the margin is worked out again from the model's own logits."""
    target = toy.make_target("llama", num_hidden_layers=2)
    prompts, sampler, seed = [[5, 6, 7], [8, 9], [10]], Sampler(temperature), 30
    plain = generate(target, prompts, max_new=8, sampler=sampler, seeds=[seed, seed + 1, seed + 2], stop_at_eos=False)
    planted = [Output(list(output.ids)) for output in plain]
    true, wrong = plain[1].ids[4], (plain[1].ids[4] + 1) % 64
    planted[1].ids[4:] = [wrong] * 4
    with torch.no_grad():
        logits = target.model(torch.tensor([prompts[1] + plain[1].ids[:4]])).logits[0, -1]
    g = noise.gumbel(torch.tensor([seed + 1]), torch.tensor([[6]]), torch.arange(64))[0, 0]
    scores = logits if temperature == 0 else logits + g
    result = agreement(target, prompts, plain, planted, sampler, seed)
    assert result["identical"] == 2 and result["of"] == 3
    assert [(d["prompt"], d["position"]) for d in result["divergences"]] == [(1, 4)]
    assert result["largest_margin"] == pytest.approx(float(scores[true] - scores[wrong]), abs=1e-6)
    assert result["largest_margin"] > 1e-3
    forced = result["teacher_forced"]  # finds the planted token at its place, and what follows it judged behind it
    assert forced["of"] == 24 and forced["own_choice"] <= 23
    assert {"prompt": 1, "position": 4, "margin": pytest.approx(result["largest_margin"], abs=1e-6)} in forced[
        "divergences"
    ]
    assert {d["prompt"] for d in forced["divergences"]} == {1} and min(
        d["position"] for d in forced["divergences"]
    ) == 4


def test_acceptance_alone_is_capped_at_what_the_drafter_can_propose(toy: SimpleNamespace, target: Target) -> None:
    drafter = toy.make_drafter("medusa", target)
    outputs = draft_and_verify(target, drafter, [[5, 6], [7]], depth=9, temperature=0.0, max_new=6, batch_size=1)
    result = metrics.acceptance(outputs)
    assert len(result["cond_accept"]) == 5


def test_prompts_are_spread_evenly() -> None:
    assert spread(10, 5) == [0, 2, 4, 6, 8]
    assert spread(3, 8) == [0, 1, 2]
    assert spread(7, 1) == [0]
