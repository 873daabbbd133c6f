"""The machinery of configuration: overrides over the dataclasses that live beside the code.

load.py is the way in: values come from sources.py (files, presets) and overrides.py (the command line), are
laid over each other in layers.py and become objects in build.py. save.py and describe.py are the ways out.
Knows no room of strop and imports no torch.
"""

from __future__ import annotations

from strop.config.describe import FieldDoc, describe
from strop.config.errors import ConfigError
from strop.config.load import load_config, read_config
from strop.config.save import changed_keys, save_config, to_dict
from strop.config.sources import preset_names

__all__ = [
    "ConfigError",
    "FieldDoc",
    "changed_keys",
    "describe",
    "load_config",
    "preset_names",
    "read_config",
    "save_config",
    "to_dict",
]
