"""`verl-tlt warmup --method mtp` without its engine, and `verl-tlt write-back`."""

import re
import shutil

import pytest
from mtp_policy import make_mtp_policy
from rich.console import Console
from typer.testing import CliRunner

from verl_tlt.commands.cli import app
from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup.command import warmup
from verl_tlt.commands.warmup.evaluate import linked
from verl_tlt.drafter import check_drafter, load_own_head, provenance
from verl_tlt.drafter.mtp_tensors import mtp_tensors


@pytest.fixture(scope="module")
def mtp_dir(policy_dir, tmp_path_factory):
    """A Qwen3.5 with the tokenizer of the other policy."""
    path = tmp_path_factory.mktemp("mtp") / "policy"
    make_mtp_policy(path, "qwen3_5")  # transformers has no other tokenizer than Qwen2's for a MiMo
    for file in (*policy_dir.glob("tokenizer*"), policy_dir / "chat_template.jinja"):
        shutil.copy(file, path)
    return path


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_from_the_policys_own_head_to_one_that_goes_back(mtp_dir, prompts_file, answered, tmp_path):
    options = WarmupOptions(
        model=mtp_dir, prompts=[prompts_file], out=tmp_path / "head", response_length=24, epochs=2, batch_tokens=128,
        learning_rate=3e-3, device="cpu", method="mtp",
    )  # fmt: skip
    answered(options.work)
    warmup(options, Console(quiet=True))
    check_drafter(options.out, mtp_dir)
    facts = provenance(options.out)
    assert facts["started from"] == "its release" and facts["tau_sim"] > 1.05
    before = {file.name: file.read_bytes() for file in mtp_dir.iterdir()}
    policy = linked(mtp_dir, tmp_path / "policy")
    code, said = run("write-back", options.out, policy)
    assert code == 0 and "model-mtp.safetensors" in said, said
    assert {at.file.parent for at in mtp_tensors(policy).values()} == {policy}
    load_own_head(policy, policy)
    assert {file.name: file.read_bytes() for file in mtp_dir.iterdir()} == before, "through a link"


def test_nothing_goes_back_into_a_policy_that_has_no_such_head(mtp_dir, policy_dir):
    code, said = run("write-back", mtp_dir, policy_dir)
    assert code == 1 and "names Qwen3ForCausalLM, and method=mtp drafts for" in said
