"""`strop doctor --engines`: a live check of the installed rollout engines, on a small model made for it.

The whole contract of an engine is in tests/rollout/engine_contract; here it is started, and what a run asks of it in
every step is asked once.

Concurrency: one asyncio loop per engine, as an engine is called in a run. Each check has a deadline.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from strop.cli.versions import versions_in
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.training import Engine
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext
from strop.rollout.native.engine import NativeEngine
from strop.rollout.registry import NATIVE, OWN_PROCESSES
from strop.rollout.types import RolloutEngine, Sampling, TokenOutput
from strop.rollout.vllm.environment import COMMAND
from strop.rollout.weight_sync.load_weights import loaded, pull_weights
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.probe import TOLERANCE
from strop.rollout.weight_sync.target import WeightTarget
from strop.utils.quiet_libraries import quiet_libraries
from strop.utils.terminal import plain, print_json, print_plain

LIMIT_S = 120.0
"""Deadline of one check: an engine in a process of its own may compile something first."""
ADVICE = {
    NATIVE: "Install the versions of torch and transformers that strop is tested with (constraints.txt)",
    "sglang": "Install the SGLang that strop is tested with (docs/rollout.md); its log says more",
    "vllm": f"Install the vLLM that strop is tested with: {COMMAND}",
}
"""Remedy for an engine that fails, by engine."""
PROMPT = tuple(range(5, 17))
NUM_TOKENS, NUM_LONG = 12, 2048
"""Tokens of a response, and of one that is aborted: an engine in a process of its own runs ahead of what is heard."""


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """The outcome of one check."""

    check: str
    outcome: Literal["ok", "failed"]
    text: str = ""
    """The problem, and the remedy."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """An engine on the small model, and the same model in a training engine."""

    engine: RolloutEngine
    target: WeightTarget
    trained: Engine

    async def greedy(self) -> TokenOutput:
        """The most likely tokens behind `PROMPT`."""
        sampling = Sampling(key=0, temperature=0.0, max_tokens=NUM_TOKENS)
        return await self.engine.generate("greedy", PROMPT, sampling)

    def gap(self, output: TokenOutput) -> str:
        """Mean difference of the log-probs from those of the trainer's model, in words; "" within rounding."""
        rows = make_rows([torch.tensor(PROMPT)], [torch.tensor(output.token_ids)])
        columns = self.trained.map_tokens(
            rows, lambda tokens: {"log_probs": tokens.log_probs(temperature=1.0)[0]}
        )
        mean = float((torch.tensor(output.log_probs) - columns["log_probs"]).abs().mean())
        if mean <= TOLERANCE["float32"]:
            return ""
        return (
            f"log-probs differ by {mean:.3g} on average from those of the trainer's model; rounding accounts for "
            f"{TOLERANCE['float32']:g}"
        )


async def start_engine(name: str, folder: Path) -> StartedEngine:
    """The engine that `rollout.engine` names, with the weights of a model folder."""
    model = ModelConfig(path=str(folder), dtype="float32")
    trained = Engine(load_model(model, device="cpu"), EngineConfig(), is_frozen=True)
    if name == NATIVE:
        policy = load_model(model, device="cpu")
        engine = NativeEngine(policy, max_running=8)
        return StartedEngine(engine=engine, target=ModuleTarget(policy.module), trained=trained)
    rollout = RolloutConfig(engine=name, max_running=8)
    context = EngineContext(
        model=model, rollout=rollout, device="auto", version=0, trained=None, logs=folder, rank=0,
        max_tokens=trained.model.max_positions or 0,
    )  # fmt: skip
    generation = await loaded(context)
    assert generation.target is not None, "an engine in processes of its own has weights of its own"
    return StartedEngine(engine=generation.engine, target=generation.target, trained=trained)


async def _repeats(started: StartedEngine) -> str:
    first, second = (await started.greedy()).token_ids, (await started.greedy()).token_ids
    if len(first) != NUM_TOKENS:
        return f"{NUM_TOKENS} tokens were asked for, {len(first)} came"
    return "" if first == second else f"the same prompt gave {first}, and then {second}"


async def _agrees(started: StartedEngine) -> str:
    return started.gap(await started.greedy())


async def _takes_weights(started: StartedEngine) -> str:
    with torch.no_grad():
        for _, parameter in started.trained.model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(parameter.flip(0))  # other weights, far beyond rounding
    await asyncio.to_thread(pull_weights, started.trained, started.target)
    version = started.engine.version + 1
    await started.engine.set_version(version)
    output = await started.greedy()
    if set(output.versions) != {version}:
        return f"version {version} was set; tokens carry {sorted(set(output.versions))}"
    return started.gap(output)


