"""The engine with its layers divided over ranks: losses, gradients, steps and values of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from references.engine_steps import PAIRS, Setting, check, engine_of, one_process, run_step
from references.language_models import config, exact_norms, save_model
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.config import EngineConfig
from strop.engines.micro_batch import pack
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import alone
from strop.engines.parallel.stages import check_pipeline_parallel
from strop.engines.role_checkpoint import load_role, save_role
from strop.engines.training import TrainEngine
from strop.rollout.weight_sync.stream import parameter_stream, tensor_at

Folder = Callable[[str], Path]


# A head that is the embedding, with interleaved micro-batches; a head of its own; windows.
@pytest.mark.parametrize(
    ("kind", "max_tokens", "checkpointing", "sync"),
    [("qwen3", 28, False, "last"), ("llama", 28, True, "each"), ("gemma3", 1000, False, "last")],
)
def test_two_stages_take_the_step_of_one_process(
    tiny_folder: Folder, kind: str, max_tokens: int, checkpointing: bool, sync: str
) -> None:
    folder = str(tiny_folder(kind))
    expected = one_process(Setting(folder=folder))
    cut = Setting(folder=folder, pp_size=2, max_tokens=max_tokens, checkpointing=checkpointing, sync=sync)
    check(cut, PAIRS, 2, expected)


@pytest.mark.parametrize(("chunks", "layers"), [(2, ()), (1, (4, 1))])
def test_interleaved_and_uneven_stages(five_layers: Path, chunks: int, layers: tuple[int, ...]) -> None:
    expected = one_process(Setting(folder=str(five_layers)))
    cut = Setting(
        folder=str(five_layers), pp_size=2, chunks=chunks, layers=layers, max_tokens=28, checkpointing=True
    )
    check(cut, PAIRS, 2, expected)


def links_of(ranks: Ranks, folder: str, num_ranks: int) -> tuple[int, list[list[int]]]:
    """Number of the rank, and the ranks of each group that messages of a pipeline go over."""
    setting = Setting(folder=folder, pp_size=num_ranks)
    pipeline = engine_of(ranks.join(pipeline_parallel=num_ranks), setting).model.pipeline
    assert pipeline is not None
    links = [pipeline.link(sender, is_forward=way) for sender in range(num_ranks) for way in (True, False)]
    return pipeline.rank, [dist.get_process_group_ranks(group) for group in set(links)]


def test_two_ranks_send_each_way_over_a_group_of_its_own(five_layers: Path) -> None:
    """Hidden states of interleaved stages go both ways, and a device would take them in one order."""
    assert run_ranks(links_of, 2, str(five_layers), 2) == [(rank, [[0, 1]] * 4) for rank in range(2)]


@pytest.mark.dist
def test_of_three_ranks_each_pair_sends_one_way(five_layers: Path) -> None:
    assert run_ranks(links_of, 3, str(five_layers), 3) == [(rank, [[0, 1, 2]] * 2) for rank in range(3)]


def test_values_over_two_stages(value_folder: Path) -> None:
    expected = one_process(Setting(folder=str(value_folder), values=True))
    check(Setting(folder=str(value_folder), values=True, pp_size=2, max_tokens=28), PAIRS, 2, expected)


@pytest.mark.dist
@pytest.mark.parametrize("tp_size", [1, 2])
def test_four_ranks_take_the_step_of_one_process(five_layers: Path, tp_size: int) -> None:
    folder = str(five_layers)
    expected = one_process(Setting(folder=folder))
    cut = Setting(folder=folder, pp_size=2, chunks=2, tp_size=tp_size, max_tokens=28, checkpointing=True)
    check(cut, PAIRS, 4, expected)


@pytest.mark.dist
def test_a_rank_without_rows_passes_in_step(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    pairs = PAIRS[3:4]  # the second of two data-parallel groups has none
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    check(Setting(folder=folder, pp_size=2), pairs, 4, expected)


def step_without_rows(ranks: Ranks, folder: str) -> tuple[float, float]:
    """Value of a loss of no rows, and the norm of its gradient."""
    engine = engine_of(ranks.join(pipeline_parallel=2), Setting(folder=folder, pp_size=2))
    value = engine.accumulate(rows(), lambda tokens: tokens.log_probs(temperature=1.0)[0].sum(), rows=[])
    return float(value), engine.step().grad_norm


def test_a_step_of_which_no_row_has_a_gradient(tiny_folder: Folder) -> None:
    """All advantages of an optimizer batch may be 0."""
    assert run_ranks(step_without_rows, 2, str(tiny_folder("qwen3"))) == [(0.0, 0.0)] * 2


def rows() -> Any:
    return make_rows([torch.tensor(prompt) for prompt, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])


def facts(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Digest, weights as they travel, and hidden states behind all stages."""
    streamed: dict[str, Tensor] = {}
    for bucket in parameter_stream(engine.model.module, bucket_bytes=4096):
        streamed |= {w.name: tensor_at(bucket.data, w, offset).clone() for w, offset in bucket.entries}
    with engine.full_parameters(), torch.no_grad():
        model = engine.model
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        tokens = pack(rows(), model)
        hidden = model.hidden(tokens.input_ids, tokens.position_ids, tokens.attention).clone()
    engine.save_model(folder)
    log_probs = log_probs_of(engine, rows(), temperature=1.0)[0]
    return {
        "digest": engine.checksum(), "streamed": streamed, "shapes": shapes, "hidden": hidden,
        "log_probs": log_probs,
    }  # fmt: skip


