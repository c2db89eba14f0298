"""verl's own example scripts, with `+trainer.plugin=tlt` and nothing else added: composed, and judged by the doctor.

They are no part of verl's package. `make contract` takes them from its repository, at the tag that
`VERDICTS` counts, and keeps them in its cache; nothing of theirs is kept here. Models and data are
stand-ins, since nobody has all of them: for a model a folder with a config of its family.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from one_row import one_row
from safetensors.numpy import save_file

from verl_tlt.checks import rules
from verl_tlt.checks.recipe import compose, read_settings
from verl_tlt.commands.capture import recipe_of
from verl_tlt.config import TLTConfigError
from verl_tlt.flag import MAIN

CACHE = os.environ.get("TLT_CONTRACT_CACHE")
REPOSITORY, TAG = "https://github.com/verl-project/verl", "v0.9.0"
REMOVED = "grad_offload="
"""Overrides of the tag's scripts that the installed verl has no key for."""

VERDICTS = {
    "accepted": 42,
    "warned": 12,
    "refused: actor_rollout_ref.model.path": 10,
    "refused: actor_rollout_ref.rollout.name": 7,
    "refused: actor_rollout_ref.rollout.data_parallel_size": 4,
    "refused: actor_rollout_ref.rollout.engine_kwargs": 1,
    "verl does not compose it": 11,
    "not judged": 22,
}
"""Scripts by verdict; docs/compatibility.md has the sums in a sentence."""
# The family of a model by its name: (pattern, model_type, architecture); the first that matches.
FAMILIES = (
    (r"Qwen3-VL-.*A\d+B", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    (r"Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration"),
    (r"Qwen3\.5-.*A\d+B", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    (r"Qwen3\.5", "qwen3_5", "Qwen3_5ForConditionalGeneration"),
    (r"Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"),
    (r"Qwen3-.*(A\d+B|MoE)", "qwen3_moe", "Qwen3MoeForCausalLM"),
    (r"Qwen3", "qwen3", "Qwen3ForCausalLM"),
    (r"Qwen2\.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    (r"Qwen2", "qwen2", "Qwen2ForCausalLM"),
    (r"deepseek-(llm|coder)", "llama", "LlamaForCausalLM"),
    (r"DeepSeek-V4", "deepseek_v4", "DeepseekV4ForCausalLM"),
    (r"DeepSeek-V3|Moonlight", "deepseek_v3", "DeepseekV3ForCausalLM"),
    (r"Kimi-K2", "kimi_k25", "KimiK25ForConditionalGeneration"),
    (r"GLM-4\.1V", "glm4v", "Glm4vForConditionalGeneration"),
    (r"gpt-oss", "gpt_oss", "GptOssForCausalLM"),
    (r"Hy3", "hy_v3", "HYV3ForCausalLM"),
    (r"MiniCPM-o", "minicpmo", "MiniCPMO"),
    (r"MiMo-7B", "mimo", "MiMoForCausalLM"),
    (r"Mistral", "mistral", "MistralForCausalLM"),
    (r"Nemotron-3", "nemotron_h", "NemotronHForCausalLM"),
    (r"Seed-OSS", "seed_oss", "SeedOssForCausalLM"),
    (r"gemma", "gemma", "GemmaForCausalLM"),
)
SHAPE = {
    "hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 1 << 20,
}  # fmt: skip

# What the scripts' authors have around them.
AROUND = {
    "DATA_ROOT": "/data", "HDFS_ROOT": "/hdfs", "RAY_DATA_HOME": "/ray", "INFER_BACKEND": "vllm",
    "LORA_ADAPTER_PATH": "/adapter", "KIMI_K2_6_MODEL_PATH": "/models/Kimi-K2.6",
}  # fmt: skip


@pytest.fixture(scope="module")
def examples():
    """verl's `examples/` at the tag."""
    if not CACHE:
        pytest.skip("takes verl's examples from its repository: run by `make contract`, not by `make test`")
    folder = Path(CACHE).resolve() / f"verl-examples-{TAG}"
    if not folder.is_dir():
        clone = folder.with_suffix(".clone")
        shutil.rmtree(clone, ignore_errors=True)
        done = subprocess.run(
            ["git", "clone", "--quiet", "--depth=1", f"--branch={TAG}", REPOSITORY, str(clone)],
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"}, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        if done.returncode:
            shutil.rmtree(clone, ignore_errors=True)
            reason = (done.stderr.strip().splitlines() or ["git gave no reason"])[-1]
            pytest.skip(f"runs where {folder} is, or the examples of verl {TAG} can be fetched: {reason}")
        (clone / "examples").rename(folder)
        shutil.rmtree(clone)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A home with one data file, and room for models."""
    home = tmp_path_factory.mktemp("examples")
    one_row(home / "data.parquet")
    return home


def stand_in(place, name):
    """A folder with a config of the family that a model's name tells, and with those weights whose shapes are read."""
    found = next((f for f in FAMILIES if re.search(f[0], name, re.IGNORECASE)), None)
    assert found, f"FAMILIES knows no family of {name}"
    folder = place / "models" / found[1]
    folder.mkdir(parents=True, exist_ok=True)
    linear = {"linear_num_key_heads": 2} if found[1].startswith(("qwen3_5", "qwen3_next")) else {}
    shape = {**SHAPE, **linear}
    of_text = {"text_config": shape} if found[1].startswith(("qwen3_5", "qwen3_vl")) else {}
    fields = {"model_type": found[1], "architectures": [found[2]], **shape, **of_text}
    (folder / "config.json").write_text(json.dumps(fields))
    rows = np.zeros((SHAPE["vocab_size"], SHAPE["hidden_size"]), np.float32)
    weights = {"model.embed_tokens.weight": rows, "model.norm.weight": rows[0], "lm_head.weight": rows}
    save_file(weights, folder / "model.safetensors")
    return folder


STUBBED = (
    "apt", "apt-get", "conda", "curl", "date", "docker", "git", "hf", "huggingface-cli", "killall", "npu-smi",
    "nvidia-smi", "pip", "pip3", "pkill", "ray", "sleep", "sudo", "torchrun", "wget",
)  # fmt: skip
"""Programs by which the scripts change something, wait, or name a run by the minute: they are replaced by nothing."""


def around(place, told):
    """The environment of a script, in which `python -m MAIN` writes its arguments to `told`, and no other does a
    thing."""
    folder = place / "bin"
    folder.mkdir(exist_ok=True)
    note = f"[ -e {told} ] || printf '%s\\0' \"$@\" > {told}"
    python = f'#!/bin/bash\n[[ "$* " == *"-m {MAIN} "* ]] || exit 0\n{note}\n'
    for program, text in [*dict.fromkeys(STUBBED, "#!/bin/sh\n").items(), ("python", python), ("python3", python)]:
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    return {**os.environ, **AROUND, "HOME": str(place), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def told_by_bash(script, place):
    """The arguments with which bash, running the script, first calls `main_ppo`; None where it does not."""
    told = place / "told"
    told.unlink(missing_ok=True)
    subprocess.run(
        ["bash", str(script)], cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, timeout=60, check=False, env=around(place, told),
    )  # fmt: skip
    if not told.exists():
        return None
    words = told.read_text().split("\0")[:-1]
    return words[words.index(MAIN) + 1 :]


def verdict(script, place):
    """(one of VERDICTS, with the key of a first warning behind it; the sentences) for a script."""
    try:
        arguments = told_by_bash(script, place)
        recipe = recipe_of({"arguments": arguments, "directory": str(place)})
        (*_, model) = (o.partition("=")[2] for o in recipe.overrides if "actor_rollout_ref.model.path=" in o)
        replaced = {
            "actor_rollout_ref.model.path": stand_in(place, model),
            "data.train_files": place / "data.parquet", "data.val_files": place / "data.parquet",
        }  # fmt: skip
        known = [override for override in recipe.overrides if REMOVED not in override]
        stock = [*known, *(f"{k}={v}" for k, v in replaced.items())]
        compose(stock, recipe.config, recipe.folder)
    except TLTConfigError as error:
        return "verl does not compose it", [str(error)]
    try:
        config = compose([*stock, "+trainer.plugin=tlt"], recipe.config, recipe.folder)
        findings = rules.examine(config, read_settings(config))
    except TLTConfigError as error:
        return "not composed", [str(error)]
    refused = [f for f in findings if f.level == "refuse"]
    assert rules.switched_on(config).sentence == "TLT is on"
    if refused:
        return f"refused: {refused[0].what}", [f.sentence for f in refused]
    warned = [f for f in findings if f.level == "warn"]
    return (f"warned: {warned[0].what}" if warned else "accepted"), [f.sentence for f in warned]


def test_every_example_is_judged(examples, place, monkeypatch, capsys):
    pytest.importorskip("vllm")
    monkeypatch.chdir(place)
    scripts = [path for path in sorted(examples.rglob("*.sh")) if told_by_bash(path, place) is not None]
    verdicts = {str(path.relative_to(examples)): verdict(path, place) for path in scripts}
    counts = Counter(kind.partition(": ")[0] if kind.startswith("warned") else kind for kind, _ in verdicts.values())
    counts["not judged"] = len([*examples.rglob("*.sh")]) - len(scripts)
    with capsys.disabled():
        print(f"\n{len(scripts)} examples of verl call {MAIN}:", *counts.most_common(), sep="\n  ")
        for name, (kind, sentences) in verdicts.items():
            if kind != "accepted":
                print(f"  {name}: {' '.join(sentences)}")
    for name, (kind, sentences) in verdicts.items():
        for sentence in sentences:
            assert "\n" not in sentence and ("compose" in kind or sentence.endswith((".", "?"))), name
    assert counts == VERDICTS
