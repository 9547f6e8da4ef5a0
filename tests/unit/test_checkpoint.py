"""The drafter folder: what is saved is what is loaded, and anything else is refused in one line."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import tree
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.inference.target import Target
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

# Of a kind that adapts its target the model itself is never saved, only the heads that it serves, which are of another kind.
SAVED = [kind for kind in drafters.kinds() if not drafters.kind_module(kind).Model.adapts_target]
VARIANTS = [(kind, {}) for kind in SAVED] + [
    ("eagle", {"fc_bias": True, "draft_vocab_size": None}),
    ("eagle3", {"fc_norm": True, "norm_output": True, "draft_vocab_size": None}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    ("hydra", {"own_head": False, "prefix_attention": False, "num_layers": 2}),
    ("dflash", {"markov_rank": 0, "confidence_weight": 0.0, "own_head": True}),
    ("dflash", {"anchor_predicts": True, "draft_vocab_size": None}),
    ("medusa", {"own_head": False}),
    ("medusa", {"own_head": False, "draft_vocab_size": None, "num_layers": 2}),
    ("mtp", {"own_head": True, "normed_state": False, "attention_bias": True}),
]


def random_drafter(toy: SimpleNamespace, kind: str, **changes: Any) -> TrainableDrafter:
    drafter = toy.make_drafter(kind, toy.make_target(dtype=torch.float32), **changes)
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def drafted(drafter: TrainableDrafter, toy: SimpleNamespace) -> list[Tensor]:
    """Logits that a drafter gives after one observation."""
    generator = torch.Generator().manual_seed(9)
    width = len(drafter.feature_layers) * toy.WIDTH
    ids_BC = torch.randint(3, toy.VOCAB, (2, 5), generator=generator)
    features = torch.randn(2, 5, width, generator=generator)
    watch = toy.Watch()
    with torch.inference_mode():
        state = drafter.observe(drafter.init(2, 16), ids_BC, features, torch.tensor([4, 5]), [5, 3])
        drafter.propose(state, tree.chain(3), watch)
    return watch.seen


@pytest.mark.parametrize("kind, changes", VARIANTS, ids=str)
def test_a_loaded_drafter_has_the_saved_bits_and_drafts_the_same(
    kind: str, changes: dict[str, Any], toy: SimpleNamespace, tmp_path: Path
) -> None:
    drafter = random_drafter(toy, kind, **changes)
    drafters.save(drafter, tmp_path / "run" / "drafter")
    for place in (tmp_path / "run", tmp_path / "run" / "drafter"):
        loaded = drafters.load(place)
        assert (type(loaded), loaded.config, loaded.shape) == (type(drafter), drafter.config, drafter.shape)
        saved, read = drafter.state_dict(), loaded.state_dict()
        assert saved.keys() == read.keys()
        assert all(read[name].dtype == saved[name].dtype and torch.equal(read[name], saved[name]) for name in saved)
        assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())
        loaded.bind(drafter.target)
        for ours, theirs in zip(drafted(loaded, toy), drafted(drafter, toy), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", SAVED)
def test_a_drafter_is_loaded_in_the_asked_type_with_its_map_untouched(
    kind: str, toy: SimpleNamespace, tmp_path: Path
) -> None:
    drafter = random_drafter(toy, kind)
    drafters.save(drafter, tmp_path / "d")
    loaded = drafters.load(tmp_path / "d", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    buffers = dict(drafter.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in loaded.named_buffers())


@pytest.mark.parametrize("kind", SAVED)
def test_saving_again_replaces_the_older_drafter_and_leaves_nothing_beside_it(
    kind: str, toy: SimpleNamespace, tmp_path: Path
) -> None:
    drafter = random_drafter(toy, kind)
    (tmp_path / "d.writing").mkdir()
    (tmp_path / "d.writing" / "half").write_text("what a killed run left")
    drafters.save(drafter, tmp_path / "d")
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1)
    drafters.save(drafter, tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    read = drafters.load(tmp_path / "d").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in drafter.state_dict().items())


def edit_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())
        change(record)
        (folder / "config.json").write_text(json.dumps(record))

    return damage


def edit_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors")

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "is no drafter: .*config.json does not exist"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "is no drafter: .*model.safetensors does not exist"),
    "broken json": (lambda f: (f / "config.json").write_text('{"format": '), "config.json is not valid JSON"),
    "binary json": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "not a mapping": (lambda f: (f / "config.json").write_text("[1]"), "is not a draftsmith drafter"),
    "someone else's config": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        "is not a draftsmith drafter .its format is not 'draftsmith-1'",
    ),
    "another format": (edit_json(lambda r: r.update(format="draftsmith-9")), "is not a draftsmith drafter"),
    "no shape": (edit_json(lambda r: r.pop("shape")), "config.json.*shape"),
    "no kind": (edit_json(lambda r: r.pop("kind")), "config.json.*kind"),
    "no settings": (edit_json(lambda r: r.pop("config")), "config.json.*config"),
    "unknown kind": (edit_json(lambda r: r.update(kind="eagel3")), "unknown drafter kind 'eagel3'; did you mean 'eagle3'"),
    "unknown setting": (edit_json(lambda r: r["config"].update(stepz=3)), "unknown key 'stepz'"),
    "a size of the wrong type": (edit_json(lambda r: r["shape"].update(head_dim="8")), "head_dim: expected int, got '8'"),
    "another vocabulary size": (
        edit_json(lambda r: r["config"].update(draft_vocab_size=40)),
        "model.safetensors does not fit .*config.json: .*size mismatch",
    ),
    "cut weights": (cut, "model.safetensors cannot be read .*damaged"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors cannot be read"),
    "text for weights": (lambda f: (f / "model.safetensors").write_text("hello " * 99), "model.safetensors cannot be read"),
    "a missing tensor": (edit_tensors(lambda t: t.pop(max(t))), "does not fit .*Missing key"),
    "a missing map": (edit_tensors(lambda t: t.pop("d2t")), "lacks d2t, the map of the draft vocabulary"),
    "a tensor too many": (edit_tensors(lambda t: t.update(extra=torch.ones(2))), "does not fit .*Unexpected key.*extra"),
    "a map out of range": (edit_tensors(lambda t: t["d2t"].fill_(60)), r"d2t"),
    "a map with doubles": (edit_tensors(lambda t: t["d2t"].sub_(torch.arange(48))), r"d2t"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_a_damaged_drafter_folder_is_refused_in_one_line(
    kind: str, damage: str, toy: SimpleNamespace, tmp_path: Path
) -> None:
    drafters.save(random_drafter(toy, kind), tmp_path / "d")
    spoil, message = DAMAGES[damage]
    spoil(tmp_path / "d")
    with pytest.raises(ValueError) as caught:
        drafters.load(tmp_path / "d")
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)


def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no drafter: .* give a run folder or its drafter folder"):
        drafters.load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", drafters.kinds())
def test_a_drafter_refuses_a_target_that_it_was_not_made_for(kind: str, toy: SimpleNamespace) -> None:
    target = toy.make_target(seed=0, dtype=torch.bfloat16)
    drafter = toy.make_drafter(kind, target)
    drafter.bind(Target(copy.deepcopy(target.model).float(), None, "the same weights in another type"))
    with pytest.raises(ValueError, match="made for another target .fingerprint: [0-9a-f]{16} here, [0-9a-f]{16} there"):
        drafter.bind(toy.make_target(seed=1))
    with pytest.raises(ValueError, match="vocab_size: 64 here, 80 there"):
        drafter.bind(toy.make_target(vocab_size=80))


@pytest.mark.parametrize("kind, changes", [*VARIANTS, ("medusa2", {})], ids=str)
def test_training_leaves_the_targets_weights_and_flags_as_they_were(
    kind: str, changes: dict[str, Any], toy: SimpleNamespace
) -> None:
    target = toy.make_target(dtype=torch.bfloat16)

    def picture() -> list[Any]:
        model = target.model
        flags = [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
        weights = [(n, p.requires_grad, p.dtype, p.grad, p.data_ptr()) for n, p in model.named_parameters()]
        return [flags, weights, model.config.to_dict()]

    before, bits = picture(), {name: p.clone() for name, p in target.model.state_dict().items()}
    drafter = drafters.build(kind, {**toy.KIND_SETTINGS.get(kind, {}), **changes}, target.shape)
    drafter.initialise(target, torch.ones(toy.VOCAB, dtype=torch.int64))
    drafter.to(torch.float32)
    sequences = [Sequence([5, 9, 3, 14, 8, 33, 2], [False] * 2 + [True] * 5)]
    store = FeatureStore(target, sequences, drafter.feature_layers)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        drafter.train()
        drafter(store.batch([0])).sum.backward()
        optimizer.step()
    assert picture() == before
    assert all(torch.equal(tensor, bits[name]) for name, tensor in target.model.state_dict().items())
