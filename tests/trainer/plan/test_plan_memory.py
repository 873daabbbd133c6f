"""Memory of phases: optimizer states, shares of ranks, micro-batches, and the smallest change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_configs import SMALL
from plan_configs import config_of as small
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.half_weights import hold_base_half, hold_half
from strop.engines.packing import make_rows, micro_batches
from strop.engines.parallel.ranks import alone
from strop.rollout.native.cpu.kernel import compiled as decode_library
from strop.rollout.native.half_copy import HalfCopy
from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.plan import heap_gaps
from strop.trainer.plan.baseline import ASSUMED, Baseline, baseline
from strop.trainer.plan.batches import Lengths, groups_of, micro_batches_of, packed_tokens
from strop.trainer.plan.devices import device_named
from strop.trainer.plan.generation_memory import freed_copies, rollout_phase
from strop.trainer.plan.heap_gaps import gradient_gaps
from strop.trainer.plan.memory import phases_of
from strop.trainer.plan.meta_model import PassForm, causal_lm
from strop.trainer.plan.parameters import Axes, Count, model_sizes, share_of
from strop.trainer.plan.pass_memory import HEAP_GAPS, update_phase
from strop.trainer.plan.pass_time import OVERLAP, pass_seconds
from strop.trainer.plan.placement import search
from strop.trainer.plan.plan import lengths_of, make_plan
from strop.trainer.plan.roles import RolePlan, Shape, planned_roles
from strop.trainer.plan.state_memory import gloo_parts, optimizer_bytes, reduced_parts, resident

GIB = 2**30
EXPERTS = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, vocab_size=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of Qwen2.5-7B's sizes, and nothing else."""
    path = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, head_dim=128,
        intermediate_size=18_944, vocab_size=152_064, tie_word_embeddings=False,
    ).save_pretrained(path)  # fmt: skip
    return path


def shape_of(config: PreTrainedConfig) -> Shape:
    return Shape(config.to_json_string(), config)


def config_of(folder: Path, *overrides: str) -> Config:
    settings = [f"model.path='{folder}'", "data.train_files=[x]", "reward.path=x", "model.dtype=bfloat16"]
    return load(None, overrides=[*settings, *overrides])


@pytest.mark.parametrize(("name", "expected"), [("adamw", 8 * 100), ("muon", 4 * 60 + 8 * 40)])
def test_bytes_of_an_optimizer_by_hand(name: str, expected: int) -> None:
    # 100 numbers are trained, 60 of them of hidden matrices, whose Muon has one moment.
    count = Count(total=120, trained=100, matrices=60)
    assert optimizer_bytes(count, OptimizerConfig(name=name), 4) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "world"),
    [
        (EngineConfig(), 4),
        (EngineConfig(tensor_parallel=2, expert_parallel=2), 4),
        (EngineConfig(pipeline_parallel=2), 4),
        (EngineConfig(pipeline_parallel=2, expert_parallel=2), 4),
    ],
)
def test_ranks_hold_the_model_once_together(engine: EngineConfig, world: int) -> None:
    sizes = model_sizes(EXPERTS, PassForm(compute_dtype=torch.float32))
    axes = Axes.of(engine, world)
    held = sum(
        share_of(sizes, axes, engine, stage).held.total * axes.in_stage for stage in range(axes.pipeline)
    )
    whole = sum((part.whole.total for part in sizes.layers), sizes.rest.whole.total)
    copies = (axes.tensor - 1) * whole  # norms are on each tensor-parallel rank
    assert held == pytest.approx(sizes.total + copies)


def test_rows_are_cut_as_the_engine_cuts_them() -> None:
    lengths = Lengths(prompt=7, mean_response=20, max_response=60)
    groups = groups_of(lengths, num_samples=30, group_size=6)
    rows = [(number, answer) for number, (_, answers) in enumerate(groups) for answer in answers]
    data = make_rows(
        [torch.full((7,), number) for number, _ in rows],
        [torch.full((answer,), row) for row, (_, answer) in enumerate(rows)],
    )
    parts = micro_batches(data, max_tokens=150, parallel=alone(torch.device("cpu")))
    sizes = []
    for part in parts:
        prompts = {rows[row][0] for row in part}
        sizes.append(7 * len(prompts) + sum(rows[row][1] - 1 for row in part))
    planned = [sum(map(packed_tokens, batch)) for batch in micro_batches_of(groups, max_tokens=150)]
    assert planned == sizes


