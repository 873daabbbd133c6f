"""What guests bring to agents, and what remains without them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from agent_cases import prompt_of, sampling_of, setup_with
from template_family import family_tokenizer

from strop.agents import AgentConfig, AgentSetup
from strop.base.sections import section_of
from strop.environments.config import CreditSettings, EnvironmentConfig
from strop.interactions.settings import InteractionSettings
from strop.received.named import of_agents
from strop.tools.calculator import CalculatorTool
from strop.tools.settings import ToolSettings

TOKENIZER = family_tokenizer("qwen25")
END = TOKENIZER.eos_token_id
CORE_ALONE = """
import asyncio, dataclasses
from strop.base import guests
guests.guests = lambda: ()

from strop.agents import AgentConfig, AgentSetup, agents
from strop.agents.episodes import play_episode
from strop.rollout.types import Sampling, TokenOutput
from strop.trajectory import Prompt

class Client:
    async def generate(self, name, token_ids, sampling):
        return TokenOutput(token_ids=(5, 2), log_probs=(-1.0, -2.0), versions=(0, 0), stop_reason="stop")

prompt = Prompt(
    uid="a", row=0, token_ids=(3,), messages=({"role": "user", "content": "?"},), data_source="",
    ground_truth=None, agent_name="single_turn_agent",
)
setup = AgentSetup(AgentConfig(), None)
(one,) = asyncio.run(play_episode(prompt, 0, Sampling(key=0, max_tokens=4), client=Client(), seed=0, setup=setup))
import json, sys
print(json.dumps({
    "answer": [one.response_ids, one.stop_reason],
    "agents": list(agents),
    "settings": [field.name for field in dataclasses.fields(AgentConfig)],
    "rooms": sorted({name.split(".")[1] for name in sys.modules if name.startswith("strop.")}),
}))
"""


def test_single_turns_are_played_where_no_guest_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORE_ALONE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answer"] == [[5, 2], "stop"]
    assert found["agents"] == ["single_turn_agent"]
    assert "timeout_s" in found["settings"]
    assert not {"tools", "interactions", "environment"} & set(found["settings"])
    assert "agents" in found["rooms"]
    assert not {"tools", "environments", "interactions", "compat"} & set(found["rooms"])


def test_settings_of_guests_stand_beside_those_of_the_core() -> None:
    config = AgentConfig(tools="t.yaml", tool_timeout_s=2.0, environment=EnvironmentConfig(name="gymnasium"))
    assert section_of(config, ToolSettings).tools == "t.yaml"
    assert section_of(config, EnvironmentConfig).name == "gymnasium"
    names = [field.name for field in dataclasses.fields(AgentConfig)]
    assert names.index("timeout_s") < names.index("tools") < names.index("environment")
    assert len(names) == len(set(names))
    for cls in (ToolSettings, InteractionSettings, CreditSettings):
        assert isinstance(config, cls)
    with pytest.raises(LookupError, match="EnvironmentConfig has no section of type ToolSettings"):
        section_of(config.environment, ToolSettings)  # type: ignore[attr-defined]


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
    assert section_of(made, InteractionSettings).interactions == ""


def test_a_context_has_what_kits_give_and_nothing_else() -> None:
    context = setup_with(TOKENIZER, [CalculatorTool()]).context(
        prompt_of(TOKENIZER), sampling_of(TOKENIZER), deadline=1.0
    )
    assert list(context.tools) == ["calculator"]
    assert context.interactions == {}
    with pytest.raises(AttributeError, match="the context of an agent has no 'environments'"):
        _ = context.environments
    narrowed = dataclasses.replace(context, kits={})
    with pytest.raises(AttributeError, match="has no 'tools'"):
        _ = narrowed.tools


def test_an_agent_of_a_class_needs_the_form_that_a_guest_knows(tmp_path: Path) -> None:
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
