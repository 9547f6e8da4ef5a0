"""The fused loss against its definition with autograd in fp64, in chunks of every size, and what it may keep in memory.

Letters: n rows of the teacher, r rows of a depth, k known tokens, D width, V target vocabulary, W draft vocabulary.
"""

import dataclasses
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafters import divergences, fused, head_gradient
from draftsmith.drafters.divergences import Name
from draftsmith.drafters.fused import Teacher

ETA, TOP_K = 3.0, 4
NAMES = [*typing.get_args(Name), "top_k"]


def cap(logits: Tensor) -> Tensor:
    return 1.5 * torch.tanh(logits / 1.5)


def identity(logits: Tensor) -> Tensor:
    return logits


@dataclasses.dataclass
class Problem:
    """What `fused` is asked, and the target's law over its whole vocabulary; what is not known of it is one token more, which the
    draft lacks."""

    states: list[Tensor]
    rows: list[Tensor]
    weights: list[Tensor]
    heads: list[Tensor]
    teacher: Teacher
    kept_W: Tensor
    law_nV: Tensor

    def solve(self, name: str, factor: float = 1.0) -> tuple[Tensor, dict[str, list[Tensor]], list[Tensor]]:
        """Loss, statistics, and the gradients of `factor` times the loss."""
        diverge = choose(name)
        total, stats = fused.fused(self.states, self.rows, self.weights, self.teacher, diverge, self.heads)
        wanted = [x for x in (*self.states, *self.heads) if x.requires_grad]
        return total.detach(), stats, list(torch.autograd.grad(factor * total, wanted))

    def define(self, name: str, factor: float = 1.0) -> tuple[Tensor, dict[str, list[Tensor]], list[Tensor]]:
        """The same by the definition."""
        stats: dict[str, list[Tensor]] = {"loss": [], "overlap": [], "correct": []}
        total = torch.zeros((), dtype=torch.float64)
        for j, (state_rD, rows_r, weight_r) in enumerate(zip(self.states, self.rows, self.weights, strict=True)):
            logits_rW = state_rD @ self.heads[j % len(self.heads)].T
            if self.teacher.adjust_draft:
                logits_rW = self.teacher.adjust_logits(logits_rW)
            law_rV = self.law_nV[rows_r]
            loss_r = definition(name, law_rV, logits_rW, self.kept_W)
            total = total + (weight_r * loss_r).sum()
            draft_rW = logits_rW.softmax(1)
            stats["loss"].append(loss_r.detach())
            stats["overlap"].append(torch.minimum(draft_rW, law_rV[:, self.kept_W]).sum(1).detach())
            stats["correct"].append(draft_rW.argmax(1) == self.teacher.argmax_n[rows_r])
        wanted = [x for x in (*self.states, *self.heads) if x.requires_grad]
        return total.detach(), stats, list(torch.autograd.grad(factor * total, wanted))


def choose(name: str) -> divergences.Divergence:
    plain: Any = "kl" if name == "top_k" else name
    return divergences.choose(plain, ETA, TOP_K, 0.7 if name == "top_k" else 0.0)


def definition(name: str, law_rV: Tensor, logits_rW: Tensor, kept_W: Tensor) -> Tensor:
    """Each row's loss, from the docstring of `divergences`; α in λ of lk is a constant."""
    inside_rW, logq_rW = law_rV[:, kept_W], logits_rW.log_softmax(1)
    draft_rV = torch.zeros_like(law_rV).index_copy(1, kept_W, logq_rW.exp())
    tiny = torch.finfo(torch.float64).tiny

    def divergence(one_rV: Tensor, other_rV: Tensor) -> Tensor:
        return (one_rV * (one_rV.clamp_min(tiny).log() - other_rV.clamp_min(tiny).log())).sum(1)

    cross_r = -(inside_rW * logq_rW).sum(1)
    alpha_r = torch.minimum(law_rV, draft_rV).sum(1)
    share_r, middle_rV = torch.exp(-ETA * alpha_r.detach()), (law_rV + draft_rV) / 2
    best_rk = inside_rW.topk(TOP_K, dim=1)
    losses: dict[str, Callable[[], Tensor]] = {
        "kl": lambda: cross_r,
        "ce": lambda: cross_r,
        "reverse_kl": lambda: divergence(draft_rV, law_rV),
        "jsd": lambda: (divergence(law_rV, middle_rV) + divergence(draft_rV, middle_rV)) / 2,
        "tv": lambda: (law_rV - draft_rV).abs().sum(1) / 2,
        "nla": lambda: -alpha_r.log(),
        "lk": lambda: share_r * cross_r + (1 - share_r) * (1 - alpha_r),
        "top_k": lambda: cross_r - 0.7 * (best_rk.values * logq_rW.gather(1, best_rk.indices)).sum(1),
    }
    return losses[name]()


