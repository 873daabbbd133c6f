"""A run folder that somebody else made runs nothing of its own, unless --trust-code is given."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from cli_calls import Project, Result, cli
from default_cases import by_default

from strop.cli.quickstart.stages import start_or_resume
from strop.config import describe, load_config
from strop.run import RunError, RunFolder
from strop.trainer.config import Config
from strop.trainer.start import start_run
from strop.trainer.untrusted_runs.named import code_references
from strop.trainer.untrusted_runs.own import made_in, record
from strop.utils import safe_read, trust

REWARD = """
def compute_score(**given):
    return 1.0
"""


class Received:
    """A copy of a run whose settings name code that leaves a mark when it runs."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.run = folder / "received"
        shutil.copytree(run, self.run, symlinks=True)
        self.mark = folder / "mark"
        self.code = self.run / "evil.py"
        self.code.write_text(f"open({str(self.mark)!r}, 'a').write('ran\\n')\n{REWARD}")

    def with_settings(self, settings: Mapping[str, Any]) -> Received:
        """Full keys and values; a value `CODE` is the file that leaves the mark."""
        path = self.run / "config.yaml"
        content = yaml.safe_load(path.read_text())
        for key, value in settings.items():
            *sections, last = key.split(".")
            target = content
            for section in sections:
                target = target[section]
            target[last] = json.loads(json.dumps(value).replace("CODE", str(self.code)))
        path.write_text(yaml.safe_dump(content))
        return self

    def has_run(self) -> bool:
        found = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return found


@pytest.fixture
def received(interrupted: Path, tmp_path: Path) -> Received:
    return Received(interrupted, tmp_path)


def commands(one: Received, project: Project, tmp_path: Path) -> dict[str, list[object]]:
    (tmp_path / "questions.txt").write_text("1 + 1\n")
    return {
        "eval": ["eval", one.run, "data.max_val_prompts=1"],
        "generate": ["generate", one.run, "--prompts", tmp_path / "questions.txt", "--max-tokens", 2],
        "export": ["export", one.run, tmp_path / "out"],
        "score": ["score", "same", one.run, "--limit", 1],
        "train": ["train", "--resume", one.run],
        "begin": ["train", "--config", one.run / "config.yaml", "--out", tmp_path / "new"],
        "check": ["check", one.run / "config.yaml", "--prompts", 1],
        "data": ["data", "check", "--config", one.run / "config.yaml"],
    }


EXTENSION = {"algorithm.extensions": ["CODE"]}
NAMED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "algorithm.extensions": (EXTENSION, {"train", "begin", "check"}),
    "reward.path": ({"reward.path": "CODE"}, {"eval", "score", "train", "begin", "check"}),
    "reward.functions": (
        {"reward.path": "", "reward.functions": [{"path": "CODE", "key": "a"}, {"path": "CODE", "key": "b"}]},
        {"eval", "score", "train", "begin", "check"},
    ),
    "data.dataset_class.path": (
        {"data.dataset_class": {"path": "CODE", "name": "X"}, "reward.path": ""},
        {"eval", "train", "begin", "check", "data"},
    ),
    "data.datagen.path": (
        {"data.datagen": {"path": "CODE", "name": "X"}, "reward.path": "", "trainer.max_steps": 2},
        {"train", "begin", "check"},
    ),
    "agent.files": ({"agent.files": ["CODE"]}, {"eval", "train", "begin", "check", "data"}),
    "agent.environment.name": (
        {"agent.default_agent": "env_agent", "agent.environment": {"name": "CODE:X", "kwargs": {}}},
        {"eval", "train", "begin", "check", "data"},
    ),
    "agent.function_tools": (
        {"agent.default_agent": "tool_agent", "agent.function_tools": "CODE"},
        {"eval", "train", "begin", "check", "data"},
    ),
}


