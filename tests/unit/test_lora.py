"""Targets with a LoRA adapter: what they say is what peft's own model says, and an adapter that does not fit is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith import drafters
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.sampling import Sampler
from draftsmith.train.config import FeaturesConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore

peft = pytest.importorskip("peft")
IDS_BT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
LAYERS = (1, 3, "last")


@pytest.fixture(scope="module")
def adapter(toy_folder: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(toy_folder, tmp_path_factory.mktemp("lora") / "adapter")


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
def test_an_adapted_target_gives_the_logits_of_pefts_own_model(toy_folder: Path, adapter: Path, merge: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_folder, dtype=torch.float64)
    lora = peft.LoraModel(model, peft.PeftConfig.from_pretrained(adapter), "default")
    stored = peft.utils.load_peft_weights(str(adapter))
    state = {name.removeprefix("base_model."): tensor for name, tensor in stored.items()}
    assert not peft.set_peft_model_state_dict(lora, state).unexpected_keys
    expected = lora.eval().double()(IDS_BT).logits
    target = load(toy_folder, adapter=adapter, merge_adapter=merge, dtype=torch.float64)
    got = target.unembed(target.hidden(IDS_BT)[1])
    torch.testing.assert_close(got, expected.detach(), atol=1e-9, rtol=0)
    plain = load(toy_folder, dtype=torch.float64)
    assert float((got - plain.unembed(plain.hidden(IDS_BT)[1])).abs().max()) > 1


def test_merged_and_beside_are_one_target_up_to_rounding_and_another_than_the_base(
    toy_folder: Path, adapter: Path
) -> None:
    base, beside, merged = (
        load(toy_folder),
        load(toy_folder, adapter=adapter),
        load(toy_folder, adapter=adapter, merge_adapter=True),
    )
    assert beside.shape == merged.shape and beside.shape.fingerprint != base.shape.fingerprint
    states = [target.hidden(IDS_BT, LAYERS)[0] for target in (base, beside, merged)]
    torch.testing.assert_close(states[1], states[2], atol=1e-3, rtol=1e-4)
    assert not torch.allclose(states[0], states[1], atol=1.0)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    answers = [[o.ids for o in generate(t, prompts, max_new=8, sampler=Sampler(0.0))] for t in (base, beside, merged)]
    assert answers[1] == answers[2] != answers[0]


def test_the_fingerprint_names_the_adapters_numbers_and_its_scale(
    toy_folder: Path, adapter: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    louder = make_adapter(toy_folder, tmp_path / "louder", lora_alpha=16)
    other = make_adapter(toy_folder, tmp_path / "other", target_modules=["q_proj"])
    names = {load(toy_folder, adapter=folder).shape.fingerprint for folder in (adapter, louder, other)}
    assert len(names) == 3
    half = load(
        toy_folder, adapter=adapter, dtype=torch.bfloat16
    )  # a drafter is used in another dtype than it was trained for
    assert half.shape.fingerprint == load(toy_folder, adapter=adapter).shape.fingerprint


def test_an_adapter_in_bf16_leaves_rotary_frequencies_exact(toy_folder: Path, adapter: Path) -> None:
    target = load(toy_folder, adapter=adapter, dtype=torch.bfloat16)
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for name, buffer in target.model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_a_drafter_for_the_base_is_refused_by_the_adapted_target(
    toy: SimpleNamespace, toy_folder: Path, adapter: Path
) -> None:
    drafter = toy.make_drafter("eagle3", load(toy_folder))
    with pytest.raises(ValueError, match="made for another target .fingerprint: "):
        drafter.check_target(load(toy_folder, adapter=adapter).shape)


def test_a_store_of_the_merged_target_is_not_that_of_the_unmerged_one(
    toy_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """Their states differ in rounding."""
    texts = [Sequence(list(range(5, 15)), [False] * 5 + [True] * 5)]
    config = FeaturesConfig(store="disk", folder=str(tmp_path / "store"))
    FeatureStore(load(toy_folder, adapter=adapter), texts, (1,), config).fill()
    with pytest.raises(ValueError, match="adapter"):
        FeatureStore(load(toy_folder, adapter=adapter, merge_adapter=True), texts, (1,), config).fill()
    with pytest.raises(ValueError, match="fingerprint"):
        FeatureStore(load(toy_folder), texts, (1,), config).fill()


@pytest.mark.parametrize("kind", ["draft_lm", "medusa2"])
def test_kinds_that_copy_layers_want_the_adapter_merged(
    kind: str, toy: SimpleNamespace, toy_folder: Path, adapter: Path
) -> None:
    with pytest.raises(ValueError, match=r"has an adapter beside its weights \(give target.merge_adapter: true\)"):
        toy.make_drafter(kind, load(toy_folder, adapter=adapter))
    merged = load(toy_folder, adapter=adapter, merge_adapter=True)
    drafter = toy.make_drafter(kind, merged)
    if kind == "draft_lm":
        name = "layers.0.self_attn.q_proj.weight"
        ours = drafter.state_dict()[f"lm.model.{name}"]
        assert torch.equal(ours, merged.model.model.state_dict()["layers.1.self_attn.q_proj.weight"].to(ours.dtype))


# ---- what is refused --------------------------------------------------------------------------------------------------


def edit(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of an adapter with some fields of its config changed."""
    shutil.copytree(folder, copy)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return copy


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_modules": ["no_such_proj"]}, "does not fit the target: Target modules"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]}, "8 of its matrices are not in adapter_model.safe"),
        ({"target_modules": ["q_proj"]}, "16 there have no place in the target"),
        ({"r": 8}, "does not fit the target: Error.* size mismatch"),
        ({"peft_type": "LOHA"}, "has the peft_type 'LOHA'; only LORA can be used"),
        ({"peft_type": None}, "adapter_config.json has the peft_type None; only LORA can be used"),
        ({"modules_to_save": ["lm_head"]}, r"brings whole modules \(lm_head\) beside its matrices; merge it into its model"),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes lm_head, which drafters read as plain matrices; give merge_adapter"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, toy_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(toy_folder, adapter=edit(adapter, tmp_path / "changed", **changes))
    assert "\n" not in str(caught.value)


