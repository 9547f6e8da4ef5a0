"""Where training data come from: a source, written as one string, and the rows of it, one after the other.

    data/chats.jsonl?weight=2
    data/folder
    HuggingFaceH4/ultrachat_200k?split=train_sft&streaming=true&limit=10000

JSON files are read by `json_rows`; Parquet, saved data sets and the hub's through the `datasets` library, which runs no code that a
data set brings along. What a row holds is not looked at here (`inference.records`), except that the keys that Arrow fills with null
are dropped: the row never had them.
"""

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from draftsmith.configs import locate
from draftsmith.inference.records import decode
from draftsmith.train.json_rows import Cut, Row, json_rows

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
OWN_OUTPUT = (".rejected.jsonl", ".unanswered.jsonl", ".meta.json", "dataset_infos.json")
"""Ends of the names that are passed over in a folder: what commands write beside data, and a hub repository's own notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the string says.

    Attributes:
        path: a file, a folder of files, a data set saved by the `datasets` library, or else a hub id.
        weight: how often each conversation counts: 0.5 takes a random half, 2 takes all twice.
        split: of a data set, `train` unless given; on a plain folder it has the `datasets` library decide which files are meant.
        name: of a data set's configuration.
        streaming: read a hub data set (or a plain folder) over the wire, without a copy on disk.
        limit: read so many rows and no more.
        columns: (key of a record, the row's own name for it): only these are read. None: all, under their own names.
        format: jsonl, json or parquet, for a file whose name does not say.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    name: str | None = None
    streaming: bool = False
    limit: int | None = None
    columns: tuple[tuple[str, str], ...] | None = None
    format: str | None = None


def parse_source(text: str) -> Source:
    """Reads `PATH_OR_HUB_ID[?key=value&key=value]`. Raises ValueError."""
    path, question, settings = text.partition("?")
    if not path:
        raise ValueError(
            f"source {text!r} names nothing; give PATH_OR_HUB_ID?key=value, for example chats.jsonl?weight=2"
        )
    values: dict[str, Any] = {}
    for setting in settings.split("&") if question else []:
        key, equals, value = setting.partition("=")
        if not equals or not value or key not in READERS or key in values:
            near = difflib.get_close_matches(key, READERS, n=1)
            hint = f"did you mean {near[0]!r}? " if near and near[0] != key else ""
            allowed = f"{hint}allowed: {', '.join(f'{name}=...' for name in READERS)}, each once, with & between two"
            raise ValueError(f"source {text!r} has the setting {setting!r}; {allowed}")
        try:
            values[key] = READERS[key](unquote(value))
        except ValueError as error:
            raise ValueError(f"source {text!r}: {key} is {value!r}; give {error}") from None
    return Source(path=path, **values)


def exists(source: Source) -> bool:
    """False where it can only be a mistyped path: nothing is there, and it does not look like a hub id."""
    return locate(source.path).exists() or _is_hub_id(source.path)


def rows(source: Source) -> Iterator[Row | Cut]:
    """Raises ValueError for a source that is not there or cannot be opened, and a setting that cannot take effect."""
    return itertools.islice(_rows(source), source.limit)


def record_of(row: Row, source: Source) -> Any:
    """What the row holds, under the keys that the source gives it. Raises BadRecord."""
    record = decode(row.content, row.at) if isinstance(row.content, bytes) else row.content
    if source.columns is None or not isinstance(record, dict):
        return record
    return {key: record[column] for key, column in source.columns if column in record}


def _rows(source: Source) -> Iterator[Row | Cut]:
    path = locate(source.path)
    if path.is_file():
        _refuse(source, "a file", "split", "name", "streaming")
        return _of_file(path, source.format)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        _refuse(source, "a saved data set", "name", "streaming", "format")
        return _of_data_set(source, lambda: _saved(path, source.split))
    if path.is_dir() and source.split is None and source.name is None and not source.streaming:
        _refuse(source, "a folder", "format")
        return _of_folder(path)
    if path.is_dir() or _is_hub_id(source.path):
        _refuse(source, "a data set", "format")
        return _of_data_set(source, lambda: _from_hub(source))
    raise ValueError(f"{path}: No such file or directory; give a file, a folder or a hub id (OWNER/NAME)")


def _of_file(path: Path, wanted: str | None) -> Iterator[Row | Cut]:
    """A name that does not say is taken for JSON lines or a JSON list."""
    kind = wanted or FORMATS.get(_suffix(path), "json")
    if kind != "parquet":
        return json_rows(path, lines=kind == "jsonl")
    from datasets import load_dataset

    source = Source(path=str(path))
    return _of_data_set(source, lambda: load_dataset("parquet", data_files=str(path), split="train", streaming=True))


def _of_folder(path: Path) -> Iterator[Row | Cut]:
    files = [file for file in sorted(path.rglob("*")) if _suffix(file) in FORMATS and file.is_file()]
    files = [file for file in files if not file.name.endswith(OWN_OUTPUT) and not file.name.startswith((".", "_"))]
    if not files:
        raise ValueError(
            f"{path}: no file of data in the folder; allowed: {', '.join(FORMATS)}, the first three packed (.gz) too"
        )
    return itertools.chain.from_iterable(_of_file(file, None) for file in files)


def _of_data_set(source: Source, load: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[Row]:
    from datasets.exceptions import DatasetsError

    try:
        for number, row in enumerate(load(), start=1):
            yield Row(f"{source.path}: row {number}", f"row-{number}", _without_nulls(row))
    except (
        DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a split that is not there, no network, a damaged file, ...
        detail = " ".join(str(error).split())
        raise ValueError(
            f"{source.path}: {detail}; give a data set that the `datasets` library reads, and its split=..."
        ) from error


def _saved(path: Path, split: str | None) -> Iterable[dict[str, Any]]:
    from datasets import Dataset, load_from_disk

    found = load_from_disk(str(path))
    if isinstance(found, Dataset):
        if split is not None:
            raise ValueError(f"it has no splits, but split={split} is asked for")
        return found
    if (split or "train") not in found:
        raise ValueError(f"it has no split {split or 'train'!r}, but {', '.join(map(repr, found))}")
    return found[split or "train"]


def _from_hub(source: Source) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    path = str(locate(source.path))
    return load_dataset(path, source.name, split=source.split or "train", streaming=source.streaming)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _refuse(source: Source, what: str, *settings: str) -> None:
    """Settings that cannot take effect."""
    values = {"split": source.split, "name": source.name, "streaming": source.streaming, "format": source.format}
    for setting in settings:
        if values[setting]:
            raise ValueError(
                f"{source.path} is {what}, on which {setting}={values[setting]} has no effect; leave it out"
            )


def _is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and _suffix(Path(path)) not in FORMATS


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _weight(text: str) -> float:
    value = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+", text) else math.nan
    return value if 0 < value <= 1000 else _say("a number above 0, at most 1000")


def _limit(text: str) -> int:
    return int(text) if re.fullmatch("[1-9][0-9]{0,17}", text) else _say("a whole number above 0")


def _streaming(text: str) -> bool:
    return text == "true" if text in ("true", "false") else _say("true or false")


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple((key, column or key) for key, _, column in (item.partition(":") for item in text.split(",")))
    return (
        pairs
        if all(key for key, _ in pairs)
        else _say("KEY:COLUMN,KEY:COLUMN, for example prompt:question,completion:answer")
    )


def _format(text: str) -> str:
    return text if text in FORMATS.values() else _say("jsonl, json or parquet")


def _say(allowed: str) -> NoReturn:
    raise ValueError(allowed)


READERS: dict[str, Callable[[str], Any]] = {
    "weight": _weight,
    "split": str,
    "name": str,
    "streaming": _streaming,
    "limit": _limit,
    "columns": _columns,
    "format": _format,
}
