"""What prompt lookup would have had accepted on answers that are there already, without the target.

Under coupled verification an answer does not depend on what drafts it: the target's own token at each place is the answer's. So the
n-gram drafter is run over the finished text and compared with it, at any temperature, in microseconds a token.
"""

from collections.abc import Sequence

from draftsmith.drafters.ngram import NGram
from draftsmith.inference.output import Round


def ngram_rounds(prompt: Sequence[int], answer: Sequence[int], depth: int) -> list[Round]:
    """The rounds in which `NGram()` would have drafted an answer as chains of that depth; tokens accepted beyond the answer's end
    are not known and not counted, which changes no committed one."""
    text = NGram().new_text()
    for token in (*prompt, *answer[:1]):  # the prefill yields the first one
        text.append(token)
    rounds, place = [], 1
    while place < len(answer):
        left = answer[place:]
        accepted = 0
        for drafted, true in zip(text.continuation(depth), left, strict=False):
            if drafted != true:
                break
            accepted += 1
        committed = min(accepted + 1, len(left))
        rounds.append(Round(depth, accepted, committed, depth))
        for token in left[:committed]:
            text.append(token)
        place += committed
    return rounds
