"""Model card: README.md of a model folder, with the metadata that hubs read, made of the records of a run."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
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
"""Config section of each kind of training."""
_LEFT_OUT = ("run.", "trainer.project_name", "trainer.experiment_name", "data.cache_dir", "resources.")
"""Beginnings of settings that say nothing about the model."""
_SHARED = ("model.", "trainer.")
"""Beginnings of settings that every kind of training reads."""
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ line(facts.name) }}

Made by {{ method }} with strop {{ versions.strop }}, from {{ code(base) or "a model of its own" }}: the checkpoint of \
step {{ facts.step }}.

## How good it is

{% if losses -%}
Loss on held-out data: {{ losses[-1] }}{% if losses[1:] %} ({{ losses[0] }} before training){% endif %}.
{%- elif not validations -%}
No validation was made at the step of this checkpoint.
{%- else -%}
| | {{ "pass rate | 95 % interval" if has_pass_rates else "mean reward" }} | answers |
|---|---|---|{{ "---|" if has_pass_rates }}
{% for label, validation in validations -%}
| {{ label }} | {{ result(validation) if has_pass_rates else validation.reward }} | {{ validation.num_answers }} |
{% endfor %}
{% if has_pass_rates -%}
The share of {{ answers }} to held-out prompts that the run's own reward accepts.
{%- else -%}
The mean reward of {{ answers }} to held-out prompts; nothing in the run says which answers pass.
{%- endif -%}
{% if num_compared %}
This step is the best of the {{ num_compared }} validations of the run, so other prompts would show a somewhat lower \
rate.
{%- endif -%}
{% endif %}

## How it was trained

{% if algorithm -%}
- advantages: {{ code(algorithm.adv_estimator) }}
- policy loss: {{ code(algorithm.policy_loss) }}
{% endif -%}
- steps: {{ facts.step }} of {{ summary.step }} that the run took
{% for kind in ("samples", "tokens") if summary[kind] is not none -%}
- {{ kind }} of all steps: {{ "{:,.0f}".format(summary[kind]) }}
{% endfor -%}
{% if summary.device_hours is not none -%}
- time: {{ "%.2f" % summary.device_hours }} device-hours
{% endif -%}
- versions: {% for name, version in versions.items() %}{{ name }} {{ version }}{{ ", " if not loop.last }}{% endfor %}
- run: {{ code(facts.records.info.id) }}, begun {{ line(facts.records.info.created) }}
- weights: {{ facts.export.num_tensors }} tensors, whose {{ facts.export.quantity }}s in plain transformers differ \
from those in training by at most {{ "%.2g" % facts.export.difference }}\
{% if facts.export.rounding %}; rounding moves them by {{ "%.2g" % facts.export.rounding }}{% endif %}
{% if data %}
## Data

{% for fact in data -%}
- {{ fact }}
{% endfor -%}
{% endif %}
## Settings

{% if settings -%}
Those that differ from the defaults of strop:

| setting | value |
|---|---|
{%- for key, value in settings.items() %}
| {{ code(key) }} | {{ code(value) }} |
{%- endfor %}
{%- else -%}
All are the defaults.
{%- endif %}

## How to use it

{% if facts.is_loadable -%}
```python
from transformers import {{ model_class }}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ quoted_name }})
model = {{ model_class }}.from_pretrained({{ quoted_name }})
```
{%- elif facts.is_adapter -%}
PEFT adds this adapter to the model that its `adapter_config.json` names, as `{{ model_class }}` loads it\
{{ ", with `num_labels=1`" if facts.export.is_value_model }}.
{%- else -%}
Fetch the folder, or name its address \
{{ "as `reward_model.path` of `strop train`" if facts.export.is_value_model \
else "as MODEL of `strop eval` and `strop generate`" }}.
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Contents of a card."""

    records: RunRecords
    """Records of the run, already read."""
    step: int
    """Step of the checkpoint."""
    settings: Mapping[str, Any]
    """Settings that differ from their defaults, by full key."""
    models: Mapping[str, Mapping[str, Any]]
    """Fetched models and data sets: of each key source, kind and revision (strop.trainer.model_locations)."""
    export: Export
    name: str
    """Name of the model at the hub."""
    is_loadable: bool = True
    """transformers loads it by this name."""
    is_adapter: bool = False
    """An adapter alone, which PEFT loads."""


