"""What the frozen target says about a sequence, in the form in which it is stored: its states at some layers, its last states or
its law's k likeliest tokens, and its law's normaliser and argmax.

Letters: B sequences, T positions, F captured width, D width, V vocabulary, n supervised positions.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafters.base import LayerId
from draftsmith.inference.decode import pad_ids
from draftsmith.inference.target import Target
from draftsmith.train import encodings
from draftsmith.train.data import Sequence
from draftsmith.train.encodings import Coded
from draftsmith.train.shards import Column, Part

LOGIT_ELEMENTS = 1 << 23

Key = LayerId | Literal["top"]
"""What has a column of its own: the states of a layer, or the law's likeliest tokens."""


class Top(NamedTuple):
    """The target's k most likely tokens, 0 where nothing is supervised.

    Attributes:
        ids_Tk: int32.
        logits_Tk: in the target's dtype, as it makes them; less the normaliser they are the exact log-probabilities.
    """

    ids_Tk: Tensor
    logits_Tk: Tensor


class Captured(NamedTuple):
    """The target's view of one sequence of T tokens, as it is stored; the last two are 0 where nothing is supervised.

    Attributes:
        layers: states by layer.
        last: behind the final norm; None if the likeliest tokens are kept instead.
        top: these; None if not.
        log_normaliser_T: of the law that the stored last states give: in eight bits it is not quite the target's, but a law.
        argmax_T: int32, the most likely token by the target itself, however its states are stored.
    """

    layers: dict[LayerId, Coded]
    last: Coded | None
    top: Top | None
    log_normaliser_T: Tensor
    argmax_T: Tensor


