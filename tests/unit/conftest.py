"""Drafters whose behaviour is known beforehand, small tools to look into caches and laws, and a run without faults."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from draftsmith.drafters import tree
from draftsmith.drafters.base import Drafter, Pick, Proposal, TargetHead
from draftsmith.drafters.grow import Frontier, grow
from draftsmith.drafters.tree import Fixed, Plan
from draftsmith.inference.cache import KVCache
from draftsmith.inference.target import Target


@dataclasses.dataclass
class Place:
    """State of the stubs: which original batch rows are left, how many tokens each has read, and its newest token."""

    rows: list[int]
    lengths: list[int]
    root_B: Tensor


class Stub(Drafter):
    """Bookkeeping that the stubs share; it holds no weights and asks for no features."""

    def bind(self, target: TargetHead) -> None:
        self.vocab_size = target.shape.vocab_size

    def init(self, batch: int, capacity: int) -> Place:
        return Place(list(range(batch)), [0] * batch, torch.zeros(batch, dtype=torch.int64))

    def observe(self, state: Place, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Place:
        return Place(state.rows, [a + b for a, b in zip(state.lengths, counts, strict=True)], next_B)

    def replace(self, state: Place, rows_B: Tensor, other: Place) -> Place:
        rows, lengths = list(state.rows), list(state.lengths)
        for index, row in enumerate(rows_B.tolist()):
            rows[row], lengths[row] = other.rows[index], other.lengths[index]
        return Place(rows, lengths, state.root_B.index_copy(0, rows_B, other.root_B))

    def select(self, state: Place, rows_B: Tensor) -> Place:
        rows = rows_B.tolist()
        return Place([state.rows[i] for i in rows], [state.lengths[i] for i in rows], state.root_B[rows_B])


class Scripted(Stub):
    """Knows every row's text and drafts it as a chain or a tree, with the true token where it is told to put it.

    Args:
        texts: prompt and continuation of each row.
        place: (row, position, number of siblings) -> which sibling carries the true token; the number itself means none.
    """

    def __init__(self, texts: list[list[int]], place: Callable[[int, int, int], int]) -> None:
        self.texts, self.place = texts, place
        self.observed: list[tuple[int, int, Tensor]] = []  # row, first position, features from there on

    def observe(self, state: Place, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Place:
        for index, (row, length, count) in enumerate(zip(state.rows, state.lengths, counts, strict=True)):
            text = self.texts[row]
            self.observed.append((row, length, features_BCF[index, :count]))
            seen = [*ids_BC[index, :count].tolist(), int(next_B[index])]
            if count and length + count < len(text):  # what is observed is what was committed, in order
                assert seen == text[length : length + count + 1]
        return super().observe(state, ids_BC, features_BCF, next_B, counts)

    def propose(self, state: Place, plan: Plan, pick: Pick) -> Proposal:
        assert isinstance(plan, Fixed)
        parents = plan.parents
        depths = tree.depths(parents)[1:]
        tokens_BN = torch.zeros(len(state.rows), len(parents), dtype=torch.int64)
        for index, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            for node, parent in enumerate(parents):
                position = length + depths[node]
                siblings = [n for n, p in enumerate(parents) if p == parent]
                true = self.texts[row][position] if position < len(self.texts[row]) else 0
                chosen, rank = self.place(row, position, len(siblings)), siblings.index(node)
                tokens_BN[index, node] = true if chosen == rank else (true + 1 + rank) % self.vocab_size
        return Proposal(tokens_BN, tree.fixed(parents), "fixed")


class Constant(Stub):
    """Always drafts the same token."""

    grows_trees = False

    def propose(self, state: Place, plan: Plan, pick: Pick) -> Proposal:
        return Proposal(
            torch.full((len(state.rows), plan.nodes), 7), tree.fixed(tree.chain(plan.nodes).parents), "fixed"
        )


class Random(Stub):
    """Drafts anything; siblings may be equal."""

    def propose(self, state: Place, plan: Plan, pick: Pick) -> Proposal:
        assert isinstance(plan, Fixed)
        tokens_BN = torch.randint(0, self.vocab_size, (len(state.rows), plan.nodes))
        return Proposal(tokens_BN, tree.fixed(plan.parents), "fixed")


class Table(Stub):
    """A bigram draft model: logits_VW[last token], over the target ids `token_ids_W` (None: all of them)."""

    def __init__(self, logits_VW: Tensor, token_ids_W: Tensor | None = None) -> None:
        self.logits_VW, self.token_ids_W = logits_VW, token_ids_W

    def propose(self, state: Place, plan: Plan, pick: Pick) -> Proposal:
        def expand(frontier: Frontier) -> Tensor:
            return self.logits_VW[frontier.tokens_BM]

        return grow(plan, self.logits_VW[state.root_B], expand, pick, self.token_ids_W)


def prefill(target: Target, ids: list[int], layers: tuple[Any, ...] = ()) -> tuple[KVCache, Any]:
    """A new cache that has read `ids` in one pass, and the target's output."""
    cache = target.new_cache(1, len(ids))
    out = target.forward(torch.tensor([ids]), cache, layers)
    cache.commit([len(ids)])
    return cache, out


