"""Whole runs in this process: exact zeros, determinism, metric names, and what is written down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Done, Project, chain_of, check_records, stages_that_differ, train_in, with_reward
from torch import Tensor

from strop.algorithms.losses import POLICY_LOSS_REGISTRY, PolicyLossTerms, register_policy_loss
from strop.engines import model as model_loading
from strop.engines import value_models
from strop.engines.causal_lm import CausalLM
from strop.engines.parallel import offload as offloading
from strop.protocol import columns
from strop.protocol.schema import COLUMNS
from strop.run import RunFolder
from strop.run.first_difference import compare
from strop.trainer.policy_sync import WeightSync
from strop.utils.metrics import metric_values
from strop.workers.progress import ended_and_scored
from strop.workers.reports import StaleSamples

# ---------------------------------------------------------------------------- exact zeros


def test_an_on_policy_update_has_ratio_one_and_no_clipping_exactly(on_policy: Done) -> None:
    for numbers in on_policy.steps:
        assert numbers["actor/ratio"] == 1.0
        assert numbers["actor/ppo_kl"] == 0.0
        assert numbers["actor/pg_clipfrac"] == numbers["actor/pg_clipfrac_lower"] == 0.0
        assert numbers["actor/grad_norm"] > 1e-3, "a ratio of 1 is a value, not a constant"


def test_the_kl_to_the_reference_is_zero_at_the_start_only(on_policy: Done) -> None:
    first, *later = [numbers["actor/kl_loss"] for numbers in on_policy.steps]
    assert first <= 1e-6, "mean |log_probs - ref_log_prob| of the same weights"
    assert all(kl > 1e-3 for kl in later)


def test_rollout_and_trainer_agree_at_every_step(on_policy: Done) -> None:
    differences = [numbers["training/rollout_log_probs_diff_max"] for numbers in on_policy.steps]
    assert len(differences) == 3
    assert max(differences) <= 1e-4
    # The policy does move meanwhile, so log-probs of a step ago would not agree.
    a, b = (columns.flat(record.fetched.tensors()["ref_log_prob"]) for record in on_policy.records[1:])
    c, d = (columns.flat(record.fetched.tensors()["log_probs"]) for record in on_policy.records[1:])
    assert min(float((a - c).abs().max()), float((b - d).abs().max())) > 1e-2


def test_workers_note_how_far_the_last_generation_came(on_policy: Done) -> None:
    with RunFolder.open(on_policy.folder, read_only=True) as run:
        count = run.events.read("validation")[-1]["num_answers"]
    assert ended_and_scored(on_policy.folder / "logs") == (count, count)


def test_every_sampled_token_carries_the_version_of_its_step(on_policy: Done) -> None:
    for record in on_policy.records:
        assert {report.versions for report in record.reports} == {(record.step - 1, record.step - 1)}


def test_samples_of_an_older_policy_are_refused_unless_they_are_corrected_for(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights that never reach generation: from the second step on, samples are those of version 0.
    monkeypatch.setattr(WeightSync, "update", lambda self, version: None)
    sentence = (
        r"16 of 16 samples are older than the policy: e0-\d+/0 was sampled by version 0, and version 1 is trained\. "
        r"The loss would take them for its own: set algorithm\.correction"
    )
    with pytest.raises(StaleSamples, match=sentence):
        train_in(tmp_path / "refused", project.config("data.val_files=[]"))
    with RunFolder.open(tmp_path / "refused", read_only=True) as run:
        assert [event["step"] for event in run.events.read("step")] == [1]
    corrected = train_in(
        tmp_path / "run", project.config("data.val_files=[]", "algorithm.correction.weights=token")
    )
    assert len(corrected.steps) == 3


def test_with_several_updates_the_first_one_starts_at_ratio_one(project: Project, tmp_path: Path) -> None:
    config = project.config("actor.samples_per_update=6", "actor.epochs=2", "trainer.max_steps=2")
    for record in train_in(tmp_path / "run", config).records:
        updates = [metric_values(one.metrics) for one in record.optimizer_steps]
        assert len(updates) == 6, "16 samples in parts of 6, 5 and 5, twice"
        assert updates[0]["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert abs(updates[0]["actor/ppo_kl"]) <= 1e-4
        assert abs(updates[-1]["actor/ratio"] - 1) > 1e-4 or abs(updates[-1]["actor/ppo_kl"]) > 1e-4


@pytest.mark.parametrize("samples_per_update", ["all", "6"])
def test_with_the_rollouts_log_probs_the_first_update_starts_near_ratio_one(
    project: Project, tmp_path: Path, samples_per_update: str
) -> None:
    config = project.config(
        "algorithm.old_log_probs=rollout",
        f"actor.samples_per_update={samples_per_update}",
        "trainer.max_steps=2",
    )
    for record in train_in(tmp_path / "run", config).records:
        tensors = record.fetched.tensors()
        recorded = columns.flat(tensors["rollout_log_probs"])
        ours = columns.flat(tensors["log_probs" if samples_per_update == "all" else "old_log_probs"])
        assert not torch.equal(ours, recorded), "the trainer's are measured all the same"
        first = metric_values(record.optimizer_steps[0].metrics)
        assert first["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert abs(first["actor/ppo_kl"]) <= 1e-4


def test_samples_are_stored_with_the_numbers_of_their_own_tokens(on_policy: Done) -> None:
    with RunFolder.open(on_policy.folder, read_only=True) as run:
        stored = {row["id"]: row for row in run.samples.read(2)}
        assert all(row["advantages"] is None for row in run.samples.read(0, split="val"))
        assert {row["fate"] for row in run.samples.read(0, split="val")} == {None}
    batch = on_policy.records[1].fetched
    tensors = {name: columns.rows(values) for name, values in batch.tensors().items()}
    assert len(stored) == len(batch) == 16
    for place, name in enumerate(batch.non_tensor_batch["episode_id"]):
        for column, made in (("old_log_probs", "log_probs"), ("entropys", "entropys"), ("advantages",) * 2):
            assert stored[name][column] == tensors[made][place].tolist(), (name, column)
        assert len(stored[name]["entropys"]) == len(stored[name]["response_ids"])
    assert len({tuple(row["entropys"]) for row in stored.values()}) > 4, "they are those of each sample"


# ---------------------------------------------------------------------------- determinism


def test_the_same_settings_and_seed_give_the_same_chain(
    on_policy: Done, project: Project, tmp_path: Path
) -> None:
    torch.manual_seed(99)  # no global random state takes part
    again = train_in(
        tmp_path / "run",
        project.config(
            "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"
        ),
    )
    assert [one.chain for one in again.chain] == [one.chain for one in on_policy.chain]


@pytest.mark.parametrize(
    ("override", "stage"),
    [
        ("trainer.seed=1", "data"),
        ("rollout.temperature=0.9", "sampled_tokens"),
        ("algorithm.norm_adv_by_std=false", "advantages"),
        ("algorithm.loss_agg_mode=token-sum", "loss"),
        ("actor.optim.lr=2e-3", "weights"),
    ],
)
def test_another_setting_differs_first_at_its_own_stage(
    on_policy: Done, project: Project, tmp_path: Path, override: str, stage: str
) -> None:
    config = project.config(
        "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01",
        "trainer.max_steps=1", "eval.before_train=false", "data.val_files=[]", override,
    )  # fmt: skip
    other = train_in(tmp_path / "run", config)
    difference = compare(on_policy.chain, other.chain)
    assert difference is not None
    assert (difference.step, difference.stage) == (1, stage)


def test_another_seed_without_shuffling_samples_other_tokens_for_the_same_prompts(
    project: Project, tmp_path: Path
) -> None:
    runs = [
        train_in(
            tmp_path / seed,
            project.config(
                "data.sampler=in_order", "trainer.max_steps=1", "data.val_files=[]", f"trainer.seed={seed}"
            ),
        )
        for seed in ("0", "1")
    ]
    differing = stages_that_differ(runs[0].chain, runs[1].chain)
    assert differing[0] == "sampled_tokens"


# ---------------------------------------------------------------------------- records


def test_a_run_without_validation_data_trains(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config("data.val_files=[]", "trainer.max_steps=1"))
    assert (done.result.pass_rate_start, done.result.pass_rate_final) == (None, None)
    assert [numbers["step"] for numbers in done.metrics] == [1]


FIELD_METRICS = """
training/global_step training/epoch
timing_s/step timing_s/gen timing_s/ref timing_s/adv timing_s/update_actor timing_s/update_weights
timing_per_token_ms/gen timing_per_token_ms/ref timing_per_token_ms/adv timing_per_token_ms/update_actor
perf/total_num_tokens perf/time_per_step perf/throughput
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/kl_loss actor/kl_coef
actor/grad_norm actor/lr actor/loss
critic/score/mean critic/score/max critic/score/min critic/rewards/mean critic/rewards/max critic/rewards/min
critic/advantages/mean critic/advantages/max critic/advantages/min
critic/returns/mean critic/returns/max critic/returns/min
response_length/mean response_length/max response_length/min response_length/clip_ratio
response_length_non_aborted/mean response_length_non_aborted/max response_length_non_aborted/min
response_length_non_aborted/clip_ratio response/aborted_ratio
prompt_length/mean prompt_length/max prompt_length/min prompt_length/clip_ratio
num_turns/min num_turns/max num_turns/mean
training/rollout_probs_diff_valid training/rollout_probs_diff_max training/rollout_probs_diff_mean
training/rollout_probs_diff_std training/rollout_actor_probs_pearson_corr
rollout_corr/training_ppl rollout_corr/training_log_ppl rollout_corr/rollout_ppl rollout_corr/rollout_log_ppl
rollout_corr/kl rollout_corr/k3_kl rollout_corr/log_ppl_diff rollout_corr/log_ppl_abs_diff
rollout_corr/log_ppl_diff_max rollout_corr/log_ppl_diff_min rollout_corr/ppl_ratio rollout_corr/chi2_token
rollout_corr/chi2_seq
"""
"""Names that people chart, of all parts that exist."""


def test_metrics_have_the_names_of_verl(on_policy: Done) -> None:
    wanted = FIELD_METRICS.split()
    for numbers in on_policy.steps:
        assert [name for name in wanted if not math.isfinite(numbers.get(name, math.nan))] == []
    last = on_policy.steps[-1]
    assert {"timing_s/testing", "timing_s/save_checkpoint"} <= set(last)
    assert {
        "val-core/strop/exact/acc/mean@1",
        "val-aux/strop/exact/reward/mean@1",
        "val-aux/num_turns/mean",
    } <= set(last)
    assert "val-core/strop/exact/acc/mean@1" in on_policy.metrics[0], "validation before the first step"


def test_training_batches_have_the_columns_of_verl(on_policy: Done) -> None:
    batch = on_policy.records[0].fetched
    names = {
        "prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores", "token_level_rewards",
        "advantages", "returns", "ref_log_prob",
    }  # fmt: skip
    assert names <= set(batch.tensors())
    assert set(batch.non_tensor_batch) >= {"uid"}


def test_advantages_of_a_group_have_mean_zero_and_follow_the_rewards(on_policy: Done) -> None:
    batch = on_policy.records[0].fetched
    rewards = torch.stack([row.sum() for row in columns.rows(batch.tensors()["token_level_rewards"])])
    advantages = torch.stack([row[0] for row in columns.rows(batch.tensors()["advantages"])])
    for group in range(4):
        rows = slice(4 * group, 4 * group + 4)
        r, a = rewards[rows].double(), advantages[rows].double()
        expected = (r - r.mean()) / (r.std() + 1e-6) if r.std() > 0 else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(a, expected, rtol=1e-4, atol=1e-5)


def test_what_the_model_wrote_is_kept(on_policy: Done) -> None:
    with RunFolder.open(on_policy.folder, read_only=True) as run:
        assert run.samples.steps() == [1, 2, 3]
        rows = run.samples.read(2)
        answers = run.samples.read(3, split="val")
    assert len(rows) == 16
    assert len(answers) == 16
    record = on_policy.records[1]
    responses = columns.rows(record.fetched.tensors()["responses"])
    for row, report, response in zip(rows, record.reports, responses, strict=True):
        assert row["id"] == report.id
        assert row["response_ids"] == response.tolist()
        assert row["score"] == report.score
        assert (row["fate"], row["outcome"]) == ("trained", "score")
        assert set(row["versions"]) == {1}
    assert any(row["advantage"] for row in rows)
    check_records(on_policy.folder, num_steps=3)


def test_epochs_go_on_across_steps_and_the_last_step_is_shorter(project: Project, tmp_path: Path) -> None:
    config = project.config(
        "data.prompts_per_step=10", "trainer.num_epochs=1", "trainer.max_steps=null", "data.val_files=[]"
    )
    done = train_in(tmp_path / "run", config)
    assert [len(record.prompts) for record in done.records] == [10, 10, 4]
    assert len({prompt.row for record in done.records for prompt in record.prompts}) == 24
    check_records(done.folder, num_steps=3)


# ---------------------------------------------------------------------------- a poisoned gradient


@pytest.fixture
def poison() -> Iterator[list[int]]:
    """A policy loss that gives NaN at the calls of this list, which counts from 0."""
    calls: list[int] = []
    num_calls = 0

    @register_policy_loss("poisoned", needs=["log_probs", "old_log_probs", "advantages"])
    def poisoned(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        nonlocal num_calls
        factor = math.nan if num_calls in calls else 1.0
        num_calls += 1
        return PolicyLossTerms(terms=-(log_probs - old_log_probs).exp() * advantages * factor, statistics={})

    yield calls
    del POLICY_LOSS_REGISTRY["poisoned"]


BARE = ["algorithm.policy_loss=poisoned", "algorithm.entropy_coeff=0.01", "data.val_files=[]"]
"""With an entropy term all rows go through one pass: one call of the loss per update."""


def test_a_poisoned_step_is_skipped_named_and_not_counted_as_trained(
    project: Project, tmp_path: Path, poison: list[int]
) -> None:
    poison.append(1)
    done = train_in(tmp_path / "run", project.config(*BARE))
    skipped = [line for line in done.said if "skipped an update" in line]
    assert len(skipped) == 1
    assert skipped[0].startswith(
        "step 2 skipped an update: gradient norm is nan (non-finite in model.embed_tokens"
    )
    with RunFolder.open(done.folder, read_only=True) as run:
        fates = [{(row["fate"], row["fate_reason"]) for row in run.samples.read(step)} for step in (1, 2, 3)]
        assert run.ledger.counts() == {
            "issued": 48, "in_flight": 0, "trained": 32, "filtered": 16, "failed": 0, "stale": 0
        }  # fmt: skip
        assert [event["step"] for event in run.events.read("skipped_update")] == [2]
    assert fates[0] == fates[2] == {("trained", "")}
    assert fates[1] == {("filtered", skipped[0].removeprefix("step 2 skipped an update: "))}
    weights = [one.stages["weights"] for one in chain_of(done.folder)]
    assert weights[0] == weights[1] != weights[2]
    assert [numbers["actor/skipped_updates"] for numbers in done.steps] == [0.0, 1.0, 0.0]


def test_only_the_samples_of_the_poisoned_update_are_filtered(
    project: Project, tmp_path: Path, poison: list[int]
) -> None:
    poison.append(1)
    config = project.config(*BARE, "actor.samples_per_update=6", "trainer.max_steps=1")
    done = train_in(tmp_path / "run", config)
    with RunFolder.open(done.folder, read_only=True) as run:
        fates = [row["fate"] for row in run.samples.read(1)]
    assert fates == ["trained"] * 6 + ["filtered"] * 5 + ["trained"] * 5


def test_a_skipped_update_does_not_hide_why_other_samples_failed(
    project: Project, tmp_path: Path, poison: list[int]
) -> None:
    poison.append(0)
    config = with_reward(project.config(*BARE, "trainer.max_steps=1"), name="picky", max_failed_share=0.9)
    done = train_in(tmp_path / "run", config)
    with RunFolder.open(done.folder, read_only=True) as run:
        fates = {(row["outcome"], row["fate"]) for row in run.samples.read(1)}
    assert fates == {("error", "failed"), ("score", "filtered")}


@pytest.mark.slow
def test_roles_that_leave_the_device_between_their_turns_change_no_bit(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU move as those of an accelerator do."""
    settings = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor.samples_per_update=8",
    ]
    stays = train_in(tmp_path / "stays", project.config(*settings))
    moved = []

    def counted(model: CausalLM, copies: offloading.HostCopies) -> None:
        offloading.offload(model, copies)
        moved.append(copies.num_bytes > 0)

    prepare_model = model_loading.prepare_model

    def in_own_memory(module: torch.nn.Module, *others: Any, **options: Any) -> CausalLM:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # that of a mapped file cannot be freed
        return prepare_model(module, *others, **options)

    for module in (model_loading, value_models):
        monkeypatch.setattr(module, "prepare_model", in_own_memory)
    monkeypatch.setattr(offloading, "_on_device", iter)
    monkeypatch.setattr("strop.engines.training.offload", counted)
    leaves = train_in(tmp_path / "leaves", project.config(*settings, "resources.offload_idle=true"))
    assert [one.chain for one in leaves.chain] == [one.chain for one in stays.chain]
    # Both validations, and per step: generation, old log-probs, reference, values, critic, actor.
    assert moved == [True] * (2 + 3 * 6)


def test_the_columns_of_a_step_are_those_of_the_table(on_policy: Done) -> None:
    for record in on_policy.records:
        assert record.fetched is not None
        tensors = record.fetched.tensors()
        assert {"prompts", "log_probs", "ref_log_prob", "advantages"} <= set(tensors)
        for name, tensor in tensors.items():
            declared = COLUMNS[name]
            assert tensor.dtype == declared.dtype, name
            assert columns.is_jagged(tensor) == ("~" in declared.axes), name
        assert all(COLUMNS[name].dtype is None for name in record.fetched.non_tensor_batch)
