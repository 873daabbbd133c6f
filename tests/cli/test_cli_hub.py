"""Commands on a model of the hub: fetched, recorded, offline, resumed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
from cli_calls import Project, cli, interrupted_after
from hub_cases import StandIn, hub, serving
from store_cases import opened

__all__ = ["hub"]  # the fixture


@pytest.mark.slow
def test_a_run_names_the_revision_that_it_began_with_and_goes_on_with_it(
    project: Project, hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add_folder("tiny/model", project.model, **{"model.bin": b"pickle"})
    run = tmp_path / "run"
    words = ["--config", project.config, "model.path=tiny/model", "trainer.max_steps=2", "run.save_every=1"]
    with interrupted_after(step=1):
        begun = cli("train", *words, "--out", run)
    assert begun.code == 130, begun.err
    assert f"model.path: tiny/model, revision {commit}" in begun.err
    model = json.loads((run / "models.json").read_text())["model.path"]
    assert (model["source"], model["revision"]) == ("tiny/model", commit)
    weights = (project.model / "model.safetensors").read_bytes()
    assert model["files"]["model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert "model.bin" not in hub.bodies()
    assert "path: tiny/model\n" in (run / "config.yaml").read_text()

    hub.add_folder(
        "tiny/model", project.model, **{"config.json": b"{}"}
    )  # main has moved, and cannot be used
    damaged = Path(model["folder"]) / "config.json"
    kept = damaged.read_text()
    damaged.unlink()
    damaged.write_text(kept + " ")
    assert "config.json of tiny/model" in cli("train", "--resume", run).sentence
    damaged.write_text(kept)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = cli("train", "--resume", run, "--json")
    assert done.code == 0, done.err
    assert done.record["steps"] == 2


def test_commands_on_a_model_take_a_name_of_the_hub(project: Project, hub: StandIn, tmp_path: Path) -> None:
    commit = hub.add_folder("tiny/model", project.model)
    found = cli(
        "eval", f"tiny/model@{commit}", "--config", project.config, "data.max_val_prompts=1", "--json"
    )
    assert found.code == 0, found.err
    assert f"model: tiny/model@{commit}, revision {commit}" in found.err
    assert (
        "MODEL 'tiny/modle' cannot be fetched: there is no such model" in cli("eval", "tiny/modle").sentence
    )
    refused = cli("eval", "tiny/model", "--config", project.config, "model.revision=main")
    assert "set MODEL_OR_RUN to ORG/NAME@REVISION" in refused.sentence
    run = tmp_path / "run"
    wrong = cli("train", "--config", project.config, "model.path=tiny/modle", "--out", run)
    assert "model.path 'tiny/modle' cannot be fetched" in wrong.sentence
    assert "the nearest is tiny/model" in wrong.sentence
    assert not run.exists()


def test_a_url_that_gives_nothing_ends_before_anything_is_loaded(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with opened("hdfs", tmp_path, monkeypatch) as store:
        store.put("config.json", b"{}")
        with_model = ["train", "--config", project.config, "--out", run, f"model.path={store.elsewhere}"]
        missing = cli(*with_model)
        assert "cannot be fetched: FileNotFoundError: File does not exist" in missing.sentence
        assert missing.sentence.endswith("check the address")
        store.close()
        denied = cli(*with_model, f"model.path={store.root}")
        assert "Permission denied" in denied.sentence
        rows = cli(
            "train", "--config", project.config, "--out", run, f"data.train_files=[{store.root}/rows.jsonl]"
        )
        assert "rows.jsonl' cannot be fetched (PermissionError: Permission denied" in rows.sentence
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["web", "hdfs"])
def test_a_run_with_model_and_rows_at_urls(
    project: Project, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with opened(kind, tmp_path, monkeypatch) as store:
        for file in project.model.iterdir():
            store.put(f"model/{file.name}", file.read_bytes())
        store.put("rows.parquet", project.data("train").read_bytes())
        words = [f"model.path={store.root}/model", f"data.train_files=[{store.root}/rows.parquet]",
                 "trainer.max_steps=2", "run.save_every=1"]  # fmt: skip
        with interrupted_after(step=1):
            begun = cli("train", "--config", project.config, *words, "--out", run)
        assert begun.code == 130, begun.err
        model = json.loads((run / "models.json").read_text())["model.path"]
        assert (model["source"], model["kind"]) == (f"{store.root}/model", "url")
        weights = (project.model / "model.safetensors").read_bytes()
        assert model["files"]["model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()
        store.put("model/config.json", b"{}")  # another state, which cannot be used
        done = cli("train", "--resume", run, "--json")
        assert done.code == 0, done.err
        assert done.record["steps"] == 2


@pytest.mark.slow
def test_the_real_client_is_told_by_its_own_variables(project: Project, tmp_path: Path) -> None:
    with serving() as hub:
        commit = hub.add_folder("tiny/model", project.model)
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
        runs = [(tmp_path / "online", {}), (tmp_path / "offline", {"HF_HUB_OFFLINE": "1"})]
        for run, more in runs:
            asked = len(hub.asked)
            done = subprocess.run(
                [sys.executable, "-m", "strop", "train", "--config", str(project.config), "model.path=tiny/model",
                 "trainer.max_steps=1", "--out", str(run)],
                env={**os.environ, **settings, **more}, capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert json.loads((run / "models.json").read_text())["model.path"]["revision"] == commit
            assert (len(hub.asked) > asked) == (not more)
    assert (
        tmp_path / "home" / "hub" / "models--tiny--model" / "snapshots" / commit / "config.json"
    ).is_file()


_ON_OTHER_MACHINES = """
import shutil, sys
from pathlib import Path
from strop.cli.main import main
from strop.trainer import loop

