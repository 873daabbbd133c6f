"""`strop doctor RUN --sockets`: the listing is the system's own, whatever listens."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_calls import cli

from strop.cli.doctor import listing
from strop.cli.doctor import sockets as module
from strop.controller import socket_notes
from strop.run import RunConfig, RunFolder

WRITER = """
import os, socket, subprocess, sys
from pathlib import Path
from strop.utils import notes
from strop.controller.auth_listener import Gate
from strop.run import RunConfig, RunFolder

folder = Path(sys.argv[1])
run = RunFolder.create(folder, config={}, command=["strop", "train"], settings=RunConfig())
notes.keep_in(folder / "logs" / "controller.sockets")
gate = Gate("127.0.0.1", "secret", purpose="weight sync", welcome=socket.socket.close)
held = [socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0))]
if socket.has_dualstack_ipv6():
    held += [socket.create_server((host, 0), family=socket.AF_INET6) for host in ("::1", "::")]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
connected = socket.create_connection(held[1].getsockname())
for name in ("\\0strop-test-" + str(os.getpid()), str(folder / "open"), str(folder / "closed")):
    one = socket.socket(socket.AF_UNIX)
    one.bind(name)
    one.listen()
    held.append(one)
os.chmod(folder / "open", 0o777)
os.chmod(folder / "closed", 0o700)
child = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); time.sleep(300)"
fake = ["ray::IDLE", "-c", child]
process = subprocess.Popen(fake, executable=sys.executable, stdout=subprocess.PIPE, start_new_session=True)
process.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
process.kill()
"""
"""Writes a run, listens in every way there is, and has a child that listens too."""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, psutil.Process]]:
    # Not below the folder of all tests, which only this user can enter.
    folder = Path(f"/tmp/strop-test-{os.getpid()}")
    folder.mkdir(mode=0o755)
    run = folder / "run"
    command = [sys.executable, "-c", WRITER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield run, psutil.Process(process.pid)
        process.stdin.close()
        process.wait(20)
    subprocess.run(["rm", "-r", str(folder)], check=True)


def of_the_system(process: psutil.Process) -> set[tuple[int, str, str, int]]:
    """What psutil sees of a process and its children that others can speak to."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        for c in one.net_connections("inet"):
            listens = c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)
            if listens:
                found.add(
                    (one.pid, "tcp" if c.type == socket.SOCK_STREAM else "udp", c.laddr.ip, c.laddr.port)
                )
        found |= {
            (one.pid, "unix", c.laddr, 0) for c in one.net_connections("unix") if c.laddr and not c.raddr
        }
    return found


def test_nothing_is_missing_and_nothing_is_made_up(writer: tuple[Path, psutil.Process]) -> None:
    run, process = writer
    result = cli("doctor", run, "--sockets", "--json")
    found = json.loads(result.out)["sockets"]
    listed = {(one["pid"], one["protocol"], one["address"], one["port"]) for one in found}
    assert listed == of_the_system(process)
    assert len(listed) == len(found) >= 7
    assert result.code == 1, "some are open to everybody"
    for one in found:
        private = one["protocol"] != "unix" and one["address"] in ("127.0.0.1", "::1")
        private |= one["address"].endswith("/closed")
        assert one["open"] is not private, one
        assert bool(one["protection"]) is private


def test_what_a_socket_is_for_and_what_protects_it(writer: tuple[Path, psutil.Process]) -> None:
    run, process = writer
    found = json.loads(cli("doctor", run, "--sockets", "--json").out)["sockets"]
    (gate,) = [one for one in found if "secret" in one["protection"]]
    assert (gate["purpose"], gate["process"], gate["protection"]) == (
        "weight sync",
        "controller",
        ["loopback", "secret"],
    )
    (child,) = [one for one in found if one["pid"] != process.pid]
    assert (child["process"].startswith("program python"), child["protection"]) == (True, ["loopback"])
    assert child["purpose"] == "opened by the program", "it calls itself a process of Ray"
    assert {one["user"] for one in found} == {psutil.Process().username()}


def test_the_table_says_what_is_open_and_what_to_do(writer: tuple[Path, psutil.Process]) -> None:
    run, _ = writer
    result = cli("doctor", run, "--sockets")
    lines = result.out.splitlines()
    assert sum(line.startswith("OPEN  controller") for line in lines) == sum(
        line.endswith("no protection") for line in lines
    )
    assert "listening sockets of" in result.out
    assert "keep such ports behind a firewall" in result.out
    assert "other users of this machine reach them" in result.out


