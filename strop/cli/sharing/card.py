"""The card of a model: README.md of its folder, with the metadata that hubs read, made of the records of its run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import summary_of
from strop.trainer.role_export import Export
from strop.utils.remote_path import is_url
from strop.utils.sanitize import printable, redacted

CARD = "README.md"
_RL, _SFT, _PREFERENCES = "reinforcement learning", "supervised fine-tuning", "training on preferences"
_SECTIONS = {_RL: "", _SFT: "sft.", _PREFERENCES: "prefer."}
"""Where the settings of each kind of training lie."""
_OF_NO_INTEREST = ("run.", "trainer.project_name", "trainer.experiment_name", "data.cache_dir", "resources.")
"""Beginnings of settings that say nothing about the model."""
_SHARED = ("model.", "trainer.")
"""Beginnings of settings that every kind of training reads."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the card is made of."""

    records: RunRecords
    """Of the run, read."""
    step: int
    """Of the checkpoint."""
    settings: Mapping[str, Any]
    """Those that differ from their defaults, by full key."""
    models: Mapping[str, Mapping[str, Any]]
    """What the run fetched: of each key source, kind and revision (strop.trainer.model_locations)."""
    export: Export
    name: str
    """Of the model, at the hub."""
    is_loadable: bool = True
    """transformers loads it by this name."""


def model_card(facts: CardFacts) -> str:
    """The text of README.md: metadata, then what a person reads."""
    parts = [
        f"# {_line(facts.name)}",
        _opening(facts),
        *_section("How good it is", _results(facts)),
        *_section("How it was trained", _training(facts)),
        *_section("Data", _data(facts)),
        *_section("Settings", _settings(facts)),
        *_section("How to use it", _usage(facts)),
    ]
    return f"---\n{_metadata(facts)}\n---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(facts: CardFacts) -> str:
    hub: Any = importlib.import_module("huggingface_hub")  # heavy, and only this command needs it
    validation = _validation(facts)
    results = None
    if validation is not None:
        results = [
            hub.EvalResult(
                task_type="text-generation",
                dataset_type="custom",
                dataset_name=", ".join(_files(facts, "val_files")) or "validation",
                metric_type="mean_reward" if validation["pass_rate"] is None else "pass_rate",
                metric_value=validation["reward"]
                if validation["pass_rate"] is None
                else validation["pass_rate"],
            )
        ]
    base = facts.models.get("model.path", {})
    return str(
        hub.ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            base_model=str(base["source"]).partition("@")[0] if base.get("kind") == "huggingface" else None,
            datasets=list(_hub_data(facts)) or None,
            tags=["strop", *_tags(facts)],
            model_name=facts.name,
            eval_results=results,
        ).to_yaml()
    )


def _opening(facts: CardFacts) -> str:
    base = facts.models.get("model.path", {})
    given = facts.settings.get("model.path", "")
    start = f"{base['source']} at revision {base['revision']}" if base else _name(given)
    return (
        f"Made by {_method(facts)} with strop {_versions(facts).get('strop', '')}, from "
        f"{_code(start) if start else 'a model of its own'}: the checkpoint of step {facts.step}."
    )


def _results(facts: CardFacts) -> Iterator[str]:
    """Of the checkpoint, and of the model before training."""
    validation, first = _validation(facts), _validation(facts, step=0)
    if validation is None and first is None:
        yield "No validation was made at the step of this checkpoint."
        return
    rows = [("before training", first), (f"step {facts.step}, this model", validation)]
    temperature = facts.records.config.get("eval", {}).get("temperature", 0.0)
    how = "greedy answers" if not temperature else f"answers sampled at temperature {temperature}"
    if any(one is not None and one["pass_rate"] is None for _, one in rows):
        yield "| | mean reward | answers |\n|---|---|---|"
        for label, one in rows:
            if one is not None:
                yield f"| {label} | {one.get('reward', '')} | {one.get('num_answers', '')} |"
        yield f"\nThe mean reward of {how} to held-out prompts; nothing in the run says which answers pass."
        return
    yield "| | pass rate | 95 % interval | answers |\n|---|---|---|---|"
    for label, one in rows:
        if one is not None:
            low, high = one.get("low"), one.get("high")
            between = f"{_percent(low)} to {_percent(high)}" if low is not None and high is not None else ""
            yield f"| {label} | {_percent(one['pass_rate'])} | {between} | {one.get('num_answers', '')} |"
    yield f"\nThe share of {how} to held-out prompts that the run's own reward accepts."
    summary, num_made = summary_of(facts.records), len(facts.records.of_kind("validation"))
    if summary.best_step == facts.step and num_made > 2:
        yield (
            f"This step is the best of the {num_made} validations of the run, so other prompts would show a "
            f"somewhat lower rate."
        )


