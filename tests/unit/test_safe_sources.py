"""Nothing in the package can run what it reads, maps files, listens on the network or hands text to a shell.

Found in source.
"""

import ast
from pathlib import Path

import verl_tlt

ROOT = Path(verl_tlt.__file__).parents[1]
FOLDERS = ("verl_tlt", "verl_cpu", "demo", "recipes", "examples")
MODULES = {
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve",  # run what they read
    "socket", "socketserver", "http", "xmlrpc", "uvicorn", "fastapi", "flask", "aiohttp", "websockets",  # listen
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "pty.spawn", "runpy.run_path",
    "torch.load", "torch.save", "torch.jit.load", "np.load", "numpy.load", "pd.read_pickle", "np.save",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "tempfile.mktemp", "importlib.import_module",
    "safe_open", "load_file", "np.memmap",  # a mapped file that becomes shorter ends who reads it
}  # fmt: skip
FLAGS = ("shell", "trust_remote_code", "allow_pickle", "allow_dangerous_deserialization")
ALLOWED = {
    # Names of ours, and of the function that a user names in vLLM's arguments.
    "verl_tlt/drafter/__init__.py": {"importlib.import_module"},
    "verl_tlt/engine_core/scheduler.py": {"importlib.import_module"},
    "demo/toy/widen.py": {"load_file"},  # of a policy that the demo has just written
    "verl_tlt/commands/warmup/prompts.py": {"trust_remote_code=trusted"},  # as the recipe or the command line says
    # Passed on as verl's own loader has it.
    "verl_cpu/verl_shims.py": {"trust_remote_code=trust_remote_code"},
}


def offences(source):
    """What a module does that needs a reason, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield name
            if name.rpartition(".")[2] in ("bind", "listen", "start_server", "create_server"):
                yield f"listens: {ast.unparse(node)}"
            for keyword in node.keywords:
                if keyword.arg in FLAGS and ast.unparse(keyword.value) != "False":
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"


FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_module_runs_what_it_reads_or_listens():
    assert len(FILES) > 150
    found = {str(path.relative_to(ROOT)): set(offences(path.read_text())) for path in FILES}
    assert {path: what for path, what in found.items() if what} == ALLOWED


def test_hidden_states_are_not_written_to_a_disk():
    """Where they pass, nothing is opened; drafters are saved in `drafter`."""
    paths = [path for room in ("actor", "spot_worker") for path in sorted((ROOT / "verl_tlt" / room).rglob("*.py"))]
    calls = [n for path in paths for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    writes = {"open", "fdopen", "write", "write_text", "write_bytes", "save_file", "tofile"}
    assert len(names) > 100 and not names & writes and not any("temp" in name.lower() for name in names)


OFFENCES = (
    "import pickle", "from http.server import HTTPServer", "torch.load(file)", "np.load(file)", "eval(text)",
    "safe_open(file, 'pt')",
    "subprocess.run(words, shell=True)", "yaml.load(text, Loader=yaml.Loader)", "server.bind('tcp://*:5555')",
    "AutoModel.from_pretrained(path, trust_remote_code=True)",
)  # fmt: skip
HARMLESS = "model.eval()", "run(words)", "from_pretrained(path, trust_remote_code=False)", "yaml.safe_load(text)"


def test_the_test_sees_an_offence():
    assert all(list(offences(source)) for source in OFFENCES) and not any(list(offences(s)) for s in HARMLESS)
