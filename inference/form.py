"""What was done to the weights of a target's checkpoint: quantised by bitsandbytes, changed by a LoRA adapter.

A drafter is made for weights with a name, the fingerprint. Quantising does not change it: it only rounds, and a drafter for
the four-bit target may serve the bf16 one (what that costs, an evaluation says). An adapter does: its target says other things.
"""

import dataclasses
from typing import Literal, get_args

from draftsmith.inference.placement import Placement, Sharding

Quantisation = Literal["8bit", "4bit"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """See above.

    Attributes:
        quantisation: of the decoder's matrices; embedding, norms and head never are.
        adapter: folder or hub id of a LoRA adapter.
        merged: it was added to the weights; else it runs beside them.
        fingerprint: of the checkpoint and the adapter; empty means that of the model as it is.
    """

    quantisation: Quantisation | None = None
    adapter: str | None = None
    merged: bool = False
    fingerprint: str = ""

    def rounding(self) -> dict[str, str]:
        """By what states of equal fingerprints differ all the same; nothing for plain weights."""
        found = {} if self.quantisation is None else {"quantisation": str(self.quantisation)}
        return (
            found if self.adapter is None else {**found, "adapter": "merged" if self.merged else "beside the weights"}
        )

    def __str__(self) -> str:
        """For people: empty for plain weights."""
        parts = [] if self.quantisation is None else [f"quantised to {self.quantisation}"]
        if self.adapter is not None:
            parts.append(f"adapter {self.adapter}{' merged' if self.merged else ''}")
        return ", ".join(parts)

    def not_plain(self, name: str) -> str | None:
        """Why its layers cannot be copied as they are, as half a sentence; None if they can."""
        if self.quantisation is not None:
            return f"{name} is quantised to {self.quantisation} (give target.quantisation: null)"
        if self.adapter is not None and not self.merged:
            return f"{name} has an adapter beside its weights (give target.merge_adapter: true)"
        return None


PLAIN = Form()


def check_form(
    name: str, placement: Placement, quantisation: Quantisation | None, adapter: str | None, merge_adapter: bool
) -> None:
    """ValueError for settings of a target that exclude each other; before anything is loaded."""
    if merge_adapter and adapter is None:
        raise ValueError("merge_adapter belongs to an adapter; give adapter: FOLDER_OR_ID, or leave merge_adapter out")
    if quantisation is None:
        return
    if placement in get_args(Sharding):
        raise ValueError(
            f"a target cannot be both quantised ({quantisation}) and sharded ({placement}): packed weights are not cut into "
            "parts; leave one out, or give placement: device_map"
        )
    if merge_adapter:
        raise ValueError(
            f"an adapter cannot be merged into a target of {quantisation}: the sums would be rounded once more; give "
            "merge_adapter: false, or leave quantisation out"
        )
    if name.lower().endswith(".gguf"):
        raise ValueError(f"target {name!r} is a GGUF file, which is quantised already; leave quantisation out")