def chi_square_p_value(counts: Tensor, probs: Tensor, min_expected: float = 20.0) -> float:
    """Chance of counts at least this far from `probs`; cells with a small expectation are pooled into one."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    expected = probs * counts.sum()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    big = expected >= min_expected
    pooled_counts = torch.cat([counts[big], counts[~big].sum()[None]])
    pooled_expected = torch.cat([expected[big], expected[~big].sum()[None]])
    kept = pooled_expected >= min_expected
    pooled_counts, pooled_expected = pooled_counts[kept], pooled_expected[kept]
    statistic = ((pooled_counts - pooled_expected) ** 2 / pooled_expected).sum()
    degrees = torch.tensor(len(pooled_counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def atol(family: str) -> float:
    """How exact an fp64 toy of a family is: Gemma 2's eager attention takes its softmax in fp32, whatever the dtype."""
    return 1e-5 if family == "gemma2" else 1e-10


@pytest.fixture(scope="session")
def stubs() -> SimpleNamespace:
    return SimpleNamespace(Scripted=Scripted, Constant=Constant, Random=Random, Table=Table)


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    return SimpleNamespace(prefill=prefill, atol=atol, chi_square_p_value=chi_square_p_value)


ANIMALS = ["fox", "dog", "lazy dog", "brown fox", "quick fox", "cow"]


def conversation(i: int) -> dict[str, Any]:
    """The target is taught to answer these; every sixth has two turns."""
    messages = [
        {"role": "user", "content": f"hello {i}"},
        {"role": "assistant", "content": f"the {ANIMALS[i % 6]} jumps {i}"},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": f"the {ANIMALS[(i + 1) % 6]} jumps over"},
    ]
    return {"id": f"c{i}", "messages": messages[: 4 if i % 6 == 0 else 2]}


@pytest.fixture(scope="session")
def healthy(toy: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run in which nothing is wrong: a toy target that was taught its answers, the answers, an EAGLE-3 head, held-out prompts.

    `folder` holds it, `config` is its YAML, `subject(*overrides)` what the doctor looks at.
    """
    from draftsmith.inference.load_target import load
    from draftsmith.train.checks import Subject
    from draftsmith.train.config import read

    folder = tmp_path_factory.mktemp("healthy")
    records = [conversation(i) for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "held.jsonl").write_text('{"messages": [{"role": "user", "content": "hello there"}]}\n')
    tokenizer = toy.make_tokenizer()
    model = toy.make_model("llama", vocab_size=320, initializer_range=0.1)
    texts = [tokenizer.apply_chat_template(record["messages"], tokenize=False) for record in records]
    ids_BT = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    labels_BT = torch.where(ids_BT == 0, -100, ids_BT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(160):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 160)
        optimizer.zero_grad()
        model(input_ids=ids_BT, labels=labels_BT).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    config = {
        "output": str(folder / "run"),
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocab_size": 64, "steps": 2},
        "data": {"train": [str(folder / "train.jsonl")], "max_length": 128},
        "features": {"store": "disk", "folder": str(folder / "features")},
        "loop": {"batch_size": 4, "precision": "float32"},
        "eval": {"prompts": str(folder / "held.jsonl"), "depth": 2},
        "tracking": {"tracker": "none"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    target = load(folder / "target", dtype=torch.float32)

    def subject(*overrides: str, target: Target = target, **options: Any) -> Subject:
        return Subject(read(folder / "run.yaml", list(overrides)), target, **options)

    return SimpleNamespace(folder=folder, config=folder / "run.yaml", records=records, subject=subject, target=target)


@pytest.fixture
def sick(healthy: SimpleNamespace, tmp_path: Path) -> Callable[..., Any]:
    """The healthy run with other records as training data: `sick(records, *overrides)`; text is written as it is."""

    def subject(records: Any, *overrides: str, **options: Any) -> Any:
        text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "sick.jsonl").write_text(text)
        return healthy.subject(f"data.train=[{tmp_path / 'sick.jsonl'}]", *overrides, **options)

    return subject
