"""The parts of a vLLM engine over two nodes, with real processes and sockets; a program stands for vLLM's Python."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from command_lines import command_line

from strop.controller.errors import FollowerLost
from strop.controller.worker import FollowerAddress, Placement, placed
from strop.engines.config import ModelConfig
from strop.engines.model import weights_of_folder
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import start_vllm
from strop.rollout.vllm.follower import VllmFollower
from strop.rollout.vllm.node_part import NodePart, copied_to_all
from strop.rollout.vllm.process import ServerProcess, VllmDied
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.bucket import shared_bucket

LIMIT_S = 20.0
NODES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # a follower sets them, for its process


def program(folder: Path, headless: str) -> Path:
    """A Python that runs the server as it is, and this in the place of the part of the further node."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\ncase "$1" in *headless.py) {headless};; esac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


WAITS = "cat > {log}.arguments; exec sleep 600"


def settings(model: Path, log: Path) -> Settings:
    return Settings(
        model=str(model), dtype="float32", device="cpu", max_tokens=64, max_running=8, num_threads=1,
        shares_device=False, log=log, nodes=NODES,
    )  # fmt: skip


class Ends(list[str]):
    """Sentences about the end of a part, and a wait for the first."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.append(reason)
        self._event.set()

    def first(self) -> str:
        assert self._event.wait(LIMIT_S)
        return self[0]


@pytest.fixture
def make_follower() -> Iterator[Callable[[Path], VllmFollower]]:
    made: list[VllmFollower] = []

    def make(python: Path) -> VllmFollower:
        with placed(Placement(node=NODES[1])):
            made.append(VllmFollower(VllmConfig(python=str(python))))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


def children_named(word: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if word in command_line(one)]


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_part_gets_the_arguments_of_its_node_and_ends_with_the_connection(
    make_follower: Callable[[Path], VllmFollower], tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "vllm-0-node1.log"
    follower = make_follower(program(tmp_path, WAITS.format(log=tmp_path / "given")))
    made, ends = settings(tiny_model, log), Ends()
    part = NodePart(follower.address(), on_end=ends)
    config = VllmConfig(tensor_parallel=2)
    part.start(made.engine_args(config, node=1, port=1234), env=made.env(node=1), log=log)
    arguments = tmp_path / "given.arguments"
    wait_until(lambda: arguments.exists() and arguments.read_text().endswith("\n"))
    for field in ('"nnodes": 2', '"node_rank": 1', '"master_addr": "127.0.0.1"', '"master_port": 1234'):
        assert field in arguments.read_text()
    assert made.env(node=1)["VLLM_HOST_IP"] == NODES[1]
    wait_until(lambda: children_named("sleep 600"))
    part.close()
    wait_until(lambda: not children_named("sleep 600"))
    assert ends == [], "it was closed, and has not ended by itself"
    assert log.exists()


def test_a_bucket_is_copied_to_the_memory_of_the_other_node(
    make_follower: Callable[[Path], VllmFollower], tiny_model: Path, tmp_path: Path
) -> None:
    follower = make_follower(program(tmp_path, "exec sleep 600"))
    made = settings(tiny_model, tmp_path / "log")
    part = NodePart(follower.address(), on_end=Ends())
    part.start(made.engine_args(VllmConfig(tensor_parallel=2), node=1), env={}, log=tmp_path / "log")
    generator = torch.Generator().manual_seed(0)
    for size in (3, 1 << 20):
        weight = torch.randn(size, generator=generator)
        with (
            shared_bucket([("w", weight)]) as bucket,
            copied_to_all([part], bucket, timeout_s=LIMIT_S) as (here, there),
        ):
            assert here == bucket["path"] != there
            assert Path(there).read_bytes() == weight.numpy().tobytes()
        wait_until(lambda: not Path(there).exists())
    part.close()


def test_a_part_that_ends_says_why_and_ends_every_wait_of_the_engine(
    make_follower: Callable[[Path], VllmFollower], tiny_model: Path, tmp_path: Path
) -> None:
    follower = make_follower(program(tmp_path, "sleep 1; echo 'RuntimeError: no such device' >&2; exit 3"))
    made = settings(tiny_model, tmp_path / "log")
    # The real server, which is asked for what never comes: its answer is that there is no vLLM, so none is asked for.
    server = ServerProcess(Path(sys.executable), log=tmp_path / "server.log", env={})
    os.kill(server.pid, signal.SIGSTOP)
    part = NodePart(follower.address(), on_end=server.end_because)
    part.start(made.engine_args(VllmConfig(tensor_parallel=2), node=1), env={}, log=tmp_path / "log")
    with pytest.raises(
        VllmDied, match=r"its part on node 127.0.0.2 has ended \(exit code 3\): .*no such device"
    ):
        server.ask_now("ping", timeout_s=LIMIT_S)
    with shared_bucket([("w", torch.zeros(3))]) as bucket, pytest.raises(VllmDied, match="no such device"):  # noqa: SIM117
        with copied_to_all([part], bucket, timeout_s=LIMIT_S):
            pass
    part.close()
    server.close()


def test_a_part_that_cannot_start_says_what_python_says(
    make_follower: Callable[[Path], VllmFollower], tiny_model: Path, tmp_path: Path
) -> None:
    made, ends = settings(tiny_model, tmp_path / "log"), Ends()
    part = NodePart(make_follower(Path(sys.executable)).address(), on_end=ends)
    part.start(made.engine_args(VllmConfig(tensor_parallel=2), node=1), env={}, log=tmp_path / "log")
    assert "ModuleNotFoundError: No module named 'vllm'; its log there is" in ends.first()


def test_a_node_without_the_model_or_vllm_is_named_before_anything_runs(
    make_follower: Callable[[Path], VllmFollower], tiny_model: Path, tmp_path: Path
) -> None:
    config, held = VllmConfig(python=sys.executable), weights_of_folder(ModelConfig(path=str(tiny_model)))

    def begin(follower: VllmFollower, model: Path) -> None:
        made = settings(model, tmp_path / "log")
        asyncio.run(start_vllm(config, made, held, version=0, followers=[follower.address()]))

    with pytest.raises(ValueError, match=r"node 127.0.0.2: there is no .*nowhere, whose shape each node"):
        begin(make_follower(Path(sys.executable)), tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"node 127.0.0.2: rollout.vllm.python names .*, which is no program"
    ):
        begin(make_follower(tmp_path / "no python"), tiny_model)
    assert not children_named("server.py"), "the engine of the first node has ended too"


def test_a_follower_that_is_gone_ends_the_worker(tiny_model: Path, tmp_path: Path) -> None:
    # Another process, because its end is what is looked at.
    code = (
        "import sys; from pathlib import Path; from strop.controller.worker import Placement, placed\n"
        "from strop.rollout.vllm.config import VllmConfig; from strop.rollout.vllm.follower import VllmFollower\n"
        f"with placed(Placement(node={NODES[1]!r})): follower = VllmFollower(VllmConfig(python=sys.argv[1]))\n"
        "address = follower.address(); print(address.port, address.secret, flush=True); sys.stdin.read()\n"
    )
    python = program(tmp_path, "exec sleep 600")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(python)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        port, secret = process.stdout.readline().split()
        address = FollowerAddress(host=NODES[1], port=int(port), secret=secret)
        made, ends = settings(tiny_model, tmp_path / "log"), Ends()
        part = NodePart(address, on_end=ends)
        part.start(made.engine_args(VllmConfig(tensor_parallel=2), node=1), env={}, log=tmp_path / "log")
        wait_until(lambda: children_named("sleep 600"))
        (sleeping,) = children_named("sleep 600")
        process.kill()
        assert ends.first() == "the process that holds its devices on node 127.0.0.2 is gone"
        part.close()
        with pytest.raises(FollowerLost, match="holds this rank's devices on node 127.0.0.2 is gone"):
            NodePart(address, on_end=Ends())
        sleeping.kill()  # the stand-in does not look for its parent, as headless.py does
