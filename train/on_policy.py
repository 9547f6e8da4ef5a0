"""Training texts that the drafter writes itself (Zhou et al. 2023, arXiv 2310.08461; Agarwal et al. 2023, arXiv 2306.13649).

A draft that learns only from the target's answers never sees where its own mistakes lead. For a share of the batches the last
answer of each conversation is written by the drafter as it is at that step, sampled from its law and no longer than the answer it
replaces; then the target says what it would have said at each of these tokens. What is written is a function of the weights and of
a key, so a resumed run writes the same.

Letters: B sequences, C prompt tokens, N written tokens.
"""

import random
from collections.abc import Sequence as SequenceOf

import torch

from draftsmith.drafters.base import TrainableDrafter, TrainingBatch
from draftsmith.drafters.tree import chain
from draftsmith.inference.decode import pad_ids
from draftsmith.inference.drafting import make_pick
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import Target
from draftsmith.train.captured import capture
from draftsmith.train.data import Sequence
from draftsmith.train.features import collate

SAMPLER = Sampler(1.0)
Key = tuple[int, ...]
"""Names a micro-batch: seed of the run, step, and which one of the step over all processes."""


def chosen(share: float, key: Key) -> bool:
    """Whether the drafter writes this batch: a coin that falls on yes with probability `share`."""
    return random.Random(f"on-policy/{key}").random() < share


def write(drafter: TrainableDrafter, target: Target, sequences: SequenceOf[Sequence], key: Key) -> list[Sequence]:
    """The sequences with their last answer written by the drafter, up to its first end-of-sequence token.

    Args:
        drafter: bound to the target; it reads the text alone and drafts chains of any length.
        target: whose end-of-sequence tokens end an answer.
        sequences: training sequences; what comes before the last answer stays, what comes behind it goes.
        key: decides what is drawn.
    """
    assert drafter.feature_layers == () and drafter.max_depth is None, "it cannot write without the target"
    spans = [last_answer(sequence) for sequence in sequences]
    longest_prompt = max(begin for begin, _ in spans)
    most = max(end - begin for begin, end in spans)
    prompts_BC = pad_ids([s.ids[:begin] for s, (begin, _) in zip(sequences, spans, strict=True)]).to(target.device)
    begin_B = torch.tensor([begin for begin, _ in spans], device=target.device)
    draws = random.Random(f"on-policy text/{key}")
    seeds_B = torch.tensor([draws.getrandbits(62) for _ in sequences], device=target.device)
    # A chain that the drafter proposes, by noise that makes it a sample of its own law: just what it would write alone.
    pick = make_pick("coupled", SAMPLER, seeds_B, begin_B, target.shape.vocab_size)
    with torch.inference_mode():
        state = drafter.init(len(sequences), longest_prompt + most)
        roots_B = prompts_BC.gather(1, begin_B[:, None] - 1)[:, 0]
        features_BCF = torch.zeros(*prompts_BC.shape, 0, device=target.device)
        state = drafter.observe(state, prompts_BC, features_BCF, roots_B, [begin - 1 for begin, _ in spans])
        tokens_BN = drafter.propose(state, chain(most), pick).tokens_BN
    written = []
    for sequence, (begin, end), tokens in zip(sequences, spans, tokens_BN.tolist(), strict=True):
        answer = tokens[: end - begin]
        stop = next((i + 1 for i, token in enumerate(answer) if token in target.eos_ids), len(answer))
        written.append(Sequence(sequence.ids[:begin] + answer[:stop], sequence.loss_mask[:begin] + [True] * stop))
    return written


def batch(target: Target, sequences: SequenceOf[Sequence], epoch: int, top_k: int | None = None) -> TrainingBatch:
    """The training batch of sequences that no store holds; with `top_k` the teacher has so many of its likeliest tokens."""
    captured = capture(target, sequences, (), top_k=top_k)
    return collate(sequences, captured, (), target.dtype, target.device, epoch)


def last_answer(sequence: Sequence) -> tuple[int, int]:
    """Where its last run of supervised tokens begins and ends; it begins at 2 or later, for no drafter is trained before."""
    end = max(i for i, supervised in enumerate(sequence.loss_mask) if supervised) + 1
    begin = end - 1
    while begin > 2 and sequence.loss_mask[begin - 1]:
        begin -= 1
    return begin, end
