"""Toy targets and drafters: every real code path at a size that runs in milliseconds.

Families are built from their Hugging Face config with random weights; one Llama with a trained-in tokenizer and chat template is
saved to disk for what has to go through files and processes.
"""

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith import drafters
from draftsmith.drafters.base import Drawn, Picked, TrainableDrafter
from draftsmith.inference.target import Target

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no forked-process warning from data workers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2")
VOCAB, WIDTH, LAYERS = 64, 32, 4
KIND_SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_vocab_size": 48, "noise": 0.0},
    "dflash": {
        "num_layers": 2,
        "block_size": 8,
        "layers": [1, 2, 3],
        "draft_vocab_size": 48,
        "markov_rank": 4,
        "confidence_weight": 1.0,
    },
    "draft_lm": {"layers": [1], "draft_vocab_size": 48},
    "eagle3": {"layers": [1, 2, 3], "draft_vocab_size": 48},
    "hydra": {"num_heads": 5, "prefix_attention": True, "draft_vocab_size": 48},
    "medusa": {"num_heads": 5, "draft_vocab_size": 48},
    "p_eagle": {"layers": [1, 2, 3], "draft_vocab_size": 48, "num_layers": 2},
    "mtp": {"draft_vocab_size": 48},
    "medusa2": {"num_heads": 5, "draft_vocab_size": 48, "adapt_rank": 4},
}
"""Toy settings of kinds whose defaults do not fit a target of four layers; other kinds use their defaults."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random causal LM of a family; large initial weights make its laws uneven and its top choices clear."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    special: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "mistral": {"sliding_window": 8},
        "gemma": {"head_dim": 16},
        "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    }
    if family == "gpt2":
        common = {
            "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 256,
            "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **{**common, **special.get(family, {}), **changes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_target(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Target:
    return Target(make_model(family, dtype, seed, **changes), None, f"toy {family}")


def make_drafter(kind: str, target: Target, seed: int = 1, **changes: Any) -> TrainableDrafter:
    """An untrained drafter of a kind for a toy target, in the target's dtype."""
    torch.manual_seed(seed)
    settings = {**KIND_SETTINGS.get(kind, {}), **changes}
    drafter = drafters.build(kind, settings, target.shape)
    drafter.initialise(target, torch.ones(target.shape.vocab_size, dtype=torch.int64))
    drafter.to(target.dtype)
    return drafter.eval()


def grids_of(rows: list[Tensor], weight_JBT: Tensor) -> list[Tensor]:
    """What `distill` is given for the starts where each of J depths is trained, (n, D), on grids (B, T, D), 0 elsewhere."""
    grids = [rows_nD.new_zeros(*weight_JBT.shape[1:], rows_nD.shape[1]) for rows_nD in rows]
    for grid_BTD, rows_nD, weight_BT in zip(grids, rows, weight_JBT, strict=True):
        grid_BTD[weight_BT > 0] = rows_nD
    return grids


class Watch:
    """A `Pick` that notes the logits it is shown (those of the first node of each depth) and takes the most likely tokens, or those
    that `choose(depth)` gives."""

    drawn: Drawn = "fixed"

    def __init__(self, choose: Callable[[int], Tensor] | None = None) -> None:
        self.seen: list[Tensor] = []
        self._choose = choose

    def __call__(self, logits_BMW: Tensor, depth: int, token_ids_W: Tensor | None, count: int) -> Picked:
        self.seen.append(logits_BMW[:, 0])
        index_BMk = logits_BMW.topk(count).indices
        tokens_BMk = index_BMk if token_ids_W is None else token_ids_W[index_BMk]
        if self._choose is not None:
            tokens_BMk = self._choose(depth)[:, None, None]
        return Picked(tokens_BMk, logits_BMW.log_softmax(-1).gather(2, index_BMk), None)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 320 ids with ChatML, without any download."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog", "hello there, how are you today?"], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHATML, model_max_length=256
    )


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder (fp32 Llama, tokenizer with ChatML) as `from_pretrained` reads it."""
    folder = tmp_path_factory.mktemp("toy") / "target"
    make_model("llama", vocab_size=320).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ending_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with many end-of-sequence tokens, so that its answers end by themselves after a dozen tokens or so."""
    folder = tmp_path_factory.mktemp("ending") / "target"
    model: Any = make_model("llama", vocab_size=320)
    model.generation_config.eos_token_id = [2, *range(3, 320, 16)]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """Writes a LoRA adapter with large random matrices for a model folder: `make_adapter(model, folder, **config)`."""

    def write(model_folder: Path, folder: Path, **changes: Any) -> Path:
        peft = pytest.importorskip("peft")
        settings = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "task_type": "CAUSAL_LM",
        }
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a property under its old name
            adapted = peft.get_peft_model(model, peft.LoraConfig(**{**settings, **changes}))
        torch.manual_seed(7)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        return folder

    return write


@pytest.fixture(scope="session")
def kill_at() -> Callable[[subprocess.Popen[str], Path], None]:
    """Kills a process as soon as a file is there: `kill_at(process, file)`."""

    def kill(process: subprocess.Popen[str], file: Path) -> None:
        deadline = time.monotonic() + 120
        while not file.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors

    return kill


SMOLLM2 = Path(os.environ.get("DRAFTSMITH_SMOLLM2", Path(__file__).parents[1] / ".cache" / "smollm2"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real target; scripts/test.sh puts it there."""
    if not (SMOLLM2 / "config.json").exists():
        pytest.fail(
            f"{SMOLLM2} is missing; run scripts/test.sh once, or python -m draftsmith.scripts.smollm2 {SMOLLM2}"
        )
    return SMOLLM2


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The functions and constants above, for tests to call: test files cannot import this one."""
    return SimpleNamespace(
        FAMILIES=FAMILIES,
        VOCAB=VOCAB,
        WIDTH=WIDTH,
        LAYERS=LAYERS,
        KIND_SETTINGS=KIND_SETTINGS,
        make_model=make_model,
        make_target=make_target,
        make_drafter=make_drafter,
        Watch=Watch,
        grids_of=grids_of,
        make_tokenizer=make_tokenizer,
    )


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every family in turn, for tests that ask for it."""
    name: str = request.param
    return name
