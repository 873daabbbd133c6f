"""Generation with layers that carry a state: prompts in pieces, sequences that move, weights that change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from references.language_models import VOCAB, load_plain, plain_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.linear_attention.packed import LayerState, Run, recurrent_layers
from strop.engines.linear_attention.states import SlotStates
from strop.engines.model import load_model
from strop.rollout.native import prefill
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

LENGTHS = (13, 3, 9, 13)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def play(model: CausalLM, *, max_running: int) -> list[TokenOutput]:
    async def all_of_them() -> list[TokenOutput]:
        engine = NativeEngine(model, max_running=max_running)
        # Other numbers of tokens, so that sequences end apart and the last slot moves into the hole.
        how = [Sampling(key=i, max_tokens=4 + 3 * i) for i in range(len(LENGTHS))]
        return await asyncio.gather(*(engine.generate(str(i), p, how[i]) for i, p in enumerate(prompts())))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("piece", "max_running"), [(4096, 2), pytest.param(5, 4, marks=pytest.mark.slow), (1, 3)]
)
def test_pieces_of_prompts_and_moves_of_sequences_change_nothing(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, piece: int, max_running: int
) -> None:
    folder = tiny_folder("qwen3_next_hybrid")
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", piece)
    plain = load_plain(folder, dtype=torch.float32)
    outputs = play(load_model(ModelConfig(path=str(folder)), device="cpu"), max_running=max_running)
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.no_grad():
            wanted, _ = plain_log_probs(plain, prompt, output.token_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(output.log_probs), wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("kind", ["qwen3_next_hybrid", "qwen3_5"])
def test_in_bfloat16_the_rule_of_the_state_is_in_float32_over_chunks_as_it_is_token_by_token(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="bfloat16"), device="cpu")
    layer = recurrent_layers(model.module)[0]
    hidden = torch.randn(150, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), model.precision():
        whole = layer(hidden[None], strop_context=_Whole())[0]
        by_token = layer(hidden[None], strop_context=_ByToken())[0]
    # Linear maps round what differs in the last bits of float32, so a few numbers are one bit of bfloat16 apart.
    difference = (whole.float() - by_token.float()).abs()
    assert float((difference > 0).float().mean()) < 0.05
    assert float(difference.max()) < 0.02 * float(whole.float().abs().max())


class _Whole:
    """Gives a layer its tokens at once, as in training."""

    def recur(self, layer: int, run: Run, hidden: torch.Tensor) -> torch.Tensor:
        return run(hidden[None], None)[0]


class _ByToken:
    """Gives a layer its tokens one by one, as in rollout."""

    def recur(self, layer: int, run: Run, hidden: torch.Tensor) -> torch.Tensor:
        state = LayerState()
        return torch.cat([run(token[None, None], state)[0] for token in hidden])


def test_tables_grow_keep_what_they_have_and_give_their_memory_back() -> None:
    states = ((torch.ones(1, 2, 3), torch.full((1, 1, 2, 2), 2.0)),)
    slots = SlotStates({}, 4)
    slots.write([0], states)
    slots.write([1, 2], ((states[0][0] * 5, states[0][1] * 5),))
    slots.move(2, 0)
    layer = slots.layer(0, 2)
    assert layer.kept()[0].shape == (2, 2, 3)
    torch.testing.assert_close(layer.kept()[1], torch.full((2, 1, 2, 2), 10.0))
    slots.free()
    assert slots.num_bytes == 0
