"""Inside a run: a function with a client of OpenAI's API plays an episode, and its calls are the episode."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_cases import ScriptedModel, play, prompt_of, sampling_of

from strop.agents.config import AgentConfig
from strop.agents.episodes import EpisodeTimeout
from strop.agents.openai_server.settings import OpenAIAgentConfig
from strop.agents.setup import AgentSetup
from strop.data.tiny_model import make_tiny_tokenizer
from strop.protocol.trajectory import Trajectory
from strop.rollout.types import TokenOutput
from strop.trainer.untrusted_runs.named import of_agents

pytestmark = pytest.mark.timeout(60)

TOKENIZER = make_tiny_tokenizer()
AGENT = """
import openai, json, time, urllib.request

def ask(client, *messages, **options):
    made = client.chat.completions.create(model="any", messages=list(messages), **options)
    return made.choices[0].message

def two_turns(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    first = ask(client, *row["prompt"])
    second = ask(client, *row["prompt"], first, {"role": "user", "content": "Sure?"})
    return {"reward": 0.5, "parts": {"said": second.content, "truth": row["ground_truth"]}}

async def posts(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="any", messages=row["prompt"], temperature=0.1)
    wanted = urllib.request.Request(
        base_url.removesuffix("/v1") + "/reward", data=json.dumps({"reward": 2}).encode(),
        headers={"Authorization": f"Bearer {api_key}"},
    )
    urllib.request.urlopen(wanted).read()

LOCKS = []

async def shares(base_url, api_key, row):
    import asyncio
    LOCKS.append(asyncio.Event())
    asyncio.get_running_loop().call_later(0.001, LOCKS[-1].set)
    await asyncio.wait_for(LOCKS[0].wait(), 5)
    LOCKS[0].clear()
    return 1.0

def crashes(base_url, api_key, row):
    raise KeyError("what the row lacks")

def hangs(base_url, api_key, row):
    while True:
        time.sleep(0.01)

def never_ends(base_url, api_key, row):
    client, messages = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0), list(row["prompt"])
    while True:
        messages += [ask(client, *messages), {"role": "user", "content": "More"}]

