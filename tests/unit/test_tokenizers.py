"""Tokenizers compared token by token, and drafting across two of them."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.drafters.language_model import DraftLM, State
from draftsmith.drafters.tree import Dynamic, Fixed, chain
from draftsmith.inference.decode import generate
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.inference.tokenizers import compare, load_draft_lm, token_bytes

TEXTS = ["the quick brown fox jumps over the lazy dog", "hello there, how are you today?"]
OTHER_TEXTS = ["the lazy fox sleeps; the dog jumps over you", "how many quick foxes are there? a café, über"]
SEEDS = [3, 141, 59, 26, 5]


def byte_level(texts: Iterable[str], specials: list[str], size: int = 320, bos: str | None = None, **roles: Any) -> Any:
    """A trained byte-level BPE tokenizer; with `bos` it puts that in front of every text."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    if bos is not None:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, **roles)


def metaspace(texts: Iterable[str]) -> Any:
    """A BPE tokenizer in SentencePiece's manner: spaces as "▁", one in front of every text, bytes as <0x…>."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    specials = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=specials[:2], show_progress=False)
    core.train_from_iterator(texts, trainer)
    vocab: dict[str, int] = core.get_vocab()
    for byte in specials[2:]:
        vocab.setdefault(byte, len(vocab))
    merges = [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    core.model = tokenizers.models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def permuted(tokenizer: Any, order: list[int]) -> Any:
    """The same tokens under other ids: `order[i]` is the new id of token i."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] = {text: order[i] for text, i in described["model"]["vocab"].items()}
    for added in described["added_tokens"]:
        added["id"] = order[added["id"]]
    core = tokenizers.Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token)


def target_tokenizer() -> Any:
    return byte_level(TEXTS, ["<pad>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<pad>")


def draft_tokenizer() -> Any:
    return byte_level(OTHER_TEXTS, ["<s>", "</s>"], bos="<s>", eos_token="</s>")


def with_tokenizer(toy: SimpleNamespace, tokenizer: Any, **changes: Any) -> Target:
    model = toy.make_model("llama", torch.float64, num_hidden_layers=2, vocab_size=len(tokenizer) + 8, **changes)
    return Target(model, tokenizer, "toy")


def run(target: Any, prompts: list[list[int]], sampler: Sampler, *, max_new: int = 21, **options: Any) -> Any:
    speculation = Speculation(**options) if options else None
    seeds = SEEDS[: len(prompts)]
    return generate(
        target, prompts, max_new=max_new, sampler=sampler, speculation=speculation, seeds=seeds, stop_at_eos=False
    )


# ---- comparing ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_equals_itself_and_its_extensions() -> None:
    """More tokens behind the common ones (padding, added ones) change nothing; a head that ends earlier neither."""
    longer = target_tokenizer()
    longer.add_tokens(["<extra_0>", "<extra_1>"])
    for other in (target_tokenizer(), longer):
        for one, two in ((other, target_tokenizer()), (target_tokenizer(), other)):
            found = compare(one, two)
            assert (found.kind, found.share, found.token_map) == ("same", 1.0, None)
    assert compare(longer, target_tokenizer(), target_size=300, draft_size=310).kind == "same"


def test_permuted_ids_are_never_taken_for_the_same(toy: SimpleNamespace, tmp_path: Path) -> None:
    """Every string is there, under another id. Used id for id it is refused; translated, a permuted copy of the target is
    always right."""
    ours = target_tokenizer()
    order = torch.randperm(len(ours), generator=torch.Generator().manual_seed(0)).tolist()
    target = with_tokenizer(toy, ours)
    other = permuted(ours, order)
    found = compare(ours, other)
    assert (found.kind, found.share) == ("shared subset", 1.0) and found.token_map is not None
    assert found.token_map.draft_ids_W.tolist() == order
    assert found.token_map.target_ids_W.tolist() == [*range(len(ours))]

    copy = with_tokenizer(toy, other)
    with torch.no_grad():
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            copy.model.get_parameter(name)[order] = target.model.get_parameter(name)[: len(ours)]
        target.model.lm_head.weight[len(ours) :] = 0  # padding is never the most likely
    copy.model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has another tokenizer than toy: the same ids mean other tokens"):
        load_draft_lm(tmp_path, target, translate=False)
    prompts = [ours(text)["input_ids"] for text in TEXTS]
    outputs = run(target, prompts, Sampler(), drafter=load_draft_lm(tmp_path, target), plan=chain(4))
    assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)
    wrong = run(target, prompts, Sampler(), drafter=DraftLM(copy), plan=chain(4))  # as if the ids were the same
    assert [output.ids for output in wrong] == [output.ids for output in outputs]
    assert sum(r.accepted for output in wrong for r in output.rounds) < 8


