"""Decoding in fixed chunks: prompts of similar length together, each chunk with continuous admission, journalled when it is whole.

Chunks are a pure function of prompts and batch size. Half-precision results depend on which rows are decoded together, so a chunk
is done by one process from its beginning to its end, and what is written depends neither on kills nor on the number of processes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from draftsmith.train.journal import Journal, Key, Row
from draftsmith.train.processes import Processes
from draftsmith.train.progress import Progress

BATCHES_PER_CHUNK = 8
"""Rows that become free take over waiting prompts of the chunk; at its end they stand empty. With more, a kill costs more work."""


class Job(Protocol):
    """What a chunk is made of."""

    @property
    def key(self) -> Key: ...


J = TypeVar("J", bound=Job)


def work_off(
    journal: Journal,
    jobs: Sequence[J],
    lengths: Sequence[int],
    batch_size: int,
    work: Callable[[list[J]], tuple[list[Row], int]],
    processes: Processes,
    what: str,
) -> dict[Key, Row]:
    """Does what is not in the journals yet; process i of n takes chunks i, i + n, … of that.

    Args:
        journal: of this process.
        jobs: all of them, of all processes.
        lengths: of their prompts.
        batch_size: jobs decoded together.
        work: does some jobs; returns their rows for the journal and the number of new tokens.
        processes: this one among all.
        what: is being made, for the progress line.

    Returns:
        The finished rows of all processes.
    """
    chunks = cut(jobs, lengths, batch_size)
    done = journal.read()
    processes.wait()  # nobody writes before all have read, so that they agree on what is left
    left = [open_jobs for chunk in chunks if (open_jobs := [job for job in chunk if job.key not in done])]
    mine = left[processes.index :: processes.count]
    total, rest = len(jobs), sum(map(len, left))
    if processes.count > 1:
        what, total = f"{what}, process {processes.index + 1} of {processes.count}", total - rest + sum(map(len, mine))
    progress = Progress(what, total, len(jobs) - rest)
    for chunk in mine:
        rows, tokens = work(chunk)
        journal.write(rows)
        progress.add(len(chunk), tokens)
    processes.wait()
    return journal.read()


def cut(jobs: Sequence[J], lengths: Sequence[int], batch_size: int) -> list[list[J]]:
    """Jobs in chunks of similar length."""
    order = sorted(range(len(jobs)), key=lambda i: (lengths[i], i))
    size = BATCHES_PER_CHUNK * batch_size
    return [[jobs[i] for i in order[begin : begin + size]] for begin in range(0, len(order), size)]
