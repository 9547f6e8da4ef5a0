"""Training that begins with the weights of another drafter: for a new revision of its target, or for more data.

The start is a drafter of the same kind and sizes for a target of the same sizes; its target's weights may be others, that is the
purpose. Its draft vocabulary has to be the one that this run's data choose, or is kept by request: rows of a head that mean other
tokens would still train, and be accepted on nothing.

Letters: V target vocabulary, W draft vocabulary.
"""

import dataclasses

import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import Shape, TrainableDrafter
from draftsmith.drafters.checkpoint import kind_of
from draftsmith.drafters.vocabulary import coverage, vocabulary_hash
from draftsmith.train.config import RunConfig


def read(config: RunConfig) -> TrainableDrafter | None:
    """The drafter that the run starts from; None if it starts from the target. ValueError if there is none, or of another kind."""
    if config.start is None:
        return None
    start = drafters.load(config.start)
    # Saved heads of a kind that adapts its target are those of the kind that it builds on.
    if not issubclass(drafters.kind_module(config.kind).Model, type(start)):
        raise ValueError(
            f"start {config.start} is a drafter of kind {kind_of(start)}, and this run trains {config.kind}; give a start of that "
            f"kind, or drafter.kind: {kind_of(start)}"
        )
    return start


def counts_for_the_map(config: RunConfig, start: TrainableDrafter | None, counts_V: Tensor) -> Tensor:
    """The counts by which `initialise` chooses the draft vocabulary: the data's, or such that it chooses that of the start."""
    if start is None or start.token_ids_W is None or config.data.vocabulary == "data":
        return counts_V
    return torch.zeros_like(counts_V).index_fill_(0, start.token_ids_W, 1)


def take_over(config: RunConfig, start: TrainableDrafter, drafter: TrainableDrafter, counts_V: Tensor) -> str:
    """Copies the start's weights into an initialised drafter.

    Args:
        config: of the run.
        start: what `read` gave.
        drafter: initialised with `counts_for_the_map`.
        counts_V: int64, how often this run's data supervise each token.

    Returns:
        a line that says so.

    Raises:
        ValueError: other sizes, other layers of the target, or another draft vocabulary.
    """
    _check_target(config, start.shape, drafter.shape)
    theirs = start.state_dict()
    ours = {name: tensor for name, tensor in drafter.state_dict().items() if not _added(drafter, name)}
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (ours, theirs)]
    if shapes[0] != shapes[1] or drafter.feature_layers != start.feature_layers:
        raise ValueError(
            f"start {config.start} has other parameters than this run's drafter ({_differences(drafter, start, *shapes)}); give "
            "drafter the settings of the start, or a start with these"
        )
    here, there = (vocabulary_hash(one.token_ids_W) for one in (drafter, start))
    covered = 1.0 if start.token_ids_W is None else coverage(counts_V, start.token_ids_W)
    if here != there:
        raise ValueError(
            f"start {config.start} has another draft vocabulary than this run's data choose (its map's hash is {there}, theirs "
            f"is {here}); its map covers {covered:.1%} of this run's answer tokens. To keep it, set data.vocabulary: start; to "
            "choose anew, train without a start"
        )
    drafter.load_state_dict(theirs, strict=False)  # all but what adapts the target, compared above
    other = "" if start.shape.fingerprint == drafter.shape.fingerprint else f", trained for {start.shape.fingerprint}"
    return f"starting from {config.start}{other}; its draft vocabulary ({there}) covers {covered:.1%} of this run's answer tokens"


def _added(drafter: TrainableDrafter, name: str) -> bool:
    """Whether a parameter adapts the target and is no part of what is saved."""
    return drafter.adapts_target and name.startswith("adapters.")


def _check_target(config: RunConfig, theirs: Shape, ours: Shape) -> None:
    differences = dataclasses.replace(ours, fingerprint="").differences(theirs)
    if differences:
        raise ValueError(
            f"start {config.start} was made for a target of other sizes ({differences}); give a start for a target of these sizes"
        )


def _differences(
    drafter: TrainableDrafter,
    start: TrainableDrafter,
    ours: dict[str, tuple[int, ...]],
    theirs: dict[str, tuple[int, ...]],
) -> str:
    """Settings first, for they are what a user can change; then where it shows."""
    names = [field.name for field in dataclasses.fields(start.config) if field.name not in ("loss", "lm")]
    settings = [(name, getattr(drafter.config, name), getattr(start.config, name)) for name in names]
    found = [f"{name}: {a} here, {b} there" for name, a, b in settings if a != b]
    if drafter.feature_layers != start.feature_layers:
        found.append(f"layers of the target: {[*drafter.feature_layers]} here, {[*start.feature_layers]} there")
    places = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if places:
        name = places[0]
        found.append(
            f"in all {len(places)} tensors, {name} for example: {ours.get(name)} here, {theirs.get(name)} there"
        )
    return "; ".join(found)
