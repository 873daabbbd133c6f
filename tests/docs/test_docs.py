"""The documentation is true: commands work, shown output appears, names and links exist."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import io
import json
import logging.handlers
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_cases import save
from doc_pages import (
    ROOT,
    Session,
    blocks,
    code_spans,
    declared_metrics,
    entry_point_groups,
    is_declared,
    markdown_files,
    matches,
    prose,
    strop_calls,
)
from rollout.scripted_engine import ScriptedEngine, dying

from strop.cli.main import COMMANDS, command_parser, main
from strop.config import describe, load_config
from strop.config.schema import REMOVED, current_key
from strop.config.sources import preset_names
from strop.controller import auth_listener
from strop.controller.ray.cluster import Node, _is_on_loopback
from strop.controller.ray.errors import Failure, NotEnoughDevices, RankFailed
from strop.controller.ray.node_choice import choose_nodes
from strop.controller.ray.pool import RayResourcePool
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.observability.health import HealthMonitor
from strop.observability.reward_curve import _CURVES
from strop.observability.trackers.console import HEADLINES
from strop.observability.trackers.group import TrackerGroup
from strop.observability.trackers.setup import TrackerSetup
from strop.rewards import Outcome, RewardError, check_failed_share
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.rollout.weight_sync.accounting import TransferState
from strop.rollout.weight_sync.types import SyncIncomplete
from strop.run import CheckpointError, RunError, RunFolder
from strop.run.checkpoints import CheckpointStore
from strop.run.inputs import check_inputs, inputs_of, write_inputs
from strop.run.samples import COLUMNS
from strop.trainer.checks.devices import check_cores
from strop.trainer.config import Config
from strop.trainer.fault_tolerance.signals import Terminated
from strop.trainer.preflight.trial import Preflight
from strop.trainer.sections import ResourcesConfig
from strop.utils.terminal import Interrupted
from strop.utils.verdict import Check
from strop.workers.reports import EpisodeReport, StaleSamples, check_versions

DOCS = ROOT / "docs"
PAGES = markdown_files()
SECTIONS = {field.name for field in fields(Config)}
KEYS = {doc.key: doc for doc in describe(Config)}

NOT_OURS = {
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "trainer.logger",
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", "rollout.temperatur",
    "reward_model.ground_truth",
}  # fmt: skip
"""Keys on the pages that are none of strop's: names of verl's, the typing error that is explained, a column."""
FILE_ENDINGS = {"py", "yaml", "json", "jsonl", "parquet", "md", "png", "txt", "safetensors"}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def own_task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Somebody who has followed docs/own-task.md."""
    num_threads = torch.get_num_threads()
    session = Session(folder=tmp_path_factory.mktemp("own-task"), is_forked=False)
    session.follow(DOCS / "own-task.md")
    yield session
    torch.set_num_threads(num_threads)


# ---------------------------------------------------------------------------------------------- commands


def test_own_task_leaves_what_it_says(own_task: Session) -> None:
    assert (own_task.folder / "runs" / "try" / "model" / "config.json").is_file()
    assert len((own_task.folder / "answers.jsonl").read_text().splitlines()) == 200


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/configuration.md",
        "docs/run-folder.md",
        "docs/moving-in.md",
        "docs/view.md",
        "docs/profile.md",
        "docs/evaluation.md",
    ],
)
def test_pages_after_own_task(own_task: Session, name: str) -> None:
    assert own_task.follow(ROOT / name) >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["quickstart.md", "own-task.md"])
def test_slow_commands(tmp_path: Path, name: str) -> None:
    assert Session(folder=tmp_path, is_patient=True).follow(DOCS / name) >= 3


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_shown_calls_of_strop_can_be_parsed(path: Path) -> None:
    for words in strop_calls(path):
        if words[0].startswith("-") or words[0] == "COMMAND":
            continue
        assert words[0] in COMMANDS, f"{path} shows `strop {' '.join(words)}`, but there is no such command"
        parser, _ = command_parser(words[0])
        known = {option for action in parser._actions for option in action.option_strings}
        for word in words[1:]:
            assert not word.startswith("--") or word in known, (
                f"{path}: strop {words[0]} has no option {word}"
            )


