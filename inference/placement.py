"""Where a frozen target's weights lie, whatever engine trains the drafter: on one device, over several, or sharded over processes.

    replicated   whole in every process
    device_map   spread by layers over all devices of one process (accelerate's `device_map: auto`)
    fsdp         each decoder layer sharded over the processes, gathered for the time of its call (torch's `fully_shard`)
    zero3        the same by DeepSpeed's ZeRO-3 partitioning (Rajbhandari et al. 2020, arXiv 1910.02054), without optimizer

Embedding, final norm and head stay whole in every process, because drafters read them. Gathering is collective: sharded
targets need equally many passes in every process, which `Lockstep` sees to.
"""

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

Sharding = Literal["fsdp", "zero3"]
Placement = Literal["replicated", "device_map", "fsdp", "zero3"]


class Lockstep:
    """The processes that hold a target together: what one of them runs, all must run."""

    def __init__(self) -> None:
        # On the host: asking must not wait for what a device has still to do.
        self._group = dist.new_group(backend="gloo")

    def behind(self, passes: int) -> int:
        """How many passes another process makes more than this one with its own number of them. All must ask together."""
        most = torch.tensor(passes)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        return int(most) - passes


def check_placement(placement: Placement, name: str) -> None:
    """ValueError where the processes that were started do not allow a placement; before anything is loaded."""
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if placement in get_args(Sharding) and count == 1:
        raise ValueError(
            f"target {name!r} cannot be sharded ({placement}) over one process; start several with accelerate launch, or give "
            "placement replicated, or device_map for several devices in one process"
        )
    if placement == "device_map" and count > 1:
        raise ValueError(
            f"target {name!r} has the placement device_map, which spreads it over all devices of one process, and there are "
            f"{count} processes; start one, or give placement replicated, fsdp or zero3"
        )


def shard(model: nn.Module, layers: nn.ModuleList, sharding: Sharding, device: torch.device) -> Lockstep:
    """Leaves of each decoder layer this process's part, on the device, and puts the rest of the model there whole."""
    lockstep = Lockstep()
    if sharding == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    else:
        for layer in layers:
            _partition(layer)
    model.to(device)
    return lockstep


def _partition(layer: nn.Module) -> None:
    """ZeRO-3 for one layer: the hooks that DeepSpeed's engine would set for a model without an optimizer."""
    try:
        import deepspeed
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.utils.timer import NoopTimer
    except ImportError as error:
        raise ValueError(
            f"target placement zero3 needs deepspeed ({error}); install draftsmith[deepspeed], or give placement fsdp"
        ) from error
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    DeepSpeedZeRoOffload(
        layer,
        timers=NoopTimer(),
        ds_config=config,
        overlap_comm=False,
        param_persistence_threshold=0,  # all of it is partitioned, norms too
        dp_process_group=dist.group.WORLD,
    )


def local_bytes(model: nn.Module) -> int:
    """What this process holds of the parameters at this moment."""
    return sum(map(_held, model.parameters()))


def _held(parameter: Any) -> int:
    """Of a parameter: torch's shards are DTensors; DeepSpeed's lie beside the parameter, which is empty until it is gathered."""
    if isinstance(parameter, dist.tensor.DTensor):
        return parameter.to_local().nbytes
    beside = getattr(parameter, "ds_tensor", None)
    return int(parameter.nbytes) + (0 if beside is None else beside.nbytes)


def refuse_offloaded(model: nn.Module, name: str) -> None:
    """ValueError if a device map left weights on the disk or in main memory, to be fetched at every pass."""
    homeless = sum(parameter.is_meta for parameter in model.parameters())
    if homeless:
        raise ValueError(
            f"{name} does not fit on the devices: {homeless} of its tensors are offloaded; give more devices or a smaller dtype"
        )
