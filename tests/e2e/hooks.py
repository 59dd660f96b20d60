"""A reward webhook on this machine: what it is asked is kept, what it answers is up to the path.

`/letters` scores a completion 1.0 if it has one of the letters of `LETTERS`. `/script/<name>` gives all items
of its n-th call the n-th score of the script, so that a test knows every evaluation beforehand.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.stacks import LETTERS


class Hook:
    def __init__(self) -> None:
        self.asked: dict[str, list[list[dict[str, Any]]]] = {}
        self._scripts: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                items = json.loads(self.rfile.read(int(self.headers["content-length"])))["items"]
                answer = json.dumps({"scores": hook._scores(self.path, items)}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def letters(self) -> dict[str, Any]:
        """The reward as a request names it."""
        return {"kind": "webhook", "url": f"{self.url}/letters", "batch_size": 2}

    def script(self, name: str, *scores: float) -> dict[str, Any]:
        """A reward that gives each call the next of `scores`."""
        self._scripts[f"/script/{name}"] = list(scores)
        return {"kind": "webhook", "url": f"{self.url}/script/{name}", "timeout_s": 60}

    def _scores(self, path: str, items: list[dict[str, Any]]) -> list[float]:
        with self._lock:
            calls = self.asked.setdefault(path, [])
            calls.append(items)
            if path in self._scripts:
                return [self._scripts[path][len(calls) - 1]] * len(items)
        return [letters(item["completion"]) for item in items]


def letters(completion: str) -> float:
    """What `LETTERS` is worth."""
    return float(re.search(LETTERS["pattern"], completion) is not None)
