"""What the health rules look at, real runs write."""

from __future__ import annotations

import ast
import inspect
import re
from fnmatch import fnmatchcase
from pathlib import Path

from tiny_runs import Done, Project, train_in

from strop.observability.health import rules

NAMED = {name: value for name, value in vars(rules).items() if name.isupper() and isinstance(value, str)}
FAMILIES = {name for name, value in NAMED.items() if "{" in value}
WATCHED = sorted(value for name, value in NAMED.items() if name not in FAMILIES)
"""The metrics that the rules look at."""


def test_the_rules_take_every_name_from_its_declaration() -> None:
    nodes = list(ast.walk(ast.parse(inspect.getsource(rules))))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    assert not [text for text in texts if re.fullmatch(r"[\w-]+(/[\w@*-]+)+/?", str(text))]
    asked = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "of"}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in asked}
    assert not names & FAMILIES, "a family is no metric"
    assert names >= NAMED.keys() - FAMILIES, "each is looked at"
    assert len(WATCHED) > 20


def test_every_metric_of_a_rule_occurs_in_a_run(on_policy: Done, project: Project, tmp_path: Path) -> None:
    config = project.config(
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "trainer.max_steps=1", "data.val_files=[]",
        f"teacher.path='{project.model}'", "algorithm.distillation.kind=reverse_kl",
    )  # fmt: skip
    ahead = project.config("rollout.max_staleness=1", "trainer.max_steps=1", "data.val_files=[]")
    runs = [on_policy, train_in(tmp_path / "run", config), train_in(tmp_path / "ahead", ahead)]
    written = {name for run in runs for numbers in run.steps for name in numbers}
    assert not [name for name in WATCHED if not any(fnmatchcase(one, name) for one in written)]