ROWS = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 4, 6, 7, 8], [8]]
"""Of nine rows: all, some, and one."""


def make(
    rows: list[list[int]],
    num_rows: int = 9,
    vocab: int = 23,
    width: int = 6,
    kept: list[int] | None = None,
    known: int | None = None,
    adjust: Callable[[Tensor], Tensor] = identity,
    adjust_draft: bool = False,
    num_heads: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    head_VD, last_nD = random(vocab, width), random(num_rows, width)
    logits_nV = adjust(last_nD.double() @ head_VD.double().T)
    kept_W = torch.arange(vocab) if kept is None else torch.tensor(kept)
    draft_id_V = torch.full((vocab,), -1).index_copy(0, kept_W, torch.arange(len(kept_W)))
    law_nV, few = logits_nV.softmax(1), None
    if known is not None:  # only these tokens have a probability
        best_nk = law_nV.topk(known, dim=1)
        few = draft_id_V[best_nk.indices], best_nk.values.log()
        known_nV = torch.zeros_like(law_nV).scatter(1, best_nk.indices, best_nk.values)
        law_nV = torch.cat([known_nV, 1 - known_nV.sum(1, keepdim=True)], 1)
    teacher = Teacher(
        last_nD,
        logits_nV.logsumexp(1),
        head_VD[kept_W],
        adjust,
        draft_id_V[logits_nV.argmax(1)],
        few,
        adjust_draft,
    )
    return Problem(
        states=[random(len(rows_r), width).requires_grad_() for rows_r in rows],
        rows=[torch.tensor(rows_r, dtype=torch.int64) for rows_r in rows],
        weights=[torch.rand(len(rows_r), dtype=torch.float64, generator=generator) for rows_r in rows],
        heads=[random(len(kept_W), width).requires_grad_() for _ in range(num_heads)],
        teacher=teacher,
        kept_W=kept_W,
        law_nV=law_nV,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "reduced": {"kept": [0, 3, 4, 9, 11, 17, 22]},
    "few tokens": {"known": 5},
    "few tokens, reduced": {"known": 9, "kept": list(range(0, 23, 2))},
    "soft-capped target": {"adjust": cap},
    "soft-capped draft": {"adjust": cap, "adjust_draft": True},
    "a head for each depth": {"num_heads": 3},
}


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    for name in ("loss", "overlap", "correct"):
        torch.testing.assert_close(found[1][name], expected[1][name], **tolerance)
    torch.testing.assert_close(found[2], expected[2], **tolerance)


def set_rows_per_chunk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(fused, "rows_per_chunk", lambda vocab, width: rows)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 100])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_statistics_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str, rows_per_chunk: int
) -> None:
    set_rows_per_chunk(monkeypatch, rows_per_chunk)
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 50)  # two or more blocks in a chunk of several rows
    problem = make(ROWS, **SETTINGS[setting])
    assert_same(problem.solve(name, factor=-2.5), problem.define(name, factor=-2.5))


