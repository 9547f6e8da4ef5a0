"""Reading a store that is ten times larger than the memory the process may still take."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random, re, resource, sys
from pathlib import Path
import torch, transformers
from draftsmith.inference.target import Target
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence, plan_epoch
from draftsmith.train.features import FeatureStore

LIMIT = 10_000_000  # bytes of address space beyond what the process has when training would begin

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, intermediate_size=32))
target = Target(model, None, "toy")
draws = random.Random(0)
sequences = [Sequence([draws.randrange(64) for _ in range(64)], [False] * 9 + [True] * 55) for _ in range(200)]
config = FeaturesConfig(store="disk", folder=sys.argv[1], shard_mb=8, capture_batch=16)
store = FeatureStore(target, sequences, (1, 2, 3), config)
store.fill()
size = sum(file.stat().st_size for file in Path(sys.argv[1]).glob("*.bin"))
plan = plan_epoch([64] * len(sequences), 4, 1, 0, 0)
expected = {}

def read(epoch, kept=None):
    store.announce(plan, epoch)
    for number, indices in enumerate(plan):
        batch = store.batch(indices, epoch)
        total = float(batch.features_BTF.double().sum())
        assert expected.setdefault(number, total) == total
        if kept is not None:
            kept.append(batch)

read(0)  # what the process needs for a batch, it has now
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + LIMIT, resource.RLIM_INFINITY))
before = status("RssAnon")
read(1)
print("store", size, "limit", LIMIT, "growth", status("RssAnon") - before)
try:
    read(3, [])
except (RuntimeError, MemoryError, OSError):
    print("the limit holds")
"""


def test_memory_stays_flat_over_a_store_ten_times_larger_than_the_limit(tmp_path: Path) -> None:
    """The address space is limited, mapped files included; keeping the batches, as the control does, runs into the limit."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "f")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    words = first.split()
    size, limit, growth = int(words[1]), int(words[3]), int(words[5])
    assert size > 10 * limit and growth < limit
    assert rest == ["the limit holds"]
