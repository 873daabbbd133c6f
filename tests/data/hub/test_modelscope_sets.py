"""Data sets of ModelScope at one state, through the real client and a server on loopback."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets.config
import pytest
from scope_cases import ScopeStandIn, asked_here

from strop.data import read_rows
from strop.data.hub_rows import commit_of, parse_hub
from strop.data.streaming import open_rows
from strop.utils import trust
from strop.utils.hub.modelscope import ModelScopeRepo
from strop.utils.remote_path import fetched

NAME = "datasets/me/sums"
stores = pytest.mark.stores


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScopeStandIn]:
    pytest.importorskip("modelscope_hub", reason="`make stores` installs it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    with asked_here(monkeypatch) as stand_in:
        yield stand_in


def lines(*numbers: int) -> bytes:
    return "".join(f'{{"x": {number}}}\n' for number in numbers).encode()


def add(hub: ScopeStandIn, *numbers: int, branch: str = "master") -> str:
    files = {"train.jsonl": lines(*numbers), "test.jsonl": lines(0), "sums.py": b"raise SystemExit"}
    return hub.add(NAME, files, branch)


def numbers(entry: str) -> list[int]:
    return [row["x"] for row in read_rows([entry])]


@stores
def test_a_state_is_read_wherever_the_hub_stands(
    hub: ScopeStandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add(hub, 1, 2)
    said: list[str] = []
    first = commit_of("modelscope:me/sums@test", said.append)
    assert first.startswith("master/files-")
    assert said == ["fetching the data set modelscope:me/sums: 2 files, 0.0 MiB"]
    assert numbers(f"modelscope:me/sums@train#{first}") == [1, 2]
    commit = add(hub, 3, 4)
    second = commit_of("modelscope:me/sums", said.append)
    assert second != first
    assert numbers("modelscope:me/sums") == [3, 4]
    assert [row["x"] for row in open_rows(["modelscope:me/sums@test"])] == [0]
    asked = hub.asked
    assert numbers(f"modelscope:me/sums#{first}") == [1, 2]
    assert hub.asked == asked, "a state that is here needs no hub"
    assert commit_of(f"modelscope:me/sums#{second}", said.append) == second
    assert not list((tmp_path / "cache").rglob("sums.py"))
    assert capfd.readouterr().out == ""

    shutil.rmtree(tmp_path / "cache")
    assert numbers(f"modelscope:me/sums#{second}") == [3, 4]
    with pytest.raises(ValueError, match=r"master branch has other files by now .* is gone: put that folder"):
        numbers(f"modelscope:me/sums#{first}")
    assert commit_of(f"modelscope:me/sums#{commit}", said.append) == second.replace("master", commit)


@stores
def test_a_branch_is_read_by_its_name_and_after_the_hub_is_gone(
    hub: ScopeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(hub, 1)
    add(hub, 5, branch="v1")
    said: list[str] = []
    state = commit_of("modelscope:me/sums#v1", said.append)
    assert state.startswith("v1/files-")
    assert numbers(f"modelscope:me/sums#{state}") == [5]
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    said.clear()
    assert commit_of("modelscope:me/sums#v1", said.append) == state
    assert "does not give it" in said[0]
    assert "the copy of the data set modelscope:me/sums in " in said[0]
    with pytest.raises(ValueError, match=r"'modelscope:me/other' cannot be read from ModelScope: .*network"):
        numbers("modelscope:me/other")


@stores
def test_a_set_of_more_files_than_a_page_lists_is_read_whole(hub: ScopeStandIn) -> None:
    hub.add(NAME, {f"data/train-{number:03d}.jsonl": lines(number) for number in range(201)})
    assert sorted(numbers("modelscope:me/sums")) == list(range(201))


@stores
def test_what_modelscope_has_not_is_one_sentence(hub: ScopeStandIn) -> None:
    add(hub, 1)
    for entry in ("modelscope:me/smus", "modelscope:me/sums#none"):
        with pytest.raises(
            ValueError,
            match=rf"{entry}' cannot be read from ModelScope: there is no such data set or revision",
        ):
            numbers(entry)
    with pytest.raises(ValueError, match=r"@val' cannot be read by datasets .*Unknown split"):
        numbers("modelscope:me/sums@val")
    hub.closed.add(NAME)
    with pytest.raises(ValueError, match="ModelScope asks who you are: set MODELSCOPE_API_TOKEN"):
        commit_of("modelscope:me/sums", print)
    with trust.door():
        trust.close("a run", own=set())
        asked = hub.asked
        with pytest.raises(trust.UntrustedCode, match="data files modelscope:me/sums"):
            commit_of("modelscope:me/sums", print)
        assert hub.asked == asked


def test_an_entry_names_owner_set_configuration_split_and_revision() -> None:
    source = parse_hub("modelscope:me/sums:hard@test#v1/files-0a")
    assert (source.hub, source.name, source.config, source.split, source.revision) == (
        "modelscope:", "me/sums", "hard", "test", "v1/files-0a",
    )  # fmt: skip
    assert fetched(["rows.jsonl", "modelscope:me/sums"]) == ["modelscope:me/sums"]
    with pytest.raises(ValueError, match=r"write modelscope:owner/name, then optionally :config"):
        parse_hub("modelscope:sums")


def test_without_the_client_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelscope_hub", None)
    with pytest.raises(
        ValueError, match=r"cannot be read from ModelScope: .*pip install 'strop\[modelscope\]'"
    ):
        read_rows(["modelscope:me/sums"])


@stores
def test_of_two_that_fetch_one_state_the_second_waits_and_finds_it(
    hub: ScopeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(hub, 1, 2)
    repos = [ModelScopeRepo("me/sums", "dataset") for _ in range(2)]
    running: list[int] = []
    for repo in repos:
        real = repo._api.download_repo

        def slow(*args: object, real: Callable[..., object] = real, **options: object) -> None:
            running.append(1)
            time.sleep(0.3)
            real(*args, **options)

        monkeypatch.setattr(repo._api, "download_repo", slow)
    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(lambda repo: repo.get(repo.list(""), ["train.jsonl"]), repos))
    assert len(folders) == len(running) == 1
    assert (folders.pop() / "train.jsonl").read_bytes() == lines(1, 2)
