"""What vLLM's process is told of a prompt's media: patches in memory, each once, known by their contents."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from references.tiny_tiles import save_tiny_tiles
from references.tiny_vision import BLUE, RED, picture, png, save_tiny_vision
from references.vision_prompts import prompts_from, prompts_of
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.multimodal.inputs import media_reader
from strop.engines.multimodal.vl_model import Reader
from strop.rollout.config import RolloutConfig
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.pictures import SharedPictures
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.probe import probe_tokens
from strop.trainer.checks.media import check_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> Reader:
    found = media_reader(AutoConfig.from_pretrained(folder), str(folder))
    assert found is not None
    return found


def opened(told: dict[str, Any]) -> torch.Tensor:
    """What the other process finds."""
    with Path(told["path"]).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), told["num_bytes"], prot=mmap.PROT_READ)
    ((_, shape, dtype, offset, _),) = told["entries"]
    data = torch.frombuffer(bytearray(mapped), dtype=getattr(torch, dtype), offset=offset)
    return data[: torch.Size(shape).numel()].view(shape)


def test_patches_are_those_of_the_trainer_and_are_shared_by_the_requests_that_need_them(
    folder: Path, reader: Reader
) -> None:
    shared = SharedPictures(reader)
    prompt = prompts_of(folder)[2]  # two images
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    assert model.media is not None
    arguments = model.media.arguments(prompt.media, device=torch.device("cpu"))
    with shared.of(prompt.token_ids, prompt.media) as told:
        json.dumps(told)
        once = shared.num_bytes
        assert torch.equal(torch.cat([opened(one) for one in told]), arguments["pixel_values"])
        assert [one["grid"] for one in told] == arguments["image_grid_thw"].tolist()
        assert [(one["start"], len(one["places"])) for one in told] == [
            (one.start, one.num_tokens) for one in prompt.media
        ]
        with shared.of(prompt.token_ids, prompt.media) as again:
            assert [one["path"] for one in again] == [one["path"] for one in told]
            assert shared.num_bytes == once == sum(one["num_bytes"] for one in told)
        assert Path(told[0]["path"]).exists(), "still needed"
    assert shared.num_bytes == 0
    assert not Path(told[0]["path"]).exists()


def test_a_picture_is_known_by_what_a_model_sees_of_it(folder: Path, reader: Reader) -> None:
    """A file that is another, but has the same pixels, is the same; one pixel makes another."""
    spot = picture(24, 16, RED)
    spot.putpixel((23, 15), BLUE)
    files = [png(picture(24, 16, RED)), png(picture(24, 16, RED)) + b" ", png(spot)]
    prompts = prompts_from(folder, [("<image>", {"images": [one]}) for one in files])
    shared = SharedPictures(reader)
    hashes = []
    for prompt in prompts:
        with shared.of(prompt.token_ids, prompt.media) as (told,):
            hashes.append(told["hash"])
    assert prompts[0].media[0].key != prompts[1].media[0].key
    assert hashes[0] == hashes[1] != hashes[2]


def test_time_stamps_between_the_patches_of_a_video_are_no_places_for_patches(
    folder: Path, reader: Reader
) -> None:
    prompt = prompts_of(folder, videos=True)[4]
    with SharedPictures(reader).of(prompt.token_ids, prompt.media) as told:
        (video,) = [one for one in told if one["kind"] == "video"]
    start, token = video["start"], reader.token_ids["video"]
    marked = [start + place for place, is_patch in enumerate(video["places"]) if is_patch]
    assert marked == [place for place, one in enumerate(prompt.token_ids) if one == token]
    assert 0 in video["places"]


def test_vllm_is_told_how_large_media_are(folder: Path, reader: Reader) -> None:
    """64 x 64 pixels are 8 x 8 tokens."""
    settings = Settings(
        model=str(folder), dtype="float32", device="cpu", max_tokens=64, max_running=8, num_threads=1,
        shares_device=True, log=Path("log"), reader=reader, architecture="Some",
    )  # fmt: skip
    told = json.loads(settings.env()["STROP_PICTURES"])
    assert told == {"architecture": "Some", "most_tokens": {"image": 64, "video": None}}
    assert settings.engine_args(VllmConfig())["mm_processor_cache_gb"] == 0


def test_a_probe_has_no_token_of_an_image() -> None:
    usual = probe_tokens(107)
    never = {usual[3], usual[9]}
    chosen = probe_tokens(107, never=never)
    assert len(chosen) == len(usual)
    assert not never & set(chosen)
    assert chosen[:3] == usual[:3]


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_engines_that_are_given_images(engine: str, folder: Path) -> None:
    rollout = RolloutConfig(engine=engine)
    check_engine(rollout, ModelConfig(path=str(folder)))
    assert rollout.own_processes is None or rollout.own_processes.takes_media


def test_an_engine_that_is_given_none(folder: Path) -> None:
    with pytest.raises(
        ValueError, match="which rollout.engine=sglang is not given: use rollout.engine=native"
    ):
        check_engine(RolloutConfig(engine="sglang"), ModelConfig(path=str(folder)))


def test_vllm_is_not_given_images_of_models_that_cut_them_into_tiles(tmp_path: Path) -> None:
    model = ModelConfig(path=str(save_tiny_tiles("gemma3", tmp_path / "model")))
    check_engine(RolloutConfig(), model)
    with pytest.raises(ValueError, match="is not given for gemma3: use rollout.engine=native"):
        check_engine(RolloutConfig(engine="vllm"), model)
