"""Reading ahead: the order, how far, errors, and that a program ends although a thread reads."""

import subprocess
import sys
import threading

import pytest

from draftsmith.train.prefetch import Prefetch


def test_what_was_announced_comes_in_order_and_never_more_than_so_many_ahead() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return 10 * key

    prefetch: Prefetch[int, int] = Prefetch(make, 2)
    prefetch.announce(range(8))
    for key in range(8):
        assert prefetch.take(key) == 10 * key
        assert made == list(range(len(made))) and len(made) <= key + 3
    assert prefetch.take(3) == 30  # not announced: made at once


def test_it_is_made_while_nobody_waits_for_it() -> None:
    names: list[str] = []
    done = threading.Event()

    def make(key: int) -> int:
        names.append(threading.current_thread().name)
        if key == 1:
            done.set()
        return key

    prefetch: Prefetch[int, int] = Prefetch(make, 2)
    prefetch.announce([0, 1, 2])
    assert done.wait(5)
    prefetch.take(0), prefetch.take(1), prefetch.take(2)
    assert all(name.startswith("prefetch") for name in names) and len(names) == 3


def test_an_error_comes_where_its_batch_is_asked_for() -> None:
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("broken")
        return key

    prefetch: Prefetch[int, int] = Prefetch(make, 2)
    prefetch.announce([0, 1, 2])
    assert prefetch.take(0) == 0
    with pytest.raises(ValueError, match="broken"):
        prefetch.take(1)
    assert prefetch.take(2) == 2


def test_without_anything_ahead_there_is_no_thread() -> None:
    prefetch: Prefetch[int, str] = Prefetch(lambda key: threading.current_thread().name, 0)
    prefetch.announce([0, 1])
    assert prefetch.take(0) == threading.main_thread().name


def test_a_program_ends_while_something_is_read_ahead() -> None:
    program = """
import time
from draftsmith.train.prefetch import Prefetch
prefetch = Prefetch(lambda key: time.sleep(0.05), 2)
prefetch.announce(range(1000))
prefetch.take(0)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