def _training(facts: CardFacts) -> Iterator[str]:
    summary = summary_of(facts.records)
    settings = facts.records.config.get("algorithm", {})
    if _method(facts) == _RL:
        yield f"- advantages: {_code(settings.get('adv_estimator', ''))}"
        yield f"- policy loss: {_code(settings.get('policy_loss', ''))}"
    yield f"- steps: {facts.step} of {summary.step} that the run took"
    for label, number in (("samples", summary.samples), ("tokens", summary.tokens)):
        if number is not None:
            yield f"- {label} of all steps: {number:,.0f}"
    if summary.device_hours is not None:
        yield f"- time: {summary.device_hours:.2f} device-hours"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in _versions(facts).items())}"
    yield f"- run: {_code(facts.records.info.get('id', ''))}, begun {_line(facts.records.info.get('created', ''))}"
    rounding = f"; rounding moves them by {facts.export.rounding:.2g}" if facts.export.rounding else ""
    yield (
        f"- weights: {facts.export.num_tensors} tensors, whose {facts.export.quantity}s in plain transformers differ "
        f"from those in training by at most {facts.export.difference:.2g}{rounding}"
    )


def _data(facts: CardFacts) -> Iterator[str]:
    for label, key in (("trained on", "train_files"), ("validated on", "val_files")):
        if names := _files(facts, key):
            yield f"- {label}: {', '.join(map(_code, names))}"
    for key, record in facts.models.items():
        if key.startswith("data"):
            yield f"- {_code(record['source'])} was read at revision {_code(record['revision'])}"


def _settings(facts: CardFacts) -> Iterator[str]:
    """A table of those that differ from the defaults."""
    shown = {
        key: value
        for key, value in sorted(facts.settings.items())
        if _is_read(key, _method(facts)) and not key.startswith(_OF_NO_INTEREST)
    }
    if not shown:
        yield "All are the defaults."
        return
    yield "Those that differ from the defaults of strop:\n\n| setting | value |\n|---|---|"
    for key, value in shown.items():
        yield f"| {_code(key)} | {_code(_public(value))} |"


def _usage(facts: CardFacts) -> Iterator[str]:
    if not facts.is_loadable:
        yield "Fetch the folder, or name its address as MODEL of `strop eval` and `strop generate`."
        return
    yield (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({facts.name!r})\n"
        f"model = AutoModelForCausalLM.from_pretrained({facts.name!r})\n```"
    )


def _section(title: str, lines: Iterator[str]) -> list[str]:
    text = "\n".join(lines)
    return [f"## {title}\n\n{text}"] if text else []


def _validation(facts: CardFacts, step: int | None = None) -> Mapping[str, Any] | None:
    """The last validation at a step; by default that of the checkpoint."""
    wanted = facts.step if step is None else step
    found = [one for one in facts.records.of_kind("validation") if one["step"] == wanted]
    numbers = [found[-1].get(name) for name in ("pass_rate", "reward")] if found else []
    return {"pass_rate": None, **found[-1]} if any(isinstance(one, float) for one in numbers) else None


def _files(facts: CardFacts, which: str) -> list[str]:
    """Entries of the data settings that the run reads."""
    found = facts.settings.get(f"{_SECTIONS[_method(facts)]}data.{which}", ())
    return [_name(entry) for entry in found] if isinstance(found, Sequence) else []


def _method(facts: CardFacts) -> str:
    """What kind of training made it: its records tell, for one command makes several."""
    summary = summary_of(facts.records)
    if summary.samples is not None:
        return _RL
    return _PREFERENCES if summary.kind in ("dpo", "prefer", "reward-model") else _SFT


def _is_read(key: str, method: str) -> bool:
    own = _SECTIONS[method]
    if own:
        return key.startswith((own, *_SHARED))
    return not key.startswith(tuple(filter(None, _SECTIONS.values())))


def _hub_data(facts: CardFacts) -> Iterator[str]:
    """Data sets of the hub, ORG/NAME."""
    for name in _files(facts, "train_files"):
        if name.startswith("hub:"):
            yield name.removeprefix("hub:").partition("#")[0].partition(":")[0].partition("@")[0]


def _tags(facts: CardFacts) -> list[str]:
    if _method(facts) != _RL:
        return [_method(facts).replace(" ", "-")]
    return ["reinforcement-learning", str(facts.records.config.get("algorithm", {}).get("adv_estimator", ""))]


def _versions(facts: CardFacts) -> dict[str, str]:
    found = facts.records.info.get("versions")
    return {str(k): _line(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


def _name(entry: object) -> str:
    """What an entry is called, without the folders of the machine that it lay on."""
    text = str(entry)
    return text if text.startswith(("hub:", "modelscope:")) or is_url(text) else Path(text).name or text


def _public(value: object) -> str:
    """A value as text; paths without the folders above them, keys of services left out."""
    if isinstance(value, str):
        return _name(value) if value.startswith(("/", "~", ".")) else value
    if isinstance(value, list | tuple):
        return json.dumps(
            [_public(one) if isinstance(one, str) else one for one in value], ensure_ascii=False
        )
    return json.dumps(value, ensure_ascii=False, default=str)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _line(text: object) -> str:
    """Text of the records on one line, that is no markup and shows nothing secret."""
    return redacted(printable(str(text), is_one_line=True)).replace("<", "&lt;").replace("|", "\\|")


def _code(text: object) -> str:
    shown = redacted(printable(str(text), is_one_line=True)).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else ""
