"""The SGLang adapter against a server that speaks SGLang's protocol on loopback (tests/rollout/sglang_server).

The real engine has no build for a CPU: what its kernels compute is not tested here. The stand-in holds bodies against
schemas read from the package's source, and computes with strop's own engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from sglang_schemas import schemas

from references.language_models import load_plain, plain_greedy, plain_log_probs
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.weights import named_weights, weights_metadata
from strop.rollout.sglang.config import SglangConfig
from strop.rollout.sglang.engine import SglangEngine, SglangSettings, start_sglang
from strop.rollout.sglang.process import SglangDied
from strop.rollout.types import Sampling, TokenOutput

HERE = Path(__file__).parent
CONTEXT = 4096
LONG = 3000
"""An answer that cannot end before what is done to it has arrived, however fast the machine is."""


def settings(folder: Path, tmp_path: Path) -> SglangSettings:
    return SglangSettings(
        model=str(folder),
        trust_remote_code=False,
        dtype="float32",
        vocab_size=61,
        max_tokens=CONTEXT,
        max_running=8,
        log=tmp_path / "sglang.log",
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that can import the stand-in as `sglang`."""
    path = tmp_path_factory.mktemp("sglang") / "python"
    root = f"{HERE / 'sglang_server'}:{HERE.parents[1]}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with positions for long answers."""
    path = tmp_path_factory.mktemp("long") / "qwen3"
    shutil.copytree(tiny_folder("qwen3"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return path


async def started(python: str, folder: Path, logs: Path, unused: tuple[int, ...] = ()) -> SglangEngine:
    """An engine with the weights of the tiny model, at version 1."""
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    config = SglangConfig(python=python, start_timeout_s=60)
    made = dataclasses.replace(settings(folder, logs), unused_tokens=unused)
    engine = await start_sglang(config, made, weights_metadata(module), version=0)
    await asyncio.to_thread(write, engine, module)
    await engine.set_version(1)
    return engine


@pytest.fixture(scope="module")
def engine(python: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One for all tests that leave it as it was, started where log-probs before the temperature are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        made = asyncio.run(started(python, folder, tmp_path_factory.mktemp("logs")))
    yield made
    asyncio.run(made.close())


def write(engine: SglangEngine, module: torch.nn.Module, scale: float = 1.0) -> None:
    live = named_weights(module)
    names = [weight.names[0] for weight in engine.target.weights_metadata()]
    for half in (names[::2], names[1::2]):  # two buckets
        engine.target.load([(name, live[name].detach() * scale) for name in half])


def test_tokens_log_probs_and_greedy_answers_are_those_of_the_model(
    engine: SglangEngine, folder: Path
) -> None:
    plain = load_plain(folder, dtype=torch.float32)
    prompt, heard = [3, 9, 27, 4], []

    async def work() -> None:
        greedy = await engine.generate("greedy", prompt, Sampling(key=0, temperature=0.0, max_tokens=9))
        assert list(greedy.token_ids) == plain_greedy(plain, prompt, 9)
        sampled = await engine.generate(
            "sampled",
            prompt,
            Sampling(key=5, max_tokens=12, temperature=0.7),
            on_token=lambda *t: heard.append(t),
        )
        assert (sampled.stop_reason, len(sampled.token_ids)) == ("length", 12)
        with torch.no_grad():
            wanted, _ = plain_log_probs(plain, prompt, sampled.token_ids, temperature=0.7)
        torch.testing.assert_close(torch.tensor(sampled.log_probs), wanted, atol=1e-5, rtol=1e-5)
        assert set(sampled.versions) == {engine.version}
        assert heard == list(zip(sampled.token_ids, sampled.log_probs, sampled.versions, strict=True))
        stop = sampled.token_ids[3]
        stopped = await engine.generate(
            "stop", prompt, Sampling(key=5, max_tokens=12, temperature=0.7, stop_token_ids=(stop,))
        )
        assert (stopped.stop_reason, stopped.token_ids[-1]) == ("stop", stop)
        scores = await engine.log_probs([*prompt, *sampled.token_ids])
        with torch.no_grad():
            wanted, _ = plain_log_probs(plain, prompt[:1], [*prompt[1:], *sampled.token_ids], temperature=1.0)
        torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-5, rtol=1e-5)
        assert (await engine.health())["version"] == engine.version

    asyncio.run(work())


def test_tokens_that_no_text_has_are_never_sampled(python: str, folder: Path, tmp_path: Path) -> None:
    plain, prompt, unused = load_plain(folder, dtype=torch.float32), [3, 9, 27, 4], tuple(range(40, 61))

    async def work() -> None:
        engine = await started(python, folder, tmp_path, unused)
        try:
            made = await engine.generate("a", prompt, Sampling(key=5, max_tokens=60))
        finally:
            await engine.close()
        assert max(made.token_ids) == 39, "the largest one that is left comes among 60"
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *made.token_ids]])).logits[0, len(prompt) - 1 : -1, :40]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.log_probs), expected, atol=1e-4, rtol=0)

    asyncio.run(work())


