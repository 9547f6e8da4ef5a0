"""Records of tensors in flat files that are filled in place: no kill, full disk or second writer leaves a wrong value behind.

A record is what a column (one layer of the target, say) holds for one sequence: a few tensors of T rows. Where it lies follows from
the lengths alone. So a file has its full size before anything is computed for it, records come in any order, and the bytes
are the same whatever came between. A file of a column holds the records of one shard:

    8 bytes per record    2**32 + its CRC-32, less until it is written
    the records           raw tensors one behind the other, each record at a multiple of 8 bytes

A record is mapped, not read, and checked against its CRC when a process first asks for it (about a second per GB). What the
numbers mean is none of this file's business: `identity` says it, and a folder with another one is refused.
"""

import contextlib
import fcntl
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WRITTEN = 1 << 32


class Part(NamedTuple):
    """One tensor of a record: its name, its type, and its width per token (0: one number per token, no second dimension)."""

    name: str
    dtype: torch.dtype
    width: int


class Column(NamedTuple):
    """The name of its files, and the tensors of each record, larger types first so that each lies at a multiple of its size."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(part.dtype.itemsize * max(1, part.width) for part in self.parts)


class _File(NamedTuple):
    path: Path
    begins: list[int]
    """Where each record lies; the last one is the size of the file."""


class Shards:
    """A folder of columns.

    Args:
        folder: made if it is not there.
        identity: what all values depend on; a folder with another identity is refused.
        lengths: tokens of each sequence.
        shards: which sequences lie in each shard, in this order.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str | int],
        lengths: Sequence[int],
        shards: Sequence[Sequence[int]],
    ) -> None:
        self.folder, self.shards = folder, shards
        self._lengths = lengths
        self._place = {index: (s, k) for s, shard in enumerate(shards) for k, index in enumerate(shard)}
        self._files: dict[tuple[str, int], _File] = {}
        self._checked: set[tuple[str, int]] = set()
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked("identity"):
            _check_identity(folder, identity)

    def read(self, column: Column, index: int) -> dict[str, Tensor] | None:
        """The tensors of a record, mapped from the file: valid as long as they live, never changed. None where there is none yet.

        Raises:
            ValueError: the file is cut or damaged.
        """
        shard, place = self._place[index]
        file = self._file(column, shard)
        try:
            handle = open(file.path, "rb")
        except FileNotFoundError:
            return None
        with handle:
            _check_size(file, os.fstat(handle.fileno()).st_size)
            entry = int.from_bytes(os.pread(handle.fileno(), 8, 8 * place), "little")
            if entry < WRITTEN:
                return None
            begin = file.begins[place]
            # Copy-on-write: torch wants memory that could be written to.
            raw = np.memmap(handle, np.uint8, "c", begin, (self._size(column, index),))
        if (column.name, index) not in self._checked:
            if zlib.crc32(raw.data) + WRITTEN != entry:
                raise _damaged(file.path, "its bytes do not match their checksum")
            self._checked.add((column.name, index))
        return self._split(torch.from_numpy(raw), column, index)

    def write(self, column: Column, index: int, record: Mapping[str, Tensor]) -> None:
        """Stores a record; the lock of its shard must be held.

        Raises:
            ValueError: the disk is full, or the file cannot be written.
        """
        shard, place = self._place[index]
        file = self._file(column, shard)
        assert {name: tensor.dtype for name, tensor in record.items()} == {p.name: p.dtype for p in column.parts}
        data = b"".join(record[p.name].contiguous().view(torch.uint8).numpy().tobytes() for p in column.parts)
        assert len(data) == self._size(column, index)
        try:
            if not file.path.exists():
                _create(file)
            with open(file.path, "r+b", buffering=0) as handle:
                _check_size(file, os.fstat(handle.fileno()).st_size)
                _put(handle.fileno(), data, file.begins[place])
                _put(handle.fileno(), (zlib.crc32(data) + WRITTEN).to_bytes(8, "little"), 8 * place)
        except OSError as error:
            raise ValueError(
                f"{file.path} cannot be written ({error.strerror}); free some space or give another features.folder. What is "
                "stored stays, and the same command goes on from there"
            ) from error

    def missing(self, column: Column, shard: int) -> set[int]:
        """The sequences of a shard that a column lacks."""
        file, indices = self._file(column, shard), self.shards[shard]
        if not file.path.exists():
            return set(indices)
        _check_size(file, file.path.stat().st_size)
        table = np.fromfile(file.path, np.uint64, len(indices))
        return {indices[place] for place in np.flatnonzero(table < WRITTEN).tolist()}

    def shard_of(self, index: int) -> int:
        return self._place[index][0]

    def sync(self, column: Column, shard: int) -> None:
        """Waits until a file is on the disk."""
        with open(self._file(column, shard).path, "rb") as handle:
            os.fsync(handle.fileno())

    @contextlib.contextmanager
    def lock(self, shard: int, *, wait: bool = True) -> Iterator[bool]:
        """Keeps other writers of a shard away; gives whether it could, which it always can if it may wait."""
        with self._locked(f"{shard:05d}", wait) as mine:
            yield mine

    def sizes(self, columns: Sequence[Column]) -> tuple[int, int]:
        """Bytes of these columns, and how many of them the folder has already taken from the disk."""
        files = [self._file(column, shard) for column in columns for shard in range(len(self.shards))]
        return sum(file.begins[-1] for file in files), sum(file.begins[-1] for file in files if file.path.exists())

    def _file(self, column: Column, shard: int) -> _File:
        key = (column.name, shard)
        if key not in self._files:
            indices = self.shards[shard]
            spans = (-(-self._size(column, index) // 8) * 8 for index in indices)
            begins = list(itertools.accumulate(spans, initial=8 * len(indices)))
            self._files[key] = _File(self.folder / f"{column.name}-{shard:05d}.bin", begins)
        return self._files[key]

    def _size(self, column: Column, index: int) -> int:
        return self._lengths[index] * column.bytes_per_token

    def _split(self, raw_N: Tensor, column: Column, index: int) -> dict[str, Tensor]:
        length = self._lengths[index]
        pieces = raw_N.split([length * part.dtype.itemsize * max(1, part.width) for part in column.parts])
        shapes = [(length, part.width) if part.width else (length,) for part in column.parts]
        parts = zip(column.parts, pieces, shapes, strict=True)
        return {part.name: piece.view(part.dtype).view(shape) for part, piece, shape in parts}

    @contextlib.contextmanager
    def _locked(self, name: str, wait: bool = True) -> Iterator[bool]:
        with open(self.folder / f"{name}.lock", "w") as handle:  # closing it, or the end of the process, unlocks
            mine = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                mine = False
            yield mine


def _create(file: _File) -> None:
    """An empty file of full size. It reserves its space, so that a full disk stops the work before and not within it."""
    temporary = file.path.with_suffix(".writing")
    try:
        with open(temporary, "wb") as handle:
            if sys.platform == "linux":
                os.posix_fallocate(handle.fileno(), 0, file.begins[-1])
            else:
                handle.truncate(file.begins[-1])
            os.fsync(handle.fileno())
        temporary.replace(file.path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _put(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[done:], offset + done


def _check_size(file: _File, size: int) -> None:
    if size != file.begins[-1]:
        raise _damaged(file.path, f"it has {size:,} bytes instead of {file.begins[-1]:,}")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {what}; delete this file and run the same command again, it alone is made again"
    )


def differences(folder: Path, identity: Mapping[str, str | int]) -> list[str]:
    """In what a folder's identity differs; nothing if it has none yet. ValueError if it cannot be read."""
    file = folder / "identity.json"
    if not file.exists():
        return []
    try:
        there = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); delete the folder {folder}, it is made again") from error
    return [name for name in identity if there.get(name) != identity[name]]


def _check_identity(folder: Path, identity: Mapping[str, str | int]) -> None:
    file = folder / "identity.json"
    if file.exists():
        if differing := differences(folder, identity):
            raise ValueError(
                f"the feature store {folder} was made with other {', '.join(differing)}; "
                "give another features.folder, or delete this one"
            )
    else:
        temporary = file.with_suffix(".writing")
        temporary.write_text(json.dumps(identity, indent=2) + "\n")
        temporary.replace(file)
