"""Training with tools: the real path on a tiny model, token by token."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Done, Project, chain_of, check_records, resume_in, train_in

from strop.config.errors import ConfigError
from strop.data.tiny_model import make_tiny_model
from strop.protocol import columns
from strop.run import RunFolder
from strop.trainer.config import Config

# A random model writes no tool calls, so an answer of an odd number of letters counts as one. In the second parser
# every other answer counts as thought through.
TOOLS = '''
import dataclasses
import json
import shutil

from strop.agents import FunctionCall, ToolParser, function_tool
from strop.agents.tools.formats import ParsedTurn


@function_tool
def count(text: str) -> tuple:
    """Count letters.

    Args:
        text: What to count.
    """
    return str(len(text)), 0.25


@ToolParser.register("odd_letters")
class OddLetters(ToolParser):
    async def extract_tool_calls(self, ids, tools=None):
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text, [FunctionCall("count", json.dumps({"text": text}))] if len(text) % 2 else []


@ToolParser.register("thoughtful_letters")
class ThoughtfulLetters(OddLetters):
    async def parse(self, token_ids, tools, *, begins_in_thinking=False):
        text, calls = await self.extract_tool_calls(token_ids, tools)
        return ParsedTurn(text, tuple(calls), "hm" if len(text) % 4 == 1 else "")
'''
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """More turns are better, and the first letter tells samples apart."""
    score = extra_info["num_turns"] / 10 + ord((solution_str or " ")[0]) % 8 / 10
    return {"score": score, "calls": len(extra_info["tool_rewards"]), "paid": sum(extra_info["tool_rewards"])}
'''
# The tiny template, but thinking before an answer is dropped once it was replied to.
FORGETFUL = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + (m['content'] if m['role'] != 'assistant' else "
    "m['content'].split('</think>')[-1]) + '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose template appends, and one whose template forgets."""
    folders = {}
    for name in ("appends", "forgets"):
        folder = tmp_path_factory.mktemp("agents") / name
        make_tiny_model(
            folder, seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
            intermediate_size=48, max_position_embeddings=256,
        )  # fmt: skip
        folders[name] = folder
    (folders["forgets"] / "chat_template.jinja").write_text(FORGETFUL)
    return folders


def config_of(
    project: Project, folder: Path, model: Path, *overrides: str, tool_format: str = "odd_letters"
) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "agent_tools.py").write_text(TOOLS)
    (folder / "agent_reward.py").write_text(REWARD)
    return project.config(
        f"model.path='{model}'",
        "data.val_files=[]",
        "data.max_prompt_tokens=48",
        "data.max_response_tokens=48",
        f"reward.path='{folder / 'agent_reward.py'}'",
        f"agent.function_tools='{folder / 'agent_tools.py'}'",
        f"agent.tool_format={tool_format}",
        "agent.default_agent=tool_agent",
        "agent.max_assistant_turns=4",
        f"rollout.stop_token_ids={list(range(20, 50))}",  # a random model hardly ever ends its turn
        "trainer.max_steps=2",
        "trainer.preflight=false",
        *overrides,
    )


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: a file's parsers can be registered once per process."""
    return tmp_path_factory.mktemp("agent_files")


def samples(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    with RunFolder.open(folder, read_only=True) as run:
        return run.samples.read(step)


def check_exact(done: Done) -> None:
    """What was trained is what was sampled: the trainer's log-probs of the rows are those of the engine."""
    for record in done.records:
        tensors = record.fetched.tensors()
        mask = columns.flat(tensors["response_mask"]).bool()
        name = "log_probs" if "log_probs" in tensors else "old_log_probs"
        difference = columns.flat(tensors[name]) - columns.flat(tensors["rollout_log_probs"])
        assert float(difference[mask].abs().max()) < 1e-5
        assert float(columns.flat(tensors["rollout_log_probs"])[~mask].abs().sum()) == 0.0
        assert float(columns.flat(tensors["advantages"])[~mask].abs().sum()) == 0.0


def test_two_steps_with_tools_are_exact(
    project: Project, models: dict[str, Path], tools_file: Path, tmp_path: Path
) -> None:
    config = config_of(project, tools_file, models["appends"])
    done = train_in(tmp_path / "run", config)
    check_exact(done)
    check_records(done.folder, num_steps=2)
    for step, numbers in enumerate(done.steps, start=1):
        rows = samples(done.folder, step)
        calls = [row["reward_parts"]["calls"] for row in rows]
        assert numbers["tool_call_counts/mean"] == pytest.approx(sum(calls) / len(calls))
        assert numbers["tool_call_counts/max"] == max(calls) > 0
        assert numbers["tool_rewards/max"] == pytest.approx(max(row["reward_parts"]["paid"] for row in rows))
        assert numbers["num_turns/max"] == max(row["num_turns"] for row in rows) >= 4
        assert numbers["template_drift/max"] == 0.0
        assert {"timing_s/agent_loop/tool_calls/mean", "timing_s/agent_loop/slowest/response_length"} <= set(
            numbers
        )
    for row in samples(done.folder):
        assert row["agent_name"] == "tool_agent"
        assert len(row["response_ids"]) <= 48
        tool_turns = [message for message in row["messages"] if message["role"] == "tool"]
        assert len(tool_turns) == len(row["agent_facts"]["tool_rewards"]) or row["stop_reason"] == "length"
        # Every answer that called is the text that was counted.
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        for message, result in zip(said, tool_turns, strict=False):
            arguments = json.loads(message["tool_calls"][0]["arguments"])
            assert result["content"] == str(len(arguments["text"]))


@pytest.mark.slow
@pytest.mark.parametrize("template", ["appends", "forgets"])
def test_episodes_in_processes_of_their_own_are_the_same_run(
    project: Project, models: dict[str, Path], tools_file: Path, tmp_path: Path, template: str
) -> None:
    """Tools with rewards, and episodes of several sequences: to the bit, and a resume may change the number."""
    tool_format = "odd_letters" if template == "appends" else "thoughtful_letters"
    config = config_of(
        project,
        tools_file,
        models[template],
        "run.save_every=1",
        "rollout.deterministic=true",
        tool_format=tool_format,
    )
    there = dataclasses.replace(config, agent=dataclasses.replace(config.agent, num_workers=2))
    here = train_in(tmp_path / "here", config)
    done = train_in(tmp_path / "there", there)
    check_exact(done)
    check_records(done.folder, num_steps=2)
    assert chain_of(done.folder) == chain_of(here.folder)
    for step in (1, 2):
        for one, other in zip(samples(done.folder, step), samples(here.folder, step), strict=True):
            assert without_times(one) == without_times(other)
    folder = tmp_path / "resumed"
    shutil.copytree(tmp_path / "here", folder)
    resumed = resume_in(folder, "trainer.max_steps=3", "agent.num_workers=2")
    longer = train_in(
        tmp_path / "longer",
        dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=3)),
    )
    assert chain_of(resumed.folder) == chain_of(longer.folder)


