"""Data sets of the hub at one commit, through the real client and a hub on loopback."""

from __future__ import annotations

import pytest
from hub_cases import StandIn, go_offline, hub

from strop.data import read_rows
from strop.data.hub_rows import commit_of, parse_hub
from strop.data.mixture import entry_names
from strop.utils import trust

__all__ = ["hub"]  # the fixture

NAME = "datasets/me/sums"


def add(hub: StandIn, *numbers: int) -> str:
    body = "".join(f'{{"x": {number}}}\n' for number in numbers)
    return hub.add(NAME, {"train.jsonl": body.encode(), "test.jsonl": b'{"x": 0}\n'})


def numbers(entry: str) -> list[int]:
    return [row["x"] for row in read_rows([entry])]


def test_a_commit_is_read_wherever_the_hub_stands_and_offline(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add(hub, 1, 2)
    said: list[str] = []
    assert commit_of("hub:me/sums@test", said.append) == first
    assert numbers(f"hub:me/sums#{first}") == [1, 2]
    second = add(hub, 3, 4)
    assert commit_of("hub:me/sums", said.append) == second
    assert numbers("hub:me/sums@train#main") == [3, 4]
    assert numbers(f"hub:me/sums@train#{first}") == [1, 2]
    go_offline(monkeypatch)
    asked = len(hub.asked)
    assert commit_of("hub:me/sums", said.append) == second
    assert numbers(f"hub:me/sums#{first}") == [1, 2]  # the client alone gives what was prepared last
    assert numbers(f"hub:me/sums@test#{second}") == [0]
    assert (len(hub.asked), said) == (asked, [])
    with pytest.raises(ValueError, match=f"the cache has it at other commits than {'0' * 40}"):
        numbers(f"hub:me/sums#{'0' * 40}")
    with pytest.raises(
        ValueError, match=r"HF_HUB_OFFLINE is set, and the cache does not say which commit v1"
    ):
        commit_of("hub:me/sums#v1", said.append)


def test_a_hub_that_is_gone_leaves_what_the_cache_knows(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add(hub, 1, 2)
    assert numbers("hub:me/sums") == [1, 2]  # prepared, and no commit noted
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    assert commit_of("hub:me/sums", said.append) == first
    assert f"of the data set me/sums, commit {first} is used, which the cache has" in said[0]
    with pytest.raises(ValueError, match=r"'hub:me/other' cannot be read from the hub: .* cannot be reached"):
        commit_of("hub:me/other", said.append)


def test_what_the_hub_has_not_is_one_sentence(hub: StandIn) -> None:
    add(hub, 1)
    with pytest.raises(ValueError, match="there is no such data set at http.*; a private one needs HF_TOKEN"):
        commit_of("hub:me/smus", print)
    with pytest.raises(ValueError, match="it has no revision 'v1'; it has main"):
        commit_of("hub:me/sums#v1", print)
    with trust.door():
        trust.close("a run", own=set())
        asked = len(hub.asked)
        with pytest.raises(trust.UntrustedCode, match="data files hub:me/sums"):
            commit_of("hub:me/sums", print)
        assert len(hub.asked) == asked


def test_a_revision_is_the_last_part_of_an_entry_and_not_of_the_name_of_a_source() -> None:
    source = parse_hub("hub:me/sums:hard@test[:10%]#refs/convert/parquet")
    assert (source.name, source.config, source.split, source.revision) == (
        "me/sums", "hard", "test[:10%]", "refs/convert/parquet",
    )  # fmt: skip
    first, second = f"hub:me/sums@train#{'a' * 40}", f"hub:you/sums@train#{'b' * 40}"
    assert entry_names([first, "x/rows.jsonl"]) == {first: "sums@train", "x/rows.jsonl": "rows"}
    assert entry_names([first, second]) == {first: "hub:me/sums@train", second: "hub:you/sums@train"}
