"""Real acceptance and speed of one drafter or several on held-out prompts, measured through the verify loop.

Acceptance is measured on all prompts in batches (it does not depend on the batch), speed at batch 1 on some of them: each is
decoded plainly and with each drafter and plan one after the other, in alternating order. Under a coupled rule all give the same
tokens in exact arithmetic; where they part, the target is asked again and the report lists how close the two tokens were.

Letters: B sequences, V vocabulary.
"""

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import kind_of
from draftsmith.drafters.tree import Plan, chain, plan_name
from draftsmith.inference import memory, metrics, noise
from draftsmith.inference.decode import generate, pad_ids
from draftsmith.inference.output import Output, Seconds
from draftsmith.inference.records import Conversation, prompt_messages
from draftsmith.inference.rendering import prompt_ids
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target

SCORED_TOGETHER = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        plans: what is drafted: chains and trees (`drafters.tree`).
        temperatures: of target and draft.
        top_k, top_p: of target and draft.
        rule, way: verification rule and way of drafting.
        max_new: tokens per answer.
        batch_size: prompts decoded together when acceptance is measured.
        speed_prompts: prompts on which speed is measured, 0 for none.
        speed_plans: further plans that are tried for speed alone; their acceptance is that on the speed prompts.
        speed_temperatures: those at which it is measured; None means all.
        speed_max_new: tokens per answer there; None means max_new.
        repeats: times that each of them is decoded both ways.
        compiled: target and drafters are compiled first (`torch.compile`).
        seed: prompt i (of all, or of the speed prompts) is sampled with seed + i.
    """

    plans: tuple[Plan, ...] = (chain(5),)
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int | None = None
    top_p: float = 1.0
    rule: str = "coupled"
    way: str | None = None
    max_new: int = 128
    batch_size: int = 32
    speed_prompts: int = 8
    speed_plans: tuple[Plan, ...] = ()
    speed_temperatures: tuple[float, ...] | None = None
    speed_max_new: int | None = None
    repeats: int = 1
    compiled: bool = False
    seed: int = 0


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    conversations: Sequence[Conversation],
    settings: Settings,
    plans: Mapping[str, tuple[Plan, ...]] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, dict[str, Any]]:
    """Measures everything, plain decoding once for all drafters.

    Args:
        target: the frozen target.
        drafters: by the names under which they are reported.
        conversations: held-out prompts.
        settings: what is measured.
        plans: of drafters that get others than those in `settings`, by name.
        say: told what is under way.

    Returns:
        For each name `{"record": provenance, "results": [one per temperature and plan]}` (JSON-ready).

    Raises:
        ValueError: a drafter made for another target, or a plan, rule or way that it cannot do.
    """
    own = {name: dataclasses.replace(settings, plans=(plans or {}).get(name, settings.plans)) for name in drafters}
    ways: list[tuple[str, Speculation, bool]] = []  # name, what is tried, whether its speed alone
    for name, drafter in drafters.items():
        try:
            drafter.bind(target)
            if settings.compiled:
                drafter.compile_drafting()
            for speed_only, tried in enumerate((own[name].plans, settings.speed_plans)):
                made = [Speculation(drafter, plan, settings.rule, settings.way) for plan in tried]
                ways += [(name, speculation, bool(speed_only)) for speculation in made]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if settings.compiled:
        target.compile(layer for drafter in drafters.values() for layer in drafter.feature_layers)
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in conversations]
    reports: dict[str, dict[str, Any]] = {
        name: {"record": _record(target, name, drafter, conversations, own[name]), "results": []}
        for name, drafter in drafters.items()
    }
    for temperature in settings.temperatures:
        sampler = Sampler(temperature, settings.top_k, settings.top_p)
        plain, plain_peak = None, []
        if settings.rule == "coupled":  # the only rule that promises the same tokens
            say(f"temperature {temperature:g}: plain decoding of {len(prompts)} prompts")
            with memory.peak(target.device) as plain_peak:
                plain = _decode(target, prompts, sampler, None, settings)
        timed = settings.temperatures if settings.speed_temperatures is None else settings.speed_temperatures
        speeds: list[tuple[dict[str, Any], list[Output]]] = [({}, [])] * len(ways)
        if settings.speed_prompts and temperature in timed:
            say(f"temperature {temperature:g}: speed on {settings.speed_prompts} prompts, plain and speculative")
            chosen = [prompts[i] for i in spread(len(prompts), settings.speed_prompts)]
            speeds = measure_speed(target, chosen, sampler, [speculation for _, speculation, _ in ways], settings)
        for (name, speculation, speed_only), (speed, outputs) in zip(ways, speeds, strict=True):
            if speed_only and not speed:
                continue
            if not speed_only:
                say(
                    f"temperature {temperature:g}: {name}, {plan_name(speculation.plan)}, acceptance on {len(prompts)} prompts"
                )
                with memory.peak(target.device) as peak:
                    outputs = _decode(target, prompts, sampler, speculation, settings)
            result: dict[str, Any] = {
                "temperature": temperature,
                "k": speculation.plan.depth,
                "plan": plan_name(speculation.plan),
                "nodes": speculation.plan.nodes,
                "rule": settings.rule,
                "lossless": speculation.lossless,
                "speed_only": speed_only,
                **metrics.acceptance(outputs),
                **speed,
            }
            if speed:  # what this acceptance buys at the costs measured on the speed prompts
                tau = result["tokens_per_round"]["value"]
                result["speedup_predicted"] = tau / sum(speed["round_cost"].values())
            if not speed_only:
                result["categories"] = _by_category(conversations, outputs)
                result["contexts"] = metrics.by_context([len(prompt) for prompt in prompts], outputs)
                batch = min(settings.batch_size, len(prompts))
                result["memory"] = {
                    **memory.footprint(target, speculation.drafter, speculation.plan, batch),
                    "batch": batch,
                    "peak_delta": peak[0] - plain_peak[0] if peak and plain_peak else None,
                }
                result["output_hash"] = _hash([output.ids for output in outputs])
                if plain is not None:
                    result["agreement"] = agreement(target, prompts, plain, outputs, sampler, settings.seed)
            reports[name]["results"].append(result)
    return reports


def agreement(
    target: Target,
    prompts: Sequence[list[int]],
    plain: Sequence[Output],
    speculative: Sequence[Output],
    sampler: Sampler,
    seed: int,
) -> dict[str, Any]:
    """How many outputs are identical, and for each that is not, where it parts and by how much the target preferred a token.

    The margin is the difference of the two tokens' scores under plain decoding: logits at temperature 0, else log-probability
    plus keyed noise. In fp32 anything above 1e-4 is a fault; in half precision margins are of the order of its rounding.
    "teacher_forced" asks at every place instead of the first one that differs: the target reads the speculative output in one
    pass, and each token is compared with its own choice there.
    """
    places = {
        index: next(i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
        for index, (a, b) in enumerate(zip(plain, speculative, strict=True))
        if a.ids != b.ids
    }
    divergences = []
    for begin in range(0, len(places), SCORED_TOGETHER):
        chosen = list(places)[begin : begin + SCORED_TOGETHER]
        contexts = [[*prompts[index], *plain[index].ids[: places[index]]] for index in chosen]
        for index, scores_V in zip(chosen, _scores(target, contexts, sampler, [seed + i for i in chosen]), strict=True):
            place = places[index]
            margin = abs(float(scores_V[plain[index].ids[place]] - scores_V[speculative[index].ids[place]]))
            divergences.append({"prompt": index, "position": place, "margin": margin})
    return {
        "identical": len(plain) - len(divergences),
        "of": len(plain),
        "largest_margin": max((d["margin"] for d in divergences), default=0.0),
        "divergences": divergences,
        "teacher_forced": teacher_forced(target, prompts, speculative, sampler, seed),
    }


@torch.inference_mode()
def teacher_forced(
    target: Target, prompts: Sequence[list[int]], outputs: Sequence[Output], sampler: Sampler, seed: int
) -> dict[str, Any]:
    """How many tokens of the outputs are the target's own choice behind all tokens before, and by how much the others lose to it
    (`divergences`: prompt, position and margin of each; the outputs are right if the margins are of the order of the dtype's
    rounding)."""
    divergences, tokens = [], 0
    for begin in range(0, len(prompts), SCORED_TOGETHER):
        chosen = range(begin, min(begin + SCORED_TOGETHER, len(prompts)))
        texts = [[*prompts[i], *outputs[i].ids] for i in chosen]
        _, last_BTD = target.hidden(pad_ids(texts).to(target.device))
        for row, i in enumerate(chosen):
            first, ids = len(prompts[i]), outputs[i].ids
            logits_TV = target.unembed(last_BTD[row, first - 1 : first - 1 + len(ids)])
            scores_TV = _plain_scores(logits_TV, torch.full((len(ids),), seed + i), first, sampler)
            ids_T = torch.tensor(ids, device=target.device)
            margin_T = scores_TV.amax(1) - scores_TV.gather(1, ids_T[:, None])[:, 0]
            tokens += len(ids)
            divergences += [{"prompt": i, "position": p, "margin": m} for p, m in enumerate(margin_T.tolist()) if m > 0]
    return {
        "own_choice": tokens - len(divergences),
        "of": tokens,
        "largest_margin": max((d["margin"] for d in divergences), default=0.0),
        "divergences": divergences,
    }


def measure_speed(
    target: Target,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    speculations: Sequence[Speculation],
    settings: Settings,
) -> list[tuple[dict[str, Any], list[Output]]]:
    """Plain decoding of each prompt at batch 1, interleaved with each way of speculating: tokens/s, speed-up, where the
    time goes (empty where every answer ended with the token that the prefill yields), and the outputs, for each way."""
    ways: list[Speculation | None] = [None, *speculations]
    total = [Seconds() for _ in ways]
    outputs: list[list[Output]] = [[] for _ in ways]
    spent = [[(0, 0.0)] * len(prompts) for _ in ways]  # per way and prompt: tokens and seconds, over all repeats
    for number in range(-1, len(prompts) * settings.repeats):  # the first pass warms up and is not counted
        index = max(number, 0) % len(prompts)
        for i in range(len(ways)) if number % 2 else reversed(range(len(ways))):
            seconds = Seconds()
            if (way := ways[i]) is not None:
                way.drafter.forget()  # the others have decoded the same prompt
            output = generate(
                target,
                [prompts[index]],
                max_new=settings.max_new if settings.speed_max_new is None else settings.speed_max_new,
                sampler=sampler,
                speculation=way,
                seeds=[settings.seed + index],
                seconds=seconds,
            )[0]
            if number < 0:
                continue
            if number < len(prompts):
                outputs[i].append(output)
            tokens, elapsed = spent[i][index]
            spent[i][index] = (tokens + len(output.ids) - 1, elapsed + seconds.decode)
            for field in dataclasses.fields(Seconds):
                setattr(total[i], field.name, getattr(total[i], field.name) + getattr(seconds, field.name))
    speeds = []
    for i in range(1, len(ways)):
        pairs = [(*plain, *other) for plain, other in zip(spent[0], spent[i], strict=True) if plain[0] and other[0]]
        speeds.append((_speed(pairs, total[i], total[0].decode / max(1, total[0].rounds)) if pairs else {}, outputs[i]))
    return speeds


def _speed(pairs: Sequence[tuple[int, float, int, float]], total: Seconds, plain_step: float) -> dict[str, Any]:
    """Of one way of speculating; a pair is a prompt's plain tokens and seconds, then the speculative ones."""
    plain_tokens, plain_seconds, tokens, seconds = (sum(column) for column in zip(*pairs, strict=True))
    rounds = max(1, total.rounds)
    costs = {name: getattr(total, name) / rounds / plain_step for name in ("draft", "verify", "other")}
    return {
        "plain_tokens_per_second": plain_tokens / plain_seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": metrics.pooled(pairs, _speedup),
        "round_cost": costs,
        "plain_step_seconds": plain_step,
        "speed_prompts": len(pairs),
    }


