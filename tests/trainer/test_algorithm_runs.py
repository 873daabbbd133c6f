"""Whole runs with the algorithms' own needs: columns that are computed because somebody declares them, corrections,
dynamic sampling, and functions of the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.config.errors import ConfigError
from strop.protocol import columns
from strop.rewards import RewardError
from strop.run import RunFolder
from strop.trainer.records import StepRecord
from strop.trainer.setup import TrainingData, load_training_data

SHORT = ["trainer.max_steps=2", "data.val_files=[]"]
NEEDY = {"gdpo": ["algorithm.reward_keys=[score,acc]"], "raft": ["algorithm.keep.best=1"]}
"""Estimators that want a setting before they run."""
QUICK, QUICK_LOSSES = ("gdpo", "tir_optimal_token_baseline"), ("clip_cov",)
"""Those with needs of their own run by default, all of them in the slow tests."""


def column(done: Done, name: str, step: int = 1) -> torch.Tensor:
    batch = done.records[step - 1].fetched
    assert batch is not None
    return batch.tensors()[name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(ADV_ESTIMATOR_REGISTRY)
        if name not in ("poisoned", "gigpo")  # that one needs an environment: test_gigpo_runs.py
    ],
)
def test_every_estimator_trains_a_policy(project: Project, tmp_path: Path, name: str) -> None:
    done = train_in(
        tmp_path / "run",
        project.config(*SHORT, f"algorithm.adv_estimator={name}", *NEEDY.get(name, [])),
    )
    check_records(done.folder, num_steps=2)
    assert all(numbers["actor/grad_norm"] > 0 for numbers in done.steps)
    has_proxies = ["variance_proxy/proxy2_total_power" in numbers for numbers in done.steps]
    assert has_proxies == [name.endswith("optimal_token_baseline")] * 2
    assert done.chain[0].stages["weights"] != done.chain[1].stages["weights"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_LOSSES else pytest.mark.slow)
        for name in sorted(POLICY_LOSS_REGISTRY)
        if name != "poisoned"
    ],
)
def test_every_loss_trains_a_policy(project: Project, tmp_path: Path, name: str) -> None:
    done = train_in(
        tmp_path / "run",
        project.config(*SHORT, f"algorithm.policy_loss={name}", "actor.samples_per_update=8"),
    )
    check_records(done.folder, num_steps=2)
    assert all(numbers["actor/grad_norm"] > 0 for numbers in done.steps)
    assert all(abs(numbers["actor/ratio"] - 1) < 0.5 for numbers in done.steps)


def test_remax_compares_with_the_greedy_answer(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*SHORT, "algorithm.adv_estimator=remax"))
    baselines = column(done, "reward_baselines")
    uids = list(done.records[0].fetched.non_tensor_batch["uid"])  # type: ignore[union-attr]
    assert {
        uid: len({float(b) for b, u in zip(baselines, uids, strict=True) if u == uid}) for uid in uids
    } == (dict.fromkeys(uids, 1))
    rewards = torch.stack([row.sum() for row in columns.rows(column(done, "token_level_scores"))])
    for advantage, mask, expected in zip(
        columns.rows(column(done, "advantages")),
        columns.rows(column(done, "response_mask")),
        rewards - baselines,
        strict=True,
    ):
        assert torch.allclose(advantage[mask], expected.expand(int(mask.sum())), atol=1e-6)


def test_the_greedy_answer_loses_for_its_length_as_samples_do(project: Project, tmp_path: Path) -> None:
    remax = ["trainer.max_steps=1", "data.val_files=[]", "algorithm.adv_estimator=remax"]
    limit = project.config().data.max_response_tokens
    plain = train_in(tmp_path / "plain", project.config(*remax))
    # A buffer as long as the limit: an answer of n tokens loses n / limit.
    short = train_in(tmp_path / "short", project.config(*remax, f"reward.overlong_buffer={limit}"))
    lost = column(plain, "reward_baselines") - column(short, "reward_baselines")
    assert torch.all(lost >= 1 / limit - 1e-6)
    assert torch.all(lost <= 1 + 1e-6)


def test_parts_of_the_reward_that_are_missing_are_named(project: Project, tmp_path: Path) -> None:
    config = project.config(*SHORT, "algorithm.adv_estimator=gdpo", "algorithm.reward_keys=[score,format]")
    sentence = (
        r"16 of 16 samples could not be scored, .*16 error \(algorithm.reward_keys names 'format', but the reward has "
        r"no such number for this sample: it has acc, score.*continued \(--resume\) reads the reward file anew"
    )
    with pytest.raises(ValueError, match=sentence):
        train_in(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="algorithm.reward_keys is empty: name those that the reward"):
        project.config("algorithm.adv_estimator=gdpo")


PARTS = """
def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def a(completions, **_):
    return [float(len(text_of(one))) for one in completions]

