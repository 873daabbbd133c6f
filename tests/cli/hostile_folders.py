"""Run folders that are damaged, or made to do harm: one function per kind, applied to a copy of a good run."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

KINDS: dict[str, Callable[[Path], None]] = {}
"""What is done to a run folder, by name."""
DEEP = 100_000
TERABYTE = 2**40
CONFIG_NAMES = ("config.yaml", "run.json", "events.jsonl", "metrics.jsonl")


def kind(function: Callable[[Path], None]) -> Callable[[Path], None]:
    KINDS[function.__name__] = function
    return function


def add(name: str, harm: Callable[[Path], object]) -> None:
    def harmed(run: Path) -> None:
        harm(run)

    KINDS[name] = harmed


def checkpoint(run: Path) -> Path:
    """The newest checkpoint."""
    return max(
        (run / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2])
    )


def model(run: Path) -> Path:
    return checkpoint(run) / "model"


def reseal(run: Path) -> None:
    """A manifest that fits what the files are now: an attacker hashes too."""
    from strop.run.manifest import read_manifest, seal

    folder = checkpoint(run)
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    seal(folder, step=manifest.step, score=manifest.score, facts=manifest.facts)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON in a file."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(TERABYTE)


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def listening(path: Path) -> None:
    path.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)  # addresses of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def bomb(levels: int = 30) -> bytes:
    """YAML whose aliases stand for 9^levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return ("\n".join([*lines, f"reward: {{kwargs: {{x: *a{levels - 1}}}}}"]) + "\n").encode()


DEEP_JSON = b'{"a":' * DEEP + b"1" + b"}" * DEEP
for _name in CONFIG_NAMES:
    _stem = _name.replace(".", "_")
    for _what, _harm in {
        "fifo": fifo, "directory": directory, "dev_zero": device, "a_terabyte": sparse, "link_loop": loop,
        "socket": listening,
    }.items():  # fmt: skip
        add(f"{_stem}_{_what}", lambda run, name=_name, harm=_harm: harm(run / name))
    for _what, _content in {
        "empty": b"", "garbage": bytes(range(256)) * 8, "not_utf8": b'{"kind": "\xff", "step": 1}\n',
        "nul": b"\0" * 5000 + b"\n{}\n", "bom": b"\xef\xbb\xbf{}\n", "deep": DEEP_JSON + b"\n{}\n",
        "a_list": b"[1, 2]\n[3]\n", "a_number": b"7\n7\n", "long_number": b'{"step": ' + b"9" * 5000 + b"}\n{}\n",
        "deep_lists": b"a: " + b"[" * DEEP + b"\n",
    }.items():  # fmt: skip
        add(f"{_stem}_{_what}", lambda run, name=_name, content=_content: put(run / name, content))
    add(f"{_stem}_missing", lambda run, name=_name: (run / name).unlink(missing_ok=True))
    add(
        f"{_stem}_truncated",
        lambda run, name=_name: os.truncate(run / name, (run / name).stat().st_size // 2),
    )

add("yaml_bomb", lambda run: put(run / "config.yaml", bomb()))
add("yaml_bomb_of_merges", lambda run: put(run / "config.yaml", b"\n".join(
    [b"a0: &a0 {x: 1}"] + [b"a%d: &a%d {<<: [%s]}" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 30)]
)))  # fmt: skip
add("yaml_that_holds_itself", lambda run: put(run / "config.yaml", b"reward: {kwargs: &a {x: *a}}\n"))
add(
    "yaml_python_object",
    lambda run: put(run / "config.yaml", b"model: !!python/object/apply:os.system ['touch /tmp/x']\n"),
)
add("yaml_odd_keys", lambda run: put(run / "config.yaml", b"? [1, 2]\n: 3\n? {a: 1}\n: 4\n1: 2\n~: 3\n"))
add(
    "yaml_large",
    lambda run: put(run / "config.yaml", b"reward: {kwargs: {x: 1}}\n" + b"# comment\n" * 5_000_000),
)

