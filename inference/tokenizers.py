"""Whether a draft model speaks the target's language: tokenizers compared token by token, never by size.

Equal ids that mean other strings cost no exactness, but all acceptance, silently. So a draft model comes in by `load_draft_lm`,
which finds out what the ids mean: the same; other ids for tokens of which enough are the same, then a `TokenMap` translates
(token-level intersection, Timor et al. 2025, arXiv 2502.05202); or too little in common, which is refused.

Tokens are compared as the bytes they stand for, so a byte-level "Ġthe", a SentencePiece "▁the" and " the" are one token.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.drafters.language_model import DraftLM, TokenMap
from draftsmith.inference.load_target import load
from draftsmith.inference.target import Target

LEAST_SHARE = 0.25
"""Tokens of the smaller vocabulary that the other must have too. What is below does not belong together: two tokenizers of about
the same language share far more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What two tokenizers have in common.

    Attributes:
        kind: "same" if every id that both have means the same token; else "shared subset".
        share: how much of the smaller vocabulary the other has too, 0 to 1.
        token_map: how to translate; None if they are the same.
    """

    kind: Literal["same", "shared subset"]
    share: float
    token_map: TokenMap | None


def load_draft_lm(
    path: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    translate: bool = True,
) -> DraftLM:
    """Loads a causal LM as drafter of a target.

    Args:
        path: as for `inference.load_target.load`.
        target: what it drafts for.
        dtype: None takes the target's.
        device: None takes the target's.
        translate: take a draft model with another tokenizer too, if it has enough tokens in common.

    Raises:
        ValueError: the model cannot be loaded, or its tokenizer does not match the target's.
    """
    lm = load(path, dtype=dtype or target.dtype, device=device if device is not None else target.device)
    if target.tokenizer is None or lm.tokenizer is None:
        return DraftLM(lm)
    found = compare(target.tokenizer, lm.tokenizer, target_size=target.shape.vocab_size, draft_size=lm.shape.vocab_size)
    if found.token_map is not None and not translate:
        raise ValueError(
            f"the draft model {str(path)!r} has another tokenizer than {target.name}: the same ids mean other tokens; give a "
            "draft model with the target's tokenizer, or translate=True to draft the tokens that both have"
        )
    return DraftLM(lm, found.token_map)


def compare(
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
    *,
    target_size: int | None = None,
    draft_size: int | None = None,
) -> Comparison:
    """What the tokenizers have in common, and how to translate if their ids differ.

    Args:
        target_tokenizer, draft_tokenizer: the two.
        target_size, draft_size: rows of the models' heads; ids beyond cannot be used. None means that there are none.

    Raises:
        ValueError: less than `LEAST_SHARE` of the smaller vocabulary is common.
    """
    target, draft = token_bytes(target_tokenizer, target_size), token_bytes(draft_tokenizer, draft_size)
    target_ids, draft_ids = _ids_by_bytes(target), _ids_by_bytes(draft)
    common = target_ids.keys() & draft_ids.keys()
    share = len(common) / max(1, min(len(target_ids), len(draft_ids)))
    if share < LEAST_SHARE:
        raise ValueError(
            f"the tokenizers do not match: of {len(target_ids)} tokens of the target and {len(draft_ids)} of the draft model "
            f"{len(common)} are the same, {share:.0%} of the smaller vocabulary, less than {LEAST_SHARE:.0%}; give a draft model "
            "whose tokenizer is the target's or has more in common with it"
        )
    if all(token.bytes == draft[i].bytes for i, token in target.items() if i in draft):
        return Comparison("same", share, None)

    draft_of = {target_ids[text]: draft_ids[text] for text in common}
    readings: dict[int, tuple[int, ...]] = {target_id: (draft_id,) for target_id, draft_id in draft_of.items()}
    for begin_or_end in ("bos_token_id", "eos_token_id"):  # the same in role, whatever they are called
        ours, theirs = getattr(target_tokenizer, begin_or_end), getattr(draft_tokenizer, begin_or_end)
        if ours in target and theirs in draft and ours not in draft_of:
            readings[ours] = (theirs,)
            if theirs not in draft_of.values():
                draft_of[ours] = theirs
    rest = {i: token.bytes for i, token in target.items() if i not in readings}
    readings |= _retokenise(rest, draft_tokenizer, draft, draft_ids)
    kept = sorted(draft_of)
    return Comparison(
        "shared subset",
        share,
        TokenMap(
            draft_ids_W=torch.tensor([draft_of[i] for i in kept]),
            target_ids_W=torch.tensor(kept),
            readings=tuple(readings.get(i, (0,)) for i in range(max(target) + 1)),
            begin=_begin(draft_tokenizer, draft),
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """What a token stands for; `fallback` marks SentencePiece's single bytes, which may double an ordinary token."""

    bytes: bytes
    fallback: bool = False