def test_new_weights_are_used_and_verified_and_stamped(engine: SglangEngine, folder: Path) -> None:
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module

    async def work() -> None:
        prompt, how = [3, 9, 27, 4], Sampling(key=1, max_tokens=8)
        before = await engine.generate("a", prompt, how)
        await asyncio.to_thread(write, engine, module, 1.3)
        await engine.set_version(2)
        after = await engine.generate("b", prompt, how)
        assert (set(before.versions), set(after.versions)) == ({1}, {2})
        scaled = load_plain(folder, dtype=torch.float32)
        with torch.no_grad():
            for parameter in scaled.parameters():
                parameter.mul_(1.3)
            wanted, _ = plain_log_probs(scaled, prompt, after.token_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(after.log_probs), wanted, atol=1e-4, rtol=1e-4)
        names = [weight.names[0] for weight in engine.target.weights_metadata()]
        assert set(engine.target.digests(names)) == set(names)
        with pytest.raises(ValueError, match="version 1 was set after version 2"):
            await engine.set_version(1)
        await asyncio.to_thread(write, engine, module)
        await engine.set_version(3)

    asyncio.run(work())


@pytest.mark.slow
def test_a_tensor_that_does_not_arrive_as_it_was_sent_is_refused(
    python: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    name = "model.norm.weight"

    async def work() -> None:
        engine = await started(python, folder, tmp_path)
        monkeypatch.setattr("strop.rollout.weight_sync.bucket.digest_tensor", lambda tensor: 7)
        sent = [(name, named_weights(module)[name])]
        with pytest.raises(RuntimeError, match=f"{name} arrived with digest [0-9a-f]+ instead of 0+7"):
            await asyncio.to_thread(engine.target.load, sent)
        await engine.close()

    asyncio.run(work())


def test_pause_abort_and_continue(engine: SglangEngine) -> None:
    async def work() -> None:
        heard: list[int] = []
        running = asyncio.create_task(
            engine.generate(
                "a", [3, 4], Sampling(key=1, max_tokens=LONG), on_token=lambda *t: heard.append(t[0])
            )
        )
        while len(heard) < 3 and not running.done():
            await asyncio.sleep(0.01)
        await engine.pause()
        held = len(heard)
        await asyncio.sleep(0.2)
        assert len(heard) <= held + 2, "nothing is generated in a pause"
        with pytest.raises(ValueError, match="request a is already running"):
            await engine.generate("a", [3], Sampling(key=1, max_tokens=1))
        with pytest.raises(ValueError, match="1 requests are running"):
            await engine.sleep()
        await engine.abort(["a", "unknown"])
        output = await running
        assert (output.stop_reason, list(output.token_ids)) == ("aborted", heard)
        assert len(output.log_probs) == len(output.versions) == len(output.token_ids) < LONG
        await engine.resume()
        assert len((await engine.generate("b", [3, 4], Sampling(key=1, max_tokens=4))).token_ids) == 4

    asyncio.run(work())


def test_nothing_goes_on_with_half_of_the_weights(engine: SglangEngine, folder: Path) -> None:
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module

    async def work() -> None:
        heard: list[int] = []
        running = asyncio.create_task(
            engine.generate(
                "a", [3, 4], Sampling(key=1, max_tokens=LONG), on_token=lambda *t: heard.append(t[0])
            )
        )
        while len(heard) < 3 and not running.done():
            await asyncio.sleep(0.01)
        await engine.pause()
        await asyncio.to_thread(write, engine, module)
        await engine.resume()
        assert (await engine.health())["running"] == 1.0, "it is asked without a token"
        held = len(heard)
        await asyncio.sleep(0.2)
        assert len(heard) == held < LONG
        before = engine.version
        await engine.set_version(before + 1)
        output = await running
        assert set(output.versions) == {before, before + 1}
        assert len(output.token_ids) == LONG

    asyncio.run(work())


def test_memory_is_given_back_and_taken_again(engine: SglangEngine) -> None:
    async def work() -> None:
        await engine.sleep(1)
        await engine.sleep(2)
        assert (await engine.health())["running"] == 0.0, "asleep, it is asked without a token"
        await engine.wake_up(("weights",))
        assert engine._tags == ["kv_cache"]
        await engine.wake_up()
        await engine.wake_up()
        output: TokenOutput = await engine.generate("a", [3, 4], Sampling(key=1, max_tokens=2))
        assert len(output.token_ids) == 2
        asked = (await engine._process.get("model_info", timeout_s=5))["asked"]
        assert asked.count("/release_memory_occupation") == 2
        assert asked.count("/resume_memory_occupation") == 2

    asyncio.run(work())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 1, "0 prompt tokens"),
        ([61], 1, "vocabulary has 61; is it the tokenizer"),
        ([3] * 10, CONTEXT - 9, f"SGLang was started for {CONTEXT} tokens"),
    ],
)
def test_requests_that_it_cannot_serve(
    prompt: list[int], max_tokens: int, sentence: str, tmp_path: Path
) -> None:
    engine = SglangEngine.__new__(SglangEngine)  # refused before anything is asked of the server
    engine._settings, engine._running = settings(tmp_path, tmp_path), {}
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(engine.generate("a", prompt, Sampling(key=0, max_tokens=max_tokens)))