# -------------------------------------------------------------------------------------------------- names


def keys_on(path: Path) -> Iterator[str]:
    """Everything on a page that reads like a configuration key."""
    texts = [*code_spans(path), *(block.text for block in blocks(path) if block.language == "bash")]
    for text in texts:
        for match in re.finditer(r"(?<![\w./-])([a-z_]+)((?:\.[a-z_0-9]+)+)(?![\w/])", text):
            key = match[0]
            if match[1] in SECTIONS and key.rsplit(".", 1)[1] not in FILE_ENDINGS:
                yield key


def test_every_key_of_validation_is_on_a_page() -> None:
    named = {key for path in PAGES for key in keys_on(path)}
    assert {key for key in KEYS if key.startswith("eval.")} - named == set()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_keys_exist(path: Path) -> None:
    for key in set(keys_on(path)) - NOT_OURS:
        if path.name == "CHANGELOG.md":  # where old names stay
            key = current_key(key)
            if key in REMOVED:
                continue
        is_section = any(known.startswith(f"{key}.") for known in KEYS)
        is_entry = any(key.startswith(f"{known}.") and "mapping" in doc.type for known, doc in KEYS.items())
        assert key in KEYS or is_section or is_entry, f"{path} names {key}, which is no configuration key"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_modules_classes_and_functions_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # where old names stay
        return
    for name in re.findall(r"(?<![\w./'-])strop(?:\.[A-Za-z_]\w*)+", "\n".join(code_spans(path))):
        assert name in entry_point_groups() or is_ours(name), f"{path} names {name}, which cannot be imported"


def is_ours(name: str) -> bool:
    """Whether a dotted name is a module, or something in one, or in a class of it."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: Any = importlib.import_module(".".join(words[:count]))
            return all((found := getattr(found, word, None)) is not None for word in words[count:])
    return False


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_presets_exist(path: Path) -> None:
    for section, name in re.findall(r"\b([a-z]+)=([a-z_]+)\b", " ".join(code_spans(path))):
        if section in SECTIONS:
            assert name in preset_names(section), f"{path} names the preset {section}={name}"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_shown_configurations_load(path: Path, tmp_path: Path) -> None:
    shown = [one for one in blocks(path) if one.language == "yaml" and "not run" not in one.notes]
    for number, block in enumerate(shown):
        file = tmp_path / block.notes.get("file", f"{number}.yaml")  # one may build on another
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        assert load_config(Config, source=file).arithmetic()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = [block.text for block in blocks(path) if block.language == "bash"]
    for text in [*shown, *code_spans(path)]:
        for target in re.findall(r"^make ([a-z0-9-]+)", text, flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{path}: no target {target}"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_relative_links_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file) if file else path
        assert there.exists(), f"{path} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(there), f"{path} links to {target}, but there is no such heading"


def test_the_list_of_all_pages_is_complete() -> None:
    page = DOCS / "all-pages.md"
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    linked = {(page.parent / target).resolve() for target in targets}
    pages = {*DOCS.glob("*.md"), *(ROOT / "examples").glob("*/README.md"), ROOT / "CONTRIBUTING.md"} - {page}
    assert not pages - linked


def test_every_command_is_on_the_list_of_all_pages() -> None:
    spans = code_spans(DOCS / "all-pages.md")
    words = {span.removeprefix("strop ").split()[0] for span in spans}
    assert not COMMANDS.keys() - words


def anchors(path: Path) -> set[str]:
    """The names under which the headings of a page can be linked."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --------------------------------------------------------------------------------------------- run folder


def test_every_column_of_the_sample_store_is_explained() -> None:
    assert not set(COLUMNS) - set(code_spans(DOCS / "run-folder.md"))


