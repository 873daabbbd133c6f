"""Files of answers, with their tokens and, if requested, top-k log-probs of the model at each token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.utils.atomic_io import replace_text
from strop.utils.sanitize import storable, storable_text

if TYPE_CHECKING:
    from strop.trainer.config import Config
    from strop.workers.episodes import Episode

_AT_ONCE = 64
"""Answers whose top-k log-probs are in memory as arrays."""
_TYPES = {
    "row": "int64", "sample_index": "int64", "prompt": "string", "response": "string", "stop_reason": "string",
    "num_tokens": "int64", "prompt_ids": "ids", "response_ids": "ids", "teacher_ids": "list of ids",
    "teacher_logprobs": "list of numbers",
}  # fmt: skip


NUMBERS = frozenset(
    {"prompt_ids", "response_ids", "response_mask", "earlier_sequences", "teacher_ids", "teacher_logprobs"}
)
"""Columns of our own numbers, several per token: written whole, however many they are."""


def write_json_lines(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    """One JSON object per line, the whole file or nothing of it."""

    def line(record: Mapping[str, object]) -> str:
        numbers = {name: record[name] for name in record if name in NUMBERS}
        rest = storable({name: value for name, value in record.items() if name not in NUMBERS})
        return json.dumps({**rest, **numbers}, ensure_ascii=False) + "\n"

    replace_text(file, "".join(map(line, records)))


def with_tokens(records: Iterable[Mapping[str, Any]], answers: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """The records with the tokens of their answers."""
    for record, answer in zip(records, answers, strict=True):
        tokens = answer.trajectory
        ids = (
            {}
            if tokens is None
            else {"prompt_ids": [*tokens.prompt_ids], "response_ids": [*tokens.response_ids]}
        )
        yield {**record, **ids}


def with_top_log_probs(
    records: Sequence[Mapping[str, Any]], config: Config, k: int
) -> Iterator[dict[str, Any]]:
    """The records with the model's top-k token ids and log-probs at each token of their answers, at temperature 1.

    Raises:
        ValueError: the model has fewer tokens.
    """
    from strop.engines.config import EngineConfig
    from strop.engines.tokenizer import load_tokenizer
    from strop.evaluation.top_log_probs import TopLogProbs

    longest = max(len(record["prompt_ids"]) + len(record["response_ids"]) for record in records)
    model = TopLogProbs(
        config.model,
        EngineConfig(max_tokens_per_device=max(longest, config.actor.engine.max_tokens_per_device)),
        k=k,
        num_ids=len(load_tokenizer(config.model)),
        device=config.resources.device,
    )
    for start in range(0, len(records), _AT_ONCE):
        records_of_pass = records[start : start + _AT_ONCE]
        top_log_probs = model.score(
            [record["prompt_ids"] for record in records_of_pass],
            [record["response_ids"] for record in records_of_pass],
        )
        for record, (ids, log_probs) in zip(records_of_pass, top_log_probs, strict=True):
            yield {**record, "teacher_ids": ids.tolist(), "teacher_logprobs": log_probs.tolist()}


def write_answers(file: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write the records, as parquet where the name ends so, else as JSON lines; returns their number."""
    count = 0

    def counted() -> Iterator[Mapping[str, Any]]:
        nonlocal count
        for record in records:
            count += 1
            yield record

    if file.suffix == ".parquet":
        _write_parquet(file, counted())
    else:
        write_json_lines(file, counted())
    return count


def _write_parquet(file: Path, records: Iterator[Mapping[str, Any]]) -> None:
    """The whole file or nothing of it. A prompt that is a list of messages is written as JSON text."""
    import pyarrow
    import pyarrow.parquet

    ids, numbers = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    kinds = {
        "int64": pyarrow.int64(), "string": pyarrow.string(), "ids": ids, "list of ids": pyarrow.list_(ids),
        "list of numbers": pyarrow.list_(numbers),
    }  # fmt: skip
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in _TYPES.items()])
    temporary = file.with_name(f".{file.name}.tmp")
    with pyarrow.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        for record in records:
            rows.append(
                {name: _plain(value) if name == "prompt" else value for name, value in record.items()}
            )
            if len(rows) == _AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows = []
        if rows:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    temporary.replace(file)


def _plain(prompt: object) -> str:
    return storable_text(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
