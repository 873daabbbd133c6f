"""Runs whose memory is too short: rehearsed before the first step, halved while they train, continued as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_healing import recovery_of
from test_ray_runs import RAY
from tiny_runs import Done, Project, chain_of, resume_in, train_in

from strop.controller import PlacesNotFree, WorkerFailed
from strop.controller.ray.errors import Failure, RankFailed
from strop.data.readers import read_rows
from strop.data.sft.dataset import SftDataset
from strop.engines.kinds import TrainableEngine
from strop.engines.tokenizer import load_tokenizer
from strop.engines.tokens import Tokens
from strop.protocol import columns
from strop.rollout.engine_group import EngineGroup
from strop.run import RunFolder
from strop.trainer.rehearsal import bytes_left, longest_batch
from strop.trainer.sft.trainer import fine_tune, make_sft_batch
from strop.trainer.start import start_run
from strop.trainer.train import train
from strop.workers.rehearsal import Group, Rehearsal, rehearsed

WHOLE, HALF = 128, 64
"""Tokens of a micro-batch; a step has about 150."""
TOO_MANY_BYTES = 1 << 55
TWO_STEPS = ("trainer.max_steps=2", "run.save_every=1", "data.val_files=[]")


def budget(tokens: int, *roles: str) -> list[str]:
    return [f"{role}.engine.max_tokens_per_device={tokens}" for role in roles or ("actor",)]


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packed tokens of the passes that failed: those above HALF ask for memory that no process has."""
    failed: list[int] = []
    whole = Tokens._every_hidden

    def every_hidden(self: Tokens) -> torch.Tensor:
        if self.num_tokens > HALF:
            failed.append(self.num_tokens)
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
        return whole(self)

    monkeypatch.setattr(Tokens, "_every_hidden", every_hidden)
    return failed


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    with RunFolder.open(folder, read_only=True) as run:
        return run.events.read(kind)


def links(folder: Path) -> list[str]:
    return [link.chain for link in chain_of(folder)]


# ---------------------------------------------------------------- rehearsal


def test_a_rehearsed_run_is_the_run_without(project: Project, on_policy: Done, tmp_path: Path) -> None:
    settings = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
    done = train_in(tmp_path / "run", project.config(*settings, "trainer.rehearse_longest_batch=true"))
    assert links(done.folder) == links(on_policy.folder)
    (event,) = events(done.folder, "rehearsal")
    # Four prompts of 24 tokens, each with four answers of 5 of which the last token is not read.
    assert (event["role"], event["micro_batches"], event["tokens"]) == ("actor", 1, 4 * (24 + 4 * 4))
    assert event["peak_bytes"] > 100 << 20
    (line,) = [line for line in done.said if line.startswith("rehearsal: ")]
    assert line.startswith("rehearsal: actor: 1 micro-batch of up to 160 tokens in ")
    assert not events(on_policy.folder, "rehearsal"), "on a CPU it is not asked for"


def test_updates_leave_to_generation_what_the_hungriest_of_them_leaves() -> None:
    def found(peak: int | None, total: int | None) -> Rehearsal:
        return Rehearsal(num_micro_batches=1, tokens=1, seconds=1.0, peak_bytes=peak, total_bytes=total)

    actor, critic = found(40, 100), found(70, 100)
    assert bytes_left({"actor": actor, "critic": critic}, ()) == 25, "a twentieth is spare"
    assert bytes_left({"actor": actor, "critic": critic}, ("critic",)) == 55, "it is on other devices"
    assert bytes_left({"actor": found(99, 100)}, ()) == 0
    assert bytes_left({"actor": found(40, None)}, ()) is None, "of a CPU"


def test_every_role_that_learns_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, project: Project, tmp_path: Path
) -> None:
    left: list[int] = []
    monkeypatch.setattr(EngineGroup, "leave_for_updates", lambda self, num_bytes: left.append(num_bytes))
    monkeypatch.setattr(
        "strop.trainer.rehearsal.bytes_left", lambda found, apart: len(found)
    )  # as on an accelerator
    roles = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "actor.samples_per_update=9"]
    settings = [*roles, *TWO_STEPS, *budget(40), *budget(80, "critic")]
    plain = train_in(tmp_path / "plain", project.config(*settings))
    done = train_in(tmp_path / "run", project.config(*settings, "trainer.rehearse_longest_batch=true"))
    assert links(done.folder) == links(plain.folder)
    found = [(e["role"], e["micro_batches"], e["tokens"]) for e in events(done.folder, "rehearsal")]
    assert found == [("critic", 2, 80), ("actor", 2, 40)]
    assert left == [2], "generation hears of both"


