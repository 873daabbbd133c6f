"""Loading a model folder: what is refused, and with which sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from references.language_models import SUPPORTED, VOCAB, WIDE_WINDOW
from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import check_language_model, load_model
from strop.engines.model_support import parity as probe
from strop.engines.precision import describe_precision
from strop.engines.pretrained_config import load_model_config
from strop.engines.segments import Segment
from strop.engines.tokenizer import load_tokenizer

Folder = Callable[[str], Path]


def load(path: Path | str, **options: Any) -> CausalLM:
    return load_model(ModelConfig(path=str(path), **options), device="cpu")


@pytest.fixture
def copied(tiny_folder: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny model's folder, to break."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(tiny_folder(kind), tmp_path / kind))

    return copy


def test_no_path() -> None:
    for function in (lambda: load(""), lambda: load_tokenizer(ModelConfig())):
        with pytest.raises(ValueError, match="model.path is not set; give a Hugging Face model folder"):
            function()


def test_a_changed_configuration_is_read_again_and_is_the_callers_own(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    first = load_model_config(ModelConfig(path=str(folder)))
    first.rope_parameters["rope_theta"] = 7.0
    again = load_model_config(ModelConfig(path=str(folder)))
    assert again.rope_parameters["rope_theta"] == 10_000.0
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    assert load_model_config(ModelConfig(path=str(folder))).rms_norm_eps == 0.5 != again.rms_norm_eps


def test_a_class_that_an_external_library_registers_counts_in_a_folder_that_was_read_before(
    copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(copied("llama"))
    load_model_config(ModelConfig(path=folder))
    (tmp_path / "own_llama.py").write_text(
        "from transformers import AutoConfig, LlamaConfig\n"
        "class OwnLlama(LlamaConfig): pass\n"
        "AutoConfig.register('llama', OwnLlama, exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        shape = load_model_config(ModelConfig(path=folder, external_lib="own_llama"))
    finally:
        CONFIG_MAPPING._extra_content.pop("llama", None)
    assert type(shape).__name__ == "OwnLlama"


def test_path_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        load(tmp_path / "nowhere")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json \(found: nothing\)"):
        load(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"has no config.json \(found: notes.txt\); is it a model folder\?"):
        load(tmp_path)


def test_the_folder_of_a_run_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"is the folder of a run; its model is {tmp_path / 'model'}$"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{not json", '{"model_type": "no_such_architecture"}', "{}"])
def test_config_that_describes_no_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="has a config.json that does not describe a model: ") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_without_weights(copied: Folder) -> None:
    folder = copied("qwen3")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no loadable causal language model: .*model.safetensors"):
        load(folder)


def test_truncated_weights(copied: Folder) -> None:
    weights = copied("qwen3") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="holds no loadable causal language model: "):
        load(weights.parent)


def test_weights_of_another_shape(copied: Folder) -> None:
    folder = copied("qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(
        ValueError,
        match=r"holds no loadable causal language model: model.layers.0.mlp.down_proj.weight has shape \[32, 48\] in "
        r"its files and \[32, 40\] by its config.json",
    ):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ": gptq"),
        ({"quantization_config": {"quant_method": "of tomorrow"}}, ": of tomorrow"),  # transformers skips it
        ({"quantization_config": {"bits": 4}}, ""),
    ],
)
def test_a_quantised_model_is_refused_by_its_configuration(
    copied: Folder, settings: dict[str, Any], method: str
) -> None:
    folder = copied("qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(
        ValueError,
        match=rf"quantised weights \(quantization_config of its config.json{method}\) in a form that is not read; read "
        rf"are MXFP4 of gpt-oss, FP8 with",
    ):
        check_language_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_weights_of_few_bits_are_refused_and_not_read_without_their_scales(
    copied: Folder, dtype: torch.dtype, name: str
) -> None:
    folder = copied("qwen3")
    tensors = load_file(folder / "model.safetensors")
    weight = "model.layers.1.mlp.up_proj.weight"
    tensors[weight] = (10 * tensors[weight]).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"^model folder .* quantised weights \({weight} is stored as {name}\)"
    ):
        load(folder)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_files_that_no_library_reads_refuse_no_model(copied: Folder, is_indexed: bool) -> None:
    folder = copied("qwen3")
    save_file({"w.weight": torch.zeros(2, 2, dtype=torch.int8)}, folder / "other.safetensors")
    if is_indexed:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        names = load_file(folder / "part.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder).config.model_type == "qwen3"


def test_missing_weights_are_named_not_drawn_at_random(copied: Folder) -> None:
    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has no weights for lm_head.weight and 1 more of LlamaForCausalLM"):
        load(folder)


def test_an_encoder_decoder_is_no_causal_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="is a t5, which transformers does not have as a causal"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("mamba", "MambaForCausalLM attends in 0 of its 2 layers on packed tokens"),
        ("lfm2", "Lfm2ForCausalLM attends in 1 of its 2 layers on packed tokens"),
        ("doge", "DogeForCausalLM gives other log-probs on packed tokens than alone"),
        ("qwen3_next", "Qwen3NextForCausalLM attends in 0 of its 2 layers on packed tokens"),
        ("deepseek_v32", "DeepseekV32ForCausalLM does not run on packed tokens"),
        (
            "stablelm",
            "StableLmForCausalLM does not hand the arguments of its forward call on to its attention",
        ),
    ],
)
def test_architectures_that_packed_computation_cannot_run_are_refused_whatever_their_name(
    tiny_folder: Folder, kind: str, sentence: str
) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_folder(kind)).eval()
    with pytest.raises(ValueError, match=f"{sentence}.*choose another architecture"):
        probe.check_packed(module, torch.device("cpu"))


@pytest.mark.usefixtures("nothing_compared")
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "Triton"],
)
def test_a_device_without_memory_for_the_comparison_says_nothing_of_the_architecture(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def without_memory(*_: object) -> None:
        raise error

    monkeypatch.setattr(PackedAttention, "attend", without_memory)
    with pytest.raises(type(error), match="out of memory"):
        load(tiny_folder("qwen3"))


@pytest.mark.usefixtures("nothing_compared")
def test_a_process_compares_an_architecture_once(
    tiny_folder: Folder, copied: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, run_packed = [], probe._run_packed
    monkeypatch.setattr(probe, "_run_packed", lambda *args: passes.append(args) or run_packed(*args))

    def is_compared(path: Path, **options: Any) -> bool:
        passes.clear()
        load(path, **options)
        return bool(passes)

    folder = copied("llama")
    assert is_compared(tiny_folder("llama"))
    assert not is_compared(tiny_folder("llama"))
    assert not is_compared(folder), "its weights lie elsewhere"
    assert is_compared(folder, dtype="float64")
    assert is_compared(folder, attn_implementation="eager")
    assert is_compared(tiny_folder("llama_mqa"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert is_compared(folder), "another number in its configuration"


def test_a_window_that_never_reaches_the_attention_is_refused(copied: Folder) -> None:
    # A model that keeps its window in a mask alone would agree on short sequences and differ on long ones.
    folder = copied("llama")
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": kinds, "sliding_window": 5}))
    for _ in range(2):  # it is not among those that the process remembers
        with pytest.raises(ValueError, match="LlamaForCausalLM has layers of type sliding_attention"):
            load(folder)


@pytest.mark.usefixtures("nothing_compared")
def test_a_cap_on_logits_that_we_do_not_know_is_refused_however_small_they_are(
    copied: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("nanochat")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(1, 40)[None]
    largest = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.abs().max()
    assert largest < 0.2, "15 * tanh(x / 15) is x to 1e-5 there"
    monkeypatch.setattr(probe, "logit_form", lambda module: (1.0, None))
    with pytest.raises(
        ValueError, match="NanoChatForCausalLM gives other log-probs on packed tokens than alone"
    ):
        load(folder)


def test_a_window_longer_than_the_probe_is_kept_and_exact(tiny_folder: Folder) -> None:
    folder = tiny_folder("mistral_wide")
    model = load(folder)
    assert model.config.sliding_window == WIDE_WINDOW
    lengths = (8, 60)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    sequences = [torch.arange(3, 3 + length) % VOCAB for length in lengths]
    segments = [Segment(start=0, length=8), Segment(start=8, length=60)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        hidden = model.hidden(
            torch.cat(sequences)[None], positions, PackedAttention(segments, device=model.device)
        )
        expected = torch.cat([own.model(ids[None]).last_hidden_state[0] for ids in sequences])
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_a_router_draws_no_noise(tiny_folder: Folder) -> None:
    # In training mode, which gradient checkpointing needs, Mixtral scales what enters its router at random.
    model = load(tiny_folder("mixtral"), gradient_checkpointing=True)
    assert model.module.training
    ids, positions = torch.arange(3, 23)[None], torch.arange(20)[None]
    attention = PackedAttention([Segment(start=0, length=20)], device=model.device)
    with torch.no_grad():
        first, second = (model.hidden(ids, positions, attention) for _ in range(2))
    torch.testing.assert_close(first, second, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_compute_in_float64(tiny_folder: Folder, kind: str) -> None:
    # The joint product of all experts, the way of transformers, is for float32 and less.
    exact, plain = load(tiny_folder(kind), dtype="float64"), load(tiny_folder(kind), dtype="float32")
    ids, positions = torch.arange(3, 23)[None], torch.arange(20)[None]
    attention = PackedAttention([Segment(start=0, length=20)], device=exact.device)
    wide, narrow = (model.hidden(ids, positions, attention) for model in (exact, plain))
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), narrow, atol=1e-5, rtol=1e-5)
    wide.sum().backward()
    grads = {name: p.grad for name, p in exact.module.named_parameters() if "experts" in name}
    assert grads
    assert all(grad is not None and grad.dtype == torch.float64 for grad in grads.values())


def test_long_rotary_embeddings_end_where_they_would_change_for_all_sequences_of_a_pack(
    tiny_folder: Folder,
) -> None:
    model = load(tiny_folder("llama"))
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    model.config.rope_parameters = longrope
    assert model.max_positions == 40
    model.config.rope_parameters = {"full_attention": longrope, "sliding_attention": {"rope_type": "default"}}
    assert model.max_positions == 40
    model.config.rope_parameters = {"rope_type": "yarn", "original_max_position_embeddings": 40}
    assert model.max_positions == 64


@pytest.mark.parametrize("kind", SUPPORTED)
def test_supported_architectures_load_without_dropout(tiny_folder: Folder, kind: str) -> None:
    model = load(tiny_folder(kind), gradient_checkpointing=True)
    assert model.vocab_size == VOCAB
    assert model.max_positions == 64
    for part in model.module.modules():
        rates = [value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]
        assert not any(rates), type(part)
        assert not (isinstance(part, torch.nn.Dropout) and part.p)


def test_embeddings_and_head_are_named(tiny_folder: Folder) -> None:
    assert load(tiny_folder("llama")).embedding_names() == {"model.embed_tokens.weight", "lm_head.weight"}


def test_precision(tiny_folder: Folder) -> None:
    # Master weights are float32 under bfloat16 computation.
    wanted = {"auto": (torch.float32,) * 2, "float64": (torch.float64,) * 2}
    wanted["bfloat16"] = (torch.bfloat16, torch.float32)
    for dtype, (compute, master) in wanted.items():
        model = load_model(ModelConfig(path=str(tiny_folder("qwen3")), dtype=dtype), device="cpu")  # type: ignore[arg-type]
        assert model.compute_dtype == compute
        assert {p.dtype for _, p in model.named_parameters()} == {master}


def test_a_saved_model_is_an_ordinary_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    load(tiny_folder("qwen3")).save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    original = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3"))
    ids = torch.arange(10)[None]
    assert torch.equal(saved(ids).logits, original(ids).logits)
    assert saved.config._attn_implementation == "sdpa"


def test_folder_without_tokenizer(tiny_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer files \(found: config.json, .*save_pretrained"):
        load_tokenizer(ModelConfig(path=str(tiny_folder("qwen3"))))


def test_broken_tokenizer(copied: Folder) -> None:
    folder = copied("qwen3")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="has no usable tokenizer: ") as caught:
        load_tokenizer(ModelConfig(path=str(folder)))
    assert "\n" not in str(caught.value)


def test_tokenizer_of_a_folder(tiny_model: Path) -> None:
    assert load_tokenizer(ModelConfig(path=str(tiny_model))).encode("ab") != []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ModelConfig(dtype="float8"), "model.dtype is 'float8', but it needs one of auto"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(lr=0), "optim.lr is 0, but it needs a finite number above 0"),
        (lambda: OptimizerConfig(betas=(0.9,)), "it needs list of 2"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "a number of at least 0 and below 1"),
        (lambda: OptimizerConfig(max_grad_norm=0), "optim.max_grad_norm is 0, but it needs a number above 0"),
        (lambda: OptimizerConfig(warmup_steps=-1), "optim.warmup_steps is -1"),
        (lambda: OptimizerConfig(min_lr_ratio=1.5), "optim.min_lr_ratio is 1.5"),
        (lambda: EngineConfig(max_tokens_per_device=0), "engine.max_tokens_per_device is 0"),
        (lambda: EngineConfig(sequence_parallel=0), "engine.sequence_parallel is 0, but it needs a whole"),
        (lambda: EngineConfig(shard_size=-1), "engine.shard_size is -1, but it needs a whole number"),
        (
            lambda: EngineConfig(gradient_sync="never"),
            "engine.gradient_sync is 'never', but it needs one of",
        ),  # type: ignore[arg-type]
        (lambda: EngineConfig(offload="gpu"), "engine.offload is 'gpu', but it needs one of none"),  # type: ignore[arg-type]
    ],
)
def test_configuration_errors(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_another_precision_is_named_where_it_is_measurably_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.engines.flops.peak.bfloat16_speedup", lambda: 2.5)
    assert describe_precision(ModelConfig(), "cpu") == (
        "compute: float32 on cpu; products of bfloat16 run 2.5 times as fast here "
        "(model.dtype=bfloat16 uses them, at lower precision)"
    )
    assert describe_precision(ModelConfig(dtype="bfloat16"), "cpu") == "compute: bfloat16 on cpu"
    monkeypatch.setattr("strop.engines.flops.peak.bfloat16_speedup", lambda: 0.04)
    assert describe_precision(ModelConfig(), "cpu") == "compute: float32 on cpu"
    assert describe_precision(ModelConfig(dtype="bfloat16"), "cpu") == (
        "compute: bfloat16 on cpu; products of float32 run 25.0 times as fast here (model.dtype=float32 uses them)"
    )
    assert describe_precision(ModelConfig(dtype="float64"), "cpu") == "compute: float64 on cpu"


def test_a_name_of_the_hub_is_answered_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"hf download Qwen/Qwen2\.5-0\.5B --local-dir models/Qwen2\.5-0\.5B, then"
    ):
        load_tokenizer(ModelConfig(path="Qwen/Qwen2.5-0.5B"))
    with pytest.raises(ValueError, match=r"model folder on this machine$"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "none")))
