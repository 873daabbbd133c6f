"""Models with images whose positions are those of text, against their own forward pass on one sequence at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from rollout_cases import answers
from torch import Tensor
from transformers import AutoModelForImageTextToText

from references.tiny_tiles import (
    EVERY_RUN,
    ONE_AXIS,
    PER_TILE,
    TILED,
    TOKENS,
    WRITTEN,
    image_text,
    part_text,
    plain_arguments,
    save_tiny_tiles,
)
from references.tiny_vision import BLUE, GREEN, RED, picture, png
from references.token_passes import log_probs_of, of_log_probs
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.multimodal import families
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.llama4_canvas import CanvasProcessor
from strop.engines.multimodal.placeholders import ToolImages
from strop.engines.packing import make_rows, token_rows
from strop.engines.segments import Segment
from strop.engines.tokenizer import load_tokenizer
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.protocol.trajectory import Media, MediaTokens, Prompt
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

WIDE, HIGH, GREENS = picture(40, 17, RED, BLUE), picture(17, 33, GREEN, RED), picture(40, 17, GREEN)
TOWER = ("vision_tower", "vision_model", "multi_modal_projector", "mm_projector")
CONTENTS: list[tuple[str, list[Any]]] = [
    ("a<image>b", [WIDE]),
    ("a<image>b", [GREENS]),
    ("<image>x<image>", [HIGH, picture(8, 8, BLUE)]),
    ("plain", []),
]
"""An image, the same tokens with another image, two images, and text."""
GRIDS = {"gemma3": (1, 1, 1), "internvl": (1, 1, 2), "llama4": (1, 1, 3), "kimi_k25": (1, 4, 8)}
"""Grid of the picture of 40 x 17: InternVL takes the nearest shape, 2 to 1; Llama 4 the canvas of at most 4 tiles on
which it is shrunk least, 3 to 1 (16 of 17 lines, and not 32 of 40 columns); Kimi shrinks 4 x 10 patches to at most
24, by sqrt(0.6), to 30 x 13 pixels, and pads these to 32 x 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("tiles")

    def get(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else save_tiny_tiles(kind, path)

    return get


@pytest.fixture(scope="module")
def loaded(folder: Callable[[str], Path]) -> Callable[[str], CausalLM]:
    models: dict[str, CausalLM] = {}

    def get(kind: str) -> CausalLM:
        if kind not in models:
            models[kind] = load_model(ModelConfig(path=str(folder(kind)), dtype="float32"), device="cpu")
        return models[kind]

    return get


def plain(path: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def prompts_of(path: Path) -> list[Prompt]:
    rows = [
        {
            "prompt": [{"role": "user", "content": text}], "data_source": "exact", "answer": "x",
            "images": [png(one) for one in images],
        }
        for text, images in CONTENTS
    ]  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    dataset = PromptDataset(rows, tokenizer, DataConfig(ground_truth_key="answer"), "train")
    return [dataset.prompt(row, f"e0-{row:06d}") for row in dataset.row_numbers]


def samples(path: Path) -> DataProto:
    """Two samples of the first prompt and one of each other, of different lengths; the last one long."""
    prompts = prompts_of(path)
    prompts = [prompts[0], *prompts]
    lengths = (3, 2, 4, 5, 30)
    responses = [torch.arange(length) * 3 % 80 + 10 for length in lengths]
    return make_rows([torch.tensor(p.token_ids) for p in prompts], responses, [p.media for p in prompts])


def own_log_probs(module: Any, path: Path, rows: DataProto, temperature: float = 1.0) -> Tensor:
    """Log-probs by the model itself, row by row: its attention, no packing."""
    return torch.cat(
        [own_of(module, path, row.prompt, row.response, row.media, temperature) for row in token_rows(rows)]
    )


def own_of(
    module: Any,
    path: Path,
    prompt: Tensor,
    response: Tensor,
    media: Sequence[Media],
    temperature: float = 1.0,
) -> Tensor:
    ids = torch.cat([prompt, response])[None]
    logits = module(input_ids=ids, use_cache=False, **plain_arguments(module, path, ids, media)).logits[0]
    logits = logits.index_fill(1, torch.tensor([module.config.image_token_id]), float("-inf"))
    logits = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logits.gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("kind", ONE_AXIS)
def test_tokens_are_those_that_the_processor_of_transformers_writes(
    kind: str, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    first, other, two, text = prompts_of(path)
    assert first.media[0].grid == GRIDS[kind]
    assert first.token_ids == other.token_ids
    assert not text.media
    wanted = f"<|user|>a{image_text(kind, *GRIDS[kind][1:])}b<|im_end|><|assistant|>"
    assert tokenizer.decode(first.token_ids) == wanted
    assert list(first.token_ids) == tokenizer(wanted, add_special_tokens=False)["input_ids"]
    pictures = [image_text(kind, *one.grid[1:]) for one in two.media]
    assert tokenizer.decode(two.token_ids) == f"<|user|>{pictures[0]}x{pictures[1]}<|im_end|><|assistant|>"
    for prompt in (first, two):
        for one in prompt.media:
            stands = tokenizer.decode(prompt.token_ids[one.start : one.span[1]])
            assert stands == part_text(kind, *one.grid[1:])


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_training_gives_the_log_probs_and_gradients_of_transformers_packed_and_alone(
    kind: str, folder: Callable[[str], Path], loaded: Callable[[str], CausalLM]
) -> None:
    path, model = folder(kind), loaded(kind)
    rows, module = samples(path), plain(path)
    wanted = own_log_probs(module, path, rows)
    weight = torch.cos(torch.arange(len(wanted)))
    (wanted * weight).sum().backward()
    seen = torch.zeros(len(wanted))

    def loss(log_probs: Tensor, entropies: Tensor, index: Tensor) -> Tensor:
        seen[index] = log_probs.detach()
        return (log_probs * weight[index]).sum()

    for budget in (1000, 80):
        model.module.zero_grad()
        engine = TrainEngine(
            model, EngineConfig(max_tokens_per_device=budget), OptimizerConfig(), total_steps=None
        )
        engine.accumulate(rows, of_log_probs(loss, temperature=1.0))
        torch.testing.assert_close(seen, wanted.detach(), atol=2e-5, rtol=2e-5)
        ours = dict(model.named_parameters())
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                assert ours[name].grad is None, name
                continue
            scale = max(float(parameter.grad.abs().max()), 1e-3)
            torch.testing.assert_close(
                ours[name].grad,
                parameter.grad,
                atol=1e-4 * scale,
                rtol=1e-3,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    vision = [
        n for n, p in module.named_parameters() if "vision" in n and p.grad is not None and p.grad.any()
    ]
    assert len(vision) > 10
    model.module.zero_grad()


def asked(prompt: Prompt, **options: Any) -> tuple[Any, Sampling]:
    token_ids: Any = MediaTokens(prompt.token_ids, prompt.media) if prompt.media else prompt.token_ids
    return token_ids, Sampling(**{"key": 0, "temperature": 0.0, "max_tokens": 10, **options})


def greedy(
    module: Any, path: Path, token_ids: Sequence[int], media: Sequence[Media], count: int
) -> list[int]:
    """The model's own `generate`, without tokens of images."""
    ids = torch.tensor([list(token_ids)])
    out = module.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None,
        suppress_tokens=[module.config.image_token_id], **plain_arguments(module, path, ids, media),
    )  # fmt: skip
    return [int(token) for token in out[0, len(token_ids) :]]


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_rollout_answers_greedily_as_generate_and_samples_with_the_log_probs_of_transformers(
    kind: str, folder: Callable[[str], Path], loaded: Callable[[str], CausalLM]
) -> None:
    path, model, module = folder(kind), loaded(kind), plain(folder(kind))
    prompts = prompts_of(path)
    asks = [asked(prompt) for prompt in prompts]
    asks += [asked(p, key=key, temperature=0.8) for p in prompts for key in range(3)]
    outputs = answers(model, asks, max_running=5)
    for prompt, output in zip(prompts, outputs[: len(prompts)], strict=True):
        assert list(output.token_ids) == greedy(module, path, prompt.token_ids, prompt.media, 10), (
            prompt.messages
        )
    assert outputs[0].token_ids != outputs[1].token_ids, "the image decides what is said"
    sampled = outputs[len(prompts) :]
    with torch.no_grad():
        for prompt, output in zip([p for p in prompts for _ in range(3)], sampled, strict=True):
            ids, response = torch.tensor(prompt.token_ids), torch.tensor(output.token_ids)
            wanted = own_of(module, path, ids, response, prompt.media, 0.8)
            torch.testing.assert_close(torch.tensor(output.log_probs), wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_a_later_turn_with_a_new_image_is_computed_as_transformers_does(
    kind: str, folder: Callable[[str], Path], loaded: Callable[[str], CausalLM]
) -> None:
    path, model, module = folder(kind), loaded(kind), plain(folder(kind))
    encoder, tokenizer = _encoder(path), load_tokenizer(ModelConfig(path=str(path)))
    first = prompts_of(path)[0]
    answer = answers(model, [asked(first, max_tokens=3)])[0]
    blank = "\n\n" if kind == "gemma3" else ""
    said = f"<|im_end|><|user|>{blank}{WRITTEN[kind]}{blank}?<|im_end|><|assistant|>"
    reply = encoder.expand(tokenizer(said, add_special_tokens=False)["input_ids"], [encoder.read(png(HIGH))])
    before = [*first.token_ids, *answer.token_ids]
    moved = encoder.place([*before, *reply], [*first.media, *reply.media])
    second = answers(model, [(moved, Sampling(key=0, temperature=0.0, max_tokens=6))])[0]
    assert list(second.token_ids) == greedy(module, path, moved, moved.media, 6)

    response = torch.tensor([*answer.token_ids, *reply, *second.token_ids])
    twin = torch.tensor([*answer.token_ids, 40, 41])  # another sample of the prompt, which they share
    prompt = torch.tensor(first.token_ids)
    rows = make_rows([prompt, prompt], [response, twin], [moved.media, first.media])
    with torch.no_grad():
        wanted = own_log_probs(module, path, rows)
    ours, _ = log_probs_of(model, rows, temperature=1.0)
    start, end = (place - len(prompt) for place in moved.media[1].span)
    kept = [
        place for place in range(len(wanted)) if not start <= place < end
    ]  # those of the image say nothing
    torch.testing.assert_close(ours[kept], wanted[kept], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_images_of_tools_stand_as_those_of_rows_do(kind: str, folder: Callable[[str], Path]) -> None:
    path = folder(kind)
    encoder = _encoder(path)
    two = prompts_of(path)[2]
    images = [encoder.read(png(one)) for one in (HIGH, picture(8, 8, BLUE))]
    assert [one.grid for one in images] == [one.grid for one in two.media]
    assert [one.num_tokens for one in images] == [one.num_tokens for one in two.media]
    again = encoder.place(two.token_ids, images)
    assert [one.start for one in again.media] == [one.start for one in two.media]


def _encoder(path: Path) -> ToolImages:
    processor = load_media_processor(path)
    assert processor is not None
    return ToolImages(processor)


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_a_prompt_of_a_group_is_computed_once_and_equal_tokens_with_other_images_apart(
    kind: str,
    folder: Callable[[str], Path],
    loaded: Callable[[str], CausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strop.rollout.native.prefill.PREFILL_TOKENS", 6)  # shorter than an image
    path, batch = folder(kind), DecodeBatch(loaded(kind), max_running=8)
    one, other, *_ = prompts_of(path)
    requests = [
        Request(f"{p.uid}/{number}", p.token_ids, Sampling(key=number, max_tokens=2), p.media)
        for number in range(3)
        for p in (one, other)
    ]
    batch.waiting.extend(requests)
    for _ in range(4):
        batch.step(0)
    assert batch.prefill.num_computed == 2 * len(one.token_ids)
    assert all(request.stop_reason == "length" for request in requests)
    alone = [answers(loaded(kind), [asked(p, key=0, temperature=1.0, max_tokens=2)])[0] for p in (one, other)]
    assert [request.token_ids for request in requests[:2]] == [list(one.token_ids) for one in alone], (
        "whole images in every piece"
    )


def test_tokens_of_one_image_see_each_other_within_the_window_and_no_others_ahead() -> None:
    # Tokens 1-3 and 5-6 are images; 7-9 continue them, with an image in 7-8. Tokens 12-14 continue 10-11, with an image
    # in 13-14. A window of 3 takes away what lies 3 or more tokens back, and nothing that lies ahead.
    segments = [
        Segment(start=0, length=7, blocks=((1, 4), (5, 7))),
        Segment(start=7, length=3, prefix=((0, 7),), blocks=((0, 2),)),
        Segment(start=10, length=2),
        Segment(start=12, length=3, prefix=((10, 12),), blocks=((1, 3),)),
    ]
    attention = PackedAttention(segments, device=torch.device("cpu"))
    zeros, values = torch.zeros(15, 1, 1), torch.eye(15)[:, None]
    for window, last, first in (
        (None, "0 3 3 3 4 6 6 8 8 9 10 11 12 14 14", "0 0 0 0 0 0 0 0 0 0 10 10 10 10 10"),
        (3, "0 3 3 3 4 6 6 8 8 9 10 11 12 14 14", "0 0 0 1 2 3 4 5 6 7 10 10 10 11 12"),
    ):
        form = AttentionForm(scaling=1.0, window=window)
        seen = attention.attend(0, zeros, zeros, values, form)[:, 0] > 0
        for row, start, end in zip(seen, first.split(), last.split(), strict=True):
            assert torch.nonzero(row)[:, 0].tolist() == list(range(int(start), int(end) + 1))


def test_text_around_an_image_is_that_of_the_processor_or_refused(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = folder("gemma3")
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    assert "\\n" not in tokenizer.chat_template, "what is saved stays as it was"
    ids = tokenizer(f"a{TOKENS['gemma3'][0]}b", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match=r"writes 'a' and 'b' around an image.*write <start_of_image>"):
        _encoder(path).expand(ids, [_encoder(path).read(png(WIDE))])


def test_tokens_of_images_in_messages_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama4")
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    ids = tokenizer("<|image|><|patch|>", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="write no control tokens into messages"):
        _encoder(path).expand(ids, [_encoder(path).read(png(WIDE))])


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_the_tower_is_frozen_whole_and_takes_part_without_an_image(
    kind: str, folder: Callable[[str], Path]
) -> None:
    model = load_model(
        ModelConfig(path=str(folder(kind)), freeze_vision_tower=True, dtype="float32"), device="cpu"
    )
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if any(part in name for part in TOWER)}
    assert model.media is not None
    assert model.media.tower is not None
    model.media.tower.requires_grad_(True)
    hidden = torch.ones(3, 32, requires_grad=True)
    touched = model.media.touched(hidden)
    torch.testing.assert_close(touched, hidden)
    touched.sum().backward()
    without = {n for n, p in model.named_parameters() if n in frozen and (p.grad is None or p.grad.any())}
    assert not {name for name in without if "mask_token" not in name}


def test_adapters_of_all_linear_layers_leave_the_router_of_llama_4_alone(
    folder: Callable[[str], Path], loaded: Callable[[str], CausalLM]
) -> None:
    path = folder("llama4")
    lora = LoraConfig(rank=2)
    model = load_model(ModelConfig(path=str(path), dtype="float32", lora=lora), device="cpu")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("vision_model" in name for name in trained)
    assert any("language_model" in name for name in trained)
    assert not [name for name in trained if "router" in name]
    rows = samples(path)
    before, _ = log_probs_of(loaded("llama4"), rows, temperature=1.0)
    after, _ = log_probs_of(model, rows, temperature=1.0)
    torch.testing.assert_close(after, before)


@pytest.mark.usefixtures("nothing_compared")
@pytest.mark.parametrize("kind", TILED)
def test_a_model_whose_own_pass_differs_is_refused(
    kind: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the tokens of an image saw each other in a model that is not said to, or the other way round.
    wrong = dataclasses.replace(families.TILED["gemma3"], sees_ahead=False)
    if kind != "gemma3":
        wrong = dataclasses.replace(
            families.TILED[kind], features=lambda module, pixels: pixels, sees_ahead=True
        )
        monkeypatch.setattr(
            "strop.engines.multimodal.tiling.TileVision.own_arguments", lambda self, token_ids: {}
        )
    monkeypatch.setattr(families, "TILED", {**families.TILED, kind: wrong})
    if kind == "gemma3":  # its own pass is told which tokens are images in any case
        monkeypatch.setattr(
            "strop.engines.multimodal.tiling.TileVision.own_arguments",
            lambda self, ids: {"token_type_ids": (ids == self.token_ids["image"]).long()[None]},
        )
    with pytest.raises(ValueError, match="gives other log-probs on packed prompts with images"):
        load_model(ModelConfig(path=str(folder(kind)), dtype="float32"), device="cpu")


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_an_image_processor_saved_with_the_whole_processor_is_found(kind: str, tmp_path: Path) -> None:
    path = save_tiny_tiles(kind, tmp_path / "model")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").unlink()
    assert load_media_processor(path) is None
    (path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    processor = load_media_processor(path)
    assert processor is not None
    assert processor.grid("image", (40, 17)) == GRIDS[kind]


def test_tiles_of_another_size_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    path = save_tiny_tiles("internvl", tmp_path / "model")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": {"height": 20, "width": 20}}))
    with pytest.raises(ValueError, match="makes tiles of 20x20, and the model takes 16x16"):
        load_media_processor(path)


@pytest.mark.parametrize("kind", TILED)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 3), (1, 3, 1)])
def test_what_stands_for_an_image_of_several_tiles(
    kind: str, grid: tuple[int, int, int], folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    processor, tokenizer = load_media_processor(path), load_tokenizer(ModelConfig(path=str(path)))
    assert processor is not None
    if kind == "gemma3":
        grid = (1, 1, 1)
    ids = processor.image_ids(grid)
    assert tokenizer.decode(ids) == part_text(kind, *grid[1:])
    count = grid[1] * grid[2]
    assert processor.num_tokens(grid) == PER_TILE[kind] * (count + 1 if count > 1 else 1)
    assert ids.count(processor.token_ids["image"]) == processor.num_tokens(grid)


def test_the_canvas_of_an_image_by_hand() -> None:
    # Tiles of 16, at most 4. Enlarged least: 30 x 30 needs 2 x 2 (1.07; 1 x 1 would shrink). Of equals the smallest:
    # 16 x 8 on one tile. Shrunk least, where none enlarges: 100 x 20 on 1 x 4 (0.64), 20 x 100 on 4 x 1.
    processor = CanvasProcessor({"size": {"height": 16, "width": 16}, "max_patches": 4})
    sizes = {(30, 30): (2, 2), (16, 8): (1, 1), (100, 20): (1, 4), (20, 100): (4, 1), (8, 8): (1, 1)}
    assert {size: processor.tiles(size) for size in sizes} == sizes


def test_tiles_of_a_canvas_by_hand() -> None:
    # 32 x 16 pixels fill two tiles as they are; black and white become -1 and 1. The whole is the mean of neighbours.
    processor = CanvasProcessor({"size": {"height": 16, "width": 16}, "max_patches": 4})
    left, right, whole = processor(images=[picture(32, 16, (0, 0, 0), (255, 255, 255))], return_tensors="pt")[
        "pixel_values"
    ]
    assert left.unique().tolist() == [-1.0]
    assert right.unique().tolist() == [1.0]
    assert whole[:, :, :7].unique().tolist() == [-1.0]
    assert whole[:, :, 9:].unique().tolist() == [1.0]
    # 8 x 8 pixels are enlarged to the tile; 16 x 8 pixels leave the lower half to the padding, which is black.
    (tile,) = processor(images=[picture(16, 8, (255, 255, 255))], return_tensors="pt")["pixel_values"]
    assert tile[:, :8].unique().tolist() == [1.0]
    assert tile[:, 8:].unique().tolist() == [-1.0]


@pytest.mark.parametrize("kind", ONE_AXIS)
def test_tokens_and_pixels_are_those_of_the_whole_processor_of_transformers(
    kind: str, folder: Callable[[str], Path]
) -> None:
    pytest.importorskip(
        "torchvision", reason="image processors of transformers, or those beside them, need torchvision"
    )
    path = folder(kind)
    processor, ours = whole_processor(kind, path), load_media_processor(path)
    assert ours is not None
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    noise = torch.randint(0, 256, (70, 90, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    speckled = Image.fromarray(noise.numpy())
    for images in (
        [WIDE, HIGH],
        [picture(8, 8, BLUE)],
        [speckled, speckled.resize((30, 30)), speckled.resize((5, 100))],
    ):
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": "a\nb"}]
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        wanted = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        row = {
            "prompt": [{"role": "user", "content": "<image>" * len(images) + "a\nb"}],
            "data_source": "exact",
        }
        row |= {"answer": "x", "images": [png(one) for one in images]}
        dataset = PromptDataset([row], tokenizer, DataConfig(ground_truth_key="answer"), "train")
        prompt = dataset.prompt(0, "e0-000000")
        assert list(prompt.token_ids) == wanted["input_ids"][0].tolist()
        pixels = torch.cat([ours.pixels(one) for one in prompt.media])
        assert torch.equal(pixels, wanted["pixel_values"].to(torch.float32))
        if kind == "kimi_k25":
            assert [list(one.grid) for one in prompt.media] == wanted["image_grid_thw"].tolist()


def whole_processor(kind: str, path: Path) -> Any:
    """Of transformers, with the names that its tokenizer gives the tokens around images."""
    begin, end, part = TOKENS[kind][0], TOKENS[kind][1], TOKENS[kind][-1]
    named = {
        "gemma3": {"boi_token": begin, "eoi_token": end, "image_token": part},
        "internvl": {
            "start_image_token": begin, "end_image_token": end, "context_image_token": part, "video_token": "<|unk|>",
        },
        "kimi_k25": {"image_token": part, "video_token": "<|unk|>"},
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, extra_special_tokens=named.get(kind, {}))
    if kind == "gemma3":
        images = transformers.Gemma3ImageProcessorPil.from_pretrained(path)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=PER_TILE[kind])
    if kind == "internvl":
        images = transformers.GotOcr2ImageProcessorPil.from_pretrained(path)
        videos = transformers.InternVLVideoProcessor()
        return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=PER_TILE[kind])
    if kind == "llama4":
        images = transformers.Llama4ImageProcessor.from_pretrained(path)
        return transformers.Llama4Processor(images, tokenizer, patch_size=4)
    images = transformers.Kimi_K25ImageProcessor.from_pretrained(path)
    return transformers.Kimi_K25Processor(images, tokenizer, transformers.Kimi_K25VideoProcessor())
