"""The self-test that users wish their toolkit had: a drafter that has memorised a few answers must be accepted on them.

Good training accuracy with bad acceptance means that drafting does not feed the drafter what training did.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith import drafters
from draftsmith.drafters.base import TrainableDrafter
from draftsmith.drafters.losses import summarise
from draftsmith.drafters.tree import chain
from draftsmith.drafters.unpack import one_per_row
from draftsmith.inference.decode import generate
from draftsmith.inference.metrics import acceptance
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.target import Target
from draftsmith.train.data import Sequence, count_answer_tokens
from draftsmith.train.features import FeatureStore
from draftsmith.train.serving import serve

PROMPTS = [[1, 17, 4, 33], [1, 50, 22]]
DEPTH, STEPS, LR = 4, 150, 1e-2
# Hard labels: greedy acceptance is about the most likely token, and the toy's laws are rather flat.
SETTINGS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": DEPTH + 1, "loss": {"divergence": "ce", "decay": 1.0}},
    "draft_lm": {"loss": {"divergence": "ce"}},
    "eagle": {"steps": DEPTH, "loss_weight": 1.0, "loss": {"divergence": "ce", "decay": 1.0}},
    "eagle3": {"steps": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
    "hydra": {"num_heads": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
    "medusa": {"num_heads": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
    "medusa2": {"num_heads": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
    "mtp": {"steps": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
    "p_eagle": {"depth": DEPTH, "loss": {"divergence": "ce", "decay": 1.0}},
}


def overfit(kind: str, toy: SimpleNamespace) -> tuple[Target, TrainableDrafter, dict[str, float]]:
    """Trains on the target's own greedy answers until they are memorised."""
    target = toy.make_target(dtype=torch.float32, seed=3)
    answers = generate(target, PROMPTS, max_new=32, sampler=Sampler(), stop_at_eos=False)
    sequences = [
        Sequence(prompt + answer.ids, [False] * len(prompt) + [True] * 32)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    torch.manual_seed(0)
    settings = {**toy.KIND_SETTINGS.get(kind, {}), **SETTINGS.get(kind, {})}
    drafter = drafters.build(kind, settings, target.shape)
    drafter.initialise(target, count_answer_tokens(sequences, target.shape.vocab_size))
    batch = one_per_row(FeatureStore(target, sequences, drafter.feature_layers).batch(range(len(sequences))))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        parts = drafter(batch)
        optimizer.zero_grad()
        (parts.sum / parts.count).backward()
        optimizer.step()
    target, served = serve(target, drafter)
    return target, served.eval(), summarise(parts.metrics)


def acceptance_rate(target: Target, drafter: TrainableDrafter) -> float:
    speculation = Speculation(drafter, chain(DEPTH))
    outputs = generate(target, PROMPTS, max_new=26, sampler=Sampler(), speculation=speculation, stop_at_eos=False)
    plain = generate(target, PROMPTS, max_new=26, sampler=Sampler(), stop_at_eos=False)
    assert [output.ids for output in outputs] == [output.ids for output in plain]
    rate: Any = acceptance(outputs)["draft_acceptance_rate"]
    return float(rate)


@pytest.mark.parametrize("kind", drafters.kinds())
def test_a_drafter_that_memorised_its_training_answers_is_accepted_on_them(
    kind: str, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter, trained = overfit(kind, toy)
    assert trained[f"accuracy/{min(DEPTH, drafter.training_depth) - 1}"] > 0.95
    assert acceptance_rate(target, drafter) > 0.9

    # The same drafter, fed one position late, must be noticed: this is what the test is for.
    plain = type(drafter).observe

    def late(self: Any, state: Any, ids_BC: Tensor, features_BCF: Tensor, next_B: Tensor, counts: list[int]) -> Any:
        if not features_BCF.shape[2]:  # what such a drafter reads is the text alone
            ids_BC = ids_BC.roll(1, 1)
        return plain(self, state, ids_BC, features_BCF.roll(1, 1), next_B, counts)

    monkeypatch.setattr(type(drafter), "observe", late)
    assert acceptance_rate(target, drafter) < 0.6
