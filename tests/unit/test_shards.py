"""Files that are filled in place: what was written comes back, and nothing else ever does."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from draftsmith.train.shards import Column, Part, Shards

LENGTHS = [5, 1, 8, 3, 7]
SHARDS = [[1, 3], [0, 4, 2]]
STATES = Column("layer2-float8", (Part("scale", torch.float32, 0), Part("codes", torch.float8_e4m3fn, 6)))
LAST = Column("last-target", (Part("argmax", torch.int32, 0), Part("codes", torch.bfloat16, 6)))


def record(column: Column, index: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + index)
    made = {}
    for name, dtype, width in column.parts:
        shape = (LENGTHS[index], width) if width else (LENGTHS[index],)
        made[name] = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    return made


def opened(folder: Path) -> Shards:
    return Shards(folder, {"made of": "numbers"}, LENGTHS, SHARDS)


def filled(folder: Path, order: list[int] | None = None) -> Shards:
    shards = opened(folder)
    for index in order or range(len(LENGTHS)):
        for column in (STATES, LAST):
            with shards.lock(shards.shard_of(index)):
                shards.write(column, index, record(column, index))
    return shards


def assert_holds(shards: Shards, column: Column, index: int) -> None:
    found, expected = shards.read(column, index), record(column, index)
    assert found is not None and list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_records_come_back_in_any_order_and_the_files_are_the_same_whatever_the_order(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    filled(tmp_path / "b", [4, 1, 0, 3, 2])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    again = opened(tmp_path / "a")
    for index in (2, 0, 4, 1, 3, 2):
        for column in (LAST, STATES):
            assert_holds(again, column, index)
    assert not any(again.missing(column, shard) for column in (LAST, STATES) for shard in (0, 1))


def test_a_file_is_its_table_of_checksums_and_the_raw_records(tmp_path: Path) -> None:
    """Read back by hand."""
    import zlib

    filled(tmp_path)
    raw = (tmp_path / "layer2-float8-00001.bin").read_bytes()
    position = 24
    for place, index in enumerate(SHARDS[1]):
        codes = record(STATES, index)
        data = codes["scale"].numpy().tobytes() + codes["codes"].view(torch.uint8).numpy().tobytes()
        assert raw[position : position + len(data)] == data
        assert int.from_bytes(raw[8 * place : 8 * place + 8], "little") == 2**32 + zlib.crc32(data)
        position += -(-len(data) // 8) * 8
    assert position == len(raw)


def test_what_is_not_written_is_missing(tmp_path: Path) -> None:
    shards = opened(tmp_path)
    assert shards.read(LAST, 0) is None and shards.missing(LAST, 1) == {0, 2, 4}
    shards.write(LAST, 4, record(LAST, 4))
    assert_holds(shards, LAST, 4)
    assert shards.read(LAST, 0) is None and shards.missing(LAST, 1) == {0, 2}
    assert shards.read(STATES, 4) is None and shards.missing(STATES, 1) == {0, 2, 4}
    whole, taken = shards.sizes([LAST, STATES])
    file = tmp_path / "last-target-00001.bin"
    assert taken == file.stat().st_size and 512 * file.stat().st_blocks >= taken  # the space is its own already
    filled(tmp_path)
    assert shards.sizes([LAST, STATES]) == (whole, whole)


@pytest.mark.parametrize("place", [0, 4, 24, -1], ids=["checksum", "mark", "first byte", "last byte"])
def test_a_changed_byte_is_noticed_and_only_that_file_has_to_be_made_again(place: int, tmp_path: Path) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    file = tmp_path / "last-target-00001.bin"
    damaged = bytearray(before[file.name])
    damaged[place] ^= 0x10
    file.write_bytes(damaged)
    shards = opened(tmp_path)
    with pytest.raises(
        ValueError, match=r"last-target-00001\.bin is damaged: .* checksum; delete this file and run the same"
    ):
        [shards.read(LAST, index) for index in SHARDS[1]]
    file.unlink()
    assert [shards.missing(column, shard) for column in (LAST, STATES) for shard in (0, 1)] == [
        set(),
        {0, 2, 4},
        set(),
        set(),
    ]
    for index in SHARDS[1]:
        shards.write(LAST, index, record(LAST, index))
    assert contents(tmp_path) == before


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    shards = filled(tmp_path)
    file = tmp_path / "last-target-00000.bin"
    os.truncate(file, file.stat().st_size - 1)
    for act in (
        lambda: shards.read(LAST, 3),
        lambda: shards.missing(LAST, 0),
        lambda: shards.write(LAST, 3, record(LAST, 3)),
    ):
        with pytest.raises(
            ValueError, match=r"last-target-00000\.bin is damaged: it has 79 bytes instead of 80; delete"
        ):
            act()


def test_a_folder_made_of_something_else_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="was made with other made of; give another features.folder"):
        Shards(tmp_path, {"made of": "words"}, LENGTHS, SHARDS)
    assert contents(tmp_path) == before
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(ValueError, match=r"identity.json is damaged"):
        opened(tmp_path)


def test_writers_of_a_shard_wait_for_each_other_and_those_of_other_shards_do_not(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    order = []
    with first.lock(0) as mine:
        assert mine
        with second.lock(0, wait=False) as mine:
            assert not mine
        with second.lock(1, wait=False) as mine:
            assert mine

        def waits() -> None:
            with second.lock(0):
                order.append("second")

        thread = threading.Thread(target=waits)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_file_that_has_no_room_leaves_nothing_behind_and_says_so(tmp_path: Path) -> None:
    """The operating system refuses to make files larger than a limit, as a full disk would; what was stored before stays."""
    shards = opened(tmp_path)
    shards.write(LAST, 3, record(LAST, 3))
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(ValueError, match=r"last-target-00001\.bin cannot be written \(.*\); free some space"):
            shards.write(LAST, 4, record(LAST, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before
    assert shards.missing(LAST, 1) == {0, 2, 4}
    filled(tmp_path)
    assert_holds(shards, LAST, 4)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from draftsmith.train import shards as module
sys.path.insert(0, sys.argv[3])
import test_shards as test

puts = int(sys.argv[2])
plain = os.pwrite

def pwrite(descriptor, data, offset):
    global puts
    puts -= 1
    if puts < 0:
        plain(descriptor, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(descriptor, data, offset)

module.os.pwrite = pwrite
test.filled(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("puts", [2, 3])
def test_a_kill_in_the_middle_of_a_write_leaves_a_record_that_is_not_there(puts: int, tmp_path: Path) -> None:
    """Of the second record half of the data or half of the checksum gets to the file."""
    folder = tmp_path / "f"
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(folder), str(puts), str(Path(__file__).parent)]
    assert subprocess.run(command).returncode == -9
    shards = opened(folder)
    assert_holds(shards, STATES, 0)
    assert shards.read(LAST, 0) is None and shards.missing(LAST, 1) == {0, 2, 4}
    filled(folder)
    filled(tmp_path / "straight")
    assert contents(folder) == contents(tmp_path / "straight")
