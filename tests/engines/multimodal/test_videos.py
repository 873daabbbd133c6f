"""Videos in files: when their frames are shown, which are taken, and what a model is given, as transformers has it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.video_utils import load_video

from references.tiny_vision import BLUE, GREEN, MERGE, PATCH, RED, TEMPLATE, picture, png, save_tiny_vision
from references.videos import EVEN, UNEVEN, write_video
from strop.data.chat import shown_text
from strop.data.config import DataConfig
from strop.data.file_check import examine
from strop.data.prompts import PromptDataset
from strop.engines.config import ModelConfig
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.inputs import media_inputs
from strop.engines.multimodal.video_reader import read_film, read_frames
from strop.engines.multimodal.video_settings import Sampling
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Prompt

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CODECS = {"mpeg4.mp4": "mpeg4", "h264.mp4": "libx264", "vp9.webm": "libvpx-vp9", "mpeg4.mkv": "mpeg4"}
VIDEO_ID = 106
RULES = DataConfig(ground_truth_key="answer")
SETTINGS = {
    "settings": {
        "do_sample_frames": True, "fps": 3, "min_frames": 2, "max_frames": 5, "resample": 2,
        "size": {"shortest_edge": 2048, "longest_edge": 8192},
        "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 0.5, 0.2],
    },
    "capped": {
        "cap_pixels_per_frame": True, "max_video_tokens": 12, "size": {"shortest_edge": 256, "longest_edge": 8192},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("videos")

    def get(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else save_tiny_vision(kind, path)

    return get


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_video(tmp_path_factory.mktemp("even") / "film.mp4", EVEN))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_video(tmp_path_factory.mktemp("uneven") / "film.mp4", UNEVEN))


def row(video: Any, content: Any = "Look:<video>?") -> dict[str, Any]:
    columns = {} if video is None else {"videos": [video]}
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": "exact",
        "answer": "x",
        **columns,
    }


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = load_tokenizer(ModelConfig(path=str(path)))
    return found


def prompt_of(path: Path, video: Any, content: Any = "Look:<video>?") -> Prompt:
    return PromptDataset([row(video, content)], tokenizer_of(path), RULES, "train").prompt(0, "e0-000000")


def positions_of(path: Path, prompt: Prompt) -> Tensor:
    module = AutoModelForImageTextToText.from_pretrained(path)
    inputs = media_inputs(module, str(path))
    assert inputs is not None
    inputs.check(prompt.token_ids, prompt.media, "it")
    return inputs.positions(torch.tensor(prompt.token_ids), prompt.media)


@pytest.mark.parametrize("name", CODECS)
def test_times_are_those_that_the_file_says(name: str, tmp_path: Path) -> None:
    for stamps in (EVEN, UNEVEN):
        film = read_film(str(write_video(tmp_path / name, stamps, codec=CODECS[name])))
        assert film.times == pytest.approx([stamp / 1000 for stamp in stamps], abs=1e-9)
        assert film.size == (48, 32)
        assert film.fps == pytest.approx(len(stamps) / (stamps[-1] / 1000 + 0.1), rel=1e-12)


def test_an_animated_picture_has_the_times_of_its_frames() -> None:
    file = io.BytesIO()
    first, *rest = [picture(24, 17, color) for color in (RED, GREEN, BLUE, RED)]
    first.save(file, format="GIF", save_all=True, append_images=rest, duration=[100, 500, 200, 200])
    film = read_film(file.getvalue())
    assert film.times == pytest.approx([0.0, 0.1, 0.6, 0.8])
    assert film.fps == pytest.approx(4.0)
    assert read_frames(file.getvalue(), [1, 0])[:, :, 0, 0].tolist() == pytest.approx(
        torch.tensor([GREEN, RED]), abs=4
    )


@pytest.mark.parametrize("name", ["mpeg4.mp4", "h264.mp4"])
def test_frames_are_those_that_transformers_decodes(name: str, tmp_path: Path) -> None:
    path = str(write_video(tmp_path / name, UNEVEN, codec=CODECS[name]))
    chosen = [0, 2, 3, 8]
    expected, _ = load_video(path, backend="pyav", sample_indices_fn=lambda metadata, **_: chosen)
    for file in (path, Path(path).read_bytes()):
        assert torch.equal(read_frames(file, chosen), torch.tensor(expected).permute(0, 3, 1, 2))


def test_a_video_that_was_taken_on_the_side_is_turned(tmp_path: Path) -> None:
    plain = write_video(tmp_path / "film.mp4", EVEN)
    content = bytearray(plain.read_bytes())
    matrix = content.index(b"tkhd") + 44  # version 0: 4 + 4 + 32 bytes before it, and 4 of the name
    turned = [0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30]  # a quarter clockwise
    content[matrix : matrix + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in turned)
    assert read_film(bytes(content)).size == (32, 48)
    expected = read_frames(str(plain), [3]).rot90(-1, (2, 3))
    assert torch.equal(read_frames(bytes(content), [3]), expected)


@pytest.mark.parametrize(
    ("kind", "asked", "frames"),
    [
        ("qwen2_vl", {}, list(range(12))),  # 1.2 s at 10 frames a second
        ("qwen2_vl", {"fps": 5}, [0, 2, 4, 6, 8, 10]),
        ("qwen2_5_vl", {"fps": 2}, [0, 3, 6, 9]),  # 2.4, but at least 4
        ("qwen2_5_vl", {"fps": 2, "min_frames": 2}, [0, 6]),
        ("qwen2_5_vl", {"fps": 10, "max_frames": 7}, [0, 2, 4, 6, 8, 10]),
        ("qwen2_5_vl", {"nframes": 3}, [0, 3, 6, 9]),  # whole pairs, rounded to even
        ("qwen3_vl", {}, [0, 4, 7, 11]),
        ("qwen3_vl", {"fps": 5}, [0, 2, 4, 7, 9, 11]),
        ("qwen3_vl", {"nframes": 3}, [0, 6, 11]),
    ],
)
def test_frames_of_a_file_are_chosen_as_the_model_reads_videos(
    kind: str, asked: dict[str, Any], frames: list[int], folder: Callable[[str], Path], even: str
) -> None:
    media = prompt_of(folder(kind), {"video": even, **asked}).media[0]
    assert list(media.frames) == frames
    assert media.times == pytest.approx([number / 10 for number in frames])
    assert media.grid == (-(-len(frames) // 2), *media.grid[1:])


def test_a_part_of_a_message_may_say_which_frames(folder: Callable[[str], Path], even: str) -> None:
    path = folder("qwen2_vl")
    whole = prompt_of(path, None, [{"type": "video", "video": even, "fps": 5}, {"type": "text", "text": "?"}])
    placed = prompt_of(path, even, [{"type": "video", "fps": 5}, {"type": "text", "text": "?"}])
    assert whole.media[0].frames == placed.media[0].frames == (0, 2, 4, 6, 8, 10)


def test_more_frames_than_the_processors_of_the_models_take_are_refused(
    folder: Callable[[str], Path],
) -> None:
    processor = load_media_processor(folder("qwen2_vl"))
    assert processor is not None
    assert processor.video is not None
    assert len(processor.video.frames(768, 30.0, Sampling())) == 768
    assert len(processor.video.frames(9000, 30.0, Sampling(fps=2))) == 600
    with pytest.raises(
        ValueError, match="a video has 770 frames, over the limit of 768; say which in the row"
    ):
        processor.video.frames(770, 30.0, Sampling())


def test_text_between_the_frames_of_qwen3_says_when_they_are_shown(
    folder: Callable[[str], Path], even: str
) -> None:
    path = folder("qwen3_vl")
    prompt = prompt_of(path, even)
    text = tokenizer_of(path).decode(prompt.token_ids, skip_special_tokens=False)
    per_patch = prompt.token_ids.count(VIDEO_ID) // 2
    pads = "<|video_pad|>" * per_patch
    assert text == (
        "<|user|>Look:<|vision_start|>"
        f"<0.2 seconds><|vision_start|>{pads}<|vision_end|>"  # frames 0 and 4
        f"<0.9 seconds><|vision_start|>{pads}<|vision_end|>"  # frames 7 and 11
        "<|vision_end|>?<|im_end|><|assistant|>"
    )
    start, end = prompt.media[0].span
    assert tokenizer_of(path).decode(prompt.token_ids[start:end]).startswith("<0.2 seconds>")
    assert prompt.token_ids[end] == prompt.token_ids[end - 1]
    shown = shown_text(tokenizer_of(path), prompt.token_ids, prompt.media)
    assert f"<video 48x32: {end - start} tokens, 4 frames from 0.0 to 1.1 s>" in shown


def test_positions_of_qwen2_5_count_seconds(folder: Callable[[str], Path], even: str, uneven: str) -> None:
    path = folder("qwen2_5_vl")  # 2 positions a second
    for video, seconds in (({"video": even, "fps": 2}, 0.6), (uneven, 2 * 2.6 / 9)):
        prompt = prompt_of(path, video)
        assert prompt.media[0].seconds_per_patch == pytest.approx(seconds)
        start, end = prompt.media[0].span
        times = positions_of(path, prompt)[0, start:end] - start
        per_patch = (end - start) // prompt.media[0].grid[0]
        assert times[::per_patch].tolist() == [
            int(step * 2 * seconds) for step in range(prompt.media[0].grid[0])
        ]


def test_a_video_given_as_frames_has_the_rate_that_the_row_says(folder: Callable[[str], Path]) -> None:
    frames = [png(picture(24, 17, color)) for color in (RED, GREEN, BLUE, RED)]
    path = folder("qwen2_5_vl")
    assert prompt_of(path, frames).media[0].seconds_per_patch == 1.0
    assert prompt_of(path, {"video": frames, "sample_fps": 0.5}).media[0].seconds_per_patch == 4.0
    text = tokenizer_of(folder("qwen3_vl")).decode(
        prompt_of(folder("qwen3_vl"), {"video": frames, "fps": 0.5}).token_ids
    )
    assert "<1.0 seconds>" in text  # frames at 0 and 2 s
    assert "<5.0 seconds>" in text


@pytest.mark.parametrize(
    ("video", "sentence"),
    [
        ("no-such.mp4", "train row 0: the file 'no-such.mp4' does not exist; paths in rows start at"),
        (b"no video at all", "train row 0: a video of 15 bytes cannot be decoded as a video (Invalid data"),
        ("https://a.b/c.mp4", "by the address 'https://a.b/c.mp4', which is not fetched"),
        (
            {"video": "x.mp4", "max_pixels": 9, "fps": 1},
            "has a video with max_pixels; a row may say fps, nframes",
        ),
        ({"video": "x.mp4", "fps": 2, "nframes": 4}, "fps and nframes are both given; give one of them"),
        ({"video": "x.mp4", "fps": 0}, "has a video whose fps is 0; it must be above 0"),
        ({"video": "x.mp4", "nframes": 2.5}, "has a video whose nframes is 2.5; give a whole number"),
        ({"video": [b""], "nframes": 2}, "has a video with nframes; a row may say sample_fps, fps"),
        ({"fps": 2}, "has a video of type NoneType; give a path, encoded bytes"),
    ],
)
def test_what_is_wrong_with_a_video_is_said(video: Any, sentence: str, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError) as caught:
        prompt_of(folder("qwen2_vl"), video)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_frames": 4}, "min_frames and max_frames bound what fps gives; give fps too"),
        ({"nframes": 40}, "40 of the 12 frames of a video would be taken"),
        ({"nframes": 1}, "0 of the 12 frames of a video would be taken; they are taken in groups of 2"),
    ],
)
def test_frames_that_a_file_does_not_have_are_refused(
    asked: dict[str, Any], sentence: str, folder: Callable[[str], Path], even: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        prompt_of(folder("qwen2_vl"), {"video": even, **asked})


def test_a_list_of_other_files_is_no_video(even: str, tmp_path: Path) -> None:
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:10", "#EXTINF:10,", even, "#EXT-X-ENDLIST", ""]
    playlist = tmp_path / "film.m3u8"
    playlist.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"film.m3u8' cannot be decoded as a video \(Invalid argument\)"):
        read_film(str(playlist))


def spoiled(content: bytes) -> bytes:
    """An MP4 file with zeros behind its first frame, which alone is decoded when a file is opened."""
    data = content.index(b"mdat")
    start = content.index(b"\x65", data) + 1500
    return content[:start] + bytes(3000) + content[start + 3000 :]


def test_a_check_of_data_names_the_rows_whose_videos_cannot_be_decoded(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def film(name: str, codec: str, change: Callable[[bytes], bytes]) -> str:
        path = write_video(tmp_path / name, EVEN, codec=codec, size=(320, 240))
        path.write_bytes(change(path.read_bytes()))
        return str(path)

    films = [
        film("good.mkv", "mpeg4", lambda content: content),
        film("cut.mkv", "mpeg4", lambda content: content[: len(content) * 2 // 3]),
        film("cut.mp4", "mpeg4", lambda content: content[: len(content) * 2 // 3]),
        film("spoiled.mp4", "libx264", spoiled),
        film("spoiled.mkv", "mpeg4", lambda content: content[:5900] + bytes(40) + content[5940:]),
    ]
    rows = [row({"video": film, "nframes": 4}) for film in films]
    report = examine(rows, tokenizer_of(folder("qwen2_vl")), RULES)
    for number, sentence in enumerate(
        ("is cut off or damaged", "cannot be decoded", "cannot be decoded", "is damaged")
    ):
        assert report.malformed[number].startswith(f"row {number + 1}: the file ")
        assert sentence in report.malformed[number]
    assert report.num_malformed == 4


def test_uneven_distances_are_told_to_the_person(
    folder: Callable[[str], Path], even: str, uneven: str
) -> None:
    report = examine([row(even), row(uneven)], tokenizer_of(folder("qwen3_vl")), RULES)
    # Frames 0, 2, 4, 6 and 8 of 9 in 2.6 s are taken.
    (note,) = report.notes
    assert note.startswith(
        "row 1: frames of a video are shown at uneven distances: frame 2 at 0.20 s, and by its number "
    )
    assert f"at {2 * 2.6 / 9:.2f} s" in note


def test_all_videos_of_a_dataset_are_decoded_when_asked(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = write_video(tmp_path / "film.mp4", EVEN, codec="libx264", size=(320, 240)).read_bytes()
    rows = [row(whole), row(spoiled(whole))]
    dataset = PromptDataset(rows, tokenizer_of(folder("qwen3_vl")), RULES, "train")
    with pytest.raises(ValueError, match="train row 1: a video of .* cannot be decoded"):
        dataset.read_media()


def test_the_same_content_is_the_same_video_wherever_it_lies(
    folder: Callable[[str], Path], even: str, uneven: str, tmp_path: Path
) -> None:
    copied = tmp_path / "other.mp4"
    shutil.copyfile(even, copied)
    path = folder("qwen2_vl")
    keys = [prompt_of(path, video).media[0].key for video in (even, str(copied), Path(even).read_bytes())]
    assert len(set(keys)) == 1
    media = prompt_of(path, str(copied)).media[0]
    assert prompt_of(path, {"video": even, "fps": 5}).media[0].key != media.key
    shutil.copyfile(uneven, copied)
    processor = load_media_processor(path)
    assert processor is not None
    processor._kept.clear()
    with pytest.raises(ValueError, match="other.mp4' has changed since its tokens were counted"):
        processor.pixels(media)


def test_without_pyav_one_sentence_says_what_to_install(
    folder: Callable[[str], Path], even: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        ValueError, match=r"train row 0: .* needs PyAV; install it with: pip install 'strop\[video\]'"
    ):
        prompt_of(folder("qwen2_vl"), Path(even).read_bytes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["even", "uneven", "h264", "odd", "settings", "capped"])
def test_all_that_the_processor_of_transformers_gives(
    kind: str, name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("torchvision", reason="the video processors of transformers need torchvision")
    stamps = {"uneven": UNEVEN, "odd": EVEN[:5]}.get(name, EVEN)
    codec, size = ("libx264" if name == "h264" else "mpeg4"), ((62, 38) if name == "odd" else (48, 32))
    film = str(write_video(tmp_path / "film.mp4", stamps, codec=codec, size=size))
    path = folder(kind)
    if name in SETTINGS:
        path = Path(shutil.copytree(path, tmp_path / "model"))
        settings = {"patch_size": PATCH, "merge_size": MERGE, **SETTINGS[name]}
        (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    for options in ({}, {"fps": 4}):
        prompt = prompt_of(path, {"video": film, **options})
        expected = processed(kind, path, film, options)
        assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
        assert [list(prompt.media[0].grid)] == expected["video_grid_thw"].tolist()
        processor = load_media_processor(path)
        assert processor is not None
        assert torch.equal(processor.pixels(prompt.media[0]), expected["pixel_values_videos"])
        module: Any = AutoModelForImageTextToText.from_pretrained(path)
        names = ("input_ids", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
        positions, _ = module.base_model.get_rope_index(**{n: expected[n] for n in names if n in expected})
        assert torch.equal(positions_of(path, prompt), positions[:, 0])


def processed(kind: str, path: Path, film: str, options: dict[str, Any]) -> Any:
    """A prompt with a video through the processor of transformers, decoded by transformers."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    classes: Any = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }
    whole, of_videos = classes[kind]
    videos = of_videos.from_pretrained(path)
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(path)
    processor = whole(images, tokenizer_of(path), videos, chat_template=TEMPLATE)

    def choose(metadata: Any, **_: Any) -> Any:
        if options or videos.do_sample_frames:
            return videos.sample_frames(metadata, **options)
        return list(range(metadata.total_num_frames))

    frames, metadata = load_video(film, backend="pyav", sample_indices_fn=choose)
    parts = [{"type": "text", "text": "Look:"}, {"type": "video"}, {"type": "text", "text": "?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    return processor(
        text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
