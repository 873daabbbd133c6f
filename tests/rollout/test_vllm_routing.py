"""Experts that vLLM's routers choose, on this machine's CPU, against those of transformers' routers for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from strop.engines.config import ModelConfig
from strop.engines.model import weights_of_folder
from strop.protocol.routed_experts import TOKEN_DTYPE
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import VllmEngine, start_vllm
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.stream import parameter_stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

T = TypeVar("T")
EXPERTS, CHOSEN, ROUTED_LAYERS = 8, 3, 2
MAX_TOKENS = 400
CHUNK = 64
"""Most tokens of a step: a longer prompt is computed in pieces."""
TIE = 1e-4
"""Router logits that differ by less may be ordered either way; 1e-5 was seen between the two."""


def make_model(folder: Path, *, seed: int) -> Any:
    """Three layers, of which the first has no experts."""
    torch.manual_seed(seed)
    shape = Qwen3MoeConfig(
        vocab_size=103, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, mlp_only_layers=[0], num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        moe_intermediate_size=32, norm_topk_prob=True, initializer_range=0.2, max_position_embeddings=MAX_TOKENS,
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(shape).eval()
    model.save_pretrained(folder)
    return model


async def start(folder: Path, log: Path, config: VllmConfig) -> VllmEngine:
    settings = Settings(
        model=str(folder), dtype="float32", device="cpu", max_tokens=MAX_TOKENS, max_running=8, num_threads=1,
        shares_device=True, log=log, records_routing=True,
    )  # fmt: skip
    return await start_vllm(config, settings, weights_of_folder(ModelConfig(path=str(folder))), version=0)


@dataclass
class Served:
    """An engine with the weights of the first model, and two models of transformers."""

    engine: VllmEngine
    models: list[Any]
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T], *, seconds: float = 120.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self.runner.run(bounded())

    def update(self, which: int) -> None:
        for bucket in parameter_stream(self.models[which]):
            self.engine.target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])
        self.run(self.engine.set_version(self.engine.version + 1))

    def generate(self, *prompts: list[int], max_tokens: int = 20) -> list[TokenOutput]:
        """Greedy: a drawn token cannot be set back on a CPU where a prompt is computed in pieces."""

        async def together() -> list[TokenOutput]:
            sampling = Sampling(key=3, max_tokens=max_tokens, temperature=0.0)
            asks = (self.engine.generate(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            return list(await asyncio.gather(*asks))

        return self.run(together())

    def counts(self) -> dict[str, float]:
        return dict(self.run(self.engine.health()))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    models = [make_model(folder / str(seed), seed=seed) for seed in (0, 1)]
    pieces = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK, "block_size": 32}
    config = VllmConfig(
        cpu_cache_gib=0.0016, engine_args=pieces
    )  # a thousand tokens: some requests must wait
    with asyncio.Runner() as runner:
        engine = runner.run(start(folder / "0", folder / "vllm.log", config))
        made = Served(engine, models, runner)
        made.update(0)
        yield made
        runner.run(engine.close())


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(5, 103, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def check(model: Any, prompt: list[int], output: TokenOutput) -> None:
    """Every token but the last has the experts of transformers' routers, but for ties."""
    experts = output.routed_experts
    assert experts is not None
    assert (experts.num_layers, experts.num_chosen) == (ROUTED_LAYERS, CHOSEN)
    assert len(experts) == len(prompt) + len(output.token_ids) - 1
    found = np.frombuffer(b"".join(experts.tokens), dtype=TOKEN_DTYPE).reshape(-1, ROUTED_LAYERS, CHOSEN)
    ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
    whole = model(ids, output_router_logits=True)
    logits = torch.stack(whole.router_logits, dim=1)  # [n, L, E]
    largest = logits.topk(CHOSEN + 1)
    is_clear = largest.values[..., CHOSEN - 1] - largest.values[..., CHOSEN] > TIE
    expected = largest.indices[..., :CHOSEN].sort().values
    is_equal = (torch.from_numpy(found.astype(np.int64)).sort().values == expected).all(-1)
    assert is_equal[is_clear].all(), (~is_equal & is_clear).nonzero().tolist()
    assert is_clear.float().mean() > 0.98
    at = whole.logits[0, len(prompt) - 1 :].log_softmax(-1)
    log_probs = at.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), log_probs, atol=1e-3, rtol=0)


