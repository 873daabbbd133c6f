"""`strop config diff`: the settings in which two runs or files differ. Exit code 1: there are some."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.utils.terminal import UsageError, plain, print_json, print_plain


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    if len(args.overrides) != 2:
        raise UsageError(
            "`strop config diff` takes two run folders or YAML files: strop config diff RUN_A RUN_B"
        )
    name_a, name_b = args.overrides
    a, b = settings_of(Path(name_a)), settings_of(Path(name_b))
    differ = {key: [a[key], b[key]] for key in a if key in b and a[key] != b[key]}
    only_a = {key: value for key, value in a.items() if key not in b}
    only_b = {key: value for key, value in b.items() if key not in a}
    if args.json:
        print_json({"differ": differ, "only_a": only_a, "only_b": only_b})
    else:
        for key, (left, right) in differ.items():
            print_plain(plain(f"{key}: {_shown(left)} and {_shown(right)}", is_one_line=True))
        for name, only in ((name_a, only_a), (name_b, only_b)):
            for key, value in only.items():
                print_plain(plain(f"{key}: {_shown(value)}, only in {name}", is_one_line=True))
        if not (differ or only_a or only_b):
            print_plain(f"equal: all {len(a)} settings")
    return 1 if differ or only_a or only_b else 0


def settings_of(path: Path) -> dict[str, Any]:
    """Full keys and values of a run's settings, or of a YAML file with its presets over the defaults. The entries of a
    free mapping are keys too.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    from strop.config import ConfigError, to_flat_dict
    from strop.config.layers import Layers
    from strop.config.load import source_layers
    from strop.config.sources import read_mapping
    from strop.trainer.config import Config

    if path.is_dir():
        file = path / "config.yaml"
        if not file.is_file():
            raise ConfigError(
                f"{path} is a folder without config.yaml, so it is no run; give a run or a YAML file"
            )
        return dict(_entries(read_mapping(file, str(file))))
    values = to_flat_dict(Config()) | Layers(Config, source_layers(str(path))).values
    # Keys of another version of strop are no settings here, and still a difference.
    values_in_file = read_mapping(path, str(path)) if path.is_file() else {}
    values |= {key: value for key, value in _entries(values_in_file) if _is_unknown(key)}
    return {inner: entry for key, value in values.items() for inner, entry in _entries({key: value})}


def _is_unknown(key: str) -> bool:
    from strop.config.schema import locate
    from strop.trainer.config import Config

    try:
        locate(Config, key)
    except ValueError:
        return key != "defaults"
    return False


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full keys, as they are called now, and values of nested mappings; an empty mapping has no entry."""
    from strop.config.schema import current_key

    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield current_key(f"{prefix}{name}"), value


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
