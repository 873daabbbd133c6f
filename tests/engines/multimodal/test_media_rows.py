"""Rows with images and videos: found, counted, put into prompts, never cut."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from references.tiny_vision import (
    BLUE,
    GREEN,
    IMAGE,
    RED,
    VIDEO,
    picture,
    png,
    save_tiny_vision,
)
from strop.data.chat import shown_text
from strop.data.config import DataConfig
from strop.data.file_check import examine, overlap
from strop.data.prepare import prepare_rows, write_rows
from strop.data.prompts import PromptDataset
from strop.data.readers import read_rows
from strop.engines.config import ModelConfig
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.patch_grids import fitted_size
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Prompt

WIDE = picture(24, 17, RED, BLUE)  # 16 x 24 pixels when resized: 2 x 3 tokens
SHOWN = "<|user|>a<|vision_start|><image 24x17: 6 tokens><|vision_end|>b<|im_end|><|assistant|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = load_tokenizer(ModelConfig(path=str(folder)))
    return found


def row(content: Any = "a<image>b", **columns: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": "exact",
        "answer": "x",
        **columns,
    }


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"ground_truth_key": "answer", **changes})


def prompt_of(tokenizer: PreTrainedTokenizerBase, source: dict[str, Any], **changes: Any) -> Prompt:
    dataset = PromptDataset([source], tokenizer, config(**changes), "train")
    return dataset.prompt(0, "e0-000000")


def text_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    return shown_text(tokenizer, prompt.token_ids, prompt.media)


@pytest.mark.parametrize(
    "form", ["bytes", "dict", "path", "path in dict", "file address", "data address", "pillow", "image key"]
)
def test_an_image_may_be_given_in_every_form_of_verl(
    form: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(WIDE))
    path = str(tmp_path / "a.png")
    given: Any = {
        "bytes": png(WIDE),
        "dict": {"bytes": png(WIDE), "path": None},
        "path": path,
        "path in dict": {"bytes": None, "path": path},
        "file address": f"file://{path}",
        "data address": f"data:image/png;base64,{base64.b64encode(png(WIDE)).decode()}",
        "pillow": WIDE,
        "image key": {"image": path},
    }[form]
    prompt = prompt_of(tokenizer, row(images=[given]))
    assert text_of(tokenizer, prompt) == SHOWN
    assert [(one.kind, one.size, one.grid, one.num_tokens) for one in prompt.media] == [
        ("image", (24, 17), (1, 4, 6), 6)
    ]
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    start, end = prompt.media[0].span
    assert set(prompt.token_ids[start:end]) == {image_id}
    assert prompt.token_ids.count(image_id) == 6


@pytest.mark.parametrize("is_in_part", [False, True])
def test_a_part_may_have_keys_beside_its_image(tokenizer: PreTrainedTokenizerBase, is_in_part: bool) -> None:
    """As in llava-instruct-mix-vsft, whose parts have the number of their image in a column of files."""
    file = {"bytes": png(WIDE), "path": None}
    content = [
        {"type": "text", "text": "a", "index": None},
        {"type": "image", "text": None, "index": 0, "image": file if is_in_part else None},
        {"type": "text", "text": "b", "index": None},
    ]
    columns = {} if is_in_part else {"images": [file]}
    assert text_of(tokenizer, prompt_of(tokenizer, row(content, **columns))) == SHOWN


@pytest.mark.parametrize("columns", [{"images": None}, {"image": "a.png"}])
def test_a_word_like_a_placeholder_of_a_kind_without_column_is_text(
    tokenizer: PreTrainedTokenizerBase, columns: dict[str, Any]
) -> None:
    prompt = prompt_of(tokenizer, row("the tag <video>", **columns))
    assert "the tag <video>" in text_of(tokenizer, prompt)


def test_columns_of_media_may_have_other_names(tokenizer: PreTrainedTokenizerBase) -> None:
    source = row(picture_of=[WIDE], images=["not read"])
    prompt = prompt_of(tokenizer, source, image_key="picture_of")
    assert text_of(tokenizer, prompt) == SHOWN
    assert prompt.columns == {"answer": "x", "images": ["not read"]}
    with pytest.raises(
        ValueError, match=r"data\.image_key is 'pictures', but no train row has such a column"
    ):
        prompt_of(tokenizer, row("a", images=[WIDE]), image_key="pictures")
    with pytest.raises(ValueError, match="but 1 images in column 'picture_of'"):
        prompt_of(tokenizer, row("a", picture_of=[WIDE]), image_key="picture_of")
    with pytest.raises(ValueError, match=r"data\.image_key and data\.video_key are both 'videos'"):
        config(image_key="videos")


def test_bytes_of_the_row_are_not_copied(tokenizer: PreTrainedTokenizerBase) -> None:
    contents = png(WIDE)
    prompt = prompt_of(tokenizer, row(images=[{"bytes": contents}]))
    assert prompt.media[0].parts[0] is contents
    assert prompt.columns == {"answer": "x"}
    assert "PNG" not in repr(prompt)


def test_placeholders_and_images_are_paired_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    source = row("<image>x", images=[WIDE, picture(40, 33, GREEN)])
    source["prompt"].append({"role": "assistant", "content": "seen"})
    source["prompt"].append({"role": "user", "content": "and <image>?"})
    text = text_of(tokenizer, prompt_of(tokenizer, source))
    assert text == (
        "<|user|><|vision_start|><image 24x17: 6 tokens><|vision_end|>x<|im_end|><|assistant|>seen<|im_end|>"
        "<|user|>and <|vision_start|><image 40x33: 20 tokens><|vision_end|>?<|im_end|><|assistant|>"
    )


def test_parts_of_a_message_may_hold_their_image_or_take_the_next(tokenizer: PreTrainedTokenizerBase) -> None:
    own = [
        {"type": "image", "image": png(picture(40, 33, GREEN))},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    prompt = prompt_of(tokenizer, row(own, images=[WIDE]))
    assert [one.size for one in prompt.media] == [(40, 33), (24, 17)]
    assert prompt.messages[0]["content"] == [
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]


def test_messages_stay_as_they_stand_in_the_row(tokenizer: PreTrainedTokenizerBase) -> None:
    assert prompt_of(tokenizer, row(images=[WIDE])).messages == ({"role": "user", "content": "a<image>b"},)


def test_the_word_image_is_text_in_rows_without_a_column_of_media(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = prompt_of(tokenizer, row("a<image>b"))
    assert text_of(tokenizer, prompt) == "<|user|>a<image>b<|im_end|><|assistant|>"
    assert prompt.media == ()


def test_frames_of_a_video_are_joined_in_twos(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    frames = [picture(24, 17, color) for color in (RED, GREEN, BLUE)]
    prompt = prompt_of(tokenizer, row("<video>!", videos=[[png(frame) for frame in frames]]))
    assert text_of(tokenizer, prompt) == (
        "<|user|><|vision_start|><video 24x17: 12 tokens><|vision_end|>!<|im_end|><|assistant|>"
    )
    assert prompt.media[0].grid == (2, 4, 6)  # the third frame stands alone, so it is repeated
    assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids(VIDEO)) == 12
    processor = load_media_processor(folder)
    assert processor is not None
    patches = processor.pixels(prompt.media[0]).view(2, 24, 3, 2, 16)  # time, place, channel, frame, pixels
    still = [
        Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[frame], return_tensors="np")["pixel_values"]
        for frame in frames
    ]
    for time, frame, which in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        expected = still[which].reshape(24, 3, 2, 16)[:, :, 0]
        np.testing.assert_allclose(patches[time, :, :, frame].numpy(), expected, rtol=0, atol=2e-7)


def test_an_animated_picture_is_a_video(tokenizer: PreTrainedTokenizerBase) -> None:
    file = io.BytesIO()
    first, *rest = [picture(24, 17, color) for color in (RED, GREEN, BLUE, RED)]
    first.save(file, format="GIF", save_all=True, append_images=rest)
    prompt = prompt_of(tokenizer, row("<video>", videos=[file.getvalue()]))
    assert prompt.media[0].grid == (2, 4, 6)


def test_pixels_are_made_once_and_equal_those_of_the_processor(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    processor = load_media_processor(folder)
    assert processor is not None
    prompt = prompt_of(tokenizer, row(images=[picture(31, 44, GREEN, RED, BLUE)]))
    made = processor.num_made
    first, second = processor.pixels(prompt.media[0]), processor.pixels(prompt.media[0])
    assert first is second
    assert processor.num_made == made + 1
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[picture(31, 44, GREEN, RED, BLUE)], return_tensors="np"
    )
    np.testing.assert_array_equal(first.numpy(), expected["pixel_values"])
    assert [prompt.media[0].grid] == [tuple(grid) for grid in expected["image_grid_thw"]]


def test_a_photo_taken_on_the_side_is_turned_before_it_is_counted(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to view
    file = io.BytesIO()
    picture(24, 17, RED, BLUE).save(file, format="JPEG", exif=exif)
    media = prompt_of(tokenizer, row(images=[file.getvalue()])).media[0]
    assert media.size == (17, 24)
    processor = load_media_processor(folder)
    assert processor is not None
    assert len(processor.pixels(media)) == 24  # or it would say that the sizes differ


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    merge=st.sampled_from([1, 2]),
    bounds=st.tuples(st.integers(1, 400_000), st.integers(1, 400_000)).map(sorted),
)
@settings(max_examples=60, deadline=None)
def test_fitted_sizes_are_those_of_the_processor(
    height: int, width: int, merge: int, bounds: list[int]
) -> None:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": bounds[0], "longest_edge": bounds[1]}, patch_size=14, merge_size=merge
    )
    factor = 14 * merge
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="is more than 200 times the other"):
            fitted_size(height, width, factor=factor, min_pixels=bounds[0], max_pixels=bounds[1])
        return
    high, wide = fitted_size(height, width, factor=factor, min_pixels=bounds[0], max_pixels=bounds[1])
    assert high * wide // 14**2 == processor.get_number_of_image_patches(height, width)
    assert (high % factor, wide % factor) == (0, 0)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            row("a", images=[WIDE]),
            "has 0 placeholders <image> in its messages, but 1 images in column 'images'",
        ),
        (row("<image><image>", images=[WIDE]), "has 2 placeholders <image> in its messages, but 1 images"),
        (row("<image>", images=[]), "has 1 placeholders <image> in its messages, but 0 images"),
        (row("<video>", images=[], videos=None), "has 1 placeholders <video> in its messages, but 0 videos"),
        (
            row(audios=["a.wav"], images=[WIDE]),
            "train row 0 has sound in column 'audios', which",
        ),
        (row(images=["https://a.b/c.png"]), "by the address 'https://a.b/c.png', which is not fetched"),
        (row(images=["no-such.png"]), "train row 0: the file 'no-such.png' does not exist"),
        (row(images=[b"text"]), "train row 0: an image of 4 bytes cannot be read as a picture"),
        (row(images=[7]), "has a image of type int; give a path, encoded bytes"),
        (row(images=WIDE), "column 'images' holds a Image; it must be a list of images"),
        (row(images=[picture(4, 900, RED)]), "one side of 4x900 is more than 200 times the other"),
        (row("<video>", videos=[[]]), "has a video without frames"),
        (row("<video>", videos=[[WIDE, picture(40, 33, RED)]]), "frames of a video have different sizes"),
        (row("<image>", images=[None]), "column 'images' has null among its images; remove the row, or give"),
        (row("<image>", images=None), "has 1 placeholders <image> in its messages, but 0 images"),
        (
            row(image=WIDE),
            "a placeholder in its messages and a column 'image', which is not read: rename it to 'ima",
        ),
        (
            row([{"type": "image_url"}], images=[WIDE]),
            r"message 1 in a form that is not read \(type 'image_url'\)",
        ),
        (
            row([{"image": WIDE}]),
            r"a form that is not read \('image' without a type\): write \{\"type\": \"image\"",
        ),
        (
            row(images=[{"image": WIDE, "max_pixels": 64}]),
            "an image with max_pixels: the size of images is set for",
        ),
        (
            row([{"type": "image", "image": WIDE, "resized_height": 8}]),
            "has an image with resized_height: the size",
        ),
        (row(images=["data:image/png;base64,?"]), "has a image whose base64 cannot be decoded"),
        (
            row(images=["iVBORw0K" * 99]),
            "the file 'iVBORw0K.{150,200}…' cannot be read as a picture .File name too",
        ),
        (row(f"<image>{IMAGE}", images=[WIDE]), "makes 2 images of 1 images; use a template for images"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(
    source: dict[str, Any], match: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=match):
        prompt_of(tokenizer, source)


def test_videos_of_a_model_that_is_given_none_here_are_refused(tmp_path: Path) -> None:
    other = load_tokenizer(ModelConfig(path=str(save_tiny_vision("glm4v", tmp_path / "model"))))
    with pytest.raises(ValueError, match="train row 0 has videos, which this model is not given here"):
        prompt_of(other, row("<video>", videos=[[WIDE]]))
    assert prompt_of(other, row(images=[WIDE])).media[0].num_tokens == 6


def test_rows_with_images_need_a_model_that_sees(tiny_model: Path) -> None:
    plain = load_tokenizer(ModelConfig(path=str(tiny_model)))
    with pytest.raises(
        ValueError, match="train row 0 has images or videos, but the model .* takes text alone"
    ):
        prompt_of(plain, row(images=[WIDE]))


def test_lengths_count_all_tokens_of_an_image(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [row(images=[picture(40, 33, RED)]), row("a")]  # 20 tokens and 7 around them; 4
    dataset = PromptDataset(rows, tokenizer, config(max_prompt_tokens=26), "train")
    assert dataset.row_numbers == (1,)
    assert len(prompt_of(tokenizer, rows[0], max_prompt_tokens=27).token_ids) == 27


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "<|vision_start|><image 24x17: 6 tokens><|vision_end|>defg<|im_end|><|assistant|>"),
        ("right", "<|user|>abc<|vision_start|><image 24x17: 6 tokens><|vision_end|>de"),
        ("middle", "<|user|>ab<|vision_start|><image 24x17: 6 tokens><|vision_end|>g<|im_end|><|assistant|>"),
    ],
)
def test_text_is_cut_around_an_image(side: str, expected: str, tokenizer: PreTrainedTokenizerBase) -> None:
    # 18 tokens: 4 before the image, 8 of it with its two borders, 6 after it. Four of the ten of text go.
    source = row("abc<image>defg", images=[WIDE])
    prompt = prompt_of(
        tokenizer, source, max_prompt_tokens=14, filter_overlong_prompts=False, truncation=side
    )
    assert text_of(tokenizer, prompt) == expected
    assert prompt.media[0].span == (prompt.token_ids.index(105), prompt.token_ids.index(105) + 6)


def test_an_image_longer_than_the_limit_is_never_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    limits = {"max_prompt_tokens": 7, "filter_overlong_prompts": False, "truncation": "left"}
    with pytest.raises(
        ValueError, match="train row 0: the media of the prompt take 8 tokens, over the limit of 7"
    ):
        prompt_of(tokenizer, row(images=[WIDE]), **limits)


def test_geo3k_goes_from_raw_rows_to_prompts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    raw = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": png(WIDE), "path": None}]}
    write_rows(tmp_path / "train.parquet", prepare_rows("geo3k", [raw], split="train").rows)
    rows = read_rows([tmp_path / "train.parquet"])
    dataset = PromptDataset(rows, tokenizer, DataConfig(), "train")
    prompt = dataset.prompt(0, "e0-000000")
    assert text_of(tokenizer, prompt).startswith(
        "<|user|><|vision_start|><image 24x17: 6 tokens><|vision_end|>Find x."
    )
    assert (prompt.data_source, prompt.ground_truth) == ("hiyouga/geometry3k", "3")


def test_a_check_of_data_shows_images_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    other = picture(24, 17, GREEN)
    rows = [
        row(images=[png(WIDE)]),
        row(images=[png(other)]),
        row(images=[png(WIDE)]),
        row("a", images=[png(WIDE)]),
    ]
    report = examine(rows, tokenizer, config())
    assert report.shown[0].text == SHOWN
    assert report.lengths == {0: 13, 1: 13, 2: 13}
    assert report.repeats == {2: 0}, "the same words about another image are another prompt"
    assert report.num_malformed == 1
    assert overlap(rows[:1], rows[1:3], config()) == {1: 0}
