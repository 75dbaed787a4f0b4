"""A stand-in for the Hub of Hugging Face: real HTTP, with ranges, tokens, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository at one commit."""

    files: dict[str, bytes]
    name: str = "lab/tiny"
    kind: str = "models"
    """Or datasets."""
    other_revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Revisions with files of their own."""
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    token: str = ""
    """Needed, unless empty."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """File to the bytes after which its next answer ends, once."""
    damaged: set[str] = field(default_factory=set)
    """Files whose next answer has another content of the same length."""
    failures: int = 0
    """So many requests are answered with 503 first."""
    pause_after: dict[str, int] = field(default_factory=dict)
    """File to the bytes after which its next answer stands still, until `resume`."""
    resume: threading.Event = field(default_factory=threading.Event)
    stand_still: bool = False
    """No file is sent before `resume`."""
    fetched: list[str] = field(default_factory=list)
    """Files that were asked for."""
    ranges: list[str] = field(default_factory=list)
    """Range headers of GETs, as they came."""
    url: str = ""

    def files_at(self, revision: str) -> dict[str, bytes]:
        """What a revision, or its commit, holds."""
        for name, files in self.other_revisions.items():
            if revision in (name, commit_of(name)):
                return files
        return self.files

    def listed(self, revision: str = "main") -> list[dict[str, Any]]:
        """As the API lists the tree."""
        entries = []
        for path, content in self.files_at(revision).items():
            blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
            entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
            if path.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return entries


def commit_of(revision: str) -> str:
    """The commit of a revision with files of its own."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """While the block runs, `hub.url` is its address."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.resume.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        if hub.failures:
            hub.failures -= 1
            return self._send(503, b"busy")
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound")
        if match := re.fullmatch(rf"/api/{hub.kind}/{hub.name}(?:/(revision|tree)/([^/]+))?", path):
            revision = unquote(match[2] or "main")
            others = {*hub.other_revisions, *map(commit_of, hub.other_revisions)}
            if revision not in {*hub.revisions, *others}:
                return self._refuse(404, "RevisionNotFound")
            listed = hub.listed(revision)
            if match[1] == "tree":
                return self._json(listed)
            siblings = [{"rfilename": each["path"], "size": each["size"]} for each in listed]
            commit = commit_of(revision) if revision in hub.other_revisions else COMMIT
            return self._json({"id": hub.name, "sha": commit, "siblings": siblings, "tags": []})
        place = "" if hub.kind == "models" else f"{hub.kind}/"
        if match := re.fullmatch(rf"/{place}{hub.name}/resolve/([^/]+)/(.+)", path):
            files = hub.files_at(match[1])
            if match[2] in files:
                own = match[1] if files is not hub.files else COMMIT
                return self._file(match[2], files[match[2]], own)
            return self._refuse(404, "EntryNotFound")
        return self._refuse(404, "RepoNotFound")

    def _file(self, name: str, content: bytes, commit: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if self.command == "HEAD":
            return self._send(200, content, headers)
        self.hub.fetched.append(name)
        if self.hub.stand_still:
            self.hub.resume.wait(120.0)
        wanted = self.headers.get("Range")
        start, code = 0, 200
        if wanted:
            self.hub.ranges.append(wanted)
            start, code = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if name in self.hub.damaged:
            self.hub.damaged.remove(name)
            content = content[:-1] + bytes([content[-1] ^ 1])
        body = content[start:]
        headers["Content-Length"] = str(len(body))
        paused = self.hub.pause_after.pop(name, None)
        cut = self.hub.cut_after.pop(name, paused)
        self._send(code, body[:cut], headers)
        if paused is not None:
            self.hub.resume.wait(120.0)
        self.close_connection = cut is not None
        return None

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: int, error: str) -> None:
        self._send(code, b"", {"X-Error-Code": error, "X-Error-Message": error})

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
