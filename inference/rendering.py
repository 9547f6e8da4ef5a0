"""A conversation as the target sees it: token ids, and an exact mask of those that the target itself would have written.

Which text the target wrote is found by rendering prefixes with its own chat template (`answers`). Generation tags of the template
have to say the same; where they do not (they mark too much, too little or nothing), the prefixes win, because they are what the
target sees when it is served. `Rendered.method` tells which it was. The ids before a supervised answer are `prompt_ids` of the
turns before it, exactly (`rows`). This module does not regenerate answers, truncate or pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.inference.answers import find_answers, refuse_hidden
from draftsmith.inference.records import Conversation, Message, check_order, prompt_messages
from draftsmith.inference.rows import Row, encode_rows
from draftsmith.inference.templates import Chat, Specials, special_tokens
from draftsmith.inference.turns import BadRecord

Reasoning = Literal["rows", "last"]
Method = Literal["tags", "prefixes", "plain", "text", "given"]

BATCH = 64
"""Conversations whose texts go to the tokenizer in one call."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One row for training: token ids and a mask of the same length.

    Attributes:
        ids: what the target reads and writes.
        loss_mask: True exactly where the target itself would have generated the token.
        method: how the mask was found: the template's generation tags and the prefixes agree ("tags"), the prefixes alone
            ("prefixes"), prefixes of the plain format for want of a template ("plain"), all of raw text ("text"), or the record
            brought it ("given").
    """

    ids: list[int]
    loss_mask: list[bool]
    method: Method


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    reasoning: Reasoning = "rows",
    where: str | None = None,
) -> list[Rendered]:
    """The conversation up to its last answer, as the target sees it; every answer supervised with its end of turn.

    A template that shows earlier answers otherwise than when they were given (it drops reasoning from earlier turns, say) gets a
    row for each such answer, with the context as it was then; answers that stay as they were share a row. Not supervised: turns
    that say `supervised: False` (without another answer there is no row); an empty `<think></think>` that the template puts in by
    itself; whitespace after an answer that the template ends with no special token; of a truncated conversation the last end of
    turn, which the target did not write (the row ends before it).

    Args:
        tokenizer: the target's.
        conversation: turns; or ids and mask, which are taken as they are; or raw text, tokenised without a template and supervised
            but for special tokens.
        reasoning: "rows", or "last" for the row of the last supervised answer alone: n answers with reasoning are up to n rows,
            and these n²/2 answers long together.
        where: how errors call the conversation; None means by its id.

    Raises:
        BadRecord: no assistant turn; a turn order that `read_conversations` or the template refuses; a last answer that the
            template shows without its own generation prompt; tools, tool calls or reasoning to be learned that the template does
            not show.
    """
    (rendered,) = _render(tokenizer, special_tokens(tokenizer), [conversation], reasoning, where)
    if isinstance(rendered, BadRecord):
        raise rendered
    return rendered


def render_all(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Conversation], *, reasoning: Reasoning = "rows"
) -> Iterator[list[Rendered] | BadRecord]:
    """`render` of each conversation, faster; its BadRecord in the place of what cannot be rendered."""
    specials = special_tokens(tokenizer)
    rest = iter(conversations)
    while batch := list(itertools.islice(rest, BATCH)):
        yield from _render(tokenizer, specials, batch, reasoning, None)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """What is given to the target so that it answers: all turns (see `prompt_messages`) and the generation prompt.

    Raises:
        BadRecord: a turn order that `read_conversations` or the template refuses; tools or tool calls that it does not show.
    """
    if len(prompt_messages(messages)) < len(messages):
        raise ValueError("the prompt ends with an assistant turn; allowed: a user or tool turn, see prompt_messages")
    check_order(messages, "prompt")
    chat = Chat(tokenizer, special_tokens(tokenizer), tools, "prompt")
    row = Row(chat.text(messages, generation_prompt=True))
    refuse_hidden(chat, messages[-1], row.text, 0, reasoning=False)
    for answer in find_answers(chat, messages, strict=False):
        row.add(answer, supervised=False)
    return next(encode_rows(tokenizer, chat.specials, [row]))[0]


def _given(
    tokenizer: PreTrainedTokenizerBase, given: tuple[tuple[int, ...], tuple[bool, ...]], where: str
) -> list[Rendered] | BadRecord:
    ids, mask = given
    if max(ids) < len(tokenizer):
        return [Rendered([*ids], [*mask], "given")]
    message = (
        f"{where}: token id {max(ids)}, but the target's tokenizer has {len(tokenizer)}; give ids of that tokenizer"
    )
    return BadRecord(message, "ids of another tokenizer")


class _Plan(NamedTuple):
    """What a conversation becomes, before it is tokenised."""

    rows: list[Row]
    method: Method


def _render(
    tokenizer: PreTrainedTokenizerBase,
    specials: Specials,
    conversations: Sequence[Conversation],
    reasoning: Reasoning,
    where: str | None,
) -> list[list[Rendered] | BadRecord]:
    plans: list[_Plan | BadRecord] = []
    for conversation in conversations:
        chat = Chat(tokenizer, specials, conversation.tools, where or f"conversation {conversation.id}")
        try:
            has_turns = conversation.given is None and conversation.text is None
            plans.append(_plan(chat, conversation, reasoning) if has_turns else _Plan([], "given"))
        except BadRecord as error:
            plans.append(error)
    encoded = encode_rows(tokenizer, specials, [row for plan in plans if isinstance(plan, _Plan) for row in plan.rows])
    rendered: list[list[Rendered] | BadRecord] = []
    for conversation, plan in zip(conversations, plans, strict=True):
        if isinstance(plan, BadRecord):
            rendered.append(plan)
        elif conversation.given is not None:
            rendered.append(_given(tokenizer, conversation.given, where or f"conversation {conversation.id}"))
        elif conversation.text is not None:
            encoding = tokenizer(conversation.text, return_special_tokens_mask=True, verbose=False)
            mask = [not special for special in encoding["special_tokens_mask"]]
            rendered.append([Rendered(encoding["input_ids"], mask, "text")])
        else:
            rendered.append([Rendered(*next(encoded), plan.method) for _ in plan.rows])
    return rendered


def _plan(chat: Chat, conversation: Conversation, reasoning: Reasoning) -> _Plan:
    """The rows in the order of the answers that they end with; each answer is supervised in one of them.

    A row shows every answer that its text begins with. So going back from the last answer, a new row is due exactly where no row so
    far begins with an answer, and there are no more rows than need be.
    """
    messages = conversation.messages
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        message = f"{chat.where}: no assistant turn, so nothing to learn; allowed: at least one"
        raise BadRecord(message, "no answer")
    check_order(messages, chat.where)
    rows: list[Row] = []
    tagged = True
    for number, answer in enumerate(find_answers(chat, messages[: last + 1], strict=True)):
        tagged = tagged and answer.tagged
        if number == 0 and conversation.truncated and answer.end_of_turn:
            stop = answer.stop - len(answer.end_of_turn)
            answer = answer._replace(text=answer.text[:stop], stop=stop)
        shown = False
        for row in rows:
            shown = row.add(answer, supervised=answer.learned and not shown) or shown
        if answer.learned and not shown and (not rows or reasoning == "rows"):
            rows.append(Row(answer.text))
            rows[-1].add(answer, supervised=True)
    return _Plan(rows[::-1], "plain" if chat.template is None else "tags" if tagged else "prefixes")
