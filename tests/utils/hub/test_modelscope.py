"""Models of ModelScope, through its real client and a server on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scope_cases import ScopeStandIn, asked_here

from strop.utils.hub.models import Fetch, Fetched, fetch_model
from strop.utils.hub.modelscope import ModelScopeRepo

pytestmark = pytest.mark.stores

WEIGHTS = bytes(range(256)) * 1024  # 256 KiB
MODEL = {
    "config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle",
    "additional_chat_templates/own.jinja": b"{{ messages }}", "own.py": b"raise SystemExit",
}  # fmt: skip
NEEDED = ["additional_chat_templates/own.jinja", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScopeStandIn]:
    pytest.importorskip("modelscope_hub", reason="`make stores` installs it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    with asked_here(monkeypatch) as stand_in:
        yield stand_in


def get(text: str, **how: object) -> Fetched:
    return fetch_model(f"modelscope:{text}", Fetch(silence_s=20.0, **how))  # type: ignore[arg-type]


def names(fetched: Fetched) -> list[str]:
    folder = Path(fetched.folder)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_is_needed_is_fetched_once_and_its_state_is_named(
    hub: ScopeStandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("tiny/model", MODEL)
    said: list[str] = []
    first = get("tiny/model", say=said.append)
    assert names(first) == NEEDED
    assert (Path(first.folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert said[0].startswith(f"fetching modelscope:tiny/model ({first.revision[:12]}): 256 KiB into ")
    assert capfd.readouterr().err == "", "the client's bars and warnings are not shown"
    sent = list(hub.sent)
    assert get("tiny/model") == first
    assert hub.sent == sent
    assert get("tiny/model", code=True).folder == first.folder
    assert "own.py" in names(first)


def test_branches_and_commits_are_states_of_their_own(hub: ScopeStandIn) -> None:
    commit = hub.add("tiny/model", MODEL)
    first = get("tiny/model")
    hub.add("tiny/model", MODEL | {"model.safetensors": WEIGHTS[::-1]})
    second = get("tiny/model")
    assert second.revision != first.revision
    assert get(f"tiny/model@{commit}").folder == first.folder
    hub.add("tiny/model", MODEL | {"model.safetensors": b"dev"}, "dev")
    assert (Path(get("tiny/model@dev").folder) / "model.safetensors").read_bytes() == b"dev"
    assert get("tiny/model").revision == second.revision
    asked = hub.asked
    assert get(f"tiny/model@{first.revision}").folder == first.folder, "a state that is here needs no hub"
    assert get("tiny/model", offline=True).folder == second.folder
    assert hub.asked == asked
    for path in sorted(Path(first.folder).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(first.folder).rmdir()
    with pytest.raises(ValueError, match=r"main branch has other files by now .*put that folder back"):
        get(f"tiny/model@{first.revision}")


def test_a_state_of_a_branch_is_fetched_again_from_that_branch(hub: ScopeStandIn) -> None:
    hub.add("tiny/model", MODEL)
    hub.add("tiny/model", MODEL | {"model.safetensors": b"dev"}, "dev")
    first = get("tiny/model@dev")
    shutil.rmtree(first.folder)
    how = Fetch(silence_s=20.0)
    again = fetch_model("modelscope:tiny/model", how, revision="dev", state=first.revision)
    assert (again.folder, again.revision) == (first.folder, first.revision)
    assert (Path(again.folder) / "model.safetensors").read_bytes() == b"dev"
    asked = hub.asked
    assert fetch_model("modelscope:tiny/model@dev", how, state=first.revision).folder == first.folder
    assert hub.asked == asked, "a state that is here needs no hub"
    shutil.rmtree(first.folder)
    hub.add("tiny/model", MODEL | {"model.safetensors": b"new"}, "dev")
    with pytest.raises(ValueError, match=r"dev branch has other files by now .*put that folder back"):
        fetch_model("modelscope:tiny/model@dev", how, state=first.revision)


def test_settings_alone_and_then_the_weights_too(hub: ScopeStandIn) -> None:
    hub.add("tiny/model", MODEL)
    first = get("tiny/model", weights=False)
    assert names(first) == [name for name in NEEDED if name != "model.safetensors"]
    assert get("tiny/model") == first
    assert names(first) == NEEDED


def test_a_download_that_breaks_goes_on_where_it_broke(hub: ScopeStandIn) -> None:
    hub.add("tiny/model", MODEL)
    hub.break_after = len(WEIGHTS) // 2
    whole = get("tiny/model")
    assert (Path(whole.folder) / "model.safetensors").read_bytes() == WEIGHTS
    starts = [int(line.partition(":")[2]) for line in hub.sent if line.startswith("model.safetensors")]
    assert starts == [0, len(WEIGHTS) // 2]


def test_contents_that_are_not_those_of_the_listing_are_refused(
    hub: ScopeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/model", dict(MODEL))
    get("tiny/model", weights=False)
    listing = ModelScopeRepo("tiny/model").list("")
    hub.models["tiny/model"]["master"]["model.safetensors"] = WEIGHTS[::-1]
    monkeypatch.setattr(ModelScopeRepo, "list", lambda self, revision: listing)
    with pytest.raises(ValueError, match=r"modelscope:tiny/model' cannot be fetched: [^\n]*Hash mismatch"):
        get("tiny/model")
    assert not list(tmp_path.rglob("model.safetensors"))


def test_refusals_are_one_sentence(hub: ScopeStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("tiny/model", MODEL)
    hub.add("tiny/closed", MODEL)
    hub.closed.add("tiny/closed")
    for name in ("tiny/none", "tiny/model@none"):
        with pytest.raises(ValueError, match=r"no such model or revision at ModelScope; check ORG/NAME"):
            get(name)
    with pytest.raises(ValueError, match=r"ModelScope asks who you are: set MODELSCOPE_API_TOKEN"):
        get("tiny/closed")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "right")
    assert names(get("tiny/closed")) == NEEDED
    with pytest.raises(ValueError, match=r"has no copy of it, and model\.local_files_only is set"):
        get("tiny/other", offline=True)


def test_without_a_network_the_copy_is_used_and_its_lack_is_said(
    hub: ScopeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/model", MODEL)
    first = get("tiny/model")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    assert get("tiny/model", say=said.append) == first
    assert "127.0.0.1:9 does not give it" in said[0]
    assert "the copy of modelscope:tiny/model" in said[0]
    with pytest.raises(
        ValueError,
        match=r"tiny/other' cannot be fetched: http://127\.0\.0\.1:9 does not give it .*refused.*network",
    ):
        get("tiny/other")


def test_a_file_that_a_data_set_lacks_is_fetched_again(hub: ScopeStandIn) -> None:
    hub.add("datasets/tiny/rows", {"train.jsonl": b'{"a": 1}\n', "test.jsonl": b'{"a": 2}\n'})
    repo = ModelScopeRepo("tiny/rows", "dataset")
    listing = repo.list("")
    folder = repo.get(listing, sorted(listing.sizes))
    (folder / "train.jsonl").unlink()
    assert repo.get(listing, sorted(listing.sizes)) == folder
    assert (folder / "train.jsonl").read_bytes() == b'{"a": 1}\n'
