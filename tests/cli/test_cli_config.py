"""`strop config`: what a key means, where a value comes from, where two runs differ."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from cli_calls import cli
from docs.doc_pages import ROOT

from strop.algorithms.specs import ADV_DECLARATIONS, LOSS_DECLARATIONS
from strop.cli.explain.explain import PACKAGE_KEYS
from strop.config import describe, explain, load_config, read_config
from strop.data.curriculum import SAMPLERS
from strop.trainer.config import Config

DAPO = ["algorithm=dapo", "trainer.max_steps=5", "data.max_response_tokens=8192"]


# --------------------------------------------------------------------------------------------- explain


def test_explain_says_what_a_key_is() -> None:
    lines = cli("config", "explain", "algorithm.clip_ratio_high").out.splitlines()
    assert lines[:4] == [
        "algorithm.clip_ratio_high",
        "  Upper clip range; not set: clip_ratio.",
        "  type: a finite number of at least 0 or null",
        "  default: null",
    ]
    text = " ".join(" ".join(lines).split())
    assert "algorithm=dapo: 0.28" in text
    assert "algorithm=gspo: 0.0004" in text


def test_explain_names_the_choices() -> None:
    assert "  choices: train, stop\n" in cli("config", "explain", "algorithm.filter_groups.at_limit").out
    assert "  choices: true, false\n" in cli("config", "explain", "algorithm.use_kl_loss").out
    assert "  default: true\n" in cli("config", "explain", "algorithm.norm_adv_by_std").out


def test_explain_lists_registered_functions_with_their_papers() -> None:
    losses = " ".join(cli("config", "explain", "algorithm.policy_loss").out.split())
    assert "cispo: REINFORCE under a clipped importance weight" in losses
    assert "Zheng et al. 2025, arXiv:2507.18071" in losses
    estimators = " ".join(cli("config", "explain", "algorithm.adv_estimator").out.split())
    assert "Shao et al. 2024, arXiv:2402.03300" in estimators
    settings = cli("config", "explain", "algorithm.loss_settings").out
    assert "    sapo: tau_pos=1.0, tau_neg=1.05\n" in settings
    entry = cli("config", "explain", "algorithm.loss_settings.tau_pos")
    assert (entry.code, entry.out) == (0, settings), "an entry is explained with its mapping"


def test_explain_of_a_key_without_built_in_functions_lists_none() -> None:
    assert cli("config", "explain", "algorithm.filter_groups.filter", "--json").record["functions"] == []


def test_explain_lists_every_function_with_its_summary() -> None:
    for key, table in (
        ("algorithm.adv_estimator", ADV_DECLARATIONS),
        ("algorithm.policy_loss", LOSS_DECLARATIONS),
    ):
        functions = cli("config", "explain", key, "--json").record["functions"]
        assert [one["name"] for one in functions] == sorted(table)
        assert all(one["summary"] for one in functions)


def test_explain_lists_what_installed_packages_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
    groups = dict(re.findall(r"(?m)^\| `(strop\.\w+)` \| `[^`]+` \| `([\w.]+)`", page))
    assert {key: group for group, key in groups.items()} == PACKAGE_KEYS
    entries = (EntryPoint("far", "far_package", "?"), EntryPoint("far", "another", "?"))
    monkeypatch.setattr("strop.cli.explain.explain.packaged", lambda group: {"far": entries} if group else {})
    for key in PACKAGE_KEYS:
        explained = cli("config", "explain", key)
        assert "    far: of the installed packages another, far_package\n" in explained.out
    names = [
        function["name"]
        for function in cli("config", "explain", "data.sampler", "--json").record["functions"]
    ]
    assert names == sorted(["far", *SAMPLERS])
    assert "far" not in cli("config", "explain", "algorithm.adv_settings").out


def test_explain_of_a_section_lists_its_keys_and_presets() -> None:
    record = cli("config", "explain", "algorithm.kl_ctrl", "--json").record
    assert record["type"] == "section"
    assert [doc["key"].rpartition(".")[2] for doc in record["below"]] == [
        "type",
        "kl_coef",
        "horizon",
        "target_kl",
    ]
    assert record["presets"] == {
        "algorithm=rloo": {"algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.03}
    }
    assert (
        "    algorithm.kl_ctrl.kl_coef    0.001: The coefficient"
        in cli("config", "explain", "algorithm.kl_ctrl").out
    )


def test_explain_of_an_unknown_key_names_the_nearest() -> None:
    sentence = cli("config", "explain", "algorithm.clip_ratio_hihg").sentence
    assert sentence.endswith(
        "unknown key algorithm.clip_ratio_hihg; the nearest valid key is algorithm.clip_ratio_high"
    )
    assert "takes one key" in cli("config", "explain").sentence
    assert "takes one key" in cli("config", "explain", "trainer", "eval").sentence


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data.train_batch_size=4", "it is verl's, here data.prompts_per_step (`strop migrate verl`"),
        ("actor_rollout_ref.rollout.n=4", "it is verl's, here rollout.samples_per_prompt"),
        ("trainer.test_freq=4", "it is verl's, here eval.every"),
        (
            "actor.optim.learning_rate=1e-4",
            "learning_rate is TRL's, here actor.optim.lr (`strop migrate trl`",
        ),
        ("num_generations=4", "num_generations is TRL's, here rollout.samples_per_prompt"),
        ("run.seed=4", "the nearest valid key is trainer.seed"),
        (
            "lr=4",
            "the keys of this name are actor.optim.lr, prefer.optim.lr, critic.optim.lr, prm.optim.lr, sft.optim.lr",
        ),
        ("my.yaml", "'my.yaml' is not an override: give a file of settings with --config my.yaml"),
    ],
)
def test_keys_of_other_libraries_and_of_other_places_are_known(word: str, sentence: str) -> None:
    assert sentence in cli("config", "show", word).sentence


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("algorithm.filter_groups.max_rounds", "FilterGroupsConfig"),
        ("trainer.seed", "strop.trainer.sections.TrainerConfig"),
        ("eval.every", "strop.trainer.sections.EvalConfig"),
    ],
)
def test_explain_names_the_class_that_has_a_key(key: str, owner: str) -> None:
    assert explain(Config, key).defined_in.endswith(owner)
    assert (
        f"  defined in: {explain(Config, key).defined_in}" in cli("config", "explain", key).out.splitlines()
    )


@pytest.mark.parametrize("doc", [doc for doc in describe(Config) if doc.key.startswith("algorithm.")][::15])
def test_every_key_can_be_explained(doc: object) -> None:
    key = getattr(doc, "key")  # noqa: B009
    assert explain(Config, key).key == key


# ------------------------------------------------------------------------------------- show --resolved


def test_resolved_says_where_each_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "trainer: {seed: 7}\ndata: {train_files: [a, b], prompt_key: 'two\n\n  lines'}\n"
    )
    result = cli("config", "show", "--resolved", "--config", tmp_path / "c.yaml", *DAPO)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert "  clip_ratio_high: 0.28  # preset algorithm/dapo" in lines
    assert f"  seed: 7  # file {tmp_path / 'c.yaml'}" in lines
    assert "  max_steps: 5  # command line" in lines
    assert "  num_epochs: 1  # default" in lines
    place = lines.index(f"  train_files:  # file {tmp_path / 'c.yaml'}")
    assert lines[place + 1 : place + 3] == ["  - a", "  - b"]
    # The comments are comments: the text is still the configuration.
    (tmp_path / "shown.yaml").write_text(result.out)
    expected = load_config(Config, source=tmp_path / "c.yaml", overrides=DAPO)
    assert read_config(Config, tmp_path / "shown.yaml") == expected


def test_resolved_as_json() -> None:
    record = cli("config", "show", "--resolved", "--json", *DAPO).record
    assert record["reward.overlong_buffer"] == {"value": 4096, "origin": "preset algorithm/dapo"}
    assert record["trainer.seed"] == {"value": 0, "origin": "default"}


def test_options_that_do_not_belong_are_refused() -> None:
    assert (
        "--docs and --resolved do not go together" in cli("config", "show", "--docs", "--resolved").sentence
    )
    assert (
        "--resolved belongs to `strop config show`"
        in cli("config", "explain", "trainer", "--resolved").sentence
    )


# ------------------------------------------------------------------------------------------------ diff


def test_diff_prints_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {seed: 1}\nreward: {kwargs: {strict: true}}\nold_key: 5\n")
    (tmp_path / "b.yaml").write_text("trainer: {num_epochs: 1, seed: 2}\ndefaults: [algorithm: gspo]\n")
    result = cli("config", "diff", tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert result.code == 1
    assert result.out.splitlines() == [
        'algorithm.policy_loss: "vanilla" and "gspo"',
        "algorithm.clip_ratio_low: null and 0.0003",
        "algorithm.clip_ratio_high: null and 0.0004",
        'algorithm.loss_agg_mode: null and "seq-mean-token-mean"',
        "trainer.seed: 1 and 2",
        f"reward.kwargs.strict: true, only in {tmp_path / 'a.yaml'}",
        f"old_key: 5, only in {tmp_path / 'a.yaml'}",
    ]


def test_diff_of_runs_and_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(cli("config", "show", "trainer.seed=4").out)
    equal = cli("config", "diff", tmp_path / "first", tmp_path / "second")
    assert equal.code == 0
    assert equal.out.startswith("equal: all ")
    values = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    del values["trainer"]["num_epochs"]  # a run of a version that does not have this key
    (tmp_path / "second" / "config.yaml").write_text(yaml.safe_dump(values))
    record = cli("config", "diff", tmp_path / "first", tmp_path / "second", "--json").record
    assert record == {"differ": {}, "only_a": {"trainer.num_epochs": 1}, "only_b": {}}
    (tmp_path / "third.yaml").write_text("trainer: {seed: 4}\n")
    assert cli("config", "diff", tmp_path / "first", tmp_path / "third.yaml").code == 0


def test_diff_needs_two_that_exist(tmp_path: Path) -> None:
    assert "takes two run folders or YAML files" in cli("config", "diff", "one").sentence
    (tmp_path / "a.yaml").write_text("")
    assert (
        "none.yaml does not exist"
        in cli("config", "diff", tmp_path / "a.yaml", tmp_path / "none.yaml").sentence
    )
    assert "without config.yaml, so it is no run" in cli("config", "diff", tmp_path, tmp_path).sentence
