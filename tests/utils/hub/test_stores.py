"""Models and rows at URLs, through the real clients of fsspec and servers on loopback."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.arrow import ArrowFSWrapper, HadoopFileSystem
from fsspec.registry import _registry as loaded_clients
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from store_cases import Store, opened

from strop.data.hub_rows import fetch
from strop.run import RunConfig, RunFolder
from strop.trainer.run_mirror import RunMirror, fetch_run
from strop.utils.hub.models import Fetch, Fetched, fetch_model, hashes
from strop.utils.hub.repo import Sending
from strop.utils.hub.sending import destination

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "additional_chat_templates/own.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"another form",
}  # fmt: skip
NEEDED = [".url", "additional_chat_templates/own.jinja", "config.json", "model.safetensors", "tokenizer.json"]
KINDS = [
    "web", "hdfs", pytest.param("s3", marks=pytest.mark.stores), pytest.param("google", marks=pytest.mark.stores),
]  # fmt: skip


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with opened(request.param, tmp_path, monkeypatch) as one:
        for name, body in FILES.items():
            one.put(name, body)
        yield one


def get(url: str, **how: object) -> Fetched:
    return fetch_model(url, Fetch(silence_s=20.0, **how))  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_model_is_fetched_once_for_each_state_and_named_by_it(store: Store) -> None:
    said: list[str] = []
    first = get(store.root, say=said.append)
    assert names(Path(first.folder)) == NEEDED
    assert hashes(Path(first.folder))["model.safetensors"]["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert said[0].startswith(f"fetching {store.root} ({first.revision[:12]}): 1024 KiB into ")
    assert said[-1] == f"fetched {store.root}: 4 files"
    said.clear()
    assert get(store.root, say=said.append) == first
    assert said == [], "nothing is fetched again"
    store.put("model.safetensors", WEIGHTS[::-1])  # of the same size
    second = get(store.root)
    assert second.revision != first.revision
    assert (Path(second.folder) / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    store.close()
    assert get(store.root, offline=True) == second


def test_settings_alone_and_then_the_weights_too(store: Store) -> None:
    first = get(store.root, weights=False)
    assert "model.safetensors" not in names(Path(first.folder))
    assert get(store.root) == first
    assert names(Path(first.folder)) == NEEDED


def test_a_connection_that_breaks_leaves_nothing_that_looks_whole(store: Store, tmp_path: Path) -> None:
    get(store.root, weights=False)
    store.relay.break_after(len(WEIGHTS) // 2)
    # Clients of object stores ask again for minutes: silence ends that.
    with pytest.raises(ValueError, match=r"cannot be fetched: [^\n]*(broke off after|received)[^\n]+$"):
        fetch_model(store.root, Fetch(silence_s=3.0))
    cache = tmp_path / "home" / ".cache" / "strop" / "models"
    assert not list(cache.rglob("model.safetensors"))
    store.relay.mend()
    whole = get(store.root)
    assert (Path(whole.folder) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.stores
@pytest.mark.parametrize("store", ["s3", "google"], indirect=True)
def test_clients_of_object_stores_go_on_after_a_connection_that_breaks_once(store: Store) -> None:
    get(store.root, weights=False)
    store.relay.break_after(len(WEIGHTS) // 2, once=True)
    assert (Path(get(store.root).folder) / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_not_there_or_not_for_us_is_one_sentence(store: Store) -> None:
    for url in (store.elsewhere, f"{store.root}/none"):
        with pytest.raises(ValueError, match=r"cannot be fetched: [^\n]*check the address$"):
            get(url)
        with pytest.raises(ValueError, match=r"cannot be fetched \([^\n]*check the address$"):
            fetch(f"{url}/rows.jsonl", (".jsonl",), silence_s=20.0)
    with pytest.raises(ValueError, match="it is a file: give the address of the model's folder"):
        get(f"{store.root}/model.safetensors")
    store.close()
    with pytest.raises(ValueError, match=store.denial):
        get(store.root)
    with pytest.raises(ValueError, match=store.denial):
        fetch(f"{store.root}/config.json", (".json",), silence_s=20.0)


@pytest.mark.stores
@pytest.mark.parametrize("store", ["s3", "google"], indirect=True)
def test_a_store_that_takes_nothing_says_so_before_anything_is_sent(store: Store, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=[], settings=RunConfig()) as run:

        def refused(pattern: str, url: str) -> None:
            with pytest.raises(ValueError, match=f"--to '{url}' takes nothing: [^\n]*{pattern}"):
                destination(url, Sending())
            with pytest.raises(ValueError, match=f"run.copy_to '{url}' takes nothing: [^\n]*{pattern}"):
                RunMirror(run, url)

        refused("there is no bucket nobodys: make it first", store.elsewhere)
        assert RunMirror(run, f"{store.root}/copies").url.endswith("/copies/run")
        destination(f"{store.root}/new", Sending())
        store.close()
        refused(store.denial, f"{store.root}/new")


@pytest.mark.parametrize(
    ("url", "client", "extra"), [("s3://bucket/a", "s3fs", "s3"), ("gs://bucket/a", "gcsfs", "gcs")]
)
def test_without_the_client_of_a_store_its_extra_is_named(
    url: str, client: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    for protocol in ("s3", "gs"):
        monkeypatch.delitem(loaded_clients, protocol, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    sentence = rf"[^\n]*; pip install 'strop\[{extra}\]'"
    with pytest.raises(ValueError, match=f"cannot be fetched: {sentence}$"):
        get(url)
    with pytest.raises(ValueError, match=f"{url}/rows.jsonl' cannot be fetched .*{sentence}$"):
        fetch(f"{url}/rows.jsonl", (".jsonl",))
    with pytest.raises(ValueError, match=f"--to '{url}' takes nothing: {sentence}$"):
        destination(url, Sending())
    with pytest.raises(ValueError, match=f"{url} cannot be fetched: {sentence}$"):
        fetch_run(url, tmp_path / "run")
    with (
        RunFolder.create(tmp_path / "own", config={}, command=[], settings=RunConfig()) as run,
        pytest.raises(ValueError, match=f"run.copy_to '{url}' takes nothing: {sentence}$"),
    ):
        RunMirror(run, url)


def test_rows_are_fetched_once_for_each_state_or_not_at_all(store: Store, tmp_path: Path) -> None:
    store.put("rows.jsonl", b'{"a": 1}\n')
    cache = tmp_path / "rows"

    def rows(**how: float) -> bytes:
        return fetch(f"{store.root}/rows.jsonl", (".jsonl",), cache, **how).read_bytes()  # type: ignore[arg-type]

    assert rows() == b'{"a": 1}\n'
    store.put("rows.jsonl", b'{"a": 2}\n')
    assert rows() == b'{"a": 2}\n'
    for name in ("set/a.jsonl", "set/below/b.jsonl", "set/README.md"):
        store.put(name, b"{}\n")
    assert names(fetch(f"{store.root}/set", (".jsonl",), cache)) == ["a.jsonl", "below/b.jsonl"]
    long = b'{"a": 3}\n' * 100_000
    store.put("rows.jsonl", long)
    before = names(cache)
    store.relay.break_after(len(long) // 2)
    with pytest.raises(
        ValueError, match=r"rows.jsonl' cannot be fetched \([^\n]*(broke off|received)[^\n]+$"
    ):
        rows(silence_s=3.0)
    assert names(cache) == before
    store.relay.mend()
    assert rows() == long


def test_hdfs_through_arrow_but_for_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of fsspec that stands for hdfs://, over a folder: there is no name node to ask."""

    def over_folder(self: HadoopFileSystem, host: str, port: int) -> None:
        ArrowFSWrapper.__init__(self, fs=SubTreeFileSystem(str(tmp_path / "root"), LocalFileSystem()))
        assert (host, port) == ("name-node", 9000)

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(HadoopFileSystem, "__init__", over_folder)
    HadoopFileSystem.clear_instance_cache()
    for name, body in FILES.items():
        path = tmp_path / "root" / "user" / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    first = get("hdfs://name-node:9000/user/model")
    assert names(Path(first.folder)) == NEEDED
    (tmp_path / "root" / "user" / "model" / "model.safetensors").write_bytes(WEIGHTS[::-1])
    assert get("hdfs://name-node:9000/user/model").revision != first.revision
    rows = fetch("hdfs://name-node:9000/user/model/config.json", (".json",), tmp_path / "rows")
    assert rows.read_bytes() == b"{}"
    with pytest.raises(ValueError, match=r"cannot be fetched: FileNotFoundError[^\n]*check the address$"):
        get("hdfs://name-node:9000/user/none")


@pytest.mark.skipif("HADOOP_HOME" in os.environ, reason="HADOOP_HOME names one")
def test_a_machine_without_hadoop_is_told_what_reads_hdfs() -> None:
    with pytest.raises(ValueError, match=r"(libjvm|libhdfs)[^\n]*hdfs-native[^\n]*webhdfs://[^\n]*$"):
        get("hdfs://127.0.0.1:9/user/model")
