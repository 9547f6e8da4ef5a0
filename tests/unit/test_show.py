"""`draftsmith data --show`: what a user sees of a mask."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.rendering import Rendered
from draftsmith.scripts.main import main
from draftsmith.scripts.show import show


def record(number: int) -> dict[str, Any]:
    contents = (f"hello {number}", "hi 😀", "how are you", "well")
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"id": str(number), "messages": messages}


def marked(number: int) -> str:
    return (
        f"<|im_start|>user\nhello {number}<|im_end|>\n<|im_start|>assistant\n[[hi 😀<|im_end|>]]\n"
        "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n[[well<|im_end|>]]\n"
    )


def test_supervised_stretches_stand_in_brackets_or_in_colour_and_the_text_is_whole(toy: SimpleNamespace) -> None:
    tokenizer = toy.make_tokenizer()
    text = "one two 😀 three"
    ids = tokenizer(text)["input_ids"]
    starts = [i for i, token in enumerate(ids) if tokenizer.decode([token]).startswith(" ")]
    mask = [starts[0] <= i < starts[1] for i in range(len(ids))]
    row = Rendered(ids, mask, "prefixes")
    assert show(tokenizer, row, colour=False) == "one[[ two]] 😀 three"
    assert show(tokenizer, row, colour=True) == "\033[2mone\033[0m\033[32m two\033[0m\033[2m 😀 three\033[0m"


def test_the_command_prints_conversations_evenly_spread_and_needs_no_weights(
    toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], toy: SimpleNamespace
) -> None:
    folder, prompts = tmp_path / "target", tmp_path / "a.jsonl"
    toy.make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text((toy_folder / "config.json").read_text())
    records = [record(number) for number in range(9)]
    del records[3]["messages"][1:]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    main(["data", str(prompts), "--target", str(folder), "--show", "3"])
    total, supervised = (
        len(toy.make_tokenizer()(text)["input_ids"])
        for text in (re.sub(r"\[\[|\]\]", "", marked(0)), "".join(re.findall(r"\[\[(.*?)\]\]", marked(0))))
    )
    counts = f"row 1 of 1, mask by prefixes: {supervised} of {total} tokens supervised ({supervised / total:.0%})"
    assert capsys.readouterr().out.splitlines() == [
        f"--- conversation 0, {counts}",
        *marked(0).splitlines(),
        "",
        "--- conversation 3: no assistant turn, so nothing to learn; allowed: at least one",
        "",
        f"--- conversation 6, {counts}",
        *marked(6).splitlines(),
    ]


def test_what_cannot_be_shown_is_refused_in_one_line(toy_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, error in (
        (["--show", "2"], "--show prints conversations that are there; give sources and --target, and no --out"),
        (["a.jsonl", "--show", "0"], "--show is 0; give 1 or more"),
        (["a.jsonl"], "no --out FILE to write; give one, or --show N to look at conversations that are there"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["data", *arguments, "--target", str(toy_folder)])
        assert caught.value.code == 2 and error in capsys.readouterr().err
