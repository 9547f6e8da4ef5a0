"""The trainable draft LM: where it starts, its loss against plain arithmetic on prefixes, what is drafted, what is saved.

Letters: D width, U the LM's vocabulary, W draft vocabulary.
"""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith import drafters
from draftsmith.drafters import draft_lm, tree
from draftsmith.drafters.draft_lm import Config, Model
from draftsmith.drafters.losses import summarise
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.decode import generate
from draftsmith.inference.loading import is_language_model, load_drafter
from draftsmith.inference.metrics import acceptance
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.train.data import Sequence
from draftsmith.train.features import FeatureStore
from draftsmith.train.optim import make_optimizers

ROWS = [
    Sequence([5, 9, 3, 14, 8, 33, 2], [False, False, True, True, True, False, True]),
    Sequence([5, 9, 40, 12], [False, True, True, True]),
]
SCRATCH: dict[str, Any] = {
    "source": "scratch", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24, "layers": None,
}  # fmt: skip
STARTS = [(row, m - 1) for row, s in enumerate(ROWS) for m in range(1, len(s.ids) - 1) if s.loss_mask[m + 1]]


def make(toy: SimpleNamespace, target: Any = None, **changes: Any) -> Any:
    drafter = toy.make_drafter("draft_lm", target or toy.make_target(), **changes)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter


def batch_of(target: Any, rows: list[Sequence] = ROWS) -> Any:
    return one_per_row(FeatureStore(target, rows, ()).batch(range(len(rows))))


def naive_losses(drafter: Any, target: Any) -> Tensor:
    """-Σ p log q at every start, each from passes over its own prefix alone."""
    losses = []
    for row, start in STARTS:
        prefix = torch.tensor([ROWS[row].ids[: start + 2]])
        probs_V = target.model(input_ids=prefix).logits[0, -1].softmax(0)
        log_draft_W = drafter.lm(input_ids=prefix).logits[0, -1].log_softmax(0)
        ids = range(target.shape.vocab_size) if drafter.token_ids_W is None else drafter.token_ids_W.tolist()
        losses.append(-sum(probs_V[i].detach() * log_draft_W[w] for w, i in enumerate(ids)))
    return torch.stack(losses)


# ---- where it starts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "gemma2"])
def test_all_layers_of_a_target_are_the_target(toy: SimpleNamespace, family: str) -> None:
    target = toy.make_target(family, dtype=torch.float32)
    drafter = toy.make_drafter("draft_lm", target, layers=[0, 1, 2, 3], draft_vocab_size=None)
    outputs = generate(
        target, [[5, 6, 7], [9, 8]], max_new=21, sampler=Sampler(), speculation=Speculation(drafter, tree.chain(4)),
        stop_at_eos=False,
    )  # fmt: skip
    assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)


def test_the_asked_layers_and_head_rows_are_copied_and_nothing_is_shared(toy: SimpleNamespace) -> None:
    target = toy.make_target("mistral", tie_word_embeddings=True)
    counts = torch.arange(64).flip(0)
    counts[40] = 99
    drafter = drafters.build("draft_lm", {"layers": [1, 3], "draft_vocab_size": 5}, target.shape)
    drafter.initialise(target, counts)
    assert drafter.token_ids_W is not None and drafter.token_ids_W.tolist() == [0, 1, 2, 3, 40]
    theirs, ours = target.model.state_dict(), drafter.lm.double().state_dict()
    for name, tensor in ours.items():
        source = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.1.")
        rows = [0, 1, 2, 3, 40] if name == "lm_head.weight" else slice(None)
        torch.testing.assert_close(tensor, theirs[source][rows], rtol=1e-6, atol=1e-6)  # through fp32
    addresses = {p.data_ptr() for p in target.model.parameters()}
    assert not any(p.data_ptr() in addresses for p in drafter.parameters())


def test_without_layers_a_fifth_of_the_target_is_kept_from_both_ends() -> None:
    def kept(total: int) -> tuple[int, ...]:
        return draft_lm.kept_layers(Config(), SimpleNamespace(num_layers=total))  # type: ignore[arg-type]

    assert (kept(30), kept(10), kept(4)) == ((0, 1, 2, 27, 28, 29), (0, 9), (0,))