def test_an_adapter_of_a_target_of_other_sizes_is_refused(
    toy: SimpleNamespace, toy_folder: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    toy.make_model("llama", vocab_size=320, hidden_size=64).save_pretrained(tmp_path / "wide")
    wide = make_adapter(tmp_path / "wide", tmp_path / "adapter")
    with pytest.raises(
        ValueError, match="does not fit the target: .*size mismatch.*give the target that it was trained on"
    ):
        load(toy_folder, adapter=wide)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_an_adapters_files_is_refused(
    name: str, toy_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """Also if a pickle lies there in the place of safetensors."""
    copy = edit(adapter, tmp_path / "copy")
    (copy / name).rename(copy / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"has no {name}; give a folder as peft's save_pretrained writes it"):
        load(toy_folder, adapter=copy)


def test_a_damaged_adapter_and_one_that_is_nowhere_are_refused(toy_folder: Path, adapter: Path, tmp_path: Path) -> None:
    copy = edit(adapter, tmp_path / "copy")
    file = copy / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read .*it is damaged"):
        load(toy_folder, adapter=copy)
    with pytest.raises(
        ValueError, match="/no/such/adapter' is no folder, and as an adapter of the hub it cannot be had"
    ):
        load(toy_folder, adapter="/no/such/adapter")


def test_a_head_that_is_adapted_works_once_it_is_merged(
    toy_folder: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_adapter(toy_folder, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    target = load(toy_folder, adapter=folder, merge_adapter=True)
    assert not torch.equal(target.head_weight(), load(toy_folder).head_weight())


def test_a_drafter_for_an_adapted_target_is_used_with_both_forms_of_it(
    toy: SimpleNamespace, toy_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    drafters.save(toy.make_drafter("eagle3", load(toy_folder, adapter=adapter)), tmp_path / "drafter")
    for merge in (False, True):
        drafters.load(tmp_path / "drafter").bind(load(toy_folder, adapter=adapter, merge_adapter=merge))
