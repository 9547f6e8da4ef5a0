"""How fast conversations become ids and masks, beside transformers' own `apply_chat_template` of each one.

    python -m draftsmith.scripts.benchmark_masks CONVERSATIONS... --target T

One process. `render_all` makes ids and mask, everything included; `render` does the same one by one; the yardstick makes ids alone,
in one call for each conversation, without a mask and without looking whether the template is stable. The contenders take turns, the
best of the repeats counts, and the first conversations warm up before. On a busy machine the time on the CPU says more.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence

import tokenizers
import transformers

from draftsmith.inference.conversations import read_conversations
from draftsmith.inference.load_target import load_tokenizer
from draftsmith.inference.records import Conversation
from draftsmith.inference.rendering import Rendered, render, render_all
from draftsmith.inference.turns import BadRecord

WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations a second that become ids and masks.")
    parser.add_argument("conversations", nargs="+", metavar="FILE")
    parser.add_argument("--target", required=True, help="model folder or hub id; only its tokenizer is loaded")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    try:
        print(measure(options.conversations, options.target, options.repeats))
    except ValueError as error:
        print(f"benchmark_masks: {error}", file=sys.stderr)
        sys.exit(2)


def measure(files: Sequence[str], target: str, repeats: int) -> str:
    tokenizer = load_tokenizer(target)

    def together(conversations: Sequence[Conversation]) -> int:
        return sum(len(row.ids) for rows in render_all(tokenizer, conversations) for row in _good(rows))

    def one_by_one(conversations: Sequence[Conversation]) -> int:
        return sum(len(row.ids) for conversation in conversations for row in render(tokenizer, conversation))

    def yardstick(conversations: Sequence[Conversation]) -> int:
        return sum(len(tokenizer.apply_chat_template(list(c.messages), return_dict=False)) for c in conversations)

    contenders: dict[str, Callable[[Sequence[Conversation]], int]] = {
        "render_all: ids and mask": together,
        "render, one by one: ids and mask": one_by_one,
        "transformers' apply_chat_template: ids": yardstick,
    }
    lines = [
        f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, Python {platform.python_version()}, "
        f"best of {repeats}"
    ]
    for file in files:
        conversations = read_conversations(file)
        lines.append(f"{file}: {len(conversations):,} conversations")
        best: dict[str, tuple[float, float, int]] = {}
        for run in contenders.values():
            run(conversations[:WARM_UP])
        for _ in range(repeats):
            for name, run in contenders.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens = run(conversations)
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
                best[name] = min(best.get(name, (float("inf"), 0.0, 0)), (seconds, cpu_seconds, tokens))
        for name, (seconds, cpu_seconds, tokens) in best.items():
            lines.append(
                f"  {name:40}{len(conversations) / seconds:8,.0f} conversations/s ({len(conversations) / cpu_seconds:,.0f} per "
                f"second of CPU time), {tokens / seconds:,.0f} tokens/s"
            )
    return "\n".join(lines)


def _good(rows: list[Rendered] | BadRecord) -> list[Rendered]:
    if isinstance(rows, BadRecord):
        raise rows
    return rows


if __name__ == "__main__":
    main()
