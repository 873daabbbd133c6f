"""Engines in processes of their own that die while a run goes on: it samples the very tokens that it would have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from strop.cli.main import main
from strop.cli.quickstart.task import write_task
from strop.config import ConfigError
from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder
from strop.trainer.loading import load

TESTS = str(Path(__file__).parents[1])
CHILD = (
    f"""\
import sys
sys.path.insert(0, {TESTS!r})
"""
    """\
import asyncio, json, os, signal
from pathlib import Path
from safetensors.torch import load_file
import torch
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.native.engine import NativeEngine
from rollout.engine_process.server import EngineServer
from strop.rollout.weight_sync.model_target import ModuleTarget

folder, version, when, mark = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(1)


def die(where):
    if when == where and not mark.exists():
        mark.write_text("it died " + where)
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(NativeEngine):
    heard = 0

    async def generate(self, request_id, prompt_ids, sampling, *, on_token=None):
        def hear(*token):
            if on_token is not None:
                on_token(*token)
            if self.version == 1 and request_id.startswith("e"):
                Mortal.heard += 1
                if Mortal.heard == 7:
                    die("in a step")

        return await super().generate(request_id, prompt_ids, sampling, on_token=hear)

    async def sleep(self, level=1):
        if self.version == 1:
            die("after a step")
        await super().sleep(level)


