"""Models sent to ModelScope, through its real client and a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scope_cases import ScopeStandIn, asked_here

from strop.utils.hub.models import Fetch, fetch_model
from strop.utils.hub.repo import Sending
from strop.utils.hub.sending import Sent, destination

pytestmark = pytest.mark.stores

WEIGHTS = bytes(range(256)) * 1024  # 256 KiB
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}", "README.md": b"# a"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScopeStandIn]:
    pytest.importorskip("modelscope_hub", reason="`make stores` installs it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    with asked_here(monkeypatch) as stand_in:
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", "right")
        yield stand_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in FILES.items():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(body)
    return tmp_path / "model"


def send(folder: Path, name: str, **how: object) -> Sent:
    return destination(f"modelscope:{name}", Sending(**how)).send(folder)  # type: ignore[arg-type]


def test_a_folder_arrives_in_one_commit_and_is_read_from_there(
    hub: ScopeStandIn, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = send(folder, "me/sums", private=True, message="the first")
    assert hub.models["me/sums"]["master"] == FILES | {".gitattributes": b""}
    assert list(hub.large.values()) == [WEIGHTS]
    assert hub.private == {"me/sums"}
    assert len(hub.messages) == 1
    assert hub.messages[0].startswith("the first")
    assert (sent.num_files, sent.num_bytes) == (4, sum(map(len, FILES.values())))
    assert capfd.readouterr() == ("", ""), "the client's report and bars are not shown"
    fetched = fetch_model("modelscope:me/sums", Fetch(silence_s=20.0))
    assert fetched.revision == sent.revision
    assert (Path(fetched.folder) / "model.safetensors").read_bytes() == WEIGHTS


def test_weights_of_an_earlier_model_do_not_stay_beside_those_of_the_new_one(
    hub: ScopeStandIn, folder: Path
) -> None:
    old = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}", "own.txt": b"2"}
    hub.add("me/old", old)
    hub.add("me/old", old, "dev")
    send(folder, "me/old", branch="dev")
    assert hub.models["me/old"]["dev"] == FILES | {"own.txt": b"2"}
    assert hub.models["me/old"]["master"] == old
    with pytest.raises(
        ValueError, match=r"modelscope:me/old' takes nothing: there is no such model or revision"
    ):
        send(folder, "me/old", branch="none")


@pytest.mark.parametrize("token", ["", "wrong"])
def test_who_is_not_known_is_told_before_anything_is_sent(
    hub: ScopeStandIn, folder: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
    with pytest.raises(
        ValueError,
        match=r"modelscope:me/sums' takes nothing: ModelScope asks who you are: set MODELSCOPE_API_T",
    ):
        destination("modelscope:me/sums", Sending())
    assert (hub.models, hub.large) == ({}, {})


def test_what_arrives_with_other_contents_or_not_at_all_is_told(hub: ScopeStandIn, folder: Path) -> None:
    hub.spoils = True
    with pytest.raises(ValueError, match=r"model\.safetensors was sent, and [^\n]*send it again"):
        send(folder, "me/spoilt")
    hub.full, hub.large = True, {}
    with pytest.raises(ValueError, match=r"me/full': [^\n]*does not take it [^\n]*failed to upload"):
        send(folder, "me/full")
    assert "model.safetensors" not in hub.models["me/full"]["master"]


def test_a_hub_that_does_not_answer_is_one_sentence(
    hub: ScopeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"takes nothing: http://127\.0\.0\.1:9 does not take it "):
        destination("modelscope:me/sums", Sending())