def test_experts_are_those_of_transformers_also_of_a_prompt_in_pieces(served: Served) -> None:
    for length in (1, 9, CHUNK, 3 * CHUNK + 5):
        prompt = prompt_of(length, seed=length)
        (output,) = served.generate(prompt)
        check(served.models[0], prompt, output)


def test_requests_at_once_get_their_own(served: Served) -> None:
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 70, 7, 150, 21)]
    for prompt, output in zip(prompts, served.generate(*prompts, max_tokens=30), strict=True):
        check(served.models[0], prompt, output)


def test_tokens_whose_prefix_was_cached_have_the_experts_of_before(served: Served) -> None:
    shared = prompt_of(100, seed=5)
    first = [*shared, *prompt_of(10, seed=6)]
    check(served.models[0], first, served.generate(first)[0])
    before = served.counts()["cached_tokens"]
    prompts = [[*shared, *prompt_of(10 + i, seed=7 + i)] for i in range(4)]
    for prompt, output in zip([first, *prompts], served.generate(first, *prompts), strict=True):
        check(served.models[0], prompt, output)
    assert served.counts()["cached_tokens"] - before >= 5 * 96, "whole blocks of 32 tokens"


def test_a_request_that_was_put_back_keeps_its_experts(served: Served) -> None:
    before = served.counts()["preempted"]
    prompts = [prompt_of(100, seed=20 + i) for i in range(6)]
    for prompt, output in zip(prompts, served.generate(*prompts, max_tokens=200), strict=True):
        assert len(output.token_ids) == 200
        check(served.models[0], prompt, output)
    assert served.counts()["preempted"] > before


def test_an_abort_gives_the_experts_of_the_tokens_so_far(served: Served) -> None:
    prompt = prompt_of(30, seed=40)

    async def abort() -> TokenOutput:
        heard = asyncio.Event()
        sampling = Sampling(key=3, max_tokens=300, temperature=0.0)
        asked = served.engine.generate("a", prompt, sampling, on_token=lambda *_: heard.set())
        task = asyncio.create_task(asked)
        await heard.wait()
        await served.engine.abort(["a"])
        return await task

    output = served.run(abort())
    assert (output.stop_reason, len(output.token_ids) < 300) == ("aborted", True)
    check(served.models[0], prompt, output)


class EndIsLost:
    """An engine behind a connection that is cut once, where the record of a request would follow its last token."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.asked = engine, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        self.asked.append(len(prompt_ids))
        output = await self.engine.generate(request_id, prompt_ids, sampling, on_token=on_token)
        if len(self.asked) == 1:
            raise ConnectionError("the connection was cut")
        return output


def test_a_request_whose_end_was_lost_has_its_tokens_read_for_the_record(served: Served) -> None:
    prompt, engine = prompt_of(30, seed=45), EndIsLost(served.engine)
    client = RolloutClient([engine], timeout_s=60, records_routing=True)  # type: ignore[list-item]
    output = served.run(client.generate("lost", prompt, Sampling(key=3, max_tokens=20)))
    assert engine.asked == [30, 30 + 19]
    assert len(output.token_ids) == 20
    check(served.models[0], prompt, output)


def test_new_weights_choose_anew(served: Served) -> None:
    prompt = prompt_of(100, seed=50)
    served.generate(prompt)  # it is kept, and must be forgotten
    served.update(1)
    try:
        (output,) = served.generate(prompt)
        check(served.models[1], prompt, output)
        with pytest.raises(AssertionError):
            check(served.models[0], prompt, output)
    finally:
        served.update(0)


def test_workers_that_share_matrices_say_it_once(served: Served, tmp_path: Path) -> None:
    async def generate() -> TokenOutput:
        config = VllmConfig(cpu_cache_gib=0.05, tensor_parallel=2)
        engine = await start(tmp_path / "0", tmp_path / "vllm.log", config)
        try:
            for bucket in parameter_stream(model):
                await asyncio.to_thread(
                    engine.target.load, [(weight.name, tensor) for weight, tensor in bucket.tensors()]
                )
            await engine.set_version(1)
            return await engine.generate("one", prompt, Sampling(key=3, max_tokens=20))
        finally:
            await engine.close()

    prompt, model = prompt_of(30, seed=60), make_model(tmp_path / "0", seed=0)
    output = served.run(generate(), seconds=400)
    check(model, prompt, output)
