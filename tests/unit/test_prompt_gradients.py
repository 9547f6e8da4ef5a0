"""Property: what the target says at prompt tokens has no influence on training, for every kind, shape of record and chat template.

Positions are those of the rendered rows themselves: a position teaches if the next token is supervised. At all others the target's
states, its normaliser and its choice are replaced at random; loss and gradients must be the same to the last bit.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.target import Target
from draftsmith.train.data import Sequence, sequences_of
from draftsmith.train.features import FeatureStore

CHAT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES: dict[str, str | None] = {
    "ChatML": CHAT + ASK,
    "none": None,
    "a system turn of its own": "{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}" + CHAT + ASK,
    "an empty think block before the answer": (
        CHAT.replace(
            "m['content'] +",
            "('<think>\n\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '') + m['content'] +",
        )
        + ASK.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    ),
    "reasoning of earlier turns dropped": CHAT.replace(
        "m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +"
    )
    + ASK,
}
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick fox"}]},
    {"conversations": [{"from": "human", "value": "how are you?"}, {"from": "gpt", "value": "over the dog"}]},
    {
        "messages": [
            {"role": "system", "content": "be lazy"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "<think>a dog?</think>the fox"},
            {"role": "user", "content": "and today"},
            {"role": "assistant", "content": "the dog"},
        ]
    },
    {
        "messages": [{"role": "user", "content": "jumps"}, {"role": "assistant", "content": "the quick brown"}],
        "truncated": True,
    },
    {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "over the fox", "supervised": False},
            {"role": "user", "content": "and today"},
            {"role": "assistant", "content": "the lazy dog"},
        ]
    },
    {"instruction": "hello", "input": "fox", "output": "the quick dog"},
    {"prompt": "how are you?", "completion": "over the lazy dog"},
    {"text": "the quick brown fox jumps"},
    {"input_ids": [5, 9, 30, 14, 7, 21], "loss_mask": [0, 0, 1, 1, 0, 1]},
    {"input_ids": [5, 9, 30, 14, 7], "labels": [-100, -100, 30, 14, -100]},
]


@pytest.fixture(scope="module")
def target(toy: SimpleNamespace) -> Target:
    return Target(toy.make_model("llama", torch.float64, vocab_size=320), toy.make_tokenizer(), "toy")


@pytest.fixture(params=TEMPLATES)
def rows(request: pytest.FixtureRequest, target: Target, tmp_path: Path) -> list[Sequence]:
    """Every record under one template."""
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = TEMPLATES[request.param]
    found = [row for c in read_conversations(tmp_path / "records.jsonl") for row in sequences_of(tokenizer, c)]
    assert len(found) >= len(RECORDS) and all(any(row.loss_mask) for row in found)
    assert sum(all(row.loss_mask) for row in found) == 1  # raw text has no prompt
    return found


def other_teachers(batch: TrainingBatch, where_BT: Tensor) -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    noise_BTD = torch.randn(batch.last_BTD.shape, generator=generator, dtype=batch.last_BTD.dtype)
    return dataclasses.replace(
        batch,
        last_BTD=torch.where(where_BT[..., None], noise_BTD, batch.last_BTD),
        log_normaliser_BT=torch.where(where_BT, noise_BTD[..., 0], batch.log_normaliser_BT),
        argmax_BT=torch.where(where_BT, torch.randint(0, 320, where_BT.shape, generator=generator), batch.argmax_BT),
    )


def loss_and_gradients(drafter: TrainableDrafter, batch: TrainingBatch) -> list[Tensor]:
    drafter.zero_grad()
    loss = drafter(batch).sum
    loss.backward()
    gradients = [p.grad for p in drafter.parameters() if p.grad is not None]
    assert gradients and all(bool(gradient.any()) for gradient in gradients[:1])
    return [loss.detach(), *(gradient.clone() for gradient in gradients)]


def only_as_teacher(drafter: TrainableDrafter, seen: dict[str, TrainingBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss gets the batch `seen["batch"]`, the layers keep their own: some kinds read the last state as input too."""
    module = drafters.kind_module(type(drafter).__module__.rsplit(".", 1)[-1])
    original = module.distill
    monkeypatch.setattr(module, "distill", lambda h, w, b, *a, **k: original(h, w, seen.get("batch", b), *a, **k))


@pytest.mark.parametrize("kind", drafters.kinds())
def test_targets_of_prompt_tokens_change_neither_loss_nor_gradients_to_the_last_bit(
    kind: str, rows: list[Sequence], target: Target, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = toy.make_drafter(kind, target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    batch = one_per_row(FeatureStore(target, rows, drafter.feature_layers).batch(range(len(rows))))
    teaches_BT = torch.tensor(
        [[t >= 1 and t + 1 < len(r.ids) and r.loss_mask[t + 1] for t in range(batch.ids_BT.shape[1])] for r in rows]
    )
    plain = loss_and_gradients(drafter, batch)
    seen: dict[str, TrainingBatch] = {}
    reads_last = "last" in drafter.feature_layers and not drafter.adapts_target
    if reads_last:
        only_as_teacher(drafter, seen, monkeypatch)

    def changed(where_BT: Tensor) -> list[Tensor]:
        seen["batch"] = other_teachers(batch, where_BT)
        return loss_and_gradients(drafter, batch if reads_last else seen["batch"])

    assert all(map(torch.equal, changed(~teaches_BT), plain))

    first_BT = torch.zeros_like(teaches_BT)  # the same change where the first answer token is taught is seen
    first_BT[0, int(teaches_BT[0].nonzero()[0])] = True
    assert not torch.equal(changed(first_BT)[0], plain[0])
