"""Real acceptance and speed of a drafter on held-out prompts, measured through the verify loop.

Acceptance is measured on all prompts in batches (it does not depend on the batch), speed at batch 1 on some of them: plain and
speculative decoding of the same prompt one after the other, order alternating. Under a coupled rule both give the same
tokens in exact arithmetic; where they part, the target is asked again and the report lists how close the two tokens were.

Letters: B sequences, V vocabulary.
"""

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from draftsmith.drafters.base import Drafter
from draftsmith.inference import metrics, noise
from draftsmith.inference.conversations import Conversation, prompt_ids, prompt_messages
from draftsmith.inference.decode import Output, Seconds, Speculation, generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        depths: draft lengths K.
        temperatures: of target and draft.
        top_k, top_p: of target and draft.
        rule, way: verification rule and way of drafting.
        max_new: tokens per answer.
        batch_size: prompts decoded together when acceptance is measured.
        speed_prompts: prompts on which speed is measured, 0 for none.
        repeats: times that each of them is decoded both ways.
        seed: prompt i is sampled with seed + i.
    """

    depths: tuple[int, ...] = (5,)
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int | None = None
    top_p: float = 1.0
    rule: str = "coupled"
    way: str | None = None
    max_new: int = 128
    batch_size: int = 32
    speed_prompts: int = 8
    repeats: int = 1
    seed: int = 0


def evaluate(
    target: Target,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    settings: Settings,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Measures everything; returns `{"record": provenance, "results": [one per temperature and K]}` (JSON-ready)."""
    drafter.bind(target)
    speculations = [Speculation(drafter, depth, settings.rule, settings.way) for depth in settings.depths]
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages)) for c in conversations]
    results = []
    for temperature in settings.temperatures:
        sampler = Sampler(temperature, settings.top_k, settings.top_p)
        if settings.rule == "coupled":  # the only rule that promises the same tokens
            say(f"temperature {temperature:g}: plain decoding of {len(prompts)} prompts")
            plain = _decode(target, prompts, sampler, None, settings)
        for speculation in speculations:
            say(f"temperature {temperature:g}: K = {speculation.depth}, acceptance on {len(prompts)} prompts")
            outputs = _decode(target, prompts, sampler, speculation, settings)
            result: dict[str, Any] = {
                "temperature": temperature,
                "k": speculation.depth,
                "rule": settings.rule,
                "lossless": speculation.lossless,
                **metrics.acceptance(outputs),
                "categories": _by_category(conversations, outputs),
                "output_hash": _hash([output.ids for output in outputs]),
            }
            if settings.rule == "coupled":
                result["agreement"] = agreement(target, prompts, plain, outputs, sampler, settings.seed)
            if settings.speed_prompts:
                say(f"temperature {temperature:g}: K = {speculation.depth}, speed on {settings.speed_prompts} prompts")
                chosen = spread(len(prompts), settings.speed_prompts)
                result |= measure_speed(target, [prompts[i] for i in chosen], sampler, speculation, settings)
            results.append(result)
    return {"record": _record(target, drafter, conversations, settings), "results": results}


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
    """
    divergences = []
    for index, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        if a.ids != b.ids:
            place = next(i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
            scores = _scores(target, [*prompts[index], *a.ids[:place]], sampler, seed + index)
            margin = abs(float(scores[a.ids[place]] - scores[b.ids[place]]))
            divergences.append({"prompt": index, "position": place, "margin": margin})
    return {
        "identical": len(plain) - len(divergences),
        "of": len(plain),
        "largest_margin": max((d["margin"] for d in divergences), default=0.0),
        "divergences": divergences,
    }


def measure_speed(
    target: Target, prompts: Sequence[list[int]], sampler: Sampler, speculation: Speculation, settings: Settings
) -> dict[str, Any]:
    """Plain and speculative decoding of each prompt at batch 1, interleaved: tokens/s, speed-up, and where the time goes."""
    total = {True: Seconds(), False: Seconds()}
    pairs: list[tuple[int, float, int, float]] = []  # per prompt: plain tokens and seconds, speculative ones
    for number in range(-1, len(prompts) * settings.repeats):  # the first pass warms up and is not counted
        index = max(number, 0) % len(prompts)
        measured = {}
        for speculative in (True, False) if number % 2 else (False, True):
            seconds = Seconds()
            output = generate(
                target,
                [prompts[index]],
                max_new=settings.max_new,
                sampler=sampler,
                speculation=speculation if speculative else None,
                seeds=[settings.seed + index],
                seconds=seconds,
            )[0]
            measured[speculative] = (len(output.ids) - 1, seconds.decode)
            if number >= 0:
                for field in dataclasses.fields(Seconds):
                    value = getattr(total[speculative], field.name) + getattr(seconds, field.name)
                    setattr(total[speculative], field.name, value)
        if number >= 0 and measured[False][0] and measured[True][0]:
            pairs.append((*measured[False], *measured[True]))
    if not pairs:  # every answer ended with the token that the prefill yields
        return {}
    plain_step = total[False].decode / max(1, total[False].rounds)
    rounds = max(1, total[True].rounds)
    costs = {
        "draft": total[True].draft / rounds / plain_step,
        "verify": total[True].verify / rounds / plain_step,
        "other": total[True].other / rounds / plain_step,
    }
    tokens = sum(pair[2] for pair in pairs)
    return {
        "plain_tokens_per_second": sum(p[0] for p in pairs) / sum(p[1] for p in pairs),
        "tokens_per_second": tokens / sum(p[3] for p in pairs),
        "speedup": metrics.pooled(pairs, _speedup),
        "speedup_predicted": tokens / rounds / sum(costs.values()),
        "round_cost": costs,
        "plain_step_seconds": plain_step,
    }


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    depth: int,
    temperature: float,
    max_new: int,
    batch_size: int,
) -> dict[str, Any]:
    """Acceptance metrics alone, for use during training."""
    depth = min(depth, drafter.max_depth or depth)
    settings = Settings(max_new=max_new, batch_size=batch_size)
    return metrics.acceptance(_decode(target, prompts, Sampler(temperature), Speculation(drafter, depth), settings))


def spread(total: int, wanted: int) -> list[int]:
    """Indices of `wanted` items spread evenly over `total`."""
    wanted = min(total, wanted)
    return [i * total // wanted for i in range(wanted)]


def _speedup(pairs: Sequence[tuple[int, float, int, float]]) -> float:
    plain_tokens, plain_seconds, tokens, seconds = (sum(column) for column in zip(*pairs, strict=True))
    return (tokens / seconds) / (plain_tokens / plain_seconds)


def _decode(
    target: Target, prompts: Sequence[list[int]], sampler: Sampler, speculation: Speculation | None, settings: Settings
) -> list[Output]:
    """All prompts in batches of similar length, in the order given."""
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
        )
        outputs |= dict(zip(batch, decoded, strict=True))
    return [outputs[i] for i in range(len(prompts))]


@torch.inference_mode()
def _scores(target: Target, ids: list[int], sampler: Sampler, seed: int) -> torch.Tensor:
    """What plain decoding maximises for the token that follows `ids`: (V)."""
    out = target.forward(
        torch.tensor([ids], device=target.device),
        target.new_cache(1, len(ids)),
        logits_at_B=torch.tensor([len(ids) - 1], device=target.device),
    )
    logits_V = out.logits[0, 0].to(torch.promote_types(out.logits.dtype, torch.float32))
    if sampler.greedy:
        return logits_V
    token_ids_V = torch.arange(len(logits_V), device=target.device)
    position = torch.tensor([[len(ids)]], device=target.device)
    return (
        sampler.log_probs(logits_V)
        + noise.gumbel(torch.tensor([seed], device=target.device), position, token_ids_V)[0, 0]
    )


def _by_category(conversations: Sequence[Conversation], outputs: Sequence[Output]) -> dict[str, metrics.Interval]:
    """tokens_per_round of each category."""
    groups: dict[str, list[metrics.Rounds]] = {}
    for conversation, output in zip(conversations, outputs, strict=True):
        groups.setdefault(conversation.category, []).append(output.rounds)
    return {name: metrics.pooled(rounds, metrics.tokens_per_round) for name, rounds in sorted(groups.items())}


def _record(
    target: Target, drafter: Drafter, conversations: Sequence[Conversation], settings: Settings
) -> dict[str, Any]:
    """Where the numbers come from."""
    parameters = list(drafter.parameters()) if isinstance(drafter, torch.nn.Module) else []
    return {
        "target": target.name,
        "target_fingerprint": target.shape.fingerprint,
        "target_parameters": sum(p.numel() for p in target.model.parameters()),
        "drafter": type(drafter).__module__.rsplit(".", 1)[-1],
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
        "settings": dataclasses.asdict(settings),
        "definitions": metrics.DEFINITIONS,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
