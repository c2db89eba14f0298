"""What is changed upstream at run time is as listed, and the diffs apply to the pinned releases.

A diff that no longer applies means that upstream changed those lines: see whether the change is still needed.
"""

import ast
import importlib.metadata
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sources import SourceTree, Symbol, source_root

from verl_cpu import megatron_shims, verl_shims, vllm_shims
from verl_tlt.server.stop_strings import end_at_stop_strings
from verl_tlt.vllm_worker.hybrid_states import count_rows_without_drafts, remember_accepted

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").rglob("*.patch"))
CAUSES_IN = {"verl": "0.9.1", "vllm": "0.28.0", "megatron-core": "0.16.1"}
"""The releases whose line numbers the causes name."""
FACTS = ("Replaces", "Symptom", "Cause", "Upstream", "Applies to", "Goes with", "Made by")
"""What each section of patches/README.md says."""


@dataclass(frozen=True)
class Change:
    """A section of patches/README.md."""

    title: str
    facts: dict[str, str]

    @property
    def anchor(self):
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def code(self):
        """(name of the function that makes the change, its file)."""
        name, path = re.fullmatch(r"\[(.+)\]\(\.\./(.+)\)\.", self.facts["Made by"]).groups()
        return name.rpartition(".")[2], ROOT / path

    @property
    def patch(self):
        return self.facts["Diff"].partition("]")[0].removeprefix("[") if "Diff" in self.facts else None