def draft_and_verify(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    depth: int,
    temperature: float,
    max_new: int,
    batch_size: int,
    drafts: bool = False,
) -> list[Output]:
    """Decodes with chains of that depth, or as deep as the drafter can, under the rule that is lossless for all drafters."""
    depth = min(depth, drafter.max_depth or depth)
    settings = Settings(max_new=max_new, batch_size=batch_size)
    return _decode(target, prompts, Sampler(temperature), Speculation(drafter, chain(depth)), settings, drafts)


def spread(total: int, wanted: int) -> list[int]:
    """Indices of `wanted` items spread evenly over `total`."""
    wanted = min(total, wanted)
    return [i * total // wanted for i in range(wanted)]


def _speedup(pairs: Sequence[tuple[int, float, int, float]]) -> float:
    plain_tokens, plain_seconds, tokens, seconds = (sum(column) for column in zip(*pairs, strict=True))
    return (tokens / seconds) / (plain_tokens / plain_seconds)


def _decode(
    target: Target,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    speculation: Speculation | None,
    settings: Settings,
    drafts: bool = False,
) -> list[Output]:
    """All prompts in batches of similar length, in the order given."""
    if speculation is not None:
        speculation.drafter.forget()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: dict[int, Output] = {}
    for begin in range(0, len(order), settings.batch_size):
        batch = order[begin : begin + settings.batch_size]
        decoded = generate(
            target,
            [prompts[i] for i in batch],
            max_new=settings.max_new,
            sampler=sampler,
            speculation=speculation,
            seeds=[settings.seed + i for i in batch],
            drafts=drafts,
        )
        outputs |= dict(zip(batch, decoded, strict=True))
    return [outputs[i] for i in range(len(prompts))]


@torch.inference_mode()
def _scores(target: Target, contexts: Sequence[list[int]], sampler: Sampler, seeds: Sequence[int]) -> torch.Tensor:
    """What plain decoding maximises for the token that follows each context: (B, V)."""
    lengths_B = torch.tensor([len(ids) for ids in contexts], device=target.device)
    _, last_BTD = target.hidden(pad_ids(contexts).to(target.device))
    logits_BV = target.unembed(last_BTD[torch.arange(len(contexts)), lengths_B - 1])
    return torch.cat(
        [
            _plain_scores(logits_BV[i : i + 1], torch.tensor([seed]), int(lengths_B[i]), sampler)
            for i, seed in enumerate(seeds)
        ]
    )


def _plain_scores(logits_TV: torch.Tensor, seeds_T: torch.Tensor, first: int, sampler: Sampler) -> torch.Tensor:
    """What plain decoding maximises, (T, V), for the tokens at positions `first`, `first` + 1, …"""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if sampler.greedy:
        return logits_TV
    token_ids_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    positions_T1 = first + torch.arange(len(logits_TV), device=logits_TV.device)[:, None]
    return sampler.log_probs(logits_TV) + noise.gumbel(seeds_T.to(logits_TV.device), positions_T1, token_ids_V)[:, 0]


def _by_category(conversations: Sequence[Conversation], outputs: Sequence[Output]) -> dict[str, metrics.Interval]:
    """tokens_per_round of each category."""
    groups: dict[str, list[metrics.Rounds]] = {}
    for conversation, output in zip(conversations, outputs, strict=True):
        groups.setdefault(conversation.category, []).append(output.rounds)
    return {name: metrics.pooled(rounds, metrics.tokens_per_round) for name, rounds in sorted(groups.items())}


def _record(
    target: Target, name: str, drafter: Drafter, conversations: Sequence[Conversation], settings: Settings
) -> dict[str, Any]:
    """Where the numbers come from."""
    parameters = list(drafter.weights())
    return {
        "target": target.name,
        "target_fingerprint": target.shape.fingerprint,
        "target_form": str(target.form),
        "target_adapted_from": target.adapted_from,
        "target_parameters": target.model.num_parameters(),
        "name": name,
        "drafter": kind_of(drafter),
        "drafter_parameters": sum(p.numel() for p in parameters),
        "drafter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "num_prompts": len(conversations),
        "prompt_hash": _hash([c.messages for c in conversations]),
        "settings": {
            **dataclasses.asdict(settings),
            "plans": [*map(plan_name, settings.plans)],
            "speed_plans": [*map(plan_name, settings.speed_plans)],
        },
        "definitions": metrics.DEFINITIONS,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
