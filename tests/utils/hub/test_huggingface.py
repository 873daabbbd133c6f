"""Models of the hub, through its real client and a server on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants as constants
import pytest
from hub_cases import StandIn, hub

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer
from strop.utils import trust
from strop.utils.hub.huggingface import HuggingFaceRepo
from strop.utils.hub.models import Fetch, Fetched, fetch_copy, fetch_model, hashes
from strop.utils.hub.repo import Refused, is_of_network

__all__ = ["hub"]  # the fixture

WEIGHTS = bytes(range(256)) * 1024  # 256 KiB
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"gguf",
    "modeling_own.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another form",
    "README.md": b"text",
}
NEEDED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


def get(text: str, **how: object) -> Fetched:
    return fetch_model(text, Fetch(silence_s=5.0, **how))  # type: ignore[arg-type]


def names(fetched: Fetched) -> list[str]:
    return sorted(path.name for path in Path(fetched.folder).rglob("*") if path.is_file())


def test_what_is_needed_is_fetched_once_and_named_by_its_commit(
    hub: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add("tiny/model", MODEL)
    said: list[str] = []
    fetched = get("tiny/model", say=said.append)
    assert fetched.revision == commit
    assert names(fetched) == NEEDED
    assert (Path(fetched.folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert hashes(Path(fetched.folder))["model.safetensors"] == {
        "bytes": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert any("256 KiB" in line and "tiny/model" in line for line in said)
    assert capfd.readouterr().err == "", "the client's bars are not shown where no terminal is"
    sent = hub.bodies()
    assert get("tiny/model").folder == fetched.folder
    assert hub.bodies() == sent


def test_code_and_weights_are_fetched_when_asked_for(hub: StandIn) -> None:
    hub.add("tiny/model", MODEL)
    assert names(get("tiny/model", weights=False)) == [name for name in NEEDED if name != "model.safetensors"]
    assert names(get("tiny/model", code=True)) == sorted([*NEEDED, "modeling_own.py"])


def test_a_revision_is_that_commit_whatever_main_becomes(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.add("tiny/model", MODEL)
    new = hub.add("tiny/model", MODEL | {"config.json": b'{"a": 1}'})
    assert get("tiny/model").revision == new
    assert (Path(get(f"tiny/model@{old}").folder) / "config.json").read_bytes() == b"{}"
    asked = len(hub.asked)
    assert get(f"tiny/model@{old}").revision == old, "a commit that is here needs no hub"
    assert len(hub.asked) == asked
    with pytest.raises(ValueError, match=r"no revision 'mian'; the nearest is main"):
        get("tiny/model@mian")


def test_without_a_network_the_copy_is_used_and_its_lack_is_said(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("tiny/model", MODEL)
    get("tiny/model")
    hub.add("tiny/half", MODEL)
    get("tiny/half", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert get("tiny/model").revision == commit
    with pytest.raises(
        ValueError, match=r"tiny/other.*has no copy of it, and HF_HUB_OFFLINE is set.*fetch it once"
    ):
        get("tiny/other")
    with pytest.raises(ValueError, match=r"lacks model\.safetensors, and HF_HUB_OFFLINE"):
        get("tiny/half")
    assert len(hub.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert get("tiny/model", offline=True).revision == commit
    assert len(hub.asked) == asked


def test_an_unreachable_hub_is_named_and_a_copy_is_used(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("tiny/model", MODEL)
    get("tiny/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    assert get("tiny/model", say=said.append).revision == commit
    assert "127.0.0.1:9 cannot be reached" in said[0]
    with pytest.raises(
        ValueError, match=r"model\.path 'tiny/other' cannot be fetched: .*cannot be reached.*network"
    ):
        get("tiny/other")


@pytest.mark.parametrize("lost", ["the network", "permission"])
def test_a_copy_without_code_or_tokenizer_is_used_where_the_hub_cannot_be_asked(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    plain = {name: body for name, body in MODEL.items() if name not in ("modeling_own.py", "tokenizer.json")}
    commit = hub.add("tiny/plain", plain)
    get("tiny/plain", code=True)
    if lost == "permission":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert get("tiny/plain", code=True).revision == commit
    assert get(f"tiny/plain@{commit}", code=True).revision == commit
    with pytest.raises(ValueError, match="tiny/plain.* cannot be fetched"):
        get("tiny/plain", weights=False)  # asked for its settings and tokenizer alone


def test_a_cache_that_cannot_be_looked_at_is_named(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/closed/hub")

    monkeypatch.setattr("strop.utils.hub.models.HuggingFaceRepo", closed)
    with pytest.raises(
        ValueError, match=r"'tiny/model' cannot be fetched: .*Permission denied: '/closed/hub'"
    ):
        get("tiny/model")


def test_a_name_that_the_client_refuses_is_no_matter_of_the_network(hub: StandIn) -> None:
    with pytest.raises(Refused, match=r"'tiny/a--b' is no name of the hub, which are ORG/NAME"):
        HuggingFaceRepo("tiny/a--b").list("")


@pytest.mark.parametrize(
    ("error", "is_network"),
    [
        (socket.gaierror(-2, "Name or service not known"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_errors_of_the_network_are_none_of_the_disk(error: OSError, is_network: bool) -> None:
    assert is_of_network(error) == is_network


def test_a_machine_that_knows_no_names_is_told_of_the_network(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"http://hub\.invalid cannot be reached \(.*not known\).*network"):
        get("tiny/other")


def test_refusals_say_what_to_do(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("tiny/model", MODEL)
    hub.add("tiny/closed", MODEL)
    hub.gated.add("tiny/closed")
    with pytest.raises(ValueError, match=r"no such model at .*; the nearest is tiny/model; .*HF_TOKEN"):
        get("tiny/modle")
    with pytest.raises(ValueError, match=r"accept their conditions at .*/tiny/closed, then set HF_TOKEN"):
        get("tiny/closed")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert names(get("tiny/closed")) == NEEDED
    pickles = {name: body for name, body in MODEL.items() if not name.endswith(".safetensors")}
    hub.add("tiny/pickles", pickles)
    with pytest.raises(ValueError, match=r"only model\.gguf, and strop reads safetensors alone"):
        get("tiny/pickles")
    assert "pytorch_model.bin" not in hub.bodies()


def test_shards_are_those_of_the_index(hub: StandIn) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {name: body for name, body in MODEL.items() if name != "model.safetensors"}
    files |= {f"model-{n}.safetensors": bytes([n]) * 100 for n in (1, 2)} | {
        "consolidated.safetensors": b"twin"
    }
    hub.add("tiny/shards", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    found = names(get("tiny/shards"))
    assert {"model-1.safetensors", "model-2.safetensors"} <= set(found)
    assert "consolidated.safetensors" not in found


def test_a_broken_download_goes_on_where_it_broke(hub: StandIn) -> None:
    hub.add("tiny/model", MODEL)
    hub.break_after = 1 << 17
    fetched = get("tiny/model")
    assert (Path(fetched.folder) / "model.safetensors").read_bytes() == WEIGHTS


def test_silence_ends_the_fetch(hub: StandIn) -> None:
    hub.add("tiny/model", MODEL)
    hub.silent = True
    with pytest.raises(ValueError, match=r"tiny/model.*nothing was received for 0\.4 s"):
        fetch_model("tiny/model", Fetch(silence_s=0.4))


def test_changed_contents_are_refused_and_removed(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("tiny/model", dict(MODEL))
    listing = HuggingFaceRepo("tiny/model").list("")
    hub.models["tiny/model"][commit]["model.safetensors"] = WEIGHTS[::-1]
    monkeypatch.setattr(HuggingFaceRepo, "list", lambda self, revision: listing)
    with pytest.raises(ValueError, match=r"model\.safetensors arrived with other contents"):
        get("tiny/model")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))


def test_several_at_once_fetch_once(hub: StandIn) -> None:
    hub.add("tiny/model", MODEL)
    hub.slow_s = 0.02
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(get("tiny/model").revision)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert hub.bodies().count("model.safetensors") == 1


def test_ranks_of_a_machine_with_a_part_of_the_model_fetch_the_rest_once(
    hub: StandIn, tiny_model: Path
) -> None:
    hub.add_folder("tiny/model", tiny_model)
    folder = get("tiny/model", weights=False).folder
    sent = hub.bodies()
    load_tokenizer(ModelConfig(path=folder))
    assert hub.bodies() == sent, "settings and tokenizer are there"
    with ThreadPoolExecutor(2) as ranks:  # transformers itself loads one model at a time in a process
        list(ranks.map(lambda rank: fetch_copy(Path(folder), weights=True), range(2)))
    load_model(ModelConfig(path=folder, dtype="float32"), device="cpu")
    assert hub.bodies().count("model.safetensors") == 1
    for path in Path(folder).glob("tokenizer*"):
        path.unlink()
    load_tokenizer(ModelConfig(path=folder))
    shutil.rmtree(Path(folder))
    with pytest.raises(ValueError, match="local_files_only"):
        load_model_config(ModelConfig(path=folder, local_files_only=True))


def test_a_full_disk_is_told_with_what_chooses_another_one(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/model", MODEL)

    def full(*names: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ValueError, match=r"disk of .*cache is full \(No space left on device\).*HF_HOME"):
        get("tiny/model")


def test_received_settings_fetch_nothing(hub: StandIn) -> None:
    hub.add("tiny/model", MODEL)
    with trust.door():
        trust.close("runs/received")
        with pytest.raises(trust.UntrustedCode, match=r"tiny/model \(fetched\)"):
            get("tiny/model")
    assert hub.asked == []
