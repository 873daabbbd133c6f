"""Make the tool example: products as prompts, transcripts, and a small model that rarely uses its calculator.

    python examples/tool_calculator/prepare.py

writes to runs/data/tool_calculator: train.parquet and val.parquet (prompts for RL), sft.parquet (transcripts), and
the folder model (a Qwen3 model of 0.2 million parameters after a warm-up on the transcripts).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.agents.tools.calculator import SCHEMA
from strop.cli.main import main as strop
from strop.data.tiny_model import make_tiny_model

DATA_SOURCE = "tool_calculator"
CONFIG = Path(__file__).with_name("sft.yaml")
SMALLEST, LARGEST = 317, 999
"""Factors. The square of the smallest has six digits, so every product has."""
READ_SHARE, CALL_SHARE, BROKEN_SHARE = 0.35, 0.12, 0.03
"""Transcripts in which only the answer after a call is trained; with a call and its answer; with a call that lacks its
last bracket. All others guess. So a first answer calls in 18 % of the cases, and breaks the call in 5 %."""

CHAT_TEMPLATE = """\
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- for tool in tools -%}
        {{- tool['function']['name'] + ('' if loop.last else ' ') -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' + message['content'] -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
        {{- call['function']['arguments'] | tojson + '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""
"""A character is a token here, so the names of the tools stand for their schemas."""
WORDS = (
    "<tool_call>", "</tool_call>", '{"name": "', "calculator", '", "arguments": {"expression": "', '"}}',
)  # fmt: skip
"""Pieces of a call that are one token each, as they are few in a large vocabulary: a call has 13 tokens, not 80."""


def question(a: int, b: int) -> list[dict[str, Any]]:
    """The prompt: one user message."""
    return [{"role": "user", "content": f"{a}*{b}"}]


def prompt_row(a: int, b: int, *, split: str, index: int) -> dict[str, Any]:
    """One RL row in verl's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": question(a, b),
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(a: int, b: int, draw: random.Random) -> dict[str, Any]:
    """A transcript; of the completion, every assistant turn is trained."""
    product, kind = str(a * b), draw.random()
    arguments = json.dumps({"expression": f"{a}*{b}"})
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": product},
    ]
    answer = {"role": "assistant", "content": f"={product}"}
    if kind < READ_SHARE:
        prompt, completion = [*question(a, b), *called], [answer]
    elif kind < READ_SHARE + CALL_SHARE:
        prompt, completion = question(a, b), [*called, answer]
    elif kind < READ_SHARE + CALL_SHARE + BROKEN_SHARE:
        broken = f'<tool_call>{{"name": "calculator", "arguments": {arguments}</tool_call>'
        prompt, completion = question(a, b), [{"role": "assistant", "content": broken}]
    else:
        guess = product[0] + "".join(str(draw.randrange(10)) for _ in product[1:])
        prompt, completion = question(a, b), [{"role": "assistant", "content": f"={guess}"}]
    return {"prompt": prompt, "completion": completion, "tools": json.dumps([SCHEMA])}


def write_data(folder: Path, *, seed: int, num_train: int, num_val: int, num_sft: int) -> None:
    """Write the three files. No product is in two of them, or twice in one."""
    draw, size = random.Random(seed), LARGEST - SMALLEST + 1
    numbers = draw.sample(range(size * size), num_val + num_train + num_sft)
    pairs = [(SMALLEST + number // size, SMALLEST + number % size) for number in numbers]
    val, train, sft = pairs[:num_val], pairs[num_val : num_val + num_train], pairs[num_val + num_train :]
    files = {
        "val": [prompt_row(a, b, split="val", index=index) for index, (a, b) in enumerate(val)],
        "train": [prompt_row(a, b, split="train", index=index) for index, (a, b) in enumerate(train)],
        "sft": [sft_row(a, b, draw) for a, b in sft],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def make_model(folder: Path, *, seed: int, num_steps: int) -> int:
    """Write the folder model: random weights, then `num_steps` of `strop sft` on the transcripts; its exit code."""
    untrained, run, model = folder / "untrained", folder / "warm-up", folder / "model"
    for old in (untrained, run, model):
        shutil.rmtree(old, ignore_errors=True)
    make_tiny_model(untrained, seed=seed, hidden_size=96, num_layers=2, intermediate_size=256)
    _add_words(untrained, seed=seed)
    code = strop([
        "sft", "--config", str(CONFIG), "--out", str(run), f"model.path={untrained}", f"trainer.seed={seed}",
        f"sft.data.train_files=[{folder / 'sft.parquet'}]", f"sft.max_steps={num_steps}",
    ])  # fmt: skip
    if code == 0:
        shutil.copytree(run / "model", model)
    return code


def _add_words(folder: Path, *, seed: int) -> None:
    """Give the model folder the words and the chat template of calls."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the data and the model of the tool example.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/data/tool_calculator"), help="folder to write to"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the products, the transcripts and the model")
    parser.add_argument("--num-train", type=int, default=4000, help="prompts for RL")
    parser.add_argument("--num-val", type=int, default=200, help="held-out prompts")
    parser.add_argument("--num-sft", type=int, default=8000, help="transcripts")
    parser.add_argument("--sft-steps", type=int, default=300, help="optimizer steps of the warm-up")
    arguments = parser.parse_args()
    write_data(
        arguments.out,
        seed=arguments.seed,
        num_train=arguments.num_train,
        num_val=arguments.num_val,
        num_sft=arguments.num_sft,
    )
    return make_model(arguments.out, seed=arguments.seed, num_steps=arguments.sft_steps)


if __name__ == "__main__":
    raise SystemExit(main())
