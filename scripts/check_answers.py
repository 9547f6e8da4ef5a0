"""Checks that bundled answers are the target's own, by making some of them again.

    python -m draftsmith.scripts.check_answers ANSWERS --target T [--num N]

Half-precision logits differ between batch shapes and machines (by up to .8 for this target), one token that falls the other way
changes the rest of an answer, and text can be tokenised in another way than it was written. So the check does not compare texts
alone: it asks the target about every answer token, and nearly all must be its first choice within that margin.
"""

import argparse
import sys

import torch

from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.decode import generate, pad_ids
from draftsmith.inference.evaluate import spread
from draftsmith.inference.load_target import load
from draftsmith.inference.records import prompt_messages
from draftsmith.inference.rendering import prompt_ids, render
from draftsmith.inference.sampling import Sampler

MARGIN = 1.0
"""Logits by which a token may lie below the target's first choice."""
SHARE = 0.97
"""Of the answer tokens that must be within the margin; answers of another model reach about half of that."""


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
    prompts = [prompt_ids(target.tokenizer, prompt_messages(c.messages), c.tools) for c in chosen]
    rendered = [render(target.tokenizer, c, reasoning="last")[-1] for c in chosen]
    outputs = generate(target, prompts, max_new=max(sum(r.loss_mask) for r in rendered), sampler=Sampler())
    same = sum(p + o.ids[: len(r.ids) - len(p)] == r.ids for p, o, r in zip(prompts, outputs, rendered, strict=True))

    gaps = []
    last_BTD = target.hidden(pad_ids([r.ids for r in rendered]).to(target.device))[1]
    for row, r in enumerate(rendered):
        logits_TV = target.unembed(last_BTD[row, : len(r.ids) - 1]).float()
        chosen_T = logits_TV.gather(1, torch.tensor(r.ids[1:], device=target.device)[:, None])[:, 0]
        gaps.append((logits_TV.amax(1) - chosen_T)[torch.tensor(r.loss_mask[1:])])
    share = float((torch.cat(gaps) <= MARGIN).float().mean())
    print(
        f"{answers}: {same} of {num} answers made again are the same to the last token; {share:.1%} of the answer tokens "
        f"are the target's first choice within {MARGIN:g} logits"
    )
    if share < SHARE:
        raise ValueError(
            f"only {share:.1%} of the answer tokens are this target's choice (expected {SHARE:.0%}): "
            "these answers are another model's; make new ones with draftsmith data"
        )


if __name__ == "__main__":
    main()
