"""A model named on the hub: what an engine without the hub reads, and a drafter's other files, are fetched."""

import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading

import pytest

from verl_tlt.commands.doctor.standalone_engine import fetch_policy
from verl_tlt.drafter.model_files import NotHereError

COMMIT = "c" * 40
NAME = "Org/policy"
FETCH = """
from verl_tlt.commands.doctor.standalone_engine import fetch_policy
from verl_tlt.drafter import policy_shape
policy_shape("Org/policy")  # as a command's first check, which fetches the config alone
fetch_policy("Org/policy")
"""
READ = """
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from verl_tlt.commands.doctor.standalone_engine import fetch_policy
fetch_policy("Org/policy")
assert GenerationConfig.from_pretrained("Org/policy").eos_token_id == [7, 8]
AutoTokenizer.from_pretrained("Org/policy"), AutoModelForCausalLM.from_pretrained("Org/policy")
"""
FOLDER = """
import os
from verl_tlt.drafter.check import drafter_folder
print(*os.listdir(drafter_folder("Org/policy")))
"""
OTHER = """
from verl_tlt.commands.doctor.standalone_engine import fetch_policy
from verl_tlt.drafter.model_files import NotHereError
try: fetch_policy("Org/other")
except NotHereError as error: print(error)
"""
JUDGE = """
from verl_tlt.checks.models import check_recipe_drafter
from verl_tlt.config import TLTConfig
settings = TLTConfig.from_dict({{"drafter": {{"path": "Org/policy"}}}})
print(check_recipe_drafter(settings, "{}", 100).sentence)
"""


def digest(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def hub(policy_dir, tmp_path):
    """Serves the policy as the hub would; returns its address and the paths that it was asked for."""
    folder = shutil.copytree(policy_dir, tmp_path / "policy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    for useless in ("pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"):
        (folder / useless).parent.mkdir(exist_ok=True)
        (folder / useless).write_bytes(b"x")
    asked = []

    def content(path):
        """What the hub says to a request; None: there is no such file."""
        file = folder / path.partition("?")[0].split("/resolve/")[-1].partition("/")[2]
        there = {str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file()}
        if "/tree/" in path:
            rows = [{"type": "file", "path": name, "size": f.stat().st_size, "oid": digest(f.read_bytes())}
                    for name, f in there.items()]  # fmt: skip
            return json.dumps(rows).encode()
        if "/api/models/" in path:
            body = {"id": NAME, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0,
                    "siblings": [{"rfilename": name} for name in there]}  # fmt: skip
            return json.dumps(body).encode()
        return file.read_bytes() if "/resolve/" in path and file.is_file() else None

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = content(self.path)
            self.send_response(404 if found is None else 200)
            if found is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(found or b"")))
            self.send_header("ETag", f'"{digest(found or b"")}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found or b"")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


@pytest.fixture
def python(hub, tmp_path, monkeypatch):
    """Runs a program for which that hub is the only one, and whose cache is in `tmp_path`; returns what it prints."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub[0])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")

    def run(code):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_an_engine_without_the_hub_finds_all_that_it_reads(hub, python, tmp_path, monkeypatch):
    """A file that no engine needs may be missing."""
    asked = hub[1]
    (tmp_path / "policy" / "sample.py").touch()
    python(FETCH)
    (sample,) = (tmp_path / "cache").rglob("snapshots/*/sample.py")
    sample.unlink()
    there = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert {"generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= there
    assert not there & {"pytorch_model.bin", "consolidated.safetensors", "original"}
    before = len(asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    python(READ)
    assert len(asked) == before


def test_beside_a_drafters_weights_that_are_here_its_other_files_are_fetched(python, tmp_path):
    (tmp_path / "policy" / "provenance.json").write_text("{}")
    python('from huggingface_hub import hf_hub_download; hf_hub_download("Org/policy", "model.safetensors")')
    assert {"config.json", "provenance.json"} <= {*python(FOLDER).split()}


def test_a_head_of_which_the_hub_has_pickled_weights_alone_is_refused_before_the_run(python, tmp_path, policy_dir):
    (tmp_path / "policy" / "model.safetensors").unlink()
    (tmp_path / "policy" / "consolidated.safetensors").unlink()
    config = json.loads((policy_dir / "config.json").read_text())
    head = {"transformer_layer_config": config | {"num_hidden_layers": 1, "model_type": "llama"}}
    head |= {"speculators_model_type": "eagle3", "draft_vocab_size": config["vocab_size"]}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(head | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    assert "Org/policy has no safetensors on the hub: pickled weights are not" in python(JUDGE.format(policy_dir))


def test_a_file_that_the_hub_does_not_have_is_asked_for_once(hub, python):
    for programs in (FOLDER + FOLDER, FOLDER):  # what the first call fetched leads the second one to the hub once
        python(programs)
        assert sum("provenance.json" in path for path in hub[1]) == 1


def test_a_proxy_that_refuses_leaves_what_is_here_and_is_one_sentence(hub, python, monkeypatch):
    python(FETCH)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", hub[0])  # which knows no CONNECT
    said = python(FOLDER + OTHER)
    assert "model.safetensors" in said and "Org/other is no folder here and could not be fetched: " in said


def test_without_a_hub_what_is_missing_is_one_sentence(cache, tmp_path, policy_dir):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    shutil.copy(policy_dir / "config.json", snapshot)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(policy_dir / "model.safetensors", snapshot / "model-1.safetensors")
    with pytest.raises(NotHereError, match=r"^Org/policy: model-2\.safetensors is not in the local cache"):
        fetch_policy(cache(NAME, snapshot))
    fetch_policy(policy_dir)  # a folder is what it is
