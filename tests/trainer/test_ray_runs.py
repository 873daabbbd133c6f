"""Whole runs on Ray: the same program in other processes, on other ranks, with roles together or apart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from command_lines import command_line
from ray_cluster import shared_cluster
from tiny_runs import Done, Project, check_records, resume_in, stages_that_differ, train_in

from strop.config import save_config
from strop.observability.trackers.group import trackers
from strop.protocol import columns
from strop.run import RunFolder

DEADLINE_S = 240.0
"""Longest wait for a process to come to the place where something happens to it."""
RAY = ["resources.runtime=ray", "resources.cpus_per_rank=0.25"]
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "critic.optim.lr=1e-3",
    "actor.samples_per_update=9",
    "critic.epochs=2",
]
"""Every role that learns or compares, and several updates per step."""


def log_prob_columns(done: Done, step: int) -> list[torch.Tensor]:
    """What the roles computed for the rows of a step."""
    tensors = done.records[step - 1].fetched.tensors()  # type: ignore[union-attr]
    names = ("old_log_probs", "ref_log_prob", "values", "advantages", "returns", "token_level_rewards")
    return [columns.flat(tensors[name]) for name in names]


def test_a_worker_in_another_process_does_the_same_to_the_bit(
    on_policy: Done, project: Project, tmp_path: Path
) -> None:
    shared_cluster()  # the run joins it
    settings = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
    done = train_in(tmp_path / "run", project.config(*settings, *RAY))
    assert [one.chain for one in done.chain] == [one.chain for one in on_policy.chain]
    check_records(done.folder, num_steps=3)
    assert token_numbers(done) == token_numbers(on_policy)


def token_numbers(done: Done) -> dict[str, list[list[float]]]:
    """What samples of the last step are stored with, by id."""
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(3)
    names = ("old_log_probs", "entropys", "advantages")
    return {row["id"]: [row[name] for name in names] for row in rows}


@pytest.mark.dist
def test_ppo_on_two_ranks_is_ppo_on_one(project: Project, tmp_path: Path) -> None:
    """Sums over two ranks are added in another order, so bits part after the first forward pass; numbers do not.

    In float64: AdamW's first steps are nearly the signs of gradients, and make much of float32's rounding.
    """
    settings = [*PPO, "model.dtype=float64"]
    one = train_in(tmp_path / "one", project.config(*settings))
    two = train_in(tmp_path / "two", project.config(*settings, *RAY, "resources.ranks=2"))
    differing = stages_that_differ(one.chain, two.chain)
    assert not {"data", "prompt_tokens", "sampled_tokens"} & set(differing), (
        "the same samples in the first step"
    )
    for step in (1, 2, 3):
        for ours, theirs in zip(log_prob_columns(two, step), log_prob_columns(one, step), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    stored, expected = token_numbers(two), token_numbers(one)
    assert stored.keys() == expected.keys()
    for name, numbers in expected.items():
        torch.testing.assert_close(torch.tensor(stored[name]), torch.tensor(numbers), rtol=0, atol=1e-5)
    for step in (1, 2, 3):
        for name in (
            "actor/pg_loss",
            "actor/grad_norm",
            "critic/vf_loss",
            "critic/grad_norm",
            "actor/reward_kl_penalty",
        ):
            assert two.steps[step - 1][name] == pytest.approx(one.steps[step - 1][name], abs=1e-6), name
    check_records(two.folder, num_steps=3)


@pytest.mark.dist
def test_rollout_workers_apart_get_the_weights_of_every_version(
    on_policy: Done, project: Project, tmp_path: Path
) -> None:
    settings = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
    done = train_in(
        tmp_path / "run", project.config(*settings, *RAY, "resources.apart={rollout: 1, reference: 1}")
    )
    assert [one.chain for one in done.chain] == [one.chain for one in on_policy.chain]


@pytest.mark.dist
def test_weights_in_half_precision_go_through_a_store_as_changes_alone(
    project: Project, tmp_path: Path
) -> None:
    """The rollout worker holds rounded layers, and has the bits of a run in which generation uses the actor's own."""
    settings = ["model.dtype=bfloat16", "actor.optim.lr=1e-5"]
    here = train_in(tmp_path / "here", project.config(*settings))
    store = tmp_path / "store"
    apart = [*RAY, "resources.apart={rollout: 1}", f"resources.weight_store={store}"]
    there = train_in(tmp_path / "there", project.config(*settings, *apart))
    assert [one.chain for one in there.chain] == [one.chain for one in here.chain]
    for step in there.steps:
        assert 0 < step["perf/weight_sync_share"] < 0.9
        assert step["perf/weight_sync_gb"] > 0
    assert not any(name.startswith("perf/weight_sync") for step in here.steps for name in step)
    assert list(store.iterdir()) == [], "nothing is left there"


