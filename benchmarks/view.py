"""The page of `strop view` on a long run: how soon a person sees something.

    python benchmarks/view.py                     a run of 2,000 steps with 250 samples each, in Chromium

Needs Chromium and playwright (`make browser` installs the driver). The run is made by hand, through the run folder's
own writers. Each place of the page is opened three times in a browser without a cache, and the median counts: seconds
from the navigation until something is painted, and until what was asked for stands there. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine

from strop.data.tiny_model import make_tiny_model
from strop.run import Fate, RunFolder

if TYPE_CHECKING:
    from playwright.sync_api import Page

WORDS = (
    "the",
    "answer",
    "follows",
    "from",
    "what",
    "stands",
    "above",
    "so",
    "we",
    "add",
    "and",
    "carry",
    "one",
)
RESPONSE_TOKENS = 24
PLACES = {
    "runs": ("", "tbody tr"),
    "curves": ("curves", ".scatterlayer .trace"),
    "samples": ("samples", ".tokens span"),
    "one step": ("samples?first_step=50&last_step=50", ".tokens span"),
    "prompts": ("groups", "[role=img][aria-label^='rewards of this step']"),
}
"""Place -> (its address, what stands there when it is ready)."""
REPEATS = 3


def sample(step: int, row: int, index: int) -> dict[str, Any]:
    """A row of the sample store."""
    uid, tokens = f"e{step - 1}-{row:06d}", range(RESPONSE_TOKENS)
    passed = (step * 7 + row * 3 + index) % 5 < 1 + 3 * step // 2000
    return {
        "id": f"{uid}/{index}", "uid": uid, "sample_index": index, "data_source": "math", "prompt": f"What is {row}?",
        "response": " ".join(WORDS[(step + place) % len(WORDS)] for place in tokens), "ground_truth": str(row),
        "prompt_ids": [4, 5, 6, 7], "response_ids": [50 + place for place in tokens],
        "response_mask": [True] * RESPONSE_TOKENS, "rollout_log_probs": [-0.5] * RESPONSE_TOKENS,
        "versions": [step - 1] * RESPONSE_TOKENS, "old_log_probs": [-0.5] * RESPONSE_TOKENS,
        "entropys": [0.7] * RESPONSE_TOKENS, "advantages": [0.1] * RESPONSE_TOKENS, "score": float(passed),
        "outcome": "score", "error": "", "reward_parts": {"acc": passed}, "advantage": 0.1, "fate": "trained",
        "fate_reason": "", "stop_reason": "stop", "num_turns": 1, "timings": {"generate_s": 0.1},
    }  # fmt: skip


def make_run(folder: Path, *, steps: int, prompts: int, per_prompt: int) -> None:
    """A finished run, with 40 numbers a step."""
    model = folder.parent.parent / "model"
    make_tiny_model(model, seed=0, hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
                    intermediate_size=16, max_position_embeddings=64)  # fmt: skip
    config = {"model": {"path": str(model)}, "trainer": {"seed": 1}}
    with RunFolder.create(folder, config=config, command=["strop", "train"]) as run:
        with (folder / "metrics.jsonl").open("w") as metrics:
            for step in range(1, steps + 1):
                numbers = {f"actor/number_{place}": step / (place + 1) for place in range(36)}
                numbers |= {"critic/rewards/mean": step / steps, "actor/entropy": 1 / step}
                metrics.write(json.dumps({"step": step, "perf/total_num_tokens": 7e3, **numbers}) + "\n")
                rows = [sample(step, row, index) for row in range(prompts) for index in range(per_prompt)]
                run.samples.write(step, rows)
                run.ledger.issue(step, [row["id"] for row in rows])
                run.ledger.settle(step, {row["id"]: Fate("trained") for row in rows})
                phases = {"gen": 3.0, "old_log_prob": 0.5, "update_actor": 2.0}
                run.events.append("step", step, seconds=6.0, phases=phases)
        run.events.append("finished", steps, seconds=6.0 * steps, reason=f"step {steps} is the last one")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address that `strop view` prints."""
    command = [sys.executable, "-m", "strop.cli.main", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                return
        raise SystemExit("strop view printed no address")
    finally:
        server.terminate()
        server.wait(30)


def opened(tab: Page, address: str, place: str, ready: str) -> dict[str, float]:
    """Seconds until the first paint and until the place is ready."""
    begun = time.perf_counter()
    tab.goto(f"{address}#/{place}" if place else address)
    tab.locator(ready).first.wait_for(timeout=60_000)
    ready_s = time.perf_counter() - begun
    paint_ms = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return {"first_paint_s": paint_ms / 1000, "ready_s": ready_s}


def main() -> None:
    """Make the run, look at it, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=50, help="a step, with 5 samples each")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # installed by `make browser` alone

    result: dict[str, Any] = {
        "benchmark": "view",
        "machine": machine(),
        "steps": args.steps,
        "num_samples": args.steps * args.prompts * 5,
    }
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Chromium is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs" / "long"
        folder.parent.mkdir()
        make_run(folder, steps=args.steps, prompts=args.prompts, per_prompt=5)
        result["mib"] = round(
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
        )
        with served(folder.parent) as address, sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
            for title, (place, ready) in PLACES.items():
                took = []
                for _ in range(REPEATS):
                    with browser.new_context(viewport={"width": 1200, "height": 900}) as context:
                        took.append(opened(context.new_page(), address, place, ready))
                result[title] = {
                    key: round(statistics.median(one[key] for one in took), 2) for key in took[0]
                }
            browser.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
