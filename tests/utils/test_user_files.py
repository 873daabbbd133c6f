"""Python files of a user's own that import modules lying beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.utils.user_files import load_user_file


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Modules and search path as they were."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_file_imports_a_module_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", own="from beside_a import twice\nvalue = twice(21)\n")
    write(folder, beside_a="def twice(x):\n    return 2 * x\n")
    assert load_user_file(str(folder / "own.py"), setting="agent.files").value == 42


def test_a_function_imports_a_module_beside_its_file_later(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "task", own="def value():\n    from beside_b import x\n    return x\n", beside_b="x = 7"
    )
    assert load_user_file(str(folder / "own.py"), setting="agent.files").value() == 7


def test_installed_packages_are_found_before_the_folder_once_the_file_is_imported(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", own="", colorsys="raise AssertionError('not this one')")
    load_user_file(str(folder / "own.py"), setting="agent.files")
    sys.modules.pop("colorsys", None)
    import colorsys

    assert colorsys.rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


def test_two_modules_of_one_name_beside_two_files_are_not_mixed_up(tmp_path: Path) -> None:
    first = write(tmp_path / "first", own="from beside_c import x\n", beside_c="x = 1")
    second = write(tmp_path / "second", own="from beside_c import x\n", beside_c="x = 2")
    assert load_user_file(str(first / "own.py"), setting="agent.files").x == 1
    sentence = (
        f"imports beside_c, which is {second}/beside_c.py, but another .* from {first}/beside_c.py before: "
    )
    with pytest.raises(ValueError, match=sentence):
        load_user_file(str(second / "own.py"), setting="agent.files")
    assert load_user_file(str(first / "own.py"), setting="agent.files").x == 1


def test_a_file_that_ends_the_process_is_a_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", own="import sys\nsys.exit(3)\n")
    with pytest.raises(ValueError, match=r"own\.py cannot be imported: SystemExit: 3"):
        load_user_file(str(folder / "own.py"), setting="agent.files")


@pytest.mark.parametrize(
    "edit",
    [
        "sys.path.remove(folder)",
        "sys.path[:] = [one for one in sys.path if one != folder]",
        "sys.path = [one for one in sys.path if one != folder]",
        "sys.path.insert(0, folder)",
    ],
)
def test_a_file_may_edit_the_search_path(tmp_path: Path, edit: str) -> None:
    text = f"import os, sys\nfolder = os.path.dirname(__file__)\n{edit}\n"
    text += "def value():\n    import beside_d\n    return beside_d.x\n"
    folder = write(tmp_path / "task", own=text, beside_d="x = 5")
    assert load_user_file(str(folder / "own.py"), setting="agent.files").value() == 5


def test_a_file_that_fails_after_it_took_itself_out_of_the_modules_is_a_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", own="import sys\ndel sys.modules[__name__]\nraise KeyError('x')\n")
    with pytest.raises(ValueError, match=r"own\.py cannot be imported: KeyError: 'x'"):
        load_user_file(str(folder / "own.py"), setting="agent.files")
