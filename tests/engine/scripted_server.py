"""A small HTTP server on loopback whose answers a test scripts: path to a list of (status, body), the last one repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ppd_bench.core.enums import Role
from ppd_bench.engine.endpoints import Endpoint

Script = dict[str, list[tuple[int, str]]]


@contextmanager
def scripted_server(script: Script, *, worker_id: str = "D0") -> Iterator[tuple[Endpoint, list[str]]]:
    """The server's endpoint and the list of requests that it got (``METHOD path?query``)."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append(f"{self.command} {self.path}")
            answers = script.get(f"{self.command} {self.path.partition('?')[0]}", [(404, "")])
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Endpoint(worker_id=worker_id, role=Role.DECODE, host="127.0.0.1", port=server.server_port), seen
        finally:
            server.shutdown()
            thread.join()
