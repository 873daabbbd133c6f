"""The pages about algorithms: their commands work, and a user's file of docs/algorithms.md keeps every rule.

Every preset has a page in docs/algorithms/ with a curve; settings and metrics that those pages name exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, Session, code_spans

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.algorithms.registry import Registry, own_settings
from strop.algorithms.stream_functions import FILTERS, REWARD_SHAPINGS
from strop.config.sources import preset_names
from strop.data.curriculum import SAMPLERS

FOLDER = ROOT / "docs" / "algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
CURVE = re.compile(r"^<!-- curve: (\w+) -->\n```text\n", flags=re.MULTILINE)
"""What benchmarks/algorithm_curves.py puts the curve of a preset behind."""
OF_PRESETS = [page for page in PAGES if CURVE.search(page.read_text())]
HEADINGS = ["When", "Settings", "Details", "Metrics", "Curve"]
FAMILIES = (
    "actor",
    "critic",
    "rollout",
    "rollout_corr",
    "training",
    "reward_model",
    "response_length",
    "timing_s",
)
"""First parts of metric names."""
WITHOUT_CURVE = {"on_policy_distillation"}
"""Presets that the quickstart cannot run: they need a model of the user's."""
EXAMPLES = {"training/filter_groups/most_answers_were_cut"}
"""Metrics of functions that a page writes."""
METRIC_ROOMS = ("algorithms", "workers", "trainer")
"""Where metrics are named."""


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    registries: list[Registry[Any]] = [
        POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY, FILTERS, REWARD_SHAPINGS, SAMPLERS,
    ]  # fmt: skip
    held = [(one, dict(one), dict(one.declarations)) for one in registries]
    yield
    for registry, functions, declarations in held:
        registry.clear()
        registry.update(functions)
        registry.declarations.clear()
        registry.declarations.update(declarations)


@pytest.mark.parametrize(("name", "num_blocks"), [("algorithms.md", 5), ("papers.md", 1)])
def test_commands_of_the_algorithm_pages(tmp_path: Path, name: str, num_blocks: int) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / name) == num_blocks


# ------------------------------------------------------------------------------------- a page per algorithm


def test_every_preset_has_one_curve_on_one_page() -> None:
    curves = [name for page in PAGES for name in CURVE.findall(page.read_text())]
    assert sorted(curves) == sorted(set(preset_names("algorithm")) - WITHOUT_CURVE)


def test_every_preset_has_a_run_that_draws_its_curve() -> None:
    text = (ROOT / "benchmarks" / "algorithm_curves.py").read_text()
    assert sorted(re.findall(r'^    "(\w+)": [\[T]', text, flags=re.MULTILINE)) == sorted(
        set(preset_names("algorithm")) - WITHOUT_CURVE
    )


@pytest.mark.parametrize("page", OF_PRESETS, ids=lambda page: page.stem)
def test_a_page_of_a_preset_has_all_parts(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    for name in CURVE.findall(text):
        assert f"strop config show --resolved algorithm={name}" in text


@pytest.mark.parametrize("page", OF_PRESETS, ids=lambda page: page.stem)
def test_the_shown_values_of_a_preset_are_its_values(tmp_path: Path, page: Path) -> None:
    assert Session(folder=tmp_path).follow(page) == len(CURVE.findall(page.read_text()))


@pytest.mark.parametrize("page", [ROOT / "docs" / "algorithms.md", *PAGES], ids=lambda page: page.stem)
def test_named_settings_of_losses_and_estimators_exist(page: Path) -> None:
    for key, registry in (("loss_settings", POLICY_LOSS_REGISTRY), ("adv_settings", ADV_ESTIMATOR_REGISTRY)):
        named = re.findall(rf"algorithm\.{key}\.(\w+)", " ".join(code_spans(page)))
        known = {
            setting
            for name in registry
            for setting in own_settings(registry[name], registry.declaration(name))
        }
        assert set(named) <= known


@pytest.mark.parametrize("page", [ROOT / "docs" / "algorithms.md", *PAGES], ids=lambda page: page.stem)
def test_named_metrics_are_emitted(page: Path) -> None:
    named = {
        span for span in code_spans(page) if re.fullmatch(rf"({'|'.join(FAMILIES)})(/[a-z0-9_]+)+", span)
    }
    assert not {metric for metric in named - EXAMPLES if not is_emitted(metric)}


def test_a_metric_that_nobody_emits_is_found() -> None:
    assert is_emitted("actor/pg_clipfrac")
    assert is_emitted("training/filter_groups/solved_by_every_sample")
    assert not is_emitted("actor/pg_clip_frac")
    assert not is_emitted("rollout_corr/rollout_is_median")


def is_emitted(metric: str) -> bool:
    """Whether a string of strop's is this name, or becomes it when its holes are filled with strings of strop's."""
    words, templates = strings()
    return metric in words or any(_fills(template, metric, words) for template in templates)


@cache
def strings() -> tuple[frozenset[str], tuple[tuple[str | None, ...], ...]]:
    """The strings in the source of those rooms, also with _ for what is no letter or digit, as causes become
    names; and the parts of its f-strings with a slash, None for a hole."""
    words: set[str] = set()
    templates: set[tuple[str | None, ...]] = set()
    for path in [path for room in METRIC_ROOMS for path in sorted((ROOT / "strop" / room).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
                if any("/" in (part or "") for part in parts):
                    templates.add(tuple(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                words |= {node.value, re.sub(r"[^0-9A-Za-z]+", "_", node.value)}
    return frozenset(words - {""}), tuple(templates)


def _fills(template: tuple[str | None, ...], text: str, words: frozenset[str]) -> bool:
    if not template:
        return not text
    first, rest = template[0], template[1:]
    if first is not None:
        return text.startswith(first) and _fills(rest, text[len(first) :], words)
    return any(text[:end] in words and _fills(rest, text[end:], words) for end in range(1, len(text) + 1))
