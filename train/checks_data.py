"""The doctor's look at the data: rows, masks, the chat template, and whose answers these are.

Letters: T positions, V vocabulary.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from draftsmith.configs import locate
from draftsmith.inference.evaluate import spread
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import prompt_ids
from draftsmith.train.checks import Finding, Row, Subject, judge
from draftsmith.train.data import Sequence
from draftsmith.train.rows import parse_source

EMPTY_THINK = re.compile(r"\s*<think>\s*</think>")
MARGIN, OWN_SHARE = 1.0, 0.97
"""Greedy answers: logits by which a token may lie below the target's first choice, and the share of tokens that must not lie lower;
half-precision logits differ between batch shapes, and answers of another model reach about half of that share."""
EXCESS = 0.25
"""Sampled answers: nats per token by which they may surprise the target more than its own samples would."""


def rows_usable(subject: Subject) -> Finding:
    """Rows that cannot be read or rendered, by their first message."""
    rows, refused = subject.rendered
    read, allowed = subject.gathered, subject.config.data.max_bad_share
    bad = [*read.unread, *read.rejected, *refused]
    total = len(read.conversations) + len(read.rejected)
    usable = [row for row in rows if any(row.cut.loss_mask[2:])]
    figures = {"rows": len(rows), "usable": len(usable), "refused": len(refused)}
    figures |= {"rejected": len(read.rejected), "unread_files": len(read.unread)}
    found = f"{len(usable):,} of {len(rows):,} rows train something"
    if bad:
        found += f"; {len(bad)} cannot be used, the first: {bad[0]}"
    return judge(
        found,
        "repair or remove these rows, draftsmith data writes usable ones"
        if bad
        else "nothing is supervised in some rows, at least within data.max_length",
        fail=not usable
        or bool(read.unread)
        or len(read.rejected) > allowed * total
        or len(refused) > allowed * (len(rows) + len(refused)),
        warn=bool(bad) or len(usable) < len(rows),
        figures=figures,
    )


def mask_coverage(subject: Subject) -> Finding:
    """Share of supervised tokens: neither none nor all (but all of raw text)."""
    rows = [row.cut for row in subject.rendered[0] if row.conversation.text is None]
    if not rows and subject.rendered[0]:
        return judge("raw text, supervised as a whole")
    supervised, total = sum(row.num_answer_tokens for row in rows), sum(len(row.ids) for row in rows)
    share = supervised / max(1, total)
    whole = sum(all(row.loss_mask) for row in rows)
    return judge(
        f"{share:.1%} of {total:,} tokens are supervised; {whole} rows are supervised from the first token on",
        "the mask must leave out the prompt and hold the answers: check the roles of the turns, or the masks of tokenised rows",
        fail=not 0.005 <= share <= 0.98 or whole > 0.01 * len(rows),
        warn=not 0.02 <= share <= 0.95,
        figures={"supervised": supervised, "tokens": total, "share": share, "wholly_supervised": whole},
    )


def answer_ends(subject: Subject) -> Finding:
    """Each answer's last supervised token is its end of turn, and its first is none that the generation prompt forces."""
    ends = set(subject.target.eos_ids)
    total = good = shifted = forced = 0
    for row in subject.rows:
        ids = row.full.ids
        for begin, end in runs(row.full):
            forced += bool(EMPTY_THINK.match(subject.tokenizer.decode(ids[begin : begin + 32])))
            ended = ids[end - 1] in ends
            beside = not ended and (ids[end - 2] in ends or (end < len(ids) and ids[end] in ends))
            total += ended or beside or end < len(ids) or not row.conversation.truncated
            good, shifted = good + ended, shifted + beside
    return judge(
        f"{good:,} of {total:,} answers end with the end of turn, {shifted:,} have it one token beside the mask's edge; "
        f"{forced:,} begin with an empty think block",
        "a think block that the generation prompt writes is no part of the answer"
        if forced
        else "shift the mask of tokenised rows by one, so that it covers the answer and its end of turn"
        if shifted
        else "nothing ends these answers: give the target's generation_config.json its end of turn as eos_token_id, if it has one",
        fail=shifted > 0.01 * total or forced > 0.01 * max(1, total),
        warn=shifted > 0 or forced > 0 or good < 0.9 * total,
        figures={"answers": total, "ended": good, "shifted": shifted, "empty_think": forced},
    )


