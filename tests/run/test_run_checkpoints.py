"""Checkpoints: what is damaged is not used, what is valid is not lost, and the kernel's refusals are told."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.run import CheckpointError, CheckpointStore, PendingCheckpoint
from strop.run.manifest import FileEntry, Manifest, check_files
from strop.run.sealing import Sealing


def writer(content: bytes = b"weights" * 100) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_bytes(content)
        (folder / "optimizer.safetensors").write_bytes(content * 2)

    return write


def make_store(
    root: Path, *, keep_last: int = 2, keep_best: int = 0, steps: tuple[int, ...] = ()
) -> CheckpointStore:
    store = CheckpointStore(root, keep_last=keep_last, keep_best=keep_best)
    for step in steps:
        save(store, step, writer(), facts={})
    return store


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_save_writes_manifest_and_pointer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=1)
    facts = {"ledger": {"counts": {"issued": 3}}, "rng": (1, 2), "best": float("inf")}
    saved = save(store, 20, writer(b"abc"), score=0.5, facts=facts)
    assert names(store.root) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    assert (store.root / "latest_checkpointed_iteration.txt").read_text() == "20\n"
    found, skipped = store.latest_valid()
    assert found == saved
    assert skipped == []
    assert (saved.manifest.step, saved.manifest.score, saved.manifest.num_bytes) == (20, 0.5, 9)
    assert saved.manifest.facts == {"ledger": {"counts": {"issued": 3}}, "rng": [1, 2], "best": "inf"}
    entry = saved.manifest.files["model/model.safetensors"]
    # sha256("abc"), the first example of FIPS 180-2
    assert entry.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert store.at(20) == saved


def test_empty_store_has_no_checkpoint(tmp_path: Path) -> None:
    store = make_store(tmp_path / "absent")
    assert store.latest_valid() == (None, [])
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="ckpt 5 is not in .*absent; there is no other checkpoint"):
        store.at(5)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), r"has no manifest \(crash during save\)"),
    "manifest torn": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text()[:-20]),
        "has a damaged manifest",
    ),
    "manifest flipped": (
        lambda f: (f / "manifest.json").write_text(
            (f / "manifest.json").read_text().replace('"score": null', '"score": 9.5')
        ),
        r"has a damaged manifest \(its content differs from its own hash\)",
    ),
    "file missing": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "file truncated": (
        lambda f: (f / "optimizer.safetensors").write_bytes(b"x"),
        "optimizer.safetensors has 1 bytes, not 1400",
    ),
    "byte flipped": (
        lambda f: flip(f / "model/model.safetensors"),
        "model/model.safetensors differs from its hash in the manifest",
    ),
    "folder renamed": (lambda f: f.rename(f.with_name("global_step_70")), "holds the checkpoint of step 60"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path, damage: str) -> None:
    store = make_store(tmp_path, keep_last=3, steps=(20, 40, 60))
    break_it, reason = DAMAGES[damage]
    break_it(tmp_path / "global_step_60")
    found, skipped = store.latest_valid()
    assert found is not None
    assert found.step == 40
    (sentence,) = skipped
    assert sentence.endswith(" - using 40")
    with pytest.raises(CheckpointError, match=reason + ".*; checkpoints: .*20, 40"):
        store.at(70 if damage == "folder renamed" else 60)


def test_all_damaged_is_said(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20, 40))
    for step in (20, 40):
        flip(tmp_path / f"global_step_{step}/optimizer.safetensors")
    found, skipped = store.latest_valid()
    assert found is None
    reason = "is damaged: optimizer.safetensors differs from its hash in the manifest"
    assert skipped == [f"ckpt {step} {reason} - no earlier checkpoint is valid" for step in (40, 20)]


def test_unknown_format_asks_for_the_right_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, steps=(20,))
    monkeypatch.setattr("strop.run.manifest.FORMAT", 0)
    (sentence,) = store.latest_valid()[1]
    assert sentence.startswith(
        "ckpt 20 has format 1, this strop reads format 0: use the strop that wrote it - "
    )


def test_retention_keeps_last_and_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.9), (4, None), (5, float("nan")), (6, 0.1)]:
        save(store, step, writer(), score=score, facts={})
    assert store.steps() == [3, 5, 6], "of equal scores the later one"


def test_retention_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2, steps=(20, 40))
    (tmp_path / "global_step_40/manifest.json").unlink()
    save(store, 60, writer(), facts={})
    assert store.steps() == [20, 60]
    assert "global_step_40" not in names(tmp_path), "what is left of a crash goes away"


def test_nothing_is_removed_when_the_save_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, keep_last=1, steps=(20,))
    # A disk that loses a bit after the manifest was written: flip it when the cache is dropped.
    monkeypatch.setattr(
        "strop.run.checkpoints._drop_from_cache",
        lambda folder, manifest: flip(folder / "optimizer.safetensors"),
    )
    message = (
        "checkpoint 40 could not be saved .*read back is damaged: optimizer.safetensors differs.*faulty; "
        "checkpoint 20 stays valid"
    )
    with pytest.raises(CheckpointError, match=message):
        save(store, 40, writer(), facts={})
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    with pytest.raises(CheckpointError, match="checkpoint 20 stays valid"):
        save(store, 20, writer(b"other"), facts={})
    assert store.at(20).manifest.num_bytes == 2100, "the folder set aside is back"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))
    save(store, 20, writer(b"new"), facts={})
    assert (store.at(20).path / "model/model.safetensors").read_bytes() == b"new"
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]


def test_a_folder_set_aside_is_used_and_returns(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))
    aside = tmp_path / ".replaced-global_step_20"
    (tmp_path / "global_step_20").rename(aside)  # what a crash between the two renames leaves
    found, _ = store.latest_valid()
    assert found is not None
    assert found.path == aside
    save(store, 40, writer(), facts={})
    assert store.at(20).path == tmp_path / "global_step_20"


def test_errors_of_the_writer_pass_through_and_leave_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def broken(folder: Path) -> None:
        (folder / "a").write_bytes(b"x")
        raise KeyError("optimizer")

    with pytest.raises(KeyError, match="optimizer"):
        save(store, 40, broken, facts={})
    with pytest.raises(ValueError, match="checkpoint of step 40 has no file"):
        save(store, 40, lambda folder: None, facts={})
    with pytest.raises(ValueError, match="is a link or a special file"):
        save(store, 40, lambda folder: (folder / "model").symlink_to(tmp_path), facts={})
    with pytest.raises(TypeError, match=r"facts\.state is a object"):
        save(store, 40, writer(), facts={"state": object()})
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointStore(tmp_path, keep_last=0, keep_best=0)


@pytest.mark.parametrize("hashes", [False, True])
def test_links_out_of_a_checkpoint_are_refused_and_others_followed(tmp_path: Path, hashes: bool) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "checkpoint"
    for place in (outside, folder / "role"):
        place.mkdir(parents=True)
        (place / "weights").write_bytes(b"1234")
    files = {"role/weights": FileEntry(4, hashlib.sha256(b"1234").hexdigest())}
    manifest = Manifest(step=1, score=None, created="", facts={}, files=files)
    (tmp_path / "link").symlink_to(folder)
    check_files(tmp_path / "link", manifest, hashes=hashes)
    (folder / "role" / "weights").rename(folder / "moved")
    (folder / "role" / "weights").symlink_to(folder / "moved")
    check_files(folder, manifest, hashes=hashes)
    (folder / "role" / "weights").unlink()
    (folder / "role" / "weights").symlink_to(outside / "weights")
    with pytest.raises(CheckpointError, match="role/weights is a link that leads out of it"):
        check_files(folder, manifest, hashes=hashes)
    shutil.rmtree(folder / "role")
    (folder / "role").symlink_to(outside)
    with pytest.raises(CheckpointError, match="role/weights is a link that leads out of it"):
        check_files(folder, manifest, hashes=hashes)


def test_an_errno_inside_another_error_is_found(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def rust(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(
        CheckpointError, match=r"40 could not .*: No space left on device; checkpoint 20 stays valid"
    ):
        save(store, 40, rust, facts={})


def test_discard_after_gives_up_a_future_but_never_the_only_valid_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=4, steps=(20, 40, 60, 80))
    flip(tmp_path / "global_step_80/optimizer.safetensors")
    with pytest.raises(CheckpointError, match="cannot continue from step 30, because ckpt 30 is not in"):
        store.discard_after(30)
    store.discard_after(40)
    assert store.steps() == [20, 40, 80], "a damaged one stays until the next save"
    save(store, 60, writer(), facts={})
    assert store.steps() == [20, 40, 60]


@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(
        st.tuples(st.integers(0, 6), st.none() | st.integers(0, 3), st.booleans()), min_size=1, max_size=10
    ),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_saves_and_failures_keeps_a_valid_one(
    memory_path: Path,
    keep_last: int,
    keep_best: int,
    saves: list[tuple[int, int | None, bool]],
) -> None:
    store = CheckpointStore(Path(tempfile.mkdtemp(dir=memory_path)), keep_last=keep_last, keep_best=keep_best)
    alive: dict[int, int | None] = {}
    for step, score, fails in saves:
        if fails:

            def refuse(folder: Path) -> None:
                (folder / "part").write_bytes(b"x")
                raise OSError(28, "No space left on device")

            with pytest.raises(CheckpointError, match="No space left"):
                save(store, step, refuse, score=score, facts={})
        else:
            save(store, step, lambda folder: (folder / "f").write_bytes(b"x") and None, score=score, facts={})
            alive = {old: value for old, value in alive.items() if old < step} | {step: score}
            best = sorted((value, old) for old, value in alive.items() if value is not None)
            kept = set(sorted(alive)[-keep_last:]) | {old for _, old in best[len(best) - keep_best :]}
            alive = {old: value for old, value in alive.items() if old in kept}
        assert store.steps() == sorted(alive)
        assert store.latest_valid()[0] == (store.at(max(alive)) if alive else None)


def begin_and_write(store: CheckpointStore, step: int) -> PendingCheckpoint:
    pending = store.begin(step, facts={"step": step})
    writer()(pending.folder)
    return pending


def test_begin_and_seal_are_a_save_in_parts(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1, steps=(20,))
    facts = {"rng": [1]}
    pending = store.begin(40, score=0.5, facts=facts)
    assert pending.folder == tmp_path / ".saving-global_step_40"
    facts["rng"].append(2)
    writer(b"abc")(pending.folder)
    assert store.steps() == [20], "not before it is sealed"
    saved = pending.seal()
    assert (saved.step, saved.manifest.score, saved.manifest.facts) == (40, 0.5, {"rng": [1]})
    assert store.latest_valid() == (saved, [])
    assert names(tmp_path) == ["global_step_40", "latest_checkpointed_iteration.txt"]


def test_sealing_in_the_background_waits_for_the_writers(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path, keep_last=1, steps=(20,))
    written = threading.Event()
    pending = begin_and_write(store, 40)
    sealing = Sealing(pending, lambda: written.wait(30))
    assert not sealing.done()
    assert store.latest_valid()[0] == store.at(20)
    with pytest.raises(TimeoutError, match=r"checkpoint 40 is not on the disk after 0\.01 s of waiting"):
        sealing.result(0.01)
    with pytest.raises(RuntimeError, match="checkpoint 40 was begun, and is not sealed"):
        store.begin(60, facts={})
    threading.Timer(0.05, written.set).start()
    assert sealing.result(30) == store.at(40)
    assert sealing.done()
    assert store.steps() == [40]
    assert Sealing(begin_and_write(store, 60)).result(30) == store.at(60)
    assert names(tmp_path) == ["global_step_60", "latest_checkpointed_iteration.txt"]


def test_a_background_failure_surfaces_with_the_checkpoint_that_stays(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    pending = begin_and_write(store, 40)
    sealing = Sealing(pending, refuse)
    message = (
        "checkpoint 40 could not be saved to .*: No space left on device; checkpoint 20 stays valid. Free"
    )
    with pytest.raises(CheckpointError, match=message):
        sealing.result(30)
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    begin_and_write(store, 60).seal()
    assert store.steps() == [20, 60], "with room again, the next one works"


def test_errors_that_are_not_of_the_disk_pass_through_the_background(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def broken() -> None:
        raise KeyError("optimizer")

    sealing = Sealing(begin_and_write(store, 40), broken)
    with pytest.raises(KeyError, match="optimizer"):
        sealing.result(30)
    sealing = Sealing(store.begin(40, facts={}))
    with pytest.raises(ValueError, match="checkpoint of step 40 has no file"):
        sealing.result(30)
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]


def test_one_checkpoint_is_in_flight_at_a_time(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))
    pending = begin_and_write(store, 40)
    with pytest.raises(RuntimeError, match="checkpoint 40 was begun, and is not sealed"):
        store.begin(60, facts={})
    with pytest.raises(KeyError), pending.writing():
        raise KeyError("optimizer")
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    following = begin_and_write(store, 40)
    for call in (pending.seal, Sealing(pending).result):
        with pytest.raises(RuntimeError, match="checkpoint 40 is being sealed, was sealed, or has failed"):
            call()
    following.seal()
    with pytest.raises(RuntimeError, match="was sealed"):
        following.seal()
    assert store.steps() == [20, 40]


def test_what_fails_around_the_writers_gives_the_checkpoint_up(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def fail(error: BaseException) -> None:
        with store.begin(40, facts={}).writing():
            raise error

    message = "40 could not .*: No space left on device; checkpoint 20 stays valid"
    with pytest.raises(CheckpointError, match=message):
        fail(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert names(tmp_path) == ["global_step_20", "latest_checkpointed_iteration.txt"]
    pending = store.begin(40, facts={})
    with pending.writing():
        writer()(pending.folder)
    assert pending.seal() == store.at(40)


def test_an_errno_of_another_process_is_found_if_disks_have_it(tmp_path: Path) -> None:
    store = make_store(tmp_path, steps=(20,))

    def fail(text: str) -> None:
        raise RuntimeError(f"actor rank 1 on node-7: OSError: {text}")

    with pytest.raises(
        CheckpointError, match="40 could not .*: No space left on device; checkpoint 20 stays"
    ):
        save(store, 40, lambda _: fail("[Errno 28] No space left on device: 'shard'"), facts={})
    with pytest.raises(
        RuntimeError, match="^actor rank 1 on node-7: OSError: .Errno 111. Connection refused$"
    ):
        save(store, 40, lambda _: fail("[Errno 111] Connection refused"), facts={})


REFUSED = """
import json, resource, sys
from pathlib import Path
from strop.run import CheckpointError, CheckpointStore

