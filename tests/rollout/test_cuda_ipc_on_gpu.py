"""Memory of a GPU that two processes share, and weights through it. Nobody has run these yet."""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path

import pytest
import torch
from rollout.sync_cases import BUCKET_BYTES, bits, net
from rollout.test_weight_sync_processes import kill_this_process, read_endpoint, write_endpoint
from torch import nn

from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.cuda_ipc import CudaDevice
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender

pytestmark = pytest.mark.gpu

SPAWN = multiprocessing.get_context("spawn")
ROOM_BYTES = 1 << 20
"""What torch may need beside."""


def bits_of(model: nn.Module) -> dict[str, bytes]:
    copy = net(0)
    copy.load_state_dict(model.state_dict())
    return bits(copy)


def receive(file: Path, folder: str) -> None:
    """The side of a receiver, which ends with 0 if its bits are those of the sender."""
    shared_memory.FOLDER = Path(folder)
    copy, expected = net(2).cuda(), net(1)
    receiver = WeightReceiver(ModuleTarget(copy), device="cuda:0", timeout_s=60.0)
    receiver.join(read_endpoint(file), index=0)
    for version in (1, 2):
        assert receiver.receive(version).transport == "cuda_ipc"
        assert bits_of(copy) == bits(expected)
        with torch.no_grad():
            expected.embed.weight.add_(1)
    receiver.close()


def test_two_processes_share_memory_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    model = net(1).cuda()
    before = torch.cuda.memory_allocated()
    sender = WeightSender(model, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    write_endpoint(endpoint, tmp_path / "endpoint")
    process = SPAWN.Process(target=receive, args=(tmp_path / "endpoint", str(tmp_path)), daemon=True)
    process.start()
    for version in (1, 2):
        assert sender.send(version).transport == "cuda_ipc"
        with torch.no_grad():
            model.embed.weight.add_(1)
    process.join(60)
    assert process.exitcode == 0
    sender.close()
    assert torch.cuda.memory_allocated() - before < ROOM_BYTES


def die_with_open_memory(file: Path) -> None:
    device = CudaDevice(torch.device("cuda"))
    memory = device.open(json.loads(file.read_text()))
    assert memory[:4].tolist() == [7, 7, 7, 7]
    memory[4:8] = 9
    device.synchronize()
    kill_this_process()


def test_a_process_that_was_killed_holds_no_memory_of_a_gpu(tmp_path: Path) -> None:
    device = CudaDevice(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    memory = device.allocate(8 * ROOM_BYTES)
    memory.fill_(7)
    exported = device.export(memory)
    file = tmp_path / "exported"
    file.write_text(json.dumps(exported))
    process = SPAWN.Process(target=die_with_open_memory, args=(file,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert memory[:12].tolist() == [7] * 4 + [9] * 4 + [7] * 4
    device.take_back(exported)
    del memory
    assert torch.cuda.memory_allocated() == before


def test_a_handle_of_nothing_is_an_error_with_a_reason() -> None:
    device = CudaDevice(torch.device("cuda"))
    exported = device.export(device.allocate(64))
    with pytest.raises(OSError, match="cannot open memory of"):
        device.open({**exported, "handle": "00" * (len(exported["handle"]) // 2)})