def b(completions, **_):
    return [{value} for one in completions]
"""
"""In TRL's form, where None says that a function does not apply."""


def test_a_sample_without_a_part_is_an_outcome_and_a_resume_can_change_what_failed(
    project: Project, tmp_path: Path
) -> None:
    """Every third sample is None in part b: it is left out, or trained with failed_score, and the run goes on; where
    all are, the run ends, and goes on with the repaired file from where it was."""
    file = tmp_path / "parts.py"
    file.write_text(PARTS.format(value="None if sum(map(ord, text_of(one))) % 3 == 0 else 1.0"))
    functions = [f"{{path: '{file}', name: {name}}}" for name in "ab"]
    settings = [
        *SHORT, "reward.path=''", f"reward.functions=[{', '.join(functions)}]", "algorithm.adv_estimator=gdpo",
        "algorithm.reward_keys=[a,b]", "reward.max_failed_share=0.9", "run.save_every=1",
    ]  # fmt: skip
    done = train_in(tmp_path / "run", project.config(*settings))
    check_records(done.folder, num_steps=2)
    reports = [report for record in done.records for report in record.reports]
    lacking = [one for one in reports if one.outcome is not None and one.outcome.kind == "error"]
    assert lacking
    assert all("names 'b'" in str(one.outcome and one.outcome.error) for one in lacking)
    assert all(one.reward() is None for one in lacking)
    fixed = [*settings, "reward.on_failure.error=fixed", "reward.failed_score=-2"]
    trained = [
        one
        for record in train_in(tmp_path / "fixed", project.config(*fixed)).records
        for one in record.reports
    ]
    assert {one.reward() for one in trained if one.score is None} == {-2.0}

    run = cut_after(done.folder, tmp_path / "again", step=1)
    file.write_text(PARTS.format(value="None"))
    with pytest.raises(RewardError, match="of 16 samples could not be scored"):
        resume_in(run, accept_changes=True)
    file.write_text(PARTS.format(value="1.0"))
    anew = ["reward.on_failure.error=fixed", "reward.failed_score=-2"]
    repaired = resume_in(run, *anew, accept_changes=True)
    assert [record.step for record in repaired.records] == [2]
    assert all(one.score is not None for one in repaired.records[0].reports)
    check_records(run, num_steps=2)


# ---------------------------------------------------------------------------- rollout correction


def test_a_correction_of_rollouts_that_agree_weighs_one(project: Project, tmp_path: Path) -> None:
    settings = [*SHORT, "actor.samples_per_update=8"]
    plain = train_in(tmp_path / "plain", project.config(*settings))
    done = train_in(
        tmp_path / "run",
        project.config(
            *settings, "algorithm.correction.weights=token", "algorithm.correction.reject={seq_mean_k3: 0.01}"
        ),
    )
    weights = columns.flat(column(done, "rollout_is_weights"))
    torch.testing.assert_close(weights, torch.ones_like(weights), atol=1e-4, rtol=0)
    assert done.steps[0]["rollout_corr/rollout_rs_masked_fraction"] == 0
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert done.steps[0][name] == pytest.approx(plain.steps[0][name], rel=1e-3, abs=1e-6), name


def test_rejected_samples_are_not_trained_and_say_why(project: Project, tmp_path: Path) -> None:
    config = project.config(
        *SHORT, "algorithm.correction.reject={seq_max_k2: 1e-14}", "algorithm.entropy_coeff=0.01"
    )
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=2)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(1)
    nothing_left = [not row.any() for row in columns.rows(column(done, "loss_mask"))]
    ids = list(done.records[0].fetched.non_tensor_batch["id"])  # type: ignore[union-attr]
    rejected = {name for name, is_empty in zip(ids, nothing_left, strict=True) if is_empty}
    assert rejected
    assert {row["id"] for row in rows if row["fate"] == "filtered"} == rejected
    assert {row["fate_reason"] for row in rows if row["id"] in rejected} == {
        "rollout correction rejected every token of it"
    }