def save(store, step, write, facts):
    pending = store.begin(step, facts=facts)
    with pending.writing():
        write(pending.folder)
    pending.seal()

def write(size):
    return lambda folder: (folder / "model.bin").write_bytes(b"x" * size) and None

store = CheckpointStore(Path(sys.argv[1]), keep_last=1, keep_best=0)
save(store, 20, write(1000), facts={})
if sys.argv[2] == "rlimit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
if sys.argv[2] == "safetensors":
    import numpy as np
    from safetensors.numpy import save_file
    write = lambda size: lambda folder: save_file({"w": np.zeros(size, "u1")}, folder / "w.safetensors")
try:
    save(store, 40, write(2_000_000), facts={})
except CheckpointError as error:
    print(json.dumps({"message": str(error), "names": sorted(p.name for p in store.root.iterdir()),
                      "latest": store.latest_valid()[0].step}))
save(store, 60, write(500), facts={})
print(store.steps())
"""


def check_refusal(output: str, reason: str) -> None:
    report = json.loads(output.splitlines()[0])
    assert f"{reason}; checkpoint 20 stays valid. Free space" in report["message"]
    assert report["message"].startswith("checkpoint 40 could not be saved to ")
    assert report["names"] == ["global_step_20", "latest_checkpointed_iteration.txt"]
    assert report["latest"] == 20
    assert output.splitlines()[1] == "[60]", "with room again, the next save works"


def test_a_file_size_limit_of_the_kernel_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REFUSED, str(tmp_path), "rlimit"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    check_refusal(result.stdout, "File too large")


@pytest.mark.parametrize("library", ["plain", "safetensors"])
def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, library: str) -> None:
    # A mount namespace of its own: the small disk goes away with the process.
    shell = 'mount -t tmpfs -o size=1m tmpfs "$1" 2>/dev/null || exit 77; exec "$2" -c "$3" "$1/run" "$4"'
    mounted = ["unshare", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, REFUSED, library]
    try:
        result = subprocess.run(mounted, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no small disk can be mounted")
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this user may not mount a small disk")
    assert result.returncode == 0, result.stderr
    check_refusal(result.stdout, "No space left on device")


@pytest.mark.parametrize(("number", "is_saved"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_knows_no_fsync_of_folders_still_keeps_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_saved: bool
) -> None:
    store = make_store(tmp_path / "checkpoints", steps=(20,))
    fsync = os.fsync

    def of_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    if is_saved:
        save(store, 40, writer(), facts={})
    else:
        with pytest.raises(
            CheckpointError, match="checkpoint 40 could not be saved to .*: Input/output error"
        ):
            save(store, 40, writer(), facts={})
    monkeypatch.undo()
    assert store.steps() == [20, 40][: 1 + is_saved]
