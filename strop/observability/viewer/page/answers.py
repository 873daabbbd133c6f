"""Responses to the page's requests, as plain values; every text in them is made harmless."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from strop.observability.profile.report import profile_of
from strop.observability.viewer.curves import AXES, axis_of, metric_names
from strop.observability.viewer.diff import changed_settings, compared
from strop.observability.viewer.filtered import find_fates
from strop.observability.viewer.page.catalog import Catalog
from strop.observability.viewer.page.sample_search import PREVIEW_CHARS, Query, parts_of, row_of, search
from strop.observability.viewer.page.texts import Decode
from strop.observability.viewer.page.timeline_rows import timeline_rows
from strop.observability.viewer.postmortem import NOTABLE
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.samples import find_samples
from strop.observability.viewer.summary import differing_settings, flattened, summary_of
from strop.observability.viewer.token_view import response_tokens
from strop.observability.viewer.turn_view import training_sequences
from strop.rewards.passing import passes
from strop.run import RunError, RunFolder
from strop.run.profile.chrome_trace import read_trace
from strop.run.samples import schema_of
from strop.run.samples.reading import tables_of
from strop.utils.sanitize import printable
from strop.version import __version__

Words = Mapping[str, str]
MAX_GROUPS = 2000


def runs(catalog: Catalog, words: Words) -> dict[str, Any]:
    """Every run in a few numbers, and the settings that tell them apart."""
    records = catalog.runs()
    keys = differing_settings([record.config for record in records.values()])
    return {
        "version": __version__,
        "runs": [
            {"id": name, **asdict(summary_of(record)), "settings": _settings(record, keys)}
            for name, record in records.items()
        ],
        "differing_settings": keys,
        "unreadable": catalog.unreadable,
    }


def metrics(catalog: Catalog, words: Words) -> dict[str, Any]:
    """Columns over the steps: those that are named, separated by commas."""
    run = catalog.run(words["run"])
    names = [name for name in words.get("names", "").split(",") if name]
    steps = sorted(run.metrics)
    axes = {axis: axis_of(run, axis) for axis in AXES}
    return {
        "names": metric_names(run),
        "axes": {axis: [places[step] for step in steps] for axis, places in axes.items()},
        "columns": {name: [_finite(run.metrics[step].get(name)) for step in steps] for name in names},
    }


def events(catalog: Catalog, words: Words) -> dict[str, Any]:
    """Events of a run, each with its sentence, and the seconds of each phase of each step."""
    run = catalog.run(words["run"])
    steps = [event for event in run.of_kind("step") if isinstance(event.get("phases"), dict)]
    names = list(dict.fromkeys(name for event in steps for name in event["phases"]))
    return {
        "events": [
            {
                "kind": event["kind"],
                "step": event["step"],
                "time": event.get("time"),
                "text": _sentence(event),
            }
            for event in run.events
            if event["kind"] in (*NOTABLE, "slow_disk", "started_from", "preflight", "reward_check")
        ],
        "steps": [event["step"] for event in steps],
        "phases": {name: [_finite(event["phases"].get(name)) for event in steps] for name in names},
    }


def samples(catalog: Catalog, words: Words) -> dict[str, Any]:
    """The next samples that match; `goes_on_at` is given back to go on."""
    query = dict(words)
    run = catalog.run(query.pop("run"))
    start_at = query.pop("start_at", "")
    matches = search(run.samples, Query.of(query), start_at=int(start_at) if start_at else None)
    return asdict(matches)


def sample(catalog: Catalog, words: Words) -> dict[str, Any]:
    """One sample, whole: its turns, and its tokens with their numbers."""
    run = catalog.run(words["run"])
    rows = find_samples(run, step=int(words["step"]), ids=[words["id"]], split=words.get("split", "train"))
    return whole_sample(rows[0], catalog.decode_of(run))


def whole_sample(row: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """A row of the sample store as the page shows it; without `decode`, tokens have their ids as texts."""
    left_out = (
        "prompt_ids",
        "earlier_sequences",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "versions",
    )
    shown = {name: _harmless(value) for name, value in row.items() if name not in left_out}
    return {
        **shown,
        "row": row_of(row["uid"]),
        "sequences": [_tokens(sequence, decode) for sequence in training_sequences(row)],
        "has_texts": decode is not None,
    }


def groups(catalog: Catalog, words: Words) -> dict[str, Any]:
    """The samples of a step by prompt: scores, and whether the prompt is solved, hopeless, being learned, or its
    rewards are equal without a word on passing."""
    run = catalog.run(words["run"])
    split = words.get("split", "train")
    files = run.samples.files(split=split)
    if not files:
        return {"steps": [], "step": None, "groups": []}
    step = int(words["step"]) if words.get("step") else max(files)
    if step not in files:
        raise RunError(f"{run.path} has no {split} samples of step {step}")
    by_uid: dict[str, dict[str, Any]] = {}
    columns = schema_of(
        ("id", "uid", "prompt", "data_source", "score", "fate", "fate_reason", "reward_parts")
    )
    for path in files[step]:
        for table in tables_of(path, columns):
            for row in table.to_pylist():
                _add_to_group(by_uid, row)
    return {
        "steps": list(files),
        "step": step,
        "groups": [_grouped(group) for group in list(by_uid.values())[:MAX_GROUPS]],
        "num_groups": len(by_uid),
    }


def fates(catalog: Catalog, words: Words) -> dict[str, Any]:
    """Fates of all samples, with the reasons."""
    run = catalog.run(words["run"])
    with RunFolder.open(run.path, read_only=True) as folder:
        return {"fates": [_harmless(fate.as_json()) for fate in find_fates(folder)]}


def settings(catalog: Catalog, words: Words) -> dict[str, Any]:
    """All settings of a run."""
    run = catalog.run(words["run"])
    return {"settings": {key: printable(repr(value)) for key, value in flattened(run.config).items()}}


def diff(catalog: Catalog, words: Words) -> dict[str, Any]:
    """The first step and stage where two runs part, with the first sample that shows it."""
    a, b = catalog.run(words["a"]), catalog.run(words["b"])
    with RunFolder.open(a.path, read_only=True) as first, RunFolder.open(b.path, read_only=True) as second:
        try:
            record = compared(first, second).as_json()
        except ValueError as error:  # no step in common
            record = {"error": str(error), "settings": changed_settings(a.config, b.config)}
    return dict(_harmless(record))


def profile(catalog: Catalog, words: Words) -> dict[str, Any]:
    """Phases of a run; with profiled steps, the timeline of the one that is named, else of the last."""
    run = catalog.run(words["run"])
    found = profile_of(run)
    files = {step.step: step.file for step in found.profiled}
    step = int(words["step"]) if words.get("step") else max(files, default=None)
    if step is not None and step not in files:
        raise RunError(f"step {step} of {run.path} was not profiled, or its timeline cannot be read")
    timeline = None if step is None else timeline_rows(read_trace(files[step]))
    return dict(_harmless({**found.as_json(), "step": step, "timeline": timeline}))


ANSWERS: dict[str, Callable[[Catalog, Words], dict[str, Any]]] = {
    one.__name__: one
    for one in (runs, metrics, events, samples, sample, groups, fates, settings, diff, profile)
}
"""By the last word of their address."""


def _tokens(sequence: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    tokens = response_tokens(sequence, decode or (lambda ids: "".join(f"⟨{token}⟩" for token in ids)))
    columns: dict[str, Any] = {
        "text": [printable(token.text) for token in tokens],
        "id": [token.id for token in tokens],
        "sampled": [token.is_sampled for token in tokens],
        "log_prob": [_finite(token.log_prob) for token in tokens],
        "version": [token.version for token in tokens],
    }
    for name, stored in (
        ("entropy", "entropys"),
        ("advantage", "advantages"),
        ("old_log_prob", "old_log_probs"),
    ):
        values = sequence.get(stored)
        if isinstance(values, list) and len(values) == len(tokens):
            columns[name] = [_finite(value) for value in values]
    return columns


def _settings(run: RunRecords, keys: Sequence[str]) -> dict[str, str]:
    flat = flattened(run.config)
    return {key: printable(str(flat.get(key)), is_one_line=True) for key in keys}


def _sentence(event: Mapping[str, Any]) -> str:
    """Message of an event; its fields in words where it has none."""
    for name in ("message", "error", "reason", "cause", "verdict"):
        if isinstance(event.get(name), str) and event[name]:
            return printable(event[name])[:2000]
    rest = {key: value for key, value in event.items() if key not in ("kind", "step", "time")}
    return printable(", ".join(f"{key} {value}" for key, value in rest.items()))[:2000]


def _add_to_group(by_uid: dict[str, dict[str, Any]], row: Mapping[str, Any]) -> None:
    group = by_uid.setdefault(
        row["uid"],
        {
            "uid": printable(row["uid"]),
            "row": row_of(row["uid"]),
            "prompt": printable((row["prompt"] or "")[:PREVIEW_CHARS]),
            "source": printable(row["data_source"] or ""),
            "scores": [],
            "passes": [],
            "fates": {},
        },
    )
    group["scores"].append(_finite(row["score"]))
    score = group["scores"][-1]
    group["passes"].append(None if score is None else passes(score, parts_of(row["reward_parts"])))
    fate = printable(" ".join(filter(None, (row["fate"], row["fate_reason"]))))
    if fate:
        group["fates"][fate] = group["fates"].get(fate, 0) + 1


def _grouped(group: dict[str, Any]) -> dict[str, Any]:
    scores = [score for score in group["scores"] if score is not None]
    verdicts = [
        passed
        for passed, score in zip(group.pop("passes"), group["scores"], strict=True)
        if score is not None
    ]
    group["mean"] = math.fsum(scores) / len(scores) if scores else None
    if not scores:
        group["kind"] = "unscored"
    elif min(scores) < max(scores):
        group["kind"] = "learning"
    elif len(set(verdicts)) != 1 or None in verdicts:
        group["kind"] = "equal"
    else:
        group["kind"] = "solved" if verdicts[0] else "hopeless"
    return group


def _harmless(value: object) -> Any:
    """The value with every text printable and every number one that JSON has."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): _harmless(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: object) -> Any:
    """A number, or None where JSON has no word for it."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