def test_numbers_of_trained_tokens_leave_out_rejected_ones(project: Project, tmp_path: Path) -> None:
    config = project.config(
        *SHORT, "algorithm.adv_estimator=gae", "algorithm.correction.reject={token_k1: [1.0, 1.0]}"
    )
    done = train_in(tmp_path / "run", config)
    kept = columns.rows(column(done, "loss_mask"))
    assert any(row.any() and not row.all() for row in kept), "some answers lose some tokens"
    for name in ("advantages", "returns", "values"):
        trained = [
            value
            for values, mask in zip(columns.rows(column(done, name)), kept, strict=True)
            for value, is_kept in zip(values.tolist(), mask.tolist(), strict=True)
            if is_kept
        ]
        numbers = done.steps[0]
        assert numbers[f"critic/{name}/mean"] == pytest.approx(sum(trained) / len(trained), abs=1e-6), name
        assert numbers[f"critic/{name}/max"] == pytest.approx(max(trained)), name
    with RunFolder.open(done.folder, read_only=True) as run:
        stored = {row["id"]: row["advantage"] for row in run.samples.read(1) if row["fate"] == "trained"}
    batch = done.records[0].fetched
    assert batch is not None
    assert stored
    for index, name in enumerate(batch.non_tensor_batch["id"]):
        if name in stored:
            trained = columns.rows(column(done, "advantages"))[index][kept[index].bool()].tolist()
            assert stored[name] == pytest.approx(sum(trained) / len(trained), abs=1e-6)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_a_last_step_of_one_token_ends_no_run(project: Project, tmp_path: Path, estimator: str) -> None:
    # Four answers of a token, three in the first step: the last token has nothing to be compared with.
    sizes = [
        "data.max_train_prompts=4", "data.prompts_per_step=3", "data.max_response_tokens=1", "trainer.num_epochs=1",
        "trainer.max_steps=null", "rollout.samples_per_prompt=1", "data.val_files=[]",
    ]  # fmt: skip
    done = train_in(tmp_path / "run", project.config(*sizes, f"algorithm.adv_estimator={estimator}"))
    assert [numbers["actor/pg_loss"] == 0 for numbers in done.steps][1:] == [True]
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.ledger.counts()["trained"] == 4


# ---------------------------------------------------------------------------- dynamic sampling

FILTER = [
    "data.val_files=[]",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
    "rollout.samples_per_prompt=2",
    "trainer.num_epochs=1",
]


def test_a_step_goes_on_until_it_has_its_groups(project: Project, tmp_path: Path) -> None:
    config = project.config(*FILTER, "trainer.max_steps=3", "algorithm.filter_groups.highest_mean=0.45")
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=3)
    rounds = [numbers["training/filter_groups/rounds"] for numbers in done.steps]
    assert max(rounds) > 1
    for record, numbers in zip(done.records, done.steps, strict=True):
        assert record.learned is not None
        uids = [report.uid for report in record.learned.batch.reports]
        assert len(set(uids)) == 4, "a constant batch"
        assert len(uids) == 8
        evicted = numbers["training/filter_groups/evicted_samples"]
        surplus = numbers["training/filter_groups/discarded_surplus_samples"]
        assert len(record.reports) == 8 + evicted + surplus
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(2)
    assert {row["id"] for row in rows} == {report.id for report in done.records[1].reports}
    reasons = {row["fate_reason"] for row in rows if row["fate"] == "filtered"}
    assert reasons <= {
        "equal rewards",
        "failed by every sample",
        "easier than the band",
        "surplus of dynamic sampling",
    }
    for row in rows:
        if row["fate"] == "trained":
            group = [other["score"] for other in rows if other["uid"] == row["uid"]]
            assert len(set(group)) > 1
            assert sum(group) / 2 <= 0.45


@pytest.mark.slow
def test_a_larger_round_is_enough_and_what_is_beyond_is_left_out(project: Project, tmp_path: Path) -> None:
    more = ["algorithm.filter_groups.prompts_per_round=11", "trainer.max_steps=2"]
    done = train_in(tmp_path / "run", project.config(*FILTER, *more))
    check_records(done.folder, num_steps=2)
    for record, numbers in zip(done.records, done.steps, strict=True):
        assert record.learned is not None
        kept = [report.uid for report in record.learned.batch.reports]
        assert len(set(kept)) == 4
        assert numbers["training/filter_groups/rounds"] == 1
        assert numbers["training/filter_groups/discarded_surplus_samples"] > 0
        drawn = [report.uid for report in record.reports]
        assert len(set(drawn)) == 11
        useful = [uid for uid in dict.fromkeys(drawn) if len(set(scores_of(record, uid))) > 1]
        assert list(dict.fromkeys(kept)) == useful[:4], "the first, in the order of their visits"
    smaller = train_in(
        tmp_path / "smaller",
        project.config(*FILTER, "algorithm.filter_groups.prompts_per_round=2", "trainer.max_steps=1"),
    )
    assert smaller.steps[0]["training/filter_groups/rounds"] >= 2


