"""Functions of a user's own on the stream of samples in whole runs: samplers, filters, reward shaping, estimators that
ask for columns; and every term of the loss that a setting switches on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS
from strop.config.errors import ConfigError
from strop.data.curriculum import SAMPLERS
from strop.data.visit_ids import parse_visit_uid
from strop.protocol import columns
from strop.run import RunFolder

OWN = """\
import torch

from strop.algorithms.advantages import register_adv_est
from strop.algorithms.group_functions import register_filter, register_reward_shaping
from strop.data import AbstractCurriculumSampler, register_sampler
from strop.protocol import columns


@register_sampler("best_first")
def best_first(rows, results, *, epoch, seed):
    return sorted(rows, key=lambda row: (-results[row].mean_score if row in results else 0.0, row))


@register_sampler("in_field_form")
class InFieldForm(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.size, self.total, self.epochs = len(data_source), 0.0, 0
        assert data_config.prompts_per_step == 4

    def __iter__(self):
        self.epochs += 1
        shift = int(1000 * self.total) % self.size
        return iter([(place + shift) % self.size for place in range(self.size)])

    def update(self, batch):
        assert len(batch) == len(batch.non_tensor_batch["index"]) == 16
        self.total += float(sum(row.sum() for row in columns.rows(batch.tensors()["token_level_scores"])))

    def state_dict(self):
        return {"total": self.total, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.total, self.epochs = state["total"], state["epochs"]


@register_filter("short_enough")
def short_enough(group):
    if max(group.response_lengths) > 4:
        return "an answer was cut"
    return group.accuracies[0] == 0


@register_filter("broken")
def broken(group):
    return None


@register_reward_shaping("brief")
def brief(rewards, response_lengths, max_response_tokens, *, price=0.5):
    return rewards - price * response_lengths / max_response_tokens


@register_reward_shaping("too_few")
def too_few(rewards):
    return rewards[:1]


@register_adv_est("own_ppo", needs=("values", "reward_baselines", "sum_pi_squared", "ref_log_prob"))
def own_ppo(token_level_rewards, response_mask, config=None, index=None, **kwargs):
    for name in ("values", "sum_pi_squared", "ref_log_prob"):
        assert kwargs[name].shape == response_mask.shape, name
    assert kwargs["reward_baselines"].shape == response_mask.shape[:1]
    returns = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return (returns - kwargs["values"]) * response_mask, returns
"""
SHORT = ["trainer.max_steps=2", "data.val_files=[]"]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """The override that loads a user's file; what it registers is forgotten afterwards."""
    registries = (ADV_ESTIMATOR_REGISTRY, FILTERS, REWARD_SHAPINGS, SAMPLERS)
    held = [(registry, set(registry)) for registry in registries]
    (tmp_path / "own.py").write_text(OWN)
    yield f"algorithm.extensions=['{tmp_path / 'own.py'}']"
    for registry, before in held:
        for name in set(registry) - before:
            del registry[name]  # type: ignore[attr-defined]


def visits(done: Done) -> list[tuple[int, int]]:
    return [parse_visit_uid(prompt.uid) for record in done.records for prompt in record.prompts]


@pytest.mark.slow
def test_a_sampler_of_the_users_own_orders_the_next_epoch_by_results_also_after_a_resume(
    project: Project, tmp_path: Path, own: str
) -> None:
    config = project.config(
        own, "data.sampler=best_first", "data.reorder_every=3", "data.val_files=[]", "run.save_every=1",
        "run.keep_last=99", "run.hf_model=never", "data.max_train_prompts=6", "trainer.max_steps=5",
    )  # fmt: skip
    whole = train_in(tmp_path / "whole", config)
    first, second = ([row for epoch, row in visits(whole) if epoch == number] for number in (0, 1))
    assert first == sorted(first)
    scores = {
        row: sum(r.score or 0.0 for r in reports) / len(reports)
        for record in whole.records[:1]
        for uid in {report.uid for report in record.reports}
        for reports in [[report for report in record.reports if report.uid == uid]]
        for row in [parse_visit_uid(uid)[1]]
    }
    # When the second epoch begins, in step 2, the rows of step 1 are scored; the others count as 0.
    assert second[:2] == sorted(first, key=lambda row: (-scores.get(row, 0.0), row))[:2]
    for step in (1, 3):
        again = resume_in(cut_after(whole.folder, tmp_path / f"cut{step}", step=step))
        assert [one.chain for one in again.chain] == [one.chain for one in whole.chain], step


@pytest.mark.slow
def test_a_sampler_class_in_the_fields_form_goes_on_after_a_resume(
    project: Project, tmp_path: Path, own: str
) -> None:
    config = project.config(
        own, "data.sampler=in_field_form", "data.val_files=[]", "run.save_every=2", "run.keep_last=99",
        "run.hf_model=never", "data.max_train_prompts=6", "trainer.max_steps=4",
    )  # fmt: skip
    whole = train_in(tmp_path / "whole", config)
    rows = [row for epoch, row in visits(whole) if epoch == 0]
    total = sum((report.score or 0.0) for report in whole.records[0].reports)
    shift = int(1000 * total) % 6
    assert [row for epoch, row in visits(whole) if epoch == 1][:1] == [sorted(rows)[shift]]
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=2))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]


