"""A section of `check_cuda`: training as a user starts it, on a toy target. Killed and continued it ends with the same weights, to
the bit where the device itself repeats its bits; and under ZeRO-2 on one device it learns the same."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from draftsmith.configs import locate
from draftsmith.scripts.check_cuda import check, relative
from draftsmith.train import checkpoints

SECONDS = 60
"""Of one run, at most."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SEED_TEXT = ["the quick brown fox jumps over the lazy dog", "hello there, how are you today?"]


def run(device: torch.device, dry: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_toy_target(folder / "target")
        config = _config(folder, dry)
        first, second = (_weights(_finish(_start(config, folder / output))) for output in ("first", "second"))
        repeats = all(torch.equal(first[name], second[name]) for name in first)
        print(
            f"- the same run twice gives {'the same bits' if repeats else 'other bits: kernels here do not repeat theirs'}"
        )
        continued = _weights(_killed_and_continued(config, folder / "killed"))
        check("killed and continued, largest deviation of a weight", _worst(continued, first), 0.0 if repeats else 2e-3)
        _zero(config, folder, first, dry)


def _zero(config: Path, folder: Path, right: dict[str, Tensor], dry: bool) -> None:
    recipe = locate("configs/accelerate/zero2.yaml")
    if importlib.util.find_spec("deepspeed") is None or not recipe.exists():
        print("- ZeRO-2: left out; deepspeed or its recipe is not installed")
        return
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(recipe), "--num_processes", "1"]
    extra = {"DS_ACCELERATOR": "cpu"} if dry else {}
    run = _finish(_start(config, folder / "zero", launcher, extra))
    check("ZeRO-2 on one device against a plain run, largest deviation of a weight", _worst(_weights(run), right), 5e-3)


def save_toy_target(folder: Path) -> None:
    """A Llama of four layers with random weights, and a byte-level tokenizer with ChatML."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    core.train_from_iterator(
        SEED_TEXT,
        tokenizers.trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHATML, model_max_length=256
    ).save_pretrained(folder)


def _config(folder: Path, dry: bool) -> Path:
    def rows(path: Path, count: int, answers: bool) -> str:
        lines = []
        for i in range(count):
            messages = [{"role": "user", "content": f"hello {i}, how are you today?"}]
            if answers:
                text = " ".join(f"the fox {j * i % 7} jumps" for j in range(2 + i % 4))
                messages.append({"role": "assistant", "content": text})
            lines.append(json.dumps({"id": f"c{i}", "messages": messages}) + "\n")
        path.write_text("".join(lines))
        return str(path)

    config = {
        "output": str(folder / "run"),
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocab_size": 128},
        "data": {"train": [rows(folder / "train.jsonl", 24, answers=True)]},
        "features": {"store": "memory"},
        "optim": {"learning_rate": 3e-3},
        "loop": {
            "epochs": 8, "batch_size": 8, "precision": "float32" if dry else "bfloat16", "log_every": 6,
            "checkpoint_every": 4,
        },
        "eval": {
            "prompts": rows(folder / "held.jsonl", 2, answers=False), "every": 1000, "max_new": 8, "depth": 3,
        },
        "tracking": {"tracker": "none"},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _start(
    config: Path, output: Path, launcher: list[str] | None = None, extra: dict[str, str] | None = None
) -> tuple[Path, subprocess.Popen[str]]:
    command = [sys.executable, *(launcher or []), "-m", "draftsmith.train.run", str(config), f"output={output}"]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(extra or {})}
    pipe = subprocess.PIPE
    return output, subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)


def _finish(started: tuple[Path, subprocess.Popen[str]]) -> Path:
    output, process = started
    said, _ = process.communicate(timeout=SECONDS)
    if process.returncode != 0:
        raise AssertionError(f"a run ended with status {process.returncode}: {said[-2000:]}")
    return output


def _killed_and_continued(config: Path, output: Path) -> Path:
    _, process = _start(config, output)
    deadline = time.monotonic() + SECONDS
    while not checkpoints.complete(output / "checkpoints") and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no checkpoint within {SECONDS} seconds")
        time.sleep(0.02)
    process.kill()
    process.communicate()
    if (output / "finished.json").exists():
        raise AssertionError("the run ended before it could be killed")
    return _finish(_start(config, output))


def _weights(output: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(output / "drafter" / "model.safetensors")


def _worst(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    return max(relative(ours[name].float(), right[name].float()) for name in right)