def test_tokenizers_with_little_in_common_are_refused() -> None:
    def of(words: list[str]) -> Any:
        vocab = {word: i for i, word in enumerate(["[UNK]", *words])}
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
        return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")

    one, two = of([f"a{i}" for i in range(99)]), of([f"a{i}" for i in range(80, 400)])
    with pytest.raises(
        ValueError, match="of 100 tokens of the target and 321 of the draft model 20 are the same, 20% of"
    ):
        compare(one, two)
    assert compare(one, of([f"a{i}" for i in range(60, 400)])).share == 0.4


def test_shared_tokens_are_those_with_the_same_bytes() -> None:
    ours, theirs = target_tokenizer(), draft_tokenizer()
    found = compare(ours, theirs)
    assert found.kind == "shared subset" and found.token_map is not None
    pairs = list(zip(found.token_map.target_ids_W.tolist(), found.token_map.draft_ids_W.tolist(), strict=True))
    names = {(ours.convert_ids_to_tokens(t), theirs.convert_ids_to_tokens(d)) for t, d in pairs}
    common = ours.get_vocab().keys() & theirs.get_vocab().keys()
    assert names == {(name, name) for name in common} | {("<|im_end|>", "</s>")}  # what ends a text, by its role
    assert 256 < len(common) < len(ours) - 10
    assert [t for t, _ in pairs] == sorted({t for t, _ in pairs}) and len({d for _, d in pairs}) == len(pairs)


@pytest.mark.parametrize("theirs", [draft_tokenizer(), metaspace(OTHER_TEXTS)], ids=["byte-level", "metaspace"])
def test_a_token_is_read_as_draft_tokens_of_the_same_text(theirs: Any) -> None:
    """Its own bytes, no more: no space and no beginning of a text in front; half a character too."""
    ours = target_tokenizer()
    found = compare(ours, theirs)
    assert found.token_map is not None
    assert found.token_map.begin == (() if theirs.bos_token_id is None else (theirs.bos_token_id,))
    spelled, draft = token_bytes(ours), token_bytes(theirs)
    several = 0
    for i, reading in enumerate(found.token_map.readings):
        if i == ours.eos_token_id:
            assert reading == (theirs.eos_token_id,)
            continue
        assert b"".join(draft[piece].bytes for piece in reading) == spelled[i].bytes
        several += len(reading) > 1
        if len(reading) > 1 and theirs.bos_token_id is not None:  # as the draft's tokenizer itself cuts such a text
            text = ours.convert_tokens_to_string([ours.convert_ids_to_tokens(i)])
            assert reading == tuple(theirs(text, add_special_tokens=False)["input_ids"])
    assert several > 10


def test_a_text_is_cut_as_the_draft_s_tokenizer_cuts_it_where_that_spells_it() -> None:
    """Merging b and c first, BPE cuts "abc" into a, bc; the longest pieces from the left would be ab, c."""

    def bpe(texts: list[str], merges: list[tuple[str, str]]) -> Any:
        core = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, merges))
        core.decoder = tokenizers.decoders.ByteLevel()
        begins = [("<s>", texts.index("<s>"))]
        core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")

    ours = bpe(["a", "b", "c", "ab", "abc", "<s>"], [("a", "b"), ("ab", "c")])
    theirs = bpe(["<s>", "ab", "bc", "a", "b", "c"], [("b", "c"), ("a", "b")])
    found = compare(ours, theirs)
    assert found.token_map is not None
    assert found.token_map.readings == ((3,), (4,), (5,), (1,), (3, 2), (0,)) and found.token_map.begin == (0,)


