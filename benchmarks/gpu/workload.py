"""A model of random weights in the shape of Qwen3-0.6B, with prompts, optimizer batches and requests."""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.look import Look
from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.data.tiny_model import make_tiny_tokenizer
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.protocol import DataProto, columns
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput
from strop.utils.rng import random_key
from strop.workers.actor import ActorWorker
from strop.workers.config import ActorConfig
from strop.workers.models import TrainingInit

QWEN3_06B = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151_936,
}  # fmt: skip
TOY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip

Ask = tuple[list[int], Sampling]
"""Prompt and sampling of a request."""

REWARD = '''\
"""A reward that answers of random tokens differ in."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
'''


def shape(look: Look) -> dict[str, int]:
    """Sizes of the model."""
    return TOY if look.is_rehearsal else QWEN3_06B


def num_parameters(look: Look) -> int:
    """Of the model, the tied embedding once; a token is multiplied with as many."""
    sizes = shape(look)
    heads = 2 * sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    layer = sizes["hidden_size"] * (sizes["head_dim"] * heads + 3 * sizes["intermediate_size"])
    return sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * sizes["hidden_size"]


def token_bytes(look: Look) -> int:
    """Keys and values of one token in all layers, in half precision."""
    sizes = shape(look)
    return 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]


def model_folder(look: Look) -> Path:
    """Folder of model and tokenizer, made once for all steps, of which several may ask at a time."""
    folder = look.work / "model"
    look.work.mkdir(parents=True, exist_ok=True)
    with (look.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = look.work / "model.tmp"
            shutil.rmtree(unfinished, ignore_errors=True)
            _make_model(look, unfinished)
            unfinished.rename(folder)
    return folder


def _make_model(look: Look, folder: Path) -> None:
    tokenizer = _tokenizer(shape(look)["vocab_size"])
    sizes: dict[str, Any] = {**shape(look)}
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        **sizes,
        **ids,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(look.device):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A token per character, and words that no text has up to the size of the vocabulary, so that every id decodes."""
    tiny = make_tiny_tokenizer()
    vocabulary = dict(tiny.get_vocab())
    vocabulary |= {f"~{number}": number for number in range(len(vocabulary), vocab_size)}
    specials = [token for token in tiny.get_vocab() if token.startswith("<|")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=tiny.unk_token, fuse_unk=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=tiny.eos_token, pad_token=tiny.pad_token, unk_token=tiny.unk_token,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = tiny.chat_template
    return fast


def loaded(look: Look, dtype: str, *, holds_half: bool = False) -> CausalLM:
    """The model on the device; arguments as of `load_model`."""
    config = ModelConfig(path=str(model_folder(look)), dtype=dtype)  # type: ignore[arg-type]
    return load_model(config, device=look.device, holds_half=holds_half)


def random_prompts(count: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts of characters."""
    prompts: list[list[int]] = np.random.default_rng(seed).integers(10, 100, (count, length)).tolist()
    return prompts


def asks(
    count: int, samples: int, *, prompt: int, tokens: int, temperature: float = 1.0, seed: int = 0
) -> list[Ask]:
    """Samples of each of `count` prompts, of exactly so many tokens."""
    return [
        (ids, Sampling(key=random_key(seed, "gpu", p, s), temperature=temperature, max_tokens=tokens))
        for p, ids in enumerate(random_prompts(count, prompt, seed=seed))
        for s in range(samples)
    ]


def generate(engine: NativeEngine, asked: list[Ask]) -> list[TokenOutput]:
    """Outputs of requests that are made at once."""

    async def every() -> list[TokenOutput]:
        return await asyncio.gather(
            *(engine.generate(f"r{i}", prompt, how) for i, (prompt, how) in enumerate(asked))
        )

    return asyncio.run(every())


def make_actor(
    look: Look, *, checkpointing: bool = False, max_tokens: int = 16384, **engine: Any
) -> ActorWorker:
    """A policy with a fresh optimizer, in bfloat16 over float32 weights; further settings are of its engine."""
    return ActorWorker(
        ModelConfig(path=str(model_folder(look)), dtype="bfloat16", gradient_checkpointing=checkpointing),
        ActorConfig(
            optim=OptimizerConfig(lr=1e-6), engine=EngineConfig(max_tokens_per_device=max_tokens, **engine)
        ),
        AlgorithmConfig(),
        TrainingInit(device=look.device, num_updates=10),
    )


def update_batch(
    look: Look, prompts: int, samples: int, prompt: int, response: int
) -> tuple[DataProto, BatchTotals]:
    """An optimizer batch of `samples` responses to each prompt, all of equal length, and its counts."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = prompts * samples, shape(look)["vocab_size"]
    advantages = torch.randn(rows, generator=generator)
    batch = DataProto.from_dict(
        {
            "prompts": columns.jagged(
                [torch.tensor(ids) for ids in random_prompts(prompts, prompt) for _ in range(samples)]
            ),
            "responses": columns.jagged(
                [torch.randint(10, vocab, (response,), generator=generator) for _ in range(rows)]
            ),
            "response_mask": columns.jagged([torch.ones(response, dtype=torch.bool)] * rows),
            "advantages": columns.jagged([value.expand(response).clone() for value in advantages]),
        }
    )
    batch.meta_info["temperature"] = 1.0
    return batch, BatchTotals(num_tokens=rows * response, num_samples=rows)


def training_words(look: Look, folder: Path, *, steps: int, name: str, max_tokens: int) -> list[str]:
    """Arguments of `strop train` on random words, with a reward that tells random answers apart."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(64):
            text = "".join(chosen.choices(string.ascii_lowercase, k=look.size(100, 6)))
            row = {"data_source": "gpu", "prompt": [{"role": "user", "content": text}], "answer": f"{number}"}
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return [
        "train", "--out", str(folder / name), f"model.path={model_folder(look)}",
        f"data.train_files=[{folder / 'data.jsonl'}]", "data.ground_truth_key=answer", "data.sampler=in_order",
        f"data.prompts_per_step={look.size(8, 2)}", f"data.max_prompt_tokens={look.size(128, 16)}",
        f"data.max_response_tokens={max_tokens}", f"rollout.samples_per_prompt={look.size(8, 2)}",
        "actor.optim.lr=1e-6", f"reward.path={folder / 'reward.py'}", f"trainer.max_steps={steps}",
        "run.save_every=0", "eval.every=0", "eval.before_train=false", "trainer.trackers=[jsonl]",
        "trainer.preflight=false", f"resources.device={look.device}",
    ]  # fmt: skip