def test_the_longest_batch_is_no_larger_than_an_update_or_two_micro_batches(project: Project) -> None:
    config = project.config("actor.samples_per_update=3", *budget(40))
    assert longest_batch(config, "actor") == [(24, (5, 5, 5))]
    wide = project.config("rollout.samples_per_prompt=64", *budget(40))
    assert longest_batch(wide, "actor") == [(24, (5,) * 20)]
    pipeline = project.config(
        "resources.runtime=ray", "resources.ranks=2", "actor.engine.pipeline_parallel=2", *budget(40)
    )
    assert len(longest_batch(pipeline, "actor")) == 2


def test_what_does_not_fit_is_found_before_the_first_step(
    project: Project, tmp_path: Path, short_memory: list[int]
) -> None:
    """The run goes on with half, and is from then on the run that began with half."""
    settings = ["algorithm.adv_estimator=rloo", *TWO_STEPS]
    half = train_in(tmp_path / "half", project.config(*settings, *budget(HALF)))
    short_memory.clear()
    whole = train_in(
        tmp_path / "whole",
        project.config(*settings, *budget(WHOLE), "trainer.rehearse_longest_batch=true"),
    )
    assert len(short_memory) == 1
    assert [stage.stages["weights"] for stage in whole.chain] == [
        stage.stages["weights"] for stage in half.chain
    ]
    assert links(whole.folder) == links(half.folder)
    (event,) = events(whole.folder, "out_of_memory")
    assert (event["step"], event["role"], event["setting"], event["held"]) == (0, "actor", WHOLE, HALF)
    (line,) = [line for line in whole.said if "memory ran out" in line]
    assert f"set actor.engine.max_tokens_per_device={HALF}" in line
    assert "you tried to allocate 36028797018963968 bytes" in line
    assert [step["perf/out_of_memory"] for step in whole.steps] == [0.0, 0.0]


def test_what_does_not_fit_at_all_ends_before_the_first_step(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)

    config = project.config("data.val_files=[]", "trainer.rehearse_longest_batch=true")
    with start_run(tmp_path / "run", config, command=["strop", "train"]).run as run:
        monkeypatch.setattr("strop.engines.head.Head.log_probs", none)
        with pytest.raises(
            RuntimeError, match="memory ran out in a micro-batch of .* model.gradient_checkpointing=true"
        ):
            train(config, run, say=lambda _: None)
        assert run.remove_unstarted(RuntimeError()), "nothing was begun"


# ---------------------------------------------------------------- while it trains


def test_a_run_goes_on_with_half_and_is_continued_with_it(
    project: Project, tmp_path: Path, short_memory: list[int]
) -> None:
    settings = ["algorithm.use_kl_loss=true", *TWO_STEPS]
    half = train_in(
        tmp_path / "half",
        project.config(*settings, *budget(HALF, "actor", "reference"), "trainer.max_steps=3"),
    )
    short_memory.clear()
    whole = train_in(tmp_path / "whole", project.config(*settings, *budget(WHOLE, "actor", "reference")))
    assert len(short_memory) == 2, "once in each role"
    assert [step["perf/out_of_memory"] for step in whole.steps] == [2.0, 0.0]
    assert {event["role"] for event in events(whole.folder, "out_of_memory")} == {"actor", "reference"}
    longer = resume_in(whole.folder, "trainer.max_steps=3")
    assert len(short_memory) == 2, "a continuation begins with what held"
    assert links(longer.folder) == links(half.folder)
    with RunFolder.open(longer.folder, read_only=True) as run:
        run.ledger.check()


def test_a_setting_that_was_changed_is_taken_at_its_word(
    project: Project, tmp_path: Path, short_memory: list[int]
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*TWO_STEPS, *budget(WHOLE)))
    assert len(short_memory) == 1
    longer = resume_in(whole.folder, "trainer.max_steps=3", *budget(WHOLE + 1))
    assert len(short_memory) == 2
    assert [event["held"] for event in events(longer.folder, "out_of_memory")] == [HALF, HALF]