@pytest.mark.parametrize("vocab_size", [56, 64, 72])
def test_a_checkpoint_starts_as_itself_whatever_its_padding(
    toy: SimpleNamespace, vocab_size: int, tmp_path: Path
) -> None:
    model = toy.make_model("qwen2", vocab_size=vocab_size, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    target = toy.make_target(dtype=torch.float32)
    drafter = toy.make_drafter("draft_lm", target, source=str(tmp_path), layers=None, draft_vocab_size=None)
    ids = torch.tensor([[5, 9, 3, 14]])
    usable = min(vocab_size, 64)
    ours = drafter.lm(input_ids=ids).logits
    torch.testing.assert_close(ours, model(input_ids=ids).logits[..., :usable], rtol=1e-5, atol=1e-5)
    prompts = [[5, 63, 7], [60, 8]]  # ids that the smaller one cannot read
    plain = generate(target, prompts, max_new=9, sampler=Sampler(0.7), seeds=[1, 2], stop_at_eos=False)
    outputs = generate(
        target, prompts, max_new=9, sampler=Sampler(0.7), seeds=[1, 2], stop_at_eos=False,
        speculation=Speculation(drafter, tree.chain(3)),
    )  # fmt: skip
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert math.isfinite(drafter(batch_of(target, [Sequence([5, 60, 63, 8], [True] * 4)])).sum.detach())


def test_a_llama_from_scratch_has_the_asked_sizes_and_keeps_to_the_seed(toy: SimpleNamespace) -> None:
    target = toy.make_target()
    first, second = (toy.make_drafter("draft_lm", target, **SCRATCH) for _ in range(2))
    assert first.lm.config.model_type == "llama" and first.lm.get_input_embeddings().weight.shape == (64, 16)
    assert first.lm.model.layers[0].mlp.up_proj.weight.shape == (24, 16) and len(first.lm.model.layers) == 1
    assert first.lm.lm_head.weight.shape == (48, 16)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_on_the_meta_device_only_buffers_have_values() -> None:
    with torch.device("meta"):
        drafter = drafters.build("draft_lm", SCRATCH, SHAPE)
    assert all(parameter.is_meta for parameter in drafter.parameters())
    assert not any(buffer.is_meta for buffer in drafter.lm.buffers())


SHAPE = drafters.Shape(
    hidden_size=32, vocab_size=64, num_layers=4, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


# ---- training and drafting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": None}, SCRATCH], ids=["cut", "full head", "scratch"])
def test_loss_and_gradients_are_those_of_every_prefix_alone(toy: SimpleNamespace, changes: dict[str, Any]) -> None:
    target = toy.make_target()
    drafter = make(toy, target, **changes)
    parts = drafter(batch_of(target))
    parts.sum.backward()
    ours = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    expected = naive_losses(drafter, target)
    expected.sum().backward()
    assert float(parts.count) == len(STARTS)
    torch.testing.assert_close(parts.sum, expected.sum(), rtol=1e-10, atol=1e-10)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            ours[name], parameter.grad, rtol=1e-4, atol=1e-5
        )  # RMS norms of transformers are fp32


@pytest.mark.parametrize("changes", [{}, SCRATCH], ids=["cut", "scratch"])
def test_drafted_logits_are_those_that_training_sees_on_the_same_text(
    toy: SimpleNamespace, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is observed up to p; the root is token p + 1, then the chain is led along the text."""
    target = toy.make_target()
    drafter = make(toy, target, **changes)
    batch, seen = batch_of(target, [Sequence(row.ids, [True] * len(row.ids)) for row in ROWS]), {}
    monkeypatch.setattr(
        draft_lm,
        "distill",
        lambda hidden, heads, *a, **k: seen.update(h=hidden[0], w=heads[0]) or SimpleNamespace(parts=0),
    )
    with torch.no_grad():
        drafter(batch)
        (trained_BTW,) = toy.grids_of([seen["h"] @ seen["w"].T], draft_lm.trained_starts(batch, 1))
    ids = batch.ids_BT[0]
    watch = toy.Watch(lambda depth: ids[4 + depth][None])
    with torch.inference_mode():
        state = drafter.observe(drafter.init(1, 16), ids[None, :3], torch.zeros(1, 3, 0), ids[3][None], [3])
        drafter.propose(state, tree.chain(3), watch)
    for depth, logits_BW in enumerate(watch.seen):
        torch.testing.assert_close(logits_BW[0], trained_BTW[0, 2 + depth], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "jsd", "tv"])
def test_a_distilled_draft_is_accepted_more_often_than_it_was(toy: SimpleNamespace, divergence: str) -> None:
    """Sampled on prompts that training never saw, by every divergence of DistillSpec. Fixed seeds."""
    target = toy.make_target(dtype=torch.float32, seed=3, initializer_range=0.2)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 64, (520, 3), generator=generator).tolist()
    answers = generate(target, prompts[8:], max_new=16, sampler=Sampler(1.0), seeds=list(range(512)), stop_at_eos=False)
    rows = [Sequence(p + a.ids, [False] * 3 + [True] * 16) for p, a in zip(prompts[8:], answers, strict=True)]
    drafter = toy.make_drafter(
        "draft_lm", target, layers=[0, 3], draft_vocab_size=None, loss={"divergence": divergence}
    )

    def accepted() -> float:
        outputs = generate(
            target, prompts[:8], max_new=24, sampler=Sampler(1.0), seeds=list(range(8)), stop_at_eos=False,
            speculation=Speculation(drafter, tree.chain(3), rule="ratio"),
        )  # fmt: skip
        rate: Any = acceptance(outputs)["draft_acceptance_rate"]
        return float(rate)

    before, batches = accepted(), [batch_of(target, rows[i : i + 128]) for i in range(0, 512, 128)]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3, weight_decay=0.0)
    drafter.train()
    for step in range(60):
        parts = drafter(batches[step % 4])
        optimizer.zero_grad()
        (parts.sum / parts.count).backward()
        optimizer.step()
    drafter.eval()
    assert accepted() > before + 0.1


# ---- AdaSPEC ------------------------------------------------------------------------------------------------------


def test_the_hardest_tokens_of_each_conversation_are_kept_and_weigh_as_much_as_all() -> None:
    gap_BT = torch.tensor([[0.1, 0.9, 0.5, 0.0, 9.0], [0.2, 0.2, 0.2, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    trained_BT = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    expected_BT = torch.tensor([[0, 2, 2, 0, 0], [1.5, 1.5, 0, 0, 0], [0, 0, 0, 0, 0]])  # 2 of 4, 2 of 3, none
    torch.testing.assert_close(draft_lm.hardest(gap_BT, trained_BT, 0.5), expected_BT)
    torch.testing.assert_close(draft_lm.hardest(gap_BT, trained_BT, 1.0), trained_BT.float())


@pytest.mark.parametrize("distilled_by", ["kl", "jsd"])
def test_with_a_reference_the_loss_is_that_of_the_selected_tokens(
    toy: SimpleNamespace, distilled_by: str, tmp_path: Path
) -> None:
    """Both are judged by the draft's own divergence, whatever the reference was distilled by."""
    target = toy.make_target()
    reference = make(toy, target, layers=[0, 1], loss={"divergence": distilled_by})
    drafters.save(reference, tmp_path / "reference")
    drafter = toy.make_drafter("draft_lm", target, reference=str(tmp_path / "reference"), keep=0.5)
    drafter.load_state_dict(make(toy, target).state_dict())
    losses, theirs = naive_losses(drafter, target), naive_losses(reference, target)
    expected = losses.new_zeros(())
    for row in (0, 1):
        places = [n for n, (r, _) in enumerate(STARTS) if r == row]
        places.sort(key=lambda n: float((theirs[n] - losses[n]).detach()))
        kept = places[: math.ceil(len(places) / 2)]
        expected = expected + losses[kept].sum() * len(places) / len(kept)
    parts = drafter(batch_of(target))
    torch.testing.assert_close(parts.sum, expected, rtol=1e-9, atol=1e-9)
    assert not torch.isclose(parts.sum, losses.sum())
    summary = summarise(parts.metrics)  # of all tokens
    assert summary["loss/0"] == pytest.approx(float(losses.detach().mean()), rel=1e-6) and float(parts.count) == len(
        STARTS
    )
    parts.sum.backward()
    assert not any(name.startswith("_references") for name, _ in drafter.named_parameters())


def test_a_reference_that_cannot_judge_is_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    target = toy.make_target()
    drafters.save(toy.make_drafter("draft_lm", target, draft_vocab_size=40), tmp_path / "other")
    drafters.save(toy.make_drafter("medusa", target), tmp_path / "medusa")
    for name, message in [("other", "has another draft vocabulary"), ("medusa", "is no draft LM; give the folder")]:
        with pytest.raises(ValueError, match=message):
            toy.make_drafter("draft_lm", target, reference=str(tmp_path / name), keep=0.5)


# ---- adapters, folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "matrices"), [("llama", 7), ("gpt2", 4)])
def test_adapters_alone_are_trained_and_what_is_saved_has_them_merged(
    toy: SimpleNamespace, family: str, matrices: int, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    target = toy.make_target(family)
    drafter = toy.make_drafter("draft_lm", target, lora_rank=3)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    batch = batch_of(target)
    first = drafter(batch)
    torch.testing.assert_close(first.sum, toy.make_drafter("draft_lm", target)(batch).sum)  # they start as nothing
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        drafter(batch).sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and len(changed) == 2 * matrices
    assert bool(drafter(batch).sum < first.sum)

    drafters.save(drafter.served(drafter.shape).to(drafter.dtype), tmp_path / "d")
    loaded: Any = drafters.load(tmp_path / "d")
    loaded.bind(target)
    assert loaded.config.lora_rank == 0 and not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(loaded(batch).sum, drafter(batch).sum, rtol=1e-6, atol=1e-6)
    assert all(p.requires_grad == (".lora_" in name) for name, p in drafter.named_parameters())  # as it was


@pytest.mark.parametrize("changes", [{"lora_rank": 2}, {}, SCRATCH], ids=["adapters", "cut", "scratch"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_trained_weight_is_in_one_optimizer_and_the_embedding_never_in_muon(
    toy: SimpleNamespace, changes: dict[str, Any], name: str
) -> None:
    drafter = toy.make_drafter("draft_lm", toy.make_target(), **changes)
    config: Any = SimpleNamespace(
        name=name, betas=(0.9, 0.95), weight_decay=0.0, learning_rate=1e-3, muon_learning_rate=1e-2
    )
    optimizers = make_optimizers(drafter, config)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in drafter.parameters() if p.requires_grad)
    others = {id(drafter.lm.get_input_embeddings().weight), id(drafter.lm.get_output_embeddings().weight)}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Muon):
            assert not others & {id(p) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_a_saved_folder_is_a_drafter_with_the_weights_and_config_of_a_hugging_face_model(
    toy: SimpleNamespace, family: str, tmp_path: Path
) -> None:
    target = toy.make_target(family)
    drafter = make(toy, target, layers=[0, 2], draft_vocab_size=None)
    drafters.save(drafter, tmp_path / "run" / "drafter")
    assert not is_language_model(tmp_path / "run") and not is_language_model(tmp_path / "run" / "drafter")
    loaded = load_drafter(str(tmp_path / "run"), target)
    assert isinstance(loaded, Model) and loaded.config == drafter.config
    record = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**record["config"]["lm"]), dtype=torch.float64)
    state = {name.removeprefix("lm."): tensor for name, tensor in loaded.state_dict().items() if name != "d2t"}
    model.load_state_dict(state)
    ids = torch.tensor([[5, 9, 3]])
    ours, theirs = model.eval()(input_ids=ids).logits, drafter.lm(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # Gemma 2 has fp32 inside
    model.save_pretrained(tmp_path / "exported")
    assert is_language_model(tmp_path / "exported")


def test_rotary_frequencies_stay_exact_in_every_type(toy: SimpleNamespace) -> None:
    drafter = toy.make_drafter("draft_lm", toy.make_target(dtype=torch.float32))
    exact = drafter.lm.model.rotary_emb.inv_freq.clone()
    for dtype in (torch.bfloat16, torch.float64):
        drafter.to(dtype)
        assert drafter.dtype == dtype and torch.equal(drafter.lm.model.rotary_emb.inv_freq, exact)


def test_a_duplicate_has_the_same_weights_and_none_in_common(toy: SimpleNamespace) -> None:
    drafter = make(toy)
    twin = drafter.served(drafter.shape).to(drafter.dtype)
    ours, theirs = drafter.state_dict(), twin.state_dict()
    assert twin.config == drafter.config and ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-6, atol=1e-6)  # through fp32
        assert theirs[name].data_ptr() != tensor.data_ptr()


# ---- refusals -----------------------------------------------------------------------------------------------------


SIZES = {name: value for name, value in SCRATCH.items() if name not in ("source", "layers")}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": ""}, "source is empty; give 'target', 'scratch'"),
    ({"source": "scratch", "layers": (0,), **SIZES}, "layers belongs to source: target, not to 'scratch'"),
    ({"layers": ()}, "layers is []; give distinct layer numbers from 0"),
    ({"layers": (2, 1)}, "give distinct layer numbers from 0 in ascending order"),
    ({"layers": (-1, 1)}, "give distinct layer numbers from 0 in ascending order"),
    ({"hidden_size": 8}, "hidden_size: sizes belong to source: scratch, not to 'target'"),
    ({"source": "scratch", "hidden_size": 8}, "source scratch needs hidden_size, num_layers, num_heads, intermediate_size"),
    ({"source": "scratch", **SIZES, "num_layers": 0}, "each 1 or more"),
    ({"source": "scratch", **SIZES, "num_heads": 3}, "hidden_size is 16 and num_heads 3; give a width that is an even multiple"),
    ({"draft_vocab_size": 0}, "draft_vocab_size is 0; give 1 or more"),
    ({"lora_rank": -1}, "lora_rank is -1; give 0 or more"),
    ({"source": "scratch", **SIZES, "lora_rank": 4}, "and 0 for source: scratch"),
    ({"keep": 0.0, "reference": "x"}, "keep is 0.0"),
    ({"on_policy": 1.5}, "on_policy 1.5; give (0, 1] and [0, 1]"),
    ({"keep": 0.5}, "reference and a keep below 1 belong together"),
    ({"reference": "x"}, "reference and a keep below 1 belong together"),
]  # fmt: skip


@pytest.mark.parametrize("settings, message", REFUSED, ids=str)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**settings)


