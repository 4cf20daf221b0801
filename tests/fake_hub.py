"""A hub on loopback: as much of its interface as a download uses, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """Repositories and what happens to requests.

    Attributes:
        repos: files by repository and name, all of them of one commit.
        announced: contents that are described in place of those that are sent.
        gated: repositories that want a token.
        status: an answer to everything, 0 for none.
        cut_after: bytes of a file's body after which the connection breaks, once for each file.
        requests: (method, path, Range header) of everything that was asked.
    """

    repos: dict[str, dict[str, bytes]]
    announced: dict[str, bytes] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    status: int = 0
    cut_after: int = 0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    url: str = ""

    def names_sent(self) -> list[str]:
        """Return the files whose content was asked for, in order."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status:
            self._send(hub.status, b"", {}, with_body)
            return
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = "/".join(parts[:2])
        if repo in hub.gated and self.headers.get("Authorization") != "Bearer good":
            self._fail(401, "GatedRepo", "Access to this model is restricted.", with_body)
        elif repo not in hub.repos:
            self._fail(401, "RepoNotFound", "Repository not found", with_body)
        elif is_api:
            self._describe(repo, parts[-1], with_body)
        else:
            self._file(repo, parts[3], "/".join(parts[4:]), with_body)

    def _describe(self, repo: str, revision: str, with_body: bool) -> None:
        if revision not in ("main", "v1", COMMIT):
            self._fail(404, "RevisionNotFound", "Invalid rev id", with_body)
            return
        siblings = []
        for name, content in self.hub.repos[repo].items():
            said = self.hub.announced.get(name, content)
            entry: dict[str, Any] = {"rfilename": name, "size": len(said), "blobId": "b" * 40}
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(said).hexdigest()
                entry["lfs"] = {"size": len(said), "sha256": digest, "pointerSize": 134}
            siblings.append(entry)
        block = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(block).encode(), {"Content-Type": "application/json"}, with_body)

    def _file(self, repo: str, revision: str, name: str, with_body: bool) -> None:
        content = self.hub.repos[repo].get(name)
        if content is None:
            self._fail(404, "EntryNotFound", "Entry not found", with_body)
            return
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status, asked = 200, self.headers.get("Range")
        body = content
        if asked:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            status, body = 206, content[start:]
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.hub.cut_after
        if with_body and 0 < cut < len(body) and name not in self.hub.cut:
            self.hub.cut.add(name)
            self._send(status, body[:cut], headers | {"Content-Length": str(len(body))}, with_body)
            self.close_connection = True
            return
        self._send(status, body, headers, with_body)

    def _fail(self, status: int, code: str, text: str, with_body: bool) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": text}
        self._send(status, json.dumps({"error": text}).encode(), headers, with_body)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serve_hub(repos: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """Serve repositories on a free port of loopback while the block runs."""
    hub = FakeHub(repos)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