def scores_of(record: StepRecord, uid: str) -> list[float]:
    return [one.outcome.score for one in record.reports if one.uid == uid and one.outcome is not None]


@pytest.mark.slow
def test_at_its_limit_it_trains_on_what_there_is_or_stops(project: Project, tmp_path: Path) -> None:
    rare = [*FILTER, "trainer.max_steps=1", "algorithm.filter_groups.max_rounds=1"]
    config = project.config(*rare, "algorithm.filter_groups.highest_mean=0.2")
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=1)
    assert len(done.records[0].prompts) == 4
    with pytest.raises(
        RuntimeError, match=r"only \d of 4 groups could teach after 1 rounds .*easier than the band"
    ):
        train_in(
            tmp_path / "stops",
            project.config(
                *rare, "algorithm.filter_groups.highest_mean=0.2", "algorithm.filter_groups.at_limit=stop"
            ),
        )


@pytest.mark.parametrize(
    "settings",
    [
        ["data.max_train_prompts=8"],
        pytest.param(["data.max_train_prompts=8", "rollout.max_staleness=1"], marks=pytest.mark.slow),
        ["data.source_weights={few: 1, other: 0}"],  # no epoch visits the rows of the other source
    ],
)
def test_a_run_ends_with_its_work_saved_when_every_prompt_is_retired(
    project: Project, tmp_path: Path, settings: list[str]
) -> None:
    rows = pq.read_table(project.task.train).to_pylist()
    for number, row in enumerate(rows):
        row["data_source"] = "few" if number < 8 else "other"
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "easy.py").write_text(
        "import zlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(zlib.crc32(ground_truth.encode()) % 3 > 0 or solution_str < 'm')\n"
    )
    config = project.config(
        *FILTER, *settings, f"reward.path='{tmp_path / 'easy.py'}'", "trainer.max_steps=40",
        f"data.train_files=['{tmp_path / 'rows.parquet'}']",
        "algorithm.filter_groups.retire_solved=true", "algorithm.filter_groups.at_limit=stop",
        "algorithm.filter_groups.max_rounds=40", "actor.optim.lr=3e-2", "run.hf_model=never",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    assert 0 < done.result.steps < 40
    assert "every prompt was solved by all its samples and is retired" in done.said[-1]
    check_records(done.folder, num_steps=done.result.steps)
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.checkpoints.steps()[-1] == done.result.steps
    again = resume_in(done.folder, "trainer.max_steps=50")
    assert again.records == [], "nothing is left to visit"


@pytest.mark.slow
def test_a_filtered_run_that_is_resumed_is_the_one_that_was_not(project: Project, tmp_path: Path) -> None:
    config = project.config(
        *FILTER, "trainer.max_steps=4", "run.save_every=1", "run.keep_last=9",
        "algorithm.filter_groups.retire_solved=true", "algorithm.filter_groups.defer_failed=1",
    )  # fmt: skip
    whole = train_in(tmp_path / "whole", config)
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=2))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]
    shutil.rmtree(tmp_path / "cut")


def test_greedy_baselines_of_later_rounds_are_no_samples_of_the_step(
    project: Project, tmp_path: Path
) -> None:
    config = project.config(
        *FILTER,
        "trainer.max_steps=2",
        "algorithm.filter_groups.highest_mean=0.45",
        "algorithm.adv_estimator=remax",
    )
    done = train_in(tmp_path / "run", config)
    assert max(numbers["training/filter_groups/rounds"] for numbers in done.steps) > 1
    with RunFolder.open(done.folder, read_only=True) as run:
        for step, record in enumerate(done.records, start=1):
            stored = [row["id"] for row in run.samples.read(step)]
            assert stored == [report.id for report in record.reports], "each once, none lost"


def test_dynamic_sampling_needs_a_number_of_steps(project: Project) -> None:
    with pytest.raises(ConfigError, match="set trainer.max_steps"):
        project.config("algorithm.filter_groups.enable=true", "trainer.max_steps=null")


