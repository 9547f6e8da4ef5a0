"""Which conversations are the same one, and on which side of a split a conversation belongs.

Both are functions of what a conversation says and of nothing else: not of its id, its file, its place there or the others.
"""

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from draftsmith.inference.records import Conversation


def fingerprint(conversation: Conversation) -> bytes:
    """16 bytes, the same for conversations whose turns, tools, text or ids and mask are exactly the same."""
    content = [conversation.messages, conversation.tools, conversation.given, conversation.text]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).digest()[:16]


def is_held_out(conversation: Conversation, share: float) -> bool:
    """Whether it is in the random `share` that is kept from training.

    What decides is the first user turn, so that no prompt is on both sides: conversations that open with the same question stay
    together whatever is answered and asked after that, and whatever the system turn is. Case, white space and the way in which a
    character is composed make no difference. A larger share holds out what a smaller one does, and more.
    """
    digest = hashlib.sha256(_opening(conversation).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(conversations: Sequence[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out), each in the given order. Raises ValueError when one of the two would be empty."""
    sides: tuple[list[Conversation], list[Conversation]] = ([], [])
    for conversation in conversations:
        sides[is_held_out(conversation, share)].append(conversation)
    if not all(sides):
        held = f"{len(sides[1]):,} of {len(conversations):,} conversations"
        raise ValueError(
            f"a share of {share} holds out {held}; give another share, or more conversations that open differently"
        )
    return sides


def _opening(conversation: Conversation) -> str:
    """Of raw text all of it; of token ids those before the first that is learned, or all if that is the first."""
    if conversation.given is not None:
        ids, mask = conversation.given
        prompt = ids[: mask.index(True)] if True in mask else ids
        return json.dumps(prompt or ids)
    if conversation.text is not None:
        text = conversation.text
    else:
        asked = [message["content"] for message in conversation.messages if message["role"] == "user"]
        text = (
            asked[0] if asked else json.dumps([m["content"] for m in conversation.messages if m["role"] != "assistant"])
        )
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())