made = loop.make_worker_groups
kept = Path(sys.argv.pop(1))


def make_worker_groups(*arguments, **options):
    if kept.name:  # what the machine of the controller has, those of the ranks have not
        shutil.rmtree(kept)
    return made(*arguments, **options)


loop.make_worker_groups = make_worker_groups
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_model", [True, False], ids=["same machine", "machines without the model"])
def test_two_ranks_on_ray_fetch_a_model_once_for_their_machine(
    project: Project, has_model: bool, tmp_path: Path
) -> None:
    script, run, home = tmp_path / "program.py", tmp_path / "run", tmp_path / "home"
    script.write_text(_ON_OTHER_MACHINES)
    kept = home / "hub" / "models--tiny--model"
    with serving() as hub:
        commit = hub.add_folder("tiny/model", project.model)
        hub.slow_s = 0.05  # the second rank comes while the first one fetches
        done = subprocess.run(
            [sys.executable, script, "" if has_model else kept, "train", "--config", project.config,
             "model.path=tiny/model", "trainer.max_steps=1", "resources.runtime=ray", "resources.ranks=2",
             "resources.cpus_per_rank=0.25", "--out", run],
            env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(home)},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        times = 1 if has_model else 2
        assert [hub.bodies().count(name) for name in ("model.safetensors", "config.json")] == [times, times]
    model = json.loads((run / "models.json").read_text())["model.path"]
    assert (model["source"], model["revision"]) == ("tiny/model", commit)
    assert (kept / "snapshots" / commit / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_reads_its_data_set_at_the_commit_that_it_began_with(
    project: Project, hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = project.data("train").read_bytes()
    commit = hub.add("datasets/me/sums", {"train.parquet": rows})
    run = tmp_path / "run"
    words = ["data.train_files=[hub:me/sums@train]", "trainer.max_steps=2", "run.save_every=1"]
    with interrupted_after(step=1):
        begun = cli("train", "--config", project.config, *words, "--out", run)
    assert begun.code == 130, begun.err
    assert f"data hub:me/sums: hub:me/sums, revision {commit}" in begun.err
    assert json.loads((run / "models.json").read_text()) == {
        "data hub:me/sums": {"source": "hub:me/sums", "kind": "huggingface", "revision": commit}
    }
    assert "hub:me/sums@train\n" in (run / "config.yaml").read_text()

    hub.add("datasets/me/sums", {"train.parquet": b"no rows"})  # it has moved, and cannot be read
    asked = len(hub.asked)
    done = cli("train", "--resume", run, "--json")
    assert done.code == 0, done.err
    assert done.record["steps"] == 2
    assert any(commit in line for line in hub.asked[asked:])
    card = cli("push", run, "--to", "me/model", "--dry-run", "--card", tmp_path / "card.md")
    assert card.code == 0, card.err
    assert f"`hub:me/sums` was read at revision `{commit}`" in (tmp_path / "card.md").read_text()

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    wrong = cli(
        "train", "--config", project.config, "data.train_files=[hub:me/smus]", "--out", tmp_path / "no"
    )
    assert "data entry 'hub:me/smus' cannot be read from the hub: there is no such data set" in wrong.sentence
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_commands_on_a_run_read_its_data_sets_at_the_commits_that_it_read(
    project: Project, hub: StandIn, tmp_path: Path
) -> None:
    files = {f"{split}.parquet": project.data(split).read_bytes() for split in ("train", "val")}
    commit = hub.add(
        "datasets/me/sums", {"train.parquet": files["train.parquet"], "test.parquet": files["val.parquet"]}
    )
    run = tmp_path / "run"
    words = ["data.train_files=[hub:me/sums@train]", "data.val_files=[hub:me/sums@test]", "trainer.max_steps=2",
             "run.save_every=1"]  # fmt: skip
    begun = cli("train", "--config", project.config, *words, "--out", run)
    assert begun.code == 0, begun.err

    hub.add("datasets/me/sums", {"train.parquet": b"no rows", "test.parquet": b"no rows"})  # cannot be read
    for command in (
        ["eval", run], ["eval", f"{run}@all"], ["compare", f"{run}@1", f"{run}@2"], ["score", "same", run, "--check"],
        ["replay", run, "--out", tmp_path / "again"],
    ):  # fmt: skip
        asked = len(hub.asked)
        done = cli(*command, "--json")
        assert done.code == 0, (command, done.err)
        assert not any("/revision/main" in line or line.endswith("/me/sums") for line in hub.asked[asked:]), (
            command
        )
    assert (tmp_path / "again" / "models.json").read_text() == (run / "models.json").read_text()
    assert commit in (run / "models.json").read_text()
    newest = cli("eval", run, "data.val_files=['hub:me/sums@test#main']")
    assert "data entry 'hub:me/sums@test#main' cannot be read from the hub" in newest.sentence