def test_every_event_of_a_run_is_explained(own_task: Session) -> None:
    with RunFolder.open(own_task.folder / "runs" / "try", read_only=True) as run:
        kinds = {event["kind"] for event in run.events.read()}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "strop").rglob("*.py")]
    kinds |= {kind for text in sources for kind in re.findall(r'events\.append\(\s*"(\w+)"', text)}
    assert {"interrupted", "skipped_update"} < kinds, "those of runs that do not end well are told too"
    assert not kinds - set(code_spans(DOCS / "run-folder.md"))


def test_every_metric_of_a_run_is_explained(own_task: Session) -> None:
    lines = (own_task.folder / "runs" / "try" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)} - {"step"}
    assert not {name for name in names if not is_declared(name)}


def test_what_the_terminal_and_the_curve_show_is_declared() -> None:
    shown = [name for headline in HEADLINES for name in headline.patterns]
    shown += [name for _, names, _ in _CURVES for name in names]
    assert not {name for name in shown if not is_declared(name)}


TABLE_ROW = "| `{name}` | {unit} | {over} |"


def test_the_table_of_metrics_is_that_of_their_declarations() -> None:
    text = (DOCS / "run-folder.md").read_text()
    table = text.split("| names | unit | meaning |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    declared = {
        TABLE_ROW.format(name=name, unit=one.unit, over=one.over) for name, one in declared_metrics().items()
    }
    missing, unknown = sorted(declared - set(table)), sorted(set(table) - declared)
    assert not [*missing, *unknown], "\n".join(["to add:", *missing, "to take out:", *unknown])


# ----------------------------------------------------------------------------------------- error sentences


@mock.patch("strop.utils.chat_template.process.DEADLINE_S", 1.0)  # one of the templates loops
def test_every_sentence_of_troubleshooting_is_said(own_task: Session, tmp_path: Path) -> None:
    headings = re.findall(r"^### `(.*)`$", prose(DOCS / "troubleshooting.md"), flags=re.MULTILINE)
    assert len(headings) > 20
    said = "\n".join([
        *own_task.transcript, *bad_settings(own_task.folder), *bad_rewards(own_task.folder),
        *bad_folders(own_task.folder), *bad_checkpoints(own_task.folder, tmp_path), *bad_steps(),
        *bad_processes(own_task.folder), *bad_engines(), *bad_prospects(), *bad_trackers(tmp_path),
        bad_inputs(tmp_path),
    ])  # fmt: skip
    unsaid = [heading for heading in headings if not matches(heading, said)]
    assert not unsaid, said


def bad_inputs(folder: Path) -> str:
    """What is said where a data file is another one than when the run began."""
    (folder / "began").mkdir()
    file = folder / "read.jsonl"
    file.write_text('{"prompt": "a"}\n')
    settings = {"data.train_files": [str(file)]}
    write_inputs(folder / "began", inputs_of(settings))
    file.write_text('{"prompt": "another"}\n')
    with pytest.raises(RunError) as error:
        check_inputs(folder / "began", settings, accept=False)
    return str(error.value)


def refused(folder: Path, *words: str, name: str = "train") -> str:
    """The sentence with which a command ends."""
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(text),
        contextlib.chdir(folder),
    ):
        code = main([name, *words])
    assert code == 2, (words, text.getvalue())
    return text.getvalue().splitlines()[-1].removeprefix(f"strop {name}: ")


def bad_settings(folder: Path) -> Iterator[str]:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"prompt": "x", "answer": "y"}\n{oh\n')
    shutil.copytree(folder / "model", folder / "base-model")
    (folder / "base-model" / "chat_template.jinja").unlink()
    shutil.copytree(folder / "model", folder / "looping-model")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "looping-model" / "chat_template.jinja").write_text(endless)
    for words in (
        ["data.train_files=[trian.jsonl]"],
        ["data.train_files=[empty.jsonl]"],
        ["data.train_files=[broken.jsonl]"],
        ["data.prompt_key=question"],
        ["data.ground_truth_key=solution"],
        ['data.default_data_source=""'],
        ["data.max_prompt_tokens=8"],
        ["data.max_prompt_tokens=8", "data.filter_overlong_prompts=false"],
        ["model.path=nowhere"],
        ["model.path=memory://nowhere"],
        ["model.path=base-model"],
        ["model.path=looping-model"],
        ["rollout.temperatur=1"],
        ["rollout.top_k=many"],
        ["rollout.samples_per_prompt=1"],
        ["data.max_response_tokens=20000"],
        ["reward.path=nowhere.py"],
        ["reward.name=score"],
    ):
        yield refused(folder, "--config", "config.yaml", "--out", "runs/bad", *words)
        assert not (folder / "runs" / "bad").exists()


