"""A run whose process may not take as much memory as its batches need (RLIMIT_AS): it is the run with half of the
token budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Project, chain_of, stages_that_differ

from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder

WHOLE, HALF = 4096, 2048
LEAST_DIFFERENCE = 60 << 20
"""Of what the two budgets need; the limit lies between them."""
PROGRAM = Path(__file__).parent / "limited_run.py"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def settings(project: Project, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A step of about 3,900 packed tokens, each of which keeps 80 KB for the backward pass."""
    model = tmp_path_factory.mktemp("wide") / "model"
    make_tiny_model(
        model,
        seed=0,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=64,
    )
    return [
        *project.settings(), f"model.path='{model}'", "data.prompts_per_step=10", "rollout.samples_per_prompt=16",
        "data.max_response_tokens=24", "data.val_files=[]", "algorithm.adv_estimator=rloo", "trainer.max_steps=2",
    ]  # fmt: skip


def run_limited(folder: Path, settings: list[str], *, more_bytes: int) -> dict[str, Any]:
    asked = folder.parent / f"{folder.name}.json"
    asked.write_text(json.dumps({"folder": str(folder), "settings": settings, "more_bytes": more_bytes}))
    # Freed tensors leave the address space at once, and threads share one heap.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(asked)], capture_output=True, text=True, timeout=240, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.timeout(900)
def test_a_limited_process_trains_as_one_that_began_with_half(settings: list[str], tmp_path: Path) -> None:
    def trained(name: str, tokens: int, *more: str, more_bytes: int = 0) -> dict[str, Any]:
        chosen = [*settings, f"actor.engine.max_tokens_per_device={tokens}", *more]
        return run_limited(tmp_path / name, chosen, more_bytes=more_bytes)

    half, whole = trained("half", HALF), trained("whole", WHOLE)
    assert whole["taken"] - half["taken"] > LEAST_DIFFERENCE, (whole["taken"], half["taken"])
    between = (half["taken"] + whole["taken"]) // 2
    trained("short", WHOLE, more_bytes=between)
    trained("rehearsed", WHOLE, "trainer.rehearse_longest_batch=true", more_bytes=between)
    chains = {
        name: [link.chain for link in chain_of(tmp_path / name)]
        for name in ("half", "whole", "short", "rehearsed")
    }
    for name in ("short", "rehearsed"):
        assert not stages_that_differ(chain_of(tmp_path / name), chain_of(tmp_path / "half")), name
        assert chains[name] == chains["half"], name
    assert chains["whole"] != chains["half"], "sums of other micro-batches are rounded otherwise"
    for name, step in (("short", 1), ("rehearsed", 0)):
        with RunFolder.open(tmp_path / name, read_only=True) as run:
            (event,) = run.events.read("out_of_memory")
        assert (event["step"], event["setting"], event["held"]) == (step, WHOLE, HALF)
        assert "you tried to allocate" in event["reason"]
