"""The machinery of configuration: overrides over the dataclasses that live beside the code.

load.py is the way in: values come from sources.py (files, presets) and overrides.py (the command line), are
laid over each other in layers.py by the keys of schema.py, and become objects in build.py. unknown_key.py answers a
key that there is not. What fits a field, and the names of bounds, stand in strop.utils.field_types.
sections.py has the base of sections; wrong_values.py and places.py word the sentences about values that do not fit,
which errors.py collects; yaml_text.py reads and writes YAML, interpolation.py fills in `${...}`, and hydra_files.py
finds presets beside a file.
save.py is the way out, preset_difference.py what differs from a preset, difference.py what turns one configuration into
another; explanation.py explains one key, from docs.py.
Imports no other package of strop but utils, and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.build import build_config
from strop.config.errors import ConfigError
from strop.config.load import config_of, load_config, load_layers, read_config
from strop.config.save import save_config, to_dict, to_flat_dict
from strop.config.sources import preset_names, read_settings
from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.config.docs import FieldDoc, describe
    from strop.config.explanation import Explanation, explain
    from strop.config.preset_difference import deviations, preset_deviations

__all__ = [
    "ConfigError",
    "Explanation",
    "FieldDoc",
    "build_config",
    "config_of",
    "describe",
    "deviations",
    "explain",
    "load_config",
    "load_layers",
    "preset_deviations",
    "preset_names",
    "read_config",
    "read_settings",
    "save_config",
    "to_dict",
    "to_flat_dict",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.config.docs": "FieldDoc describe",
        "strop.config.preset_difference": "deviations preset_deviations",
        "strop.config.explanation": "Explanation explain",
    },
)
