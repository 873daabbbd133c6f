"""What a sandbox shows of the host, where the home folder has several names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strop.sandbox.errors import SandboxUnavailable
from strop.sandbox.mounts import host_view


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The home folder by the name in HOME, and by the one without links; the current folder is elsewhere."""
    real, elsewhere = tmp_path / "data" / "u", tmp_path / "elsewhere"
    for folder in (real / "bin", elsewhere):
        folder.mkdir(parents=True)
    (real / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "home").symlink_to(tmp_path / "data")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "u"))
    monkeypatch.chdir(elsewhere)
    return {"linked": tmp_path / "home" / "u", "real": real}


@pytest.mark.parametrize("name", ["linked", "real"])
def test_an_interpreter_in_a_linked_home_folder_is_refused(homes: dict[str, Path], name: str) -> None:
    with pytest.raises(SandboxUnavailable, match="holds the home folder"):
        host_view(str(homes[name] / "bin" / "python"), ())


@pytest.mark.parametrize("name", ["linked", "real"])
@pytest.mark.parametrize("form", ["{0}", "{0.parent}", "/{0}", "/usr/..{0}", "{0}/../u", "//"])
def test_no_other_name_of_the_home_folder_is_shown(homes: dict[str, Path], name: str, form: str) -> None:
    with pytest.raises(SandboxUnavailable, match="holds the home folder"):
        host_view("", (form.format(homes[name]),))


def test_a_current_folder_is_refused_by_the_name_of_a_link(homes: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxUnavailable, match="holds the current folder"):
        host_view("", (f"{tmp_path}/work",))


def test_a_folder_inside_a_linked_home_folder_may_be_shown(homes: dict[str, Path]) -> None:
    shown = str(homes["linked"] / "bin")
    assert shown in host_view("", (shown,)).visible


def test_a_home_folder_among_files_of_the_system_is_hidden_where_it_lies(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").symlink_to("/usr/share")
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    assert "/usr/share" in host_view("", ()).hidden
