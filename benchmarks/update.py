"""The update and the log-prob pass beside the ceiling of the machine: tokens/s, peak memory, share of the ceiling.

    make bench BENCH=update ARGS=--json

Models of about 4 and about 100 million parameters, and five shapes of a batch: `words` (8 samples of each prompt of 20
tokens, with answers of 3 to 29), `full` (answers of 32), `2to1` and `8to1` (prompts of 64 and 256 tokens, answers of
32), and `long` (rows of 1,024 tokens with nothing in common). An update is the forward and backward pass of a policy
loss over all rows and the optimizer step; a log-prob pass is the forward pass alone. One process per size and shape.

`ceiling_share` is the time that the necessary work would take at the fastest product of matrices that was measured here
in the same process, before and after (ceiling.py), over that of the update; `ceiling_share_log_prob` is the same of the
log-prob pass. At the top level each is the least of all sizes and shapes. Both times are those of the fastest of a few
tries; `seconds` also has the median. Necessary are, for D weights of the layers, a head of H weights, N distinct tokens
(what a group shares once, without the last token of a response), M predictions, and P pairs of a token and one that it
sees:

    forward   2 (D N + H M) + 2 (d_k + d_v) h L P         update   three times as much

Norms, rotations, activations, the optimizer, and everything that is computed twice count as nothing. `tokens` and
tokens/s are those of the rows, with what they share counted in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from ceiling import product_ceiling
from machine import machine
from name_lists import names_of
from sizes import SIZES
from torch import Tensor

from strop.data.tiny_model import make_tiny_model
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.utils.gc_freeze import settled

PROMPTS = {"small": 8, "large": 2}
"""Prompts of a batch: fewer of the large model, so that all of it ends within minutes."""
SAMPLES, ANSWER_TOKENS, WORDS_PROMPT, LONG_TOKENS, LONG_PROMPT = 8, 32, 20, 1024, 256
SHAPES = ("words", "full", "2to1", "8to1", "long")
TEXT_IDS = range(7, 102)
"""Ids of letters of the tiny tokenizer."""


@dataclass(frozen=True)
class Group:
    """Samples of one prompt, in tokens."""

    prompt: int
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """What there is to compute of some groups, each token once."""

    tokens: int
    predictions: int
    pairs: int

    def forward(self, size: dict[str, int], vocab: int) -> float:
        """Floating-point operations of a forward pass."""
        hidden, heads, keys, dim = (
            size[name] for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
        )
        layer = hidden * (2 * heads * dim + 2 * keys * dim + 3 * size["intermediate_size"])
        through_weights = layer * size["num_layers"] * self.tokens + hidden * vocab * self.predictions
        return 2 * through_weights + 4 * dim * heads * size["num_layers"] * self.pairs


def work_of(groups: Sequence[Group]) -> Work:
    """The least work of a pass over these groups."""
    tokens = predictions = pairs = 0
    for group in groups:
        inputs = [answer - 1 for answer in group.answers]  # the last token predicts nothing
        tokens += group.prompt + sum(inputs)
        predictions += sum(group.answers)
        pairs += group.prompt * (group.prompt + 1) // 2
        pairs += sum(n * group.prompt + n * (n + 1) // 2 for n in inputs)
    return Work(tokens, predictions, pairs)


def groups_of(shape: str, prompts: int) -> list[Group]:
    """The groups of a shape, always the same."""
    if shape == "long":
        return [Group(LONG_PROMPT, (LONG_TOKENS - LONG_PROMPT,))] * max(1, prompts // 2)
    if shape == "words":
        lengths = torch.randint(
            3, 30, (prompts, SAMPLES), generator=torch.Generator().manual_seed(0)
        ).tolist()
        return [Group(WORDS_PROMPT, tuple(answers)) for answers in lengths]
    prompt = {"full": WORDS_PROMPT, "2to1": 2 * ANSWER_TOKENS, "8to1": 8 * ANSWER_TOKENS}[shape]
    return [Group(prompt, (ANSWER_TOKENS,) * SAMPLES)] * prompts


def rows_of(groups: Sequence[Group]) -> DataProto:
    """Rows of random tokens; the samples of a prompt part with their first token."""
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> Tensor:
        return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (length,), generator=generator)

    prompts, answers = [], []
    for number, group in enumerate(groups):
        prompt = drawn(group.prompt)
        prompt[0] = TEXT_IDS[number]  # nothing is shared by chance
        for sample, length in enumerate(group.answers):
            answer = drawn(length)
            answer[0] = TEXT_IDS[sample]
            prompts.append(prompt)
            answers.append(answer)
    return make_rows(prompts, answers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument(
        "--sizes", type=names_of(SIZES), default=",".join(SIZES), help="which ones, with commas"
    )
    parser.add_argument(
        "--shapes", type=names_of(SHAPES), default=",".join(SHAPES), help="which ones, with commas"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=10, help="tries, of which the fastest counts")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measured(arguments)))
        return
    where = machine()
    sizes = {
        size: {shape: _in_a_process(arguments, size, shape) for shape in arguments.shapes}
        for size in arguments.sizes
    }
    every = [facts for of_size in sizes.values() for facts in of_size.values()]
    result = {
        "benchmark": "update",
        "ceiling_share": min(facts["update"]["ceiling_share"] for facts in every),
        "ceiling_share_log_prob": min(facts["log_prob"]["ceiling_share"] for facts in every),
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "sizes": sizes,
        "machine": where,
    }
    print(json.dumps(result))


def _in_a_process(arguments: argparse.Namespace, size: str, shape: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", "--sizes", size, "--shapes", shape]
    words += ["--dtype", arguments.dtype, "--repeats", str(arguments.repeats)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not arguments.json:
        shares = {name: facts[name]["ceiling_share"] for name in ("update", "log_prob")}
        print(f"{size} {shape}: {shares}", flush=True)
    return facts


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """One size and shape, in this process."""
    transformers.utils.logging.disable_progress_bar()
    (size_name,), (shape,) = arguments.sizes, arguments.shapes
    size, dtype = SIZES[size_name], getattr(torch, arguments.dtype)
    groups = groups_of(shape, PROMPTS[size_name])
    rows, work = rows_of(groups), work_of(groups)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0, max_position_embeddings=LONG_TOKENS, **size)
        model = load_model(ModelConfig(path=folder, dtype=arguments.dtype), device="cpu")
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=1e-6), total_steps=None)
    before = product_ceiling(dtype)

    def update() -> None:
        engine.accumulate(rows, _loss)
        engine.step()

    def log_prob() -> None:
        engine.map_tokens(rows, _log_probs)

    with settled():  # as a run's loop is
        at_log_prob = _tries(log_prob, arguments.repeats)
        log_prob_mib = _peak_mib()
        at_update = _tries(update, arguments.repeats)
    ceiling = max(before, product_ceiling(dtype), key=lambda measured: measured.flops)
    forward = work.forward(size, model.vocab_size)
    tokens = sum(group.prompt + answer for group in groups for answer in group.answers)
    return {
        "parameters": sum(parameter.numel() for _, parameter in model.named_parameters()),
        "rows": len(rows),
        "tokens": tokens,
        "distinct_tokens": work.tokens,
        "update": _facts(at_update, 3 * forward, ceiling.flops, tokens, _peak_mib()),
        "log_prob": _facts(at_log_prob, forward, ceiling.flops, tokens, log_prob_mib),
        "ceiling": ceiling.json(),
    }


def _facts(
    seconds: Sequence[float], operations: float, ceiling: float, tokens: int, peak_mib: int
) -> dict[str, Any]:
    return {
        "ceiling_share": round(operations / ceiling / min(seconds), 3),
        "seconds": {"least": round(min(seconds), 4), "median": round(statistics.median(seconds), 4)},
        "tokens_per_s": round(tokens / min(seconds)),
        "peak_mib": peak_mib,
    }


def _tries(work: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of some calls, behind one that warms up."""
    work()
    taken: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def _loss(tokens: Tokens) -> Tensor:
    """A policy loss, with another advantage for each token."""
    log_probs, _ = tokens.log_probs(temperature=1.0)
    advantages = torch.cos(1.0 + tokens.response_index.to(log_probs))
    return (advantages * torch.exp(log_probs - log_probs.detach())).sum() / 1000


def _log_probs(tokens: Tokens) -> dict[str, Tensor]:
    return {"log_probs": tokens.log_probs(temperature=1.0)[0]}


def _peak_mib() -> int:
    """Most memory of this process so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