# ---------------------------------------------------------------------------- a user's own

OWN = """\
import torch
from strop.algorithms.advantages import register_adv_est
from strop.algorithms.verl_aggregation import agg_loss
from strop.algorithms.losses import register_policy_loss


@register_adv_est("my_estimator")
def mine(token_level_rewards, response_mask, config=None, index=None, **kwargs):
    scores = token_level_rewards.sum(-1)
    means = torch.stack([scores[[j for j, other in enumerate(index) if other == uid]].mean() for uid in index])
    advantages = (scores - means)[:, None] * response_mask
    return advantages, advantages


@register_policy_loss("my_loss")
def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
            rollout_is_weights=None):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/my_share": (ratio > 1).float().mean()}
"""


@pytest.fixture
def registries() -> Iterator[None]:
    """What is registered in between is forgotten."""
    held = [(registry, set(registry)) for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY)]
    yield
    for registry, before in held:
        for name in set(registry) - before:
            del registry[name]


@pytest.mark.usefixtures("registries")
def test_functions_of_the_users_own_do_what_the_built_in_ones_do(project: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    settings = [*SHORT, "actor.samples_per_update=6", "actor.engine.max_tokens_per_device=64"]
    ours = train_in(tmp_path / "ours", project.config(*settings, "algorithm.adv_estimator=dr_grpo"))
    own = [
        f"algorithm.extensions=['{tmp_path / 'mine.py'}']",
        "algorithm.adv_estimator=my_estimator",
        "algorithm.policy_loss=my_loss",
    ]
    theirs = train_in(tmp_path / "theirs", project.config(*settings, *own))
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max"):
        for one, other in zip(ours.steps, theirs.steps, strict=True):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert 0 <= theirs.steps[0]["actor/my_share"] <= 1


def test_a_file_of_the_users_own_that_is_missing_or_broken_is_named(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 'nowhere.py', but .* is no file"):
        project.config("algorithm.extensions=[nowhere.py]")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError: division by zero"):
        project.config(f"algorithm.extensions=['{tmp_path / 'broken.py'}']")


def test_long_answers_lose_what_the_buffer_says(project: Project, tmp_path: Path) -> None:
    config = project.config(*SHORT, "reward.overlong_buffer=4", "reward.overlong_penalty=2.0")
    done = train_in(tmp_path / "run", config)
    seen = 0
    for report, scores in zip(
        done.records[0].learned.batch.reports,  # type: ignore[union-attr]
        columns.rows(column(done, "token_level_scores")),
        strict=True,
    ):
        over = report.num_response_tokens - 1  # of 5 tokens the last four are the buffer
        assert float(scores.sum()) == pytest.approx((report.score or 0.0) - 2.0 * over / 4, abs=1e-6)
        seen += over > 0
    assert seen


def test_files_without_sources_of_their_own_have_shares_by_their_names(
    project: Project, tmp_path: Path
) -> None:
    config = project.config("trainer.max_steps=null", "trainer.num_epochs=1")
    (first,) = config.data.train_files
    other = tmp_path / f"other{Path(first).suffix}"
    shutil.copy(first, other)
    shares = {Path(first).stem: 0.25, "other": 0.75}
    data = replace(config.data, train_files=(first, str(other)), source_shares=shares)
    loaded = load_training_data(replace(config, data=data))
    half = len(loaded.train.row_numbers) // 2
    visits = [row for _ in range(loaded.num_steps) for _, row in loaded.sampler.next()]
    assert sum(row < half for row in visits) == half, "the file with the smaller share is visited once"
    assert sum(row >= half for row in visits) == 3 * half


def test_weights_of_data_sources_set_how_often_prompts_come(project: Project) -> None:
    config = project.config("trainer.max_steps=null", "trainer.num_epochs=2")

    def data(weights: dict[str, float]) -> TrainingData:
        return load_training_data(replace(config, data=replace(config.data, source_weights=weights)))

    plain = data({})
    (source,) = set(plain.train.data_sources.values())
    assert data({source: 3.0}).num_steps == 3 * plain.num_steps
    half = data({source: 0.5})
    visits = [visit for _ in range(half.num_steps) for visit in half.sampler.next()]
    assert sorted(row for _, row in visits) == sorted(plain.train.row_numbers), "half of them in each epoch"
    with pytest.raises(ValueError, match="data.source_weights names 'gsm', but no row has that data source"):
        data({"gsm": 2.0})