def groups_rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Groups that roles will have been asked to rehearse."""
    asked: list[Group] = []

    def noted(
        engine: TrainableEngine, groups: Sequence[Group], loss: Callable[[Tokens], torch.Tensor]
    ) -> Rehearsal:
        asked.extend(groups)
        return rehearsed(engine, groups, loss)

    monkeypatch.setattr("strop.workers.models.rehearsed", noted)
    return asked


def test_fine_tuning_goes_on_with_half(
    project: Project, tmp_path: Path, short_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tuned(name: str, *settings: str) -> tuple[Path, list[str]]:
        said: list[str] = []
        config = project.config("sft.max_steps=2", "sft.examples_per_update=9", *settings)
        with start_run(tmp_path / name, config, command=["strop", "sft"]).run as run:
            fine_tune(config, run, say=said.append)
        return tmp_path / name, said

    half, _ = tuned("half", f"sft.engine.max_tokens_per_device={HALF}")
    short_memory.clear()
    whole, said = tuned("whole", f"sft.engine.max_tokens_per_device={WHOLE}")
    lengths = groups_rehearsed(monkeypatch)
    with_rehearsal, also_said = tuned(
        "rehearsed", f"sft.engine.max_tokens_per_device={WHOLE}", "trainer.rehearse_longest_batch=true"
    )
    assert len(short_memory) == 2
    assert links(whole) == links(with_rehearsal) == links(half)
    lines = [line for line in said if "memory ran out" in line]
    assert f"set sft.engine.max_tokens_per_device={HALF}" in lines[0]
    assert any(line.startswith("rehearsal: actor: ") for line in also_said)
    config = project.config()
    rows, data = read_rows([project.task.sft]), config.sft.data
    dataset = SftDataset(rows, load_tokenizer(config.model), data)
    batch = make_sft_batch([dataset[number] for number in range(len(dataset))])
    prompts, responses = (columns.row_lengths(batch.tensors()[name]) for name in ("prompts", "responses"))
    longest = max(zip((prompts + responses).tolist(), responses.tolist(), strict=True))
    assert {(prompt + sum(of_row), *of_row) for prompt, of_row in lengths} == {longest}
    assert longest[1] < longest[0] - 1, "the loss is on the answer alone"
    numbers = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["perf/out_of_memory"] for line in numbers if "train/loss" in line] == [1.0, 0.0]


# ---------------------------------------------------------------- several ranks


def out_of_memory(
    smaller: int | None,
    *,
    tokens: int = 100,
    role: str = "actor",
    name: str = "strop.engines.token_budget.OutOfMemory",
) -> WorkerFailed:
    failure = Failure(
        role=role, rank=1, node="here", pid=7, method="update_policy", exception_type=name, message="no memory",
        facts={"tokens": tokens},
    )  # fmt: skip
    return RankFailed(
        failure if smaller is None else replace(failure, facts={**failure.facts, "smaller": smaller})
    )


def died() -> WorkerFailed:
    return RankFailed(Failure(role="actor", rank=1, node="here", pid=7, method="load", exit_signal="SIGKILL"))


def test_ranks_begin_again_with_the_bound_of_the_error_until_a_row_alone_is_too_much(
    project: Project, tmp_path: Path
) -> None:
    settings = ["resources.runtime=ray", "resources.ranks=2", *budget(160), "run.max_restarts=0"]
    recovery, run, said = recovery_of(project, tmp_path / "run", *settings)
    with run:
        assert recovery.roll_back(out_of_memory(40)) is None, "from the beginning: nothing was saved"
        assert recovery.roll_back(out_of_memory(20, tokens=35)) is None
        with pytest.raises(WorkerFailed, match="raised strop.engines.token_budget.OutOfMemory"):
            recovery.roll_back(out_of_memory(None))
        lowered = [(event["held"], event["tokens"]) for event in run.events.read("out_of_memory")]
        assert lowered == [(40, 100), (20, 35)]
        assert [event["number"] for event in run.events.read("restarted")] == [1, 2]
    assert (
        "no memory during update_policy; the workers are made again, with actor.engine.max_tokens_per_device=40"
        in said[0]
    )


def test_a_process_that_dies_while_models_load_after_a_lowering_is_made_again(
    project: Project, tmp_path: Path
) -> None:
    """The lowering itself is none of the run.max_restarts."""
    settings = ["resources.runtime=ray", "resources.ranks=2", *budget(160), "run.max_restarts=1"]
    recovery, run, said = recovery_of(project, tmp_path / "run", *settings)
    with run:
        assert not recovery.is_recovering
        recovery.roll_back(out_of_memory(80))
        assert recovery.is_recovering, "an error before the roles have started is mended too"
        recovery.roll_back(died())
        assert "(1 of run.max_restarts=1)" in said[-2]
        recovery.roll_back(out_of_memory(40))
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            recovery.roll_back(died())


def test_machines_that_are_not_free_after_a_lowering_are_counted_again(
    project: Project, tmp_path: Path
) -> None:
    elastic = ("resources.runtime=ray", "resources.ranks=2", "resources.nodes=2", "resources.min_nodes=1")
    recovery, run, said = recovery_of(project, tmp_path / "run", *elastic, *budget(160))
    with run:
        recovery.roll_back(out_of_memory(80))
        recovery.place_again(PlacesNotFree("1 of 2 processes was placed"))
    assert said[-2] == "1 of 2 processes was placed; the machines are counted again"


def test_a_lowering_behind_a_new_checkpoint_is_the_first_in_a_row(project: Project, tmp_path: Path) -> None:
    settings = ["resources.runtime=ray", "resources.ranks=2", *budget(160)]
    recovery, run, _ = recovery_of(project, tmp_path / "run", *settings)
    with run:
        recovery.roll_back(died())
        pending = run.checkpoints.begin(3, facts={})
        (pending.folder / "weights").write_bytes(b"3")
        pending.seal()
        checkpoint = recovery.roll_back(out_of_memory(80))
        assert checkpoint is not None
        assert checkpoint.step == 3
        assert [event["number"] for event in run.events.read("restarted")][-1] == 1


def test_what_smaller_micro_batches_cannot_help_ends_the_run(project: Project, tmp_path: Path) -> None:
    ranks = ["resources.runtime=ray", "resources.ranks=2"]
    for name, error, settings in [
        ("others", out_of_memory(40, name="torch.OutOfMemoryError"), ranks),
        ("rollout", out_of_memory(40, role="rollout"), ranks),
        ("a row", out_of_memory(None), ranks),
    ]:
        recovery, run, _ = recovery_of(project, tmp_path / name, *settings)
        with run, pytest.raises(WorkerFailed):
            recovery.roll_back(error)


LOSS = f"""
from pathlib import Path

