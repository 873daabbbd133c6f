"""Runs on images: the real pipeline with a tiny Qwen2-VL."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from image_task import ImageTask, image_rows
from safetensors.torch import load_file
from test_ray_runs import cut_after
from tiny_runs import Done, check_records, resume_in, train_in

from references.tiny_tiles import ONE_AXIS
from references.videos import EVEN, UNEVEN, write_video
from strop.data.prompts import PromptDataset
from strop.engines.multimodal.families import load_media_processor
from strop.engines.tokenizer import load_tokenizer
from strop.protocol import DataProto
from strop.run import RunFolder
from strop.trainer.checks.models import check_models
from strop.trainer.preflight.trial import run_preflight
from strop.trainer.role_export import export_role
from strop.trainer.setup import load_training_data, sampling_of
from strop.workers.rollout import RolloutSettings, RolloutWorker


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ImageTask:
    transformers.utils.logging.disable_progress_bar()
    return ImageTask(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def two_steps(task: ImageTask) -> Done:
    config = task.config(
        "algorithm.use_kl_loss=true", "actor.samples_per_update=8", "model.freeze_vision_tower=true",
        "run.save_every=1", "run.hf_model=last", "eval.before_train=true",
    )  # fmt: skip
    return train_in(task.folder / "run", config)


def test_rollout_and_trainer_agree_about_images(two_steps: Done) -> None:
    differences = [numbers["training/rollout_log_probs_diff_max"] for numbers in two_steps.steps]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert all(numbers["actor/grad_norm"] > 1e-3 for numbers in two_steps.steps)
    check_records(two_steps.folder, num_steps=2)


def test_pixels_are_made_once_per_image_whatever_the_number_of_roles_and_samples(
    task: ImageTask, two_steps: Done
) -> None:
    # Rollout, actor and reference are in this process: 8 pictures of training and 8 of validation, each once.
    processor = load_media_processor(task.model)
    assert processor is not None
    assert processor.num_made == 16


def test_a_frozen_vision_tower_is_bit_for_bit_what_it_was(task: ImageTask, two_steps: Done) -> None:
    before = load_file(task.model / "model.safetensors")
    saved = two_steps.folder / "checkpoints" / "global_step_2" / "model"
    after = load_file(saved / "model.safetensors")
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved
    assert not [name for name in moved if "visual" in name]
    assert load_media_processor(saved) is not None, "the next run can start from it"


def test_samples_name_their_image(two_steps: Done) -> None:
    with RunFolder.open(two_steps.folder, read_only=True) as run:
        texts = {row["prompt"] for row in run.samples.read(1)}
    assert all("<|vision_start|><image " in text and " tokens><|vision_end|>?" in text for text in texts)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(two_steps: Done, tmp_path: Path) -> None:
    resumed = resume_in(cut_after(two_steps.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in resumed.chain] == [one.chain for one in two_steps.chain]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_AXIS)
def test_a_run_of_each_family_trains_goes_on_and_is_exported(kind: str, tmp_path: Path) -> None:
    task = ImageTask(tmp_path, kind=kind)
    config = task.config("data.max_prompt_tokens=64", "run.save_every=1", "run.hf_model=last")
    whole = train_in(tmp_path / "run", config)
    assert max(numbers["training/rollout_log_probs_diff_max"] for numbers in whole.steps) < 1e-4
    assert all(numbers["actor/grad_norm"] > 1e-3 for numbers in whole.steps)
    resumed = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in resumed.chain] == [one.chain for one in whole.chain]
    saved = whole.folder / "checkpoints" / "global_step_2" / "model"
    before, after = load_file(task.model / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert any("vision" in name and not torch.equal(before[name], after[name]) for name in before)
    assert load_media_processor(saved) is not None
    assert "\\n" not in (saved / "chat_template.jinja").read_text(), (
        "blank lines are added when it is rendered"
    )
    checkpoint = whole.folder / "checkpoints" / "global_step_2"
    exported = export_role(checkpoint, tmp_path / "exported", config.model)
    assert exported.difference < 1e-4
    assert load_media_processor(exported.folder) is not None


def test_a_processor_has_the_chat_template_that_was_trained_with(task: ImageTask, tmp_path: Path) -> None:
    folder, own = tmp_path / "model", tmp_path / "own.jinja"
    shutil.copytree(task.model, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    own.write_text("{{ '' }}" + template)
    config = task.config(f"model.path={folder}", f"model.chat_template={own}", "trainer.max_steps=1")
    done = train_in(tmp_path / "run", config)
    with RunFolder.open(done.folder, read_only=True) as run:
        (checkpoint,) = (run.checkpoints.root / f"global_step_{step}" for step in run.checkpoints.steps())
    exported = export_role(checkpoint, tmp_path / "exported", config.model)
    for saved in (checkpoint / "model", exported.folder):
        assert (saved / "chat_template.jinja").read_text() == own.read_text()
        assert json.loads((saved / "chat_template.json").read_text()) == {"chat_template": own.read_text()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_on_video_files_goes_on_with_the_same_files_alone(kind: str, tmp_path: Path) -> None:
    task = ImageTask(tmp_path, kind=kind)
    films = [write_video(tmp_path / f"{number}.mp4", UNEVEN[number:]) for number in range(2)]
    rows = [
        {
            "data_source": "films",
            "prompt": [{"role": "user", "content": "<video>?"}],
            "videos": [{"video": str(films[number % 2]), "fps": 3}],
            "reward_model": {"style": "rule", "ground_truth": "red"},
        }
        for number in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = task.config("data.max_prompt_tokens=200", "run.save_every=1", "data.prompts_per_step=2")
    whole = train_in(tmp_path / "run", config)
    assert max(numbers["training/rollout_log_probs_diff_max"] for numbers in whole.steps) < 1e-4
    with RunFolder.open(whole.folder, read_only=True) as run:
        assert all("frames from 0.0 to" in row["prompt"] for row in run.samples.read(1))
    for film in films:  # as on another machine
        os.utime(film, ns=(0, 0))
    resumed = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in resumed.chain] == [one.chain for one in whole.chain]
    content = bytearray(write_video(films[0], EVEN, size=(320, 240)).read_bytes())
    content[5900:5940] = bytes(40)
    films[0].write_bytes(content)
    with pytest.raises(
        ValueError, match="the video files that the rows name are not those of the run to resume"
    ):
        resume_in(cut_after(whole.folder, tmp_path / "other", step=1))

    with pytest.raises(ValueError, match="train row 0: .*0.mp4' is damaged at frame"):
        run_preflight(config, num_prompts=1)


def test_images_and_a_model_of_text_are_refused_before_anything_runs(
    task: ImageTask, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match="train row 0 has images or videos, but the model .* takes text alone"
    ):
        train_in(tmp_path / "run", task.config(f"model.path='{tiny_model}'"))


@pytest.mark.parametrize("streaming", ["false", "true"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["actor.engine.sequence_parallel=2"],
            "actor.engine.sequence_parallel is 2, but prompts have images",
        ),
        (
            ["actor.engine.context_parallel=2"],
            "actor.engine.context_parallel is 2, but prompts have images",
        ),
        (
            ["algorithm.adv_estimator=gae"],
            "prompts have images, which a critic does not take: .*=gae needs one",
        ),
        (["reward_model.path=judge"], "prompts have images, which the reward model would not see"),
    ],
)
def test_what_images_do_not_go_with_is_said_when_the_rows_are_read(
    task: ImageTask, settings: list[str], sentence: str, streaming: str, tmp_path: Path
) -> None:
    ranks = ["resources.runtime=ray", "resources.ranks=2"]
    config = task.config(
        *settings, *ranks, f"data.streaming={streaming}", f"data.cache_dir={tmp_path}", "trainer.max_steps=1"
    )
    with pytest.raises(ValueError, match=sentence):
        load_training_data(config)


def test_a_critic_that_would_see_is_refused_by_its_folder(task: ImageTask) -> None:
    with pytest.raises(ValueError, match="the critic would start from .*, a vision-language model"):
        check_models(task.config("algorithm.adv_estimator=gae"))


@pytest.mark.slow
def test_a_policy_learns_to_tell_the_colour_of_a_picture(tmp_path: Path) -> None:
    task = ImageTask(tmp_path, count=32)
    config = task.config(
        "trainer.max_steps=60", "data.prompts_per_step=8", "rollout.samples_per_prompt=8",
        "data.max_response_tokens=1", "eval.before_train=true", "eval.every=0",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    # Without a look at the picture every answer is right for half of them.
    assert done.result.pass_rate_start <= 0.75
    assert done.result.pass_rate_final >= 0.95
    rewards = [numbers["critic/rewards/mean"] for numbers in done.steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


@pytest.mark.slow
def test_prompts_with_images_travel_to_processes_of_their_own(task: ImageTask, tmp_path: Path) -> None:
    config = task.config(
        "resources.runtime=ray", "resources.ranks=2", "resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5",
        "algorithm.use_kl_loss=true",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    assert len(done.steps) == 2
    assert max(numbers["training/rollout_log_probs_diff_max"] for numbers in done.steps) < 1e-4


def test_a_reward_model_of_text_is_not_asked_about_images(task: ImageTask) -> None:
    config = task.config()
    worker = RolloutWorker(
        config.model, config.rollout, config.reward, RolloutSettings(device="cpu", seed=0, keeps_text=True)
    )
    tokenizer = load_tokenizer(config.model)
    dataset = PromptDataset(image_rows(2), tokenizer, config.data, "val")
    prompts = [dataset.prompt(row, f"val-{row:06d}") for row in dataset.row_numbers]
    try:
        with pytest.raises(ValueError, match="prompts have images, which the reward model would not see"):
            worker.run_episodes(
                DataProto.from_dict({}, non_tensors={"prompt": prompts}),
                1,
                sampling_of(config, config.rollout, tokenizer),
            )
    finally:
        worker.close()
