"""Real agent frameworks, unmodified, in an environment of their own: pydantic-ai and smolagents drive the gateway.

Their pins are not strop's, so STROP_AGENT_FRAMEWORKS names the Python of an environment with both:

    python -m venv frameworks && frameworks/bin/pip install 'pydantic-ai-slim[openai]' 'smolagents[openai]'
    export STROP_AGENT_FRAMEWORKS=frameworks/bin/python
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import Open, ScriptedEngine, served
from template_family import BY_NAME, family_tokenizer

PYTHON = os.environ.get("STROP_AGENT_FRAMEWORKS", "")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
AGENTS = {
    "pydantic-ai": ("pydantic_ai_agent.py", "whole"),
    "pydantic-ai that streams": ("pydantic_ai_agent.py", "streams"),
    "smolagents": ("smolagents_agent.py", "whole"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_what_a_framework_plays_is_the_tokens_that_were_sampled(name: str) -> None:
    script, how = AGENTS[name]
    package = script.removesuffix("_agent.py")
    if not PYTHON or subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"STROP_AGENT_FRAMEWORKS names no Python with {package} (see the head of this file)")
    family, tokenizer = BY_NAME["qwen25"], family_tokenizer("qwen25")
    called = family.write_calls([("look_up", {"value": "x"})]) + family.end
    ended = family.write_calls([("final_answer", {"answer": "It is 12."})]) + family.end
    last = ended if package == "smolagents" else f"It is 12.{family.end}"
    answers = ["Let me see.\n" + called, called, last, f"Yes.{family.end}"]
    engine = ScriptedEngine(tokenizer, answers)

    def work(opened: Open) -> dict[str, Any]:
        words = [
            PYTHON,
            str(Path(__file__).with_name(script)),
            f"{opened.address}/v1",
            f"{opened.token}:one",
            how,
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    said, sessions = served(engine, work, tokenizer=tokenizer, seconds=170)
    assert said["looked_up"] == ["x", "x"]
    assert said["said"] == (["It is 12."] if package == "smolagents" else ["It is 12.", "Yes."])
    sequences = sessions["one"].sequences()
    if package != "smolagents":  # which writes earlier calls as text, so that each of its turns begins anew
        assert len(sequences) == 1
    rows = [
        row
        for one in sequences
        for row in zip(one.response_ids, one.log_probs, one.versions, one.sampled, strict=True)
    ]
    sampled = [
        row for one in engine.outputs for row in zip(one.token_ids, one.log_probs, one.versions, strict=True)
    ]
    assert [(token, log_prob, version) for token, log_prob, version, ours in rows if ours] == sampled
    assert len(engine.outputs) == (3 if package == "smolagents" else 4)
