"""Variables that the chat template does not read are said before a run, and in a check."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer.tiny_runs import Project

from strop.evaluation.evaluate import evaluate
from strop.trainer.preflight.trial import run_preflight
from strop.trainer.setup import load_training_data
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run

TEMPLATE = "{% if enable_thinking %}!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
THINKING = f'model.chat_template="{TEMPLATE}"'
SENTENCE = (
    "the chat template reads no 'enable_thinkng' and no 'mood', so naming that in "
    "{}.chat_template_kwargs changes nothing"
)


def test_a_name_that_is_not_in_the_template_is_said(project: Project) -> None:
    config = project.config(
        THINKING, "data.chat_template_kwargs={enable_thinkng: false, enable_thinking: true, mood: 1}"
    )
    warning = f"WARNING: {SENTENCE.format('data')}: correct the name, or leave it out"
    assert warning in load_training_data(config).report()
    first = run_preflight(config, num_prompts=1).checks[0]
    assert (first.name, first.level, first.text) == ("template", "warn", SENTENCE.format("data"))


def test_an_evaluation_says_it_too(project: Project) -> None:
    config = project.config(
        "data.chat_template_kwargs={enable_thinkng: false, mood: 1}", "data.max_val_prompts=1"
    )
    said: list[str] = []
    evaluate(config, say=said.append)
    assert f"WARNING: {SENTENCE.format('data')}: correct the name, or leave it out" in said


@pytest.mark.parametrize("settings", [[], [THINKING, "data.chat_template_kwargs={enable_thinking: false}"]])
def test_a_name_that_is_there_is_no_reason_to_warn(project: Project, settings: list[str]) -> None:
    assert load_training_data(project.config(*settings)).variables is None


def test_fine_tuning_says_it_too(project: Project, tmp_path: Path) -> None:
    config = project.config(
        "sft.data.chat_template_kwargs={enable_thinkng: false, mood: 1}",
        f"sft.data.train_files=['{project.task.sft}']",
        "sft.max_steps=1",
    )
    said: list[str] = []
    start = start_run(tmp_path / "run", config, command=["strop", "sft"])
    with start.run:
        fine_tune(config, start.run, say=said.append)
    assert f"WARNING: {SENTENCE.format('sft.data')}: correct the name, or leave it out" in said
