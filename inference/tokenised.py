"""A record that came tokenised: its ids and its mask, checked, without padding. No tokenizer is asked here."""

from typing import Any

from draftsmith.inference.turns import BadRecord, shown


def given_ids(record: dict[str, Any], at: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Ids and mask without padding. Labels must repeat the ids: shifted ones would teach every token the place after its own."""
    ids, masks = record["input_ids"], [key for key in ("loss_mask", "labels") if record.get(key) is not None]
    if len(masks) != 1:
        message = f"{at}: {'both loss_mask and labels' if masks else 'input_ids without a mask'}"
        raise BadRecord(f"{message}; allowed: input_ids with loss_mask, or with labels", "malformed token ids")
    learned = record[masks[0]]
    attended = (
        record["attention_mask"]
        if record.get("attention_mask") is not None
        else [1] * (len(ids) if isinstance(ids, list) else 0)
    )
    columns = {"input_ids": ids, masks[0]: learned, "attention_mask": attended}
    for key, column in columns.items():
        if not isinstance(column, list) or not column or not all(isinstance(value, int) for value in column):
            raise BadRecord(
                f"{at}: {key!r} is {shown(column)}; allowed: a list of whole numbers", "malformed token ids"
            )
        if len(column) != len(ids):
            message = f"{at}: {key!r} has {len(column)} entries, input_ids {len(ids)}; allowed: as many"
            raise BadRecord(message, "malformed token ids")
    if masks == ["labels"]:
        wrong = next(
            (i for i, (label, token) in enumerate(zip(learned, ids, strict=True)) if label not in (-100, token)), None
        )
        if wrong is not None:
            message = f"{at}: label {wrong} is {learned[wrong]}, input_ids have {ids[wrong]} there"
            raise BadRecord(f"{message}; allowed: -100, or the id at the same place (not shifted)", "shifted labels")
        learned = [int(label != -100) for label in learned]
    if min(ids) < 0 or not {*learned, *attended} <= {0, 1}:
        raise BadRecord(
            f"{at}: an id below 0, or a mask of other than 0 and 1; allowed: neither", "malformed token ids"
        )
    start = attended.index(1) if 1 in attended else 0
    stop = start + sum(attended)
    if 0 in attended[start:stop] or 1 in [*learned[:start], *learned[stop:]] or start == stop:
        message = (
            f"{at}: attention_mask has zeros among the ids, or where a token is learned; allowed: padding at the ends"
        )
        raise BadRecord(message, "malformed token ids")
    return tuple(ids[start:stop]), tuple(bool(value) for value in learned[start:stop])
