"""Checks that bundled answers are the target's own, by making some of them again.

    python -m draftsmith.scripts.check_answers ANSWERS --target T [--num N]

Half-precision arithmetic differs a little between machines, and one token that falls the other way changes the rest of an
answer; so the check asks the target about every answer token instead of comparing text alone: each must be its first choice, or
lie within the margin that rounding explains.
"""

import argparse
import sys

import torch

from draftsmith.inference.conversations import prompt_ids, prompt_messages, read_conversations, render
from draftsmith.inference.decode import generate, pad_ids
from draftsmith.inference.evaluate import spread
from draftsmith.inference.sampling import Sampler
from draftsmith.inference.target import load

MARGIN = 0.5
"""Logits; bf16 logits of size 16 to 32 are 0.125 apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that bundled greedy answers are the target's own.")
    parser.add_argument("answers")
    parser.add_argument("--target", required=True)
    parser.add_argument("--num", type=int, default=8)
    options = parser.parse_args()
    try:
        check(options.answers, options.target, options.num)
    except ValueError as error:
        print(f"check_answers: {error}", file=sys.stderr)
        sys.exit(2)


def check(answers: str, path: str, num: int) -> None:
    """ValueError if an answer is not the target's."""
    conversations = read_conversations(answers)
    chosen = [conversations[i] for i in spread(len(conversations), num)]
    target = load(path, dtype=torch.bfloat16)
    assert target.tokenizer is not None
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages)) for c in chosen]
    rendered = [render(target.tokenizer, c.messages, truncated=c.truncated) for c in chosen]
    outputs = generate(target, prompts, max_new=max(sum(r.loss_mask) for r in rendered), sampler=Sampler())
    same = sum(p + o.ids[: len(r.ids) - len(p)] == r.ids for p, o, r in zip(prompts, outputs, rendered, strict=True))

    worst = 0.0
    last_BTD = target.hidden(pad_ids([r.ids for r in rendered]).to(target.device))[1]
    for row, r in enumerate(rendered):
        logits_TV = target.unembed(last_BTD[row, : len(r.ids) - 1]).float()
        chosen_T = logits_TV.gather(1, torch.tensor(r.ids[1:], device=target.device)[:, None])[:, 0]
        gap_T = logits_TV.amax(1) - chosen_T
        worst = max(worst, float(gap_T[torch.tensor(r.loss_mask[1:])].max()))
    print(f"{answers}: {same} of {num} answers made again are the same; the largest margin of a token is {worst:.3g}")
    if worst > MARGIN:
        raise ValueError(
            f"an answer holds a token that the target prefers less by {worst:.3g} logits (allowed {MARGIN}); "
            f"these answers are not this target's: make new ones with draftsmith data"
        )


if __name__ == "__main__":
    main()