def test_a_filter_of_the_users_own_leaves_groups_out_and_says_why(
    project: Project, tmp_path: Path, own: str
) -> None:
    settings = [
        own, "data.val_files=[]", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score",
        "rollout.samples_per_prompt=2", "trainer.max_steps=1",
    ]  # fmt: skip
    config = project.config(
        *settings, "algorithm.filter_groups.filter=short_enough", "algorithm.filter_groups.max_rounds=3"
    )
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=1)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(1)
    cut = [row for row in rows if row["fate_reason"] == "an answer was cut"]
    assert cut
    assert {row["fate"] for row in cut} == {"filtered"}
    assert done.steps[0]["training/filter_groups/an_answer_was_cut"] == len(cut)
    assert done.steps[0]["training/filter_groups/filter_short_enough"] == 0
    trained = [row for row in rows if row["fate"] == "trained"]
    assert all(len(row["response_ids"]) <= 4 for row in trained)
    with pytest.raises(ValueError, match=r"filter 'broken': .*broken returned None for prompt e0-\d+, but a"):
        train_in(tmp_path / "broken", project.config(*settings, "algorithm.filter_groups.filter=broken"))


def test_rewards_are_shaped_by_a_function_of_the_users_own(
    project: Project, tmp_path: Path, own: str
) -> None:
    config = project.config(
        own,
        *SHORT,
        "algorithm.reward_shaping=brief",
        "algorithm.shaping_settings.price=2",
        "reward.weight=3.0",
    )
    done = train_in(tmp_path / "run", config)
    batch, learned = done.records[0].fetched, done.records[0].learned
    assert batch is not None
    assert learned is not None
    for report, scores in zip(
        learned.batch.reports, columns.rows(batch.tensors()["token_level_scores"]), strict=True
    ):
        expected = 3.0 * (report.score or 0.0) - 2 * report.num_response_tokens / 5
        assert float(scores.sum()) == pytest.approx(expected, abs=1e-6)
        assert torch.count_nonzero(scores[:-1]) == 0, "on the last token alone"
    with pytest.raises(ValueError, match=r"too_few returned a Tensor of shape \[1\] for prompt .* 4 samples"):
        train_in(
            tmp_path / "few",
            project.config(own, *SHORT, "algorithm.reward_shaping=too_few"),
        )


def test_an_estimator_of_verls_convention_asks_for_columns(
    project: Project, tmp_path: Path, own: str
) -> None:
    config = project.config(own, *SHORT, "algorithm.adv_estimator=own_ppo")
    assert "critic" in config.roles
    assert config.uses_reference
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=2)
    assert done.steps[0]["critic/grad_norm"] > 0
    batch = done.records[0].fetched
    assert batch is not None
    tensors = batch.tensors()
    assert {"values", "reward_baselines", "sum_pi_squared", "ref_log_prob"} <= tensors.keys()
    mask = columns.flat(tensors["response_mask"])
    torch.testing.assert_close(
        columns.flat(tensors["advantages"])[mask],
        (columns.flat(tensors["returns"]) - columns.flat(tensors["values"]))[mask],
    )


def test_names_and_settings_that_nobody_knows_are_refused(project: Project, own: str) -> None:
    for words, sentence in {
        ("data.sampler=easy",): "unknown sampler 'easy'; known: best_first, easy_first",
        ("data.reorder_every=2",): "data.sampler=shuffled does not look at results",
        ("data.reorder_every=-1",): "data.reorder_every is -1, but it needs a whole number",
        ("algorithm.reward_shaping=briefly",): "unknown reward shaping 'briefly'; known: brief, too_few",
        ("algorithm.reward_shaping=brief", "algorithm.shaping_settings.prize=1"): "did you mean 'price'",
        ("algorithm.shaping_settings.price=1",): "algorithm.reward_shaping names no function",
        ("algorithm.filter_groups.filter=short_enough",): "filter_groups.enable is false",
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.filter=short"): "unknown filter 'short'",
        (
            "algorithm=gdpo", "algorithm.reward_keys=[score]", "algorithm.reward_shaping=brief",
        ): "takes its parts one by one: let the reward function return a part",
        (
            "algorithm=gdpo", "algorithm.reward_keys=[score]", "reward.overlong_buffer=2",
        ): "reward.overlong_buffer changes the whole reward",
        (
            "algorithm=gdpo", "algorithm.reward_keys=[score]", "reward.weight=2",
        ): "reward.weight changes the whole reward",
        (
            "algorithm.adv_estimator=remax", "algorithm.reward_shaping=brief",
        ): "not those of the greedy answers",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            project.config(own, *words)


TERMS = {
    "entropy": ["algorithm.entropy_coeff=0.1"],
    "k1": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k1"],
    "k2": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k2"],
    "k3": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k3"],
    "k1+": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k1+"],
    "k3+": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k3+"],
    "values": [
        "algorithm.adv_estimator=gae", "critic.samples_per_update=8", "algorithm.cliprange_value=1e-6",
        "critic.optim.lr=1e-3",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "k3+" else pytest.mark.slow) for name in TERMS]
)
def test_every_term_of_the_loss_is_reached_from_the_configuration(
    project: Project, tmp_path: Path, name: str
) -> None:
    # Two updates a step, so that policy and reference differ from the second update on.
    settings = [*SHORT, "actor.samples_per_update=8", "actor.epochs=2", "algorithm.kl_loss_coef=0.5"]
    plain = train_in(tmp_path / "plain", project.config(*settings))
    done = train_in(tmp_path / "run", project.config(*settings, *TERMS[name]))
    last, other = done.steps[-1], plain.steps[-1]
    assert last["actor/grad_norm"] != other["actor/grad_norm"], "the term moves the policy"
    if name.startswith("k"):
        assert last["actor/kl_loss"] != 0
        assert "actor/kl_loss" not in other
        assert last["actor/loss"] == pytest.approx(
            last["actor/pg_loss"] + 0.5 * last["actor/kl_loss"], rel=1e-4
        )
    if name == "entropy":
        assert last["actor/loss"] == pytest.approx(
            last["actor/pg_loss"] - 0.1 * last["actor/entropy"], rel=1e-4
        )
    if name == "values":
        assert last["critic/vf_clipfrac"] > 0
