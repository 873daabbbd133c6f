"""Samples of a run: found, put in order, and shown on a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.token_view import response_tokens, summary, token_text
from strop.observability.viewer.turn_view import short, training_sequences, turns_text
from strop.run import RunError, RunFolder
from strop.run.naming import model_folder, saved_checkpoint
from strop.utils.terminal import plain

if TYPE_CHECKING:
    from rich.panel import Panel


def decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """Tokens as text, with the tokenizer of the run's model."""
    checkpoint, _ = saved_checkpoint(path)  # before what takes seconds to import
    from strop.engines.config import ModelConfig
    from strop.engines.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder(checkpoint.path))))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def find_samples(
    run_folder: RunFolder | RunRecords, *, step: int | None, ids: Collection[str], split: str
) -> list[dict[str, Any]]:
    """The rows that are asked for, in the order of their steps.

    Args:
        step: None takes the last step; with ids, every step.
        ids: sample ids, or visits that name all their samples; empty takes every sample.

    Raises:
        RunError: there are none.
    """
    store = run_folder.samples
    steps = store.steps(split=split)
    if not steps:
        other = "val" if split == "train" else "train"
        way = "; a step writes them at its end, unless run.save_samples is false"
        if store.steps(split=other):
            way = f"; it has {other} samples: --split {other}"
        elif (command := run_folder.info.get("command", ["", "train"])[1:2]) != ["train"]:
            way = f": it is a run of `strop {' '.join(command)}`, which plays no prompts"
        raise RunError(f"{run_folder.path} has no {split} samples{way}")
    chosen_steps = [step] if step is not None else steps if ids else steps[-1:]
    rows = [row for number in chosen_steps for row in store.read(number, split=split)]
    if not rows:
        raise RunError(
            f"{run_folder.path}: the file of {split} samples of step {chosen_steps[-1]} has no row"
        )
    if ids:
        names = {name for row in rows for name in (row["id"], row["uid"])}
        missing = [name for name in ids if name not in names]
        if missing:
            example = rows[0]["id"] if rows else "e0-000000/0"
            raise RunError(
                f"{run_folder.path} has no {split} sample {missing[0]!r}"
                f"{'' if step is None else f' in step {step}'}; ids look like {example!r}"
            )
        rows = [row for row in rows if row["id"] in ids or row["uid"] in ids]
    return rows


def matching(rows: Sequence[dict[str, Any]], *, source: str | None, is_cut: bool) -> list[dict[str, Any]]:
    """Rows of one data source, and rows whose answer was cut at a limit of tokens.

    Args:
        rows: of the sample store, at least one.
        source: a data source; None takes all.
        is_cut: only answers that ended with `length`.

    Raises:
        RunError: no row is left.
    """
    matches = [row for row in rows if source is None or row["data_source"] == source]
    if not matches:
        data_sources = sorted({str(row["data_source"]) for row in rows})
        raise RunError(
            f"no sample here is of the data source {source!r}; there are {', '.join(data_sources)}"
        )
    if not is_cut:
        return matches
    cut = [row for row in matches if row["stop_reason"] == "length"]
    if not cut:
        raise RunError(f"none of these {len(matches)} samples was cut at a limit of tokens; leave out --cut")
    return cut


def in_order(rows: Sequence[dict[str, Any]], *, sort: str | None) -> list[dict[str, Any]]:
    """An answer to each prompt before the second answer to any; by score where that is asked for.

    Args:
        rows: of the sample store.
        sort: "worst" or "best" score first; rows without a score come last.
    """
    counts: Counter[str] = Counter()
    turns = []
    for row in rows:
        turns.append(counts[row["uid"]])
        counts[row["uid"]] += 1
    spread = [rows[number] for number in sorted(range(len(rows)), key=turns.__getitem__)]
    if sort is None:
        return spread
    sign = 1 if sort == "worst" else -1
    return sorted(spread, key=lambda row: (row["score"] is None, sign * (row["score"] or 0.0)))


def panel(row: Mapping[str, Any], decode: Callable[[Sequence[int]], str] | None = None) -> Panel:
    """One sample, for a terminal; with `decode`, the response has a colour per token.

    An episode of an agent is shown turn by turn.
    """
    from rich.panel import Panel
    from rich.text import Text

    sequences = (
        []
        if decode is None
        else [response_tokens(training_sequence, decode) for training_sequence in training_sequences(row)]
    )
    tokens = [token for sequence in sequences for token in sequence]
    body = Text()
    for label, text in _sections(row):
        body.append(f"{label}  ", style="bold cyan")
        if label == "response" and (tokens or row.get("messages")):
            shown = turns_text(row, decode) if row.get("messages") else token_text(tokens).append("\n")
            body.append("\n").append(shown)
            if not tokens:
                continue
            body.append("tokens    ", style="bold cyan")
            text = summary(tokens) + (f", in {len(sequences)} sequences" if len(sequences) > 1 else "")
        body.append(plain(text) + "\n")
    body.rstrip()
    return Panel(body, title=Text(_title(row)), title_align="left", border_style=_colour(row))


def _title(row: Mapping[str, Any]) -> str:
    parts = [f"step {row['step']}", row["id"], row["data_source"] or ""]
    parts.append("no score" if row["score"] is None else f"score {row['score']:g}")
    if row["advantage"] is not None:
        parts.append(f"advantage {row['advantage']:+.3f}")
    return plain(" · ".join(part for part in parts if part), is_one_line=True)


def _sections(row: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    fate = row["fate"] or ""
    num_tokens = sum(len(sequence.get("response_ids") or ()) for sequence in training_sequences(row))
    sections = [
        ("prompt  ", row["prompt"] or ""),
        ("response", row["response"] or ""),
        ("expected", "" if row["ground_truth"] is None else _text(row["ground_truth"])),
        ("reward  ", " ".join(f"{name}={_text(part)}" for name, part in (row["reward_parts"] or {}).items())),
        ("agent   ", _agent_facts(row)),
        ("error   ", row["error"] or ""),
        (
            "ended   ",
            f"{row['stop_reason'] or 'unfinished'}, {num_tokens} token{'' if num_tokens == 1 else 's'}",
        ),
        ("fate    ", f"{fate} ({row['fate_reason']})" if row["fate_reason"] else fate),
    ]
    return [(label, text) for label, text in sections if text or label.strip() == "response"]


def _agent_facts(row: Mapping[str, Any]) -> str:
    """Agent of the episode, and its notes about the whole of it."""
    facts = row.get("agent_facts") or {}
    player = [row["agent_name"]] if row.get("agent_name") and row.get("messages") else []
    return " ".join(
        player + [f"{k}={_text(short(value))}" for k, value in facts.items() if value not in ([], {}, None)]
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _colour(row: Mapping[str, Any]) -> str:
    if row["score"] is None:
        return "yellow"
    return "green" if row["score"] > 0 else "red"