async def _sleeps(started: StartedEngine) -> str:
    before = (await started.greedy()).token_ids
    await started.engine.sleep()
    await started.engine.wake_up()
    again = (await started.greedy()).token_ids
    return "" if again == before else f"greedy decoding gave {before} before, and {again} after it"


async def _aborts(started: StartedEngine) -> str:
    has_begun = asyncio.Event()
    sampling = Sampling(key=0, max_tokens=NUM_LONG)
    request = asyncio.create_task(
        started.engine.generate("long", PROMPT, sampling, on_token=lambda *_: has_begun.set())
    )
    begun = asyncio.create_task(has_begun.wait())
    await asyncio.wait([request, begun], return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    await started.engine.abort(["long"])
    output = await request
    if output.stop_reason == "aborted" and 0 < len(output.token_ids) < NUM_LONG:
        return ""
    return (
        f"aborted, a request of {NUM_LONG} tokens ends by {output.stop_reason!r} with {len(output.token_ids)}"
    )


CHECKS: tuple[tuple[str, Callable[[StartedEngine], Awaitable[str]]], ...] = (
    ("greedy decoding repeats itself", _repeats),
    ("log-probs are those of the trainer's model", _agrees),
    ("new weights are used", _takes_weights),
    ("sleeps and wakes up", _sleeps),
    ("an aborted request returns what it has", _aborts),
)
"""Each gives a sentence about what is wrong, or none."""


async def check_engine(name: str, folder: Path, tell: Callable[[EngineCheck], None]) -> list[EngineCheck]:
    """Start an engine on a model folder, try it, and end it.

    Args:
        name: as in rollout.engine.
        folder: the model.
        tell: called with each finding as it comes.
    """
    findings: list[EngineCheck] = []
    started: StartedEngine | None = None
    try:
        for check, run in (("starts and generates a token", None), *CHECKS):
            begun, text = time.monotonic(), ""
            try:
                async with asyncio.timeout(LIMIT_S):
                    if run is None:
                        started = await start_engine(name, folder)
                        await started.engine.health()
                    elif started is not None:
                        text = await run(started)
            except TimeoutError:
                text = f"did not end within {LIMIT_S:g} s"
            except Exception as error:  # noqa: BLE001  (whatever an engine raises is what the check is to find)
                text = f"{type(error).__name__}: {error}"
            text = text and f"{text.removesuffix('.')}. {ADVICE[name]}"
            seconds = time.monotonic() - begun
            findings.append(
                EngineCheck(check=check, outcome="failed" if text else "ok", text=text, seconds=seconds)
            )
            tell(findings[-1])
            if started is None:
                break
    finally:
        if started is not None:
            await started.engine.close()
    return findings


def installed() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the engines of this installation, by the name in rollout.engine; and why the others are not tried."""
    versions = {NATIVE: f"torch {torch.__version__}, transformers {version('transformers')}"}
    missing: dict[str, str] = {}
    for name in OWN_PROCESSES:
        processes = RolloutConfig(engine=name).own_processes
        assert processes is not None, f"{name} is among them"
        try:
            versions[name] = versions_in(processes.installed(), name)
        except ValueError as error:
            missing[name] = str(error)
    return versions, missing


def check_engines(*, wants_json: bool) -> int:
    """Try every engine, on a small model made for it; the exit code of the command."""
    versions, missing = installed()
    findings: dict[str, list[EngineCheck]] = {}
    with quiet_libraries(), tempfile.TemporaryDirectory(prefix="strop-doctor-") as scratch:
        folder = Path(scratch)
        make_tiny_model(
            folder, seed=0, hidden_size=32, num_layers=2, head_dim=32, intermediate_size=48,
            max_position_embeddings=4096,  # vLLM has no smaller heads on a CPU
        )  # fmt: skip
        for name, text in versions.items():
            if not wants_json:
                print_plain(plain(f"{name} ({text}):", is_one_line=True))
            tell = (lambda finding: None) if wants_json else _show
            findings[name] = asyncio.run(check_engine(name, folder, tell))
    if not wants_json:
        for name, why in missing.items():
            print_plain(plain(f"{name}: not tried: {why}", is_one_line=True))
    else:
        print_json({
            "versions": versions,
            "not_tried": missing,
            "engines": {name: [vars(finding) for finding in of_name] for name, of_name in findings.items()},
        })  # fmt: skip
    return int(any(finding.outcome == "failed" for of_name in findings.values() for finding in of_name))


def _show(finding: EngineCheck) -> None:
    mark = "FAIL" if finding.text else "ok  "
    text = f"{finding.check}: {finding.text}" if finding.text else finding.check
    print_plain(plain(f"  {mark} {text}", is_one_line=True))
