"""The doctor's look at the drafter: its vocabulary and tokenizer, what its loss may depend on, and whether it can learn at all.

The last one trains a copy on a few greedy answers until they are memorised and decodes them through the real verify loop. A
drafter that has learned its rows and is not accepted on them is fed something else in decoding than in training: a shift, a
position, a mask.
"""

import dataclasses
import os
import time
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.losses import summarise
from draftsmith.drafters.tree import chain
from draftsmith.inference.decode import generate
from draftsmith.inference.load_target import load_tokenizer
from draftsmith.inference.output import Output
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.speculation import Speculation
from draftsmith.inference.tokenizers import compare
from draftsmith.train import coverage
from draftsmith.train.checks import Finding, Subject, judge
from draftsmith.train.checks_data import runs
from draftsmith.train.data import Sequence
from draftsmith.train.serving import serve

OVERFIT_ROWS, OVERFIT_TOKENS, OVERFIT_VOCAB = 2, 32, 512
"""Answers that are memorised, their length, and the draft vocabulary for it: a small copy of the run."""
OVERFIT_STEPS, OVERFIT_SECONDS = 150, 30.0
"""The time for it: steps, or seconds if these are over sooner."""
FEWEST_DRAFTED = 10
"""Drafted tokens below which acceptance says nothing."""
LEARNED, ACCEPTED, REFUSED = 0.97, 0.8, 0.5
"""Shares of the drafted tokens: right in training for a verdict, accepted in decoding for a pass, and below which it fails."""


def draft_vocabulary(subject: Subject) -> Finding:
    """How many of the answers' tokens the draft can propose at all."""
    drafter, target = subject.drafter, subject.target
    ids_W = drafter.token_ids_W
    if ids_W is None:
        return judge(
            f"the whole vocabulary of {target.shape.vocab_size:,} tokens", figures={"size": target.shape.vocab_size}
        )
    answers = coverage.held_out_answers(subject.tokenizer, subject.prompts)
    rows, given = [row.cut for row in subject.rows], subject.config.data.vocabulary == "start"
    found = coverage.measure(ids_W.cpu(), target.shape.vocab_size, rows, answers, given)
    worst = min(found.training, found.training if found.held_out is None else found.held_out)
    sampled = (
        ""
        if subject.complete
        else f"; counted on {subject.num_rows:,} of {len(subject.gathered.conversations):,} conversations"
    )
    return judge(
        str(found) + sampled,
        "raise drafter.draft_vocab_size, or leave it out for the whole vocabulary: what it lacks is never accepted",
        fail=worst < 0.6,
        warn=worst < 0.85,
        figures=dataclasses.asdict(found),
    )


def draft_tokenizer(subject: Subject) -> Finding:
    """Ids mean the same to the draft and the target, also where a draft LM comes with a tokenizer of its own."""
    source = subject.config.drafter_settings.get("source", "target")
    if subject.config.kind != "draft_lm" or source in ("target", "scratch"):
        return judge("the draft reads and proposes the target's own ids", figures={"own_tokenizer": False})
    found = compare(subject.tokenizer, load_tokenizer(source))
    return judge(
        f"{source}: {found.share:.1%} of the smaller vocabulary are common tokens, "
        + ("with the same ids" if found.kind == "same" else "but other ids"),
        "give a drafter.source whose tokenizer is the target's: the same ids mean other tokens",
        fail=found.kind != "same",
        figures={"own_tokenizer": True, "share": found.share, "kind": found.kind},
    )


def prompt_gradients(subject: Subject) -> Finding:
    """What the target would say at prompt tokens changes neither the loss nor a gradient, to the last bit."""
    drafter = subject.drafter
    batch = subject.batch(drafter, [row.cut for row in subject.few[:2]])
    loss, gradients = _gradients(drafter, batch)
    other_loss, other_gradients = _gradients(drafter, with_other_teachers(batch, drafter))
    same = torch.equal(loss, other_loss) and all(map(torch.equal, gradients, other_gradients))
    taught = int(batch.loss_mask_BT[:, 2:].sum())
    moved = max((float((a - b).abs().max()) for a, b in zip(gradients, other_gradients, strict=True)), default=0.0)
    return judge(
        f"{taught:,} of {int(batch.ids_BT.numel()):,} positions teach; other targets at the rest move gradients by {moved:.3g}",
        "the loss reads the target where it is not supervised; shift ids, targets and mask together (drafters/starts.py)",
        fail=not same,
        figures={"taught": taught, "moved": moved, "loss": float(loss)},
    )


