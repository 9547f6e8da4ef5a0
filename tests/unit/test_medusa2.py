"""Medusa-2: heads and target adapted together. What the loss is, what it reaches, what it leaves alone, and what comes out."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters import adapters, medusa, medusa2
from draftsmith.drafters.adapters import AdaptedTarget, compare
from draftsmith.drafters.base import Pace, Shape, TrainableDrafter
from draftsmith.drafters.tree import Dynamic, chain
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load
from draftsmith.inference.loading import load_drafter
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.train.config import OptimConfig
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore
from draftsmith.train.optim import make_optimizers, set_rates
from draftsmith.train.serving import distance, save, serve

ROWS = [
    Sequence([5, 9, 3, 14, 8, 33, 2], [False, False, True, True, True, False, True]),
    Sequence([5, 9, 40, 12, 7, 21, 30, 11, 19, 2], [False] * 4 + [True] * 6),
]
SHAPE = Shape(
    hidden_size=32, vocab_size=64, num_layers=8, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


def make(toy: SimpleNamespace, target: Target, *, random: bool = True, **changes: Any) -> TrainableDrafter:
    """A drafter whose adapters are something, unless told otherwise."""
    drafter: TrainableDrafter = toy.make_drafter("medusa2", target, **{"num_heads": 3, "adapt_rank": 3, **changes})
    if random:
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return drafter


def batch_of(target: Target) -> Any:
    return one_per_row(FeatureStore(target, ROWS, ("last",)).batch([0, 1]))


def by_hand(drafter: TrainableDrafter, target: Target) -> Any:
    """The target with the adapters' products added to copies of its weights, as plain arithmetic on names."""
    model = copy.deepcopy(target.model)
    weights, scale = dict(model.named_parameters()), drafter.config.adapt_alpha / drafter.config.adapt_rank
    factors: Any = dict(drafter.adapters)  # type: ignore[arg-type]
    with torch.no_grad():
        for name in (name for name in factors if name.endswith("/lora_A")):
            layer = name.removesuffix("/lora_A")
            product = factors[f"{layer}/lora_B"] @ factors[name]
            weights[f"{layer.replace('/', '.')}.weight"] += scale * product.to(target.dtype)
    return model


