"""Router replay: tokens of training go to the experts of the rollout, through packing, ranks and a real generation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from default_cases import by_default
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from references.engine_steps import Setting, engine_of
from references.language_models import VOCAB, config, exact_norms, save_model
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.agents.episode_routing import EpisodeRouting
from strop.engines.causal_lm import CausalLM
from strop.engines.moe.layers import moe_layers
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto, columns
from strop.protocol.routed_experts import RoutedExperts
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput
from strop.workers.episodes import Episode, episode_rows

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]
PROMPTS = [
    tuple(torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (7, 7, 4)
]
"""Two samples of one prompt, one of another."""
MAX_TOKENS = (9, 5, 12)


def generated(model: CausalLM, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[TokenOutput]:
    async def run() -> list[TokenOutput]:
        engine = NativeEngine(model, max_running=2, records_routing=True)
        requests = enumerate(zip(prompts, MAX_TOKENS, strict=False))
        outputs = await asyncio.gather(
            *(engine.generate(str(i), p, Sampling(key=10 + i, max_tokens=n)) for i, (p, n) in requests)
        )
        await engine.leave()
        return outputs

    async def bounded() -> list[TokenOutput]:
        async with asyncio.timeout(60):
            return await run()

    return asyncio.run(bounded())


def rows_of(outputs: Sequence[TokenOutput]) -> DataProto:
    """The batch that a rollout makes of them."""
    episodes = []
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        routing = EpisodeRouting()
        routing.note(prompt, output)
        sequence = Trajectory(uid=f"p{len(prompt)}", sample_index=index, prompt_ids=prompt)
        sequence = sequence.with_sampled(output.token_ids, output.log_probs, output.versions).finish("length")
        row = Prompt(
            uid=sequence.uid, row=0, token_ids=prompt, messages=(), data_source="", ground_truth=None
        )
        episodes.append(Episode(prompt=row, sample_index=index, trajectory=routing.added_to(sequence)))
    return episode_rows(episodes, [0.0] * len(episodes), temperature=1.0)


def disturbed(engine: TrainEngine, size: float) -> None:
    """Move the routers' weights so far that some of their choices are others."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in moe_layers(engine.model.module):
            assert layer.router is not None
            for parameter in layer.router.parameters():
                noise = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                own: Any = parameter
                if isinstance(parameter, DTensor):
                    own.add_(distribute_tensor(noise, parameter.device_mesh, parameter.placements))
                else:
                    own.add_(noise)


KINDS = ["qwen3_moe", "deepseek_v3_experts", "gpt_oss", "mixtral", "glm4_moe", "minimax_m2", "granitemoe"]


@pytest.mark.parametrize("kind", by_default(KINDS, "deepseek_v3_experts", "gpt_oss", "granitemoe"))
def test_log_probs_of_training_are_those_of_the_rollout(tiny_folder: Folder, kind: str) -> None:
    with exact_norms():
        engine = engine_of(alone("cpu"), Setting(folder=str(tiny_folder(kind))))
        outputs = generated(engine.model)
        rows = rows_of(outputs)
        width = columns.flat(rows.tensors()["routed_experts"]).shape[1]
        for output, prompt, routed in zip(
            outputs, PROMPTS, columns.rows(rows.tensors()["routed_experts"]), strict=True
        ):
            assert routed.shape == (len(prompt) + len(output.token_ids) - 1, width)
            assert int(routed.min()) >= 0
        of_rollout = torch.tensor([value for output in outputs for value in output.log_probs])
        engine.replays_routing = True
        replayed = log_probs_of(engine, rows, temperature=1.0)[0]
        torch.testing.assert_close(replayed.float(), of_rollout, atol=1e-5, rtol=0)


def test_choices_that_flip_are_held_and_weights_are_the_trainers_own(tiny_folder: Folder) -> None:
    with exact_norms():
        engine = engine_of(alone("cpu"), Setting(folder=str(tiny_folder("qwen3_moe"))))
        rows = rows_of(generated(engine.model))
        counts = engine.expert_counts(rows)
        disturbed(engine, 0.2)
        flipped = engine.expert_counts(rows)
        engine.replays_routing = True
        held = engine.expert_counts(rows)
    assert not torch.equal(flipped, counts), "the disturbance must change choices"
    assert torch.equal(held, counts)


def test_log_probs_stay_near_the_rollouts_where_choices_would_flip(tiny_folder: Folder) -> None:
    with exact_norms():
        engine = engine_of(alone("cpu"), Setting(folder=str(tiny_folder("qwen3_moe"))))
        outputs = generated(engine.model)
        of_rollout = torch.tensor([value for output in outputs for value in output.log_probs])
        rows = rows_of(outputs)
        chosen = engine.expert_counts(rows)
        disturbed(engine, 0.03)
        assert not torch.equal(engine.expert_counts(rows), chosen), "a choice must flip"
        without = (log_probs_of(engine, rows, temperature=1.0)[0] - of_rollout).abs()
        engine.replays_routing = True
        replayed = (log_probs_of(engine, rows, temperature=1.0)[0] - of_rollout).abs()
    assert float(replayed.max()) < 0.9 * float(without.max())
    assert float(replayed.mean()) < 0.9 * float(without.mean())


def gradients(parallel: Parallel, setting: Setting, rows: DataProto) -> dict[str, Any]:
    """Of a loss over this rank's rows, with replay, by routers that would choose otherwise."""
    with exact_norms():
        engine = engine_of(parallel, setting)
        disturbed(engine, 0.2)
        engine.replays_routing = True
        mine = rows.take(torch.arange(parallel.dp_rank, len(rows), parallel.dp_size))

        def loss(tokens: Tokens) -> Tensor:
            return tokens.log_probs(temperature=1.0)[0].sum()

        value = float(engine.accumulate(mine, loss))
        if engine.model.pipeline is not None:
            engine.model.pipeline.add_shared_gradients()
        return {
            "value": value,
            "gradients": {
                name: whole(parameter.grad)
                for name, parameter in engine.model.named_parameters()
                if not parameter.is_meta
            },
        }


