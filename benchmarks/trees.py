"""Rows that begin alike, computed once, beside the same rows without anything in common.

    make bench BENCH=trees

An update (forward and backward pass of a policy loss, and the optimizer step) over the rows of trees: the ways from the
root of a tree of four levels to its leaves, with two and with three branches at each fork, and the turns of an episode,
of which each has all before it as its prompt; also groups of short answers to short prompts, and rows that share the
header of a chat template alone. The other side has as many rows with as many tokens, prompt and response, but another
first token in each row, so that nothing is shared; same model, same budget, same losses. Sides alternate in one
process; a ratio is that of the medians. Before that, a float64 model of the same form shows that the gradient of the
shared rows is that of each row alone; beyond 1e-10 it is another one, nothing is measured, and the exit status is 1.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine
from torch import Tensor

from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto

VOCAB = 8192
HEADER_TOKENS = 5
"""Of a chat template, before the first word of a prompt."""
MAX_GRADIENT_DIFFERENCE = 1e-10
Pair = tuple[list[int], list[int]]


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--run-tokens", type=int, default=64, help="tokens of a node of a tree, and of a turn"
    )
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5, help="timed updates of each side")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    started_on = machine()
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        made = {
            "tree_4_levels_2_branches": tree(2, options.run_tokens),
            "tree_4_levels_3_branches": tree(3, options.run_tokens),
            "episode_8_turns": episode(8, options.run_tokens),
            "short_groups": groups(8, 8, num_prompt=14, num_response=24),
            "header_alone": groups(32, 1, num_prompt=options.run_tokens, num_response=options.run_tokens),
        }
        differences = {
            name: gradient_difference(folder, _rows(pairs), options.budget) for name, pairs in made.items()
        }
        wrong = {name: value for name, value in differences.items() if not value <= MAX_GRADIENT_DIFFERENCE}
        if wrong:
            sys.exit(f"the gradient of rows that share is not that of each row alone: {wrong}")
        shapes = {
            name: measure(folder, pairs, budget=options.budget, repeats=options.repeats)
            | {"gradient_difference": differences[name]}
            for name, pairs in made.items()
        }
    ratio = min(shape["ratio"] for name, shape in shapes.items() if name.startswith(("tree", "episode")))
    print(
        json.dumps(
            {"benchmark": "trees", "ratio": ratio, **vars(options), "shapes": shapes, "machine": started_on}
        )
    )


def tree(branches: int, run_tokens: int) -> list[Pair]:
    """Rows of the ways through a tree of four levels: the root is the prompt, what follows the response."""
    generator = torch.Generator().manual_seed(0)
    ways: list[list[int]] = [_run(run_tokens, generator)]
    for _ in range(3):
        ways = [[*way, *_run(run_tokens, generator)] for way in ways for _ in range(branches)]
    return [(way[:run_tokens], way[run_tokens:]) for way in ways]


def episode(num_turns: int, run_tokens: int) -> list[Pair]:
    """Rows of the turns of an episode: a prompt, and answers with as many tokens of an environment between them."""
    whole = _run(2 * num_turns * run_tokens, torch.Generator().manual_seed(0))
    starts = range(run_tokens, len(whole), 2 * run_tokens)
    return [(whole[:start], whole[start : start + run_tokens]) for start in starts]


def groups(num_groups: int, size: int, *, num_prompt: int, num_response: int) -> list[Pair]:
    """Rows of groups of answers to one prompt, which all begin with the same header."""
    generator = torch.Generator().manual_seed(0)
    header = _run(HEADER_TOKENS, generator)
    prompts = [[*header, *_run(num_prompt - HEADER_TOKENS, generator)] for _ in range(num_groups)]
    return [(prompt, _run(num_response, generator)) for prompt in prompts for _ in range(size)]


def measure(folder: str, pairs: Sequence[Pair], *, budget: int, repeats: int) -> dict[str, Any]:
    """Seconds of both sides, and their ratio."""
    shared = _rows(pairs)
    apart = _rows([([row, *prompt[1:]], response) for row, (prompt, response) in enumerate(pairs)])
    engine = _engine(folder, "float32", budget)
    seconds: dict[str, list[float]] = {"shared": [], "apart": []}
    computed: dict[str, int] = {}
    for _ in range(repeats + 1):
        for side, rows in (("shared", shared), ("apart", apart)):
            before = engine.counts.tokens.computed
            start = time.perf_counter()
            engine.accumulate(rows, _loss)
            engine.step()
            seconds[side].append(time.perf_counter() - start)
            computed[side] = engine.counts.tokens.computed - before
    medians = {
        side: statistics.median(times[1:]) for side, times in seconds.items()
    }  # the first one warms up
    return {
        "rows": len(pairs),
        "tokens": computed,
        "token_ratio": round(computed["apart"] / computed["shared"], 3),
        "seconds": {side: round(value, 4) for side, value in medians.items()},
        "spread": {
            side: [round(min(times[1:]), 4), round(max(times[1:]), 4)] for side, times in seconds.items()
        },
        "ratio": round(medians["apart"] / medians["shared"], 3),
    }


def gradient_difference(folder: str, rows: DataProto, budget: int) -> float:
    """Largest difference of an entry between the gradient of all rows and that of each alone, in float64, as a share
    of the largest entry."""

    def gradient(parts: Sequence[list[int] | None]) -> Tensor:
        engine = _engine(folder, "float64", budget)
        for part in parts:
            engine.accumulate(rows, _loss, rows=part)
        return torch.cat([p.grad.flatten() for _, p in engine.model.named_parameters() if p.grad is not None])

    together, alone = gradient([None]), gradient([[row] for row in range(len(rows))])
    return float((together - alone).abs().max() / alone.abs().max())


def _loss(tokens: Tokens) -> Tensor:
    """Terms with another weight in each place of each row."""
    log_probs, _ = tokens.log_probs(temperature=1.0)
    weights = torch.cos(1.0 + tokens.response_index.to(log_probs))
    return (weights * torch.exp(log_probs - log_probs.detach())).sum() / 1000


def _rows(pairs: Sequence[Pair]) -> DataProto:
    return make_rows([torch.tensor(p) for p, _ in pairs], [torch.tensor(r) for _, r in pairs])


def _run(num_tokens: int, generator: torch.Generator) -> list[int]:
    tokens: list[int] = torch.randint(100, VOCAB, (num_tokens,), generator=generator).tolist()
    return tokens


def _engine(folder: str, dtype: Any, budget: int) -> TrainEngine:
    model = load_model(ModelConfig(path=folder, dtype=dtype), device="cpu")
    config = EngineConfig(max_tokens_per_device=budget)
    return TrainEngine(model, config, OptimizerConfig(lr=1e-4), total_steps=None)


def _write_model(folder: Path) -> None:
    """A model of Qwen3's form, of 17 million parameters."""
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


if __name__ == "__main__":
    main()