def naive_loss(drafter: TrainableDrafter, model: Any, target: Target) -> tuple[Tensor, Tensor]:
    """The heads' loss and the self-distillation, row by row from both models' own logits."""
    heads, kl = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    kept = drafter.token_ids_W
    assert kept is not None
    for row in ROWS:
        ids_1T = torch.tensor([row.ids])
        original_TV = target.model(input_ids=ids_1T, use_cache=False).logits[0].log_softmax(1)
        out = model(input_ids=ids_1T, use_cache=False, output_hidden_states=True)
        adapted_TV, last_TD = out.logits[0].log_softmax(1), out.hidden_states[-1][0]
        for m in range(1, len(row.ids) - 1):
            if not row.loss_mask[m + 1]:
                continue
            for v in range(target.shape.vocab_size):
                kl = kl + original_TV[m, v].exp() * (original_TV[m, v] - adapted_TV[m, v])
            for k in range(min(3, m)):
                z = last_TD[m - 1 - k]
                block: Any = drafter.blocks[k][0].linear  # type: ignore[index]
                x = block.weight @ z + block.bias
                z = z + x / (1 + torch.exp(-x))
                weight: Any = drafter.lm_heads[k].weight  # type: ignore[index]
                heads = heads - 0.8**k * (adapted_TV[m, kept].exp().detach() * (weight @ z).log_softmax(0)).sum()
    return heads, kl


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_and_all_gradients_equal_the_naive_definition(
    toy: SimpleNamespace, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CHUNK_ELEMENTS", 4 * toy.VOCAB)  # several chunks
    target = toy.make_target(family, num_hidden_layers=2)
    drafter = make(toy, target, distill_weight=7.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if family == "gemma2" else {"rtol": 1e-10, "atol": 1e-10}

    parts = drafter(batch_of(target))
    parts.sum.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()

    # Through merged weights W + scale · B A: with G the gradient of W, that of B is scale · G Aᵀ and that of A scale · Bᵀ G.
    merged = by_hand(drafter, target).requires_grad_(True)
    heads, kl = naive_loss(drafter, merged, target)
    torch.testing.assert_close(parts.sum.double(), heads + 7.0 * kl, **tolerance)
    torch.testing.assert_close(parts.metrics["adapted_kl"].double(), kl.detach(), **tolerance)
    (heads + 7.0 * kl).backward()
    dense = dict(merged.named_parameters())
    scale = drafter.config.adapt_alpha / drafter.config.adapt_rank
    factors: Any = dict(drafter.adapters)  # type: ignore[arg-type]
    for name, gradient in gradients.items():
        if not name.startswith("adapters."):
            torch.testing.assert_close(gradient, drafter.get_parameter(name).grad, **tolerance)
            continue
        layer, side = name.removeprefix("adapters.").rsplit("/", 1)
        dense_grad = scale * dense[f"{layer.replace('/', '.')}.weight"].grad
        a, b = factors[f"{layer}/lora_A"], factors[f"{layer}/lora_B"]
        expected = b.T @ dense_grad if side == "lora_A" else dense_grad @ a.T
        assert gradient is not None and float(gradient.abs().max()) > 0
        torch.testing.assert_close(gradient, expected, **tolerance)


def test_what_adapting_did_is_compared_through_the_head_as_plain_softmaxes_do(toy: SimpleNamespace) -> None:
    target = toy.make_target("gemma2")  # whose logits are soft-capped
    torch.manual_seed(0)
    original_nD, adapted_nD = torch.randn(2, 6, toy.WIDTH, dtype=torch.float64) * 3
    kl_n, normaliser_n, argmax_n = compare(original_nD, adapted_nD, target)
    for i in range(6):
        p, q = (torch.softmax(5 * torch.tanh(target.head_weight() @ x[i] / 5), 0) for x in (original_nD, adapted_nD))
        torch.testing.assert_close(kl_n[i], (p * (p / q).log()).sum())
        assert int(argmax_n[i]) == int(q.argmax())
        torch.testing.assert_close(normaliser_n[i], target.unembed(adapted_nD[i]).exp().sum().log())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_merged_target_says_what_the_adapted_one_said_in_training_also_from_disk(
    toy: SimpleNamespace, family: str, tmp_path: Path
) -> None:
    target = toy.make_target(family)
    drafter = make(toy, target)
    ids_BT = torch.tensor([[5, 9, 3, 14, 8, 33, 2]])
    with torch.no_grad():
        live = target.unembed(drafter.adapted.last(ids_BT))  # type: ignore[operator, union-attr]
        before = target.model(input_ids=ids_BT).logits
        merged = drafter.adapted_model()
        assert float((live - before).abs().max()) > 0.1
        torch.testing.assert_close(merged(input_ids=ids_BT).logits, live, rtol=1e-10, atol=1e-10)
        if family != "gpt2":  # whose weights lie transposed
            torch.testing.assert_close(by_hand(drafter, target)(input_ids=ids_BT).logits, live, rtol=1e-10, atol=1e-10)
        assert merged.config.to_dict() == target.model.config.to_dict()
        merged.save_pretrained(tmp_path)
        read = type(merged).from_pretrained(tmp_path, dtype=torch.float64)
        assert torch.equal(read(input_ids=ids_BT).logits, merged(input_ids=ids_BT).logits)
    assert [n for n, _ in merged.named_modules()] == [n for n, _ in target.model.named_modules()]
    ours = {p.data_ptr() for p in target.model.parameters()}
    assert not ours & {p.data_ptr() for p in merged.parameters()}  # independent of the original


def test_adapters_start_as_nothing_and_cost_no_copy_of_the_target(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    drafter = make(toy, target, random=False)
    ids_BT = torch.tensor([[5, 9, 3, 14]])
    with torch.no_grad():
        assert torch.equal(drafter.adapted.last(ids_BT), target.hidden(ids_BT)[1])  # type: ignore[operator, union-attr]
    assert float(drafter(batch_of(target)).metrics["adapted_kl"]) == pytest.approx(0, abs=1e-12)
    frozen = [p for p in drafter.adapted._lora.parameters() if not p.requires_grad]  # type: ignore[union-attr]
    assert {p.data_ptr() for p in frozen} == {p.data_ptr() for p in target.model.parameters()}
    names = {name.rsplit("/", 2)[-2] for name in drafter.adapters}  # type: ignore[union-attr]
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(drafter.adapters) == 2 * 7 * toy.LAYERS  # type: ignore[arg-type]
    own = medusa.Model(medusa.Config(num_heads=3, draft_vocab_size=48), target.shape)
    rest = {name for name, _ in drafter.named_parameters() if not name.startswith("adapters.")}
    assert rest == {name for name, _ in own.named_parameters()}


@pytest.fixture(scope="module")
def trained(toy: SimpleNamespace) -> tuple[Target, dict[float, tuple[TrainableDrafter, float]]]:
    """A target and, for two weights of the self-distillation, a drafter whose adapters alone were trained on two rows for 60 steps,
    with the mean overlap of its heads' laws and the adapted target's."""
    target, found = toy.make_target(dtype=torch.float32, num_hidden_layers=2), {}
    batch = batch_of(target)
    for weight in (0.1, 1e3):
        drafter = make(toy, target, random=False, own_head=False, distill_weight=weight)
        optimizer = torch.optim.AdamW(drafter.adapted.parameters.values(), weight_decay=0.0)  # type: ignore[union-attr]
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 60)
            optimizer.zero_grad()
            parts = drafter(batch)
            parts.sum.backward()
            optimizer.step()
        found[weight] = drafter, float(parts.metrics["overlap"].sum() / parts.metrics["supervised"].sum())
    return target, found


def test_the_weight_of_self_distillation_decides_how_far_the_target_moves(trained: Any, toy: SimpleNamespace) -> None:
    target, found = trained
    answers = [(ROWS[1].ids[:4], ROWS[1].ids[4:])]
    far, near = (serve(target, found[weight][0], answers)[0].adapted_from for weight in (0.1, 1e3))
    assert far is not None and near is not None
    assert near["kl"] < 0.01 < 0.1 < far["kl"]
    untouched = toy.make_target(dtype=torch.float32, num_hidden_layers=2).model.state_dict()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in target.model.state_dict().items())
    assert target.adapted_from is None and not any(p.requires_grad for p in target.model.parameters())


def test_a_target_that_may_move_comes_towards_its_heads(trained: Any) -> None:
    """What Medusa-2 is for: the same heads, held still, guess better; with the target held in place they do not."""
    far, near = (trained[1][weight][1] for weight in (0.1, 1e3))
    assert far > 0.5 and near < 0.3


def test_distance_is_that_of_two_plain_models(toy: SimpleNamespace) -> None:
    target, other = toy.make_target(), toy.make_target()
    with torch.no_grad():
        for parameter in other.model.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    answers = [([5, 9], [3, 14, 8]), ([7], [7, 12])]
    kl, same = 0.0, 0
    for prompt, answer in answers:
        ids_1T = torch.tensor([prompt + answer])
        p_TV, q_TV = (t.model(input_ids=ids_1T).logits[0].softmax(1) for t in (target, other))
        for i in range(len(prompt) - 1, ids_1T.shape[1] - 1):
            kl += float((p_TV[i] * (p_TV[i] / q_TV[i]).log()).sum())
            same += int(p_TV[i].argmax() == q_TV[i].argmax())
    found = distance(target, other, answers)
    assert found["kl"] == pytest.approx(kl / 5) and found["top1_agreement"] == same / 5


@pytest.mark.parametrize("plan", [chain(3), Dynamic(8, 3, 3)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_decoding_with_the_adapted_target_is_plain_decoding_of_the_adapted_target(
    toy: SimpleNamespace, plan: Any, temperature: float
) -> None:
    target = toy.make_target()
    adapted, served = serve(target, make(toy, target))
    served.to(torch.float64).eval()
    prompts, options = [[5, 6, 7, 8], [9], [30, 31]], {"max_new": 14, "stop_at_eos": False}
    plain, fast, original = (
        [o.ids for o in generate(t, prompts, sampler=Sampler(temperature), speculation=s, **options)]  # type: ignore[arg-type]
        for t, s in ((adapted, None), (adapted, Speculation(served, plan)), (target, None))
    )
    assert fast == plain != original


def test_what_is_saved_is_plain_medusa_for_the_adapted_target_and_says_where_that_is(
    toy: SimpleNamespace, toy_folder: Path, tmp_path: Path
) -> None:
    target = load(toy_folder)
    save(*serve(target, make(toy, target)), tmp_path / "run")  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["drafter", "target"]
    adapted = load(tmp_path / "run" / "target")
    assert adapted.adapted_from == {"path": str(toy_folder), "fingerprint": target.shape.fingerprint}
    assert adapted.shape.fingerprint != target.shape.fingerprint and adapted.tokenizer is not None
    for name in ("run", "run/drafter"):
        drafter: Any = load_drafter(str(tmp_path / name), adapted)
        assert type(drafter) is medusa.Model and drafter.shape == adapted.shape
        drafter.bind(adapted)
        with pytest.raises(ValueError, match=re.escape(f"(--target {tmp_path / 'run' / 'target'})")):
            load_drafter(str(tmp_path / name), target)
    drafters.save(toy.make_drafter("medusa", adapted), tmp_path / "alone")
    with pytest.raises(ValueError, match="give the target it was made for$"):
        load_drafter(str(tmp_path / "alone"), target)


def test_the_adapters_wait_and_then_learn_at_their_own_rate(toy: SimpleNamespace) -> None:
    target = toy.make_target(dtype=torch.float32)
    drafter = make(toy, target, random=False, warmup_heads=0.3, adapt_learning_rate_ratio=0.25)
    paces = {drafter.pace(name) for name, _ in drafter.named_parameters()}
    assert paces == {Pace(), Pace(0.25, 0.3)}
    config = OptimConfig(name="muon", learning_rate=1e-2, warmup=0.0, final=1.0)
    optimizers = make_optimizers(drafter, config)
    factors = list(drafter.adapters.values())  # type: ignore[operator, union-attr]
    before = [parameter.detach().clone() for parameter in factors]
    for step in range(10):
        drafter.zero_grad()
        drafter(batch_of(target)).sum.backward()
        set_rates(optimizers, step, 10, config)
        waits = step < 3
        assert all((parameter.grad is None) == waits for parameter in factors)
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, factors, strict=True)) == waits
    # Muon is for whole matrices: the adapters' factors are AdamW's, at a quarter of the heads' rate.
    rates = {id(p): (type(o), group["lr"]) for o in optimizers for group in o.param_groups for p in group["params"]}
    assert {rates[id(parameter)] for parameter in factors} == {(torch.optim.AdamW, 0.25e-2)}
    assert rates[id(drafter.get_parameter("lm_heads.0.weight"))] == (torch.optim.AdamW, 1e-2)
    assert rates[id(drafter.get_parameter("blocks.0.0.linear.weight"))][0] is torch.optim.Muon


def test_only_the_named_layers_are_adapted_and_an_unknown_one_is_refused(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    drafter = make(toy, target, adapt_modules=["q_proj", "down_proj"])
    assert {name.rsplit("/", 2)[-2] for name in drafter.adapters} == {"q_proj", "down_proj"}  # type: ignore[union-attr]
    for name in ("q_pro", "lm_head"):
        with pytest.raises(
            ValueError, match=f"adapt_modules has '{name}', no linear layer of the decoder; .*allowed: "
        ):
            AdaptedTarget(target.model, 4, 8.0, (name,))


def test_without_peft_it_says_what_to_install(toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"adapting a target needs peft .*install draftsmith\[lora\]"):
        AdaptedTarget(toy.make_model("llama"), 4, 8.0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"adapt_rank": 0}, "adapt_rank is 0; give 1 or more"),
        ({"adapt_alpha": 0.0}, "adapt_alpha is 0.0; give a number above 0"),
        ({"distill_weight": -1}, "distill_weight is -1.0; give a number above 0"),
        ({"adapt_learning_rate_ratio": 0}, "adapt_learning_rate_ratio is 0.0; give a number above 0"),
        ({"warmup_heads": 1.0}, "warmup_heads is 1.0; give a share of the steps, 0 or more and below 1"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"adapt_ranks": 2}, "unknown key 'adapt_ranks'; did you mean 'adapt_rank'?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drafters.build("medusa2", settings, SHAPE)


def test_its_settings_are_medusas_and_more() -> None:
    assert issubclass(medusa2.Config, medusa.Config)
    assert medusa2.Config(num_heads=7, adapt_modules=("a",)).num_heads == 7