@pytest.mark.parametrize(
    ("per_update", "ranks", "of_update", "of_step"),
    [(12, 1, (3, 12), (3, 12)), (6, 1, (2, 6), (3, 12)), (5, 1, (1, 4), (3, 12)), (2, 1, (1, 2), (3, 12)),
     (12, 2, (2, 6), (2, 6)), (12, 5, (1, 3), (1, 3))],
)  # fmt: skip
def test_a_rank_has_its_part_of_the_samples(
    per_update: int,
    ranks: int,
    of_update: tuple[int, int],
    of_step: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 3 prompts of 64 tokens, 4 answers of 192 to each, of which the last token is not computed. Groups are cut: 6
    # samples are of two prompts, and 5 at most are three updates of 4. A pass before the updates has all of them.
    config = small(
        tmp_path, "data.prompts_per_step=3", "rollout.samples_per_prompt=4",
        f"actor.samples_per_update={per_update}", "resources.runtime=ray", f"resources.ranks={ranks}",
    )  # fmt: skip
    actor = planned_roles(config, lengths_of(config, 192, None), is_accelerator=True)[0]

    def num_tokens(prompts: int, answers: int) -> int:
        return 64 * prompts + 191 * answers

    assert actor.on_rank(actor.longest[0]).num_tokens == num_tokens(*of_update)
    assert actor.usual_tokens == [num_tokens(*of_update)]
    passed: list[int] = []
    monkeypatch.setattr(
        "strop.trainer.plan.roles._traced_forward_bytes",
        lambda _, __, batch: passed.append(batch.num_tokens),
    )
    _ = actor.forward_bytes
    assert passed == [num_tokens(*of_step)]


def test_lengths_have_their_mean_and_their_limit() -> None:
    lengths = Lengths(prompt=8, mean_response=300, max_response=1000).quantiles(2000)
    assert sum(lengths) / 2000 == pytest.approx(300, rel=0.01)
    assert max(lengths) == 1000
    assert Lengths(prompt=8, mean_response=5, max_response=5).quantiles(3) == [5, 5, 5]


def test_what_does_not_fit_is_said_with_a_change_that_fits(folder: Path) -> None:
    config = config_of(folder, "resources.runtime=ray", "resources.ranks=8")
    tight = make_plan(config, device="h100", memory_gib=40)
    assert not tight.fits
    assert tight.change is not None
    changed = make_plan(
        config_of(folder, "resources.runtime=ray", "resources.ranks=8", *tight.change.settings),
        device="h100",
        memory_gib=40,
    )
    assert changed.fits
    assert changed.peak_bytes == pytest.approx(tight.change.peak_bytes, rel=0.01)


def test_one_device_is_too_small_for_all_of_seven_billion(folder: Path) -> None:
    # 7.6 B numbers with gradient and moments in float32 are 113 GiB.
    plan = make_plan(config_of(folder), device="h100")
    assert not plan.fits
    step = next(phase for phase in plan.phases if phase.phase == "actor: optimizer step")
    assert step.device_bytes / GIB == pytest.approx(plan.roles[0].sizes.total * 16 / GIB)
    assert plan.change is not None
    assert "resources.ranks=" in " ".join(plan.change.settings)


def test_offloading_moves_state_to_the_host(folder: Path) -> None:
    on, off = (
        make_plan(
            config_of(folder, "resources.runtime=ray", "resources.ranks=4", f"actor.engine.offload={where}"),
            device="h100", advises=False,
        )
        for where in ("none", "optimizer")
    )  # fmt: skip

    def update(plan: object, name: str) -> float:
        return next(phase for phase in plan.phases if phase.phase == "actor: update").device.get(name, 0.0)  # type: ignore[attr-defined]

    share = on.roles[0].sizes.total * 8 / 4
    assert update(on, "optimizer") == pytest.approx(share)
    assert update(off, "optimizer") == 0
    host = next(phase for phase in off.phases if phase.phase == "actor: update").host
    assert host["optimizer"] == pytest.approx(share)


def test_a_reference_and_a_critic_are_beside_the_policy(folder: Path) -> None:
    ranks = ("resources.runtime=ray", "resources.ranks=8")
    alone_peak = make_plan(config_of(folder, *ranks), device="h100", advises=False).peak_bytes
    both = make_plan(
        config_of(folder, *ranks, "algorithm=ppo", "algorithm.use_kl_loss=true"), device="h100", advises=False
    )
    reference = both.roles[0].sizes.total * 2 / 8
    critic = next(role for role in both.roles if role.name == "critic").sizes.total * 12 / 8
    assert both.peak_bytes - alone_peak == pytest.approx(reference + critic, rel=0.02)


ROUNDED = [
    Qwen3Config(**{**SMALL.to_dict(), "tie_word_embeddings": True, "dtype": "bfloat16"}),
    Qwen3Config(**{**SMALL.to_dict(), "tie_word_embeddings": False, "dtype": "bfloat16"}),
    Qwen3MoeConfig(**{**EXPERTS.to_dict(), "dtype": "bfloat16"}),
]


def real_model(role: RolePlan) -> CausalLM:
    module = AutoModelForCausalLM.from_config(role.shape.config).to(torch.bfloat16).float()
    return causal_lm(module, role.form)


@pytest.mark.parametrize("shape", ROUNDED, ids=["tied", "apart", "experts"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "setting"), [("actor", "model.lora.rank=4"), ("reference", "algorithm.use_kl_loss=true")]
)
def test_weights_that_are_not_trained_are_counted_as_they_are_held(
    tmp_path: Path, device: str, shape: PreTrainedConfig, name: str, setting: str
) -> None:
    adapted = ["model.lora.target_modules=[q_proj,experts.gate_up_proj]"] if shape is ROUNDED[-1] else []
    config = small(tmp_path, setting, *(adapted if name == "actor" else []), model=shape)
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=device == "cuda")
    (role,) = (role for role in roles if role.name == name)
    model = real_model(role)
    if name == "actor":
        hold_base_half(model, device=torch.device(device))
    else:
        hold_half(model, device=torch.device(device))
    held = sum(parameter.nbytes for parameter in model.module.parameters())
    assert resident(role).weights == pytest.approx(held, rel=1e-12)
    assert held < 4 * role.sizes.total


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (ROUNDED[0], ["model.lora.rank=4"]),
        (ROUNDED[1], []),
        (ROUNDED[2], []),
        pytest.param(ROUNDED[0], [], marks=pytest.mark.slow),
        pytest.param(ROUNDED[1], ["model.lora.rank=4"], marks=pytest.mark.slow),
        pytest.param(ROUNDED[2], ["model.lora.rank=4"], marks=pytest.mark.slow),
    ],
)
def test_a_copy_that_decodes_is_counted_as_it_is_made(
    tmp_path: Path, shape: PreTrainedConfig, settings: list[str]
) -> None:
    config = small(tmp_path, *settings, model=shape)
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)
    phases = {phase.phase: phase.device for phase in phases_of(config, roles, device_bytes=80.0 * GIB)}
    model = real_model(roles[0])
    if settings:
        hold_base_half(model, device=torch.device("cuda"))
    assert phases["rollout"]["weights in half precision"] == HalfCopy(model).num_bytes


