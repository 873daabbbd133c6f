"""Runs whose tools return images: the real pipeline with a tiny Qwen2-VL."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_task import ImageTask, image_rows
from test_ray_runs import cut_after
from tiny_runs import Done, check_records, resume_in, train_in

from strop.cli.main import main
from strop.data.prompts import PromptDataset
from strop.engines.tokenizer import load_tokenizer
from strop.evaluation.evaluate import evaluate
from strop.protocol import DataProto, columns
from strop.run import RunFolder
from strop.trainer.config import Config
from strop.trainer.setup import sampling_of
from strop.workers.rollout import RolloutSettings, RolloutWorker

IMAGE_ID = 105
# A random model writes no tool calls, so an answer of an odd number of letters counts as one. What is seen depends on
# what was said, so samples of one prompt see different pictures.
TOOLS = '''
import json

from PIL import Image

from strop.agents import FunctionCall, ToolParser, ToolResponse, function_tool


@function_tool
def draw(text: str) -> tuple:
    """Draw.

    Args:
        text: What to draw.
    """
    red = 40 * (len(text) % 6)
    return ToolResponse(text="drawn", image=[Image.new("RGB", (16 + 8 * (len(text) % 3), 16), (red, 90, 200))])


@ToolParser.register("odd_drawings")
class OddDrawings(ToolParser):
    async def extract_tool_calls(self, ids, tools=None):
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text, [FunctionCall("draw", json.dumps({"text": text}))] if len(text) % 2 else []
'''

SHOWN = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right when a tool drew, and its picture was shown."""
    return float("drawn" in solution_str and "cannot be shown" not in solution_str)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ImageTask:
    transformers.utils.logging.disable_progress_bar()
    task = ImageTask(tmp_path_factory.mktemp("drawings"))
    (task.folder / "tools.py").write_text(TOOLS)
    return task


def config_of(task: ImageTask, *overrides: str) -> Config:
    return task.config(
        f"agent.function_tools='{task.folder / 'tools.py'}'",
        "agent.tool_format=odd_drawings",
        "agent.default_agent=tool_agent",
        "agent.max_assistant_turns=3",
        f"rollout.stop_token_ids={list(range(20, 60))}",  # a random model hardly ever ends its turn
        "data.max_response_tokens=64",
        *overrides,
    )


TWO_STEPS = (
    "algorithm.use_kl_loss=true", "actor.samples_per_update=8", "run.save_every=1", "run.hf_model=last"
)  # fmt: skip


@pytest.fixture(scope="module")
def two_steps(task: ImageTask) -> Done:
    return train_in(task.folder / "run", config_of(task, *TWO_STEPS))


def samples(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    with RunFolder.open(folder, read_only=True) as run:
        return run.samples.read(step)


def test_rollout_and_trainer_agree_about_images_of_tools(two_steps: Done) -> None:
    check_records(two_steps.folder, num_steps=2)
    for numbers, record in zip(two_steps.steps, two_steps.records, strict=True):
        assert numbers["training/rollout_log_probs_diff_max"] < 1e-4
        assert numbers["actor/grad_norm"] > 1e-3
        assert numbers["tool_call_counts/max"] > 0
        assert numbers["tool_errors/max"] == 0
        assert all(math.isfinite(value) for value in numbers.values())
        tensors = record.fetched.tensors()
        is_image = columns.flat(tensors["responses"]) == IMAGE_ID
        assert int(is_image.sum()) > 0
        assert not (is_image & columns.flat(tensors["response_mask"]).bool()).any()
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages"):
            assert float(columns.flat(tensors[name]).abs().max()) < 50, name


def test_rows_carry_their_images_to_the_training_roles(two_steps: Done) -> None:
    rows = two_steps.records[0].fetched
    responses = columns.rows(rows.tensors()["responses"])
    prompts = columns.rows(rows.tensors()["prompts"])
    seen: dict[str, set[tuple[str, ...]]] = {}
    for uid, prompt, response, media in zip(
        rows.non_tensor_batch["uid"], prompts, responses, rows.non_tensor_batch["media"], strict=True
    ):
        ids = torch.cat([prompt, response])
        covered = [place for one in media for place in range(*one.span)]
        assert covered == (ids == IMAGE_ID).nonzero()[:, 0].tolist()
        seen.setdefault(uid, set()).add(tuple(one.key for one in media))
    assert any(len(keys) > 1 for keys in seen.values()), "samples of one prompt saw different pictures"


@pytest.mark.slow
def test_a_resumed_run_with_images_of_tools_goes_on_as_if_nothing_had_happened(
    task: ImageTask, tmp_path: Path
) -> None:
    # One sequence at a time: when a tool answers decides beside which others an episode goes on, and the last bits of
    # log-probs depend on that.
    whole = train_in(tmp_path / "run", config_of(task, *TWO_STEPS, "rollout.max_running=1"))
    resumed = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in resumed.chain] == [one.chain for one in whole.chain]


