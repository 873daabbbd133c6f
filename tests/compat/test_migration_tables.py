"""All tables: every known setting has one row, and every row answers with keys that exist or with a reason."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from known_keys import OPENRLHF, OPENRLHF_DOTTED, TRL, VERL, VERL_SFT, names

from strop.compat.migrate.openrlhf import openrlhf_table
from strop.compat.migrate.openrlhf_names import names_of, with_names_of_rows
from strop.compat.migrate.result import ACCOUNTED, Facts, UnreadableError
from strop.compat.migrate.rules import rule_of
from strop.compat.migrate.source import Found
from strop.compat.migrate.tables import Table, apply_table
from strop.compat.migrate.trl import KINDS, trl_table
from strop.compat.migrate.verl import A, R, verl_sft_table, verl_table
from strop.config.schema import locate
from strop.trainer.config import Config

TABLES: dict[str, Table] = {
    "verl": verl_table(),
    "verl-sft": verl_sft_table(),
    **{kind: trl_table(kind) for kind in KINDS},
    "openrlhf": openrlhf_table(),
    **{f"openrlhf-{name}": openrlhf_table(f"train_{name}") for name in ("sft", "dpo", "kto", "rm")},
}
KNOWN: dict[str, dict[str, str]] = {
    "verl": VERL,
    "verl-sft": VERL_SFT,
    **{kind: {f"{kind}Config": TRL[f"{kind}Config"]} for kind in KINDS},
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"algorithm.adv_estimator": "grpo", f"{A}.use_kl_loss": True, "reward_model.enable": True},
    {
        "lora_rank": 8,
        "eval_dataset": "a",
        "kl_target": 6,
        "use_dynamic_batch": True,
        "dynamic_filtering": True,
    },
    {
        "sandbox_fusion.url": "http://localhost",
        f"{A}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{R}.multi_turn.tool_config_path": "tools.yaml",
        f"{R}.multi_turn.interaction_config_path": "users.yaml",
    },
    {"program": "main_prime", "reward_model.enable": True, "data.filter_truncate": True},
    {
        "algorithm.adv_estimator": "gigpo",
        "env.env_name": "Sokoban",
        "algorithm.gigpo.enable_similarity": True,
    },
    {"advantage_estimator": "group_norm", "use_kl_loss": True, "output_key": "o", "label_key": "l"},
    {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True, "reward.reward_model.enable": True},
    {
        f"{A}.policy_loss.loss_mode": "sapo",
        "algorithm.filter_groups.enable": True,
        f"{A}.use_dynamic_bsz": True,
    },
)
"""What turns the rows of optional parts on."""
VALUES: tuple[Any, ...] = (
    None, True, False, 1, 0.5, -1, "x", "token", "adamw", "no", "steps", "linear", "sequence", ["a"], {}, "0.5_2.0",
    [0.9, 0.95], "kl", "cpu", "acc", "bf16", "seq-mean-token-sum-norm", "token-mean",
)  # fmt: skip


@functools.cache
def is_ours(key: str) -> bool:
    locate(Config, key)  # a ValueError names the nearest key
    return True


def answers(table: Table, key: str) -> Iterator[tuple[Any, Any]]:
    """What a row answers to values of many kinds; values that it cannot read are left out."""
    for given in SETTINGS:
        for value in VALUES:
            facts = Facts({**given, key: value}, table.defaults)
            try:
                yield value, table.rules[key](key, value, facts)
            except (UnreadableError, TypeError):
                continue


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_setting_has_a_row(name: str) -> None:
    assert [key for key in names(KNOWN[name]) if TABLES[name].find(key) is None] == []


def flags_without_a_row(program: str, flags: str) -> list[str]:
    found = [Found(key=flag, value="", place="run.sh, line 1") for flag in flags.split()]
    renamed = with_names_of_rows(found, program)
    return [one.written or one.key for one in renamed if openrlhf_table(program).find(one.key) is None]


@pytest.mark.parametrize("name", OPENRLHF)
def test_every_known_flag_has_a_row(name: str) -> None:
    program = "train_ppo_ray" if name == "train" else f"train_{name}"
    assert flags_without_a_row(program, OPENRLHF[name]) == []


@pytest.mark.parametrize("program", OPENRLHF_DOTTED)
def test_every_flag_with_dots_has_the_row_of_its_older_name_or_one_of_its_own(program: str) -> None:
    assert flags_without_a_row(program, OPENRLHF_DOTTED[program]) == []
    known = {flag for flags in (*OPENRLHF_DOTTED.values(), *OPENRLHF.values()) for flag in flags.split()}
    assert names_of(program).before.keys() - known == set(), "names that there are not"


@pytest.mark.parametrize("name", TABLES)
def test_every_answer_is_a_key_that_exists_or_a_reason(name: str) -> None:
    for key in TABLES[name].rules:
        if key.endswith(("reward_funcs", "processes")) or "*" in key:
            continue
        for value, outcome in answers(TABLES[name], key):
            assert outcome.status in ACCOUNTED, (key, value)
            assert outcome.ours or outcome.note, (key, value)
            assert all(is_ours(ours) for ours in outcome.ours), key


@pytest.mark.parametrize("name", TABLES)
def test_every_target_of_a_plain_row_exists(name: str) -> None:
    targets = {row["to"] for row in TABLES[name].rows.values() if "to" in row}
    assert len(targets) > 15
    assert all(is_ours(key) for key in targets)


@pytest.mark.parametrize("name", TABLES)
def test_every_refusal_says_what_to_do_or_what_is_done(name: str) -> None:
    for key, row in TABLES[name].rows.items():
        if "refused" in row:
            assert len(row["refused"].split()) > 4, key
        if "refuse" in row:
            assert len(row["refuse"].split()) > 2, key


@pytest.mark.parametrize("name", TABLES)
def test_no_word_in_braces_is_left_in_a_row(name: str) -> None:
    left = {key: row for key, row in TABLES[name].rows.items() if "{" in key or re.search(r"{\w+}", str(row))}
    assert left == {}


def one_row_table(**rows: Any) -> Table:
    rules = {key: rule_of(row, {}) for key, row in rows.items()}
    return Table(rows=rows, rules=rules, defaults={}, written_out=())


def answer(row: dict[str, Any], value: Any, **facts: Any) -> tuple[str, dict[str, Any], str]:
    outcome = rule_of(row, {"is_on": lambda all_facts: all_facts.get("on") is True})(
        "a.b", value, Facts(facts, {})
    )
    return outcome.status, dict(outcome.ours), outcome.note


CASES = {"cases": {"null none": {"not_needed": "e"}, "0": {"refused": "r"}}, "otherwise": {"to": "x"}}


@pytest.mark.parametrize(
    ("row", "value", "expected"),
    [
        ({"to": "x.y"}, 3, ("translated", {"x.y": 3}, "")),
        ({"to": "x", "as": "integer", "note": "n"}, 3.0, ("translated", {"x": 3}, "n")),
        ({"to": "x", "optional": True}, "", ("not needed", {}, "not set")),
        ({"to": "x", "as": "never_below_zero"}, -1, ("translated", {"x": 0}, "")),
        ({"to": "x", "as": "list"}, "a", ("translated", {"x": ["a"]}, "")),
        ({"to": "x", "as": "unless_empty"}, {}, ("not needed", {}, "empty there too")),
        (
            {"to": "x", "choice": {"true": "t", "A": "a"}, "instead": "use A"},
            True,
            ("translated", {"x": "t"}, ""),
        ),
        (
            {"to": "x", "choice": ["A"], "instead": "use A"},
            "B",
            ("refused", {}, "strop does not have it; use A"),
        ),
        ({"not_needed": "n"}, 1, ("not needed", {}, "n")),
        ({"not_there": "n"}, 1, ("not there", {}, "n")),
        ({"refused": "n"}, 1, ("refused", {}, "n")),
        ({"noted": "n"}, 1, ("translated", {}, "n")),
        ({"unless": [1], "refuse": "r", "else": "e"}, 1, ("not needed", {}, "e")),
        ({"unless": [1], "refuse": "r", "else": "e"}, None, ("not needed", {}, "e")),
        ({"unless": [1], "refuse": "r", "else": "e"}, True, ("refused", {}, "r")),
        ({"when_true": {"x": 1}, "else": "e"}, True, ("translated", {"x": 1}, "")),
        ({"when_true": {"x": 1}, "else": "e"}, "yes", ("not needed", {}, "e")),
        ({"below": "x", "section": "a"}, 5, ("translated", {"x.b": 5}, "")),
        (
            {"sets": {"x": ["<value>"], "y": True}, "as": "integer", "note": "n"},
            3.0,
            ("translated", {"x": [3], "y": True}, "n"),
        ),
        *(
            (CASES, value, expected)
            for value, expected in [
                (None, ("not needed", {}, "e")),
                ("none", ("not needed", {}, "e")),
                (0.0, ("refused", {}, "r")),
                (False, ("translated", {"x": False}, "")),
                (1, ("translated", {"x": 1}, "")),
                ([0], ("translated", {"x": [0]}, "")),
            ]
        ),
        ({"to": "x", "only_if": ["is_on", "off"]}, 5, ("not needed", {}, "off")),
        ({"to": "x", "only_if": ["other", "off"]}, 5, ("not needed", {}, "off")),
    ],
)
def test_what_each_rule_answers(
    row: dict[str, Any], value: Any, expected: tuple[str, dict[str, Any], str]
) -> None:
    assert answer(row, value) == expected


def test_a_condition_is_a_function_or_a_key_that_is_set() -> None:
    row = {"to": "x", "only_if": ["is_on", "off"]}
    assert answer(row, 5, on=True)[0] == "translated"
    by_value = {"to": "x", "only_if": ["kind=b", "off"]}
    assert [answer(by_value, 5, kind=kind)[0] for kind in ("b", "a", None)] == [
        "translated", "not needed", "not needed",
    ]  # fmt: skip
    both = {"to": "x", "only_if": ["url", "first", "kind=b", "second"]}
    assert [answer(both, 5, url=url, kind=kind)[2] for url, kind in (("", "a"), ("u", "a"), ("u", "b"))] == [
        "first", "second", "",
    ]  # fmt: skip
    by_key = {"to": "x", "only_if": ["url", "off"]}
    assert [answer(by_key, 5, url=url)[0] for url in ("http", "", False)] == [
        "translated", "not needed", "not needed",
    ]  # fmt: skip


def test_a_row_of_no_kind_or_of_two_is_an_error() -> None:
    for row in ({"note": "n"}, {"to": "x", "refused": "r"}):
        with pytest.raises(ValueError, match="must have one of to, not_needed"):
            rule_of(row, {})


def test_a_rows_own_key_comes_before_its_name_and_its_section() -> None:
    table = one_row_table(**{key: {"not_needed": key} for key in ("a.b.c", "*.c", "a.*", "a.b.*")})
    found = [table.find(key) for key in ("a.b.c", "x.c", "a.b.d", "a.e", "q")]
    assert [rule and rule("", None, Facts({}, {})).note for rule in found] == [
        "a.b.c", "*.c", "a.b.*", "a.*", None,
    ]  # fmt: skip


def test_a_default_is_written_out_only_where_nothing_is_given() -> None:
    table = one_row_table(n={"to": "a.n"}, m={"to": "a.m"})
    found = [Found(key="n", value=2, place="here")]
    migration = apply_table(found, table, defaults={"n": 1, "m": 3}, write_out=["n", "m"])
    assert migration.values == {"a": {"n": 2, "m": 3}}
    assert [row.place for row in migration.rows] == ["default", "here"]
