"""The files of a private cluster are for its user alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import services, utils

from strop.controller.ray import cluster, private
from strop.controller.ray.cluster import Cluster
from strop.utils.ports import free_port


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_new_token_is_for_this_user_alone(home: Path) -> None:
    private.keep_token_private()
    token = home / ".ray" / "auth_token"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) >= 32
    assert [one.name for one in token.parent.iterdir()] == ["auth_token"]
    written = token.read_text()
    private.keep_token_private()
    assert token.read_text() == written, "other clusters of this user have it"


def test_a_token_that_others_could_read_is_closed(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ray itself makes it so."""
    (home / ".ray").mkdir()
    token = home / ".ray" / "auth_token"
    token.write_text("5e" * 32)
    token.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        private.keep_token_private()
    assert mode(token) == 0o600
    was_reachable = all(folder.stat().st_mode & 0o001 for folder in token.parents)
    assert ("other users of this machine could read" in caplog.text) is was_reachable


def test_without_a_home_the_processes_of_the_run_share_a_token(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # restored afterwards
    private.keep_token_private()
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32


def test_the_folder_of_a_cluster_is_private_and_has_room_for_the_names_of_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    for base in (tmp_path, deep):
        monkeypatch.setenv("RAY_TMPDIR", str(base))
        folder = private.PrivateFolder()
        assert mode(folder.path) == 0o700
        inside = "/ray/session_2026-11-22_11-17-42_393286_4194304/sockets/plasma_store"
        assert len(str(folder.path)) + len(inside) <= 107
        folder.remove()
        assert not folder.path.exists()


def test_folders_of_killed_processes_are_removed_and_those_in_use_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private, "_MAX_FOLDER_LENGTH", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    stale, young = (tmp_path / f"strop-ray-{name}" for name in ("stale", "young"))
    for folder in (stale, young):
        folder.mkdir()
    (stale / "lock").touch()
    (tmp_path / "strop-ray-link").symlink_to(tmp_path / "elsewhere")
    first = private.PrivateFolder()
    second = private.PrivateFolder()
    assert not stale.exists()
    assert first.path.exists()
    assert young.exists()
    first.remove()
    second.remove()


def test_a_folder_that_ray_tmpdir_names_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_MAX_FOLDER_LENGTH", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "scratch" / "ray"))
    folder = private.PrivateFolder()
    assert folder.path.parent == tmp_path / "scratch" / "ray"
    folder.remove()


def test_auto_does_not_wait_for_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries for many minutes, in which the process cannot be ended."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("nothing answers there"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError, match=rf"^RAY_ADDRESS says {address}, where no Ray cluster answers"):
        Cluster("auto")


@pytest.mark.parametrize("exported", ["", "auto"])
@pytest.mark.parametrize("noted", [None, "192.0.2.1:6379", "127.0.0.1:7000"])
def test_auto_does_not_join_the_private_cluster_of_another_run(
    noted: str | None, exported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes any that it finds among the processes, whatever it has noted of one that is gone."""
    monkeypatch.setenv("RAY_ADDRESS", exported)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"127.0.0.1:6999"})
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: noted)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("it is not ours"))
    with pytest.raises(
        ConnectionError, match=r"^the Ray cluster at 127\.0\.0\.1:6999 is the private one of another"
    ):
        Cluster("auto")


def test_auto_without_any_cluster_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray names an option of its own commands."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        ConnectionError, match=r"^resources\.address is auto, but no Ray cluster runs on this"
    ):
        Cluster("auto")


def test_auto_reaches_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def join(**options: object) -> None:
        raise Reached(options["address"])

    reached: list[tuple[str, int]] = []
    monkeypatch.setattr(
        cluster.socket, "create_connection", lambda place, timeout: reached.append(place) or socket.socket()
    )
    monkeypatch.setenv("RAY_ADDRESS", "[2001:db8::1]:6379")
    monkeypatch.setattr(ray, "init", join)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Reached, match=r"^\[2001:db8::1\]:6379$"):
        Cluster("auto")
    assert set(reached) == {("2001:db8::1", 6379)}


@pytest.mark.parametrize(("exported", "is_said"), [("10.0.0.1:6379", True), ("local", False), ("", False)])
def test_a_cluster_of_its_own_beside_one_that_ray_address_names_is_said(
    exported: str, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Began(Exception):
        pass

    def begin(**options: object) -> None:
        assert options["address"] == "local"
        raise Began

    monkeypatch.setenv("RAY_ADDRESS", exported)
    monkeypatch.setattr(ray, "init", begin)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with caplog.at_level(logging.WARNING), pytest.raises(Began):
        Cluster()
    said = "RAY_ADDRESS names a cluster, 10.0.0.1:6379, but resources.address does not"
    assert (said in caplog.text, "RAY_ADDRESS" in caplog.text) == (is_said, is_said)


def test_a_store_that_shared_memory_has_no_room_for_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers of Docker have 64 MiB of shared memory, and Ray starts no store below 75."""
    free = {"/dev/shm": 64 << 20, str(tmp_path): 1 << 40}
    monkeypatch.setattr(
        private.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free[str(folder)], f_frsize=1)
    )
    with caplog.at_level(logging.WARNING):
        assert private.store_options(tmp_path) == {
            "object_store_memory": 1 << 30,
            "_plasma_directory": str(tmp_path),
        }
    assert "--shm-size" in caplog.text
    free["/dev/shm"] = 1 << 30
    assert private.store_options(tmp_path) == {"object_store_memory": int(0.3 * (1 << 30))}
    free["/dev/shm"] = 1 << 40
    assert private.store_options(tmp_path) == {"object_store_memory": 1 << 30}


@pytest.mark.parametrize(
    ("on_disk", "shared", "sentence"),
    [
        (7, 1 << 20, "has 7 MiB free for the files of a Ray cluster; make room there, or name another"),
        (200, 64, "has 200 MiB free for Ray's object store, and /dev/shm is too small for it; make room"),
    ],
)
def test_a_full_disk_is_named_before_ray_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: int, shared: int, sentence: str
) -> None:
    """Ray's servers do not come up there, and it says no more than that. 200 MiB x 0.3 are less than Ray's 75."""
    free = {"/dev/shm": shared << 20, str(tmp_path): on_disk << 20}
    monkeypatch.setattr(
        private.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free[str(folder)], f_frsize=1)
    )
    with pytest.raises(
        ConnectionError, match=f"^could not start a Ray cluster: {tmp_path.parent} {sentence}"
    ):
        private.store_options(tmp_path)