for _key, _value in {
    "model": 3, "model.path": [1], "data": "x", "data.train_files": {"a": 1}, "data.val_files": "x", "reward": [],
    "reward.functions": [3], "reward.judge": {"base_url": 5}, "reward.sandbox": 7, "rollout": None,
    "trainer.max_steps": -(10**30), "resources": {"num_threads": 10**9}, "algorithm": {"adv_estimator": ["grpo"]},
    "agent": {"files": 3}, "run.keep_last": "many", "eval.temperature": float("inf"),
}.items():  # fmt: skip

    def _set(run: Path, key: str = _key, value: Any = _value) -> None:
        import yaml

        content = yaml.safe_load((run / "config.yaml").read_text())
        target = content
        *sections, last = key.split(".")
        for section in sections:
            target = target[section]
        target[last] = value
        (run / "config.yaml").write_text(yaml.safe_dump(content))

    add(f"config_wrong_{_key.replace('.', '_')}", _set)

for _key, _value in {
    "format": "1", "id": None, "created": [], "command": 5, "versions": 7, "config": [], "machine": None,
}.items():  # fmt: skip
    add(
        f"run_json_wrong_{_key}",
        lambda run, key=_key, value=_value: rewrite(run / "run.json", lambda one: {**one, key: value}),
    )
add(
    "run_json_command_of_numbers",
    lambda run: rewrite(run / "run.json", lambda one: {**one, "command": ["strop", 5]}),
)
add(
    "run_json_command_empty",
    lambda run: rewrite(run / "run.json", lambda one: {**one, "command": [["x"], ["y"]]}),
)
add("run_json_config_deep", lambda run: put(
    run / "run.json", b'{"format": 1, "id": "x", "created": "y", "command": [], "config": ' + DEEP_JSON + b"}"
))  # fmt: skip
add("run_json_only_format", lambda run: put(run / "run.json", b'{"format": 1}'))

EVENTS = {
    "no_kind": {"step": 1}, "no_step": {"kind": "issued"}, "step_text": {"kind": "issued", "step": "1"},
    "step_true": {"kind": "issued", "step": True, "samples": {}}, "issued_bare": {"kind": "issued", "step": 1},
    "issued_list": {"kind": "issued", "step": 1, "samples": [1]},
    "issued_numbers": {"kind": "issued", "step": 1, "samples": {"e0-000000": 5}},
    "issued_words": {"kind": "issued", "step": 1, "samples": {"e0-000000": "a-b"}},
    "issued_huge": {"kind": "issued", "step": 1, "samples": {"e0-900000": "0-99999999999"}},
    "issued_far": {"kind": "issued", "step": 1, "samples": {"e0-900000": "99999999999999"}},
    "settled_bare": {"kind": "settled", "step": 1}, "settled_list": {"kind": "settled", "step": 1, "fates": [1]},
    "settled_flat": {"kind": "settled", "step": 1, "fates": {"trained": 3}},
    "settled_unknown": {"kind": "settled", "step": 1, "fates": {"trained": {"": {"e9-1": "0"}}}},
    "restored_bare": {"kind": "ledger_restored", "step": 1},
    "restored_list": {"kind": "ledger_restored", "step": 1, "state": [1]},
    "restored_counts": {"kind": "ledger_restored", "step": 1, "state": {"counts": {}, "issued": {}, "settled": {}}},
    "fingerprint_bare": {"kind": "fingerprint", "step": 9},
    "fingerprint_list": {"kind": "fingerprint", "step": 9, "stages": [1], "chain": 5},
    "fingerprint_stage": {"kind": "fingerprint", "step": 9, "stages": {"data": [1]}, "chain": "x"},
    "finished_bare": {"kind": "finished", "step": 2}, "finished_text": {"kind": "finished", "step": 2, "seconds": "x"},
    "validation_bare": {"kind": "validation", "step": 1}, "resumed_text": {"kind": "resumed", "step": "x"},
    "resumed_negative": {"kind": "resumed", "step": -1}, "step_huge": {"kind": "step", "step": 10**400},
}  # fmt: skip
for _name, _record in EVENTS.items():

    def _append(run: Path, record: dict[str, Any] = _record) -> None:
        with (run / "events.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n" + json.dumps({"kind": "created", "step": 0}) + "\n")

    add(f"events_{_name}", _append)

for _name, _line in {
    "no_step": {"loss": 1}, "step_text": {"step": "1"}, "step_true": {"step": True}, "step_negative": {"step": -5},
    "values_nested": {"step": 1, "actor/loss": {"a": 1}, "critic/score/mean": [1]}, "step_huge": {"step": 10**300},
    "value_huge": {"step": 1, "actor/loss": 10**400},
}.items():  # fmt: skip

    def _metrics(run: Path, line: dict[str, Any] = _line) -> None:
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    add(f"metrics_{_name}", _metrics)