@pytest.mark.parametrize("name", ["kl", "jsd", "tv"])
@pytest.mark.parametrize("rows_per_chunk", [1, 100])
def test_a_vocabulary_of_262144_tokens_gives_the_values_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, name: str, rows_per_chunk: int
) -> None:
    set_rows_per_chunk(monkeypatch, rows_per_chunk)
    problem = make([[0, 1, 2], [2]], num_rows=3, vocab=262_144, width=2)
    assert_same(problem.solve(name), problem.define(name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [[[], []], [[0, 2, 5], []], [[], [3]], [[4], [4]]], ids=str)
def test_depths_without_rows_and_single_rows_are_as_defined(rows: list[list[int]]) -> None:
    problem = make(rows)
    found = problem.solve("kl")
    assert_same(found, problem.define("kl"))
    assert found[2][-1].abs().sum() > 0 or not any(rows)  # with no rows the gradient is there, and 0


def test_rows_of_weight_0_count_in_the_statistics_alone() -> None:
    problem = make(ROWS)
    problem.weights[0][2:] = 0
    found = problem.solve("lk")
    assert_same(found, problem.define("lk"))
    assert not found[2][0][2:].any() and found[1]["loss"][0].all()


def test_without_gradients_the_values_are_the_same_and_nothing_is_differentiable() -> None:
    problem = make(ROWS)
    with torch.no_grad():
        total, stats = fused.fused(
            problem.states, problem.rows, problem.weights, problem.teacher, choose("kl"), problem.heads
        )
    assert not total.requires_grad
    expected = problem.solve("kl")
    assert torch.equal(total, expected[0])
    torch.testing.assert_close(stats, expected[1], rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient_and_changes_none() -> None:
    problem = make(ROWS)
    expected = problem.solve("kl")
    problem.heads[0].requires_grad_(False)
    assert_same(problem.solve("kl"), (*expected[:2], expected[2][:-1]), rtol=0, atol=0)


def test_a_second_backward_pass_is_refused_because_the_gradient_was_handed_over() -> None:
    problem = make(ROWS)
    total, _ = fused.fused(problem.states, problem.rows, problem.weights, problem.teacher, choose("kl"), problem.heads)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over before"):
        total.backward()


# ---- half precision ------------------------------------------------------------------------------------------------------


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_from_logits_in_bf16_are_right_to_half_a_percent(name: str) -> None:
    """The heads are the identity, so states are logits and no product rounds: what is left is the loss's own error. Rounding each
    element of the result to bf16 costs up to 0.4 %, 0.17 % on average."""
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab = 64, 1024
    target_nV = (torch.randn(num_rows, vocab, generator=generator) * 3).bfloat16()
    draft_nV = (target_nV.float() + torch.randn(num_rows, vocab, generator=generator)).bfloat16()

    def gradient(dtype: torch.dtype) -> Tensor:
        states_nV, normaliser_n = draft_nV.to(dtype).requires_grad_(), target_nV.double().logsumexp(1)
        argmax_n, eye_VV = target_nV.argmax(1), torch.eye(vocab, dtype=dtype)
        teacher = Teacher(target_nV.to(dtype), normaliser_n, eye_VV, identity, argmax_n, None, False)
        ones_n, rows_n = torch.ones(num_rows), torch.arange(num_rows)
        total, _ = fused.fused([states_nV], [rows_n], [ones_n], teacher, choose(name), [eye_VV])
        return torch.autograd.grad(total, states_nV)[0]

    error = relative(gradient(torch.bfloat16), gradient(torch.float64))
    assert error < 0.005, f"{error:.3%}"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["kl", "jsd"])
def test_products_in_bf16_cost_no_more_accuracy_than_they_cost_the_plain_version(name: str, autocast: bool) -> None:
    """Nearly all of the error is that of logits in bf16, the target's and the draft's, which both versions have."""
    rows = [list(range(64))]
    problem = make(rows, num_rows=64, vocab=512, width=48, dtype=torch.bfloat16)
    wide = make(rows, num_rows=64, vocab=512, width=48, dtype=torch.bfloat16)
    wide.states = [x.detach().double().requires_grad_() for x in wide.states]
    wide.heads = [x.detach().double().requires_grad_() for x in wide.heads]
    expected = wide.define(name)[2]
    target_nV = (problem.teacher.last_nD @ problem.teacher.head_WD.T).float()  # as the target itself gives them
    problem.teacher = problem.teacher._replace(log_normaliser_n=target_nV.logsumexp(1))
    if autocast:
        problem.states = [x.detach().float().requires_grad_() for x in problem.states]
        problem.heads = [x.detach().float().requires_grad_() for x in problem.heads]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = problem.solve(name)[2]
        logits_nW = (problem.states[0] @ problem.heads[0].T).float()
        loss_n = definition(name, target_nV.softmax(1), logits_nW, problem.kept_W)
    plain = torch.autograd.grad((loss_n * problem.weights[0]).sum(), [problem.states[0], problem.heads[0]])
    for ours, theirs, exact in zip(found, plain, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(ours, exact) < 1.05 * relative(theirs, exact) < 0.05


def test_a_head_s_gradient_is_added_up_in_fp32_however_many_chunks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 times the same row: in bf16 the sum would stand still where an addend is below half a rounding step of it."""
    problem = make([[0] * 256], num_rows=1, dtype=torch.bfloat16)
    problem.states = [problem.states[0].detach()[:1].expand(256, -1).clone().requires_grad_()]
    problem.rows, problem.weights = [torch.arange(256)], [torch.ones(256)]
    teacher = problem.teacher
    problem.teacher = teacher._replace(
        last_nD=teacher.last_nD.expand(256, -1),
        log_normaliser_n=teacher.log_normaliser_n.expand(256),
        argmax_n=teacher.argmax_n.expand(256),
    )
    gradients = []
    for rows_per_chunk in (1, 256):
        set_rows_per_chunk(monkeypatch, rows_per_chunk)
        gradients.append(problem.solve("kl")[2][-1].double())
    assert relative(*gradients) < 0.006


def test_a_head_s_gradient_is_the_same_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(ROWS, dtype=torch.bfloat16)
    expected = problem.solve("kl")
    monkeypatch.setattr(head_gradient, "BLOCK_BYTES", 5 * 6 * 4)  # five of 23 rows
    monkeypatch.setattr(head_gradient, "PRODUCT_ELEMENTS", 2 * 6)
    assert_same(problem.solve("kl"), expected, rtol=0.01, atol=1e-3)


# ---- memory and the device -----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The names of all operations, and the sizes of the tensors that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.sizes |= {x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)}
        return out


def watched(problem: Problem, name: str) -> Watch:
    with Watch() as watch:
        problem.solve(name)
    return watch


@pytest.mark.parametrize("setting", ["whole vocabulary", "few tokens", "soft-capped draft"])
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_but_heads_and_states_is_larger_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    num_rows, vocab, width, chunk = 300, 61, 16, 7
    rows = [list(range(num_rows)), list(range(0, num_rows, 2))]
    problem = make(rows, num_rows, vocab, width, **SETTINGS[setting], dtype=torch.float32)
    allowed = {vocab * width, num_rows * width, num_rows // 2 * width}
    set_rows_per_chunk(monkeypatch, chunk)
    sizes = watched(problem, name).sizes
    assert max(sizes - allowed) == chunk * vocab
    set_rows_per_chunk(monkeypatch, num_rows)
    assert num_rows * vocab in watched(problem, name).sizes  # it would have been seen


def test_nothing_is_asked_of_the_device() -> None:
    """But for one `nonzero` of a mask on the host."""
    names = watched(make(ROWS, kept=[0, 3, 4, 9, 11, 17, 22]), "lk").names
    assert names.count("nonzero") == 1
    assert not {"_local_scalar_dense", "masked_select", "unique_dim", "_unique2", "is_nonzero"} & set(names)


# ---- compiled ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[None]:
    torch.compiler.reset()
    fused.use_compiled(True)
    yield
    fused.use_compiled(False)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's imports
def test_the_compiled_kernel_gives_the_values_of_the_definition(compiled: None) -> None:
    problem = make([ROWS[0]], vocab=200)
    assert_same(problem.solve("lk"), problem.define("lk"))
