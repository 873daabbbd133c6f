"""Settings and plugins of agents."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import pytest
from agent_cases import prompt_of, sampling_of, setup_with
from template_family import family_tokenizer

from strop.agents import AgentConfig, AgentSetup
from strop.agents.envs.config import EnvironmentConfig
from strop.agents.tools.calculator import CalculatorTool
from strop.trainer.untrusted_runs.named import of_agents

TOKENIZER = family_tokenizer("qwen25")


def test_settings_of_tools_and_environments_stand_beside_the_others() -> None:
    config = AgentConfig(tools="t.yaml", tool_timeout_s=2.0, environment=EnvironmentConfig(name="gymnasium"))
    assert config.tools == "t.yaml"
    assert config.environment.name == "gymnasium"
    names = [field.name for field in dataclasses.fields(AgentConfig)]
    assert names.index("timeout_s") < names.index("tools") < names.index("environment")
    assert len(names) == len(set(names))


def test_files_are_told_and_become_absolute_whoever_declares_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = AgentConfig(
        files=("a.py", "/b.py"),
        tools="t.yaml",
        loops="l.yaml",
        environment=EnvironmentConfig(name="w.py:World"),
    )
    made = config.with_absolute_paths()
    assert [(one.key, one.value, one.path) for one in of_agents(made)] == [
        ("agent.files", f"{tmp_path}/a.py", f"{tmp_path}/a.py"),
        ("agent.files", "/b.py", "/b.py"),
        ("agent.loops", f"{tmp_path}/l.yaml", f"{tmp_path}/l.yaml"),
        ("agent.tools", f"{tmp_path}/t.yaml", f"{tmp_path}/t.yaml"),
        ("agent.environment.name", f"{tmp_path}/w.py:World", f"{tmp_path}/w.py"),
    ]
    assert made.interactions == ""


def test_a_context_has_what_kits_give_and_nothing_else() -> None:
    context = setup_with(TOKENIZER, [CalculatorTool()]).context(
        prompt_of(TOKENIZER), sampling_of(TOKENIZER), deadline=1.0
    )
    assert list(context.tools) == ["calculator"]
    assert context.interactions == {}
    with pytest.raises(AttributeError, match="the context of an agent has no 'environments'"):
        _ = context.environments
    narrowed = dataclasses.replace(context, resources={})
    with pytest.raises(AttributeError, match="has no 'tools'"):
        _ = narrowed.tools


def test_a_conversation_goes_on_with_the_variables_of_its_row() -> None:
    setup = setup_with(TOKENIZER, [CalculatorTool()])
    setup.template_options = {"mood": "calm", "style": "brief"}
    options = []
    for own in ({}, {"chat_template_kwargs": {"mood": "wild", "style": None}}, {"enable_thinking": False}):
        prompt = dataclasses.replace(prompt_of(TOKENIZER), columns=own)
        context = setup.context(prompt, sampling_of(TOKENIZER), deadline=1.0)
        options.append(context.template.options)
    assert options == [
        {"mood": "calm", "style": "brief"},
        {"mood": "wild", "style": "brief"},
        {"mood": "calm", "style": "brief", "enable_thinking": False},
    ]


def test_an_agent_of_a_class_needs_a_form_that_is_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
            from strop.agents import register

            class NoLoop:
                def run(self): ...

            register("no_form")(NoLoop)
        """)
    )
    with pytest.raises(
        ValueError,
        match=r"agent 'no_form' is <class .*NoLoop'>; register an async function \(prompt, trajectory, generate\), "
        r"or a class with `async def run\(self, sampling_params, \*\*row\)`",
    ):
        AgentSetup(AgentConfig(files=(str(file),)), None)
