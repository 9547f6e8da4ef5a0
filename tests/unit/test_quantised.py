"""Targets quantised by bitsandbytes, for real where its kernels run on this machine."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.tree import chain
from draftsmith.inference import quantised
from draftsmith.inference.decode import generate
from draftsmith.inference.form import Quantisation
from draftsmith.inference.load_target import load
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

IDS_BT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
WAYS: tuple[Quantisation, ...] = ("8bit", "4bit")


@pytest.fixture(scope="module")
def wide_folder(toy: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four-bit weights are packed in blocks of 64; ordinary initial weights, for they are rounded less."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    toy.make_model("llama", **sizes).save_pretrained(folder)
    toy.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, wide_folder: Path) -> tuple[Target, Target]:
    """The target as it is, and quantised; skipped with bitsandbytes' own words where it cannot compute."""
    pytest.importorskip("bitsandbytes")
    try:
        return load(wide_folder), load(wide_folder, quantisation=request.param)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"bitsandbytes: {error}")


def test_a_quantised_target_rounds_its_layers_and_nothing_else(pair: tuple[Target, Target]) -> None:
    plain, ours = pair
    assert torch.equal(ours.head_weight(), plain.head_weight()) and ours.dtype == plain.dtype
    assert torch.equal(ours.embed(IDS_BT), plain.embed(IDS_BT))
    before_BTF, after_BTF = (target.hidden(IDS_BT, (1, 4))[0] for target in (plain, ours))
    error = float((after_BTF - before_BTF).norm() / before_BTF.norm())
    assert 1e-5 < error < {"8bit": 0.03, "4bit": 0.3}[str(ours.form.quantisation)]
    sizes = [sum(p.nbytes for p in target.layers.parameters()) for target in pair]
    assert sizes[1] < {"8bit": 0.3, "4bit": 0.16}[str(ours.form.quantisation)] * sizes[0]


def test_quantising_does_not_change_the_name_of_the_weights_but_that_of_their_states(
    pair: tuple[Target, Target], tmp_path: Path
) -> None:
    plain, ours = pair
    assert ours.shape == plain.shape
    texts = [Sequence(list(range(5, 15)), [False] * 5 + [True] * 5)]
    config = FeaturesConfig(store="disk", folder=str(tmp_path / "store"))
    FeatureStore(plain, texts, (1,), config).fill()
    with pytest.raises(ValueError, match="quantisation"):
        FeatureStore(ours, texts, (1,), config).fill()


def test_a_drafter_drafts_for_both_and_writes_what_the_target_would(
    pair: tuple[Target, Target], toy: SimpleNamespace
) -> None:
    plain, ours = pair
    drafter = toy.make_drafter("eagle3", plain)
    prompts = [[5, 6, 7]]
    for target in pair:
        answers = []
        for speculation in (None, Speculation(drafter, chain(3))):
            drafter.bind(target)
            answers.append(generate(target, prompts, max_new=12, sampler=Sampler(0.0), speculation=speculation)[0].ids)
        for answer in answers:  # quantised products round as half precision does, and with the number of rows
            logits_TV = target.unembed(target.hidden(torch.tensor([prompts[0] + answer]))[1])[
                0, len(prompts[0]) - 1 : -1
            ]
            chosen_T = logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
            margin = float((logits_TV.amax(1) - chosen_T).max())
            assert margin <= (0.05 if target is ours else 1e-4) * float(logits_TV.std())
        assert target is ours or answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["draft_lm", "medusa2"])
def test_kinds_that_copy_layers_refuse_quantised_ones(
    kind: str, pair: tuple[Target, Target], toy: SimpleNamespace
) -> None:
    with pytest.raises(ValueError, match=r"is quantised to \dbit \(give target.quantisation: null\)"):
        toy.make_drafter(kind, pair[1])


def test_a_quantised_target_with_an_adapter_is_another_one(
    wide_folder: Path, pair: tuple[Target, Target], make_adapter: Any, tmp_path: Path
) -> None:
    folder = make_adapter(wide_folder, tmp_path / "adapter")
    adapted = load(wide_folder, adapter=folder)
    ours = load(wide_folder, adapter=folder, quantisation=pair[1].form.quantisation)
    assert ours.shape == adapted.shape and ours.shape.fingerprint != pair[1].shape.fingerprint
    states = [target.hidden(IDS_BT, (4,))[0] for target in (*pair, adapted, ours)]
    far, near = (float((states[3] - other).norm()) for other in (states[1], states[2]))
    assert near < far


@pytest.mark.parametrize("way", WAYS)
def test_without_bitsandbytes_the_message_says_what_to_install(
    way: Quantisation, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match=rf"{way} needs bitsandbytes; install draftsmith\[quantised\]"):
        load(toy_folder, quantisation=way)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"placement": "fsdp"}, "both quantised .4bit. and sharded .fsdp."),
        ({"placement": "zero3"}, "both quantised .4bit. and sharded .zero3."),
        ({"adapter": "a", "merge_adapter": True}, "cannot be merged into a target of 4bit"),
        ({"path": "model.gguf"}, "'model.gguf' is a GGUF file, which is quantised already"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_excludes_each_other_is_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**{"path": "/no/such/target", "quantisation": "4bit", **settings})


def test_a_checkpoint_with_other_names_is_refused(
    wide_folder: Path, pair: tuple[Target, Target], tmp_path: Path
) -> None:
    """The weights could not be named after the checkpoint."""
    import safetensors.torch

    state = safetensors.torch.load_file(wide_folder / "model.safetensors")
    del state["model.norm.weight"]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensors of the names model.norm.weight \(1 in all\)"):
        quantised.checkpoint_fingerprint(pair[1].model, str(tmp_path), None)


def test_every_number_that_the_fingerprint_samples_is_read_from_a_checkpoint_of_several_files(
    pair: tuple[Target, Target], tmp_path: Path
) -> None:
    plain, ours = pair
    plain.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert quantised.checkpoint_fingerprint(ours.model, str(tmp_path), None) == plain.shape.fingerprint
    changed = dataclasses.replace(plain.shape, fingerprint="")
    assert changed.differences(ours.shape) == ""