def test_spaces_and_bytes_are_written_in_each_manner_and_mean_the_same() -> None:
    ours, theirs = token_bytes(target_tokenizer()), token_bytes(metaspace(TEXTS))
    assert {token.bytes for token in ours.values()} & {token.bytes for token in theirs.values()} >= {
        b" the",
        b"fox"[:1],
        b"\n",
        b"\xc3",
    }
    found = compare(target_tokenizer(), metaspace(TEXTS))
    assert found.share > 0.9


# ---- drafting across two tokenizers -------------------------------------------------------------------------------


@pytest.fixture
def pair(toy: SimpleNamespace, tmp_path: Path) -> tuple[Target, DraftLM]:
    """A target, and a draft model with another tokenizer, loaded from a folder as a user would."""
    theirs = draft_tokenizer()
    toy.make_model("llama", num_hidden_layers=1, vocab_size=len(theirs) + 3, seed=4).save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    target = with_tokenizer(toy, target_tokenizer())
    drafter = load_draft_lm(tmp_path, target)
    assert drafter.lm.dtype == target.dtype
    return target, drafter


def prompts_of(target: Target) -> list[list[int]]:
    texts = ["the quick brown fox", "hello", "the lazy dog, how are you today?", "über", "jumps over there"]
    return [target.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[misc]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "plan", [chain(3), Fixed((-1, -1, 0, 0, 1)), Dynamic(6, 3, 3)], ids=["chain", "tree", "dynamic"]
)
def test_tokens_are_those_of_plain_decoding(pair: tuple[Target, DraftLM], plan: Any, sampler: Sampler) -> None:
    """Ragged prompts, and an answer that has tokens the draft can neither propose nor read as one."""
    target, drafter = pair
    prompts = prompts_of(target)
    plain = run(target, prompts, sampler)
    outputs = run(target, prompts, sampler, drafter=drafter, plan=plan)
    assert [output.ids for output in outputs] == [output.ids for output in plain]
    shared = set(drafter.token_ids_W.tolist())  # type: ignore[union-attr]
    assert any(token not in shared for output in plain for token in output.ids)
    alone = run(target, prompts[:1], sampler, drafter=drafter, plan=plan)
    assert alone[0].ids == plain[0].ids and alone[0].rounds == outputs[0].rounds


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7)], ids=["greedy", "sampled"])
def test_what_is_read_is_the_text_with_one_beginning(pair: tuple[Target, DraftLM], sampler: Sampler) -> None:
    """The draft's cache after every round: a pass over <s> and the committed text in draft tokens."""
    target, drafter = pair
    audits = []
    theirs = draft_tokenizer()
    spelled, draft = token_bytes(target.tokenizer), token_bytes(theirs)  # type: ignore[arg-type]

    class Audited(DraftLM):
        def init(self, batch: int, capacity: int) -> State:
            self.texts: list[list[int]] = [[] for _ in range(batch)]
            return super().init(batch, capacity)

        def observe(self, state: State, ids_BC: Tensor, features: Tensor, next_B: Tensor, counts: list[int]) -> State:
            state = super().observe(state, ids_BC, features, next_B, counts)
            for row, count in enumerate(counts):
                self.texts[row] = [*self.texts[row][:-1], *ids_BC[row, :count].tolist(), int(next_B[row])]
                read = [theirs.bos_token_id]
                for token in self.texts[row]:
                    read += self._map.readings[token] if token < len(self._map.readings) else (0,)  # type: ignore[union-attr]
                cache = self.lm.new_cache(1, len(read))
                out = self.lm.forward(torch.tensor([read]), cache)
                cache.commit([len(read)])
                assert state.cache.lengths[row] == len(read) > len(self.texts[row])
                kept, fresh = state.cache.contents(0, row), cache.contents(0, 0)
                torch.testing.assert_close(kept, fresh, atol=1e-9, rtol=0)
                wanted = out.logits[0, -1, self._draft_ids_W]
                torch.testing.assert_close(state.logits_BW[row], wanted, atol=1e-9, rtol=0)
                known = [token for token in self.texts[row] if token in spelled and token != target.eos_ids[-1]]
                if len(known) == len(self.texts[row]):
                    text = b"".join(spelled[token].bytes for token in known)
                    assert b"".join(draft[token].bytes for token in read[1:]) == text
                audits.append(row)
            return state

    audited = Audited(drafter.lm, drafter._map)
    run(target, [prompts_of(target)[0]], sampler, drafter=audited, plan=chain(3))
    assert len(audits) > 5