def listed():
    """(every change, the diffs that are offered without one) of patches/README.md."""
    text, offered = (ROOT / "patches" / "README.md").read_text().split("## Diffs of what verl-tlt does without\n")
    sections = re.split(r"^### ", re.sub(r"^## .*$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]
    found = re.compile(r"^\* \*\*(.+?)\*\*: (.+)$", re.MULTILINE)
    changes = [Change(section.partition("\n")[0], dict(found.findall(section))) for section in sections]
    return changes, re.findall(r"^\* \[(.+?)\]", offered, re.MULTILINE)


CHANGES, OFFERED = listed()
CPU_CHANGES = [change for change in CHANGES if change.code[1].is_relative_to(ROOT / "verl_cpu")]


def touched(patch):
    return re.findall(r"^diff --git a/(\S+) b/", patch.read_text(), flags=re.MULTILINE)


def apply(patch, directory):
    """Copy the files the patch touches out of the installed release and apply it; returns the patched files."""
    for name in touched(patch):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        source = source_root(name.partition("/")[0]) / name
        if source.exists():
            shutil.copy(source, directory / name)
    command = ["git", "apply", "--whitespace=error", str(patch)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}  # not some outer repository
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{patch.name} no longer applies: is the change still needed?\n{done.stderr}"
    return [directory / name for name in touched(patch)]


def patched(word, directory, name=".py"):
    """The Python file that a patch makes of the installed release."""
    return next(file for file in apply(next(p for p in PATCHES if word in p.name), directory) if file.match(f"*{name}"))


def load(file, name):
    """A patched file as a module of its own, inside the package it came from."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    module.__package__ = name.rpartition(".")[0]
    spec.loader.exec_module(module)
    return module


def test_every_diff_is_the_upstream_form_of_a_change_or_offered_without_one():
    listed = [*(c.patch for c in CHANGES if c.patch), *OFFERED]
    assert sorted(listed) == [str(p.relative_to(ROOT / "patches")) for p in PATCHES]


def test_code_and_page_name_each_other():
    """Directly below the comment that names a section is the function that the section names."""
    marked = {}
    for path in (*(ROOT / "verl_tlt").rglob("*.py"), *(ROOT / "verl_cpu").rglob("*.py")):
        mark = re.compile(r"# Changes [\w-]+: patches/README\.md#(\S+)\n(?:\s*@.*\n)*\s*(?:async )?(?:def|class) (\w+)")
        text = path.read_text()
        found = mark.findall(text)
        assert text.count("patches/README.md#") == len(found), path
        marked |= {anchor: (name, path) for anchor, name in found}
    assert marked == {change.anchor: change.code for change in CHANGES}
    assert all(set(FACTS) <= change.facts.keys() <= {*FACTS, "Diff"} for change in CHANGES)


def test_every_change_of_the_cpu_platform_is_listed():
    armed = set()
    for path in (ROOT / "verl_cpu").glob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        armed |= {ast.unparse(n.args[1]).split(".")[-1] for n in calls if ast.unparse(n.func) == "when_imported"}
    assert armed == {change.code[0] for change in CPU_CHANGES}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.anchor)
def test_what_is_said_of_a_change_is_so(change):
    site = source_root("verl")
    for symbol in re.findall(r"`([^`]+)`", change.facts["Replaces"]):
        symbol = symbol if ":" in symbol else f"{symbol}:"
        assert symbol.startswith("torch.") or SourceTree(site).problem(Symbol(symbol)) is None
    file, line, code = re.match(r"`([^`]+):(\d+)` `([^`]+)`", change.facts["Cause"]).groups()
    assert code in (site / file).read_text().splitlines()[int(line) - 1], "another release: is it still needed?"


@pytest.mark.parametrize(("package", "version"), CAUSES_IN.items())
def test_causes_are_those_of_the_installed_release(package, version):
    assert importlib.metadata.version(package).partition("+")[0] == version


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_applies_to_the_installed_release(patch, tmp_path):
    for path in apply(patch, tmp_path):
        if path.suffix == ".py":
            ast.parse(path.read_text())


def test_the_expand_patch_does_what_the_shim_does(tmp_path):
    kernel = load(patched("expand", tmp_path), "vllm.utils.cpu_triton_utils").expand_kernel
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (torch.tensor([0.7, 0.0, 0.2]), torch.tensor([50, 7, 0], dtype=torch.int32)):
        expected = vllm_shims.expand_batch_to_tokens(values, cumulative, 5, replace_from=0, replace_to=1)
        output = torch.full_like(expected, -1)
        kernel[(3,)](output, values, cumulative, 0, 1, MAX_NUM_TOKENS=8)
        assert torch.equal(output, expected) and output.dtype == values.dtype


def test_the_backend_patch_names_the_cpu_once(tmp_path):
    module = load(patched("backend", tmp_path), "verl.utils.distributed")
    for device, comm, expected in (("cpu", "gloo", "cpu:gloo"), ("cuda", "nccl", "cpu:gloo,cuda:nccl")):
        module.get_device_name, module.get_nccl_backend = lambda device=device: device, lambda comm=comm: comm
        assert module.get_default_backend() == verl_shims.dedupe_backend(expected) == expected


@pytest.mark.parametrize("runner", ["drafter", "speculator"])
def test_the_drafter_patch_finds_the_drafter_of_either_model_runner_and_stock_verl_of_one(tmp_path, runner):
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as stock

    fixed = load(patched("v2-drafter", tmp_path), stock.__module__).vLLMColocateWorkerExtension
    worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(**{runner: types.SimpleNamespace(model="mtp")}))
    assert fixed._get_drafter_model(worker) == "mtp"
    found = stock._get_drafter_model(worker)
    assert found == ("mtp" if runner == "drafter" else None), "the diff is in: remove it"
    worker.model_runner = types.SimpleNamespace(**{"drafter": None, runner: None})
    assert fixed._get_drafter_model(worker) is None


# ---------------------------------------------------------------------- with a patch applied, its shim steps aside


def changes(attribute, shim):
    """A function that tells whether a shim changes this of a module."""

    def changed(module):
        before = operator.attrgetter(attribute)(module)
        shim(module)
        return operator.attrgetter(attribute)(module) is not before

    return changed


def ends_at_stop_strings(module):
    changed, after = end_at_stop_strings(module.OutputProcessor), module.OutputProcessor.process_outputs
    assert not end_at_stop_strings(module.OutputProcessor), "applied twice"
    assert module.OutputProcessor.process_outputs is after and hasattr(after, "__wrapped__") == changed
    return changed


def counts_rows(module):
    runner = types.SimpleNamespace(_build_attention_metadata="stock")
    changed = count_rows_without_drafts(runner, module.GDNAttentionMetadataBuilder.build)
    assert changed == (runner._build_attention_metadata != "stock")
    return changed


def remembers_accepted(module):
    from vllm.v1.worker.gpu_input_batch import InputBatch

    runner = types.SimpleNamespace(_update_states="stock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputBatch, "add_request", module.InputBatch.add_request)
        changed = remember_accepted(runner)
    assert changed == (runner._update_states != "stock")
    return changed


def expands(module):
    sampler = types.SimpleNamespace(expand_batch_to_tokens="stock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.utils.cpu_triton_utils", module, raising=False)
        patch.setitem(sys.modules, module.__name__, module)
        vllm_shims.fix_expand_batch(sampler)
    return sampler.expand_batch_to_tokens != "stock"


TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
LINEAR_ATTENTION = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("word", "name", "changed"),
    [
        ("shared-memory", TRANSFER, changes("BucketedWeightReceiver.receive_weights", verl_shims.clone_buckets)),
        ("critic", "verl.utils.model", changes("load_valuehead_model", verl_shims.critic_attention)),
        (
            "float32",
            "verl.workers.config.engine",
            changes("McoreEngineConfig.__post_init__", verl_shims.megatron_in_float32),
        ),
        (
            "gradients",
            OPTIMIZER,
            changes("DistributedOptimizer._set_main_param_and_optimizer_states", megatron_shims.load_without_gradients),
        ),
        ("convolve", LINEAR_ATTENTION, changes("_spec_forward", vllm_shims.convolve_any_draft)),
        ("expand", "vllm.utils.cpu_triton_utils", expands),
        ("stop-strings", "vllm.v1.engine.output_processor", ends_at_stop_strings),
        ("rows-without-drafts", "vllm.v1.attention.backends.gdn_attn", counts_rows),
        ("sat-out", "vllm.v1.worker.gpu_input_batch", remembers_accepted),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_a_shim_leaves_what_has_its_patch_and_changes_what_has_not(tmp_path, word, name, changed, fixed):
    """Where stock is left too, upstream has caught up, and the shim is not needed any more."""
    stock = Path(importlib.util.find_spec(name).origin)
    module = load(patched(word, tmp_path, stock.name) if fixed else stock, name)
    assert changed(module) != fixed


def test_the_stop_string_patch_does_what_the_shim_does(tmp_path):
    """Three tokens in one step, of which the second completes the string: see also test_lossless_stops.py."""
    module = load(patched("stop-strings", tmp_path, "detokenizer.py"), "vllm.v1.engine.detokenizer")

    class Spelled(module.BaseIncrementalDetokenizer):
        def decode_next(self, token):
            return "abcdef"[2 * token : 2 * token + 2]

    for include, text in ((False, "a"), (True, "abc")):
        params = types.SimpleNamespace(stop=["bc"], min_tokens=0, include_stop_str_in_output=include)
        detokenizer = Spelled(types.SimpleNamespace(sampling_params=params))
        assert detokenizer.update([0, 1, 2], False) == "bc"
        assert detokenizer.token_ids == [0, 1] and detokenizer.num_surplus_tokens == 1
        assert detokenizer.output_text == text


LINEAR = """
    import importlib.util, os, sys
    spec = importlib.util.spec_from_file_location("vllm.model_executor.layers.utils", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from verl_cpu.vllm_shims import keep_linear_weights
    before = module.dispatch_cpu_unquantized_gemm
    keep_linear_weights(module)
    print(module.dispatch_cpu_unquantized_gemm is before, os.environ["VLLM_CPU_PREPACK_LINEAR"])
"""


def test_the_linear_shim_asks_for_the_patchs_setting(tmp_path):
    file = patched("linear", tmp_path, "utils.py")
    # In a process of its own: the module registers torch operators, which a process can do only once.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LINEAR), str(file)],
        env=os.environ | {"VLLM_CPU_PREPACK_LINEAR": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["True 0"], done.stderr[-2000:]


def test_the_pinning_shim_leaves_an_engine_that_does_not_pin(tmp_path):
    fixed = patched("accelerators", tmp_path)
    for file, aside in ((fixed, True), (source_root("verl") / fixed.relative_to(tmp_path), False)):
        cls = next(n for n in ast.parse(file.read_text()).body if getattr(n, "name", "") == "FSDPEngine")
        build = next(n for n in cls.body if getattr(n, "name", "") == "_build_fsdp_module")
        alone = tmp_path / f"alone_{aside}.py"  # a file, because the shim reads the source
        alone.write_text(textwrap.dedent("    " + ast.get_source_segment(file.read_text(), build)))
        names = {}
        exec(compile(alone.read_text(), str(alone), "exec"), names)
        engine = types.SimpleNamespace(_build_fsdp_module=names["_build_fsdp_module"])
        module = types.SimpleNamespace(FSDPEngine=engine, CPUOffloadPolicy=dict)
        verl_shims.offload_unpinned(module)
        assert (module.CPUOffloadPolicy is dict) == aside
        assert aside or module.CPUOffloadPolicy(pin_memory=True) == {"pin_memory": False}


def test_the_spinning_shim_asks_for_the_patchs_setting(monkeypatch):
    class SpinCondition:
        def wait(self, timeout_ms=None):
            return "VLLM_SHM_BROADCAST_BUSY_SLEEP_S"

    monkeypatch.delenv("VLLM_SHM_BROADCAST_BUSY_SLEEP_S", raising=False)
    before = SpinCondition.wait
    vllm_shims.sleep_between_looks(types.SimpleNamespace(SpinCondition=SpinCondition))
    assert SpinCondition.wait is before and float(os.environ.pop("VLLM_SHM_BROADCAST_BUSY_SLEEP_S")) > 0
