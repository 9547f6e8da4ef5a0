"""The doctor's look at the frozen target, on real rows: its head, the captured layers, batches, and flags that a drafter copies.

Two conventions name captured layers. Here, in Hugging Face's `hidden_states` and in EAGLE's and vLLM's ids, i is the residual
stream *entering* decoder layer i (0 is the embedding); DFlash counts the stream *leaving* layer i, which is i + 1 here.

Letters: B sequences, T positions, F captured width, D width, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.layers import Attention, RMSNorm
from draftsmith.inference.decode import pad_ids
from draftsmith.inference.target import Target
from draftsmith.train.checks import Finding, Subject, judge

BATCH_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative error of a row's states, alone against in a batch: other shapes add up in another order."""
KNOWN_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
FP16_LIMIT = 30_000
"""Half of what float16 can hold."""


@torch.no_grad()
def head_gives_the_logits(subject: Subject) -> Finding:
    """`unembed(last)`, the teacher of every loss, against the model's own logits: same choice everywhere, same law nearly."""
    target, worst, same, total = subject.target, 0.0, 0, 0
    for row in subject.few[:3]:
        ids_1T = torch.tensor([row.cut.ids], device=target.device)
        theirs_TV = target.model(input_ids=ids_1T, use_cache=False).logits[0].float()
        ours_TV = target.unembed(target.hidden(ids_1T)[1])[0].float()
        gap_T = (ours_TV.log_softmax(1) - theirs_TV.log_softmax(1)).abs().amax(1)
        worst = max(worst, float(gap_T.max()))
        same += int((ours_TV.argmax(1) == theirs_TV.argmax(1)).sum())
        total += len(row.cut.ids)
    tolerance = 0.5 if target.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return judge(
        f"the head on the last state gives the model's logits: largest gap {worst:.2g} nats over {total:,} positions, the same "
        f"choice at {same / total:.1%}",
        "the state is not the one that the head reads (before the final norm?), or the logits are changed after the head; this "
        "architecture needs support in inference/target.py",
        fail=not worst <= tolerance or same < 0.98 * total,
        figures={"largest_gap": worst, "same_choice": same / total, "positions": total},
    )