def supervised_text(subject: Subject) -> Finding:
    """What is supervised, decoded, is what the assistant turns say; with one row to look at."""
    different = []
    rows = [row for row in subject.rows if row.conversation.messages]
    for row in rows:
        spans = runs(row.full)
        text = _plain(subject.tokenizer.decode(row.full.ids[spans[-1][0] : spans[-1][1]], skip_special_tokens=True))
        answers = [_plain(str(m["content"])) for m in row.conversation.messages if m["role"] == "assistant"]
        if not any(text.endswith(answer) for answer in answers):
            different.append(f"{row.conversation.id}: {text[:40]!r} is not {answers[-1][:40]!r}")
    sample = subject.rows[len(subject.rows) // 2]
    found = f"{len(rows) - len(different):,} of {len(rows):,} rows supervise their last answer word by word"
    return judge(
        found + (f"; the first that does not: {different[0]}" if different else ""),
        "the template changes the answers' text; store answers as the target writes them (draftsmith data does)",
        fail=len(different) > 0.05 * len(rows),
        warn=bool(different),
        figures={"rows": len(rows), "different": len(different), "sample": _coloured(subject.tokenizer, sample.cut)},
    )


def one_bos(subject: Subject) -> Finding:
    """At most one BOS at the start, and one where the target expects it."""
    tokenizer = subject.tokenizer
    bos = tokenizer.bos_token_id
    doubled = sum(bos is not None and row.full.ids[:2] == [bos, bos] for row in subject.rows)
    begins = sum(bos is not None and row.full.ids[:1] == [bos] for row in subject.rows)
    expected = bos is not None and list(tokenizer("a")["input_ids"][:1]) == [bos]
    name = repr(tokenizer.bos_token) if bos is not None else "none"
    return judge(
        f"BOS is {name}; {begins:,} of {len(subject.rows):,} rows begin with it, {doubled:,} twice",
        "write the BOS once: the template or the data has it, so the tokenizer must not add another"
        if doubled
        else "the tokenizer begins plain text with a BOS and the template does not; make sure that the server does the same",
        fail=doubled > 0,
        warn=expected and begins < len(subject.rows),
        figures={"begin": begins, "doubled": doubled, "tokenizer_adds_it": expected},
    )


def prefix_stability(subject: Subject) -> Finding:
    """What precedes a supervised answer is the prompt that the target sees when it gives it; earlier answers stay as they were."""
    by_conversation: dict[str, list[Row]] = {}
    for row in subject.rows:
        by_conversation.setdefault(f"{row.source}/{row.conversation.id}", []).append(row)
    other_prompt = several = answers = lost = expanded = 0
    for rows in by_conversation.values():
        messages = rows[0].conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [prompt_ids(subject.tokenizer, messages[:i], rows[0].conversation.tools) for i in turns]
        for row in rows if turns else ():
            begin = runs(row.full)[-1][0]
            other_prompt += not any(p == row.full.ids[: len(p)] for p in prompts if len(p) <= begin)
        if len(turns) > 1:
            several, answers, expanded = several + 1, answers + len(turns), expanded + (len(rows) > 1)
            lost += max(0, len(turns) - len(runs(rows[-1].full)))
    return judge(
        f"{other_prompt} rows begin otherwise than their prompt; {several:,} conversations with several answers: {lost:,} of "
        f"{answers:,} answers are shown otherwise later on, {expanded:,} conversations became several rows",
        "the template must show an answer behind its own generation prompt"
        if other_prompt
        else "the template rewrites earlier answers (drops their reasoning, for example): these train in rows of their own or not "
        "at all, which is right; if many are lost give conversations of one answer each",
        fail=other_prompt > 0,
        warn=lost > 0,
        figures={
            "other_prompt": other_prompt,
            "several": several,
            "answers": answers,
            "lost": lost,
            "expanded": expanded,
        },
    )


def serving_template(subject: Subject) -> Finding:
    """The template of training and the one that serves give the same text."""
    tokenizer = subject.tokenizer
    ours = tokenizer.chat_template
    if not ours:
        return judge(
            "the tokenizer has no chat template; rows are rendered as User: ... Assistant: ...",
            "serve with prompts of the same form, or give the target's folder a chat_template.jinja",
            warn=True,
        )
    name, theirs = "the one given", subject.serving_template
    if theirs is None:
        name, theirs = "the folder's tokenizer_config.json", _other_template(subject.target.name)
    hashes = {"training": _hash(str(ours)), "serving": _hash(theirs) if theirs else _hash(str(ours))}
    if theirs is None:
        return judge(
            f"the target's own ({hashes['training']}); nothing else to compare with (--serving-template FILE)",
            figures=hashes,
        )
    conversations = [subject.rows[i].conversation for i in spread(len(subject.rows), 50)]
    for conversation in (c for c in conversations if c.messages):
        texts = [_text(tokenizer, conversation, template) for template in (str(ours), theirs)]
        if texts[0] != texts[1]:
            at = next(i for i in range(len(texts[0]) + 1) if texts[0][: i + 1] != texts[1][: i + 1])
            return judge(
                f"{name} gives other text: conversation {conversation.id} has {texts[0][at:][:40]!r} in training and "
                f"{texts[1][at:][:40]!r} there",
                "train with the template that serves: put it in the target's folder as chat_template.jinja and make the data again",
                fail=True,
                figures=hashes,
            )
    return judge(f"{name} gives the same text for {len(conversations)} conversations", figures=hashes)


def truncation(subject: Subject) -> Finding:
    """What `data.max_length` cuts off."""
    rows, longest = subject.rendered[0], subject.config.data.max_length
    cut = sum(len(row.full.ids) > longest for row in rows)
    before = sum(row.full.num_answer_tokens for row in rows)
    lost = 1 - sum(row.cut.num_answer_tokens for row in rows) / max(1, before)
    most = max((len(row.full.ids) for row in rows), default=0)
    return judge(
        f"max_length {longest} cuts {cut:,} of {len(rows):,} rows and {lost:.1%} of the answer tokens; the longest has {most:,}",
        f"raise data.max_length (the longest row has {most} tokens), or leave long conversations out",
        fail=lost > 0.5,
        warn=lost > 0.1 or cut > 0.2 * len(rows),
        figures={"cut_rows": cut, "rows": len(rows), "lost_share": lost, "longest": most},
    )


def duplicates(subject: Subject) -> Finding:
    """Prompts that stand in the training data twice, or in the held-out prompts too."""
    training = [_prompt_hash(conversation) for _, conversation in subject.gathered.conversations]
    held_out = [_prompt_hash(conversation) for conversation in subject.prompts]
    known = set(training)
    shared, repeated = sum(prompt in known for prompt in held_out), len(training) - len(known)
    return judge(
        f"{shared} of {len(held_out)} held-out prompts are in the training data; {repeated:,} of {len(training):,} training "
        "prompts are repeated",
        "hold out other prompts: acceptance on what was trained is no measurement"
        if shared
        else "remove repeated conversations, unless they are several samples of one prompt",
        fail=shared > 0.05 * len(held_out),
        warn=shared > 0 or repeated > 0.05 * len(training),
        figures={"held_out": len(held_out), "shared": shared, "training": len(training), "repeated": repeated},
    )


def answers_of_the_target(subject: Subject) -> Finding:
    """Whether the target would have written these answers: its own greedy text is nearly always its first choice, its own samples
    surprise it as much as its law says. The file of settings beside the data names the temperature."""
    target = subject.target
    metas = {source: _meta(source) for source in subject.config.data.train}
    for source, meta in metas.items():
        if meta.get("fingerprint", target.shape.fingerprint) != target.shape.fingerprint:
            return judge(
                f"{source} was made with another target ({meta.get('target')}, weights {meta['fingerprint']}; this one's are "
                f"{target.shape.fingerprint})",
                "make the answers again with this target: draftsmith data",
                fail=True,
                figures={"source": source, "fingerprint": meta["fingerprint"]},
            )
    firsts, excesses, greedy_known = [], [], []
    for row in subject.few:
        temperature = _temperature(metas[row.source])
        first_n, excess_n = _surprise(target, row.cut, temperature or 1.0)
        firsts.append(first_n)
        excesses.append(excess_n)
        greedy_known.append(temperature == 0)
    share, excess = float(torch.cat(firsts).float().mean()), float(torch.cat(excesses).mean())
    greedy = share >= OWN_SHARE
    fail = not greedy and (all(greedy_known) or excess > EXCESS)
    return judge(
        f"{share:.1%} of {sum(map(len, firsts)):,} answer tokens are the target's first choice within {MARGIN:g} logits; they "
        f"surprise it by {excess:+.2f} nats a token more than its own samples would"
        + (" (greedy, says the file beside them)" if all(greedy_known) else ""),
        "these answers look like another model's; make them with this target: draftsmith data",
        fail=fail,
        warn=not greedy and excess > EXCESS / 2,
        figures={"first_choice_share": share, "excess_nats": excess, "rows": len(firsts)},
    )


# ---- helpers --------------------------------------------------------------------------------------------------------


def runs(sequence: Sequence) -> list[tuple[int, int]]:
    """Begin and end of each stretch of supervised tokens."""
    mask = [False, *sequence.loss_mask, False]
    edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@torch.no_grad()
def _surprise(target: Any, sequence: Sequence, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each supervised token: whether it is the first choice within the margin, and -log p minus the entropy of p."""
    last_TD = target.hidden(torch.tensor([sequence.ids], device=target.device))[1][0, :-1]
    taught_T = torch.tensor(sequence.loss_mask[1:], device=target.device)
    ids_n1 = torch.tensor(sequence.ids[1:], device=target.device)[taught_T, None]
    logits_nV = target.unembed(last_TD[taught_T]).float()
    chosen_n = logits_nV.gather(1, ids_n1)[:, 0]
    log_law_nV = (logits_nV / temperature).log_softmax(1)
    entropy_n = -(log_law_nV.exp() * log_law_nV).sum(1)
    return logits_nV.amax(1) - chosen_n <= MARGIN, -log_law_nV.gather(1, ids_n1)[:, 0] - entropy_n


def _coloured(tokenizer: Any, sequence: Sequence) -> list[tuple[str, bool]]:
    """The row's text in stretches, and whether each is supervised."""
    edges = [0, *(edge for run in runs(sequence) for edge in run), len(sequence.ids)]
    spans = zip(edges, edges[1:], strict=False)
    return [(tokenizer.decode(sequence.ids[a:b]), sequence.loss_mask[a]) for a, b in spans if a < b]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _text(tokenizer: Any, conversation: Conversation, template: str) -> str:
    """The rendered turns; a template that refuses them gives its refusal."""
    try:
        tools = list(conversation.tools) or None
        return str(
            tokenizer.apply_chat_template(list(conversation.messages), tools, chat_template=template, tokenize=False)
        )
    except TemplateError as error:
        return f"refused: {error}"


def _other_template(path: str) -> str | None:
    """The template in a folder's tokenizer_config.json; a chat_template.jinja beside it overrides it, but not in every server."""
    file = Path(path) / "tokenizer_config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    return found if isinstance(found, str) else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _prompt_hash(conversation: Conversation) -> str:
    """Names a conversation by its turns before the last answer, whitespace and case aside."""
    messages = conversation.messages
    turns = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return _hash(
        json.dumps(
            [[m["role"], _plain(str(m["content"])).lower()] for m in turns]
            or repr((conversation.given, conversation.text))
        )
    )


def _meta(source: str) -> dict[str, Any]:
    """What `draftsmith data` wrote beside the answers about their making; empty if there is nothing."""
    file = locate(f"{parse_source(source).path}.meta.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _temperature(meta: dict[str, Any]) -> float | None:
    """Of all these answers; None if that is not known, or differs from row to row."""
    settings = meta.get("settings", {})
    return None if settings.get("temperatures") else settings.get("sampler", {}).get("temperature")
