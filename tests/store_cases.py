"""Stores on loopback for the real clients of fsspec: S3 and Google Cloud Storage as processes of their own (moto,
gcp-storage-emulator), WebHDFS and a web server in this one; each behind a relay that breaks connections."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from http_server import LocalServer

Patch = pytest.MonkeyPatch
PIECE = 1 << 13


class Relay:
    """Hands bytes on between clients and a server."""

    def __init__(self, target: int) -> None:
        self._target, self._left, self._is_stopped, self._once = target, -1, False, False
        self.slow_s = 0.0
        """Pause before each piece of an answer, in seconds."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, num_bytes: int, *, once: bool = False) -> None:
        """Cut every connection, or one, once the server has sent so many bytes from now on."""
        self._left, self._once = num_bytes, once

    def mend(self) -> None:
        """Break nothing any more."""
        self._left = -1

    def stop(self) -> None:
        self._is_stopped = True
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_stopped:
            with contextlib.suppress(OSError):
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target), 5)
                threading.Thread(target=self._hand_on, args=(near, far), daemon=True).start()

    def _hand_on(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):
            while not self._is_stopped:
                for one in select.select([near, far], [], [], 0.2)[0]:
                    piece = one.recv(PIECE)
                    if not piece:
                        return
                    time.sleep(self.slow_s if one is far else 0)
                    if one is far and self._left >= 0:
                        if self._left < len(piece):
                            self._left = -1 if self._once else 0
                            return
                        self._left -= len(piece)
                    (near if one is far else far).sendall(piece)


class Store(Protocol):
    """What the tests ask of each of them."""

    relay: Relay
    root: str
    """URL of a folder, which exists once something is put below it."""
    elsewhere: str
    """URL of a folder in a bucket, or below a root, that does not exist."""
    denial: str
    """What the sentence says once it is closed, as a pattern."""

    def put(self, name: str, body: bytes) -> None:
        """Write the file `name` below the root."""

    def close(self) -> None:
        """From now on it gives us nothing."""


@contextlib.contextmanager
def process(*words: str) -> Iterator[int]:
    """A server process of the Python that STROP_STORE_SERVERS names; its port stands for PORT in its words."""
    python = os.environ.get("STROP_STORE_SERVERS", "")
    if not python:
        pytest.skip("no STROP_STORE_SERVERS: `make stores` installs the servers and names their Python there")
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    arguments = [python, *(word.replace("PORT", str(port)) for word in words)]
    running = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            assert running.poll() is None, f"{words} ended with {running.returncode}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield port
    finally:
        running.terminate()
        running.wait(20)


class _OfClient:
    """A store that is written through the client that reads it."""

    kind = ""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay

    def _system(self) -> Any:
        """The client, knowing of nothing that it saw before."""
        system: Any = importlib.import_module("fsspec").filesystem(self.kind, skip_instance_cache=True)
        type(system).clear_instance_cache()
        return system

    def put(self, name: str, body: bytes) -> None:
        self._system().pipe(f"bucket/folder/{name}", body)


class S3(_OfClient):
    """moto, through s3fs; a client without credentials is refused before it asks."""

    kind, root, elsewhere = "s3", "s3://bucket/folder", "s3://nobodys/folder"
    denial = r"credentials.*AWS_ACCESS_KEY_ID"

    def __init__(self, relay: Relay, patch: Patch) -> None:
        super().__init__(relay)
        self._patch = patch
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_CONFIG_FILE": os.devnull,
        }.items():  # fmt: skip
            patch.setenv(name, value)
        self._system().mkdir("bucket")

    def close(self) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            self._patch.delenv(name)
        self._system()


class Google(_OfClient):
    """gcp-storage-emulator, through gcsfs; it knows no permissions, so the relay's server answers 403 once closed."""

    kind, root, elsewhere = "gs", "gs://bucket/folder", "gs://nobodys/folder"
    denial = r"Forbidden.*GOOGLE_APPLICATION_CREDENTIALS"

    def __init__(self, relay: Relay, patch: Patch) -> None:
        super().__init__(relay)
        self._patch = patch
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{relay.port}")
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
        self._system()

    def close(self) -> None:
        server = serve(_Forbidding)
        self._patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
        self._system()