async def serve():
    policy = load_model(ModelConfig(path=folder, dtype="float32"), device="cpu")
    target, engine = ModuleTarget(policy.module), Mortal(policy, max_running=8, version=version)
    async with EngineServer(engine) as server:
        address = server.address
        print(json.dumps({"host": address.host, "port": address.port, "secret": str(address.secret)}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if engine.version == 1:
                die("between steps")
            target.load(list(load_file(line.strip()).items()))
            print("ok", flush=True)


asyncio.run(serve())
"""
)

ENGINE = (
    f"""\
import sys
sys.path.insert(0, {TESTS!r})
"""
    """\
import json, subprocess
from pathlib import Path
from safetensors.torch import save_file
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.registry import engines
from rollout.engine_process.engine import RemoteEngine
from rollout.engine_process.address import EngineAddress
from strop.rollout.engine_group import Generation

HERE = Path(__file__).parent


class Target(ModuleTarget):
    # weights of a model here, which is read back, and of the process

    def __init__(self, process, module):
        super().__init__(module)
        self.process = process

    def load(self, tensors):
        super().load(tensors)
        file = HERE / f"weights-{self.process.pid}.safetensors"
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors}, file)
        try:
            self.process.stdin.write(f"{file}\\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if answer.strip() != "ok":
            raise ConnectionError("the process of the engine has ended")


class Remote(RemoteEngine):
    async def close(self):
        self.process.kill()
        self.process.wait()
        await super().close()


@engines.register(NAME)
async def remote(place):
    words = [place.model.path, str(place.version), WHEN, str(HERE / "mark")]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "child.py"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with (HERE / "started").open("a") as file:
        file.write(f"{process.pid} {place.version}\\n")
    found = json.loads(process.stdout.readline())
    engine = await Remote.connect(EngineAddress(**found))
    engine.process = process
    own = load_model(ModelConfig(path=place.model.path, dtype="float32"), device="cpu")
    return Generation(engine=engine, policy=None, target=Target(process, own.module))
"""
)

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return ord((solution_str or " ")[0]) % 7 / 10
"""


def settings(folder: Path, when: str, *more: str) -> list[str]:
    folder.mkdir()
    make_tiny_model(
        folder / "model", seed=0, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    task = write_task(folder / "data", seed=0, num_train=6, num_val=2, num_sft=2)
    (folder / "reward.py").write_text(REWARD)
    (folder / "child.py").write_text(CHILD)
    name = f"mortal-{folder.name}-{folder.parent.name}"
    (folder / "engine.py").write_text(f"NAME, WHEN = {name!r}, {when!r}\n{ENGINE}")
    return [
        f"model.path='{folder / 'model'}'", "model.dtype=float32", f"data.train_files=['{task.train}']",
        "data.prompts_per_step=2", "data.max_prompt_tokens=24", "data.max_response_tokens=6", "data.sampler=in_order",
        "rollout.samples_per_prompt=2", f"reward.path='{folder / 'reward.py'}'", "reward.num_workers=1",
        "trainer.max_steps=3", "trainer.trackers=[jsonl]", "trainer.preflight=false", "resources.num_threads=1",
        "actor.optim.lr=1e-2", f"rollout.engine={name}", f"algorithm.extensions=['{folder / 'engine.py'}']", *more,
    ]  # fmt: skip


def trained(words: list[str], run: Path) -> list[dict[str, object]]:
    """Tokens and versions of all samples."""
    assert main(["train", *words, "--out", str(run)]) == 0
    with RunFolder.open(run, read_only=True) as folder:
        rows = [row for step in (1, 2, 3) for row in folder.samples.read(step)]
        folder.ledger.check()
    return [{name: row[name] for name in ("id", "response_ids", "versions", "score")} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("fleet") / "calm"
    words = settings(folder, "never")
    return trained(
        [word for word in words if not word.startswith(("rollout.engine", "algorithm.ext"))], folder / "run"
    )


@pytest.mark.parametrize(
    ("when", "replicas"),
    [
        pytest.param("in a step", 1, marks=pytest.mark.slow),
        pytest.param("in a step", 2, marks=pytest.mark.slow),
        pytest.param("between steps", 1, marks=pytest.mark.slow),
    ],
    ids=["step", "two", "between"],
)
def test_the_samples_are_those_of_a_run_in_which_nothing_dies(
    when: str, replicas: int, undisturbed: list[dict[str, object]], tmp_path: Path
) -> None:
    folder, run = tmp_path / "mortal", tmp_path / "run"
    found = trained(settings(folder, when, f"rollout.replicas={replicas}"), run)
    assert (folder / "mark").read_text() == f"it died {when}"
    started = [line.split()[1] for line in (folder / "started").read_text().splitlines()]
    assert len(started) == replicas + 1
    assert found == undisturbed
    with RunFolder.open(run, read_only=True) as kept:
        (event,) = kept.events.read("engine_lost")
    version = 1 if when == "in a step" else 2
    assert re.fullmatch(
        rf"rollout engine [01] was lost and started again, at version {version}", event["message"]
    )
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "actor/loss" in line] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a step", "after a step"])
@pytest.mark.parametrize("layout", ["apart", "sharded"])
def test_weights_that_all_ranks_hand_over_are_sent_again_and_what_was_lost_is_played_again(
    layout: str, when: str, undisturbed: list[dict[str, object]], tmp_path: Path
) -> None:
    """Rollout workers apart from the actor, and a policy in shards: no worker can fill an engine by itself."""
    ray = ["resources.runtime=ray", "resources.cpus_per_rank=0.1"]
    more = {
        "apart": [*ray, "resources.ranks=1", "resources.apart={rollout: 2}"],
        "sharded": [*ray, "resources.ranks=2"],
    }[layout]
    folder, run = tmp_path / "mortal", tmp_path / "run"
    found = trained(settings(folder, when, *more), run)
    assert (folder / "mark").read_text() == f"it died {when}"
    assert len((folder / "started").read_text().splitlines()) == 3
    with RunFolder.open(run, read_only=True) as kept:
        (event,) = kept.events.read("engine_lost")
    assert "was lost and started again" in event["message"]
    assert [one["id"] for one in found] == [one["id"] for one in undisturbed]
    assert [one["response_ids"] for one in found] == [one["response_ids"] for one in undisturbed]
    assert [one["versions"] for one in found] == [one["versions"] for one in undisturbed]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rollout.replicas=2"], "rollout.engine=native has one engine in each rollout process"),
        (
            [
                "rollout.engine=vllm",
                "rollout.replicas=2",
                "resources.runtime=ray",
                "resources.apart={rollout: 1}",
            ],
            "where each process has one engine: raise the number of processes instead",
        ),
    ],
)
def test_replicas_where_there_can_be_none_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(overrides=words)