def capture(
    target: Target,
    sequences: SequenceOf[Sequence],
    layers: SequenceOf[LayerId],
    *,
    encoding: encodings.Name = "target",
    together: int = 1,
    top_k: int | None = None,
) -> list[Captured]:
    """Runs the target over the sequences, so many in each pass, and looks at its law wherever the next token is supervised.

    With `top_k` so many of its likeliest tokens are kept instead of the last states. All processes of a sharded target call it
    equally often, with sequences of their own.

    Raises:
        ValueError: the target gives values that are not finite.
    """
    passes = [sequences[begin : begin + together] for begin in range(0, len(sequences), together)]
    # Other processes of a sharded target may have more sequences; known before the first pass, for none ends without them all.
    idle = 0 if target.lockstep is None else target.lockstep.behind(len(passes))
    found = [captured for some in passes for captured in _one_pass(target, some, layers, encoding, top_k)]
    for _ in range(idle):
        target.hidden(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
    return found


def _one_pass(
    target: Target,
    sequences: SequenceOf[Sequence],
    layers: SequenceOf[LayerId],
    encoding: encodings.Name,
    top_k: int | None,
) -> list[Captured]:
    ids_BT = pad_ids([sequence.ids for sequence in sequences]).to(target.device)
    hidden = [layer for layer in layers if layer != "last"]  # "last" is kept in any case
    features_BTF, last_BTD = target.hidden(ids_BT, hidden)
    _refuse_not_finite(target, sequences, features_BTF, last_BTD)
    teaches_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        teaches_BT[row, : len(sequence.ids) - 1] = torch.tensor(sequence.loss_mask[1:])
    normaliser_BT, argmax_BT, top = _law(target, last_BTD, teaches_BT, top_k)
    last = encodings.encode(last_BTD, encoding) if top is None else None
    if last is not None and last.scale_T is not None:  # the exact one would leave the stored law a mass that is not 1
        normaliser_BT, _, _ = _law(target, encodings.decode(last, target.dtype), teaches_BT)
    split = features_BTF.split(target.shape.hidden_size, dim=-1)
    per_layer: dict[LayerId, Coded] = {
        layer: encodings.encode(x, encoding) for layer, x in zip(hidden, split, strict=False)
    }

    def cut(tensor_BT: Tensor, row: int) -> Tensor:
        return tensor_BT[row, : len(sequences[row].ids)].clone()  # a view would keep the whole padded batch alive

    def cut_states(coded: Coded, row: int) -> Coded:
        return Coded(cut(coded.codes_TD, row), None if coded.scale_T is None else cut(coded.scale_T, row))

    return [
        Captured(
            {layer: cut_states(coded, row) for layer, coded in per_layer.items()},
            None if last is None else cut_states(last, row),
            None if top is None else Top(cut(top.ids_Tk, row), cut(top.logits_Tk, row)),
            cut(normaliser_BT, row),
            cut(argmax_BT.int(), row),
        )
        for row in range(len(sequences))
    ]


def _law(
    target: Target, last_BTD: Tensor, teaches_BT: Tensor, top_k: int | None = None
) -> tuple[Tensor, Tensor, Top | None]:
    """Log-normaliser (fp32 or wider), argmax and, if any are wanted, likeliest tokens of the target's law at the marked positions,
    0 elsewhere; logits in chunks."""
    chunks = []
    with torch.no_grad():
        for chunk in last_BTD[teaches_BT].split(max(1, LOGIT_ELEMENTS // target.shape.vocab_size)):
            logits = target.unembed(chunk)
            top: tuple[Tensor, ...] = () if top_k is None else logits.topk(top_k)  # before they are changed in place
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            largest, argmax = logits.max(-1)
            normaliser = logits.sub_(largest[:, None]).exp_().sum(-1).log() + largest
            chunks.append((normaliser, argmax, *top))

    def place(values_n: Tensor) -> Tensor:
        shape = (*teaches_BT.shape, *values_n.shape[1:])
        return values_n.new_zeros(shape).index_put((teaches_BT,), values_n)

    normaliser_BT, argmax_BT, *top_BTk = (place(torch.cat(parts)) for parts in zip(*chunks, strict=True))
    return normaliser_BT, argmax_BT, Top(top_BTk[1].int(), top_BTk[0]) if top_BTk else None


def finite(states: Tensor) -> bool:
    """Whether all of them are; far cheaper than `isfinite`, which knows no vector instructions for bf16."""
    return states.numel() == 0 or all(math.isfinite(extreme) for extreme in states.aminmax())


def _refuse_not_finite(target: Target, sequences: SequenceOf[Sequence], *states_BTF: Tensor) -> None:
    if all(map(finite, states_BTF)):
        return
    for row, sequence in enumerate(sequences):
        if not all(finite(states[row, : len(sequence.ids)]) for states in states_BTF):
            ids = sequence.ids[:40]
            begin = repr(target.tokenizer.decode(ids)) if target.tokenizer is not None else f"with the ids {ids}"
            raise ValueError(
                f"{target.name} gives values that are not finite for the conversation of {len(sequence.ids)} tokens that begins "
                f"{begin}; look at it and leave it out, or give target.dtype: float32"
            )


def columns(
    layers: Iterable[LayerId], encoding: encodings.Name, width: int, dtype: torch.dtype, top_k: int | None
) -> dict[Key, Column]:
    """How these layers of a target of that width and type, and its last states or likeliest tokens, are stored."""
    codes, scale = encodings.types(encoding, dtype)
    states = [Part("codes", codes, width), *([] if scale is None else [Part("scale", scale, 0)])]
    law = [Part("normaliser", torch.promote_types(dtype, torch.float32), 0), Part("argmax", torch.int32, 0)]
    found: dict[Key, Column] = {
        layer: _column(f"layer{layer}-{encoding}", states) for layer in layers if layer != "last"
    }
    if top_k is None:
        found["last"] = _column(f"last-{encoding}", states + law)
    else:
        found["top"] = _column(f"top{top_k}", [Part("ids", torch.int32, top_k), Part("logits", dtype, top_k), *law])
    return found


def _column(name: str, parts: list[Part]) -> Column:
    return Column(name, tuple(sorted(parts, key=lambda part: -part.dtype.itemsize)))


def to_record(captured: Captured, key: Key) -> dict[str, Tensor]:
    """What its column stores, on the CPU."""
    if key == "top":
        assert captured.top is not None
        record = {"ids": captured.top.ids_Tk, "logits": captured.top.logits_Tk}
    else:
        coded = captured.last if key == "last" else captured.layers[key]
        assert coded is not None
        record = {"codes": coded.codes_TD} | ({} if coded.scale_T is None else {"scale": coded.scale_T})
    if key in ("last", "top"):
        record |= {"normaliser": captured.log_normaliser_T, "argmax": captured.argmax_T}
    return {name: tensor.cpu() for name, tensor in record.items()}


def from_records(records: Mapping[Key, Mapping[str, Tensor]]) -> Captured:
    """The inverse."""
    coded: dict[LayerId, Coded] = {
        key: Coded(record["codes"], record.get("scale")) for key, record in records.items() if key != "top"
    }
    last = coded.pop("last", None)
    law = records["top" if last is None else "last"]
    top = Top(law["ids"], law["logits"]) if last is None else None
    return Captured(coded, last, top, law["normaliser"], law["argmax"])
