"""No module runs what it reads: nothing is unpickled, evaluated or loaded with code of the model's own."""

import ast
from pathlib import Path

import verl_tlt

ROOT = Path(verl_tlt.__file__).parents[1]
FOLDERS = ("verl_tlt", "verl_cpu", "demo", "tests/toy", "recipes", "examples")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    "eval", "exec", "os.system", "os.popen", "torch.load", "torch.jit.load", "np.load", "numpy.load",
    "pd.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
}  # fmt: skip
FLAGS = ("shell", "trust_remote_code", "allow_pickle")
ALLOWED = {
    "verl_cpu/verl_shims.py": {"trust_remote_code=trust_remote_code"},  # as verl's own loader has it
}


def offences(source):
    """What a module does that needs a reason, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                yield name
            for keyword in node.keywords:
                if keyword.arg in FLAGS and ast.unparse(keyword.value) != "False":
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def test_no_module_runs_what_it_reads():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): set(offences(path.read_text())) for path in files}
    unexpected = {path: what - ALLOWED.get(path, set()) for path, what in found.items()}
    assert not {path: what for path, what in unexpected.items() if what}