@pytest.mark.slow
def test_a_server_that_is_killed_is_noticed(python: str, folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        engine = await started(python, folder, tmp_path)
        heard: list[int] = []
        running = asyncio.create_task(
            engine.generate(
                "a", [3, 4], Sampling(key=1, max_tokens=LONG), on_token=lambda *t: heard.append(t[0])
            )
        )
        while not heard:
            await asyncio.sleep(0.01)
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(SglangDied, match="SGLang broke generate off.*its log is"):
            await running
        with pytest.raises(SglangDied, match="does not answer"):
            await engine.pause()
        await engine.close()

    asyncio.run(work())


def test_log_probs_stay_at_the_temperature_whatever_is_exported(engine: SglangEngine) -> None:
    """With the variable, which was exported here, SGLang gives those before the temperature."""
    assert psutil.Process(engine.pid).environ()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


OWNER = """
import json, os, signal, sys
from pathlib import Path
from strop.rollout.sglang.process import SglangProcess
python, arguments, log = sys.argv[1:]
print(SglangProcess(Path(python), json.loads(arguments), log=Path(log), env={}).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_its_owner(python: str, folder: Path, tmp_path: Path) -> None:
    arguments = json.dumps(settings(folder, tmp_path).server_args(SglangConfig()))
    command = [sys.executable, "-c", OWNER, python, arguments, str(tmp_path / "log")]
    owner = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert owner.returncode == -signal.SIGKILL
    server, until = int(owner.stdout), time.monotonic() + 20
    while is_alive(server) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(server), f"the server outlived its owner: {server}"


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_does_not_start_says_why(python: str, folder: Path, tmp_path: Path) -> None:
    held = weights_metadata(load_model(ModelConfig(path=str(folder)), device="cpu").module)
    config = SglangConfig(python=python, start_timeout_s=60, server_args={"log_level": "fatal"})
    with pytest.raises(SglangDied, match="could not start.*exit code 1.*CUDA out of memory"):
        asyncio.run(start_sglang(config, settings(folder, tmp_path), held, version=0))
    config = SglangConfig(python=python, start_timeout_s=60, server_args={"no_such": 1})
    with pytest.raises(SglangDied, match="unexpected keyword argument 'no_such'"):
        asyncio.run(start_sglang(config, settings(folder, tmp_path), held, version=0))


def test_no_python_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.delenv("STROP_SGLANG", raising=False)
    held = weights_metadata(load_model(ModelConfig(path=str(folder)), device="cpu").module)
    for config, sentence in (
        (SglangConfig(), "name its Python with rollout.sglang.python or STROP_SGLANG"),
        (SglangConfig(python="/nowhere"), "rollout.sglang.python names '/nowhere', which is no program"),
    ):
        with pytest.raises(ValueError, match=sentence):
            asyncio.run(start_sglang(config, settings(folder, tmp_path), held, version=0))
    with pytest.raises(ValueError, match="server_args names tp_size, which follows from other settings"):
        SglangConfig(server_args={"tp_size": 2})


def test_schemas_are_those_of_the_package() -> None:
    unpacked = os.environ.get("STROP_SGLANG_SOURCE")
    if not unpacked:
        pytest.skip("STROP_SGLANG_SOURCE names no folder with the unpacked package")
    assert json.loads((HERE / "sglang_0_5_23.json").read_text()) == schemas(Path(unpacked))