def model_card(facts: CardFacts) -> str:
    """Text of README.md: metadata, then what a person reads."""
    hub: Any = importlib.import_module("huggingface_hub")  # heavy, and only this command needs it
    records, method, base = facts.records, _method(facts), facts.models.get("model.path", {})
    summary, num_validations = summary_of(records), len(records.of_kind("validation"))
    versions = records.info.get("versions")
    before, after = _validation(facts, 0), _validation(facts, facts.step)
    validations = [("before training", before), (f"step {facts.step}, this model", after)]
    temperature = records.config.get("eval", {}).get("temperature", 0.0)
    card = hub.ModelCard.from_template(
        _metadata(hub, facts, after),
        template_str=_TEMPLATE,
        facts=facts,
        summary=summary,
        method=method,
        base=f"{base['source']} at revision {base['revision']}"
        if base
        else _name(facts.settings.get("model.path", "")),
        quoted_name=repr(facts.name),
        validations=[(label, event) for label, event in validations if event is not None],
        losses=_held_out_losses(facts) if method != _RL else [],
        model_class=f"AutoModelFor{'SequenceClassification' if facts.export.is_value_model else 'CausalLM'}",
        has_pass_rates=all(event["pass_rate"] is not None for event in (before, after) if event is not None),
        answers=f"answers sampled at temperature {temperature}" if temperature else "greedy answers",
        num_compared=num_validations if summary.best_step == facts.step and num_validations > 2 else 0,
        algorithm=records.config.get("algorithm") if method == _RL else None,
        versions={str(k): _line(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {},
        data=_data(facts),
        settings=_settings(facts),
        result=_result,
        line=_line,
        code=_code,
    )
    return f"{card}\n"


def _metadata(hub: Any, facts: CardFacts, validation: Mapping[str, Any] | None) -> Any:
    results = None
    if validation is not None:
        metric = "reward" if validation["pass_rate"] is None else "pass_rate"
        results = [
            hub.EvalResult(
                task_type="text-generation",
                dataset_type="custom",
                dataset_name=", ".join(_files(facts, "val_files")) or "validation",
                metric_type="mean_reward" if metric == "reward" else metric,
                metric_value=validation[metric],
            )
        ]
    base, method = facts.models.get("model.path", {}), _method(facts)
    estimator = str(facts.records.config.get("algorithm", {}).get("adv_estimator", ""))
    hub_data = [name[4:] for name in _files(facts, "train_files") if name.startswith("hub:")]
    return hub.ModelCardData(
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-classification" if facts.export.is_value_model else "text-generation",
        base_model=str(base["source"]).partition("@")[0] if base.get("kind") == "huggingface" else None,
        datasets=[re.split("[#:@]", name)[0] for name in hub_data] or None,
        tags=["strop", method.replace(" ", "-"), *([estimator] if method == _RL else [])],
        model_name=facts.name,
        eval_results=results,
    )


def _result(validation: Mapping[str, Any]) -> str:
    """Pass rate and its 95 % interval, two cells of a table."""
    low, high = validation.get("low"), validation.get("high")
    interval = "" if low is None or high is None else f"{100 * low:.1f} % to {100 * high:.1f} %"
    return f"{100 * validation['pass_rate']:.1f} % | {interval}"


def _data(facts: CardFacts) -> list[str]:
    """Files that were trained and validated on, and the revisions of data sets of hubs."""
    columns = (("trained on", _files(facts, "train_files")), ("validated on", _files(facts, "val_files")))
    return [f"{label}: {', '.join(map(_code, files))}" for label, files in columns if files] + [
        f"{_code(record['source'])} was read at revision {_code(record['revision'])}"
        for key, record in facts.models.items()
        if key.startswith("data")
    ]


def _settings(facts: CardFacts) -> dict[str, str]:
    """Settings that this kind of training reads."""
    section = _SECTIONS[_method(facts)]
    others = tuple(filter(None, _SECTIONS.values()))
    return {
        key: _public(value)
        for key, value in sorted(facts.settings.items())
        if (key.startswith((section, *_SHARED)) if section else not key.startswith(others))
        and not key.startswith(_LEFT_OUT)
    }


def _validation(facts: CardFacts, step: int) -> Mapping[str, Any] | None:
    """The last validation at a step, where it has a result."""
    events = [event for event in facts.records.of_kind("validation") if event["step"] == step]
    numbers = [events[-1].get(name) for name in ("pass_rate", "reward")] if events else []
    return {"pass_rate": None, **events[-1]} if any(isinstance(number, float) for number in numbers) else None


def _held_out_losses(facts: CardFacts) -> list[str]:
    """Losses of the validation before training, where there is one, and of the one at the step of the checkpoint;
    empty without the latter."""
    losses = {
        event["step"]: f"{event['loss']:.4g}"
        for event in facts.records.of_kind("validation")
        if isinstance(event.get("loss"), float)
    }
    return [losses[step] for step in (0, facts.step) if step in losses] if facts.step in losses else []


def _files(facts: CardFacts, key: str) -> list[str]:
    """Entries of a data setting that the run reads."""
    entries = facts.settings.get(f"{_SECTIONS[_method(facts)]}data.{key}", ())
    return [_name(entry) for entry in entries] if isinstance(entries, Sequence) else []


def _method(facts: CardFacts) -> str:
    """Kind of training, by the records of the run: one command makes several."""
    summary = summary_of(facts.records)
    if summary.samples is not None:
        return _RL
    return _PREFERENCES if summary.kind in ("dpo", "prefer", "reward-model") else _SFT


def _name(entry: object) -> str:
    """Name of an entry, without the folders of the machine that it lay on."""
    text = str(entry)
    return text if text.startswith(("hub:", "modelscope:")) or is_url(text) else Path(text).name or text


def _public(value: object) -> str:
    """A value as text; paths without the folders above them."""
    if isinstance(value, str):
        return _name(value) if value.startswith(("/", "~", ".")) else value
    if isinstance(value, list | tuple):
        value = [_public(item) if isinstance(item, str) else item for item in value]
    return json.dumps(value, ensure_ascii=False, default=str)


def _line(text: object) -> str:
    """Text of the records on one line, free of markup and secrets."""
    return redacted(printable(str(text), is_one_line=True)).replace("<", "&lt;").replace("|", "\\|")


def _code(text: object) -> str:
    code = redacted(printable(str(text), is_one_line=True)).replace("`", "'").replace("|", "\\|")
    return f"`{code}`" if code else ""
