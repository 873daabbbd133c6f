"""The surface of strop as text: settings, help, presets, public names and metrics.

    python tests/snapshots/surface.py                   writes the files beside this one anew
    python tests/snapshots/surface.py FOLDER            writes settings and help there
    python tests/snapshots/surface.py FOLDER --metrics  writes the metrics of runs there

A change that is meant to change one of them brings the new file, and CHANGELOG says it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import strop
from strop.cli.main import COMMANDS, command_parser, main
from strop.config import load_layers
from strop.config.schema import tree
from strop.config.sources import preset_names
from strop.trainer.config import Config
from strop.utils.field_types import type_name

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_IMPORT = re.compile(r"^\s*from (strop[\w.]*) import (\([^)]*\)|[^\n#(]+)", re.MULTILINE)


def config_keys() -> str:
    """Every key in its order, with its type in words and its default."""
    lines = []
    for key, found in tree(Config).items():
        if found.is_section:
            lines.append(f"{key}:")
        else:
            lines.append(f"{key}: {type_name(found.hint)} = {found.default!r}")
    return "\n".join(lines) + "\n"


def config_show() -> str:
    """What `strop config show` prints without settings."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["config", "show"]) == 0
    return out.getvalue()


def presets() -> str:
    """The settings of each preset."""
    made: dict[str, dict[str, Any]] = {}
    for name in preset_names("algorithm"):
        made[f"algorithm={name}"] = load_layers(Config, overrides=[f"algorithm={name}"]).values
    for name in preset_names(""):
        made[name] = load_layers(Config, source=name).values
    return json.dumps(made, indent=1, default=str) + "\n"


def cli_help() -> str:
    """The help of every command, and of what it has below it."""
    os.environ["COLUMNS"] = "100"
    texts = []
    for name in COMMANDS:
        parser, _ = command_parser(name)
        texts += [f"$ {one.prog} --help\n{one.format_help()}" for one in _with_all_below(parser)]
    return "\n".join(texts)


def _with_all_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from _with_all_below(below)


def public_names() -> str:
    """Names that packages list, and those that pages and examples import; `module name` on each line."""
    found = set()
    packages = [module.name for module in pkgutil.walk_packages(strop.__path__, "strop.") if module.ispkg]
    for package in ("strop", *packages):
        found |= {(package, name) for name in getattr(importlib.import_module(package), "__all__", ())}
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.py")),
    ]
    for page in pages:
        for module, names in _IMPORT.findall(page.read_text(encoding="utf-8")):
            for name in names.strip("()").split(","):
                if word := name.strip().partition(" as ")[0].strip():
                    found.add((module, word))
    return "".join(f"{module} {name}\n" for module, name in sorted(found))


def metric_names() -> str:
    """Names in metrics.jsonl of a run of each kind."""
    sys.path[:0] = [str(HERE.parent / "trainer"), str(HERE.parent)]
    from tiny_runs import make_project, train_in

    from strop.cli.quickstart.task import write_task
    from strop.data.tiny_model import make_tiny_model
    from strop.trainer.sft.trainer import fine_tune
    from strop.trainer.start import start_run

    texts = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", seed=0)
        counts = {"num_train": 24, "num_val": 16, "num_sft": 24, "min_letters": 3, "max_letters": 3}
        project = make_project(folder, folder / "model", write_task(folder / "task", seed=0, **counts))
        kinds: dict[str, list[str]] = {
            "train": [],
            "train, PPO with a critic and KL": ["algorithm=ppo", "algorithm.use_kl_in_reward=true"],
            "train, one version ahead": ["rollout.max_staleness=1", "algorithm=tis"],
            "train, with dynamic sampling": ["algorithm.filter_groups.enable=true"],
        }
        for number, (kind, settings) in enumerate(kinds.items()):
            run = folder / f"run{number}"
            train_in(run, project.config("trainer.max_steps=2", "eval.every=1", *settings))
            texts.append(_names_of(kind, run))
        start = start_run(folder / "sft", project.config("sft.max_steps=2"), command=["strop", "sft"])
        with start.run:
            fine_tune(start.config, start.run, say=lambda line: None)
        texts.append(_names_of("sft", folder / "sft"))
    return "\n".join(texts)


def _names_of(kind: str, run: Path) -> str:
    names = set()
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        names |= json.loads(line).keys()
    return "".join(f"{line}\n" for line in (f"{kind}:", *(f"  {name}" for name in sorted(names))))


QUICK = {
    "config_keys.txt": config_keys,
    "config_show.yaml": config_show,
    "presets.json": presets,
    "cli_help.txt": cli_help,
}
METRICS, NAMES = {"metric_names.txt": metric_names}, {"public_names.txt": public_names}


if __name__ == "__main__":
    words = sys.argv[1:]
    folder = Path(words[0]) if words else HERE
    for file, text in (
        {**QUICK, **METRICS, **NAMES} if not words else METRICS if words[1:] else QUICK
    ).items():
        (folder / file).write_text(text(), encoding="utf-8")