@pytest.mark.parametrize(
    ("shape", "settings", "device"),
    [
        pytest.param(ROUNDED[0], [], "cpu", marks=pytest.mark.slow),
        (ROUNDED[1], ["model.lora.rank=4"], "cpu"),
        (ROUNDED[2], [], "cpu"),
        (ROUNDED[0], ["model.lora.rank=4"], "cuda"),
        pytest.param(ROUNDED[1], [], "cuda", marks=pytest.mark.slow),
        pytest.param(ROUNDED[2], ["model.lora.rank=4"], "cuda", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_only_generate_hold_what_they_load(
    tmp_path: Path, device: str, shape: PreTrainedConfig, settings: list[str]
) -> None:
    # As a frozen model, without the adapter, which is merged into what it is sent.
    config = small(
        tmp_path, "resources.runtime=ray", "resources.ranks=2", "resources.apart={rollout:1}",
        "rollout.max_staleness=1", *settings, model=shape,
    )  # fmt: skip
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=device == "cuda")
    phases = phases_of(config, roles, device_bytes=None if device == "cpu" else 80.0 * GIB)
    apart = next(phase.device for phase in phases if phase.phase == "rollout (apart)")
    model = real_model(roles[0].alone())
    hold_half(model, device=torch.device(device))
    held = sum(parameter.nbytes for parameter in model.module.parameters())
    assert apart["weights"] == pytest.approx(held, rel=1e-12)
    if device == "cuda":
        assert apart["weights in half precision"] == HalfCopy(model).num_bytes
    else:
        is_decoded_in_c = shape is not ROUNDED[-1] and decode_library(16, 8, 1, True) is not None
        assert ("packed weights" in apart) is is_decoded_in_c


def test_a_process_reward_model_has_a_frozen_copy_beside_it(tmp_path: Path) -> None:
    settings = ("algorithm.adv_estimator=prime",)
    for where, suffix in (((), ""), (("resources.runtime=ray", "resources.apart={prm:1}"), " (apart)")):
        plan = make_plan(small(tmp_path, *settings, *where), device="h100", advises=False)
        phases = {phase.phase: phase.device for phase in plan.phases}
        total = plan.roles[0].sizes.total
        products = plan.roles[0].sizes.products.total
        update = phases[f"prm: update{suffix}"]
        assert update["prm_ref: idle"] == pytest.approx(4 * total - 2 * products)  # the tied head stays wide
        assert phases[f"prm_ref: log-probs{suffix}"]["prm: idle"] == 12 * total
        assert ("actor: idle" in update) is (not suffix)
        assert 0 < plan.seconds_by_stage["prm_ref"] <= plan.seconds_by_stage["prm"]


def test_samples_that_are_not_kept_are_scored_and_not_trained(tmp_path: Path) -> None:
    # 16 prompts with 8 samples, of which the best two are trained on, 8 at a time: 4 updates.
    config = small(
        tmp_path,
        "algorithm=ppo",
        "algorithm.keep.best=2",
        "actor.samples_per_update=8",
        "reward_model.path=x",
    )
    shapes = dict.fromkeys(("actor", "critic", "reference", "reward_model"), shape_of(SMALL))
    roles = planned_roles(config, lengths_of(config, 192, None), is_accelerator=True, shapes=shapes)
    actor, critic, reference, reward_model = (
        next(role for role in roles if role.name == name) for name in shapes
    )
    assert (actor.updates, critic.updates, reference.updates) == (4, 1, 16)
    assert actor.usual_tokens == [4 * (64 + 2 * 191)]
    assert sum(critic.usual_tokens) == 16 * (64 + 2 * 191)
    assert sum(reference.usual_tokens) * reference.updates == 16 * (64 + 8 * 191)
    assert reward_model.num_trained == 16 * 8


def test_the_gradient_of_a_tied_embedding_is_there_once_more_while_it_is_added_up(tmp_path: Path) -> None:
    # Of head and embedding, and their sum, which is the gradient where there was none before.
    settings = (
        "data.max_response_tokens=2", "data.max_prompt_tokens=8", "data.prompts_per_step=2",
        "rollout.samples_per_prompt=8", "model.dtype=float32",
    )  # fmt: skip
    tied, apart = (
        Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 32_768, "tie_word_embeddings": is_tied})
        for is_tied in (True, False)
    )
    table = 4 * 32_768 * 64
    extra = []
    for budget in (4096, 16):
        config = small(tmp_path, *settings, f"actor.engine.max_tokens_per_device={budget}", model=tied)
        actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
        assert 3 * table <= actor.passes.tail_bytes < 3.1 * table
        extra.append(update_phase(actor, {}, True).device["embedding's gradient"] / table)
    assert extra == pytest.approx([2, 3], abs=0.1)
    own_head = planned_roles(small(tmp_path, *settings, model=apart), actor.lengths, is_accelerator=False)[0]
    gaps = [role.passes.gap_bytes(role.passes.kinds) for role in (actor, own_head)]
    assert gaps[0] < gaps[1] + 0.1 * table  # and is no gap


