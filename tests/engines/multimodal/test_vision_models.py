"""Vision-language models on packed rows, against their own forward pass on one sequence at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from default_cases import by_default
from torch import Tensor
from transformers import AutoModelForImageTextToText

from references.language_models import exact_norms
from references.tiny_vision import BLUE, GREEN, IMAGE, KINDS, RED, VIDEO, picture, png, save_tiny_vision
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.half_weights import hold_half
from strop.engines.lora.adapters import save_merged
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.inputs import media_inputs
from strop.engines.packing import make_rows, token_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.tokenizer import load_tokenizer
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.protocol.trajectory import Media

IMAGE_ID, VIDEO_ID = 105, 106
TOLERANCE = 1e-6
"""The towers turn their queries and keys in float32 whatever the model has."""
IMAGES = {
    "wide": picture(24, 17, RED, BLUE),
    "high": picture(17, 33, GREEN, RED),
    "blue": picture(24, 17, BLUE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("vision")

    def get(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else save_tiny_vision(kind, path)

    return get


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with exact_norms():
        yield


def load(path: Path, **options: Any) -> CausalLM:
    return load_model(ModelConfig(path=str(path), **{"dtype": "float64", **options}), device="cpu")


def medium(path: Path, name: str, start: int) -> Media:
    processor = load_media_processor(path)
    assert processor is not None
    image = IMAGES[name]
    grid = processor.grid("image", image.size)
    return Media(
        kind="image",
        parts=(png(image),),
        size=image.size,
        grid=grid,
        start=start,
        num_tokens=processor.num_tokens(grid),
        key=name,
    )


def prompt(path: Path, *pieces: int | str) -> tuple[Tensor, tuple[Media, ...]]:
    """Token ids and names of images, in order."""
    ids: list[int] = []
    media = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        media.append(medium(path, piece, len(ids)))
        ids += [IMAGE_ID] * media[-1].num_tokens
    return torch.tensor(ids), tuple(media)


def samples(path: Path) -> DataProto:
    """Two samples of a prompt with one image, one of a prompt with two, and one of text."""
    one, two = prompt(path, 4, 20, "wide", 21), prompt(path, "high", 30, 31, "blue", 32)
    text = (torch.tensor([4, 50, 51, 5]), ())
    prompts = [one, one, two, text]
    responses = [[40, 41, 42], [43, 44], [45, 46, 47, 48], [60, 61]]
    return make_rows([p for p, _ in prompts], [torch.tensor(r) for r in responses], [m for _, m in prompts])


def own_log_probs(module: Any, path: Path, rows: DataProto) -> Tensor:
    """Log-probs by the model itself, row by row: its positions of the whole sequence, its attention, no packing."""
    processor = load_media_processor(path)
    assert processor is not None
    found = []
    for row in token_rows(rows):
        prompt_ids, response, shown = row.prompt, row.response, row.media
        ids = torch.cat([prompt_ids, response])[None]
        arguments: dict[str, Tensor] = {}
        if shown:
            arguments = {
                "pixel_values": torch.cat([processor.pixels(one) for one in shown]).double(),
                "image_grid_thw": torch.tensor([one.grid for one in shown]),
                "mm_token_type_ids": (ids == IMAGE_ID).int(),
            }
        logits = module(input_ids=ids, use_cache=False, **arguments).logits[0]
        logits = logits.index_fill(1, torch.tensor([IMAGE_ID, VIDEO_ID]), float("-inf")).log_softmax(-1)
        start = len(prompt_ids) - 1
        found.append(logits[start:-1].gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def plain(path: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen2_5_vl", "qwen3_vl", "qwen3_5"))
def test_packed_log_probs_are_those_of_each_sequence_alone(kind: str, folder: Callable[[str], Path]) -> None:
    path = folder(kind)
    rows = samples(path)
    with torch.no_grad():
        expected = own_log_probs(plain(path), path, rows)
    for max_tokens in (1000, 60):
        ours, _ = log_probs_of(load(path), rows, temperature=1.0, max_tokens=max_tokens)
        # Linear attention computes in float32 whatever the model has.
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 if kind == "qwen3_5" else TOLERANCE)


def test_eager_attention_is_that_of_the_vision_tower_too(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(KINDS[0])
    rows = samples(path)
    with torch.no_grad():
        expected = own_log_probs(plain(path), path, rows)
    model = load(path, attn_implementation="eager")

    def no_kernel(*arguments: object, **options: object) -> Tensor:
        raise AssertionError("a fused kernel was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_kernel)
    ours, _ = log_probs_of(model, rows, temperature=1.0, max_tokens=1000)
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_language_and_vision_as_without_packing(
    kind: str, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    rows = samples(path)
    module = plain(path)
    own_log_probs(module, path, rows).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert any("visual" in name for name in expected)
    model = load(path)
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(), total_steps=None)
    engine.accumulate(
        rows, of_log_probs(lambda log_probs, entropies, index: log_probs.sum(), temperature=1.0)
    )
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # Norms of GLM-4V's tower and of linear attention compute in float32 here, whatever the model has.
        share = {"glm4v": 1e-5, "qwen3_5": 5e-4}.get(kind)
        atol = TOLERANCE if share is None else share * float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_prompt_and_response_are_the_models_own(
    kind: str, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    rows = samples(path)[:3]
    model = load(path)
    packed = pack(rows, model)
    first = 0
    for row in token_rows(rows):
        prompt_ids, response, shown = row.prompt, row.response, row.media
        ids = torch.cat([prompt_ids, response])[None]
        expected, _ = model.module.base_model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == IMAGE_ID).int(),
            image_grid_thw=torch.tensor([one.grid for one in shown]),
        )
        places = packed.hidden_index[
            packed.prediction_index[torch.isin(packed.response_index, first + torch.arange(len(response)))]
        ]
        first += len(response)  # what predicts the response: from the last prompt token on
        torch.testing.assert_close(
            packed.position_ids[:, 0, places], expected[:, 0, len(prompt_ids) - 1 : -1]
        )


def test_positions_of_an_image_by_hand(folder: Callable[[str], Path]) -> None:
    # Text at 0 and 1; an image of 2 x 3 tokens: time stays at 2, height and width count on from 2; the text after it
    # goes on behind the largest position, 4.
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, 20, "wide", 21)
    assert media[0].grid == (1, 4, 6)
    vision = load(path).media
    assert vision is not None
    assert vision.positions(ids, media).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_tokens_of_media_have_probability_zero(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, "blue", 21)
    vocabulary = torch.arange(107)
    rows = make_rows([ids] * 107, list(vocabulary[:, None]), [media] * 107)
    log_probs, entropies = log_probs_of(load(path), rows, temperature=0.7, max_tokens=10_000)
    probs = log_probs.exp()
    assert probs[[IMAGE_ID, VIDEO_ID]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0, dtype=torch.float64))
    expected = -(probs * log_probs).nan_to_num().sum()
    torch.testing.assert_close(entropies, expected.expand(107))


def test_the_image_decides_what_is_said(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, "blue", 21)
    _, other = prompt(path, 4, "wide", 21)
    rows = make_rows([ids, ids], [torch.tensor([40])] * 2, [media, other])
    packed = pack(rows, load(path))
    assert packed.num_tokens == 2 * len(ids), "rows with different images share nothing of them"
    log_probs, _ = log_probs_of(load(path), rows, temperature=1.0, max_tokens=100)
    assert abs(log_probs[0] - log_probs[1]) > 1e-3


def test_a_frozen_vision_tower_gets_no_gradient_and_the_rest_does(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_5_vl")
    model = load(path, freeze_vision_tower=True)
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=1e-2), total_steps=None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.accumulate(
        samples(path), of_log_probs(lambda log_probs, entropies, index: log_probs.sum(), temperature=1.0)
    )
    engine.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert not [name for name in moved if "visual" in name]
    assert [name for name in before if "visual" in name]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_folder_in_half_is_read_so_but_for_the_tower(
    kind: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folder(kind), tmp_path, dirs_exist_ok=True)
    AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    rounded = load_model(settings, device="cpu")
    hold_half(rounded, device=torch.device("cpu"))
    read = dict(load_model(settings, device="cpu", holds_half=True).named_parameters())
    for name, parameter in rounded.named_parameters():
        assert read[name].dtype == parameter.dtype, name
        assert torch.equal(read[name], parameter), name
    kinds = {"visual" in name for name, parameter in read.items() if parameter.dtype == torch.bfloat16}
    assert kinds == {False}


def test_a_model_without_a_vision_tower_cannot_freeze_one(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(
        ValueError, match=r"freeze_vision_tower is true, but .* Qwen3ForCausalLM, which has no"
    ):
        load(tiny_folder("qwen3"), freeze_vision_tower=True)


def test_an_adapter_leaves_a_frozen_tower_alone(folder: Callable[[str], Path]) -> None:
    model = load(folder("qwen2_vl"), freeze_vision_tower=True, lora=LoraConfig(rank=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name and "visual" not in name for name in trained)


def test_images_for_a_model_of_text_are_refused(
    folder: Callable[[str], Path], tiny_folder: Callable[[str], Path]
) -> None:
    rows = samples(folder("qwen2_vl"))
    with pytest.raises(ValueError, match="a sample has images, but the model takes text alone"):
        log_probs_of(load(tiny_folder("qwen3")), rows, temperature=1.0, max_tokens=1000)


def test_media_tokens_without_media_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, "wide", 21)
    rows = make_rows([torch.cat([ids, ids])], [torch.tensor([40])], [media])
    with pytest.raises(
        ValueError, match="has 12 tokens that stand for parts of images, but its images take 6"
    ):
        log_probs_of(load(path), rows, temperature=1.0, max_tokens=1000)


def test_a_row_that_ends_within_an_image_of_another_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, "wide", 21)
    rows = make_rows([ids, ids[:4]], [torch.tensor([40])] * 2, [media, media])
    with pytest.raises(
        ValueError, match="has 3 tokens that stand for parts of images, but its images take 6"
    ):
        pack(rows, load(path))


def test_rows_with_media_are_checked_once_each(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("qwen2_vl")
    ids, media = prompt(path, 4, "wide", 21)
    model = load(path)
    assert model.media is not None
    checked: list[int] = []
    check, positions = model.media.check, model.media.positions
    monkeypatch.setattr(model.media, "check", lambda *given: (checked.append(0), check(*given))[1])
    monkeypatch.setattr(model.media, "positions", lambda *given: (checked.append(1), positions(*given))[1])
    packed = pack(
        make_rows([ids] * 3, [torch.tensor([40 + row, 50]) for row in range(3)], [media] * 3), model
    )
    assert len(packed.attention.segments) == 4
    assert sorted(checked) == [0] * 3 + [1] * 3


def test_images_and_divided_sequences_do_not_go_together(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    group: Any = object()
    with pytest.raises(
        ValueError, match="engine.sequence_parallel of this role divides sequences .* set it to 1"
    ):
        pack(
            samples(path),
            load(path),
            parallel=Parallel(device=torch.device("cpu"), sp_size=2, sp_group=group),
        )


@pytest.mark.usefixtures("nothing_compared")
def test_a_model_whose_own_pass_differs_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if an architecture gave image tokens other positions in its own forward pass than it says.
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    def shifted(self: Any, input_ids: Tensor, **others: Any) -> Tensor:
        length = input_ids.shape[1]
        return torch.arange(length).view(1, 1, -1).expand(3, 1, -1) * 2

    monkeypatch.setattr(Qwen2VLModel, "compute_3d_position_ids", shifted)
    with pytest.raises(ValueError, match="gives other log-probs on packed"):
        load(folder("qwen2_vl"), dtype="float32")


def test_saved_weights_have_the_image_processor_beside_them(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load(folder("qwen2_vl"), dtype="float32")
    model.save(tmp_path / "whole")
    save_merged(load(folder("qwen2_vl"), dtype="float32", lora=LoraConfig(rank=2)), tmp_path / "merged")
    for saved in ("whole", "merged"):
        again = load_media_processor(tmp_path / saved)
        assert again is not None
        assert again.grid("image", (24, 17)) == (1, 4, 6)


def test_every_parameter_of_the_tower_takes_part_without_an_image(folder: Callable[[str], Path]) -> None:
    for kind in KINDS:
        model = load(folder(kind))
        assert model.media is not None
        hidden = torch.ones(3, 32, dtype=torch.float64, requires_grad=True)
        touched = model.media.touched(hidden)
        torch.testing.assert_close(touched, hidden)
        touched.sum().backward()
        tower = {n: p for n, p in model.named_parameters() if ".visual." in n}
        assert all(p.grad is not None and not p.grad.any() for p in tower.values()), kind


def test_a_template_kept_with_the_processor_alone_is_found(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import json
    import shutil

    shutil.copytree(folder("qwen2_vl"), tmp_path / "model")
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "model"))).chat_template == template


def test_the_ids_used_here_are_those_of_the_tokenizer(folder: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder("qwen2_vl"))))
    assert tokenizer.convert_tokens_to_ids([IMAGE, VIDEO]) == [IMAGE_ID, VIDEO_ID]
    media = media_inputs(load(folder("qwen2_vl")).module, "")
    assert media is not None
    assert media.token_ids == {"image": IMAGE_ID, "video": VIDEO_ID}


def test_a_token_of_images_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """As of a config.json that leaves the id to transformers, whose default is that of the large models."""
    save_tiny_vision("qwen2_5_vl", tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    vocab_size = settings["text_config"]["vocab_size"]
    file.write_text(json.dumps({**settings, "image_token_id": 151_655}))
    sentence = (
        f"the token of an image is 151655 .* the vocabulary has {vocab_size} tokens; write image_token_id"
    )
    with pytest.raises(ValueError, match=sentence):
        load_model(ModelConfig(path=str(tmp_path), dtype="float32"), device="cpu")
