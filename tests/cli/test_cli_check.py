"""`strop check`: a user's loss or estimator before it trains anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_calls import Result, cli

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY

HEAD = """\
import torch
from strop.algorithms.advantages import register_adv_est
from strop.algorithms.verl_aggregation import agg_loss
from strop.algorithms.losses import PolicyLossTerms, register_policy_loss
"""
# In verl's convention, with a place for a bug.
LOSS = (
    HEAD
    + """
@register_policy_loss("soft")
def soft_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
              rollout_is_weights=None):
    ratio = torch.exp((log_prob - old_log_prob).clamp(-20, 20))
    losses = {losses}
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = {reduced}
    return loss, {{"actor/mean_ratio": ratio.detach().mean().item()}}
"""
)
GOOD = {
    "losses": "-advantages * torch.tanh(ratio - 1)",
    "reduced": "agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)",
}
ESTIMATOR = (
    HEAD
    + """
@register_adv_est("centered", needs=["rewards", "group_ids", "response_mask"], group_relative=True)
def centered_advantages(*, rewards, group_ids, response_mask, scale=1.0):
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        advantages[members] = {centered}
    advantages = scale * advantages[:, None] * {mask}
    return advantages, advantages

def spread(rewards, response_mask):
    advantages = rewards[:, None] * response_mask
    return advantages, advantages
"""
)
CENTERED = {"centered": "rewards[members] - rewards[members].median()", "mask": "response_mask"}


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    held = [
        (one, dict(one), dict(one.declarations)) for one in (POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY)
    ]
    yield
    for registry, functions, declarations in held:
        registry.clear()
        registry.update(functions)
        registry.declarations.clear()
        registry.declarations.update(declarations)


def check(tmp_path: Path, kind: str, text: str, name: str, *words: str) -> Result:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return cli("check", kind, f"{file}:{name}", *words)


@pytest.mark.parametrize("name", ["soft", "soft_loss"])
def test_a_loss_without_a_bug_keeps_every_rule(tmp_path: Path, name: str) -> None:
    result = check(tmp_path, "loss", LOSS.format(**GOOD), name)
    assert (result.code, result.out) == (0, f"loss {tmp_path / 'mine.py'}:{name} keeps every rule\n")


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ({"losses": "advantages * torch.tanh(ratio - 1)"}, "on-policy"),
        ({"reduced": "losses.mean()"}, "outside the mask"),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, bug: dict[str, str], rule: str) -> None:
    result = check(tmp_path, "loss", LOSS.format(**{**GOOD, **bug}), "soft")
    assert result.code == 1
    *found, last = result.out.splitlines()
    assert rule in {line.partition(":")[0] for line in found}, result.out
    assert f"mine.py:soft breaks {len(found)} rule" in last


def test_findings_as_json(tmp_path: Path) -> None:
    bug = {"losses": "advantages * torch.tanh(ratio - 1)"}
    result = check(tmp_path, "loss", LOSS.format(**{**GOOD, **bug}), "soft", "--json")
    assert (result.code, result.record["kind"], result.record["passed"]) == (1, "loss", False)
    assert "on-policy" in {finding["rule"] for finding in result.record["findings"]}
    assert all(finding["sentence"] for finding in result.record["findings"])


def test_a_function_that_fails_is_a_finding_with_its_line(tmp_path: Path) -> None:
    # What raises is a function of torch in Python; the line is that of the user who called it.
    broken = {**GOOD, "losses": "-advantages * torch.nn.functional.softmax(ratio, dim=7)"}
    result = check(tmp_path, "loss", LOSS.format(**broken), "soft")
    assert result.code == 1
    assert "it runs: " in result.out
    assert "IndexError" in result.out
    assert "mine.py, line 10)" in result.out


def test_an_estimator_and_its_bugs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("good", "raw", "unmasked")]
    for folder in folders:
        folder.mkdir()
    good = check(folders[0], "estimator", ESTIMATOR.format(**CENTERED), "centered")
    assert good.code == 0, good.out
    ADV_ESTIMATOR_REGISTRY.pop("centered")
    raw = check(
        folders[1], "estimator", ESTIMATOR.format(**{**CENTERED, "centered": "rewards[members]"}), "centered"
    )
    assert raw.code == 1
    assert "a group of one has advantage 0: centered: the only sample of a prompt" in raw.out
    ADV_ESTIMATOR_REGISTRY.pop("centered")
    wide = {**CENTERED, "mask": "torch.ones_like(response_mask)"}
    unmasked = check(folders[2], "estimator", ESTIMATOR.format(**wide), "centered")
    assert unmasked.code == 1
    assert "zero outside the mask: centered: a token outside the mask" in unmasked.out


def test_settings_reach_the_function_or_are_refused(tmp_path: Path) -> None:
    flipped = check(tmp_path, "estimator", ESTIMATOR.format(**CENTERED), "centered", "scale=-1.0")
    assert flipped.code == 1
    assert "a higher reward has the higher advantage" in flipped.out
    mine = f"{tmp_path / 'mine.py'}"
    assert (
        "has no setting 'scael'; did you mean 'scale'?"
        in cli("check", "estimator", f"{mine}:centered", "scael=1").sentence
    )
    assert (
        "has no setting 'scale'; its parameters are"
        in cli("check", "estimator", f"{mine}:spread", "scale=1").sentence
    )
    assert cli("check", "estimator", f"{mine}:spread").code == 0
    assert "is no setting of a function" in cli("check", "loss", "sapo", "algorithm.tau_pos=1").sentence
    assert "policy loss 'sapo' has no setting 'tau'" in cli("check", "loss", "sapo", "tau=1").sentence


def test_functions_that_come_with_strop_are_checked_by_name() -> None:
    assert cli("check", "loss", "vanilla").out == "loss vanilla keeps every rule\n"
    assert cli("check", "loss", "gspo", "clip_low=0.03", "clip_high=0.04").code == 0
    assert cli("check", "estimator", "rloo", "--json").record == {
        "kind": "estimator", "name": "rloo", "passed": True, "findings": [],
    }  # fmt: skip


def test_what_cannot_be_checked_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS.format(**GOOD))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    mine = f"{tmp_path / 'mine.py'}"
    assert "has no function 'sofd'; it has soft, soft_loss" in cli("check", "loss", f"{mine}:sofd").sentence
    assert f"names no function; write {mine}:NAME" in cli("check", "loss", mine).sentence
    assert "is no file" in cli("check", "loss", f"{tmp_path / 'none.py'}:f").sentence
    assert (
        "cannot be imported: ModuleNotFoundError"
        in cli("check", "loss", f"{tmp_path / 'broken.py'}:f").sentence
    )
    assert "unknown policy loss 'vanila'; known: cispo" in cli("check", "loss", "vanila").sentence
    assert "does not know 'los'; did you mean loss?" in cli("check", "los", "vanilla").sentence
    assert "`strop check loss` needs a function" in cli("check", "loss").sentence
    assert "name what to check: --config FILE, loss FILE.py:NAME" in cli("check").sentence


def test_a_run_is_named_as_for_every_other_command(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: here}\n")
    named, first = (cli("check", *words, "actor.lrr=1").sentence for words in (("--config", file), (file,)))
    assert named == first
    assert "unknown key actor.lrr" in named
    assert "unknown key actor.ppo_epochs" in cli("check", "--config", file, "actor.ppo_epochs=1").sentence
