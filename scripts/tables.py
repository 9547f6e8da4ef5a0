"""What the command prints: the evaluation table and the coloured stream."""

import sys
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.inference import memory

GREEN, RESET = "\033[32m", "\033[0m"


def eval_table(report: dict[str, Any]) -> str:
    """One row per temperature and plan, then the categories, then the evidence of losslessness."""
    record, results = report["record"], report["results"]
    header = (
        "T",
        "K or tree",
        "tau [95 % interval]",
        "accepted given the one before",
        "plain",
        "spec.",
        "speed-up [95 %]",
        "pred.",
    )
    rows: list[tuple[str, ...]] = [header]
    for r in results:
        tau = r["tokens_per_round"]
        row = [f"{r['temperature']:g}", plan_label(r), f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]"]
        row.append(" ".join("-" if a is None else f"{a:.2f}" for a in r["cond_accept"]))
        if "speedup" in r:
            s = r["speedup"]
            row += [f"{r['plain_tokens_per_second']:.1f}", f"{r['tokens_per_second']:.1f}"]
            row += [f"{s['value']:.2f} [{s['low']:.2f}, {s['high']:.2f}]", f"{r['speedup_predicted']:.2f}"]
        if r["speed_only"]:
            row[2] += " on the speed prompts"
        rows.append(tuple(row + ["-"] * (len(header) - len(row))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    first = f"{record['name']}: {record['drafter']} ({record['drafter_parameters'] / 1e6:.1f} M parameters) for {record['target']}"
    how = f", {record['target_form']}" if record.get("target_form") else ""
    out = [f"{first}{how}, {record['dtype']}, {record['num_prompts']} prompts", "", *lines, ""]
    if record.get("target_adapted_from"):
        out.insert(1, describe_adapted(record["target_adapted_from"]))
    settings = record["settings"]
    if settings["speed_prompts"]:
        length = settings["speed_max_new"] or settings["max_new"]
        out[-1:] = [f"speed: batch 1, {settings['speed_prompts']} of the prompts, up to {length} tokens each", ""]
    whole = [r for r in results if not r["speed_only"]]
    for r in whole:
        categories = ", ".join(f"{name} {value['value']:.2f}" for name, value in r["categories"].items())
        out.append(f"T = {r['temperature']:g}, {plan_label(r, 'K = ')}, tau by category: {categories}")
    for r in whole[:1]:
        out.append(f"{plan_label(r, 'K = ')}, memory: {memory.describe(r['memory'])}")
    out.append("")
    for r in whole:
        flag = "lossless" if r["lossless"] else "LOSSY"
        line = f"T = {r['temperature']:g}, {plan_label(r, 'K = ')}: rule {r['rule']} ({flag})"
        if "agreement" in r:
            a = r["agreement"]
            line += f"; {a['identical']} of {a['of']} outputs identical to plain decoding"
            if a["divergences"]:
                line += f", largest margin at a divergence {a['largest_margin']:.2g} ({record['dtype']})"
            forced = a["teacher_forced"]
            line += f"; read in one pass, the target would choose {forced['own_choice']} of the {forced['of']} tokens itself"
            if forced["divergences"]:
                line += f", the others lose to it by at most {forced['largest_margin']:.2g}"
        out.append(line)
    return "\n".join(out)


def describe_adapted(origin: dict[str, Any]) -> str:
    """What a target that training adapted is, and how far from the original."""
    line = f"target adapted from {origin['path']}: lossless towards the adapted target, not towards the original"
    if "kl" in origin:
        line += f" (KL {origin['kl']:.2g} nats, same top choice at {origin['top1_agreement']:.1%} of held-out answer tokens)"
    return line


def plan_label(result: dict[str, Any], chain: str = "") -> str:
    """K of a chain, or what tree it was."""
    plan: str = result["plan"]
    if plan.isdigit():
        return chain + plan
    return f"tree of {result['nodes']}" if plan.startswith("tree:") else plan


class Stream:
    """Prints text as it comes; tokens that the drafter guessed are green on a terminal."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.colour = sys.stdout.isatty()
        self.ids: list[int] = []
        self.shown = 0

    def add(self, tokens: list[int], drafted: int) -> None:
        for number, token in enumerate(tokens):
            self.ids.append(token)
            text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
            if text.endswith("\ufffd"):  # a character that needs the next token too
                continue
            new, self.shown = text[self.shown :], len(text)
            green = self.colour and number < drafted
            sys.stdout.write(f"{GREEN}{new}{RESET}" if green else new)
        sys.stdout.flush()

    def close(self) -> None:
        print()