@pytest.mark.parametrize(
    "key",
    by_default(NAMED, "algorithm.extensions", "data.datagen.path", "agent.environment.name", "reward.path"),
)
def test_code_of_a_received_run_is_named_and_not_run(
    received: Received, project: Project, tmp_path: Path, key: str
) -> None:
    settings, needing = NAMED[key]
    received.with_settings({"reward.path": "", **settings})
    for name, words in commands(received, project, tmp_path).items():
        if key not in ("algorithm.extensions", "agent.files") and name not in ("eval", "score", "train"):
            continue  # the others ask in the same way: two cases are enough
        result = cli(*words)
        assert not received.has_run(), (name, result)
        if name in needing:
            assert f"{key}: {received.code}" in result.sentence, name
            assert "--trust-code allows it" in result.sentence
        else:
            assert result.code == 0, (name, result.err)
            assert f"was received, so this is not run: {key}: {received.code}" in result.err, name


@pytest.mark.parametrize("name", ["eval", "generate", "score", "train"])
def test_trust_code_runs_it(received: Received, project: Project, tmp_path: Path, name: str) -> None:
    received.with_settings({"reward.path": "CODE", **EXTENSION})
    from strop.utils.user_files import _LOADED

    _LOADED.pop(received.code.resolve(), None)
    result = cli(*commands(received, project, tmp_path)[name], "--trust-code")
    assert result.code == 0, result.err
    assert received.has_run()


def mcp(received: Received, project: Project) -> Received:
    """Tools of a server whose command leaves the mark."""
    tools = received.run / "tools.yaml"
    command = {"command": sys.executable, "args": [str(received.code)]}
    tools.write_text(yaml.safe_dump({"tools": [{"config": {"type": "mcp"}, "mcp": command}]}))
    return received.with_settings(
        {"reward.path": "", "agent.default_agent": "tool_agent", "agent.tools": str(tools)}
    )


def test_a_command_of_an_mcp_server_is_not_started(
    received: Received, project: Project, tmp_path: Path
) -> None:
    mcp(received, project)
    result = cli("eval", received.run, "data.max_val_prompts=1")
    assert f"agent.tools: {received.run / 'tools.yaml'}" in result.sentence
    assert not received.has_run()


def test_a_service_that_would_get_a_key_is_not_asked(received: Received, tmp_path: Path) -> None:
    received.with_settings(
        {
            "reward.path": "",
            "reward.judge.base_url": "http://127.0.0.1:9/v1",
            "reward.judge.model": "m",
            "reward.judge.api_key_env": "MY_SECRET",
        }
    )
    expected = "reward.judge.base_url: http://127.0.0.1:9/v1 (gets the answers and your MY_SECRET)"
    for words in (
        ["eval", received.run],
        ["score", "same", received.run],
        ["train", "--resume", received.run],
    ):
        assert expected in cli(*words).sentence


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward.sandbox.python": "/tmp/python"}, "reward.sandbox.python: /tmp/python"),
        (
            {"reward.sandbox.read_only_paths": ["/root/.ssh"]},
            "reward.sandbox.read_only_paths: /root/.ssh (shown to programs of the model)",
        ),
        ({"model.trust_remote_code": True}, "model.trust_remote_code: true (the code in"),
        (
            {"data.val_files": ["http://127.0.0.1:9/x.parquet"]},
            "data.val_files: http://127.0.0.1:9/x.parquet (fetched)",
        ),
        (
            {"reward.sandbox.backend": "e2b"},
            "reward.sandbox.backend: e2b at the hosted service, with your key",
        ),
    ],
)
def test_what_else_an_evaluation_would_use(
    received: Received, settings: dict[str, Any], expected: str
) -> None:
    received.with_settings({"reward.path": "", **settings})
    assert expected in cli("eval", received.run).sentence


def test_commands_that_only_look_run_nothing(received: Received, interrupted: Path) -> None:
    received.with_settings({"reward.path": "CODE", "agent.files": ["CODE"], **EXTENSION})
    for words in (
        ["samples", received.run],
        ["samples", received.run, "--tokens"],
        ["samples", received.run, "--why-dropped"],
        ["diff", received.run, interrupted],
        ["doctor", received.run],
        ["config", "show", "--config", received.run / "config.yaml"],
        ["config", "show", "--config", received.run / "config.yaml", "--resolved"],
        ["config", "diff", received.run, interrupted],
        ["data", "cache", "--config", received.run / "config.yaml"],
    ):
        result = cli(*words)
        assert result.code in (0, 1), (words, result.err)
        assert not received.has_run(), words


