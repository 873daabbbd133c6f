"""Chat templates that ask for the time are told one date for a whole run, and tomorrow the same one."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from tiny_runs import Project

from strop.config import read_settings
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.trainer.start import start_run
from strop.utils.chat_template import apply_template

DATED = "{{ strftime_now('%d %b %Y %H:%M') }}{% for message in messages %}{{ message.content }}{% endfor %}"


def rendered(project: Project, **settings: str) -> str:
    tokenizer = load_tokenizer(ModelConfig(path=str(project.model), chat_template=DATED, **settings))  # type: ignore[arg-type]
    text = apply_template(tokenizer, [{"role": "user", "content": "!"}], None, tokenize=False)
    assert isinstance(text, str)
    return text


def test_a_template_is_told_the_date_that_is_set(project: Project) -> None:
    assert rendered(project, template_date="2024-02-03T04:05") == "03 Feb 2024 04:05!"
    assert rendered(project, template_date="2024-02-03") == "03 Feb 2024 00:00!"


def test_without_one_it_is_told_the_beginning_of_the_day(project: Project) -> None:
    assert rendered(project) == f"{datetime.date.today():%d %b %Y} 00:00!"


def test_a_run_keeps_the_day_on_which_it_began(project: Project, tmp_path: Path) -> None:
    dated, plain = (
        start_run(tmp_path / name, project.config(*settings), command=["strop", "train"])
        for name, settings in (("dated", [f'model.chat_template="{DATED}"']), ("plain", []))
    )
    for start in (dated, plain):
        start.run.close()
    today = datetime.date.today().isoformat()
    assert dated.config.model.template_date == today
    assert re.search(f"template_date: .?{today}", read_settings(tmp_path / "dated/config.yaml"))
    assert plain.config.model.template_date == ""


def test_what_is_no_date_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.template_date is 'today', which is no date: write it as 2026-11-26"
    ):
        ModelConfig(template_date="today")