def bad_rewards(folder: Path) -> Iterator[str]:
    for line in ("return 1 / 0", "return float('nan')", "return None", "while True: pass"):
        (folder / "bad.py").write_text(f"def compute_score(**row):\n    {line}\n")
        words = ["reward.path=bad.py", "reward.timeout_s=0.3", "reward.num_workers=1"]
        yield refused(folder, "--config", "config.yaml", "--out", "runs/bad", *words)
    judge = ["base_url=http://127.0.0.1:9/v1", "model=m", "retries=0"]
    words = ["reward.path=''", *(f"reward.judge.{setting}" for setting in judge)]
    yield refused(folder, "--config", "config.yaml", "--out", "runs/bad", *words)


def bad_folders(folder: Path) -> Iterator[str]:
    for out in ("config.yaml/run", "runs/try", "model"):
        yield refused(folder, "--config", "config.yaml", "--out", out)
    yield refused(folder, "--resume", "runs/none")
    yield refused(folder, "--resume", "runs/try", "trainer.seed=9")
    given = folder / "runs" / "given"
    shutil.copytree(folder / "runs" / "try", given, symlinks=True)
    (given / "config.yaml").write_text((given / "config.yaml").read_text() + "\n")
    yield refused(folder, "runs/given", name="eval")
    (given / "events.jsonl").rename(given / "log")
    (given / "events.jsonl").symlink_to("log")
    yield refused(folder, "--resume", "runs/given", "--trust-code")
    (given / "config.yaml").unlink()
    yield refused(folder, "--resume", "runs/given")


