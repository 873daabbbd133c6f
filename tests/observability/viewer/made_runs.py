"""Run folders as a training leaves them, written by hand, with what a hostile model could write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from strop.data.tiny_model import make_tiny_model
from strop.observability.viewer.page.catalog import Catalog
from strop.observability.viewer.page.server import make_app
from strop.run import Fate, RunFolder
from strop.run.profile.parts import join_parts, step_folder, write_part
from strop.utils.timeline import CONTROLLER, TimelineSpan, Track

TOKEN = "a-token-of-the-tests"
MARKUP = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
CODES = "\x1b[2J\x1b]0;title\x07 \u202edesrever"


def sample(step: int, row: int, index: int, *, score: float | None = 1.0, **values: Any) -> dict[str, Any]:
    """A row of the sample store with an answer of three tokens, the last of which was given."""
    uid = f"e{max(step - 1, 0)}-{row:06d}"
    return {
        "id": f"{uid}/{index}", "uid": uid, "sample_index": index, "data_source": "math" if row % 2 else "words",
        "prompt": f"What is {row}?", "response": f"answer {index} of step {step}", "ground_truth": str(row),
        "prompt_ids": [4, 5], "response_ids": [70, 71, 72], "response_mask": [True, True, False],
        "rollout_log_probs": [-0.1, -2.5, 0.0], "versions": [step - 1, step - 1, -1],
        "old_log_probs": [-0.2, -2.5, 0.0], "entropys": [0.3, 1.7, 0.0], "advantages": [0.5, 0.5, 0.0],
        "score": score, "outcome": "score" if score is not None else "timeout", "error": "",
        "reward_parts": {"acc": bool(score), "style": 0.25 * index}, "advantage": 0.5, "fate": "trained",
        "fate_reason": "", "stop_reason": "stop", "num_turns": 2, "timings": {"generate_s": 0.1}, **values,
    }  # fmt: skip


def make_run(folder: Path, *, steps: int = 4, seed: int = 1, is_finished: bool = True) -> Path:
    """A run of so many steps with 3 prompts of 2 samples each; the last step has hostile samples and an episode."""
    model = folder.parent / "model"
    if not model.exists():
        make_tiny_model(model, seed=0, hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
                        intermediate_size=16, max_position_embeddings=32)  # fmt: skip
    config = {
        "model": {"path": str(model)},
        "trainer": {"seed": seed},
        "resources": {"ranks": 2, "apart": {"rollout": 1}},
    }
    run = RunFolder.create(folder, config=config, command=["strop", "train"])
    with run, (folder / "metrics.jsonl").open("w") as metrics:
        validate(run, metrics, 0, passed=2)
        for step in range(1, steps + 1):
            rewards = {"critic/rewards/mean": step / steps, "actor/entropy": 1 / step, "perf/total_num_tokens": 100.0,
                       "reward/ok": 6.0, "reward/timeout": 0.0, "rollout/groups_mixed": 1.0}  # fmt: skip
            metrics.write(json.dumps({"step": step, **rewards}) + "\n")
            run.samples.write(step, rows_of(step, is_last=step == steps))
            ids = [row["id"] for row in run.samples.read(step)]
            run.ledger.issue(step, ids)
            run.ledger.settle(step, dict.fromkeys(ids, Fate("trained")))
            run.fingerprints.append(step, data=f"{seed if step > 2 else 0}", sampled_tokens=str(step))
            run.events.append(
                "step", step, seconds=36.0, phases={"gen": 20.0, "update_actor": 10.0, "update_weights": 6.0}
            )
        run.events.append("health", steps, name="entropy", message=f"the entropy fell {MARKUP}")
        validate(run, metrics, steps, passed=8)
        if is_finished:
            run.events.append("finished", steps, seconds=150.0, reason=f"step {steps} is the last one")
    return folder


def profile_step(folder: Path, step: int) -> None:
    """Write the timeline of a step of 10 s: generation, an update from 6 to 9, a sample with a tool call."""
    rollout, actor = Track("rollout", 0), Track("actor", 0)
    spans = [
        TimelineSpan(name="gen", category="phase", track=CONTROLLER, start_s=0, end_s=6),
        TimelineSpan(name="run_episodes", category="call", track=rollout, start_s=0, end_s=6),
        TimelineSpan(name="update_policy", category="call", track=actor, start_s=6, end_s=9),
        TimelineSpan(name="a/0", category="episode", track=rollout, start_s=0, end_s=5, episode="a/0"),
        TimelineSpan(
            name=f"tool {MARKUP} {CODES}", category="tool", track=rollout, start_s=2, end_s=3, episode="a/0"
        ),
    ]
    at = step_folder(folder, step)
    at.mkdir(parents=True)
    write_part(at, "controller", spans)
    join_parts(at, step=step, start_s=0.0, end_s=10.0, clocks={})


def validate(run: RunFolder, metrics: Any, step: int, *, passed: int) -> None:
    """A validation of ten answers."""
    run.events.append(
        "validation", step, pass_rate=passed / 10, low=0.1, high=0.9, num_answers=10, metrics={}
    )
    metrics.write(json.dumps({"step": step, "val-core/math/acc/mean@1": passed / 10}) + "\n")
    run.samples.write(step, [sample(step, 7, 0, advantages=None)], split="val")


def rows_of(step: int, *, is_last: bool) -> list[dict[str, Any]]:
    """Row 0 is solved, 1 hopeless, 2 learned."""
    rows = [
        sample(step, row, index, score={0: 1.0, 1: 0.0, 2: float(index)}[row])
        for row in range(3)
        for index in range(2)
    ]
    if is_last:
        rows[0] |= {
            "prompt": MARKUP,
            "response": f"{MARKUP} {CODES}",
            "fate": "filtered",
            "fate_reason": MARKUP,
        }
        call = {"name": "calculator", "arguments": '{"expression": "6*7"}'}
        rows[5] |= {"num_turns": 4, "messages": [
            {"role": "assistant", "content": "let me see", "tokens": [0, 2], "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": f"42 {MARKUP}", "tokens": [2, 3]},
        ]}  # fmt: skip
    return rows


@dataclass(frozen=True)
class Page:
    """A page that is served."""

    port: int
    catalog: Catalog

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def served(*paths: Path) -> Iterator[Page]:
    """The real server on loopback, in a thread."""
    catalog, ready, found = Catalog(paths), threading.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        runner = web.AppRunner(make_app(catalog, TOKEN), access_log=None, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.extend([runner.addresses[0][1], runner])
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(found[1].cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        yield Page(found[0], catalog)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def ask(
    page: Page, path: str, *, token: str | None = TOKEN, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """A request with the cookie that the address with the token has set."""

    async def get() -> tuple[int, dict[str, str], bytes]:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            if token is not None:
                async with session.get(f"{page.url}/?token={token}", headers=headers) as first:
                    if first.status != 200:
                        return first.status, dict(first.headers), await first.read()
            async with session.get(page.url + path, headers=headers) as answer:
                return answer.status, dict(answer.headers), await answer.read()

    return asyncio.run(get())


def asked(page: Page, path: str) -> Any:
    """The answer as a value."""
    status, _, body = ask(page, path)
    assert status == 200, body
    return json.loads(body)
