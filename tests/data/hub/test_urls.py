"""Data over a real HTTP server on this machine: fetched once, and a server that does not answer ends in an error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from http_server import LocalServer

from strop.data import read_rows
from strop.data.entries import SUFFIXES
from strop.data.hub_rows import fetch
from strop.data.streaming import open_rows


@dataclass
class Site:
    """A web server of a few files."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the request that hangs."""


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0]
            served.asked.append(f"{self.command} {path}")
            if path not in served.files:
                self.send_error(404)
                return
            body = served.files[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hash(body)}"')
            self.end_headers()
            if with_body:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if "hangs" in path:
                    served.stop.wait(20)
                self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *args: object) -> None:
            pass

    server = LocalServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Site(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.stop.set()
        server.shutdown()
        server.server_close()


def lines(*numbers: int) -> bytes:
    return "".join(json.dumps({"x": number}) + "\n" for number in numbers).encode()


def test_files_of_a_web_server_are_fetched_once_and_again_when_they_changed(
    site: Site, tmp_path: Path
) -> None:
    url = f"{site.address}/set/train.jsonl?download=true"
    site.files["/set/train.jsonl"] = lines(1, 2)
    for _ in range(2):
        assert [row["x"] for row in read_rows([url], tmp_path)] == [1, 2]
    assert [row["x"] for row in open_rows([url], tmp_path)] == [1, 2]
    (copy,) = (tmp_path / "files").iterdir()
    assert [path.name for path in copy.iterdir()] == ["train.jsonl"]
    site.files["/set/train.jsonl"] = lines(1, 2, 3)
    assert [row["x"] for row in read_rows([url], tmp_path)] == [1, 2, 3]


def test_parquet_over_http(site: Site, tmp_path: Path) -> None:
    rows = [{"x": number} for number in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    site.files["/a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    assert read_rows([f"{site.address}/a.parquet"], tmp_path / "cache") == rows


def test_what_is_not_there_is_one_sentence(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.jsonl' cannot be fetched .*FileNotFound.*check the address"):
        read_rows([f"{site.address}/none.jsonl"], tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_port_where_nobody_listens_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=f"127.0.0.1:{port}/a.jsonl' cannot be fetched") as error:
        read_rows([f"http://127.0.0.1:{port}/a.jsonl"], tmp_path)
    assert "\n" not in str(error.value)


def test_a_server_that_never_answers_ends_within_the_limit(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.jsonl"
        with pytest.raises(ValueError, match=r"nothing was received for 0.3 s.*this machine can reach it"):
            fetch(url, SUFFIXES, tmp_path, silence_s=0.3)


def test_a_server_that_stops_in_the_middle_ends_and_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.files["/hangs.jsonl"] = lines(*range(1000))
    with pytest.raises(ValueError, match=r"nothing was received for 0.5 s"):
        fetch(f"{site.address}/hangs.jsonl", SUFFIXES, tmp_path, silence_s=0.5)
    assert not list((tmp_path / "files").iterdir())