def test_a_run_that_does_not_go_on_has_no_sockets(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"], settings=RunConfig()).close()
    result = cli("doctor", tmp_path / "run", "--sockets")
    assert result.code == 2
    assert "no process of this machine writes the run" in result.err
    # A lock left behind whose number belongs to another process now.
    (tmp_path / "run" / "lock").write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert "no process of this machine writes the run" in cli("doctor", tmp_path / "run", "--sockets").err
    for damage in ("[" * 100_000, '{"pid": "x"}', '{"pid": -1}', "\ud83d".encode("utf-8", "surrogatepass")):
        (tmp_path / "run" / "lock").write_bytes(damage if isinstance(damage, bytes) else damage.encode())
        assert "no process of this machine writes the run" in cli("doctor", tmp_path / "run", "--sockets").err
    (tmp_path / "run" / "lock").unlink()
    os.mkfifo(tmp_path / "run" / "lock")
    assert "no process of this machine writes the run" in cli("doctor", tmp_path / "run", "--sockets").err
    assert "name its folder" in cli("doctor", "--sockets").err


def test_notes_are_hints_and_never_hide_a_socket(tmp_path: Path) -> None:
    file = tmp_path / "x.sockets"
    file.write_text(
        '{"inode": 1, "purpose": "a", "authenticated": "yes"}\n[[[\n{"inode": 2}\n' + "[" * 100_000 + "\n"
    )
    assert socket_notes.read(file) == {1: ("a", False)}
    assert socket_notes.read(tmp_path / "absent") == {}
    os.mkfifo(tmp_path / "pipe")
    assert socket_notes.read(tmp_path / "pipe") == {}


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_is_told_whose_run_it_is(writer: tuple[Path, psutil.Process]) -> None:
    run, process = writer
    before = os.getresuid()
    hidden: list[int] = []
    os.seteuid(65534)
    try:
        assert listing.listeners([process.pid], hidden=hidden) == []
        assert hidden == [process.pid], "nothing is left out without a word"
        with pytest.raises(ValueError, match="belong to root; look at their sockets as that user or as root"):
            module.sockets_of(run)
    finally:
        os.setresuid(*before)


def test_a_socket_is_private_where_one_folder_above_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o777)
    (tmp_path / "file").chmod(0o777)
    tmp_path.chmod(0o700)
    assert not listing.is_reachable_by_others(tmp_path / "file")
    assert not listing.is_reachable_by_others(tmp_path / "absent")


def test_addresses_of_the_kernel() -> None:
    assert listing._address("0100007F") == "127.0.0.1"
    assert listing._address("00000000000000000000000001000000") == "::1"
    assert listing._address("0000000000000000FFFF00000100007F") == "127.0.0.1"


ALONE = "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(flush=True); sys.stdin.read()"


def test_a_process_with_a_network_of_its_own_is_told_apart_from_one_that_everybody_reaches() -> None:
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-c", ALONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("this user may make no network")
        (found,) = listing.listeners([process.pid])
        assert (found.address, found.is_in_own_network) == ("0.0.0.0", True)
        (found,) = listing.listeners([process.pid], home=process.pid)
        assert not found.is_in_own_network, "where the whole run is there, nothing keeps others out"
        process.communicate("")


def test_a_name_with_line_breaks_neither_hides_a_socket_nor_ends_the_listing(tmp_path: Path) -> None:
    with (
        contextlib.chdir(tmp_path),
        socket.create_server(("127.0.0.1", 0)) as real,
        contextlib.ExitStack() as held,
    ):
        inode = os.fstat(real.fileno()).st_ino
        forged = f"0000000000000000: 00000002 00000000 00010000 0001 01 {inode} made up"
        for name in ("a\nb c\n", f"c\n{forged}", "\ud83d", "\x1b[2Jboo"):
            one = held.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(os.fsencode(name) if name != "\ud83d" else b"\xff")
            one.listen()
        found = listing.listeners([os.getpid()])
        assert ("tcp", "127.0.0.1", real.getsockname()[1]) in {
            (each.protocol, each.address, each.port) for each in found if each.inode == inode
        }
        assert sum(each.protocol == "unix" for each in found) >= 4
