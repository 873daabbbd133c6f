"""`~` is the home folder in every path that a command is given, those it writes to among them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from cli_calls import cli

from strop.cli.main import COMMANDS, command_parser
from strop.cli.settings import user_path


@pytest.mark.parametrize("name", COMMANDS)
def test_no_argument_of_a_command_takes_a_path_as_it_stands(name: str) -> None:
    parsers = [command_parser(name)[0]]
    while parsers:
        parser = parsers.pop()
        for action in parser._actions:
            assert action.type is not Path, f"{name} {action.option_strings or action.dest}"
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()


def test_a_folder_is_made_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert user_path("~/runs/a") == home / "runs/a"
    (here / "ppo.yaml").write_text("trainer: {total_epochs: 2}\n")
    result = cli("migrate", "verl", "ppo.yaml", "--out", "~/strop.yaml")
    assert result.code == 0, result.err
    assert (home / "strop.yaml").is_file()
    assert list(here.iterdir()) == [here / "ppo.yaml"]
