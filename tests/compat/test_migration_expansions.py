"""What a shell makes of the text of a variable, and of relative paths behind a `cd`; bash itself says what is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from strop.compat.migrate import migrate_verl, moved, read_verl
from strop.compat.migrate.result import Outcome
from strop.compat.migrate.shell import read_commands

VALUES = "V=org/Model-7B.bin.sh\nE=\nA=(a bb ccc)\nN=2\nS='a b'\n"
EXPRESSIONS = (
    "${V##*/} ${V#*/} ${V%.sh} ${V%.*} ${V%%.*} ${V#nothing} ${V##*[.-]}",
    "${V/7B/1B} ${V//o/0} ${V/#org/my} ${V/%sh/py} ${V/.*/} ${V//[.]/_} ${V/Model/${A[1]}} ${V//\\//-}",
    "${V:4:5} ${V:4} ${V: -2} ${V:4:-3} ${V:$N:2} ${V:(-2)}",
    "${V^^} ${V,,} ${V^} ${S^} ${#V} ${#E} ${#A[@]} ${#A[1]}",
    '${A[1]} ${A[$N]} ${A[N-1]} ${A[@]/b/x} ${A[-1]} "${A[@]%c}"',
    '${V:+--x} ${E:+--y} ${E+--z} ${UNSET:+--w} ${UNSET:-${V##*/}} ${S/ /_} "${S/a/c}"',
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_what_bash_makes_of_it(expression: str) -> None:
    script = f"{VALUES}printf '%s\\n' {expression}"
    asked = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    (command,) = read_commands(script)
    assert [word.text for word in command.words[2:]] == asked.stdout.splitlines()
    assert not any(word.unresolved for word in command.words)


@pytest.mark.parametrize(
    "expression", ["${U##*/}", "${V/x/$U}", "${V/\\*/x}", "${A[7]}", "${A[U]}", "${V@Q}"]
)
def test_what_is_not_known_stays_as_it_is_written(expression: str) -> None:
    (command,) = read_commands(f"{VALUES}run {expression}")
    assert command.words[1].text == expression
    assert command.words[1].unresolved == (expression,)


TRAIN = "python3 -m verl.trainer.main_ppo data.train_files=data/t.parquet actor_rollout_ref.model.path="


def migrated(folder: Path, script: str, model: str = "Q/q") -> tuple[dict[str, object], Outcome | None]:
    """(our full keys, what is said of `cd`)."""
    path = folder / "run.sh"
    path.write_text(f"{script}{TRAIN}{model}")
    source = read_verl([path], {"PWD": str(folder)})
    migration = moved(migrate_verl(source.found), source.folder, path.name)
    told = [row.outcome for row in migration.rows if row.key == "cd"]
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}, (
        told[0] if told else None
    )


@pytest.mark.parametrize(
    ("script", "path"),
    [
        ("cd proj\n", "proj/data/t.parquet"),
        ("cd proj && cd ../other && ", "other/data/t.parquet"),
        ("D=proj\npushd $D/a >/dev/null\n", "proj/a/data/t.parquet"),
        ("(cd proj; make)\n", "data/t.parquet"),
        ("cd /abs\n", "/abs/data/t.parquet"),
        ('cd "$(dirname "$0")/.."\ncd $PWD/x\n', "{above}/x/data/t.parquet"),
        ("cd .\n", "data/t.parquet"),
        ("if true; then cd proj; fi\n", "proj/data/t.parquet"),
    ],
)
def test_paths_start_where_the_script_has_gone(tmp_path: Path, script: str, path: str) -> None:
    values, _ = migrated(tmp_path, script)
    assert values["data.train_files"] == [path.format(above=tmp_path.parent)]
    assert values["model.path"] == "Q/q", "a name of a hub, unless there is such a folder"


def test_a_model_folder_that_is_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proj" / "Q" / "q").mkdir(parents=True)
    values, told = migrated(tmp_path, "cd proj\n")
    assert values["model.path"] == "proj/Q/q"
    assert told is not None
    assert told.note == "data.train_files, model.path start there, and are written from here"
    assert migrated(tmp_path, "cd proj\n", "./m")[0]["model.path"] == "proj/m"
    assert migrated(tmp_path, "cd proj\n", "/m")[0]["model.path"] == "/m"


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("cd $HERE\n", "nothing says where that is: say --set HERE=FOLDER"),
        ("[ -d x ] && cd proj\n", "nothing says where that is: write the folder itself into the script"),
    ],
)
def test_a_folder_that_nobody_knows_is_asked_for(tmp_path: Path, script: str, sentence: str) -> None:
    values, told = migrated(tmp_path, script)
    assert values["data.train_files"] == ["data/t.parquet"]
    assert told is not None
    assert told.status == "unresolved"
    assert sentence in told.note