def test_settings_that_are_reached_in_other_ways_are_received_too(received: Received, tmp_path: Path) -> None:
    received.with_settings({"reward.path": "", **EXTENSION})
    link = tmp_path / "mine.yaml"
    link.symlink_to(received.run / "config.yaml")
    assert "--trust-code" in cli("train", "--config", link, "--out", tmp_path / "new").sentence
    (received.run / "run.json").unlink()  # no run folder any more
    assert "is no run folder" in cli("score", "same", received.run).sentence
    assert "is no run folder" in cli("train", "--resume", received.run, "--trust-code").sentence
    assert not received.has_run()


def test_a_quickstart_in_a_received_folder_runs_nothing_of_it(received: Received, tmp_path: Path) -> None:
    received.with_settings(EXTENSION)
    mine = load_config(Config)
    with pytest.raises(RunError, match="holds a run with other settings"):
        start_or_resume(received.run, mine, command=["strop"], say=print)
    assert not received.has_run()


def test_what_is_written_does_not_follow_links(received: Received, tmp_path: Path) -> None:
    received.with_settings({"reward.path": ""})
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("samples/.step-000002.parquet.tmp", "checkpoints/.latest_checkpointed_iteration.txt.tmp"):
        (received.run / name).symlink_to(victim)
    assert cli("train", "--resume", received.run).code == 0
    assert victim.read_text() == "precious"


def test_settings_that_name_nothing_need_no_flag(received: Received, tmp_path: Path) -> None:
    received.with_settings({"reward.path": ""})
    assert cli("eval", received.run, "data.max_val_prompts=1").code == 0
    assert cli("train", "--resume", received.run).code == 0


def test_what_the_command_line_names_is_the_users_own(received: Received, tmp_path: Path) -> None:
    received.with_settings({"reward.path": "CODE"})
    mine = tmp_path / "mine.py"
    mine.write_text(REWARD)
    assert cli("eval", received.run, f"reward.path={mine}", "data.max_val_prompts=1").code == 0
    assert cli("score", mine, received.run, "--limit", 1).code == 0
    assert not received.has_run()


# ---------------------------------------------------------------------------------------- whose a run folder is


def make_run(project: Project, home: Path) -> Path:
    """A run that is made in this directory, with a reward file that lies there."""
    home.mkdir()
    (home / "mine.py").write_text(REWARD)
    words = ["reward.path=mine.py", "data.val_files=[]", "trainer.max_steps=1", "run.hf_model=last"]
    with contextlib.chdir(home):
        assert cli("train", "--config", project.config, "--out", home / "run", *words).code == 0
    return home / "run"