def test_what_does_not_fit_the_target_is_refused(toy: SimpleNamespace, toy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the target has 4 layers: give numbers below 4"):
        toy.make_drafter("draft_lm", toy.make_target(), layers=[0, 4])
    with pytest.raises(ValueError, match="source '/no/such/folder' cannot be read .*give a model folder, a hub id"):
        toy.make_drafter("draft_lm", toy.make_target(), source="/no/such/folder", layers=None)
    with pytest.raises(ValueError, match="'granite' model scales its logits behind the head .logits_scaling."):
        toy.make_drafter("draft_lm", toy.make_target("granite", logits_scaling=8.0))
    with pytest.raises(ValueError, match="lm describes no model that this transformers knows"):
        drafters.build("draft_lm", {"lm": {"model_type": "lama", "vocab_size": 64}}, SHAPE)

    tokenizer = toy.make_tokenizer()
    target = Target(toy.make_model("llama", vocab_size=320), tokenizer, "toy")
    settings = {"source": str(toy_folder), "layers": None}
    toy.make_drafter("draft_lm", target, **settings)  # the same tokenizer
    other = tmp_path / "other"
    toy.make_model("llama", vocab_size=320).save_pretrained(other)
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        toy.make_drafter("draft_lm", target, source=str(other), layers=None)
    tokenizer.save_pretrained(other)
    text = json.loads((other / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="is not the target's: the same ids mean other tokens"):
        toy.make_drafter("draft_lm", target, source=str(other), layers=None)


def test_without_peft_adapters_say_what_to_install(toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora_rank needs the package peft; install draftsmith\[lora\]"):
        toy.make_drafter("draft_lm", toy.make_target(), lora_rank=2)