def without_times(row: Any) -> Any:
    """A sample without what a clock measured."""
    if isinstance(row, list):
        return [without_times(one) for one in row]
    if isinstance(row, dict):
        return {
            name: without_times(value)
            for name, value in row.items()
            if name != "timings" and not name.endswith("seconds")
        }
    return row


def test_rewritten_history_makes_several_rows_of_one_sample(
    project: Project, models: dict[str, Path], tools_file: Path, tmp_path: Path
) -> None:
    config = config_of(project, tools_file, models["forgets"], tool_format="thoughtful_letters")
    done = train_in(tmp_path / "run", config)
    check_exact(done)
    check_records(done.folder, num_steps=2)
    for step, record in enumerate(done.records, start=1):
        rows = samples(done.folder, step)
        ids = list(record.fetched.non_tensor_batch["id"])
        episodes = list(record.fetched.non_tensor_batch["episode_id"])
        assert len(rows) == len(set(episodes)) == 16
        assert len(ids) == len(set(ids)) == 16 + sum(len(row["earlier_sequences"] or ()) for row in rows) > 16
        advantages = columns.rows(record.fetched.tensors()["advantages"])
        masks = columns.rows(record.fetched.tensors()["response_mask"])
        by_episode: dict[str, set[float]] = {}
        for name, values, mask in zip(episodes, advantages, masks, strict=True):
            by_episode.setdefault(name, set()).update(values[mask.bool()].tolist())
        assert all(len(values) == 1 for values in by_episode.values()), (
            "an outcome reward credits all tokens alike"
        )
        assert {row["fate"] for row in rows} == {"trained"}
        # The mean over samples of one group is 0, whatever number of rows each has.
        for uid in {row["uid"] for row in rows}:
            group = [next(iter(values)) for name, values in by_episode.items() if name.startswith(f"{uid}/")]
            assert sum(group) == pytest.approx(0.0, abs=1e-4)
        for row in rows:
            if row["earlier_sequences"]:
                first = row["earlier_sequences"][0]
                lengths = [len(one["response_ids"]) for one in row["earlier_sequences"]] + [
                    len(row["response_ids"])
                ]
                assert sum(lengths) <= 48
                assert row["prompt_ids"][: len(first["prompt_ids"]) - 1] == first["prompt_ids"][:-1]


def test_samples_and_not_their_rows_move_the_coefficient_of_the_kl(
    project: Project, models: dict[str, Path], tools_file: Path, tmp_path: Path
) -> None:
    config = config_of(
        project, tools_file, models["forgets"], "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.5, horizon: 100}", tool_format="thoughtful_letters",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    assert len(done.records[0].fetched) > 16
    # The policy of the first step is the reference: a KL of 0 is 20 % too low at most, and 16 samples count.
    coefficients = [numbers["actor/reward_kl_penalty_coeff"] for numbers in done.steps]
    assert coefficients == pytest.approx([0.5, 0.5 * (1 - 0.2 * 16 / 100)])


@pytest.mark.slow
def test_the_same_seed_plays_the_same_episodes_however_many_run_at_once(
    project: Project, models: dict[str, Path], tools_file: Path, tmp_path: Path
) -> None:
    chains, losses = [], []
    for name, running in (("wide", 64), ("narrow", 3)):
        config = config_of(
            project, tools_file, models["forgets"], "actor.samples_per_update=4", "trainer.max_steps=1",
            f"rollout.max_running={running}", tool_format="thoughtful_letters",
        )  # fmt: skip
        done = train_in(tmp_path / name, config)
        chains.append(chain_of(done.folder)[0].stages)
        losses.append([len(record.optimizer_steps) for record in done.records])
    for stage in ("prompt_tokens", "sampled_tokens", "rewards"):
        assert chains[0][stage] == chains[1][stage]
    # Four samples per optimizer step: 16 samples are four steps, however many rows they have.
    assert losses == [[4], [4]]


def test_tools_need_somebody_who_uses_them(
    project: Project, tools_file: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(project, tools_file, models["appends"], "agent.default_agent=single_turn_agent")
    with pytest.raises(ValueError, match="every train row is played by single_turn_agent"):
        train_in(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="agent.max_user_turns is 3, but single_turn_agent"):
        project.config("agent.max_user_turns=3")
