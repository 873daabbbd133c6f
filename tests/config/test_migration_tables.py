"""All tables: every known setting has one row, and every row answers with keys that exist or with a reason."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from known_keys import TRL, VERL, VERL_SFT, names

from strop.config.migration.found import Found
from strop.config.migration.outcomes import ACCOUNTED, Facts, Rule, UnreadableError
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, apply_table, find_rule, make_table, under
from strop.config.migration.trl import tables as trl_tables
from strop.config.migration.trl.batches import DEFAULTS as TRL_DEFAULTS
from strop.config.migration.verl import TABLE as VERL_TABLE
from strop.config.migration.verl.facts import DEFAULTS as VERL_DEFAULTS
from strop.config.migration.verl.facts import A
from strop.config.migration.verl.sft import DEFAULTS as SFT_DEFAULTS
from strop.config.migration.verl.sft import TABLE as SFT_TABLE
from strop.config.schema import locate
from strop.trainer.config import Config

TABLES: dict[str, Mapping[str, Rule]] = {
    "verl": VERL_TABLE,
    "verl-sft": SFT_TABLE,
    **{kind: trl_tables(kind) for kind in ("GRPO", "RLOO", "SFT")},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "verl": VERL_DEFAULTS,
    "verl-sft": SFT_DEFAULTS,
    **{
        kind: {
            "processes": 1,
            **{f"{kind}Config.{name}": value for name, value in TRL_DEFAULTS[kind].items()},
        }
        for kind in TRL_DEFAULTS
    },
}
KNOWN: dict[str, dict[str, str]] = {
    "verl": VERL,
    "verl-sft": VERL_SFT,
    **{kind: {f"{kind}Config": TRL[f"{kind}Config"]} for kind in ("GRPO", "RLOO", "SFT")},
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"algorithm.adv_estimator": "grpo", f"{A}.use_kl_loss": True, "reward_model.enable": True},
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
)  # fmt: skip


@functools.cache
def is_ours(key: str) -> bool:
    locate(Config, key)  # a ValueError names the nearest key
    return True


def answers(table: Mapping[str, Rule], defaults: dict[str, Any], key: str) -> Iterator[tuple[Any, Any]]:
    """What a row answers to values of many kinds; values that it cannot read are left out."""
    for given in SETTINGS:
        for value in VALUES:
            facts = Facts({**given, key: value}, defaults)
            try:
                yield value, table[key](key, value, facts)
            except (UnreadableError, TypeError):
                continue


@pytest.mark.parametrize("name", TABLES)
def test_every_known_setting_has_a_row(name: str) -> None:
    assert [key for key in names(KNOWN[name]) if find_rule(TABLES[name], key) is None] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_answer_is_a_key_that_exists_or_a_reason(name: str) -> None:
    for key in TABLES[name]:
        if key.endswith(("reward_funcs", "processes")) or "*" in key:
            continue
        for value, outcome in answers(TABLES[name], DEFAULTS[name], key):
            assert outcome.status in ACCOUNTED, (key, value)
            assert outcome.ours or outcome.note, (key, value)
            assert all(is_ours(ours) for ours in outcome.ours), key


@pytest.mark.parametrize("name", TABLES)
def test_every_target_of_a_plain_row_exists(name: str) -> None:
    targets = {rule.key for rule in TABLES[name].values() if isinstance(rule, To)}
    assert len(targets) > 15
    assert all(is_ours(key) for key in targets)


@pytest.mark.parametrize("name", TABLES)
def test_every_refusal_says_what_to_do_or_what_is_done(name: str) -> None:
    for key, rule in TABLES[name].items():
        if isinstance(rule, Refused):
            assert len(rule.why.split()) > 4, key
        if isinstance(rule, Unless):
            assert len(rule.why_refused.split()) > 2, key


def test_a_key_with_two_rows_is_an_error() -> None:
    entry = Entry("n", NotNeeded("one"))
    assert list(make_table(under("a", entry), under("b", entry))) == ["a.n", "b.n"]
    with pytest.raises(ValueError, match=r"the key a\.n has two rows"):
        make_table(under("a", entry, entry))


def test_a_rows_own_key_comes_before_its_name_and_its_section() -> None:
    rules = {key: NotNeeded(key) for key in ("a.b.c", "*.c", "a.*", "a.b.*")}
    assert [find_rule(rules, key) for key in ("a.b.c", "x.c", "a.b.d", "a.e", "q")] == [
        rules["a.b.c"], rules["*.c"], rules["a.b.*"], rules["a.*"], None,
    ]  # fmt: skip


def test_a_default_is_written_out_only_where_nothing_is_given() -> None:
    table = make_table((Entry("n", To("a.n")), Entry("m", To("a.m"))))
    found = [Found(key="n", value=2, place="here")]
    migration = apply_table(found, table, {"n": 1, "m": 3}, write_out=["n", "m"])
    assert migration.values == {"a": {"n": 2, "m": 3}}
    assert [row.place for row in migration.rows] == ["default", "here"]