def serve(handler: Any) -> LocalServer:
    """A server of this process; daemon threads end with it."""
    server = LocalServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Forbidding(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # what the client of Google asks with
        body = json.dumps({"error": {"code": 403, "message": "you may not"}}).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


class Web:
    """Python's web server of files, through fsspec's own client; pages of folders are its listings."""

    denial = r"403.*the store asks who you are"

    def __init__(self, folder: Path) -> None:
        self._folder, self.is_closed = folder, False
        store = self

        class Handler(SimpleHTTPRequestHandler):
            def send_head(self) -> Any:
                if store.is_closed:
                    self.send_error(403)
                    return None
                return super().send_head()

            def log_message(self, *words: object) -> None:
                pass

        self._server = serve(partial(Handler, directory=str(folder)))
        self.relay = Relay(self._server.server_address[1])
        self.root = f"http://127.0.0.1:{self.relay.port}/folder"
        self.elsewhere = f"http://127.0.0.1:{self.relay.port}/nobodys"

    def put(self, name: str, body: bytes) -> None:
        path = self._folder / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat().st_mtime if path.exists() else time.time()
        path.write_bytes(body)
        os.utime(path, (before + 5, before + 5))  # Last-Modified has whole seconds

    def close(self) -> None:
        self.is_closed = True

    def stop(self) -> None:
        self.relay.stop()
        self._server.shutdown()
        self._server.server_close()


class Hdfs:
    """A name node and a data node that speak WebHDFS, for fsspec's own client: status, listing, and reading by way of
    a redirect.

    Source: Apache Hadoop, WebHDFS REST API.
    """

    denial = r"Permission denied.*the store asks who you are"

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        """Of each path, contents and time of change in milliseconds."""
        self.is_closed = False
        self._time = 1_700_000_000_000
        self._server = serve(_hdfs_handler(self))
        self.relay = Relay(self._server.server_address[1])
        self.root = f"webhdfs://127.0.0.1:{self.relay.port}/bucket/folder"
        self.elsewhere = f"webhdfs://127.0.0.1:{self.relay.port}/nobodys/folder"

    def put(self, name: str, body: bytes) -> None:
        self._time += 1
        self.files[f"/bucket/folder/{name}"] = body, self._time

    def close(self) -> None:
        self.is_closed = True

    def stop(self) -> None:
        self.relay.stop()
        self._server.shutdown()
        self._server.server_close()

    def status(self, path: str) -> dict[str, Any] | None:
        """FileStatus of a file or folder; None where there is none."""
        name = path.rpartition("/")[2]
        if path in self.files:
            body, changed = self.files[path]
            return {"pathSuffix": name, "type": "FILE", "length": len(body), "modificationTime": changed}
        if any(file.startswith(f"{path.rstrip('/')}/") for file in self.files):
            return {"pathSuffix": name, "type": "DIRECTORY", "length": 0, "modificationTime": 0}
        return None

    def below(self, path: str) -> list[dict[str, Any]]:
        """FileStatus of what lies in a folder."""
        start = f"{path.rstrip('/')}/"
        names = {file.removeprefix(start).partition("/")[0] for file in self.files if file.startswith(start)}
        found = [self.status(start + name) for name in sorted(names)]
        return [one for one in found if one is not None]


def _hdfs_handler(store: Hdfs) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            path = unquote(parts.path).removeprefix("/webhdfs/v1").removeprefix("/data") or "/"
            status, operation = store.status(path), query["op"]
            if store.is_closed:
                self._refuse(403, "AccessControlException", f"Permission denied: user=dr.who, path={path}")
            elif status is None:
                self._refuse(404, "FileNotFoundException", f"File does not exist: {path}")
            elif operation == "GETFILESTATUS":
                self._json({"FileStatus": {**status, "pathSuffix": ""}})
            elif operation == "LISTSTATUS":
                self._json({"FileStatuses": {"FileStatus": store.below(path)}})
            elif parts.path.startswith("/webhdfs"):
                self._answer(
                    307, b"", Location=f"http://127.0.0.1:{store.relay.port}/data{path}?{parts.query}"
                )
            else:
                start = int(query["offset"])
                self._answer(200, store.files[path][0][start : start + int(query["length"])])

        def _json(self, value: object, status: int = 200) -> None:
            self._answer(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

        def _refuse(self, status: int, kind: str, message: str) -> None:
            self._json({"RemoteException": {"exception": kind, "message": message}}, status)

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextlib.contextmanager
def opened(kind: str, folder: Path, patch: Patch) -> Iterator[Store]:
    """A store of a kind: web, hdfs, s3 or google.

    Args:
        kind: which.
        folder: for its files, and for the copies of strop below HOME.
        patch: of the environment of this process.
    """
    patch.setenv("HOME", str(folder / "home"))
    if kind in ("web", "hdfs"):
        store = Web(folder / "web") if kind == "web" else Hdfs()
        try:
            yield store
        finally:
            store.stop()
        return
    pytest.importorskip({"s3": "s3fs", "google": "gcsfs"}[kind], reason="`make stores` installs it")
    words = {
        "s3": ("-m", "moto.server", "-H", "127.0.0.1", "-p", "PORT"),
        "google": ("-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", "PORT", "--in-memory",
                   "--default-bucket", "bucket"),
    }[kind]  # fmt: skip
    with process(*words) as port:
        relay = Relay(port)
        try:
            yield S3(relay, patch) if kind == "s3" else Google(relay, patch)
        finally:
            relay.stop()