@torch.no_grad()
def captured_layers(subject: Subject) -> Finding:
    """The layers that the drafter asks for against hooks made here, and against Hugging Face's `hidden_states`."""
    target, depth = subject.target, subject.target.shape.num_layers
    asked = [layer for layer in subject.layers if layer != "last"]
    layers = asked or sorted({1, depth // 2})
    ids_1T = torch.tensor([subject.few[0].cut.ids], device=target.device)
    features_TF = target.hidden(ids_1T, layers)[0][0]
    ours = dict(zip(layers, features_TF.split(target.shape.hidden_size, dim=1), strict=True))
    entering, leaving, published = _explicit(target, ids_1T)
    wrong = []
    for layer in layers:
        other = {
            "entering": entering.get(layer),
            "leaving": leaving.get(layer - 1),
            "hidden_states": published.get(layer),
        }
        gaps = {name: _relative(ours[layer], state) for name, state in other.items() if state is not None}
        if not all(gap <= 1e-6 for gap in gaps.values()):
            nearest = min(range(depth), key=lambda i: _relative(ours[layer], entering[i]))
            wrong.append(
                f"layer {layer} is what enters layer {nearest}" if nearest != layer else f"layer {layer}: {gaps}"
            )
    what = "captured" if asked else "not asked for by this kind, but tried:"
    return judge(
        f"{what} {layers} are Hugging Face's hidden_states {layers}: vLLM's and EAGLE's ids {layers}, "
        f"DFlash's {[i - 1 for i in layers]}" + (f"; wrong: {'; '.join(wrong)}" if wrong else ""),
        "the layers are captured from another place than their ids say, off by one perhaps (is the embedding counted?); correct "
        "the ids or the capture before anything is stored",
        fail=bool(wrong),
        figures={"entering": layers, "leaving": [i - 1 for i in layers], "asked": bool(asked), "wrong": wrong},
    )


@torch.no_grad()
def batch_of_one(subject: Subject) -> Finding:
    """A row's states do not depend on the rows beside it nor on padding."""
    target, rows = subject.target, [row.cut.ids for row in subject.few[:4]]
    layers = subject.layers
    together_BTF, last_BTD = target.hidden(pad_ids(rows).to(target.device), layers)
    worst = 0.0
    for i, ids in enumerate(rows):
        alone_TF, alone_TD = (state[0] for state in target.hidden(torch.tensor([ids], device=target.device), layers))
        worst = max(worst, _relative(last_BTD[i, : len(ids)], alone_TD))
        if layers:
            worst = max(worst, _relative(together_BTF[i, : len(ids)], alone_TF))
    tolerance = BATCH_TOLERANCE[target.dtype]
    return judge(
        f"states of {len(rows)} rows alone and in one padded batch differ by {worst:.1e} (relative; {tolerance:g} is usual for "
        f"{_name(target.dtype)})",
        "the target lets padding or neighbours into a row; use another attention implementation, or capture_batch: 1",
        fail=not worst <= tolerance,
        figures={"relative_error": worst, "tolerance": tolerance},
    )


@torch.no_grad()
def finite_features(subject: Subject) -> Finding:
    """No NaN or infinity in what the drafter will read, and room left in float16."""
    target, bad, largest, total = subject.target, 0, 0.0, 0
    for row in subject.few:
        states = target.hidden(torch.tensor([row.cut.ids], device=target.device), subject.layers)
        for state in states:
            finite = state.isfinite()
            bad, total = bad + int((~finite).sum()), total + state.numel()
            largest = max(largest, float(state[finite].abs().max()) if state.numel() and bool(finite.any()) else 0.0)
    return judge(
        f"{bad:,} of {total:,} captured values are not finite; the largest is {largest:.3g}",
        "run the target in bfloat16 or float32 (target.dtype): float16 overflows for it",
        fail=bad > 0,
        warn=target.dtype == torch.float16 and largest > FP16_LIMIT,
        figures={"not_finite": bad, "values": total, "largest": largest},
    )


def rope_and_norms(subject: Subject) -> Finding:
    """Rotary frequencies are exact and of a known form; what the drafter copies (theta, eps) is what the target computes with."""
    target, drafter = subject.target, subject.drafter
    shape, wrong, notes = drafter.shape, [], []
    types = _rope_types(target.config)
    frequencies = {name: b for name, b in target.model.named_buffers() if name.endswith("inv_freq")}
    for name, frequency in frequencies.items():
        if frequency.dtype != torch.float32:
            wrong.append(f"{name} is {_name(frequency.dtype)}, not float32")
        elif types == {"default"}:
            exact = shape.rope_theta ** -(torch.arange(0, 2 * len(frequency), 2).double() / (2 * len(frequency)))
            if (error := _relative(frequency.double().cpu(), exact)) > 1e-6:
                wrong.append(f"{name} is off by {error:.1e} from theta {shape.rope_theta:g}")
    if unknown := sorted(types - set(KNOWN_ROPE)):
        wrong.append(f"rotary positions of unknown type {', '.join(unknown)}")
    eps = {float(vars(m)["variance_epsilon"]) for m in target.model.modules() if "variance_epsilon" in vars(m)}
    eps |= {m.eps for m in drafter.modules() if isinstance(m, RMSNorm)} if eps else set()
    if len(eps) > 1 or eps - {shape.rms_norm_eps}:
        wrong.append(f"norms with eps {sorted(eps)}, the drafter's sizes say {shape.rms_norm_eps:g}")
    attends = any(isinstance(module, Attention) for module in drafter.modules())
    if types - {"default"} and attends:
        notes.append("the drafter's own layers rotate without that scaling")
    said = f"rotary {'/'.join(sorted(types))} with theta {shape.rope_theta:g}" if frequencies else "no rotary positions"
    return judge(
        "; ".join(
            [
                f"{said}, {len(frequencies)} fp32 tables, eps {', '.join(f'{e:g}' for e in sorted(eps)) or 'none'}",
                *wrong,
                *notes,
            ]
        ),
        "load the target with its frequencies in float32 and give target.shape as its config says"
        if wrong
        else "right in draftsmith, which trains and decodes alike; an engine must not scale the drafter's positions",
        fail=bool(wrong),
        warn=bool(notes),
        figures={"rope_types": sorted(types), "rope_theta": shape.rope_theta, "eps": sorted(eps), "wrong": wrong},
    )


def precision(subject: Subject) -> Finding:
    """The target runs in the type that it was saved in, or a wider one."""
    ours, saved = _name(subject.target.dtype), _saved_dtype(subject.target.name)
    narrower = ours == "float16" and saved != "float16" or ours == "bfloat16" and saved == "float16"
    return judge(
        f"the target runs in {ours}, its checkpoint is {saved or 'of unknown type'}",
        f"set target.dtype to {saved if saved != 'float32' else 'bfloat16'}: {ours} loses range or digits that the checkpoint has",
        warn=narrower and saved is not None,
        figures={"target": ours, "checkpoint": saved},
    )


# ---- helpers --------------------------------------------------------------------------------------------------------


def _explicit(target: Target, ids_1T: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
    """What enters and what leaves each decoder layer by hooks of our own, and the model's `hidden_states`; without the batch."""
    entering: dict[int, Tensor] = {}
    leaving: dict[int, Tensor] = {}

    def note(index: int, layer: nn.Module) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            entering[index] = (args[0] if args else kwargs["hidden_states"])[0]
            leaving[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return layer.register_forward_hook(hook, with_kwargs=True)

    handles = [note(index, layer) for index, layer in enumerate(target.layers)]
    try:
        states = target.model(input_ids=ids_1T, use_cache=False, output_hidden_states=True).hidden_states
    finally:
        for handle in handles:
            handle.remove()
    return (
        entering,
        leaving,
        {i: state[0] for i, state in enumerate(states[:-1])},
    )  # the last one is behind the final norm


def _relative(ours: Tensor, theirs: Tensor) -> float:
    wide, exact = ours.double(), theirs.double()
    return float((wide - exact).norm() / exact.norm().clamp_min(1e-30))


def _rope_types(config: Any) -> set[str]:
    """Types of all layers' rotary positions."""
    rope = vars(config).get("rope_parameters") or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [
        rope
    ]  # one per layer type in some architectures
    return {str(part.get("rope_type", "default")) for part in parts}


def _saved_dtype(path: str) -> str | None:
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    found = config.get("dtype") or config.get("torch_dtype")
    return str(found) if found else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