@pytest.mark.dist
def test_a_long_step_of_two_rollout_workers_shows_how_far_it_is(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 samples of 0.4 s each, on two workers with one scorer each."""
    notes: list[str] = []

    class Notes:
        def log(self, step: int, metrics: object) -> None: ...

        def note(self, text: str) -> None:
            notes.append(text)

        def close(self) -> None: ...

    monkeypatch.setitem(trackers, "notes", lambda setup: Notes())
    monkeypatch.setattr("strop.workers.progress.PERIOD_S", 0.1)
    reward = tmp_path / "slow.py"
    reward.write_text(
        "import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0.4)\n    return float(len(solution_str))\n"
    )
    apart = ["resources.apart={rollout: 2}", "trainer.max_steps=1", "eval.before_train=false"]
    once = ["data.val_files=[]", "trainer.trackers=[jsonl,notes]", f"reward.path={reward}"]
    train_in(tmp_path / "run", project.config(*RAY, *apart, *once))
    assert notes[0] == "0 of 16 episodes done, 0 scored"
    counts = [int(note.split()[0]) for note in notes]
    assert counts == sorted(counts)
    assert len(set(counts) - {0, 16}) > 4, notes


@pytest.mark.dist
def test_a_run_saved_on_two_ranks_goes_on_on_one_and_on_four(project: Project, tmp_path: Path) -> None:
    settings = [
        *PPO,
        *RAY,
        "trainer.max_steps=3",
        "run.save_every=1",
        "run.keep_last=5",
        "run.async_save=true",
    ]
    whole = train_in(tmp_path / "whole", project.config(*settings, "resources.ranks=2"))
    for ranks in (1, 4):
        folder = cut_after(whole.folder, tmp_path / f"on-{ranks}", step=2)
        done = resume_in(folder, f"resources.ranks={ranks}")
        assert [record.step for record in done.records] == [3]
        ours, theirs = done.steps[-1], whole.steps[-1]
        for name in (
            "critic/score/mean",
            "actor/grad_norm",
            "critic/vf_loss",
            "actor/reward_kl_penalty_coeff",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), (ranks, name)


@pytest.mark.dist
def test_a_killed_worker_ends_the_run_with_its_name_and_the_run_goes_on_later(
    project: Project, tmp_path: Path
) -> None:
    once = ["run.save_every=1", "trainer.max_steps=40", "run.max_restarts=0"]
    config = project.config(*RAY, "resources.ranks=2", *once)
    save_config(config, tmp_path / "config.yaml")
    run = tmp_path / "run"
    process = start("train", "--config", tmp_path / "config.yaml", "--out", run)
    wait_until(lambda: latest_step(run) >= 2, process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(worker_processes(family)[-1].pid, signal.SIGKILL)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, said
    assert "SIGKILL" in said, said
    assert "rank" in said
    wait_until_gone(family)
    with RunFolder.open(run, read_only=True) as folder:
        (crash,) = folder.events.read("crashed")
    assert "SIGKILL" in crash["error"]
    at = latest_step(run)
    again = start("train", "--resume", run, "resources.ranks=1")
    wait_until(lambda: latest_step(run) > at, again)
    again.send_signal(signal.SIGINT)
    _, said = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 130, said
    assert f"resumed at step {at}: " in said


@pytest.mark.dist
def test_nothing_is_left_of_a_killed_controller(project: Project, tmp_path: Path) -> None:
    config = project.config(*RAY, "resources.ranks=2", "run.save_every=1", "trainer.max_steps=40")
    save_config(config, tmp_path / "config.yaml")
    process = start("train", "--config", tmp_path / "config.yaml", "--out", tmp_path / "run")
    wait_until(lambda: latest_step(tmp_path / "run") >= 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(worker_processes(family)) >= 2
    process.kill()
    process.communicate(timeout=10)
    wait_until_gone(family)


def listening(family: list[psutil.Process]) -> set[tuple[int, str, str, int]]:
    """What the system says that processes listen on."""
    found = set()
    for one in family:
        for c in one.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr):
                address = c.laddr.ip.removeprefix("::ffff:")
                found.add((one.pid, "tcp" if c.type == socket.SOCK_STREAM else "udp", address, c.laddr.port))
    return found


@pytest.mark.dist
def test_all_sockets_of_a_run_are_private_and_strangers_change_nothing(
    project: Project, tmp_path: Path
) -> None:
    """Every port is on loopback; noise on each is ignored."""
    config = project.config(
        *RAY, "resources.ranks=2", "resources.apart={rollout: 1}", "run.save_every=1", "trainer.max_steps=400",
        "trainer.num_epochs=400",
    )  # fmt: skip
    save_config(config, tmp_path / "config.yaml")
    run = tmp_path / "run"
    process = start("train", "--config", tmp_path / "config.yaml", "--out", run)
    wait_until(lambda: latest_step(run) >= 2, process)
    controller = psutil.Process(process.pid)
    family = [controller, *controller.children(recursive=True)]
    listed = listening(family)
    assert {address for _, _, address, _ in listed} <= {"127.0.0.1", "::1"}
    unix = {Path(c.laddr) for one in family for c in one.net_connections("unix") if c.laddr}
    (ray_socket,) = {path for path in unix if path.name == "raylet"}
    noise = (4096).to_bytes(4, "big") + b"[" * 4096
    strangers = []
    for _, protocol, address, port in listed:
        if protocol == "tcp":
            strangers.append(socket.create_connection((address, port), timeout=DEADLINE_S))
            with contextlib.suppress(OSError):
                strangers[-1].sendall(noise)
    folder = ray_socket.parents[2]
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    token = Path.home() / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    if os.getuid() == 0:
        another = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for words in (["cat", token], ["ls", folder], ["ls", folder.parent]):
            assert subprocess.run([*another, *words], capture_output=True, check=False).returncode, words
    at = latest_step(run)
    wait_until(lambda: latest_step(run) > at + 2, process)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, words
    for one in strangers:
        one.close()
    log = (run / "logs" / "main-0.log").read_text()
    assert log.count("turned away at the weight sync") == 1
    assert log.count("turned away at the rendezvous of a process group") == 1
    assert "[[" not in log
    wait_until_gone(family[1:])
    assert not folder.parent.exists()


@pytest.mark.slow
def test_more_ranks_than_the_machine_has_fail_at_once(project: Project, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"(?s)1000.*resources\.(ranks|cpus_per_rank)"):
        train_in(tmp_path / "run", project.config("resources.runtime=ray", "resources.ranks=1000"))
    assert time.monotonic() - started < 120


def start(*words: object) -> subprocess.Popen[str]:
    """`strop WORDS` in a process of its own."""
    command = [sys.executable, "-m", "strop.cli.main", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def latest_step(run: Path) -> int:
    """The newest checkpoint of a run; 0 when there is none."""
    try:
        return int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    except FileNotFoundError:
        return 0


def wait_until(is_time, process: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + DEADLINE_S
    while not is_time():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.05)


def worker_processes(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that hold workers, among the descendants of a controller."""
    return [one for one in family if "WorkerProcess" in command_line(one)]


def wait_until_gone(family: list[psutil.Process]) -> None:
    """All of them end within a while."""
    _, alive = psutil.wait_procs(family, timeout=60)
    left = [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def cut_after(source: Path, target: Path, *, step: int) -> Path:
    """A copy of a run as it was after a step: killed there."""
    shutil.copytree(source, target, symlinks=True)
    (target / "model").unlink(missing_ok=True)
    lines = (target / "events.jsonl").read_text().splitlines(keepends=True)
    (target / "events.jsonl").write_text("".join(line for line in lines if '"kind":"finished"' not in line))
    for folder in (target / "checkpoints").glob("global_step_*"):
        if int(folder.name.removeprefix("global_step_")) > step:
            shutil.rmtree(folder)
    return target