def test_a_folder_in_half_precision_is_read_as_it_is(tmp_path: Path) -> None:
    for shape, narrow in ((ROUNDED[0], 2), (SMALL, 4)):
        config = small(tmp_path, "model.lora.rank=4", model=shape)
        roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
        sizes = roles[0].sizes
        of_products, others = sizes.products.total, sizes.total - sizes.products.total
        load = next(phase for phase in phases_of(config, roles, device_bytes=None))
        expected = 4 * sizes.total if narrow == 4 else 2 * of_products + (4 + 2) * others
        assert load.device["actor: whole model"] == expected


@pytest.mark.parametrize(("loss", "passes"), [("vanilla", 0), ("kl_cov", 1), ("clip_cov", 1)])
def test_a_loss_that_looks_at_an_update_first_passes_it_once_more(
    tmp_path: Path, loss: str, passes: int
) -> None:
    config = small(tmp_path, f"algorithm.policy_loss={loss}", "actor.samples_per_update=32", "actor.epochs=2")
    plan = make_plan(config, device="h100", advises=False)
    seconds = pass_seconds(plan.roles[0], plan.device)
    expected = 4 * 2 * (seconds.update + passes * seconds.forward)
    assert plan.seconds_by_stage["update_actor"] == pytest.approx(expected)


def test_a_search_finds_a_placement_that_fits(folder: Path) -> None:
    config = config_of(folder, "data.prompts_per_step=64")
    device = device_named("h100")
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)
    found = search(config, roles, device, devices=8, available=0.94 * device.memory_bytes)
    assert found.fastest is not None
    assert found.cheapest is not None
    assert found.fastest.devices <= 8
    assert found.cheapest.device_hours <= found.fastest.device_hours
    nothing = search(config, roles, device, devices=1, available=0.94 * device.memory_bytes)
    assert nothing.fastest is None


def test_a_budget_below_the_longest_sequence_is_refused(folder: Path) -> None:
    config = config_of(folder)
    lengths = replace(lengths_of(config, None, None), prompt=20_000)
    roles = planned_roles(config, lengths, is_accelerator=True)
    with pytest.raises(ValueError, match="above actor.engine.max_tokens_per_device of 16384:"):
        phases_of(config, roles, device_bytes=80.0 * GIB)
    critic = replace(roles[0], held_by="critic")
    with pytest.raises(ValueError, match="above critic.engine.max_tokens_per_device of 16384:"):
        _ = critic.longest


def test_means_and_prompts_above_their_limits_are_refused(tmp_path: Path) -> None:
    config = small(tmp_path)
    with pytest.raises(ValueError, match="--response-tokens is 193, above data.max_response_tokens of 192"):
        lengths_of(config, 193, None)
    with pytest.raises(ValueError, match="--prompt-tokens is 65, above data.max_prompt_tokens of 64"):
        lengths_of(config, None, 65)
    assert lengths_of(config, 192, 64).longest == 255


