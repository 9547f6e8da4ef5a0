"""One of two processes that hold a toy target together: compares it with the replicated one and writes what it found.

RANK=… WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python sharded_target.py TARGET SHARDING STORE OUT [ADAPTER]

STORE is a complete feature store of the target, - for none.
"""

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from draftsmith import drafters
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.placement import local_bytes
from draftsmith.inference.sampling import Sampler
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

LAYERS = (1, 3, 4, "last")


def sequences() -> list[Sequence]:
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 4, 12, 7, 5, 6, 11]
    texts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    return [Sequence(ids, [False] * 2 + [True] * (len(ids) - 2)) for ids in texts]


def equal(ours: FeatureStore, plain: FeatureStore, indices: list[int]) -> bool:
    a, b = ours.batch(indices), plain.batch(indices)
    names = ("features_BTF", "last_BTD", "log_normaliser_BT", "argmax_BT")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def refused(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return ""


def main(folder: str, sharding: str, store: str, out: str, adapter: str | None = None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    plain = load(folder, adapter=adapter)
    ours = load(folder, placement=sharding, adapter=adapter)  # type: ignore[arg-type]
    found: dict[str, object] = {"fingerprints": [plain.shape.fingerprint, ours.shape.fingerprint]}
    found["bytes"] = [local_bytes(plain.model), local_bytes(ours.model)]
    found["bytes of the layers"] = [local_bytes(plain.layers), local_bytes(ours.layers)]

    ids_BT = torch.randint(3, 300, (2, 9 + rank), generator=torch.Generator().manual_seed(rank))
    states = [target.hidden(ids_BT, LAYERS) for target in (plain, ours, ours)]
    found["same states"] = all(torch.equal(a, b) for one in states[1:] for a, b in zip(states[0], one, strict=True))
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    answers = [[o.ids for o in generate(t, prompts, max_new=6, sampler=Sampler(0.0))] for t in (plain, ours)]
    found["same answers"] = answers[0] == answers[1]
    found["after use"] = local_bytes(ours.layers)
    found["trained"] = [name for name, p in ours.model.named_parameters() if p.requires_grad or p.grad is not None]
    found["same head"] = torch.equal(ours.head_weight(), plain.head_weight())

    texts = sequences()
    for together in (1, 2):
        online = [FeatureStore(t, texts, LAYERS, FeaturesConfig(capture_batch=together)) for t in (ours, plain)]
        mine = [[0, 1, 2, 3, 4], [5]][rank]  # one process has five passes to make, the other one
        found[f"uneven batches of {together}"] = equal(*online, mine)  # type: ignore[misc]
        found[f"uneven batches of {together}, the other way"] = equal(*online, [[6], [1, 2, 3]][rank])  # type: ignore[misc]
    memory = [FeatureStore(t, texts, LAYERS, FeaturesConfig(store="memory")) for t in (ours, plain)]
    for kept in memory:
        kept.fill()
    found["memory"] = equal(memory[0], memory[1], [[0, 1, 2], [3]][rank])
    if store != "-":
        disk = FeatureStore(ours, texts, LAYERS, FeaturesConfig(store="disk", folder=store))
        disk.fill()
        found["a store that is complete"] = equal(disk, memory[1], [[0, 1, 2], [3]][rank])
    hybrid = FeatureStore(ours, texts, LAYERS, FeaturesConfig(store="hybrid", folder=f"{out}.store"))
    found["a store that is not"] = refused(hybrid.fill)
    for kind in ("draft_lm", "medusa2"):
        drafter = drafters.build(kind, {}, ours.shape)
        counts_V = torch.ones(ours.shape.vocab_size, dtype=torch.int64)
        found[kind] = refused(lambda drafter=drafter, counts_V=counts_V: drafter.initialise(ours, counts_V))
    found["device_map"] = refused(lambda: load(folder, placement="device_map"))
    Path(f"{out}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