def bad_trackers(tmp_path: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("strop").addHandler(handler)
    (tmp_path / "tensorboard").touch()
    TrackerGroup(["tensorboard"], TrackerSetup(folder=tmp_path, total_steps=1)).close()
    logging.getLogger("strop").removeHandler(handler)
    return said


def bad_checkpoints(folder: Path, tmp_path: Path) -> Iterator[str]:
    def full_disk(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=0)
    for step in (1, 2):
        save(store, step, lambda path: (path / "weights").write_bytes(b"12345678") and None, facts={})
    with pytest.raises(CheckpointError, match="stays valid") as error:
        save(store, 3, full_disk, facts={})
    yield str(error.value)
    (store.at(2).path / "weights").write_bytes(b"1234")
    yield from store.latest_valid()[1]

    hurt = folder / "runs" / "hurt"
    shutil.copytree(folder / "runs" / "try", hurt, symlinks=True)
    weights = hurt / "checkpoints" / "global_step_2" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    yield refused(folder, "runs/hurt", name="eval")


def bad_steps() -> Iterator[str]:
    outcomes = [Outcome(kind="error", error="it failed"), Outcome(kind="score", score=1.0)]
    with pytest.raises(RewardError, match="could not be scored") as error:
        check_failed_share(outcomes, max_failed_share=0.2, timeout_s=1.0)
    yield str(error.value)
    old = EpisodeReport(
        uid="e0-000001",
        sample_index=0,
        data_source="",
        num_prompt_tokens=1,
        num_sampled_tokens=1,
        versions=(3, 3),
    )
    with pytest.raises(StaleSamples) as stale:
        check_versions([old], 4, is_corrected=False)
    yield str(stale.value)
    # No gradient of the pages is infinite; the sentence is made in one place.
    assert (
        'f"step {record.step} skipped an update: {reason}"'
        in (ROOT / "strop/trainer/step_logging.py").read_text()
    )
    yield "step 1 skipped an update: the gradient is not finite"


def bad_engines() -> Iterator[str]:
    async def one_token(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(0, 0.0, 0)
        await asyncio.Event().wait()
        raise AssertionError

    async def replaced(index: int) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.say = dying(engine, 0)
        return engine

    gone = ScriptedEngine()
    gone.say = dying(gone, 0)
    for client in (
        RolloutClient([ScriptedEngine(one_token)], timeout_s=0.02),
        RolloutClient([ScriptedEngine()], timeout_s=0.02),
        RolloutClient([gone], timeout_s=5.0),
        RolloutClient([gone], timeout_s=5.0, restart=replaced),
    ):
        with pytest.raises(RuntimeError) as error:
            asyncio.run(client.generate("a", [1], Sampling(key=0, max_tokens=7)))
        yield str(error.value)


def bad_prospects() -> Iterator[str]:
    obstacle = Check(name="signal", text="rewards from 0 to 0", level="stop", advice="look at the answers")
    found = Preflight(checks=[obstacle], samples=[], num_prompts=1, num_samples=1, seconds=1.0)
    yield found.refusal()
    assert 'f"started by --force, against {' in (ROOT / "strop/trainer/preflight/of_run.py").read_text()
    yield "started by --force, against signal"
    monitor = HealthMonitor()
    told = [one.message for _ in range(3) for one in monitor.observe({"actor/lr": 0.0})]
    # The sentence of a rule is completed in one place.
    assert 'f"step {step}: {finding.message}"' in (ROOT / "strop/trainer/loop.py").read_text()
    yield f"step 3: {told[0]}"


def bad_processes(folder: Path) -> Iterator[str]:
    yield refused(folder, "--config", "config.yaml", "--out", "runs/bad", "resources.ranks=2")
    with pytest.MonkeyPatch.context() as launched:
        launched.setenv("TORCHELASTIC_RUN_ID", "1")
        launched.setenv("WORLD_SIZE", "8")
        yield refused(folder, "--config", "config.yaml", "--out", "runs/bad")
    yield from turned_away()
    yield from asked_to_end()
    with pytest.raises(ConnectionError) as nobody:
        _is_on_loopback("127.0.0.1:1")
    yield str(nobody.value)
    has = {"CPU": 2.0}
    node = Node(node_id="a", address="10.0.0.1", total=has, free=has, is_here=True)
    small: Any = SimpleNamespace(nodes=lambda: [node], is_private=True)
    with pytest.raises(NotEnoughDevices) as too_little:
        choose_nodes(small, [RayResourcePool([4])])
    yield str(too_little.value)
    with pytest.raises(ValueError, match="need 1000 CPU cores") as too_many:
        check_cores(ResourcesConfig(runtime="ray", ranks=1000))
    yield str(too_many.value)
    yield str(
        RankFailed(
            Failure(role="actor", rank=1, node="a", pid=7, method="update_policy", exit_signal="SIGKILL")
        )
    )
    weight = TensorMetadata(name="w", shape=(1,), dtype=torch.float32, aliases=())
    with pytest.raises(SyncIncomplete) as half:
        TransferState(12, WeightsMetadata((weight,)), WeightsMetadata((weight,))).check_complete()
    yield str(half.value)


def turned_away() -> list[str]:
    """What the log says of a stranger."""
    handler = logging.handlers.BufferingHandler(10)
    log = logging.getLogger(auth_listener.__name__)
    log.addHandler(handler)
    try:
        auth_listener._RefusalLog("weight sync").add("it does not know the secret")
    finally:
        log.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def asked_to_end() -> Iterator[str]:
    text = io.StringIO()
    ended = Interrupted("continue with `strop train --resume RUN`", cause=Terminated(signal.SIGTERM))
    with mock.patch("strop.cli.main._dispatch", side_effect=ended), contextlib.redirect_stderr(text):
        assert main(["train"]) == 128 + signal.SIGTERM
    yield text.getvalue()