def facts_on_ranks(ranks: Ranks, setting: Setting, folder: str) -> dict[str, Any]:
    with exact_norms():
        return facts(engine_of(ranks.join(**setting.axes), setting), Path(folder))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_weights_come_out_of_all_stages(tiny_folder: Folder, tmp_path: Path, kind: str) -> None:
    """For digests, for a rollout engine, for generation, and as a model folder."""
    folder = str(tiny_folder(kind))
    with exact_norms():
        expected = facts(engine_of(alone("cpu"), Setting(folder=folder)), tmp_path / "one")
    for found in run_ranks(facts_on_ranks, 2, Setting(folder=folder, pp_size=2), str(tmp_path / "two")):
        for name in ("digest", "shapes"):
            assert found[name] == expected[name]
        assert list(found["streamed"]) == list(expected["streamed"])
        for name, tensor in expected["streamed"].items():
            assert torch.equal(found["streamed"][name], tensor), name
        for name in ("hidden", "log_probs"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-10, rtol=1e-10)
    one, two = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "two")
    )
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def stepped_and_saved(ranks: Ranks | None, setting: Setting, target: str) -> str:
    with exact_norms():
        parallel = alone("cpu") if ranks is None else ranks.join(**setting.axes)
        engine = engine_of(parallel, setting)
        step_of(engine)
        save_role(Path(target), engine)
        parallel.barrier("the checkpoint")
        return engine.checksum()


def step_of(engine: TrainEngine) -> None:
    """One step on all rows, which every data-parallel rank takes a share of."""
    parallel = engine.parallel
    share = list(range(parallel.dp_rank, len(PAIRS), parallel.dp_size))
    engine.accumulate(rows(), lambda tokens: tokens.log_probs(temperature=1.0)[0].sum(), rows=share)
    engine.step()


def continued(ranks: Ranks | None, setting: Setting, source: str) -> tuple[str, str]:
    """Digests of a checkpoint, and after one more step from it."""
    with exact_norms():
        engine = engine_of(alone("cpu") if ranks is None else ranks.join(**setting.axes), setting)
        load_role(Path(source), engine)
        loaded = engine.checksum()
        step_of(engine)
        return loaded, probe(engine)


def probe(engine: TrainEngine) -> str:
    return " ".join(f"{value:.9f}" for value in log_probs_of(engine, rows(), temperature=1.0)[0].tolist())


@pytest.mark.dist
def test_checkpoints_move_between_stages_matrices_and_data_parallel_ranks(
    five_layers: Path, tmp_path: Path
) -> None:
    folder = str(five_layers)
    one, of_stages = Setting(folder=folder), Setting(folder=folder, pp_size=2, chunks=2, tp_size=2)
    saved = str(tmp_path / "stages")
    digest, *others = run_ranks(stepped_and_saved, 4, of_stages, saved)
    assert set(others) == {digest}
    expected = continued(None, one, saved)
    assert expected[0] == digest
    for setting, size in ((one, 4), (of_stages, 4), (Setting(folder=folder, pp_size=2), 2)):
        for found in run_ranks(continued, size, setting, saved):
            assert found == expected
    saved = str(tmp_path / "one")
    digest = stepped_and_saved(None, one, saved)
    expected = continued(None, one, saved)
    for found in run_ranks(continued, 4, of_stages, saved):
        assert found == expected
        assert found[0] == digest


@pytest.mark.parametrize(
    ("shape", "engine", "sentence"),
    [
        (
            transformers.LlamaConfig(num_hidden_layers=3),
            {"pipeline_parallel": 4},
            "4 stages, but the model has 3",
        ),
        (
            transformers.LlamaConfig(num_hidden_layers=6),
            {"pipeline_parallel": 2, "pipeline_layers": (4, 1)},
            r"pipeline_layers is \[4, 1\], 5 layers in 2 stages, but the model has 6 layers and the engine 2 stages",
        ),
        (transformers.GPT2Config(), {"pipeline_parallel": 2}, "transformers does not divide gpt2 into"),
        (transformers.Gemma3Config(), {"pipeline_parallel": 2}, "gemma3 reads images"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(shape: Any, engine: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_pipeline_parallel(shape, EngineConfig(**engine), section="critic.engine")


def granite(ranks: Ranks, folder: str) -> str:
    try:
        engine_of(ranks.join(pipeline_parallel=2), Setting(folder=folder, pp_size=2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_that_scales_hidden_states_before_its_layers_is_refused(tmp_path: Path) -> None:
    shape = config("granite")
    shape.embedding_multiplier = 3.0
    save_model(shape, tmp_path)
    sentences = run_ranks(granite, 2, str(tmp_path))
    assert all("GraniteForCausalLM changes hidden states between its layers" in text for text in sentences)
