"""Changes of a model folder that are not written into it: settings, chat template, modules of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.engines.config import ModelConfig
from strop.engines.float64 import use_exact
from strop.utils.field_types import nearest
from strop.utils.safe_read import read_text
from strop.utils.setting_text import setting_text
from strop.utils.trust import ask

__all__ = ["import_external", "overridden", "template_text", "use_exact"]

_REFUSED = {
    "attn_implementation": "set model.attn_implementation",
    "model_type": "it names another kind of model",
    "architectures": "it names another kind of model",
    "auto_map": "it names code: model.trust_remote_code runs that of the folder",
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
}
_ROPE, _SCALING = "rope_parameters", "rope_scaling"
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""Base and share of the dimensions of a rotary embedding, beside its scaling. These two and `rope_scaling` are settings
of their own in most folders; transformers reads all of them as `rope_parameters`."""
_MAX_TEMPLATE_BYTES = 2**20


def overridden(
    written: Mapping[str, Any], defaults: Mapping[str, Any], override: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json with model.override_config on top.

    Args:
        written: content of config.json.
        defaults: every setting that this kind of model has, with its value.
        override: what is changed; sections of settings are changed key by key.

    Raises:
        ValueError: there is no such setting, or its value is of another kind; the sentence names the nearest.
    """
    return _merged(written, defaults, override, "model.override_config")


def _merged(
    written: Mapping[str, Any], defaults: Mapping[str, Any], override: Mapping[str, Any], where: str
) -> dict[str, Any]:
    merged = dict(written)
    override = _with_rope_parameters(override, defaults, where)
    if _ROPE in override:  # what the folder says under the other names would go before it
        merged = {name: value for name, value in merged.items() if name not in (_SCALING, *_BESIDE_SCALING)}
    for name, value in override.items():
        key = f"{where}.{name}"
        if name.lstrip("_") in _REFUSED:
            raise ValueError(f"{key} cannot be set: {_REFUSED[name.lstrip('_')]}")
        if name not in defaults:
            near = nearest(name, defaults)
            meant = f"; the nearest is {near}" if near else f"; it has {', '.join(sorted(defaults)[:12])} …"
            raise ValueError(f"{key}: this model's config.json has no such setting{meant}")
        before = defaults[name]
        if isinstance(before, Mapping) and isinstance(value, Mapping) and name.endswith("_config"):
            value = _merged(written.get(name) or {}, before, value, key)
        elif not _fits(value, before):
            raise ValueError(
                f"{key} is {setting_text(value, quotes=True)}, but in this model it is "
                f"{setting_text(before, quotes=True)}: give a value of that kind"
            )
        merged[name] = value
    return merged


def _with_rope_parameters(
    override: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> Mapping[str, Any]:
    """A change with its rotary embeddings under one name, whole: base and share of the dimensions stay where it does
    not say them.

    Raises:
        ValueError: a value is of another kind, or the model has several rotary embeddings and the change does not say
            which.
    """
    before = defaults.get(_ROPE)
    names = [name for name in (_SCALING, *_BESIDE_SCALING) if name in override and name not in defaults]
    if not isinstance(before, Mapping) or not (names or isinstance(override.get(_ROPE), Mapping)):
        return override
    if any(isinstance(value, Mapping) for value in before.values()):
        if names:
            raise ValueError(
                f"{where}.{names[0]}: this model has a rotary embedding for each kind of layers; give all of them as "
                f"{where}.{_ROPE}, which is {setting_text(before)}"
            )
        return override
    rope = dict(before)
    for name in (_ROPE, _SCALING):
        scaling = override.get(name)
        if scaling is not None and not isinstance(scaling, Mapping):
            raise ValueError(f"{where}.{name} is {setting_text(scaling, quotes=True)}: give a mapping")
        if name in override:
            unchanged = {key: before[key] for key in _BESIDE_SCALING if key in before}
            rope = unchanged | dict(scaling or {"rope_type": "default"})
    for name in set(names) - {_SCALING}:
        if not _fits(override[name], 1.0):
            raise ValueError(f"{where}.{name} is {setting_text(override[name], quotes=True)}: give a number")
        rope[name] = override[name]
    return {name: value for name, value in override.items() if name not in names} | {_ROPE: rope}


def _fits(value: object, before: object) -> bool:
    """True if a value is of the kind of another; what is not set may become anything, and the other way round."""
    if value is None or before is None:
        return True
    if isinstance(value, bool) or isinstance(before, bool):
        return isinstance(value, bool) and isinstance(before, bool)
    numbers = (int, float)
    if isinstance(before, int) and isinstance(value, float):
        return value.is_integer()
    for kinds in (numbers, str, Mapping, (list, tuple)):
        if isinstance(before, kinds):
            return isinstance(value, kinds)
    return True


def template_text(chosen: str) -> str:
    """The text of model.chat_template: itself, or what is in the file that it names.

    Raises:
        ValueError: it is neither a template nor a file.
    """
    if "{" in chosen:
        return chosen
    path = Path(chosen).expanduser()
    if not path.is_file():
        raise ValueError(
            f"model.chat_template is {chosen!r}, which is no file; give one, or the template itself, which has {{{{ "
            f"and }}}} or {{% and %}}"
        )
    try:
        return read_text(path, limit=_MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.chat_template is {chosen!r}, which cannot be read: {error}") from error


def import_external(config: ModelConfig) -> None:
    """Import model.external_lib, which may register classes of models with transformers.

    Raises:
        ValueError: it cannot be imported.
        UntrustedCode: received settings name it.
    """
    ask("model.external_lib", f"{config.external_lib} (imported)")
    try:
        importlib.import_module(config.external_lib)
    except Exception as error:  # a user's module raises what it likes
        raise ValueError(
            f"model.external_lib {config.external_lib!r} cannot be imported ({type(error).__name__}: {error}); name a "
            f"module of an installed package, or of a folder in PYTHONPATH"
        ) from error