def long_prompt(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask(client, {"role": "user", "content": "a" * 27})

def short(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask(client, *row["prompt"], max_tokens=2)
    return 1.0

def no_number(base_url, api_key, row):
    ask(openai.OpenAI(base_url=base_url, api_key=api_key), *row["prompt"])
    return "good"

def silent(base_url, api_key, row):
    return None

def reacts(base_url, api_key, row):
    client, messages = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0), list(row["prompt"])
    for _ in range(2):
        messages += [ask(client, *messages, stop=["Observation:"]), {"role": "user", "content": "12"}]
    return {"reward": float(len(messages))}

def streams(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    heard = ""
    for chunk in client.chat.completions.create(model="any", messages=row["prompt"], stream=True):
        heard += chunk.choices[0].delta.content or ""
        open(__file__ + ".heard", "a").close()
    return {"reward": 1.0, "parts": {"heard": heard}}
"""


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path


def episode(
    file: Path, function: str, *answers: str, timeout_s: float = 30.0, max_tokens: int = 2000
) -> tuple[tuple[Trajectory, ...], ScriptedModel]:
    model = ScriptedModel([TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in answers])
    config = AgentConfig(
        default_agent="openai_agent", openai=OpenAIAgentConfig(path=f"{file}:{function}"), timeout_s=timeout_s
    )
    prompt = prompt_of(TOKENIZER, agent_name="openai_agent")
    sampling = sampling_of(TOKENIZER, max_tokens=max_tokens)
    return play(prompt, model, AgentSetup(config, TOKENIZER), sampling=sampling), model


def test_the_calls_of_the_function_are_the_episode(agent_file: Path) -> None:
    (trajectory,), model = episode(agent_file, "two_turns", "3<|im_end|>", "Yes<|im_end|>")
    rows = zip(
        trajectory.response_ids, trajectory.log_probs, trajectory.versions, trajectory.sampled, strict=True
    )
    assert [(token, log_prob, version) for token, log_prob, version, ours in rows if ours] == model.said
    assert trajectory.prompt_ids == prompt_of(TOKENIZER).token_ids
    assert trajectory.reward_score == 0.5
    assert trajectory.extra["reward_parts"] == {"said": "Yes", "truth": "3"}
    assert trajectory.numbers == {"model_calls": 2.0}
    assert (trajectory.stop_reason, trajectory.num_turns) == ("stop", 4)


def test_an_async_function_posts_its_reward_and_samples_as_the_run_says(agent_file: Path) -> None:
    (trajectory,), model = episode(agent_file, "posts", "3<|im_end|>")
    assert trajectory.reward_score == 2.0
    assert model.requests[0][1].temperature == 1.0


def test_a_stream_comes_as_it_is_sampled(agent_file: Path) -> None:
    class Waiting(ScriptedModel):
        """Says the end of an answer once its beginning was heard."""

        async def generate(self, *given: Any, on_token: Any = None) -> TokenOutput:
            output = await super().generate(*given)
            first, *rest = zip(output.token_ids, output.log_probs, output.versions, strict=True)
            on_token(*first)
            async with asyncio.timeout(10):
                while not agent_file.with_name("agent.py.heard").exists():
                    await asyncio.sleep(0.005)
            for one in rest:
                on_token(*one)
            return output

    model = Waiting([TOKENIZER("It is 3.<|im_end|>", add_special_tokens=False)["input_ids"]])
    config = AgentConfig(default_agent="openai_agent", openai=OpenAIAgentConfig(path=f"{agent_file}:streams"))
    prompt = prompt_of(TOKENIZER, agent_name="openai_agent")
    (trajectory,) = play(prompt, model, AgentSetup(config, TOKENIZER), sampling=sampling_of(TOKENIZER))
    assert trajectory.extra["reward_parts"] == {"heard": "It is 3."}
    assert trajectory.response_ids == tuple(model.answers[0])  # type: ignore[arg-type]


def test_a_function_that_crashes_is_a_failed_episode_with_its_reason(agent_file: Path) -> None:
    with pytest.raises(KeyError, match="what the row lacks"):
        episode(agent_file, "crashes", "3<|im_end|>")


def test_what_is_shared_between_loops_is_answered_with_what_to_do(agent_file: Path) -> None:
    assert episode(agent_file, "shares", "3<|im_end|>")[0] == ()
    with pytest.raises(RuntimeError, match="different event loop.*; .* make async clients inside it"):
        episode(agent_file, "shares", "3<|im_end|>")


def test_a_function_that_hangs_ends_at_the_deadline(agent_file: Path) -> None:
    with pytest.raises(EpisodeTimeout, match=r"longer than agent.timeout_s = 0.3 s"):
        episode(agent_file, "hangs", "3<|im_end|>", timeout_s=0.3)
    deadline = time.monotonic() + 10
    while any(thread.name == "tool _call_function" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread must have been told to end"
        time.sleep(0.01)


def test_an_episode_ends_where_its_tokens_do(agent_file: Path) -> None:
    (trajectory,), _ = episode(agent_file, "never_ends", "more words<|im_end|>", max_tokens=60)
    assert trajectory.stop_reason == "length"
    assert len(trajectory.response_ids) <= 60
    assert trajectory.reward_score is None, "the reward function is asked"


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(2000, "max_tokens"), (3, "max_tokens"), (2, "length"), (1, "length")]
)
def test_an_answer_that_the_agent_limits_is_not_cut_by_the_run(
    agent_file: Path, max_tokens: int, reason: str
) -> None:
    (trajectory,), _ = episode(agent_file, "short", "It is 3.<|im_end|>", max_tokens=max_tokens)
    assert trajectory.stop_reason == reason


def test_what_a_model_says_behind_a_stop_text_takes_no_tokens_of_the_episode(agent_file: Path) -> None:
    said = "look\nObservation:"
    (trajectory,), model = episode(agent_file, "reacts", said + " it is made up" * 9, max_tokens=120)
    assert trajectory.stop_reason == "stop"
    assert trajectory.reward_score == 5.0, "both calls were answered"
    assert sum(trajectory.sampled) == 2 * len(said)
    assert [sampling.position for _, sampling in model.requests] == [0, len(said)]


def test_a_first_prompt_without_room_for_an_answer_says_what_to_raise(agent_file: Path) -> None:
    with pytest.raises(openai.BadRequestError, match=r"30 tokens.*data.max_response_tokens = 8; raise it"):
        episode(agent_file, "long_prompt", "3<|im_end|>", max_tokens=8)


def test_what_is_no_reward_fails_the_episode(agent_file: Path) -> None:
    with pytest.raises(ValueError, match=r"reward: is 'good'; give a number"):
        episode(agent_file, "no_number", "3<|im_end|>")


def test_an_agent_that_never_calls_gives_no_sequence(agent_file: Path) -> None:
    assert episode(agent_file, "silent", "3<|im_end|>")[0] == ()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("agent.py", "write FILE.py:FUNCTION"),
        ("none.py:main", "is no file"),
        ("{file}:absent", "has no function 'absent'"),
        ("", "agent.openai.path is empty"),
    ],
)
def test_settings_that_name_no_function_are_refused(agent_file: Path, path: str, sentence: str) -> None:
    def setup() -> None:
        made = OpenAIAgentConfig(path=path.format(file=agent_file))
        AgentSetup(AgentConfig(default_agent="openai_agent", openai=made), TOKENIZER)

    with pytest.raises(ValueError, match=sentence):
        setup()


def test_the_file_is_named_to_whoever_may_have_to_trust_it(agent_file: Path) -> None:
    config = AgentConfig(
        default_agent="openai_agent", openai=OpenAIAgentConfig(path=f"{agent_file}:two_turns")
    )
    (named,) = of_agents(config)
    assert (named.key, named.path) == ("agent.openai.path", str(agent_file))
    relative = dataclasses.replace(config, openai=OpenAIAgentConfig(path="a.py:b"))
    moved: Any = relative.with_absolute_paths()
    assert moved.openai.path == f"{Path.cwd()}/a.py:b"
