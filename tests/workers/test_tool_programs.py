"""Programs of the tool `python`, in the real sandbox, as a rollout worker gives it to its agents."""

from __future__ import annotations

import asyncio
import json
import socket
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from strop.agents.config import AgentConfig
from strop.agents.context import AgentContext
from strop.agents.registry import Generate, agents
from strop.agents.tools.agent import tool_agent
from strop.agents.tools.python_sandbox import PythonSandboxTool, SandboxFailed
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import RewardConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.types import Sampling, TokenOutput
from strop.run.samples import SampleStore
from strop.sandbox import Limits, SandboxConfig, SandboxUnavailable
from strop.workers.reports import EpisodeReport, SampleDecision
from strop.workers.rollout import RolloutSettings, RolloutWorker

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right when the program's output was repeated."""
    return float(solution_str.endswith(ground_truth))
'''
LIMITS = Limits(wall_s=1.5, cpu_s=1.5, memory_mib=64, max_processes=16, output_kib=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("programs") / "model"
    make_tiny_model(
        folder, seed=0, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=4096,
    )  # fmt: skip
    return ModelConfig(path=str(folder))


@pytest.fixture
def _writes_programs() -> Iterator[None]:
    """An agent with a model that calls python with the row's program, and then repeats what it reads."""
    before = dict(agents)

    @agents.register("writes_programs")
    async def writes_programs(
        prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
    ) -> Sequence[Trajectory]:
        tokenizer = context.tokenizer

        async def say(token_ids: Sequence[int], /, **_: Any) -> TokenOutput:
            shown = tokenizer.decode(list(token_ids))
            if "<|tool|>" in shown:
                text = shown.rpartition("<|tool|>")[2].partition("<|im_end|>")[0]
            else:
                call = {"name": "python", "arguments": {"code": prompt.extra_info["code"]}}
                text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
            return TokenOutput(
                token_ids=tuple(ids),
                log_probs=(-1.0,) * len(ids),
                versions=(0,) * len(ids),
                stop_reason="stop",
            )

        return await tool_agent(prompt, trajectory, say, context)

    yield
    agents.clear()
    agents.update(before)


class Programs:
    """A worker, and what it plays."""

    def __init__(self, model: ModelConfig, folder: Path, *, sandbox: SandboxConfig | None = None) -> None:
        entry = {
            "class_name": "strop.agents.tools.python_sandbox.PythonSandboxTool",
            "config": {"type": "native"},
        }
        (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
        (folder / "reward.py").write_text(REWARD)
        self.tokenizer, self.store = load_tokenizer(model), folder / "samples"
        self.worker = RolloutWorker(
            model,
            RolloutConfig(samples_per_prompt=1),
            RewardConfig(
                path=str(folder / "reward.py"),
                num_workers=1,
                sandbox=sandbox or SandboxConfig(limits=LIMITS, max_concurrent=4),
            ),
            RolloutSettings(
                agent=AgentConfig(tools=str(folder / "tools.yaml"), tool_format="hermes"),
                device="cpu",
                seed=0,
                samples=self.store,
            ),
        )

    def play(self, *programs: str) -> tuple[list[EpisodeReport], list[dict[str, Any]]]:
        """Reports, and the tool's turn in each sample of the store."""
        prompts = [
            Prompt(
                uid=f"e0-{row:06d}",
                row=row,
                token_ids=tuple(self.tokenizer("<|user|>?<|im_end|><|assistant|>")["input_ids"]),
                messages=({"role": "user", "content": "?"},),
                data_source="programs",
                ground_truth="12",
                extra_info={"code": textwrap.dedent(code)},
                agent_name="writes_programs",
            )
            for row, code in enumerate(programs)
        ]
        sampling = Sampling(key=0, max_tokens=3000, stop_token_ids=(self.tokenizer.eos_token_id,))
        rows = self.worker.run_episodes(DataProto.from_dict({}, non_tensors={"prompt": prompts}), 1, sampling)
        reports = list(rows.non_tensor_batch["report"])
        decided = [SampleDecision(advantage=None, fate="scored", reason="") for _ in reports]
        episodes = rows.union(
            DataProto.from_dict({}, non_tensors={"decided": decided, "has_numbers": [False] * len(decided)})
        )
        self.worker.write_samples(1, episodes, split="train", ranks=[0])
        turns = [row["messages"][1] for row in SampleStore(self.store).read(1)]
        assert [turn["role"] for turn in turns] == ["tool"] * len(programs)
        return reports, turns


@pytest.fixture
def earlier() -> set[psutil.Process]:
    """Launchers that other tests of this process keep warm."""
    return set(processes_of_the_sandbox())


def processes_of_the_sandbox(but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Launchers that this process started, and all below them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any("sandbox.launcher" in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
        except psutil.Error:
            continue
    return [process for process in found if process not in but]


@pytest.mark.usefixtures("_writes_programs")
def test_a_program_of_the_model_runs_and_a_hostile_one_is_only_an_observation(
    model: ModelConfig, tmp_path: Path, earlier: set[psutil.Process]
) -> None:
    outside = tmp_path / "outside.txt"
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = listener.getsockname()
    programs = Programs(model, tmp_path)
    try:
        reports, turns = programs.play(
            "print(3 * 4)",
            "x = 1\nprint(x / 0)",
            "while True:\n    pass",
            "data = []\nwhile True:\n    data.append(bytearray(1 << 22))",
            f"open({str(outside)!r}, 'w').write('x')",
            f"import socket\nsocket.create_connection({address}, timeout=1)",
            "while True:\n    print('y' * 1000)",
            "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)",
            "print('12')",
        )  # fmt: skip
        texts = [turn["content"] for turn in turns]
        outcomes = [turn["facts"]["outcome"] for turn in turns]
        assert texts[0] == texts[-1] == "12"
        assert texts[1].endswith("ZeroDivisionError: division by zero")
        assert "Error: " in texts[2]
        assert outcomes[:4] == ["ok", "error", "timeout", "memory"]
        assert outcomes[4:6] == ["error", "error"]
        assert "No such file or directory" in texts[4] or "Read-only file system" in texts[4]
        assert "OSError" in texts[5]
        with listener, pytest.raises(BlockingIOError):
            listener.accept()
        assert outcomes[6] == "output"
        assert outcomes[7] == "killed"
        assert not outside.exists()
        # A program's end is no failure of the tool, and the episodes went on to be scored.
        assert not any("error" in turn for turn in turns)
        assert [one.score for one in reports] == [1.0, *[0.0] * 7, 1.0]
        assert processes_of_the_sandbox(earlier), "the launcher is kept warm while the worker lives"
    finally:
        programs.worker.close()
    assert processes_of_the_sandbox(earlier) == []


@pytest.mark.usefixtures("_writes_programs")
def test_programs_know_nothing_of_each_other_and_a_closed_worker_runs_none(
    model: ModelConfig, tmp_path: Path
) -> None:
    programs = Programs(model, tmp_path)
    try:
        leave = "open('left.txt', 'w').write('x'); import os; print(os.listdir('.'))"
        _, turns = programs.play(leave, leave)
        assert [turn["content"] for turn in turns] == [turns[0]["content"]] * 2
        _, (seen,) = programs.play("import os; print('left.txt' in os.listdir('.'))")
        assert seen["content"] == "False"
    finally:
        programs.worker.close()
        programs.worker.close()
    with pytest.raises(SandboxFailed, match="no sandbox for programs is set up in this process"):
        asyncio.run(PythonSandboxTool({}).execute("i", {"code": "print(1)"}))


def test_a_worker_whose_programs_cannot_be_isolated_does_not_start(
    model: ModelConfig, tmp_path: Path, earlier: set[psutil.Process]
) -> None:
    broken = SandboxConfig(python="/no/such/python")
    with pytest.raises(SandboxUnavailable, match="/no/such/python"):
        Programs(model, tmp_path, sandbox=broken)
    assert processes_of_the_sandbox(earlier) == []
