"""`strop train --from RUN`: a new run that begins with the weights of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_calls import Project, cli, interrupted_after
from safetensors import safe_open
from safetensors.torch import load_file

from strop.run import RunFolder
from strop.trainer.loading import read


def weights(folder: Path) -> dict[str, object]:
    return load_file(folder / "model.safetensors")


def chain(run: Path) -> list[str]:
    with RunFolder.open(run, read_only=True) as folder:
        return [one.chain for one in folder.fingerprints.read()]


def adam_steps(role: Path) -> set[float]:
    """How many steps the moments of a role have seen."""
    (shard,) = role.glob("shard-*.safetensors")
    with safe_open(shard, "pt") as file:
        names = [name for name in file.keys() if name.startswith("optim/step/")]  # noqa: SIM118  (no dict)
        return {float(file.get_tensor(name)) for name in names}


@pytest.fixture(scope="module")
def with_critic(project: Project) -> Path:
    run = project.folder / "critic"
    result = cli(
        "train", "--config", project.config, "--out", run, "algorithm.adv_estimator=gae", "trainer.max_steps=1",
        "critic.optim.lr=1e-2",
    )  # fmt: skip
    assert result.code == 0, result.err
    return run


def test_it_is_the_run_that_the_other_ones_model_would_make(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    shutil.copytree(trained, other, symlinks=True)
    with interrupted_after(step=1):
        begun = cli("train", "--from", other, "--out", run, "trainer.seed=3")
    assert begun.code == 130, begun.err
    assert f"begins with the weights of step 2 of {other}" in begun.err
    shutil.rmtree(other)  # it needs nothing of it any more
    result = cli("train", "--resume", run)
    assert result.code == 0, result.err
    model = trained / "checkpoints" / "global_step_2" / "model"
    plain = cli(
        "train",
        "--config",
        project.config,
        "--out",
        tmp_path / "plain",
        "trainer.seed=3",
        f"model.path={model}",
    )
    assert plain.code == 0, plain.err
    assert chain(run) == chain(tmp_path / "plain")
    assert read(run / "config.yaml").model.path == str(run / "start" / "model")
    with RunFolder.open(run, read_only=True) as folder:
        (event,) = folder.events.read("started_from")
        assert event["id"] == json.loads((trained / "run.json").read_text())["id"]
        assert (event["from_step"], event["taken"]) == (2, ["the weights"])


@pytest.mark.parametrize(
    ("word", "step"), [("@1", 1), pytest.param("", 2, marks=pytest.mark.slow), ("@best", 2)]
)
def test_a_checkpoint_is_chosen(word: str, step: int, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("train", "--from", f"{trained}{word}", "--out", run, "trainer.max_steps=1")
    assert result.code == 0, result.err
    start, model = weights(run / "start" / "model"), trained / "checkpoints" / f"global_step_{step}" / "model"
    assert all(bool((start[name] == value).all()) for name, value in weights(model).items())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_optimizer_comes_along_where_it_is_asked_for(trained: Path, tmp_path: Path) -> None:
    for words, expected in ((("--with-optimizer",), {3.0}), ((), {1.0})):
        run = tmp_path / f"run{len(words)}"
        result = cli("train", "--from", trained, *words, "--out", run, "trainer.max_steps=1")
        assert result.code == 0, result.err
        assert adam_steps(run / "checkpoints" / "global_step_1" / "actor") == expected
        logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
        assert logged["training/global_step"] == 1, "the steps are its own"


def test_a_critic_comes_along(with_critic: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("train", "--from", with_critic, "--with-optimizer", "--out", run)
    assert result.code == 0, result.err
    assert "begins with the weights and the critic and the optimizer's state of step 1" in result.err
    assert read(run / "config.yaml").critic.path == str(run / "start" / "critic")
    head = weights(run / "start" / "critic")["score.weight"]
    assert float(head.abs().max()) > 0  # type: ignore[attr-defined]
    assert adam_steps(run / "checkpoints" / "global_step_1" / "critic") == {2.0}


def test_training_begins_from_a_fine_tuning(project: Project, tuned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("train", "--config", project.config, "--from", tuned, "--out", run, "trainer.max_steps=1")
    assert result.code == 0, result.err
    assert "begins with the weights of step 2" in result.err
    assert "is a run of `strop sft`" in cli("train", "--from", tuned, "--out", tmp_path / "other").sentence


def test_what_cannot_be_begun_is_said_in_a_sentence(
    project: Project, trained: Path, with_critic: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for words, sentence in (
        (("--from", f"{trained}@7"), "no checkpoint of step 7"),
        (("--from", f"{trained}@last"), "'last' is no step; give RUN@NUMBER, RUN@best, or RUN alone"),
        (("--from", tmp_path / "none"), "none does not exist"),
        (("--with-optimizer",), "--with-optimizer belongs to --from RUN"),
        (("--from", trained, f"model.path={project.model}"), "both say what the run begins with"),
        (("--from", trained, "--with-optimizer", "actor.optim.name=muon"), "actor.optim.name is muon, but"),
        (("--from", trained, "--with-optimizer", "model.lora.rank=2"), "does not go with model.lora"),
        (
            ("--from", trained, "--with-optimizer", "algorithm.adv_estimator=gae"),
            "holds no state of the critic's",
        ),
    ):
        found = cli("train", "--out", out, *words).sentence
        assert sentence in found, found
        assert not out.exists()
    assert "so --from has no place here" in cli("train", "--resume", trained, "--from", trained).sentence


def test_a_run_without_model_folders_is_exported_first(project: Project, tmp_path: Path) -> None:
    bare, out = tmp_path / "bare", tmp_path / "out"
    settings = ["run.hf_model=never", "trainer.max_steps=1"]
    assert cli("train", "--config", project.config, "--out", bare, *settings).code == 0
    found = cli("train", "--from", bare, "--out", out).sentence
    assert f"write one with `strop export {bare} --step 1 --out OUT`" in found
    assert not out.exists()


def test_settings_of_somebody_elses_run_bring_no_code(trained: Path, tmp_path: Path) -> None:
    received = tmp_path / "received"
    shutil.copytree(trained, received, symlinks=True)
    with (received / "config.yaml").open("a") as file:
        file.write("# changed\n")
    result = cli("train", "--from", received, "--out", tmp_path / "out", "trainer.max_steps=1")
    assert "--trust-code" in result.sentence
    assert not (tmp_path / "out").exists()