def with_other_teachers(batch: TrainingBatch, drafter: TrainableDrafter) -> TrainingBatch:
    """The batch with the target's law turned into another one wherever the next token is not supervised. The last states are left
    as they are for kinds that read them as input too."""
    taught_BT = torch.zeros_like(batch.loss_mask_BT)
    taught_BT[:, 1:-1] = batch.loss_mask_BT[:, 2:]
    reads_last = "last" in drafter.feature_layers
    return dataclasses.replace(
        batch,
        last_BTD=batch.last_BTD
        if reads_last
        else torch.where(taught_BT[..., None], batch.last_BTD, -3 * batch.last_BTD),
        log_normaliser_BT=torch.where(taught_BT, batch.log_normaliser_BT, batch.log_normaliser_BT + 2),
        argmax_BT=torch.where(taught_BT, batch.argmax_BT, (batch.argmax_BT + 1) % drafter.shape.vocab_size),
    )


def target_frozen(subject: Subject) -> Finding:
    """No weight of the target wants gradients, and a step of training leaves its state as it was."""
    target, drafter = subject.target, subject.drafter
    wanting = [name for name, parameter in target.model.named_parameters() if parameter.requires_grad]
    training = [name for name, module in target.model.named_modules() if module.training]
    before = _checksum(target.model)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([*trained, *(p for p in target.model.parameters() if p.requires_grad)], lr=1e-3)
    _gradients(drafter, subject.batch(drafter, [subject.few[0].cut]))
    optimizer.step()
    after = _checksum(target.model)
    target.model.zero_grad()
    wrong = [
        *([f"{len(wanting)} weights want gradients ({wanting[0]})"] if wanting else []),
        *([f"{len(training)} modules are in training mode ({training[0] or 'the model'})"] if training else []),
        *(["a training step changed its state"] if before != after else []),
    ]
    return judge(
        "; ".join(wrong) or f"no gradients, eval mode, state {before:016x} before and after a step of training",
        "call model.eval().requires_grad_(False) before training, or give a target that inference/load_target.py loads",
        fail=bool(wrong),
        figures={"wanting_gradients": len(wanting), "in_training_mode": len(training), "changed": before != after},
    )


def one_batch_overfit(subject: Subject) -> Finding:
    """A few answers are memorised, then decoded with the drafter: nearly all that it drafts must be accepted."""
    target, config = subject.target, subject.config
    prompts = [prompt for prompt in _prompts(subject) if len(prompt) + OVERFIT_TOKENS <= target.shape.max_positions]
    greedy, start = Sampler(), time.perf_counter()
    plain = generate(target, prompts, max_new=OVERFIT_TOKENS, sampler=greedy, stop_at_eos=False)
    sequences = [
        Sequence(prompt + output.ids, [False] * len(prompt) + [True] * len(output.ids))
        for prompt, output in zip(prompts, plain, strict=True)
    ]
    # Hard labels: greedy acceptance is about the likeliest token alone, and every depth counts the same.
    changes = {
        "loss": {"divergence": "ce", "decay": 1.0},
        "draft_vocab_size": min(OVERFIT_VOCAB, target.shape.vocab_size),
    }
    drafter = subject.build(changes, sequences)
    steps, figures = _memorise(drafter, subject.batch(drafter, sequences))
    depth = min(drafter.training_depth, config.eval.depth)
    learned = (figures["predicted_tau"] - 1) / drafter.training_depth
    now, served = serve(target, drafter)
    served.to(target.device, target.dtype).eval()
    speculation = Speculation(served, chain(min(depth, served.max_depth or depth)))
    outputs = generate(
        now, prompts, max_new=OVERFIT_TOKENS - depth, sampler=greedy, speculation=speculation, stop_at_eos=False
    )
    proposed, taken, followed = accepted_while_following(outputs, plain)
    accepted = taken / max(1, proposed)
    enough = accepted >= ACCEPTED
    return judge(
        f"{len(prompts)} answers of {OVERFIT_TOKENS} tokens after {steps} steps: {learned:.0%} right in training, {accepted:.0%} "
        f"of the {proposed} drafted tokens accepted in decoding, {depth} deep, while it follows them ({followed} tokens)",
        "what is right in training is not accepted: decoding feeds the drafter something else (a shift, a mask, a layer)"
        if learned >= LEARNED
        else "not memorised in the time of this check, so it proves little; look at real acceptance early in the run",
        fail=accepted < REFUSED and learned >= LEARNED and proposed >= FEWEST_DRAFTED,
        warn=not enough,
        figures={
            "steps": steps,
            "learned": learned,
            "accepted": accepted,
            "proposed": proposed,
            "depth": depth,
            "seconds": time.perf_counter() - start,
        },
    )


