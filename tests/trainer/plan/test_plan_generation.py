"""Seconds of generation over several ranks of a processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plan_configs import config_of
from transformers import DeepseekV3Config, Gemma2Config, MistralConfig

from strop.rollout.native.cpu.kernel import sample_kernel
from strop.trainer.plan.changes import with_values
from strop.trainer.plan.devices import device_named
from strop.trainer.plan.generation_memory import (
    KEYS,
    has_fused_steps,
    held_keys,
    running_at_once,
    token_bytes,
)
from strop.trainer.plan.generation_time import (
    SAMPLE_S,
    decode_ratios,
    decode_seconds,
    generation_seconds,
    generation_time,
    sent_seconds,
)
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.plan import lengths_of, make_plan
from strop.trainer.plan.roles import planned_roles
from strop.trainer.plan.sampling_cost import sampling_cost, sampling_of
from strop.trainer.plan.step_time import step_time
from strop.trainer.plan.trial import NUM_DECODED, DecodeTimes, PassTimes

MODULE = "strop.trainer.plan.generation_time"


@pytest.mark.parametrize(
    ("product_flops", "weight_bandwidth"), [(1.0, 1e30), (1e30, 1.0)], ids=["products", "memory"]
)
def test_ranks_of_an_engine_share_the_time_of_one(
    tmp_path: Path, product_flops: float, weight_bandwidth: float
) -> None:
    # Where products, or weights and keys that are read, are all that counts, two ranks take half of one's time, however
    # long the decode steps of the trial were; what is packed takes its own.
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    cpu = replace(
        device_named("h100"), product_flops=product_flops, wide_flops=product_flops, attention_flops=1e30,
        bandwidth=1e30, weight_bandwidth=weight_bandwidth, few_rows_bandwidth=1e30, call_s=0.0, collective_s=0.0,
        link=1e30, threads=1,
    )  # fmt: skip
    ratios = decode_ratios(actor, cpu, running=16, sampling=sampling_of(config.rollout))
    packed = ratios.packed_number * actor.sizes.decoded
    one, two, four = (
        generation_seconds(config, actor, cpu, engines=1, ranks=ranks, samples=16) - packed
        for ranks in (1, 2, 4)
    )
    assert one == pytest.approx(2 * two, rel=1e-6)
    assert one == pytest.approx(4 * four, rel=1e-6)


def test_a_rank_has_as_much_python_as_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real layers take three times what their products do: of two ranks each saves half of the products, and no more.
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    cpu = replace(
        device_named("h100"), product_flops=1e9, wide_flops=1e9, bandwidth=1e30, weight_bandwidth=1e30,
        collective_s=0.0, link=1e30,
        threads=1,
    )  # fmt: skip
    spent = {}
    for ratio in (1.0, 3.0, 0.5):
        ratios = DecodeTimes(layer=ratio, rest=1.0, packed_number=0.0)
        monkeypatch.setattr(f"{MODULE}.decode_ratios", lambda *_, ratios=ratios, **__: ratios)
        spent[ratio] = [
            generation_seconds(config, actor, cpu, engines=1, ranks=ranks, samples=16) for ranks in (1, 2)
        ]
    layers = (spent[3.0][0] - spent[1.0][0]) / 2  # of one process, at the rates of the device
    assert spent[3.0][1] == pytest.approx(spent[1.0][1] + 2 * layers)
    assert spent[0.5][1] == pytest.approx(spent[1.0][1] - layers / 4)


def test_ranks_of_an_engine_talk_four_times_in_each_layer_and_seven_times_beside(tmp_path: Path) -> None:
    # 4 layers of 64 numbers in bfloat16: 16 sequences of 128 bytes, and half a second for each time.
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
    device = replace(device_named("h100"), collective_s=0.5, link=1024.0, network=512.0, per_node=2)
    assert sent_seconds(actor, device, running=16, ranks=1) == 0
    assert sent_seconds(actor, device, running=16, ranks=2) == 4 * 4 * 16 * 128 / 1024 + (4 * 4 + 7) * 0.5
    assert sent_seconds(actor, device, running=16, ranks=4) == 4 * 4 * 16 * 128 / 512 + (4 * 4 + 7) * 0.5


def test_greedy_answers_and_samples_share_what_is_computed_of_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ReMax: one to each of 16 prompts, beside 8 samples. A second of prompts and three of packing are there once.
    config = config_of(tmp_path, "algorithm=remax", "rollout.samples_per_prompt=8", "rollout.top_p=0.9")
    plain = config_of(tmp_path, "algorithm=remax", "rollout.samples_per_prompt=1")
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
    device = device_named("h100")
    packed = 3.0 / actor.sizes.decoded
    monkeypatch.setattr(f"{MODULE}._prefill_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(
        f"{MODULE}.decode_ratios", lambda *_, **__: DecodeTimes(layer=1.0, rest=1.0, packed_number=packed)
    )
    samples, greedy = (
        generation_seconds(each, actor, device, engines=1, ranks=1, samples=count)
        for each, count in ((config, 16 * 8), (plain, 16))
    )
    # Greedy tokens are those of a distribution that nothing is cut from.
    assert generation_time(config, actor, device).seconds == pytest.approx(samples + greedy - 4.0)


def test_a_cpu_makes_logits_in_float32(tmp_path: Path) -> None:
    # 512 rows of 64 numbers for each of 10 sequences; and all of them read once, of 4 bytes each.
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    if not has_fused_steps(actor):
        pytest.skip("nothing can be compiled here")
    endless = {"bandwidth": 1e30, "attention_flops": 1e30, "call_s": 0.0, "threads": 1}
    computing = replace(
        device_named("h100"), product_flops=1e30, wide_flops=1e6, weight_bandwidth=1e30, **endless
    )
    reading = replace(computing, wide_flops=1e30, weight_bandwidth=1e6)
    sampling = sampling_of(config.rollout)
    records = SAMPLE_S * (3 + 10 / 3)
    rest = [
        decode_seconds(actor, device, running=10, context=1, ranks=1, sampling=sampling)[1] - records
        for device in (computing, reading)
    ]
    assert rest == pytest.approx([2 * 512 * 64 * 10 / 1e6, 4 * 512 * 64 / 1e6], rel=1e-6)


def test_a_trial_has_as_many_sequences_as_its_time_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A head of 32,768 numbers and a layer beside it: of a token 65,536 operations each, at 1e8 and 1e9 in a second.
    sequences: list[int] = []

    def decode_times(_: object, __: object, running: int, *___: object) -> DecodeTimes:
        sequences.append(running)
        return DecodeTimes(layer=1.0, rest=1.0, packed_number=0.0)

    monkeypatch.setattr(f"{MODULE}.decode_times", decode_times)
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    layer = actor.sizes.in_trial - actor.sizes.head_numbers
    for flops, wide in ((1e30, 1e8), (1e8, 1e30)):
        cpu = replace(device_named("h100"), product_flops=flops, wide_flops=wide, threads=1)
        decode_ratios(actor, cpu, running=1000, sampling=sampling_of(config.rollout))
    assert sequences == [int(0.01 * 1e8 / (2 * number)) for number in (512 * 64, layer)]


@pytest.mark.parametrize("settings", [("top_p=0.9",), ("top_k=5", "temperature=0.5")], ids=["top-p", "top-k"])
def test_sampling_holds_what_its_operators_make(tmp_path: Path, settings: tuple[str, ...]) -> None:
    # Logits, those of rows that are cut, their probabilities, and these in order with their places, in float32 and
    # int64; two sums of them in float64.
    rollout = config_of(tmp_path, *(f"rollout.{setting}" for setting in settings)).rollout
    cost = sampling_cost(sampling_of(rollout), torch.float32)
    assert 40 <= cost.held < 45
    assert cost.moved > 2 * cost.held


def test_sampling_in_c_holds_logits_alone(tmp_path: Path) -> None:
    if sample_kernel() is None:
        pytest.skip("nothing can be compiled here")
    cost = sampling_cost(sampling_of(config_of(tmp_path).rollout), torch.bfloat16)
    assert (cost.held, cost.moved) == (8, 16)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampling_of_an_accelerator_does_not_depend_on_a_compiler_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    compiled = SimpleNamespace(
        sample=lambda logits, *_: (torch.zeros(len(logits), dtype=torch.int64), logits[:, 0])
    )
    planned = []
    for temperature, kernel in ((0.61, None), (0.62, compiled)):  # which no plan of this process has seen
        monkeypatch.setattr("strop.rollout.native.cpu.kernel.sample_kernel", lambda kernel=kernel: kernel)
        config = config_of(tmp_path, f"rollout.top_p={top_p}", f"rollout.temperature={temperature}")
        plan = make_plan(config, device="h100", advises=False)
        generation = next(phase for phase in plan.phases if phase.phase == "rollout")
        planned.append((generation.device, plan.seconds_by_stage["gen"]))
    assert planned[0] == planned[1]


def test_a_distribution_that_is_cut_takes_its_time_and_memory(tmp_path: Path) -> None:
    plans = [
        make_plan(config_of(tmp_path, *settings), device="h100", advises=False)
        for settings in ((), ("rollout.top_p=0.9",))
    ]
    whole, cut = (
        next(phase.device["prefill and logits"] for phase in plan.phases if phase.phase == "rollout")
        for plan in plans
    )
    sampling = sampling_of(config_of(tmp_path, "rollout.top_p=0.9").rollout)
    logits = 128 * 512  # of all sequences of a step, which run together
    assert cut - whole == pytest.approx(
        logits * (sampling_cost(sampling, torch.bfloat16, is_accelerator=True).held - 8)
    )
    assert plans[1].seconds_by_stage["gen"] > plans[0].seconds_by_stage["gen"]


@pytest.mark.parametrize("response", [8, 100])
def test_a_trial_is_priced_at_the_tokens_that_it_had(
    response: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sequences that are shorter than the steps of a trial still have a prompt of half of their tokens.
    prompts: list[int] = []

    def decode_times(_: object, __: object, running: int, prompt: int, *___: object) -> DecodeTimes:
        prompts.append(prompt)
        return DecodeTimes(layer=1.0, rest=1.0, packed_number=0.0, context=123.0)

    monkeypatch.setattr(f"{MODULE}.decode_times", decode_times)
    cpu = replace(device_named("h100"), threads=1)
    config = config_of(tmp_path, f"data.max_response_tokens={response}")
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    sampling = sampling_of(config.rollout)
    ratios = decode_ratios(actor, cpu, running=4, sampling=sampling)
    layers, rest = decode_seconds(actor, cpu, running=4, context=123.0, ranks=1, sampling=sampling)
    assert (ratios.layer, ratios.rest) == pytest.approx((len(actor.sizes.layers) / layers, 1 / rest))
    longest = actor.lengths.longest
    assert prompts == [longest // 2 if longest < 2 * NUM_DECODED else longest - NUM_DECODED]


def test_ranks_that_only_generate_decode_the_whole_model_without_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: list[PassForm] = []

    def decode_times(_: object, form: PassForm, *__: object) -> DecodeTimes:
        forms.append(form)
        return DecodeTimes(layer=1.0, rest=1.0, packed_number=0.0)

    monkeypatch.setattr(f"{MODULE}.decode_times", decode_times)
    monkeypatch.setattr(f"{MODULE}.update_ratios", lambda *_: PassTimes())
    cpu = replace(device_named("h100"), threads=1)
    for where in ((), ("resources.apart={rollout:1}", "rollout.max_staleness=1")):
        ranks = ("resources.runtime=ray", "resources.ranks=2", "model.lora.rank=4")
        config = config_of(tmp_path, *ranks, *where)
        actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
        generation_seconds(config, actor, cpu, engines=1, ranks=1, samples=16)
    assert [(form.is_sharded, form.lora.enabled) for form in forms] == [(True, True), (False, False)]


@pytest.mark.parametrize("apart", [(), ("resources.runtime=ray", "resources.apart={rollout: 1}")])
def test_sequences_without_room_wait(tmp_path: Path, apart: tuple[str, ...]) -> None:
    # Of 4 layers, 8 heads, and keys and values of 16 numbers in bfloat16, a token has 2,048 bytes.
    token, token_limit = 2 * 4 * 8 * 16 * 2, "data.max_response_tokens=4000"
    limits = (token_limit, "actor.engine.max_tokens_per_device=8192", "rollout.samples_per_prompt=8")
    config = config_of(tmp_path, *limits, *apart)
    roomy, small = (make_plan(config, device="h100", memory_gib=gib, advises=False) for gib in (79, 0.2))
    needed, held = (held_keys(plan.phases) for plan in (roomy, small))
    # 16 prompts of 64 tokens in pages of 32, an unused page, and 128 answers to them.
    assert needed == token * 32 * (1 + 16 * 2 + 128 * 125)
    (phase,) = (phase for phase in small.phases if KEYS in phase.device)
    prefill = phase.device["prefill and logits"]
    assert held == pytest.approx(0.8 * (small.memory_bytes - phase.device_bytes + held + prefill))
    assert held < needed
    assert small.fits
    # A sequence is half done, and has its part of a prompt.
    running = int(held / token / (64 / 8 + 2000 / 2))
    assert running < 128
    assert running_at_once(config, small.roles[0], small.phases) == running
    bounded = with_values(config, {"rollout.max_running": running})
    assert small.time == step_time(bounded, small.roles, small.device, roomy.phases)
    assert small.step_seconds > roomy.step_seconds
    (line,) = set(small.assumptions) - set(roomy.assumptions)
    assert f"need {needed / 2**30:.2f} GiB and get {held / 2**30:.2f}, 80% of what is free" in line
    assert f"about {running} sequences" in line


def test_a_decode_step_reads_the_keys_that_a_window_shows(tmp_path: Path) -> None:
    # Of 4 layers 2 see 100 of 1,000 tokens: 2,200 in place of 4,000, at 512 bytes a token and layer.
    windowed = Gemma2Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
        intermediate_size=128, vocab_size=512, sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    config = config_of(tmp_path, model=windowed)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
    device = replace(device_named("h100"), product_flops=1e30, weight_bandwidth=1.0)
    seconds = [
        decode_seconds(
            actor, device, running=3, context=tokens, ranks=1, sampling=sampling_of(config.rollout)
        )[0]
        for tokens in (100, 1000)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(3 * (2200 - 400) * 512)


def test_a_window_of_all_layers_is_read_from_the_configuration(tmp_path: Path) -> None:
    """Layers of Mistral do not hold it themselves."""
    options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    for window in (100, None):
        shape = MistralConfig(**options, intermediate_size=128, vocab_size=512, sliding_window=window)
        config = config_of(tmp_path, model=shape)
        actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
        assert {*actor.sizes.windows} == {window}


def test_engines_of_their_own_hold_latents(tmp_path: Path) -> None:
    # Latents of 24 and 8 numbers, in 2 layers of bfloat16, whole on each rank; expanded, 24 for each of 4 heads.
    latent = DeepseekV3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64,
        vocab_size=512, kv_lora_rank=24, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=2,
    )  # fmt: skip
    ray = ("resources.runtime=ray", "resources.apart={rollout: 1}", "rollout.max_staleness=1")
    config = config_of(tmp_path, *ray, "rollout.engine=vllm", "rollout.vllm.tensor_parallel=2", model=latent)
    plan = make_plan(config, device="h100", advises=False)
    actor = plan.roles[0]
    assert token_bytes(actor, tensor=2) == 2 * 2 * 2 * 24 * 2
    assert token_bytes(actor, tensor=2, holds_latents=True) == 2 * (24 + 8) * 2
    device = replace(plan.device, product_flops=1e30, weight_bandwidth=1.0)
    expanded, latents = (
        decode_seconds(
            actor,
            device,
            running=1,
            context=10**6,
            ranks=2,
            sampling=sampling_of(config.rollout),
            holds_latents=held,
        )[0]
        for held in (False, True)
    )
    assert expanded - latents == pytest.approx(10**6 * (384 - 128))
    pool = held_keys(plan.phases)
    bounded = with_values(config, {"rollout.max_running": 10**9})
    assert running_at_once(bounded, actor, plan.phases) == int(pool / 128 / (64 / 8 + 96 / 2))


def test_a_sequence_that_has_no_room_alone_does_not_fit(tmp_path: Path) -> None:
    config = config_of(tmp_path, "data.max_response_tokens=4000", "actor.engine.max_tokens_per_device=8192")
    plan = make_plan(config, device="h100", memory_gib=0.01, advises=False)
    assert held_keys(plan.phases) == 2 * 4 * 8 * 16 * 2 * 32 * (1 + 2 + 125)
    assert not plan.fits
