"""A language model as drafter: any model gives the tokens of plain decoding, and a copy of the target is always right.

Letters: B sequences, C observed tokens.
"""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.grow import Frontier
from draftsmith.drafters.language_model import DraftLM, State, TokenMap
from draftsmith.drafters.tree import Dynamic, Fixed, Plan, chain, depths
from draftsmith.inference.decode import generate
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22], [30, 31, 32]]
SEEDS = [3, 141, 59, 26, 5]
WIDE = Fixed((-1, -1, 0, 0, 1, 2, 2, 5))  # the path of first children is the deepest: nodes 0, 2, 5, 7
PLANS: dict[str, Plan] = {"chain": chain(4), "one": chain(1), "tree": WIDE, "dynamic": Dynamic(9, 4, 3)}
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(0.7)}


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.ids for output in outputs]


def run(target: Any, drafter: Any, plan: Plan, sampler: Sampler, prompts: Any = PROMPTS, **options: Any) -> Any:
    speculation = None if drafter is None else Speculation(drafter, plan, **options)
    seeds = [SEEDS[i % 5] for i in range(len(prompts))]
    return generate(
        target, prompts, max_new=21, sampler=sampler, speculation=speculation, seeds=seeds, stop_at_eos=False
    )


def noised(toy: SimpleNamespace, family: str, **changes: Any) -> Any:
    """A copy of the toy target with slightly other weights."""
    lm = toy.make_target(family, **changes)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return lm


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("which", ["random", "noised", "itself", "other family"])
def test_tokens_are_those_of_plain_decoding(toy: SimpleNamespace, which: str, plan: str, temperature: str) -> None:
    """Five ragged prompts, and the prompt of one token alone."""
    target, sampler = toy.make_target("llama", num_hidden_layers=2), SAMPLERS[temperature]
    lm = {
        "random": lambda: toy.make_target("llama", num_hidden_layers=1, seed=3),
        "noised": lambda: noised(toy, "llama", num_hidden_layers=2),
        "itself": lambda: target,
        "other family": lambda: toy.make_target("gpt2", torch.float32, n_layer=1),
    }[which]()
    for rows in ([0, 1, 2, 3, 4], [0]):
        prompts = [PROMPTS[row] for row in rows]
        plain = run(target, None, PLANS[plan], sampler, prompts)
        outputs = run(target, DraftLM(lm), PLANS[plan], sampler, prompts)
        assert ids(outputs) == ids(plain)
        accepted = [r.accepted for output in outputs for r in output.rounds]
        assert which != "noised" or (sum(accepted) > 0 and len(set(accepted)) > 1)


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_the_target_as_its_own_draft_is_always_right(
    toy: SimpleNamespace, family: str, plan: str, temperature: str
) -> None:
    """Every family, sliding windows among them: masks and positions of the expanded nodes are the target's own."""
    target = toy.make_target(family, num_hidden_layers=2)
    for prompts in (PROMPTS, PROMPTS[:1]):
        outputs = run(target, DraftLM(target), PLANS[plan], SAMPLERS[temperature], prompts)
        assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)


def test_a_perfect_dynamic_tree_covers_at_least_the_deepest_chain(toy: SimpleNamespace) -> None:
    """Width 1 is a chain, but goes through the frontiers of trees; it is always right."""
    target = toy.make_target("mistral", num_hidden_layers=2)
    outputs = run(target, DraftLM(target), Dynamic(4, 4, 1), Sampler(0.7))
    assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)


@pytest.mark.parametrize("plan", ["chain", "tree", "dynamic"])
def test_expanded_nodes_get_the_logits_of_a_pass_over_their_own_path(
    toy: SimpleNamespace, family: str, plan: str, tools: SimpleNamespace
) -> None:
    lm, seen = toy.make_target(family, num_hidden_layers=2), []

    class Spy(DraftLM):
        def _draft_logits(self, logits: Tensor) -> Tensor:
            out = super()._draft_logits(logits)
            seen.append(out)
            return out

    drafter, watch = Spy(lm), toy.Watch()
    drafter.bind(lm)
    ids_BC, counts = torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]]), [4, 1]
    state = drafter.observe(drafter.init(2, 40), ids_BC, torch.zeros(2, 4, 0), torch.tensor([10, 11]), counts)
    frontiers: list[Frontier] = []
    forward = lm.forward

    def noting(*args: Any, frontier: Frontier | None = None, **options: Any) -> Any:
        if frontier is not None:
            frontiers.append(frontier)
        return forward(*args, frontier=frontier, **options)

    lm.forward = noting
    drafter.propose(state, PLANS[plan], watch)
    lm.forward = forward
    paths: list[list[list[int]]] = [[], []]
    assert len(frontiers) == PLANS[plan].depth - 1
    for frontier, logits_BMW in zip(frontiers, seen[1:], strict=True):
        for row, text in enumerate(([5, 6, 7, 8, 10], [9, 11])):
            parents = frontier.parents_bM.expand(2, -1)[row].tolist()
            new = [
                [*(paths[row][parent] if parent >= 0 else text), token]
                for parent, token in zip(parents, frontier.tokens_BM[row].tolist(), strict=True)
            ]
            for m, path in enumerate(new):
                alone = tools.prefill(lm, path)[1].logits[0, -1]
                torch.testing.assert_close(logits_BMW[row, m], alone, atol=tools.atol(family), rtol=0)
            paths[row] += new