@pytest.fixture(scope="module")
def made(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(project, tmp_path_factory.mktemp("made") / "home")


@pytest.fixture
def own(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of a run of one's own, seen from the directory that it was made in."""
    monkeypatch.chdir(made.parent)
    shutil.copytree(made, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def scored(run: Path) -> Result:
    return cli("score", "same", run, "--limit", 1)


@pytest.mark.slow
def test_a_run_of_ones_own_needs_no_flag(made: Path, own: Path, project: Project) -> None:
    for run in (made, Path("run"), own):  # the last one is a copy elsewhere
        assert scored(run).code == 0
        assert cli("train", "--resume", run).code == 0
    assert cli("eval", own, f"data.val_files=['{project.data('val')}']", "data.max_val_prompts=1").code == 0
    (made.parent / "mine.py").write_text(REWARD + "\n# changed\n")
    assert scored(own).code == 0, "a file of one's own may change"


def test_a_run_of_ones_own_from_another_directory(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the paths in its settings are absolute
    assert scored(interrupted).code == 0


def test_a_run_with_relative_paths_from_another_directory(
    own: Path, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n{REWARD}")
    monkeypatch.chdir(tmp_path)  # reward.path=mine.py was given in another one
    assert scored(own).code == 0
    assert cli("eval", own, f"data.val_files=['{project.data('val')}']", "data.max_val_prompts=1").code == 0
    assert cli("train", "--resume", own, "trainer.max_steps=2").code == 0
    assert not (tmp_path / "mark").exists()


def test_a_relative_path_that_means_another_file_here(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = own / "config.yaml"  # as they were written by versions that kept relative paths
    settings.write_text(settings.read_text().replace(str(Path.cwd() / "mine.py"), "mine.py"))
    assert record(settings.read_text())
    home = Path.cwd()
    monkeypatch.chdir(tmp_path)  # where it was unpacked, as it came back from somebody
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n{REWARD}")
    for words in (["score", "same", own], ["eval", own], ["train", "--resume", own]):
        sentence = cli(*words).sentence
        assert f"a run that you started in {home}, and names relative paths" in sentence
        assert "reward.path: mine.py" in sentence
    assert not (tmp_path / "mark").exists()


def test_a_change_of_the_settings_makes_a_run_a_received_one(own: Path) -> None:
    path = own / "config.yaml"
    path.write_text(path.read_text() + "\n")
    assert "or was changed since" in scored(own).sentence


def test_nothing_in_the_folder_counts_as_a_proof(
    own: Path, monkeypatch: pytest.MonkeyPatch, state_home: Path
) -> None:
    shutil.copytree(state_home / "strop", own / "strop")  # a claim of its own
    monkeypatch.setenv("XDG_STATE_HOME", str(own.parent))  # a user who never made it
    assert "--trust-code" in scored(own).sentence
    monkeypatch.setenv("XDG_STATE_HOME", str(own))
    assert scored(own).code == 0, "this is where the user's record lies now"
    (own / "strop" / "runs").chmod(0o777)  # others could write it
    assert "--trust-code" in scored(own).sentence


def test_a_user_without_a_home_trains_all_the_same(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with caplog.at_level("WARNING"):
        run = make_run(project, tmp_path / "home")
    assert "note that this run is yours (XDG_STATE_HOME)" in caplog.text
    monkeypatch.chdir(tmp_path / "home")
    assert "--trust-code" in scored(run).sentence


def test_every_setting_that_holds_text_is_known_to_run_or_to_be_read_only() -> None:
    """A setting that is added belongs into one of the two lists."""
    assert {doc.key for doc in describe(Config) if _may_name_code(doc.type)} == CODE | PLAIN


def test_what_runs_is_told() -> None:
    judge = ["reward.judge.base_url=http://j", "reward.judge.model=m"]
    server = ["rollout.engine=openai", "rollout.openai.base_url=http://e", "rollout.openai.model=m"]
    beside = {
        "reward.judge.base_url": judge,
        "reward.judge.api_key_env": judge,
        "reward.server.api_key_env": ["reward.server.url=http://s"],
        "reward.sandbox.url": ["reward.sandbox.backend=sandbox_fusion"],
        "data.dataset_class.path": ["data.dataset_class.name=Rows"],
        "data.datagen.path": ["data.datagen.name=Rows", "trainer.max_steps=1"],
        "resources.address": ["resources.runtime=ray"],
        "resources.weight_store": ["resources.runtime=ray", "resources.apart={rollout: 1}"],
        "rollout.vllm.python": ["rollout.engine=vllm"],
        "rollout.sglang.python": ["rollout.engine=sglang"],
        "rollout.openai.base_url": server,
        "rollout.trace.endpoint": ["rollout.trace.backend=otlp"],
        "rollout.openai.api_key_env": server,
        "reference.path": ["algorithm.use_kl_loss=true"],
        "teacher.path": ["algorithm.distillation.kind=reverse_kl"],
        "critic.path": ["algorithm.adv_estimator=gae"],
        "prm.path": ["algorithm.adv_estimator=prime"],
        "critic.lora.path": ["algorithm.adv_estimator=gae", "critic.lora.rank=1"],
        "model.lora.path": ["model.lora.rank=1"],
    }
    models = {"reference", "teacher", "critic", "prm", "reward_model", "model"}
    for doc in describe(Config):
        if doc.key in CODE:
            value = (
                "http://mark"
                if doc.key.endswith(("url", "endpoint", "train_files", "val_files"))
                else "/mark"
            )
            if doc.key.split(".")[0] in models and doc.key.endswith("path"):
                value = "hub:the/mark"
            value = "/mark.py:play" if doc.key == "agent.openai.path" else value
            shown = f"['{value}']" if doc.type.startswith("list") else f"'{value}'"
            config = load_config(Config, overrides=[*beside.get(doc.key, []), f"{doc.key}={shown}"])
            assert any(value in named.value for named in code_references(config)), doc.key


def _may_name_code(kind: str) -> bool:
    return kind.startswith(("text", "list, each entry text"))


CODE = {
    "algorithm.extensions", "data.cache_dir", "data.dataset_class.path", "data.datagen.path", "data.train_files",
    "data.val_files",
    "sft.data.train_files", "sft.data.val_files", "prefer.data.train_files", "prefer.data.val_files",
    "agent.files", "agent.loops", "agent.tools",
    "agent.function_tools", "agent.interactions", "agent.environment.name", "reward.path", "reward.sandbox.url",
    "reward.sandbox.python", "reward.sandbox.read_only_paths", "reward.judge.base_url", "reward.judge.api_key_env",
    "reward.server.url", "reward.server.api_key_env", "resources.address", "agent.openai.path", "rollout.vllm.python",
    "rollout.sglang.python", "rollout.openai.base_url", "rollout.openai.api_key_env",
    "rollout.trace.endpoint", "model.path", "model.lora.path", "reference.path", "teacher.path", "critic.path",
    "critic.lora.path", "prm.path", "reward_model.path", "model.tokenizer_path", "model.external_lib", "run.copy_to",
    "resources.weight_store",
}  # fmt: skip
"""Text that names what is run, started or contacted."""
PLAIN = {
    "rollout.engine", "trainer.skip_rollout",
    "trainer.project_name", "trainer.experiment_name", "data.datagen.name",
    "rollout.openai.model", "rollout.trace.experiment", "data.image_key", "data.video_key",
    "model.revision", "model.chat_template", "model.template_date", "model.keep_special_tokens",
    "model.lora.target_modules", "data.dataset_class.name", "data.prompt_key",
    "data.data_source_key", "data.ground_truth_key", "data.default_data_source", "data.sampler",
    "sft.data.messages_key", "sft.data.prompt_key", "sft.data.completion_key", "sft.data.image_key",
    "sft.data.trained_key",
    "prefer.data.prompt_key", "prefer.data.chosen_key", "prefer.data.rejected_key", "prefer.data.completion_key",
    "prefer.data.margin_key", "prefer.data.label_key", "model.attn_implementation", "agent.default_agent",
    "agent.tool_format", "reward.name", "reward.pass_by",
    "reward.manager", "reward.judge.cache_dir", "reward.judge.model",
    "reward.judge.rubric", "reward.judge.template", "reward.judge.score_field", "reward.judge.pattern",
    "reward.server.cache_dir", "reward.server.model", "reward.server.tokenizer", "algorithm.adv_estimator",
    "algorithm.reward_keys", "algorithm.policy_loss", "algorithm.filter_groups.filter", "algorithm.reward_shaping",
    "critic.lora.target_modules", "reward_model.chat_template", "trainer.trackers", "resources.device",
}  # fmt: skip
"""Text that is read, shown or looked up among what was loaded before."""


def test_the_door_is_open_again_after_a_command(received: Received) -> None:
    received.with_settings({"reward.path": "CODE"})
    assert cli("eval", received.run).code == 2
    assert trust.may_run("reward.path")


# --------------------------------------------------------------------------- others who write in the folder meanwhile


def hostile(received: Received) -> bytes:
    return (
        received.with_settings({"reward.path": "CODE", **EXTENSION}).run.joinpath("config.yaml").read_bytes()
    )


@contextlib.contextmanager
def at_each_opening(name: str, act: Callable[[Path, int], None]) -> Iterator[list[Path]]:
    """Somebody acts on a file of this name right after it was opened, the n-th time."""
    opened: list[Path] = []
    original = safe_read.open_regular

    def opening(path: Path | str) -> BufferedReader:
        file = original(path)
        if Path(path).name == name:
            opened.append(Path(path))
            act(Path(path), len(opened))
        return file

    with patch.object(safe_read, "open_regular", opening):
        yield opened


@pytest.mark.parametrize("name", ["eval", "generate", "export", "score", "train"])
def test_settings_are_used_as_they_were_checked(
    received: Received, own: Path, project: Project, tmp_path: Path, name: str
) -> None:
    content = hostile(received)
    words = commands(received, project, tmp_path)[name]
    words = [own if word == received.run else word for word in words]
    if name == "eval":
        words.append(f"data.val_files=['{project.data('val')}']")

    def swap(path: Path, count: int) -> None:
        path.unlink()
        path.write_bytes(content)

    with at_each_opening("config.yaml", swap) as opened:
        result = cli(*words)
    assert result.code == 0, result.err
    assert len(opened) == 1
    assert not received.has_run()


def test_settings_that_could_not_be_read_at_first_are_not_read_later(received: Received) -> None:
    received.with_settings({"reward.path": "CODE"})

    def fail_once(path: Path, count: int) -> None:
        if count == 1:
            raise PermissionError(13, "Permission denied", str(path))

    for words in (
        ["score", "same", received.run],
        ["eval", received.run],
        ["train", "--resume", received.run],
    ):
        with at_each_opening("config.yaml", fail_once):
            assert "config.yaml cannot be read: Permission denied" in cli(*words).sentence
        assert not received.has_run()


def test_what_is_remembered_is_what_was_written(received: Received, project: Project, tmp_path: Path) -> None:
    content = hostile(received).decode()
    folder = tmp_path / "shared"
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        moved = original(self, target)
        if Path(target).name == "config.yaml":
            Path(target).write_text(content)
        return moved

    with patch.object(Path, "replace", replace):
        config = load_config(Config, source=project.config)
        start_run(folder, config, command=["strop", "train"]).run.close()
    assert (folder / "config.yaml").read_text() == content
    assert not made_in(content)


def test_the_settings_of_a_new_run_do_not_follow_a_link(project: Project, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    original = RunFolder.create

    def create(path: Path, **given: Any) -> RunFolder:
        run = original(path, **given)
        for name in (".config.yaml.tmp", f"config.yaml.{os.getpid()}.tmp"):
            (path / name).symlink_to(victim)
        return run

    with patch.object(RunFolder, "create", create):
        config = load_config(Config, source=project.config)
        start_run(tmp_path / "shared", config, command=["strop", "train"]).run.close()
    assert victim.read_text() == "precious"


def test_half_of_what_runs_on_the_command_line_does_not_trust_the_other_half(received: Received) -> None:
    received.with_settings({"reward.path": "", "reward.sandbox.url": "http://127.0.0.1:9"})
    words = ["eval", received.run, "reward.sandbox.backend=sandbox_fusion"]
    assert "reward.sandbox.url: sandbox_fusion at http://127.0.0.1:9" in cli(*words).sentence
    received.with_settings({"reward.sandbox.url": "", "agent.environment.kwargs": {"id": "evil"}})
    words = ["eval", received.run, "agent.default_agent=env_agent", "agent.environment.name=gymnasium"]
    assert "agent.environment.kwargs: id (given to gymnasium)" in cli(*words).sentence


def test_a_failed_resume_leaves_everything_where_it_is(received: Received) -> None:
    """Also where the log says that the run never began."""
    log = received.run / "events.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    (received.run / "precious").write_text("")
    received.with_settings({"reward.path": "", "data.train_files": ["absent.parquet"]})
    shutil.rmtree(received.run / "checkpoints")
    assert "absent.parquet" in cli("train", "--resume", received.run).sentence
    assert {"precious", "config.yaml", "run.json"} <= {path.name for path in received.run.iterdir()}