@pytest.mark.slow
def test_a_cluster_leaves_the_signals_and_no_file() -> None:
    # In a process of its own: other tests keep a cluster in this one.
    alone = multiprocessing.get_context("spawn").Process(target=_start_and_end_a_cluster)
    alone.start()
    alone.join(120)
    assert alone.exitcode == 0


@pytest.mark.slow
def test_a_start_that_ray_gives_up_is_tried_once_more() -> None:
    alone = multiprocessing.get_context("spawn").Process(target=_start_late)
    alone.start()
    alone.join(120)
    assert alone.exitcode == 0


def _start_late() -> None:
    init, left, are_late = ray.init, [], iter([True, False, True, True])

    def late(**options: object) -> object:
        if next(are_late):
            left.append(subprocess.Popen(["sleep", "100"]))  # in place of a server of Ray's
            raise Exception("The current node timed out during startup.")  # as Ray does
        return init(**options)

    ray.init = late
    cluster = Cluster()
    assert left[0].wait(10) == -signal.SIGKILL
    cluster.close()
    with pytest.raises(ConnectionError, match=r"^could not start a Ray cluster: .* timed out .*, twice$"):
        Cluster()


def _start_and_end_a_cluster() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    share_fate = utils.set_kill_on_parent_death_linux
    cluster = Cluster()
    node = ray._private.worker.global_worker.node
    session = Path(node.get_session_dir_path())
    folder = session.parents[1]
    assert mode(folder) == 0o700
    servers = [one.process.pid for kind in node.all_processes.values() for one in kind]
    assert servers
    assert all(os.getsid(pid) == pid for pid in servers), "they do not get the signals of our group"
    assert {number: signal.getsignal(number) for number in before} == before
    assert utils.set_kill_on_parent_death_linux is share_fate
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert "raylet" in names
    assert not [name for name in names if "IDLE" in name], "no process waits for tasks"
    cluster.close()
    assert not folder.exists()