class Audited(DraftLM):
    """Compares, after every observation, the cache and the root's logits with a pass over what was committed."""

    audits = 0

    def init(self, batch: int, capacity: int) -> State:
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        return super().init(batch, capacity)

    def observe(self, state: State, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> State:
        before = state.logits_BW
        state = super().observe(state, ids_BC, features_BCF, next_B, counts)
        for row, count in enumerate(counts):
            if not count:
                torch.testing.assert_close(state.logits_BW[row], before[row], atol=0, rtol=0)
                continue
            self.texts[row] = [*self.texts[row][:-1], *ids_BC[row, :count].tolist(), int(next_B[row])]
            cache = self.lm.new_cache(1, len(self.texts[row]))
            out = self.lm.forward(torch.tensor([self.texts[row]]), cache)
            cache.commit([len(self.texts[row])])
            torch.testing.assert_close(state.logits_BW[row], out.logits[0, -1], atol=1e-9, rtol=0)
            for layer in cache.used_layers():
                kept, fresh = state.cache.contents(layer, row), cache.contents(layer, 0)
                torch.testing.assert_close(kept, fresh, atol=1e-9, rtol=0)
            self.audits += 1
        return state

    def select(self, state: State, rows_B: Tensor) -> State:
        self.texts = [self.texts[row] for row in rows_B.tolist()]
        return super().select(state, rows_B)


@pytest.mark.parametrize("plan", ["chain", "tree", "dynamic"])
def test_the_cache_holds_what_was_committed_and_the_root(toy: SimpleNamespace, plan: str) -> None:
    """After every round and for every row, whatever the proposals left behind; rows wait (count 0) and leave."""
    target = toy.make_target("llama", num_hidden_layers=2)
    drafter = Audited(noised(toy, "llama", num_hidden_layers=2))
    outputs = generate(
        target,
        PROMPTS,
        max_new=[21, 4, 17, 9, 21],
        sampler=Sampler(0.7),
        speculation=Speculation(drafter, PLANS[plan]),
        seeds=SEEDS,
        stop_at_eos=False,
    )
    assert drafter.audits == 5 + sum(len(output.rounds) for output in outputs)
    assert len({r.accepted for output in outputs for r in output.rounds}) > 1


def test_proposing_leaves_the_state_as_it_was(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    drafter = DraftLM(target)
    drafter.bind(target)
    start = drafter.init(2, 40)
    state = drafter.observe(start, torch.tensor([[5, 6], [7, 0]]), torch.zeros(2, 2, 0), torch.tensor([8, 9]), [2, 1])
    first = drafter.propose(state, WIDE, toy.Watch())
    assert state.cache.lengths == [3, 2]
    drafter.propose(state, chain(3), toy.Watch())
    assert torch.equal(drafter.propose(state, WIDE, toy.Watch()).tokens_BN, first.tokens_BN)


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_a_proposal_costs_one_pass_less_than_it_is_deep(toy: SimpleNamespace, plan: str) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    lm = toy.make_target("llama", num_hidden_layers=2)
    widths: list[int] = []
    forward = lm.forward

    def counting(ids_BR: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(ids_BR.shape[1])
        return forward(ids_BR, *args, **options)

    lm.forward = counting
    outputs = run(target, DraftLM(lm), PLANS[plan], Sampler(), PROMPTS[:1])
    inner = {"chain": [1, 1, 1], "tree": [2, 1, 1]}[plan]
    assert widths == [5] + len(outputs[0].rounds) * [*inner, 5]
    assert max(depths(PLANS[plan].parents)) == 4  # type: ignore[union-attr]


def test_prompts_that_join_later_get_the_same_tokens(toy: SimpleNamespace) -> None:
    target = toy.make_target("llama", num_hidden_layers=2)
    drafter = DraftLM(noised(toy, "llama", num_hidden_layers=2))
    budgets = [21, 4, 17, 9, 21]
    common: dict[str, Any] = {"max_new": budgets, "sampler": Sampler(0.7), "seeds": SEEDS, "stop_at_eos": False}
    plain = generate(target, PROMPTS, **common)
    together = generate(target, PROMPTS, speculation=Speculation(drafter, WIDE), **common)
    queued = generate(target, PROMPTS, speculation=Speculation(drafter, WIDE), max_batch=2, **common)
    assert ids(queued) == ids(plain)
    assert [output.rounds for output in queued] == [output.rounds for output in together]


# ---- vocabularies and positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("plan", ["chain", "dynamic"])
@pytest.mark.parametrize("more", [-8, 0, 8])
def test_a_vocabulary_that_is_padded_differently_works(
    toy: SimpleNamespace, more: int, plan: str, temperature: str
) -> None:
    """The draft is the target with rows cut off or added; tokens that it lacks are emitted nonetheless, and its own padding,
    which it holds most likely of all, is never drafted."""
    target, sampler = toy.make_target("llama", num_hidden_layers=2), SAMPLERS[temperature]
    lm = toy.make_target("llama", num_hidden_layers=2, vocab_size=64 + more)
    with torch.no_grad():
        for name, parameter in lm.model.named_parameters():
            source = target.model.get_parameter(name)
            rows = min(len(parameter), len(source))
            parameter[:rows] = source[:rows]
            if "lm_head" in name and more > 0:
                parameter[64:] = 3 * source[:more]
    prompts = [[60, 5, 63], *PROMPTS]
    plain = run(target, None, PLANS[plan], sampler, prompts)
    outputs = run(target, DraftLM(lm), PLANS[plan], sampler, prompts)
    assert ids(outputs) == ids(plain)
    if more >= 0 and plan == "chain":
        assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)
    if more < 0:
        assert {token for output in plain for token in output.ids} & set(range(56, 64))


@pytest.mark.parametrize("rule", ["ratio", "rrsw", "block"])
def test_sampled_drafts_say_their_law_over_the_target_s_vocabulary(toy: SimpleNamespace, rule: str) -> None:
    """A draft equal to the target is always accepted by rules that compare the two laws, whatever the padding."""
    target = toy.make_target("llama", num_hidden_layers=2)
    outputs = run(target, DraftLM(target), chain(4), Sampler(0.7), rule=rule)
    assert all((r.accepted, r.committed) == (4, 5) for output in outputs for r in output.rounds)
    for more in (-8, 8):
        lm = toy.make_target("llama", num_hidden_layers=1, vocab_size=64 + more)
        assert all(len(o.ids) == 21 for o in run(target, DraftLM(lm), chain(4), Sampler(0.7), rule=rule))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("plan", ["chain", "dynamic"])
def test_a_draft_with_fewer_positions_than_the_text_gives_the_same_tokens(
    toy: SimpleNamespace, family: str, plan: str
) -> None:
    """One text starts beyond the draft's 20 positions, the others cross them; then decoding goes on plainly."""
    target = toy.make_target("llama", num_hidden_layers=2)
    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    drafter = DraftLM(toy.make_target(family, **{positions: 20}))
    assert drafter.max_positions == 20
    for prompts in (PROMPTS, [[*range(3, 43)], [5]], [[*range(3, 43)]]):
        plain = run(target, None, PLANS[plan], Sampler(), prompts)
        outputs = run(target, drafter, PLANS[plan], Sampler(), prompts)
        assert ids(outputs) == ids(plain)
        proposed = [r.proposed for r in outputs[-1].rounds]
        assert proposed[-1] == 0 and (proposed[0] > 0) == (len(prompts) > 1)


def test_the_draft_model_is_never_changed(toy: SimpleNamespace) -> None:
    target, lm = toy.make_target("llama", num_hidden_layers=2), toy.make_target("llama", vocab_size=72, seed=4)

    def state() -> tuple[str, str]:
        digest = hashlib.sha256()
        for name, tensor in lm.model.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest(), str(lm.model.config) + str(lm.model.generation_config)

    before = state()
    drafter = DraftLM(lm)
    first = run(target, drafter, WIDE, Sampler(0.7))
    second = run(target, drafter, WIDE, Sampler(0.7))
    assert state() == before
    assert first == second  # nor is anything remembered from one call to the next


def test_vocabularies_that_cannot_be_the_same_are_refused(toy: SimpleNamespace) -> None:
    lm = toy.make_target("llama", vocab_size=40)
    with pytest.raises(ValueError, match="the draft model has 40 tokens and the target 64, so their ids cannot mean"):
        DraftLM(lm).bind(toy.make_target("llama"))
    wrong = TokenMap(torch.tensor([3, 40]), torch.tensor([1, 2]), ((0,),) * 64)
    with pytest.raises(ValueError, match=r"the token map does not fit: it names draft ids \[3\] to \[40\]"):
        DraftLM(lm, wrong)
    wrong = TokenMap(torch.tensor([3, 4]), torch.tensor([1, 64]), ((0,),) * 65)
    with pytest.raises(ValueError, match="names target ids .* the target model has 0 to 63"):
        DraftLM(lm, wrong).bind(toy.make_target("llama"))