def test_a_text_longer_than_the_draft_has_room_for_goes_on(toy: SimpleNamespace) -> None:
    """A draft that reads every token as many: it stops reading, and the tokens stay the same."""
    ours = byte_level(["abcdefghijklmnopqrstuvwxyz" * 3] * 5, ["<pad>"], size=300)
    letters = byte_level(["a"], ["</s>"], size=257)
    target = with_tokenizer(toy, ours)
    found = compare(ours, letters)
    assert found.token_map is not None and max(map(len, found.token_map.readings)) > 8
    drafter = DraftLM(with_tokenizer(toy, letters, seed=3), found.token_map)
    longest = max(range(len(ours)), key=lambda i: len(found.token_map.readings[i]))  # type: ignore[union-attr]
    prompts = [[longest] * 9, [5], [longest, 7]]
    for sampler, plan in itertools.product((Sampler(), Sampler(2.0)), (chain(3), Dynamic(6, 3, 3))):
        plain = run(target, prompts, sampler)
        outputs = run(target, prompts, sampler, drafter=drafter, plan=plan)
        assert [output.ids for output in outputs] == [output.ids for output in plain]


def test_sampled_drafts_across_tokenizers_keep_the_target_s_law(
    toy: SimpleNamespace, tools: SimpleNamespace, tmp_path: Path
) -> None:
    """The rule `ratio` on drafts from the shared tokens: the joint law of three tokens in 4,000 samples, rare ones pooled, against
    the target's own. Chance of a false alarm 1 in 1,000 (the seeds are fixed)."""
    ours, theirs = target_tokenizer(), draft_tokenizer()
    target = with_tokenizer(toy, ours, initializer_range=0.15)
    lm = with_tokenizer(toy, theirs, initializer_range=0.15, seed=6)
    drafter = DraftLM(lm, compare(ours, theirs, draft_size=lm.shape.vocab_size).token_map)
    prompt, sampler, count = ours("the fox")["input_ids"], Sampler(0.7, top_k=6), 4000
    outputs = generate(
        target,
        [prompt] * count,
        max_new=4,
        sampler=sampler,
        speculation=Speculation(drafter, chain(2), "ratio"),
        seeds=range(count),
        stop_at_eos=False,
        max_batch=500,
    )

    def law(ids: list[int]) -> Tensor:
        return sampler.log_probs(tools.prefill(target, ids)[1].logits[0, -1]).exp()

    expected: dict[tuple[int, int, int], float] = {}
    first_V = law(prompt)
    for a in first_V.nonzero()[:, 0].tolist():
        second_V = law([*prompt, a])
        for b in second_V.nonzero()[:, 0].tolist():
            third_V = law([*prompt, a, b])
            for c in third_V.nonzero()[:, 0].tolist():
                expected[a, b, c] = float(first_V[a] * second_V[b] * third_V[c])
    cells = {key: i for i, key in enumerate(expected)}
    counts = torch.zeros(len(cells))
    for output in outputs:
        counts[cells[tuple(output.ids[:3])]] += 1  # type: ignore[index]
    assert tools.chi_square_p_value(counts, torch.tensor(list(expected.values()))) > 1e-3
    shared = set(drafter.token_ids_W.tolist())  # type: ignore[union-attr]
    assert {key[1] in shared for key in cells} == {True, False}
    assert sum(r.accepted for output in outputs for r in output.rounds) > 0