def whole(gradient: Any) -> np.ndarray[Any, Any]:
    tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    array: np.ndarray[Any, Any] = tensor.detach().numpy().copy()
    return array


def gradients_on_ranks(ranks: Ranks, setting: Setting, rows: DataProto) -> dict[str, Any]:
    return gradients(ranks.join(**setting.axes), setting, rows)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"ep_size": 2}, marks=pytest.mark.slow),
        {"cp_size": 2, "ep_size": 2},
        {"pp_size": 2},
        pytest.param({"tp_size": 2}, marks=SLOW),
        pytest.param({"sp_size": 2, "ep_size": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_ranks_and_micro_batches_replay_what_one_process_does(
    tiny_folder: Folder, axes: dict[str, int]
) -> None:
    setting = Setting(folder=str(tiny_folder("qwen3_moe")))
    with exact_norms():
        rows = rows_of(generated(engine_of(alone("cpu"), setting).model))
    rows = rows.select(["prompts", "responses", "routed_experts"], [])
    expected = gradients(alone("cpu"), setting, rows)
    cut = dataclasses.replace(setting, max_tokens=20, checkpointing=True, **axes)  # type: ignore[arg-type]
    results = run_ranks(gradients_on_ranks, 2, cut, rows)
    of_shares = {result["value"] for result in results}
    assert sum(of_shares) == pytest.approx(expected["value"], abs=1e-9)
    for result in results:
        for name, gradient in result["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], atol=1e-9, err_msg=name)
    assert {name for result in results for name in result["gradients"]} == set(expected["gradients"])


def generated_together(ranks: Ranks, setting: Setting) -> list[TokenOutput]:
    """Requests of the first rank, which ranks that share matrices compute together."""
    with exact_norms():
        engine = engine_of(ranks.join(**setting.axes), setting)
        with engine.full_parameters():
            return generated(engine.model, PROMPTS if ranks.rank == 0 else [])


@pytest.mark.parametrize("axes", [{"tp_size": 2, "ep_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_that_share_a_model_record_the_routing_of_all_tokens(
    tiny_folder: Folder, axes: dict[str, int]
) -> None:
    check_records(Setting(folder=str(tiny_folder("qwen3_moe"))), axes, 2)


@pytest.mark.dist
@pytest.mark.parametrize("axes", [{"tp_size": 2}, {"ep_size": 2, "layers": (1, 1)}], ids=str)
def test_stages_of_two_ranks_record_the_routing_of_all_tokens(
    tiny_folder: Folder, tmp_path: Path, axes: dict[str, Any]
) -> None:
    folder = tiny_folder("qwen3_moe")
    if "layers" in axes:  # a stage without a router
        shape = config("qwen3_moe")
        shape.mlp_only_layers = [0]
        save_model(shape, tmp_path)
        folder = tmp_path
    check_records(Setting(folder=str(folder)), {"pp_size": 2, **axes}, 4)


def check_records(setting: Setting, axes: dict[str, Any], num_ranks: int) -> None:
    with exact_norms():
        expected = generated(engine_of(alone("cpu"), setting).model)
    found, *nothing = run_ranks(generated_together, num_ranks, dataclasses.replace(setting, **axes))
    assert nothing == [[]] * (num_ranks - 1)
    for output, other in zip(found, expected, strict=True):
        assert (output.token_ids, output.routed_experts) == (other.token_ids, other.routed_experts)


def test_a_dense_model_is_refused(tiny_folder: Folder) -> None:
    engine = engine_of(alone("cpu"), Setting(folder=str(tiny_folder("qwen3"))))
    with pytest.raises(
        ValueError, match="rollout.router_replay is true, but Qwen3ForCausalLM has no experts"
    ):
        NativeEngine(engine.model, max_running=1, records_routing=True)


def test_turns_of_an_episode_keep_the_first_reading_of_each_token() -> None:
    def output(tokens: Sequence[int], experts: Sequence[bytes]) -> TokenOutput:
        count = len(tokens)
        routed = RoutedExperts(num_layers=1, num_chosen=1, tokens=tuple(experts))
        return TokenOutput(
            token_ids=tuple(tokens), log_probs=(0.0,) * count, versions=(0,) * count, stop_reason="stop",
            routed_experts=routed,
        )  # fmt: skip

    routing = EpisodeRouting()
    routing.note((1, 2), output((3, 4), [b"a0", b"b0", b"c0"]))
    routing.note((1, 2, 3, 4, 9), output((5,), [b"a1", b"b1", b"c1", b"d1", b"e1"]))  # reads all once more
    routing.note((1, 7), output((8,), [b"x0", b"y0"]))  # a history that was rewritten
    empty = Trajectory(uid="p", sample_index=0, prompt_ids=(1, 2))
    turns = empty.with_sampled((3, 4), (0.0, 0.0), (0, 0)).with_given((9,)).with_sampled((5,), (0.0,), (0,))
    routed = routing.added_to(turns).routed_experts
    assert routed is not None
    assert routed.tokens == (b"a0", b"b0", b"c0", b"d1", b"e1")
    cut = routing.added_to(turns).truncate(1).routed_experts
    assert cut is not None
    assert cut.tokens == (b"a0", b"b0", b"c0")
    other = routing.added_to(dataclasses.replace(empty, prompt_ids=(1, 7)).with_sampled((8,), (0.0,), (0,)))
    assert other.routed_experts is not None
    assert other.routed_experts.tokens == (b"a0", b"y0")
