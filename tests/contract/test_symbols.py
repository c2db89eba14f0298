"""verl and vLLM have what we rely on: the installed releases and the newest vLLM, all others with `make contract`.

An upgrade fails here with a list, not in a run with a stack trace.
"""

import ast
import re
from pathlib import Path

import pytest
from releases import RELEASES, sources
from sources import SYMBOLS, SourceTree, Symbol, source_root

ROOT = Path(__file__).parents[2]
OURS = ("verl_tlt", "verl_cpu", "tests/toy")
LACKING = {
    # Why the doctor refuses it: no gate behind which a replica can leave, and the balancer is elsewhere.
    ("verl", "0.9.0"): {
        "verl.workers.rollout.router:GlobalRequestLoadBalancer", "verl.workers.rollout.router:get_router_handle",
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    },
    # The CPU backend alone: linear attention there verifies no drafts yet.
    ("vllm", "0.24.0"): {
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward", "vllm._custom_ops:",
    },
}  # fmt: skip


def wrong(root, package):
    """{what is wrong with a listed symbol in these sources: its name}."""
    tree = SourceTree(root)
    problems = ((symbol.name, tree.problem(symbol)) for symbol in SYMBOLS if symbol.package == package)
    return {f"{name} {problem}": name for name, problem in problems if problem}


@pytest.mark.parametrize("package", ["verl", "vllm"])
def test_the_installed_release(package):
    assert not wrong(source_root(package), package)


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_another_release(package, version):
    found = wrong(sources(package, version), package)
    owners = {name if name.endswith(":") else re.match(r"[^:]*:\w+", name)[0] for name in found.values()}
    assert owners == LACKING.get((package, version), set()), "\n".join(sorted(found))


@pytest.mark.parametrize("ours", OURS)
def test_every_import_of_verl_and_vllm_is_listed(ours):
    listed = {symbol.name.partition(":")[0] for symbol in SYMBOLS if symbol.used_by.startswith(f"{ours}/")}
    imported = {}
    for path in (ROOT / ours).rglob("*.py"):
        tree = ast.parse(path.read_text())
        types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        for node in set(ast.walk(tree)) - {n for block in types for n in ast.walk(block)}:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("verl", "vllm"):
                for alias in node.names:
                    imported[f"{node.module}.{alias.name}"] = (node.module, path.name)
    tree = {package: SourceTree(source_root(package)) for package in ("verl", "vllm")}
    for name, (module, file) in imported.items():
        package = module.partition(".")[0]
        is_module = tree[package].problem(Symbol(f"{name}:")) is None
        defined_here = {module, name} if is_module else {module}
        through = {"vllm": {"vllm.sampling_params"}, "vllm.platforms": {"vllm.platforms.interface"}}.get(module, set())
        assert (defined_here | through) & listed, f"{file} imports {name}, which symbols.yaml does not list for {ours}"


def test_every_symbol_names_a_file_of_ours():
    assert all((ROOT / symbol.used_by).is_file() for symbol in SYMBOLS)


def test_mimo_hands_out_no_states_in_vllm():
    """Else its entry in `WITHOUT_STATES` can go."""
    tree = SourceTree(source_root("vllm"))
    for module, hands_out in (("qwen2:Qwen2Model", True), ("mimo:MiMoModel", False)):
        forward = Symbol(f"vllm.model_executor.models.{module}.forward", says=("aux_hidden_states",))
        assert (tree.problem(forward) is None) is hands_out, module