# ------------------------------------------------------------------------------------------------ checkpoints


def manifest_with(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest with another body and the right hash."""
    from strop.run.manifest import _hash

    path = checkpoint(run) / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    body = change(body) or body
    path.write_text(json.dumps({"sha256": _hash(body), "manifest": body}))


for _name, _change in {
    "is_a_list": lambda body: [1, 2],
    "has_no_files": lambda body: body.pop("files") and None,
    "has_a_list_of_files": lambda body: body.update(files=[1]),
    "has_bare_files": lambda body: body.update(files={"x": 3}),
    "has_no_step": lambda body: body.pop("step") and None,
    "has_a_step_of_text": lambda body: body.update(step="x"),
    "has_no_format": lambda body: body.pop("format") and None,
    "has_facts_of_text": lambda body: body.update(facts="x"),
    "has_no_facts": lambda body: body.update(facts={}),
    "has_a_ledger_of_text": lambda body: body["facts"].update(ledger="x"),
    "has_a_sampler_of_text": lambda body: body["facts"].update(sampler="x"),
    "has_a_score_of_text": lambda body: body.update(score="x"),
    "leads_out": lambda body: body["files"].update({"../../../../../etc/passwd": {"bytes": 5, "sha256": "x"}}),
    "leads_to_dev_zero": lambda body: body["files"].update({"/dev/zero": {"bytes": 0, "sha256": "x"}}),
    "names_nul": lambda body: body["files"].update({"a\0b": {"bytes": 0, "sha256": "x"}}),
    "names_escapes": lambda body: body["files"].update({"\x1b[2J\n": {"bytes": 0, "sha256": "x"}}),
    "has_sizes_of_text": lambda body: body["files"].update({"x": {"bytes": "1", "sha256": 4}}),
}.items():  # fmt: skip
    add(f"manifest_{_name}", lambda run, change=_change: manifest_with(run, change))  # type: ignore[misc]

for _what, _harm in {"fifo": fifo, "directory": directory, "dev_zero": device, "a_terabyte": sparse}.items():
    add(f"manifest_{_what}", lambda run, harm=_harm: harm(checkpoint(run) / "manifest.json"))
add("manifest_deep", lambda run: put(checkpoint(run) / "manifest.json", b'{"manifest":' + DEEP_JSON + b"}"))
add("manifest_missing", lambda run: (checkpoint(run) / "manifest.json").unlink())


@kind
def a_shard_fifo(run: Path) -> None:
    fifo(next((checkpoint(run) / "actor").glob("shard*")))


@kind
def a_file_of_the_manifest_fifo(run: Path) -> None:
    manifest_with(run, lambda body: body["files"].update({"pipe": {"bytes": 0, "sha256": "x"}}))
    os.mkfifo(checkpoint(run) / "pipe")


@kind
def checkpoint_of_an_absurd_step(run: Path) -> None:
    folder = checkpoint(run)
    folder.rename(folder.with_name("global_step_" + "9" * 200))


@kind
def checkpoint_of_5000_digits_is_no_name(run: Path) -> None:
    (run / "checkpoints" / "global_step_٣").mkdir()  # a decimal digit elsewhere
    (run / "checkpoints" / "global_step_²").mkdir()


@kind
def thousands_of_checkpoints(run: Path) -> None:
    for step in range(100, 3100):
        (run / "checkpoints" / f"global_step_{step}").mkdir()


@kind
def names_with_escapes(run: Path) -> None:
    for name in ("step-\x1b[2J.parquet", "step-000001\n.parquet", "\x07.parquet"):
        (run / "samples" / name).write_bytes(b"x")
        (run / "checkpoints" / name).write_bytes(b"x")


@kind
def checkpoints_is_a_file(run: Path) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").write_bytes(b"x")


@kind
def checkpoints_is_a_link_loop(run: Path) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    loop(run / "checkpoints")


@kind
def samples_is_a_fifo(run: Path) -> None:
    (run / "samples").rename(run / "elsewhere")
    fifo(run / "samples")


# ---------------------------------------------------------------------------------------------------- models


def model_file(name: str, content: bytes) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        put(model(run) / name, content)
        reseal(run)

    return harm


def model_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        path = model(run) / name
        body = json.loads(path.read_text())
        path.write_text(json.dumps(change(body) or body))
        reseal(run)

    return harm


def safetensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHTS = {
    "empty": b"", "garbage": b"\xff" * 4000, "header_beyond_the_file": safetensors({}, size=2**62),
    "header_deep": safetensors(DEEP_JSON), "offsets_out_of_range": safetensors({"a": entry(0, 2**50, [2**48])}),
    "offsets_negative": safetensors({"a": entry(-4, 0, [1])}, b"1234"),
    "shape_negative": safetensors({"a": entry(0, 4, [-1])}, b"1234"),
    "shape_huge": safetensors({"a": entry(0, 4, [2**62, 4])}, b"1234"),
    "names_twice": safetensors(
        b"{" + b",".join([b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'] * 2) + b"}", b"1234"
    ),
    "of_nothing": safetensors({}), "of_another_model": safetensors({"a": entry(0, 4, [1])}, b"1234"),
    "of_an_unknown_type": safetensors({"a": entry(0, 4, [1], "X9")}, b"1234"),
}  # fmt: skip
for _name, _content in WEIGHTS.items():
    add(f"weights_{_name}", model_file("model.safetensors", _content))

for _name, _change in {  # type: ignore[assignment]
    "hidden_size_huge": lambda body: body.update(hidden_size=10**12),
    "hidden_size_negative": lambda body: body.update(hidden_size=-32),
    "hidden_size_text": lambda body: body.update(hidden_size="32"),
    "hidden_size_null": lambda body: body.update(hidden_size=None),
    "num_layers_huge": lambda body: body.update(num_hidden_layers=10**7),
    "num_layers_beyond_memory": lambda body: body.update(num_hidden_layers=10**15, layer_types=None),
    "num_labels_huge": lambda body: body.update(num_labels=10**15),
    "num_heads_zero": lambda body: body.update(num_attention_heads=0),
    "vocab_huge": lambda body: body.update(vocab_size=10**11),
    "max_positions_text": lambda body: body.update(max_position_embeddings="x"),
    "rope_wrong": lambda body: body.update(rope_parameters={"rope_type": "x"}, rope_scaling=[1]),
    "activation_unknown": lambda body: body.update(hidden_act="os.system"),
    "architectures_number": lambda body: body.update(architectures=5),
    "architectures_numbers": lambda body: body.update(architectures=[5]),
    "model_type_list": lambda body: body.update(model_type=["qwen3"]),
    "model_type_unknown": lambda body: body.update(model_type="nothing"),
    "a_list": lambda body: [body],
    "quantized": lambda body: body.update(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "quantized_unknown": lambda body: body.update(quantization_config={"quant_method": "evil"}),
    "quantized_huge_block": lambda body: body.update(
        quantization_config={"quant_method": "fp8", "weight_block_size": [2**39, 2**39]}
    ),
    "quantized_wrong_groups": lambda body: body.update(
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": ["float-quantized"],
            "config_groups": {"a": {"weights": {"num_bits": [8], "type": {}, "strategy": ["block"]}}, "b": 5},
        }
    ),
    "dtype_unknown": lambda body: body.update(dtype="evil", torch_dtype="evil"),
    "auto_map": lambda body: body.update(
        model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    ),
}.items():  # fmt: skip
    add(f"model_config_{_name}", model_json("config.json", _change))

add("model_config_deep", model_file("config.json", DEEP_JSON))
add("model_config_garbage", model_file("config.json", b"\xff\xfe{"))
for _what, _harm in {"fifo": fifo, "directory": directory, "dev_zero": device, "a_terabyte": sparse}.items():
    add(f"model_config_{_what}", lambda run, harm=_harm: harm(model(run) / "config.json"))
    add(f"tokenizer_{_what}", lambda run, harm=_harm: harm(model(run) / "tokenizer.json"))
    add(f"weights_{_what}", lambda run, harm=_harm: harm(model(run) / "model.safetensors"))

for _name, _content in {
    "empty": b"", "garbage": b"\xff\xfe{", "broken": b'{"version": "1.0", "model": {"type": "BPE", "vocab": 5}}',
    "deep": DEEP_JSON, "a_list": b"[]", "model_null": b'{"version": "1.0", "model": null}', "object": b"{}",
}.items():  # fmt: skip
    add(f"tokenizer_{_name}", model_file("tokenizer.json", _content))
for _name, _change in {  # type: ignore[assignment]
    "auto_map": lambda body: body.update(auto_map={"AutoTokenizer": ["evil.E", "evil.E"]}, tokenizer_class="E"),
    "class_number": lambda body: body.update(tokenizer_class=5),
    "tokens_number": lambda body: body.update(eos_token=5, added_tokens_decoder=[1]),
    "a_list": lambda body: [body],
    "max_length_text": lambda body: body.update(model_max_length="x"),
}.items():  # fmt: skip
    add(f"tokenizer_config_{_name}", model_json("tokenizer_config.json", _change))
add("tokenizer_config_deep", model_file("tokenizer_config.json", DEEP_JSON))
add("chat_template_broken", model_file("chat_template.jinja", b"{% for x in"))
add("chat_template_huge", model_file("chat_template.jinja", b"x" * (2 << 20)))
add("chat_template_not_utf8", model_file("chat_template.jinja", b"\xff\xfe"))
add("generation_config_garbage", model_file("generation_config.json", b"{{{"))
add("generation_config_list", model_file("generation_config.json", b"[1]"))
add("generation_config_deep", model_file("generation_config.json", DEEP_JSON))
add("generation_config_words", model_file("generation_config.json", b'{"eos_token_id": ["x", -5]}'))
add("generation_config_text", model_file("generation_config.json", b'{"eos_token_id": "x"}'))
add("chat_template_json_deep", model_file("chat_template.json", DEEP_JSON))


@kind
def pickled_weights_only(run: Path) -> None:
    import torch

    (model(run) / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, model(run) / "pytorch_model.bin")
    reseal(run)


@kind
def pickle_that_runs_code(run: Path) -> None:
    (model(run) / "model.safetensors").unlink()
    put(model(run) / "pytorch_model.bin", b"cos\nsystem\n(S'touch ran-code'\ntR.")
    reseal(run)


@kind
def an_adapter_that_leads_elsewhere(run: Path) -> None:
    put(
        model(run) / "adapter_config.json",
        b'{"peft_type": "LORA", "base_model_name_or_path": "evil/evil", "r": 1}',
    )
    reseal(run)


@kind
def no_model_folder(run: Path) -> None:
    import shutil

    shutil.rmtree(model(run))
    reseal(run)


# ------------------------------------------------------------------------------------------ shards and state


def shard(content: bytes) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        put(next((checkpoint(run) / "actor").glob("shard*")), content)
        reseal(run)

    return harm


for _name in ("empty", "garbage", "header_beyond_the_file", "shape_huge", "of_another_model", "of_nothing"):
    add(f"shard_{_name}", shard(WEIGHTS[_name]))
add("shard_offsets_deep", shard(safetensors({"__metadata__": {"DCP_SHARDING_INFO": DEEP_JSON.decode()}})))
add("shard_offsets_words", shard(
    safetensors({"__metadata__": {"DCP_SHARDING_INFO": '{"a": 5}'}, "a": entry(0, 4, [1])}, b"1234")
))  # fmt: skip
add("shard_offsets_list", shard(
    safetensors({"__metadata__": {"DCP_SHARDING_INFO": "[5]"}, "a": entry(0, 4, [1])}, b"1234")
))  # fmt: skip

for _name, _change in {  # type: ignore[assignment]
    "a_list": lambda body: [body],
    "no_tensors": lambda body: body.pop("tensors") and None,
    "no_numbers": lambda body: body.pop("numbers") and None,
    "numbers_list": lambda body: body.update(numbers=[1]),
    "numbers_empty": lambda body: body.update(numbers={}),
    "tensors_list": lambda body: body.update(tensors=[1]),
    "tensors_bare": lambda body: body.update(tensors={"a": 1}),
    "world_huge": lambda body: body.update(world_size=10**12),
    "world_text": lambda body: body.update(world_size="x"),
    "shape_huge": lambda body: body["tensors"].update(a={"dtype": "F32", "shape": [10**12]}),
    "shape_text": lambda body: body["tensors"].update(a={"dtype": "F32", "shape": "x"}),
    "shape_negative": lambda body: body["tensors"].update(a={"dtype": "F32", "shape": [-1]}),
    "dtype_list": lambda body: body["tensors"].update(a={"dtype": ["F32"], "shape": [1]}),
}.items():  # fmt: skip

    def _state(run: Path, change: Callable[[dict[str, Any]], Any] = _change) -> None:
        path = checkpoint(run) / "actor" / "state.json"
        body = json.loads(path.read_text())
        path.write_text(json.dumps(change(body) or body))
        reseal(run)

    add(f"state_{_name}", _state)


# --------------------------------------------------------------------------------------------------- samples


def samples(run: Path) -> Path:
    return min((run / "samples").glob("step-*.parquet"))


def table(run: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = samples(run)
    changed = change(pq.read_table(path))
    pq.write_table(changed, path)


def column(name: str, values: Callable[[int], list[Any]]) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        def change(one: pa.Table) -> pa.Table:
            index = one.schema.get_field_index(name)
            return one.set_column(index, name, pa.array(values(one.num_rows)))

        table(run, change)

    return harm


for _what, _harm in {
    "fifo": fifo, "directory": directory, "dev_zero": device, "a_terabyte": sparse, "link_loop": loop
}.items():  # fmt: skip
    add(f"samples_{_what}", lambda run, harm=_harm: harm(samples(run)))
add("samples_empty", lambda run: put(samples(run), b""))
add("samples_garbage", lambda run: put(samples(run), b"PAR1" + b"\xff" * 4000 + b"PAR1"))
add(
    "samples_footer_lies",
    lambda run: put(samples(run), b"PAR1" + b"\0" * 50 + struct.pack("<I", 2**31 - 1) + b"PAR1"),
)
add("samples_cut", lambda run: os.truncate(samples(run), samples(run).stat().st_size - 200))
add("samples_other_schema", lambda run: pq.write_table(pa.table({"x": [1]}), samples(run)))
add("samples_no_rows", lambda run: table(run, lambda one: one.slice(0, 0)))
for _name in ("id", "uid", "response", "score", "prompt_ids", "step", "reward_parts", "messages"):
    add(f"samples_without_{_name}", lambda run, name=_name: table(run, lambda one: one.drop_columns([name])))
    add(f"samples_{_name}_numbers", column(_name, lambda count: [7] * count))
    add(f"samples_{_name}_null", column(_name, lambda count: [None] * count))
    add(f"samples_{_name}_lists", column(_name, lambda count: [["a"]] * count))
for _name in ("ground_truth", "reward_parts", "messages", "agent_facts", "earlier_sequences", "timings"):
    add(f"samples_{_name}_no_json", column(_name, lambda count: ["{oh"] * count))
    add(f"samples_{_name}_deep", column(_name, lambda count: [DEEP_JSON.decode()] * count))
    add(f"samples_{_name}_wrong", column(_name, lambda count: ['[3, "x", {"a": 1}]'] * count))
add("samples_dataset_row_garbage", column("dataset_row", lambda count: ["{oh"] * count))
add("samples_dataset_row_number", column("dataset_row", lambda count: ["5"] * count))


@kind
def samples_that_decompress_to_gigabytes(run: Path) -> None:
    from strop.run.samples import schema_of

    rows = 200_000  # of ten thousand characters each: 2 GB out of some kB, by a dictionary
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * 10_000]))
    columns = []
    for field in schema_of():
        if field.name == "response":
            columns.append(text)
        elif field.name in ("id", "uid"):
            columns.append(pa.array(["e0-000000/0"] * rows))
        else:
            columns.append(pa.nulls(rows, field.type))
    pq.write_table(
        pa.Table.from_arrays(columns, names=[field.name for field in schema_of()]),
        samples(run),
        compression="zstd",
    )


@kind
def samples_nested_deeply(run: Path) -> None:
    value: Any = [1]
    for _ in range(200):
        value = [value]
    pq.write_table(pa.table({"id": ["x"], "response": [value]}), samples(run))


@kind
def lock_is_a_fifo(run: Path) -> None:
    fifo(run / "lock")


@kind
def lock_is_a_directory(run: Path) -> None:
    directory(run / "lock")


@kind
def lock_is_a_link_out(run: Path) -> None:
    (run / "lock").unlink(missing_ok=True)
    (run.parent / "victim").write_text("precious")
    (run / "lock").symlink_to(run.parent / "victim")


@kind
def lock_garbage(run: Path) -> None:
    put(run / "lock", b'{"pid": "x", "host": [1]}' + b"\xff" * 9000)


@kind
def spending_garbage(run: Path) -> None:
    put(run / "spending.json", b"[" * DEEP)