def test_samples_show_the_images_of_their_turns(
    two_steps: Done, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # lines that are not broken
    row = next(row for row in samples(two_steps.folder) if row["agent_facts"]["tool_rewards"])
    turn = next(message for message in row["messages"] if message["role"] == "tool")
    assert turn["content"] == "[image]\ndrawn"
    (image,) = turn["images"]
    start, stop = image["tokens"]
    assert turn["tokens"][0] < start < stop < turn["tokens"][1]
    assert row["response_ids"][start:stop] == [IMAGE_ID] * (stop - start)
    assert row["response_ids"][start - 1] != IMAGE_ID != row["response_ids"][stop]
    wide, high = image["size"]
    assert main(["samples", str(two_steps.folder), "--id", row["id"], "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"[image {wide}x{high}: {stop - start} tokens]" in shown
    assert "<|image_pad|>" not in shown


def test_samples_without_their_tokens_say_that_there_is_an_image(
    two_steps: Done, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(two_steps.folder), "--step", "1", "--limit", "99"]) == 0
    assert "[image]" in capsys.readouterr().out
    assert main(["samples", str(two_steps.folder), "--step", "1", "--json"]) == 0
    assert "[image]" in json.dumps(json.loads(capsys.readouterr().out))


def test_a_reward_model_of_text_is_not_asked_about_images_of_tools(
    task: ImageTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(task)
    worker = RolloutWorker(
        config.model,
        config.rollout,
        config.reward,
        RolloutSettings(agent=config.agent, device="cpu", seed=0, keeps_text=True),
    )
    monkeypatch.setattr(
        worker._receiving._receiver, "require_verified", lambda what: None
    )  # weights of the folder will do
    tokenizer = load_tokenizer(config.model)
    rows = [
        {**row, "prompt": [{"role": "user", "content": "?"}], "images": None, "agent_name": "tool_agent"}
        for row in image_rows(4)
    ]
    dataset = PromptDataset(rows, tokenizer, config.data, "val")
    prompts = [dataset.prompt(row, f"val-{row:06d}") for row in dataset.row_numbers]
    try:
        played = worker.run_episodes(
            DataProto.from_dict({}, non_tensors={"prompt": prompts}),
            2,
            sampling_of(config, config.rollout, tokenizer),
        )
        episodes = list(played.non_tensor_batch["episode"])
        seen = [any(one.media for one in episode.sequences) for episode in episodes]
        assert any(seen)
        for episode, has_images in zip(episodes, seen, strict=True):
            if has_images:  # one sample's fault, and no end of the run
                assert episode.outcome.kind == "error"
                assert "a tool gave images, which the reward model would not see" in episode.outcome.error
            else:
                assert episode.outcome.kind == "score"
        rewards = {"reward": torch.zeros(len(episodes))}
        worker.make_training_batch(DataProto.from_dict(rewards, non_tensors={"episode": episodes}))
    finally:
        worker.close()


def test_an_evaluation_shows_images_of_tools(task: ImageTask) -> None:
    (task.folder / "shown.py").write_text(SHOWN)
    done = evaluate(config_of(task, f"reward.path='{task.folder / 'shown.py'}'"), say=lambda line: None)
    assert done.total.pass_rate > 0