def token_bytes(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> dict[int, Token]:
    """What each id below `size` stands for, added tokens by their name."""
    scheme = _scheme(tokenizer)
    found: dict[int, Token] = {}
    for text, i in tokenizer.get_vocab().items():
        found[i] = _plain(text, scheme)
    for i, added in tokenizer.added_tokens_decoder.items():
        found[i] = Token(added.content.encode())
    return {i: token for i, token in found.items() if size is None or i < size}


Scheme = Literal["byte-level", "metaspace", "text"]
"""How a vocabulary writes bytes: each as a printable character (GPT-2), spaces as "▁" (SentencePiece), or as they are."""


def _scheme(tokenizer: PreTrainedTokenizerBase) -> Scheme:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return "metaspace"  # those that are still slow are SentencePiece's
    decoder = tokenizer.backend_tokenizer.decoder
    described = "" if decoder is None else decoder.__getstate__().decode()  # JSON
    if "ByteLevel" in described:
        return "byte-level"
    return "metaspace" if "▁" in described or "ByteFallback" in described else "text"


def _plain(text: str, scheme: Scheme) -> Token:
    if scheme == "byte-level" and all(character in _BYTES for character in text):
        return Token(bytes(_BYTES[character] for character in text))
    if scheme == "metaspace":
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return Token(bytes([int(text[3:5], 16)]), fallback=True)
        text = text.replace("▁", " ")
    return Token(text.encode())


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _ids_by_bytes(tokens: Mapping[int, Token]) -> dict[bytes, int]:
    """One id for each token; of several the ordinary one, then the lowest."""
    ids: dict[bytes, int] = {}
    for i, token in sorted(tokens.items(), key=lambda item: (item[1].fallback, item[0])):
        ids.setdefault(token.bytes, i)
    return ids


def _retokenise(
    rest: Mapping[int, bytes],
    draft_tokenizer: PreTrainedTokenizerBase,
    draft: Mapping[int, Token],
    draft_ids: Mapping[bytes, int],
) -> dict[int, tuple[int, ...]]:
    """Draft tokens for target tokens that the draft lacks: what its tokenizer makes of their text, if that spells the same bytes
    (some put a space in front, and half a character is no text), else the longest tokens that fit, one after the other."""
    texts = {i: text for i, spelled in rest.items() if (text := _text(spelled))}
    encoded: Sequence[Sequence[int]] = []
    if texts:
        encoded = draft_tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
    made: dict[int, tuple[int, ...]] = {}
    for i, pieces in zip(texts, encoded, strict=True):
        if b"".join(draft[piece].bytes if piece in draft else b"" for piece in pieces) == rest[i]:
            made[i] = tuple(pieces)
    longest = max(map(len, draft_ids))
    return {i: made.get(i) or _longest_fits(spelled, draft_ids, longest) for i, spelled in rest.items()}


def _text(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return ""


def _longest_fits(spelled: bytes, draft_ids: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """Bytes that no token fits are left out; (0,) if none is left."""
    pieces: list[int] = []
    start = 0
    while start < len(spelled):
        ends = range(min(len(spelled), start + longest), start, -1)
        end = next((end for end in ends if spelled[start:end] in draft_ids), None)
        if end is not None:
            pieces.append(draft_ids[spelled[start:end]])
        start = end or start + 1
    return tuple(pieces) or (0,)


def _begin(draft_tokenizer: PreTrainedTokenizerBase, draft: Mapping[int, Token]) -> tuple[int, ...]:
    """The token with which the draft tokenizer begins every text, if it does: once, not at each piece that is re-tokenised."""
    empty = draft_tokenizer("")["input_ids"]
    begins = len(empty) > 0 and empty[0] == draft_tokenizer.bos_token_id and empty[0] in draft
    return (empty[0],) if begins else ()