# ---- helpers --------------------------------------------------------------------------------------------------------


def _prompts(subject: Subject) -> list[list[int]]:
    """The shortest of the few rows, up to their first answer."""
    first = [row.cut.ids[: runs(row.cut)[0][0]] for row in subject.few]
    usable = sorted((prompt for prompt in first if prompt), key=len)
    return usable[:OVERFIT_ROWS] or [subject.few[0].cut.ids[:2]]  # rows without a prompt have failed elsewhere


def accepted_while_following(outputs: list[Output], plain: list[Output]) -> tuple[int, int, int]:
    """Drafted tokens, accepted ones, and tokens of the rounds that follow the memorised text. In half precision a near-tie may fall
    the other way in another shape of pass, and what comes then was never learned."""
    proposed = accepted = followed = 0
    for output, memorised in zip(outputs, plain, strict=True):
        common = len(os.path.commonprefix([output.ids, memorised.ids]))
        position = 1  # the prefill's token
        for round_ in output.rounds:
            position += round_.committed
            if position > common:
                break
            proposed, accepted = proposed + round_.proposed, accepted + min(round_.accepted, round_.committed)
            followed += round_.committed
    return proposed, accepted, followed


def _memorise(drafter: TrainableDrafter, batch: TrainingBatch) -> tuple[int, dict[str, float]]:
    """Trains until every token is right, or until time is up; the number of steps and the last one's metrics."""
    trained = [p for p in drafter.parameters() if p.requires_grad]
    peak = 0.024 / drafter.shape.hidden_size**0.5  # 1e-3 for a width of 576, at which twice that takes twice as long
    optimizer = torch.optim.AdamW(trained, lr=peak, weight_decay=0.0)
    drafter.train()
    start, figures, step = time.perf_counter(), {"predicted_tau": 1.0}, 0
    while True:
        used = max(step / OVERFIT_STEPS, (time.perf_counter() - start) / OVERFIT_SECONDS)
        figures = summarise((parts := drafter(batch)).metrics)
        if used >= 1 or (step >= 40 and figures["predicted_tau"] >= 1 + 0.999 * drafter.training_depth):
            return step, figures
        for group in optimizer.param_groups:
            group["lr"] = peak * (1 - used)
        optimizer.zero_grad()
        (parts.sum / parts.count.clamp_min(1)).backward()
        optimizer.step()
        step += 1


def _gradients(drafter: TrainableDrafter, batch: TrainingBatch) -> tuple[Tensor, list[Tensor]]:
    drafter.zero_grad()
    loss = drafter(batch).sum
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def _checksum(model: Any) -> int:
    """A sum over the bits of every weight and buffer, each weighed by its place in the model."""
    total = 0
    for place, tensor in enumerate(model.state_dict().values(), start=1):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        total += place * int(tensor.contiguous().view(bits).sum(dtype=torch.int64))
    return total % (1 << 64)