def test_a_reserve_is_left_of_given_memory_as_well(tmp_path: Path) -> None:
    plan = make_plan(small(tmp_path), device="h100", memory_gib=50, advises=False)
    assert plan.memory_bytes == pytest.approx(47 * GIB)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans have no seconds: for a processor, layers are carried out to tell them."""
    monkeypatch.setattr("strop.trainer.plan.plan.step_time", lambda *_: None)


@pytest.mark.usefixtures("untimed")
def test_processes_of_a_machine_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _: Baseline(num_bytes=GIB))
    ray = ("resources.runtime=ray", "resources.ranks=4", "rollout.max_staleness=1")
    config = small(tmp_path, *ray, "resources.apart={rollout:2}", "resources.nodes=2")
    plan = make_plan(config, device="cpu", memory_gib=30, advises=False)
    assert plan.memory_bytes == pytest.approx(10 * GIB)


@pytest.mark.usefixtures("untimed")
def test_what_could_not_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    late = replace(ASSUMED, reason="its process had not ended after 120 s")
    for process in (late, Baseline(num_bytes=ASSUMED.num_bytes)):
        monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _, process=process: process)
        plan = make_plan(small(tmp_path), device="cpu", memory_gib=30, advises=False)
        said.append([line for line in plan.assumptions if "could not be measured here" in line])
    assert said[1] == []
    (line,) = said[0]
    assert line == (
        "a process without a model could not be measured here (its process had not ended after 120 s): 0.73 GiB, and "
        "ranks that send 0.7 GB/s, 500 us a time"
    )


@pytest.mark.usefixtures("untimed")
def test_what_ranks_were_seen_to_pay_for_talking_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Baseline(num_bytes=GIB, call_s=300e-6, bytes_per_s=0.8e9)
    monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _: process)
    ranks = ("resources.runtime=ray", "resources.ranks=2")
    for settings, said in (
        (
            (*ranks, "actor.engine.tensor_parallel=2"),
            ["0.8 GB/s, and 300 us go to each exchange of a layer, as"],
        ),
        (ranks, ["0.8 GB/s, as"]),
        ((), []),
    ):
        plan = make_plan(small(tmp_path, *settings), device="cpu", memory_gib=30, advises=False)
        lines = [line for line in plan.assumptions if "it sends" in line]
        assert len(lines) == len(said)
        assert all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.slow
def test_a_process_of_ray_takes_more_than_one_without_and_less_than_a_model() -> None:
    assert GIB // 4 < baseline().num_bytes < baseline(uses_ray=True).num_bytes < 2 * GIB


def test_a_model_is_whole_on_a_cpu_while_it_is_loaded(tmp_path: Path) -> None:
    ray = ("resources.runtime=ray", "resources.ranks=16")
    roles = planned_roles(
        small(tmp_path, *ray), lengths_of(small(tmp_path), None, None), is_accelerator=False
    )
    load = next(phase for phase in phases_of(small(tmp_path, *ray), roles, device_bytes=None))
    assert load.phase == "load"
    assert load.device_bytes == roles[0].sizes.total * 4


@pytest.mark.parametrize(
    ("settings", "slots", "prompts"),
    [
        (["max_running=200"], 128, 16),
        (["max_running=200", "data.val_files=[x]"], 200, 200),  # as many as may run: its size is not known
        (["max_running=4", "data.val_files=[x]"], 4, 16),  # prompts of a step wait with their pages
        (["max_running=200", "data.val_files=[x]", "data.max_val_prompts=10"], 128, 16),
        (["max_running=200", "data.val_files=[x]", "data.max_val_prompts=150"], 150, 150),
        (
            ["max_running=200", "data.val_files=[x]", "data.max_val_prompts=150", "eval.samples_per_prompt=2",
             "eval.temperature=1"],
            200, 150,
        ),
    ],
)  # fmt: skip
def test_keys_and_values_are_those_of_a_step_or_of_a_validation_that_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], slots: int, prompts: int
) -> None:
    monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _: ASSUMED)
    # 4 layers, 8 heads, keys and values of 16 numbers in bfloat16; 16 prompts of 64 tokens, 8 answers of 192 to each.
    token = 4 * 8 * 2 * 16 * 2
    config = small(tmp_path, f"rollout.{settings[0]}", *settings[1:])
    for device, tokens in (("cpu", slots * 256), ("h100", 32 + prompts * 64 + slots * 192)):
        plan = make_plan(config, device=device, memory_gib=60, advises=False)
        rollout = next(phase for phase in plan.phases if phase.phase == "rollout")
        assert rollout.device["keys and values"] == tokens * token
        is_assumed = any("data.max_val_prompts" in line for line in plan.assumptions)
        assert is_assumed is (settings[1:] == ["data.val_files=[x]"])


@pytest.mark.parametrize(
    ("device", "setting", "on_device", "on_host"),
    [
        ("cpu", "nodes=1", 2 * 16, None),  # slots of shared memory
        (
            "cpu",
            "nodes=2",
            2 * 3 * 8,
            None,
        ),  # two buckets travel beside the one in use, each with what joins it
        ("cpu", "weight_store=/shared", 2 * 256, None),  # a bucket, and a piece of it
        ("cuda", "nodes=1", 2 * 256, 2 * 16),  # of the device, or else of the host
        ("cuda", "nodes=2", 2 * 256, None),  # a bucket by itself, with what joins it
        ("cuda", "weight_store=/shared", 2 * 256, 2 * 256),
    ],
)
def test_buckets_are_those_of_the_transport(
    folder: Path, device: str, setting: str, on_device: int, on_host: int | None
) -> None:
    config = config_of(
        folder, "resources.runtime=ray", "resources.ranks=4", "resources.apart={rollout:2}",
        "rollout.max_staleness=1", f"resources.{setting}",
    )  # fmt: skip
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=device == "cuda")
    phases = phases_of(config, roles, device_bytes=None if device == "cpu" else 80.0 * GIB)
    sides = [phase for phase in phases if phase.phase in ("weight sync", "rollout (apart)")]
    assert len(sides) == 2
    for side in sides:
        assert side.device["buckets"] == on_device * 2**20
        assert side.host.get("buckets") == (None if on_host is None else on_host * 2**20)


@pytest.mark.parametrize(
    ("model", "settings", "packs"),
    [
        (SMALL, [], True),
        (SMALL, ["model.lora.rank=4"], False),
        (SMALL, ["model.attn_implementation=eager"], False),
        (SMALL, ["resources.runtime=ray", "resources.ranks=2"], False),
        (EXPERTS, [], False),
    ],
    ids=["plain", "adapter", "eager", "ranks", "experts"],
)
def test_weights_are_packed_for_models_that_are_decoded_in_c(
    model: PreTrainedConfig, settings: list[str], packs: bool, tmp_path: Path
) -> None:
    config = small(tmp_path, "model.dtype=float32", *settings, model=model)
    planned = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
    rollout = next(
        phase for phase in phases_of(config, planned, device_bytes=None) if phase.phase == "rollout"
    )
    assert ("packed weights" in rollout.device) is (packs and decode_library(16, 8, 1, False) is not None)


def test_an_engine_that_leaves_too_much_free_does_not_fit(tmp_path: Path) -> None:
    config = small(
        tmp_path, "resources.runtime=ray", "rollout.engine=vllm", "resources.apart={rollout:1}",
        "rollout.max_staleness=1", "rollout.vllm.gpu_memory_utilization=0.5",
    )  # fmt: skip
    weights = make_plan(config, device="h100", advises=False).roles[0].sizes.total * 2
    for share, fits in ((4.0, True), (1.5, False)):
        roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)
        device = share * weights + 2 * 256 * 4 * 8 * 2 * 16 * 2
        apart = next(
            phase
            for phase in phases_of(config, roles, device_bytes=device)
            if phase.phase == "rollout (apart)"
        )
        assert (apart.device_bytes <= device) is fits


@pytest.mark.parametrize(("settings", "gathered"), [([], 0), (["model.lora.rank=4"], 4 * 512 * 64)])
def test_weights_leave_their_shards_and_only_merged_ones_are_whole(
    settings: list[str], gathered: int, tmp_path: Path
) -> None:
    # The largest of these, with an adapter merged, is the embedding: 512 rows of 64 numbers in float32.
    ray = ("resources.runtime=ray", "resources.ranks=2", "rollout.engine=vllm")
    plan = make_plan(small(tmp_path, *ray, *settings), device="h100", advises=False)
    (sync,) = (phase for phase in plan.phases if phase.phase == "weight sync")
    assert sync.device.get("one merged weight, whole", 0) == gathered
    assert set(sync.device) - {"one merged weight, whole"} == {"actor: idle", "buckets"}


def test_an_engine_beside_the_actor_has_weights_in_its_share(tmp_path: Path) -> None:
    # Weights have 2 bytes a number: in nine tenths of that the engine does not begin.
    ray = ("resources.runtime=ray", "rollout.engine=vllm")
    whole = make_plan(small(tmp_path, *ray), device="h100", advises=False)
    numbers, memory = whole.roles[0].sizes.total, whole.memory_bytes
    assert whole.fits
    share = 0.9 * 2 * numbers / memory
    plan = make_plan(small(tmp_path, *ray, f"rollout.vllm.gpu_memory_utilization={share}"), device="h100")
    rollout = plan.phases[0].device
    assert rollout["weights of vllm"] == 2 * numbers
    assert rollout["left free by vllm"] == pytest.approx((1 - share) * memory)
    assert not plan.fits
    assert plan.change is not None
    assert plan.change.settings == ("rollout.vllm.gpu_memory_utilization=0.6",)
    assert plan.changed is not None
    assert plan.changed.fits
    held = plan.changed.phases[0].device
    assert held["keys and values"] == pytest.approx(0.6 * memory - 2 * numbers)


@pytest.mark.parametrize(("chunk", "logits"), [(1 << 28, 8 * 2**18), (2**20, 2**20)])
def test_a_rank_of_several_holds_no_more_logits_than_there_are(
    chunk: int, logits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 prompts and 2 answers of 2 tokens to each, on 8 ranks: 8 predictions of an eighth of 2^21 tokens, in float32 and
    # their gradients in bfloat16. Values of a critic are no logits.
    monkeypatch.setattr("strop.trainer.plan.pass_memory.DEVICE_CHUNK_ELEMENTS", chunk)
    config = small(
        tmp_path, "resources.runtime=ray", "resources.ranks=8", "actor.engine.tensor_parallel=8", "algorithm=ppo",
        "critic.engine.tensor_parallel=8", "data.max_response_tokens=2", "data.max_prompt_tokens=8",
        "data.prompts_per_step=2", "rollout.samples_per_prompt=2",
        model=Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 2**21}),
    )  # fmt: skip
    roles = {
        role.name: role for role in planned_roles(config, lengths_of(config, None, None), is_accelerator=True)
    }
    for role, least in ((roles["actor"], 6 * logits), (roles["critic"], 0)):
        role.__dict__["passes"] = replace(
            role.passes, top_bytes=8, tail_bytes=0, saved_base_bytes=1 << 40
        )  # the head is in the fuller part
        assert update_phase(role, {}, False).device["head and one layer"] == max(1, least)


def test_gradients_in_the_heap_leave_gaps_of_their_size(tmp_path: Path) -> None:
    roles = planned_roles(small(tmp_path), lengths_of(small(tmp_path), None, None), is_accelerator=False)
    total = roles[0].sizes.total
    assert gradient_gaps(roles[0], 0) == 4 * total
    update = update_phase(roles[0], {}, True)
    assert update.device["gaps of the heap"] > 4 * total
    more = update_phase(roles[0], {}, True, freed_bytes=1000.0)
    assert more.device_bytes == update.device_bytes + 1000
    assert "gaps of the heap" not in update_phase(roles[0], {}, False).device


def test_large_tensors_are_not_in_the_heap_where_layers_are_computed_again(tmp_path: Path) -> None:
    # The table has 8 MiB, every other parameter less than 1, and hidden states of 16,000 tokens have 4.
    model = Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 32_768})
    gaps, left = [], []
    for again in (False, True):
        settings = f"model.gradient_checkpointing={again}", "actor.engine.max_tokens_per_device=16384"
        config = small(tmp_path, *settings, model=model)
        actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
        gaps.append(gradient_gaps(actor, 0))
        left.append(actor.passes.heap_share)
    assert gaps == pytest.approx([4 * actor.sizes.total, 4 * (actor.sizes.total - 32_768 * 64)], rel=1e-12)
    assert left[0] > 0.5 > left[1]


def test_generation_finds_the_heap_that_training_has_left(tmp_path: Path) -> None:
    config = small(tmp_path)
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
    phases = {phase.phase: phase for phase in phases_of(config, roles, device_bytes=None)}
    left = phases["actor: update"].heap_left
    parts = phases["rollout"].device
    of_heap = ("heap of training", "prefill and logits", "packed weights")
    assert left == pytest.approx(sum(parts.get(name, 0.0) for name in of_heap))
    assert parts["heap of training"] > 0.5 * left
    passes, update = roles[0].passes, phases["actor: update"].device
    kept = passes.heap_share * (passes.saved_bytes() + passes.top_bytes)
    assert left == pytest.approx(kept + update["gaps of the heap"])
    apart = rollout_phase(config, roles[0], {}, None, heap_left=1.0)
    assert "heap of training" not in apart.device, "what generation takes fits into it"
    on_device = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)
    for phase in phases_of(config, on_device, device_bytes=1e12):
        assert phase.heap_left == 0
        assert "heap of training" not in phase.device


@pytest.mark.parametrize("length", [8, 192])
def test_a_pass_leaves_gaps_where_gradients_leave_fewer(length: int, tmp_path: Path) -> None:
    rows = (
        f"data.max_prompt_tokens={length}", f"data.max_response_tokens={length}", "data.prompts_per_step=1",
        "rollout.samples_per_prompt=8", "model.dtype=float32",
    )  # fmt: skip
    config = small(tmp_path, *rows)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    passes = actor.passes
    in_heap = passes.heap_share * (passes.saved_bytes() + passes.top_bytes)
    of_gradients = gradient_gaps(actor, 0) + HEAP_GAPS * in_heap
    of_pass = passes.gap_bytes(passes.kinds)
    assert (of_pass > of_gradients) is (length == 192)
    gaps = update_phase(actor, {}, True).device["gaps of the heap"]
    assert gaps == pytest.approx(max(of_gradients, of_pass))


@pytest.mark.parametrize(
    ("response", "unit"),
    [(192, 4 * 64 * 128 + 3 * 64 * 128 + 160), (2, 8192 * 64 + 64)],
    ids=["layer", "root"],
)
def test_gradients_beside_the_layers_are_sent_when_activations_are_gone(
    response: int, unit: int, tmp_path: Path
) -> None:
    # In bfloat16, and in float32 where they are added up.
    config = small(
        tmp_path, "resources.runtime=ray", "resources.ranks=2", f"data.max_response_tokens={response}",
        "data.max_prompt_tokens=8", "data.prompts_per_step=2", "rollout.samples_per_prompt=8",
        model=Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 8192}),
    )  # fmt: skip
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
    update = update_phase(actor, {}, False).device
    assert update["gradients on their way"] == unit * (2 + 4)
    assert ("activations" in update) is (response == 192)


@pytest.mark.parametrize(
    ("dtype", "shards", "sent_of_size"),
    # Of 4 ranks: 3 parts of a quarter; all of it as far as 3 ranks, and back; 1 half, and half of that and back.
    [("float32", 0, 3 / 4), ("float64", 0, 3 / 4), ("float32", 1, 2 * 3 / 4), ("float32", 2, 1 / 2 + 1 / 2)],
)
def test_ranks_may_add_gradients_up_after_each_micro_batch(
    dtype: str, shards: int, sent_of_size: float, tmp_path: Path
) -> None:
    # The micro-batches of an update take 256 tokens each; all numbers of the model are reduced over 4 ranks.
    device = device_named("h100")
    settings = (
        "resources.runtime=ray", "resources.ranks=4", "actor.engine.max_tokens_per_device=256", f"model.dtype={dtype}",
        f"actor.engine.shard_size={shards}",
    )  # fmt: skip
    sent = []
    for sync in ("last", "each"):
        config = small(tmp_path, *settings, f"actor.engine.gradient_sync={sync}")
        actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
        sent.append(pass_seconds(actor, device).sent)
    num_batches, size = len(actor.usual), 8 if dtype == "float64" else 4
    assert num_batches > 2
    once = sent_of_size * actor.sizes.total * size / device.link
    assert sent[1] - sent[0] == pytest.approx((num_batches - 1) * once * (1 - OVERLAP))
    assert reduced_parts(actor, Count(trained=10)) == {"gradients on their way": 10 * 2 * size}


@pytest.mark.parametrize(
    ("settings", "vocab", "unit"),
    [
        (("resources.ranks=2",), 512, 4 * (4 * 64 * 128 + 3 * 64 * 128 + 160)),
        (("resources.ranks=2",), 8192, 4 * (8192 * 64 + 64)),
        (("resources.ranks=2",), 2**17, 4 * (4 * 64 * 128 + 3 * 64 * 128 + 160)),  # the root's is above 32 MiB
        (("resources.ranks=2", "algorithm=ppo"), 8192, 4 * (8192 * 64 + 2 * 64)),  # of the critic, with its head
        (("resources.ranks=1",), 512, 0),
    ],
)  # fmt: skip
def test_threads_of_gloo_keep_what_they_gathered(
    settings: tuple[str, ...], vocab: int, unit: int, tmp_path: Path
) -> None:
    model = Qwen3Config(**{**SMALL.to_dict(), "vocab_size": vocab})
    config = small(tmp_path, "resources.runtime=ray", "model.dtype=float32", *settings, model=model)
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
    assert gloo_parts(roles, True) == ({"copies of gloo": 2 * 1.5 * unit} if unit else {})
    assert gloo_parts(roles, False) == {}
    phases = phases_of(config, roles, device_bytes=None)
    with_copies = [phase.phase for phase in phases if "copies of gloo" in phase.device]
    assert with_copies == [phase.phase for phase in phases if unit and phase.phase != "load"]


def test_roles_of_other_axes_have_threads_of_gloo_of_their_own(tmp_path: Path) -> None:
    settings = ("resources.runtime=ray", "resources.ranks=4", "model.dtype=float32", "algorithm=ppo")
    for cut in ((), ("actor.engine.tensor_parallel=2", "critic.engine.tensor_parallel=1")):
        config = small(tmp_path, *settings, *cut)
        roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
        (both,) = gloo_parts(roles, True).values()
        each = {role.name: gloo_parts([role], True)["copies of gloo"] for role in roles}
        if cut:  # the reference has the axes of the actor
            assert both == each["actor"] + each["critic"]
        else:
            assert both == max(each.values())


def test_the_stage_with_the_largest_unit_tells_the_copies_of_gloo(tmp_path: Path) -> None:
    model = Qwen3Config(**{**SMALL.to_dict(), "vocab_size": 8192, "tie_word_embeddings": False})
    config = small(
        tmp_path, "resources.runtime=ray", "resources.ranks=4", "model.dtype=float32",
        "actor.engine.pipeline_parallel=2", model=model,
    )  # fmt: skip
    roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
    # Of two stages the first has the embedding, the last one the head and the norm.
    assert gloo_parts(roles, True) == {"copies of gloo": 2 * 1.5 * 4 * (8192 * 64 + 64)}


LAYER, ROOT = 4 * 64 * 128 + 3 * 64 * 128, 512 * 64
"""Numbers of matrices; 160 and 64 are of norms."""


@pytest.mark.parametrize(
    ("settings", "limit", "left_out"),
    [
        ([], 4 * ROOT, 0),
        ([], 4 * ROOT - 1, 4 * ROOT),  # each parameter by itself
        (["model.dtype=float64"], 8 * ROOT - 1, 8 * ROOT),
        (["resources.ranks=2"], 2 * (LAYER + 160), 0),  # shards of a unit together
        (["resources.ranks=2"], 2 * (LAYER + 160) - 1, 4 * 2 * (LAYER + 160)),
        (["resources.ranks=2", "actor.engine.tensor_parallel=2"], 4 * (LAYER // 2 + 160), 0),
        (
            ["resources.ranks=2", "actor.engine.tensor_parallel=2"],
            4 * (LAYER // 2 + 160) - 1,
            4 * 4 * (LAYER // 2 + 160),
        ),
    ],
)
def test_gradients_above_a_size_lie_beside_the_heap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], limit: int, left_out: int
) -> None:
    config = small(tmp_path, "resources.runtime=ray", *settings)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    monkeypatch.setattr(heap_gaps, "largest_in_heap", lambda **_: limit + 1)
    assert gradient_gaps(actor, 0) == pytest.approx(resident(actor).gradients - left_out, rel=1e-12)


def test_experts_with_ranks_of_their_own_are_reduced_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(
        tmp_path,
        "resources.runtime=ray",
        "resources.ranks=2",
        "actor.engine.expert_parallel=2",
        model=EXPERTS,
    )
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    experts = 8 * 3 * 64 * 32
    assert actor.sizes.experts_total == 4 * experts
    monkeypatch.setattr(heap_gaps, "largest_in_heap", lambda **_: 4 * experts / 2 - 1)
    assert gradient_gaps(actor, 0) == pytest.approx(4 * (actor.sizes.total - 4 * experts) / 2, rel=1e-12)


@pytest.mark.parametrize(("axes", "shared"), [([], 1), (["actor.engine.tensor_parallel=2"], 2)])
def test_gathered_parameters_above_a_size_lie_beside_the_heap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: list[str], shared: int
) -> None:
    config = small(tmp_path, "resources.runtime=ray", "resources.ranks=2", *axes)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    all_in = freed_copies(actor)
    assert all_in == 2 * actor.share(0).gathered.total  # in bfloat16
    monkeypatch.setattr(heap_gaps, "largest_in_heap", lambda **_: 2 * ROOT / shared - 1)
    assert freed_copies(actor) == pytest.approx(all_in - 2 * ROOT / shared, rel=1e-12)


def test_what_sharded_ranks_gather_for_generation_leaves_gaps(tmp_path: Path) -> None:
    ray = ("resources.runtime=ray", "resources.ranks=2")
    gaps = {}
    for settings in (ray, (*ray, "resources.apart={rollout:1}", "rollout.max_staleness=1")):
        config = small(tmp_path, *settings)
        roles = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)
        phases = phases_of(config, roles, device_bytes=None)
        update = next(phase for phase in phases if phase.phase == "actor: update")
        gaps[len(settings)] = update.device["gaps of the heap"]
    assert gaps[2] - gaps[4] == pytest.approx(2 * roles[0].sizes.total)  # in bfloat16