import torch
import torch.distributed as dist
from strop.algorithms.losses import register_policy_loss
from strop.algorithms.verl_aggregation import agg_loss


@register_policy_loss("short")
def short(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
          rollout_is_weights=None):
    if dist.get_rank() == 1 and not Path("MARK").exists():
        Path("MARK").touch()
        torch.empty({TOO_MANY_BYTES}, dtype=torch.uint8)
    losses = -advantages * torch.exp(log_prob - old_log_prob)
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {{}}
"""


@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_run_on_two_ranks_whose_memory_is_too_short_on_one_begins_again_with_half(
    project: Project, tmp_path: Path
) -> None:
    """A rank has two groups of at most 40 tokens in a step. The first pass of the policy loss fails on one rank."""
    (tmp_path / "failed").touch()
    (tmp_path / "short.py").write_text(LOSS.replace("MARK", str(tmp_path / "failed")))

    def trained(name: str, tokens: int) -> tuple[list[str], list[str]]:
        config = project.config(
            *RAY, "resources.ranks=2", *TWO_STEPS, *budget(tokens), f"algorithm.extensions=['{tmp_path}/short.py']",
            "algorithm.policy_loss=short", "run.max_restarts=0",
        )  # fmt: skip
        said: list[str] = []
        with start_run(tmp_path / name, config, command=["strop", "train"]).run as run:
            train(config, run, say=said.append)
        return [link.stages["weights"] for link in chain_of(tmp_path / name)], said

    expected, _ = trained("half", 40)
    (tmp_path / "failed").unlink()
    found, said = trained("whole", 160)
    assert sum("are made again, with actor.engine.max_tokens_per_device=40" in line for line in said) == 1
    (event,) = events(tmp_path / "whole", "out_of_memory")
    assert event["held"] == 40
    assert 40 < event["tokens"] <= 160
    assert found == expected
