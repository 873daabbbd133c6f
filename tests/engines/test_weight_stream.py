"""The weight map: names, ties, buckets, shards, digests."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from references.language_models import load_plain, save_tiny
from references.rank_processes import Ranks, run_ranks
from references.weight_digest import slow_digest
from strop.engines.causal_lm import CausalLM
from strop.engines.checksum.models import combine_digests, digest_weights, weight_digests
from strop.engines.checksum.tensors import digest_tensor, finish, word_sum
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel.fsdp import shard
from strop.engines.weights import (
    TensorMetadata,
    WeightsMetadata,
    hugging_face_name,
    named_weights,
    weights_metadata,
)
from strop.rollout.weight_sync.stream import (
    ALIGNMENT,
    Bucket,
    parameter_stream,
    weight_as_json,
    weights_from_json,
)


class Odd(nn.Module):
    """Sizes that ranks do not divide, three dtypes, a tie, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (16, 7, 3))
        self.low = nn.Linear(3, 7, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("angles", torch.zeros(4), persistent=False)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Uses every layer, so that hooks of sharding run."""
        hidden = self.embed(ids)
        return self.head(self.layers[0](hidden)).sum() + sum(layer(hidden).sum() for layer in self.layers)


def delivered(buckets: Iterator[Bucket]) -> dict[str, Tensor]:
    """Every weight of a stream, copied out."""
    return {weight.name: tensor.clone() for bucket in buckets for weight, tensor in bucket.tensors()}


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(raw(one[name]) == raw(other[name]) for name in one)


def test_the_inventory_names_what_transformers_saves(
    tiny: Callable[..., CausalLM], tiny_folder: Callable[[str], Path]
) -> None:
    for kind in ("qwen3", "llama", "gpt2"):
        plain = load_plain(tiny_folder(kind), dtype=torch.float32)
        held = weights_metadata(tiny(kind, dtype="float32").module)
        assert set(held.by_name) == set(plain.state_dict())
        assert {w.name: (w.shape, w.dtype) for w in held} == {
            name: (tuple(p.shape), p.dtype) for name, p in (*plain.named_parameters(), *saved_buffers(plain))
        }


def saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers() if name in module.state_dict()]


def test_tied_weights_are_listed_once_with_their_other_names() -> None:
    held = weights_metadata(Odd())
    assert held.by_name["head.weight"] == TensorMetadata(
        name="embed.weight", shape=(23, 16), dtype=torch.float32, aliases=("head.weight",)
    )
    assert [weight.name for weight in held].count("head.weight") == 0
    assert held.num_bytes == sum(t.numel() * t.element_size() for t in (*Odd().parameters(), torch.arange(3)))


def test_an_inventory_survives_json_and_refuses_anything_else() -> None:
    held = weights_metadata(Odd())
    assert weights_from_json([weight_as_json(weight) for weight in held]) == held
    for wrong in (
        {},
        [["w", [1], "float33", []]],
        [["w", [-1], "float32", []]],
        [["w", [True], "float32", []]],
        [["w", [1], "load", []]],
        [["w", [1], "float32"]],
        [["w", [1], "float32", [2]]],
    ):
        with pytest.raises(ValueError, match=r"^not (a list|the description)"):
            weights_from_json(wrong)
    with pytest.raises(ValueError, match="the weight map names b twice"):
        weights_from_json([["a", [], "float32", ["b"]], ["b", [], "float32", []]])


@pytest.mark.parametrize("bucket_bytes", [1, 100, 700, 1024, 1 << 20])
def test_every_bit_comes_out_in_order_and_within_the_bucket(bucket_bytes: int) -> None:
    model = Odd()
    expected = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    names = []
    for bucket in parameter_stream(model, bucket_bytes=bucket_bytes):
        assert len(bucket.data) <= bucket_bytes or len(bucket.entries) == 1
        assert all(offset % ALIGNMENT == 0 for _, offset in bucket.entries)
        for weight, tensor in bucket.tensors():
            names.append(weight.name)
            assert raw(tensor) == raw(expected[weight.name])
            assert (tensor.shape, tensor.dtype) == (weight.shape, weight.dtype)
    assert names == [weight.name for weight in weights_metadata(model)] == list(expected)


def test_buckets_are_as_full_as_the_order_allows() -> None:
    buckets = list(parameter_stream(Odd(), bucket_bytes=1024))
    for first, second in itertools.pairwise(buckets):
        assert len(first.data) + second.entries[0][0].num_bytes > 1024


def test_floating_point_weights_come_in_the_dtype_that_was_asked_for() -> None:
    model = Odd()
    asked = dict.fromkeys(weights_metadata(model).dtypes, torch.bfloat16)
    held = weights_metadata(model, dtypes=asked)
    assert {w.dtype for w in held} == {torch.bfloat16, torch.int64}
    for bucket_bytes in (1, 1 << 20):
        got = delivered(parameter_stream(model, dtypes=asked, bucket_bytes=bucket_bytes))
        assert {name: t.dtype for name, t in got.items()} == {w.name: w.dtype for w in held}
        assert torch.equal(got["embed.weight"], model.embed.weight.bfloat16())
    assert model.embed.weight.dtype == torch.float32


def test_merged_weights_take_the_place_of_the_models_own() -> None:
    model = Odd()
    merged = [
        (weight.name, torch.full(weight.shape, 2, dtype=torch.float64)) for weight in weights_metadata(model)
    ]
    got = delivered(parameter_stream(model, weights=iter(merged)))
    assert all((t == 2).all() for t in got.values())
    assert got["low.weight"].dtype == torch.bfloat16
    for wrong, message in (
        (merged[1:], r"expected steps \[3\] next in the stream of weights, got embed.weight \[23, 16\]"),
        (merged[:-1], r"expected low.bias \[7\] next in the stream of weights, got nothing"),
        ([*merged, merged[0]], "the weights go on with steps after the last one"),
        ([("steps", torch.zeros(4))], r"expected steps \[3\] next in the stream of weights, got steps \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            list(parameter_stream(model, weights=wrong))


def test_wrappers_and_adapters_do_not_change_the_names() -> None:
    model = Odd()
    names = list(weights_metadata(model).by_name)
    bits = delivered(parameter_stream(model))
    wrapped = Odd()
    wrapped.layers[1] = checkpoint_wrapper(wrapped.layers[1])
    wrapped.layers[0] = torch.compile(wrapped.layers[0])
    assert list(weights_metadata(wrapped).by_name) == names
    assert same_bits(delivered(parameter_stream(wrapped)), bits)
    adapted = get_peft_model(Odd(), LoraConfig(r=2, target_modules=["layers.0", "layers.2"]))  # type: ignore[arg-type]
    assert list(weights_metadata(adapted).by_name) == names
    with pytest.raises(ValueError, match=r"the model has an adapter \(.*lora_A.*; give the merged weights"):
        list(parameter_stream(adapted))
    assert same_bits(delivered(parameter_stream(adapted, weights=bits.items())), bits)
    before = digest_weights(adapted)
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_B" in name).add_(1)
    assert digest_weights(adapted) != before, "a step that changes the adapter only is seen"
    assert hugging_face_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )
    before = digest_weights(adapted)
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_B" in name).add_(1)
    assert digest_weights(adapted) != before, "a step that changes the adapter only is seen"
    assert hugging_face_name("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight") is None


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="a bucket of 0 bytes holds nothing"):
        list(parameter_stream(Odd(), bucket_bytes=0))


def test_offloaded_weights_are_refused_by_name() -> None:
    model = Odd()
    model.embed.weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="embed.weight is offloaded; bring the weights back"):
        list(parameter_stream(model))
    with pytest.raises(ValueError, match="embed.weight is offloaded; bring the weights back"):
        digest_weights(model)


TENSORS = st.builds(
    lambda dtype, size, seed: (
        torch.randint(0, 256, (size * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
        .to(torch.uint8)
        .view(dtype)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]),
    st.integers(1, 40),
    st.integers(0, 1000),
)


@given(TENSORS)
def test_digests_are_those_of_the_definition(tensor: Tensor) -> None:
    assert digest_tensor(tensor) == slow_digest(tensor)


def test_digests_of_all_forms_of_tensors_are_those_of_the_definition() -> None:
    flat = torch.randn(9000 * 2 + 3, generator=torch.Generator().manual_seed(0))  # three rows of 4096 words
    for tensor in (
        flat,
        flat[1:],  # memory that does not start at a word
        flat[:12].view(3, 4).t(),
        flat[:0],
        flat[0],
        flat[:7] > 0,
        torch.tensor([0.0, -0.0]),
        torch.tensor(float("nan")),
    ):
        assert digest_tensor(tensor) == slow_digest(tensor)


@given(TENSORS, st.data())
def test_any_flipped_bits_change_the_digest(tensor: Tensor, data: st.DataObject) -> None:
    content = tensor.view(torch.uint8).clone()
    places = data.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4))
    for place in places:
        content[place // 8] ^= 1 << (place % 8)
    assert digest_tensor(content.view(tensor.dtype)) != digest_tensor(tensor)


def test_pairs_of_flipped_signs_and_swapped_values_change_the_digest() -> None:
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0))
    seen = {digest_tensor(tensor)}
    for first, second in itertools.combinations(range(0, 200, 8), 2):
        flipped, swapped = tensor.clone(), tensor.clone()
        flipped[[first, second]] *= -1
        swapped[[first, second]] = tensor[[second, first]]
        seen |= {digest_tensor(flipped), digest_tensor(swapped)}
    assert len(seen) == 1 + 2 * (25 * 24 // 2)


def test_zeros_of_different_lengths_have_different_digests() -> None:
    assert len({digest_tensor(torch.zeros(n, dtype=torch.uint8)) for n in range(40)}) == 40


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9000), max_size=5), st.integers(0, 7))
def test_the_sums_of_parts_add_up(cuts: list[int], extra: int) -> None:
    tensor = torch.arange(9000 * 8 + extra).to(torch.uint8)
    ends = [0, *sorted(8 * cut for cut in cuts), len(tensor)]
    parts = [int(word_sum(tensor[a:b], first_byte=a)) for a, b in itertools.pairwise(ends)]
    assert finish(sum(parts), len(tensor)) == digest_tensor(tensor)
    with pytest.raises(ValueError, match="a part starts at byte 4"):
        word_sum(tensor[4:], first_byte=4)


def test_the_digest_of_a_model_says_names_shapes_dtypes_and_bits() -> None:
    model = Odd()
    held, digests = weights_metadata(model), weight_digests(model)
    assert digests == {weight.name: slow_digest(named_weights(model)[weight.name]) for weight in held}
    first, *others = held

    def changed(**changes: Any) -> str:
        one = TensorMetadata(**{"name": first.name, "shape": first.shape, "dtype": first.dtype, **changes})
        return combine_digests(WeightsMetadata((one, *others)), {**digests, one.name: digests[first.name]})

    seen = {
        digest_weights(model),
        digest_weights(Odd(seed=1)),
        changed(name="other"),
        changed(shape=(1, 3)),
        changed(dtype=torch.float64),
        combine_digests(held, {**digests, "low.bias": digests["low.bias"] ^ 1}),
        combine_digests(WeightsMetadata((*others, first)), digests),
    }
    assert len(seen) == 7
    assert changed() == digest_weights(model) == combine_digests(held, digests)


# Several ranks.


def sharded_odd(ranks: Ranks, shard_size: int) -> tuple[Odd, Odd]:
    """The model as this rank has it, and whole."""
    parallel = ranks.join(shard_size=shard_size)
    model = Odd()
    for part in (*model.layers, model.low, model):  # low is alone: a unit has one dtype
        fully_shard(part, mesh=parallel.mesh)
    return model, Odd()


def streams_of_a_sharded_model(ranks: Ranks, shard_size: int) -> list[bool]:
    """Facts that must all be true on every rank."""
    model, whole = sharded_odd(ranks, shard_size)
    facts = [isinstance(model.embed.weight, DTensor), weights_metadata(model) == weights_metadata(whole)]
    for dtypes in (None, dict.fromkeys(weights_metadata(whole).dtypes, torch.bfloat16)):
        expected = delivered(parameter_stream(whole, dtypes=dtypes))
        facts.append(same_bits(delivered(parameter_stream(model, bucket_bytes=512, dtypes=dtypes)), expected))
    facts.append(weight_digests(model) == weight_digests(whole))
    with torch.no_grad():  # without a backward pass the root's parameters stay gathered
        model(torch.arange(5))
        facts.append(not isinstance(model.embed.weight, DTensor))
    facts.append(digest_weights(model) == digest_weights(whole))
    facts.append(same_bits(delivered(parameter_stream(model)), delivered(parameter_stream(whole))))
    model(torch.arange(5)).backward()
    facts.append(digest_weights(model) == digest_weights(whole))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        for parameter in whole.parameters():
            parameter.add_(1)
    facts.append(digest_weights(model) == digest_weights(whole))
    return facts


def sharded_language_model(ranks: Ranks, folder: str) -> list[bool]:
    """The same for a real architecture, sharded as in training."""
    config = ModelConfig(path=folder, dtype="bfloat16")
    model, whole = (load_model(config, device="cpu") for _ in range(2))
    shard(model, ranks.join(), EngineConfig())
    expected = delivered(parameter_stream(whole.module))
    return [
        isinstance(next(iter(model.module.parameters())), DTensor),
        weights_metadata(model.module) == weights_metadata(whole.module),
        same_bits(delivered(parameter_stream(model.module, bucket_bytes=4096)), expected),
        digest_weights(model.module) == digest_weights(whole.module),
    ]


@pytest.mark.slow
def test_two_ranks_stream_and_digest_what_one_has(tmp_path: Path) -> None:
    for facts in run_ranks(streams_of_a_sharded_model, 2, 0):
        assert all(facts), facts
    save_tiny("qwen3", tmp_path)
    for facts in run_ranks(sharded_language_model, 2, str(tmp_path)):
        assert all(facts), facts


@pytest.mark.dist
@pytest.mark.parametrize("shard_size", [0, 2])
def test_four_ranks_stream_and_digest_what_one_has(shard_size: int) -> None:
    for facts in run_ranks(streams_of_a_sharded_model, 4, shard_size):
        assert all(facts), facts


LAYER_BYTES = 4 << 20
NUM_LAYERS = 24


def memory_of_a_stream(ranks: Ranks) -> tuple[int, int, int]:
    """Most bytes of buckets alive at a time, most resident memory beyond the start, and bytes streamed."""
    parallel = ranks.join()
    side = int((LAYER_BYTES // 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=parallel.mesh)
    fully_shard(model, mesh=parallel.mesh)
    list(parameter_stream(model, bucket_bytes=1))  # what the ranks need to talk at all
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts again from here
    before, alive, most, streamed = status_bytes("VmRSS"), {}, 0, 0
    for number, bucket in enumerate(parameter_stream(model, bucket_bytes=2 * LAYER_BYTES)):
        alive[number] = len(bucket.data)
        streamed += len(bucket.data)
        weakref.finalize(bucket.data, alive.pop, number)
        most = max(most, sum(alive.values()))
    return most, status_bytes("VmHWM") - before, streamed


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def test_a_stream_holds_two_buckets_and_one_tensor_at_most() -> None:
    # Buckets of two layers: the one that was yielded, the one being filled, a gathered layer, and what the gather
    # and the allocator keep for themselves. A second model would be 24 layers.
    for most, resident, streamed in run_ranks(memory_of_a_stream, 2):
        assert streamed == NUM_LAYERS * LAYER_BYTES
        assert most <= 4 * LAYER_BYTES
        assert resident < 20 * LAYER_BYTES
