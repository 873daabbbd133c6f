"""A hub on loopback that speaks the protocol of the Hugging Face hub, for its real client: information on a model,
files by HEAD and GET with ETag, commit, redirect and Range, search, and the refusals; and for what is sent, a model
that is made, large files by the batch protocol of Git LFS, and a commit of all of them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import datasets.config
import huggingface_hub.constants as constants
import pytest
from http_server import LocalServer

CHUNK = 1 << 14


@dataclass
class StandIn:
    """What the hub has, how it misbehaves, and what it was asked."""

    address: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Of each ORG/NAME, the files of each commit; the last one is main."""
    gated: set[str] = field(default_factory=set)
    """Given with the token `right` alone."""
    break_after: int = 0
    """Bytes after which the next long body breaks off; once."""
    silent: bool = False
    """Bodies of weights never end."""
    slow_s: float = 0.0
    """Pause between pieces of weights, in seconds."""
    asked: list[str] = field(default_factory=list)
    """METHOD and path of every request."""
    private: set[str] = field(default_factory=set)
    """Models that were made so."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Contents of large files that were sent, by their SHA-256."""
    spoils: bool = False
    """Of a large file, the hub keeps other contents than it was sent."""
    messages: list[str] = field(default_factory=list)
    """Of the commits that were sent."""

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """A new commit of a model; its hash."""
        state = hashlib.sha1(usedforsecurity=False)
        for path, body in sorted(files.items()):
            state.update(f"{path} {len(body)}".encode() + body)
        commit = state.hexdigest()
        self.models.setdefault(name, {})[commit] = files
        return commit

    def add_folder(self, name: str, folder: Path, **more: bytes) -> str:
        """A new commit with the files of a folder."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.add(name, files | more)

    def bodies(self) -> list[str]:
        """The files whose contents were sent."""
        return [
            line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/api/" not in line
        ]


def _handler(hub: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            oid = self.path.rpartition("/")[2]
            hub.asked.append(f"PUT {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hub.large[oid] = body[::-1] if hub.spoils else body
            self._head(200, {"Content-Length": "0"})

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"POST {path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            words = path.strip("/").split("/")
            if self.headers.get("Authorization") != "Bearer right":
                return self._error(401, "Unauthorized")
            if path == "/api/repos/create":
                return self._make(json.loads(body))
            if path == "/api/validate-yaml":
                return self._json({"errors": [], "warnings": []})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self._json(
                    {"transfer": "basic", "objects": list(map(self._wanted, json.loads(body)["objects"]))}
                )
            if words[4] == "preupload":
                files = [{"path": one["path"], "shouldIgnore": False, "uploadMode": _mode(one["path"])}
                         for one in json.loads(body)["files"]]  # fmt: skip
                return self._json({"files": files})
            assert words[4:] == ["commit", "main"], path
            return self._commit_of("/".join(words[2:4]), body)

        def _make(self, asked: dict[str, object]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.models:
                return self._json({"error": "it exists", "url": f"{hub.address}/{name}"}, 409)
            hub.models[name] = {"0" * 40: {}}
            hub.private |= {name} if asked.get("visibility") == "private" else set()
            return self._json({"url": f"{hub.address}/{name}", "name": name})

        def _wanted(self, one: dict[str, object]) -> dict[str, object]:
            action = {"href": f"{hub.address}/large/{one['oid']}", "header": {}}
            return {**one, "actions": {"upload": action}}

        def _commit_of(self, name: str, body: bytes) -> None:
            files = dict(list(hub.models[name].values())[-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                else:
                    del files[value["path"]]
            commit = hub.add(name, files)
            self._json(
                {"success": True, "commitOid": commit, "commitUrl": f"{hub.address}/{name}/commit/{commit}"}
            )

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            hub.asked.append(f"{self.command} {unquote(parts.path)}")
            words = unquote(parts.path).strip("/").split("/")
            if words[0] == "datasets":  # a data set ORG/NAME is kept as the model datasets/ORG/NAME
                words = ["/".join(words[:2]), *words[2:]]
            if words[:2] == ["api", "models"]:
                self._api(words[2:], parse_qs(parts.query))
            elif words[:2] == ["api", "datasets"]:
                self._api(["/".join(words[1:3]), *words[3:]], parse_qs(parts.query))
            elif words[0] == "cdn":
                self._body(hub.models["/".join(words[1:3])][words[3]]["/".join(words[4:])])
            elif words[2:3] != ["resolve"]:
                self._error(404, "EntryNotFound")
            else:
                self._file("/".join(words[:2]), words[3], "/".join(words[4:]))

        def _api(self, words: list[str], query: dict[str, list[str]]) -> None:
            if not words:
                search, author = query.get("search", [""])[0], query.get("author", [""])[0]
                found = [
                    name for name in hub.models if search.lower() in name.lower() and name.startswith(author)
                ]
                return self._json([{"id": name, "modelId": name} for name in found])
            name = "/".join(words[:2])
            if self._is_refused(name):
                return None
            if words[2:3] == ["tree"]:
                here = hub.models[name].get(words[3]) or list(hub.models[name].values())[-1]
                below = "".join(f"{word}/" for word in words[4:])
                found = [{"type": "file", "oid": "", "size": len(body), "path": path}
                         for path, body in here.items() if path.startswith(below)]  # fmt: skip
                return self._json(found) if found or not below else self._error(404, "EntryNotFound")
            if words[2:] == ["refs"]:
                commit = list(hub.models[name])[-1]
                main = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit}
                return self._json({"branches": [main], "tags": [], "converts": []})
            commit = self._commit(name, words[3] if words[2:3] == ["revision"] else "main")
            if commit is not None:
                files = hub.models[name][commit]
                siblings = [_sibling(path, body) for path, body in files.items()]
                self._json(
                    {"id": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
                )
            return None

        def _commit(self, name: str, revision: str) -> str | None:
            commits = list(hub.models[name])
            commit = commits[-1] if revision == "main" else revision
            if commit in commits:
                return commit
            self._error(404, "RevisionNotFound")
            return None

        def _is_refused(self, name: str) -> bool:
            if name not in hub.models:
                self._error(404, "RepoNotFound")
            elif name in hub.gated and self.headers.get("Authorization") != "Bearer right":
                self._error(401, "GatedRepo")
            else:
                return False
            return True

        def _file(self, name: str, revision: str, path: str) -> None:
            if self._is_refused(name) or (commit := self._commit(name, revision)) is None:
                return None
            body = hub.models[name][commit].get(path)
            if body is None:
                return self._error(404, "EntryNotFound")
            facts = {"X-Repo-Commit": commit}
            if path.endswith(".safetensors"):
                etag = hashlib.sha256(body).hexdigest()
                facts |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(body))}
                elsewhere = hub.address.replace(
                    "127.0.0.1", "localhost"
                )  # redirects within the hub are followed
                facts |= {"Location": f"{elsewhere}/cdn/{name}/{commit}/{path}", "Content-Length": "0"}
                self._head(302, facts)
                return None
            return self._body(
                body, facts | {"ETag": f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"'}
            )

        def _body(self, body: bytes, facts: dict[str, str] | None = None) -> None:
            start, status = 0, 200
            asked = self.headers.get("Range", "")
            extra = dict(facts or {})
            if asked.startswith("bytes="):
                start, status = int(asked[6:].partition("-")[0]), 206
                extra["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self._head(status, {"Content-Length": str(len(body) - start), "Accept-Ranges": "bytes"} | extra)
            if self.command == "HEAD":
                return
            is_weights = facts is None
            for at in range(start, len(body), CHUNK):
                if is_weights and hub.silent and at:
                    time.sleep(30)
                if is_weights and hub.break_after and at >= hub.break_after:
                    hub.break_after = 0
                    self.close_connection = True
                    return
                self.wfile.write(body[at : at + CHUNK])
                time.sleep(hub.slow_s if is_weights else 0)

        def _json(self, value: object, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(text))})
            self.wfile.write(text)

        def _error(self, status: int, code: str) -> None:
            self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def _sibling(path: str, body: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": path, "size": len(body)}
    if path.endswith(".safetensors"):
        digest = hashlib.sha256(body).hexdigest()
        entry["lfs"] = {"sha256": digest, "oid": digest, "size": len(body), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def serving() -> Iterator[StandIn]:
    """A hub while it lasts."""
    hub = StandIn()
    server = LocalServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def asked_here(cache: Path, patch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub that the client in this process asks, with a cache of its own."""
    with serving() as stand_in:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, stand_in.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", stand_in.address)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(
            constants, "HF_HUB_DISABLE_XET", True
        )  # a protocol of its own, between two compiled programs
        patch.setenv("HF_TOKEN", "")
        patch.setattr(datasets.config, "HF_ENDPOINT", stand_in.address)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield stand_in


def go_offline(patch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 would say to both clients at their import."""
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub that the client in this process asks, for one test."""
    with asked_here(tmp_path / "cache", monkeypatch) as stand_in:
        yield stand_in
