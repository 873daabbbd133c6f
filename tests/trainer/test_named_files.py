"""Files that settings name are checked before a run folder is made, and before its model is looked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.named_files import check_named_files
from strop.trainer.start import start_run

FILES = {
    "broken.py": "def compute_score(:\n",
    "importing.py": "\nimport no_such_package\n",
    "other.py": "def other(): ...\n",
    "reward.py": "def compute_score(solution_str): return 0.0\n",
    "rows.jsonl": '{"prompt": "1 + 1 = ?", "answer": "2"}\n',
    "tools.yaml": "tools: [{class_name: other.py:Shop}]\n",
    "loops.yaml": "[{name: mine, _target_: importing.py:Loop}]\n",
    "interactions.yaml": "interaction: [{class_name: gone.py:User}]\n",
}
SETTINGS = {
    "model.path": "no-such-model",
    "data.train_files": "[rows.jsonl]",
    "data.ground_truth_key": "answer",
    "trainer.max_steps": "1",
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


def config_of(**settings: str) -> Config:
    given = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return load(overrides=[f"{key}={value}" for key, value in given.items()])


def refusal(command: str = "train", **settings: str) -> str:
    config = config_of(**settings)
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        start_run(Path("run"), config, command=["strop", command])
    assert not Path("run").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("rewad.py", "reward.path is 'rewad.py', but {at}/rewad.py is missing"),
        ("broken.py", "{at}/broken.py cannot be imported: SyntaxError: invalid syntax at broken.py:1"),
        ("importing.py", "ModuleNotFoundError: No module named 'no_such_package' at importing.py:2"),
        ("other.py", "other.py has no function 'compute_score': it defines other; set reward.name"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_first(file: str, sentence: str, tmp_path: Path) -> None:
    assert sentence.format(at=tmp_path) in refusal(reward__path=file)
    assert sentence.format(at=tmp_path) in refusal(
        reward__functions=f"[{{path: reward.py}}, {{path: {file}, key: b}}]"
    )


def test_a_manager_is_looked_at_before_its_tokenizer_is_there() -> None:
    assert "rewad.py is missing" in refusal(reward__path="rewad.py", reward__manager="Mine")
    assert "SyntaxError: invalid syntax at broken.py:1" in refusal(
        reward__path="broken.py", reward__manager="Mine"
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"agent__files": "[broken.py]"}, "broken.py cannot be imported: SyntaxError"),
        ({"agent__function_tools": "importing.py"}, "importing.py cannot be imported: ModuleNotFoundError"),
        ({"agent__tools": "tools.yaml"}, "other.py has no class 'Shop'"),
        (
            {"agent__tools": "gone.yaml"},
            "agent.tools names 'gone.yaml', but .* gone.yaml is no file; relative",
        ),
        (
            {"agent__loops": "gone.yaml"},
            "agent.loops names 'gone.yaml', but .* gone.yaml is no file; relative",
        ),
        ({"agent__interactions": "gone.yaml"}, "agent.interactions names 'gone.yaml', but .* is no file"),
        ({"agent__tools": "."}, "is no file; relative names start at the current directory"),
        ({"agent__loops": "loops.yaml"}, "importing.py cannot be imported: ModuleNotFoundError"),
        ({"agent__interactions": "interactions.yaml"}, "names 'gone.py:User', but there is no such file"),
        ({"agent__environment__name": "other.py:Game"}, "other.py has no class 'Game'"),
        (
            {"agent__default_agent": "yours"},
            "agent.default_agent is 'yours', but no agent has that name; known: ",
        ),
        ({"agent__openai__path": "other.py:play"}, "the file has no function 'play'"),
        ({"data__dataset_class__path": "other.py:Rows"}, "other.py has no class of that name"),
        ({"data__datagen__path": "gone.py:More"}, "gone.py is no file"),
        ({"data__train_files": "[row.jsonl]"}, "row.jsonl does not exist .* did you mean rows.jsonl"),
        ({"data__val_files": "[row.jsonl]"}, "row.jsonl does not exist"),
    ],
)
def test_data_and_code_of_every_kind_are_told_first(settings: dict[str, str], sentence: str) -> None:
    text = refusal(**settings)
    assert all(part in text for part in sentence.split(" .* ")), text


def test_a_reward_that_loads_here_may_not_do_so_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(FILES["reward.py"] + "open('rows.jsonl').close()\n")
    settings = {"reward__path": str(tmp_path / "reward.py"), "data__train_files": f"[{tmp_path}/rows.jsonl]"}
    check_named_files(config_of(**settings), "train")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "No such file or directory: 'rows.jsonl'" in refusal(**settings)


@pytest.mark.parametrize(("command", "section"), [("sft", "sft"), ("prefer", "prefer"), ("dpo", "prefer")])
def test_other_commands_look_at_their_own_data(command: str, section: str) -> None:
    text = refusal(command, **{f"{section}__data__train_files": "[row.jsonl]", "reward__path": "rewad.py"})
    assert "row.jsonl does not exist" in text


def test_good_files_leave_the_model_to_be_told() -> None:
    assert "no-such-model" in refusal(reward__path="reward.py")
    play = "@register('theirs')\nasync def play(prompt, trajectory, generate): ...\n"
    Path("agent.py").write_text(f"from strop.agents import register\n\n{play}")
    assert "no-such-model" in refusal(agent__files="[agent.py]", agent__default_agent="theirs")


def test_the_command_says_one_sentence_and_imports_no_torch(tmp_path: Path) -> None:
    text = (
        "import sys\nfrom strop.cli.main import main\nsys.argv[:1] = ['strop']\ncode = main()\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    words = ["train", *(f"{key}={value}" for key, value in SETTINGS.items()), "reward.path=rewad.py"]
    done = subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"strop train: reward.path is 'rewad.py', but {tmp_path}/rewad.py is missing; name a Python file, relative to "
        f"the current directory\n"
    )
    assert not (tmp_path / "runs").exists()
