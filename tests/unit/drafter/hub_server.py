"""A Hugging Face hub of one's own: a few files of a few models, over HTTP, as `huggingface_hub` asks for them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serving(models: Mapping[str, Mapping[str, bytes]], gated: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Serve {name: {file: content}}; yields the address for `HF_ENDPOINT` and the paths asked for, as they come."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0].lstrip("/")
            name = next((n for n in (*models, *gated) if path.startswith((f"{n}/", f"api/models/{n}"))), None)
            if name is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if name in gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            files = models[name]
            if "/tree/" in path:
                rows = [{"type": "file", "path": f, "size": len(c), "oid": _sha(c)} for f, c in files.items()]
                return self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
            if path.startswith("api/"):
                info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            content = files.get(path.rpartition("/")[2])
            if content is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            self._send(200, content, {"ETag": f'"{_sha(content)}"', "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()


def _sha(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
