"""The pages about algorithms: their commands work, and a user's file of docs/algorithms.md keeps every rule.

Every preset has a page in docs/algorithms/ with a curve; settings and metrics that those pages name exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, Session, code_spans, is_declared

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS, FunctionRegistry, own_settings
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
    "num_turns",
    "timing_s",
)
"""First parts of metric names."""
WITHOUT_CURVE = {"on_policy_distillation", "gigpo"}
"""Presets that the quickstart cannot run: they need a model or an environment of the user's."""
EXAMPLES = {"training/filter_groups/most_answers_were_cut"}
"""Metrics of functions that a page writes."""


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    functions: list[FunctionRegistry[Any]] = [
        POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY, FILTERS, REWARD_SHAPINGS,
    ]  # fmt: skip
    registries = [*functions, *(one.declarations for one in functions), SAMPLERS]
    held = [(one, dict(one)) for one in registries]
    yield
    for registry, known in held:
        registry.clear()
        registry.update(known)


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("algorithms.md", 5), ("papers.md", 1), ("algorithms/gigpo.md", 2)]
)
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
    assert not {metric for metric in named - EXAMPLES if not is_declared(metric)}


def test_a_metric_that_nobody_emits_is_found() -> None:
    assert is_declared("actor/pg_clipfrac")
    assert is_declared("training/filter_groups/solved_by_every_sample")
    assert not is_declared("actor/pg_clip_frac")
    assert not is_declared("rollout_corr/rollout_is_median")
