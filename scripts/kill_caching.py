"""Kills `draftsmith cache` at random points, again and again: each store must end with the bytes of an uninterrupted one.

    python -m draftsmith.scripts.kill_caching CONFIG [key=value ...] [--kills 50] [--seed S]

The real command runs in a forked process, so that the imports are paid once; SIGKILL ends it at a random moment, and the next one
goes on in the same folder. Whenever one gets to the end, its folder is compared byte by byte and the next store begins. The data
decide how long a store takes: the kills should meet several in the making.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from draftsmith.scripts.main import main as draftsmith
from draftsmith.train.config import read
from draftsmith.train.run import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills `draftsmith cache` at random points and compares the stores.")
    parser.add_argument("words", nargs="+", metavar="CONFIG [key=value]")
    parser.add_argument("--kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    print(kill(options.words, options.kills, random.Random(options.seed)))


def kill(words: list[str], kills: int, draws: random.Random) -> str:
    """Returns what happened in one line; ValueError if a store differs."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns of forks otherwise
    # Imports whatever the command will need, so that most kills meet the work itself.
    load_target(read(words[0], words[1:]), torch.device("cpu"))
    with tempfile.TemporaryDirectory() as place:
        straight, folder = Path(place) / "straight", Path(place) / "killed"
        start = time.perf_counter()
        status = os.waitpid(_start(words, straight), 0)[1]
        seconds = time.perf_counter() - start
        if status != 0:
            raise ValueError("the uninterrupted run failed; what it said is above")
        expected = _contents(straight)
        killed = stores = in_the_making = 0
        while killed < kills or folder.exists():
            child = _start(words, folder)
            if killed < kills:  # then the last store is finished in peace
                time.sleep(draws.uniform(0, 0.9 * seconds))
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(status):
                killed += 1
                in_the_making += any(folder.glob("*.bin"))
                print(f"{killed} of {kills} kills, {stores} stores compared", file=sys.stderr, flush=True)
                continue
            if status != 0:
                raise ValueError(f"the command failed after {killed} kills; what it said is above")
            if _contents(folder) != expected:
                raise ValueError(f"store {stores + 1} is not that of the uninterrupted run (after {killed} kills)")
            stores += 1
            shutil.rmtree(folder)
        size = sum(map(len, expected.values()))
    return (
        f"{killed} kills ({in_the_making} with a store in the making) over {stores} stores of {len(expected)} files and "
        f"{size / 1e6:.1f} MB, {seconds:.1f} s each if left alone: all are byte-identical to the uninterrupted one"
    )


def _start(words: list[str], folder: Path) -> int:
    """A process that runs the command; what it prints goes nowhere unless it fails."""
    child = os.fork()
    if child:
        return child
    status, said = 1, sys.stderr
    try:
        with tempfile.TemporaryFile("w+") as sys.stderr:
            try:
                draftsmith(["cache", *words, "features.store=disk", f"features.folder={folder}"])
                status = 0
            finally:
                if status:
                    sys.stderr.seek(0)
                    said.write(sys.stderr.read())
                    said.flush()
    finally:
        os._exit(status)


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


if __name__ == "__main__":
    main()
