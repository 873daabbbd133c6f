"""Images that tools return: token by token, from the tool to the log-probs of the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from agent_cases import ScriptedModel, play, prompt_of, sampling_of, setup_with, tool_plugin
from default_cases import by_default
from PIL import Image

from references.tiny_tiles import EVERY_RUN, ONE_AXIS, part_text, save_tiny_tiles
from references.tiny_vision import BLUE, GREEN, KINDS, RED, picture, png, save_tiny_vision
from references.token_passes import log_probs_of
from strop.agents import AgentLoopBase, AgentLoopOutput, agents
from strop.agents.envs.credit import with_turn_rewards
from strop.agents.episodes import play_episode
from strop.agents.interactions import BaseInteraction
from strop.agents.setup import AgentSetup
from strop.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from strop.agents.tools.formats import FunctionCall, ToolParser
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.placeholders import ToolImages
from strop.engines.packing import make_rows
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Prompt, Trajectory, media_of
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling

IMAGE_ID, START_ID, END_ID = 105, 103, 104
WIDE, HIGH, GREENS = picture(24, 17, RED, BLUE), picture(17, 33, GREEN, RED), picture(24, 17, GREEN)


def half_a_photograph() -> bytes:
    """The first half of a JPEG file."""
    file = io.BytesIO()
    Image.frombytes("RGB", (64, 64), bytes(range(256)) * 48).save(file, format="JPEG")
    return file.getvalue()[: len(file.getvalue()) // 2]


class Camera(BaseTool):
    """Returns what the test wants the model to see."""

    def __init__(self, *responses: ToolResponse | Callable[[], ToolResponse]) -> None:
        schema = {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Look.",
                "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": []},
            },
        }
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.responses, self.calls = responses, 0

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        given = self.responses[self.calls % len(self.responses)]
        self.calls += 1
        return given() if callable(given) else given, 0.0, {}


class AlwaysCalls(ToolParser):
    """Every answer is a call of `look`, or several: a random model writes none."""

    num_calls = 1

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [FunctionCall("look", "{}")] * self.num_calls


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, CausalLM]]:
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("vision")
    loaded: dict[str, tuple[Path, CausalLM]] = {}

    def get(kind: str) -> tuple[Path, CausalLM]:
        if kind not in loaded:
            path = (save_tiny_tiles if kind in ONE_AXIS else save_tiny_vision)(kind, root / kind)
            loaded[kind] = path, load_model(ModelConfig(path=str(path)), device="cpu")
        return loaded[kind]

    return get


def setup_of(path: Path, camera: Camera, *, num_calls: int = 1, **settings: Any) -> AgentSetup:
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    setup = setup_with(
        tokenizer,
        [camera],
        **{"max_assistant_turns": 3, "max_parallel_calls": 4, "tool_format": "hermes"} | settings,
    )
    parser = AlwaysCalls(tokenizer)
    parser.num_calls = num_calls
    tool_plugin(setup).parser = parser
    processor = load_media_processor(path)
    setup.images = None if processor is None else ToolImages(processor)
    return setup


def prompts_of(path: Path, *contents: tuple[str, list[Any]]) -> list[Prompt]:
    rows = [
        {
            "prompt": [{"role": "user", "content": text}], "data_source": "exact", "answer": "x",
            "agent_name": "tool_agent", **({"images": [png(one) for one in images]} if images else {}),
        }
        for text, images in contents
    ]  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    dataset = PromptDataset(rows, tokenizer, DataConfig(ground_truth_key="answer"), "train")
    return [
        dataclasses.replace(dataset.prompt(row, f"e0-{row:06d}"), agent_name="tool_agent")
        for row in dataset.row_numbers
    ]


def played(
    model: CausalLM, prompts: Sequence[Prompt], setup: AgentSetup, *, samples: int = 1, max_tokens: int = 120
) -> list[Trajectory]:
    """All samples of all prompts at once, with the native engine; answers end at most letters."""
    sampling = Sampling(key=0, temperature=0.8, max_tokens=max_tokens, stop_token_ids=tuple(range(20, 70)))
    engine = NativeEngine(model, max_running=4)

    async def run() -> list[Trajectory]:
        async with asyncio.timeout(60):
            found = await asyncio.gather(
                *(
                    play_episode(
                        prompt, index, sampling,
                        client=engine, seed=0, setup=setup,
                    )
                    for prompt in prompts
                    for index in range(samples)
                )
            )  # fmt: skip
        assert all(len(sequences) == 1 for sequences in found)
        return [sequences[0] for sequences in found]

    return asyncio.run(run())


def rows_of(trajectories: Sequence[Trajectory]) -> Any:
    return make_rows(
        [torch.tensor(one.prompt_ids) for one in trajectories],
        [torch.tensor(one.response_ids) for one in trajectories],
        [one.media for one in trajectories],
    )


def check_exact(model: CausalLM, trajectories: Sequence[Trajectory], *, max_tokens: int = 10_000) -> None:
    """The trainer's log-probs of what was sampled are those of the rollout; no other is beyond all measure."""
    trained, _ = log_probs_of(model, rows_of(trajectories), temperature=0.8, max_tokens=max_tokens)
    assert -50 < float(trained.min()) <= float(trained.max()) <= 0
    mask = torch.tensor([value for one in trajectories for value in one.sampled])
    recorded = torch.tensor([value for one in trajectories for value in one.log_probs])
    assert int(mask.sum()) > 0
    assert float((trained - recorded)[mask].abs().max()) < 1e-4


def check_images(trajectory: Trajectory) -> None:
    """Every token of an image belongs to one of the media, none is trained, and borders stand around each."""
    ids = trajectory.token_ids
    covered = [place for one in trajectory.media for place in range(*one.span)]
    assert covered == [place for place, token in enumerate(ids) if token == IMAGE_ID]
    first = len(trajectory.prompt_ids)
    for one in trajectory.media:
        start, end = one.span
        assert (ids[start - 1], ids[end]) == (START_ID, END_ID)
        if start >= first:
            assert not any(trajectory.sampled[start - first - 1 : end - first + 1])


def check_parts(kind: str, path: Path, trajectory: Trajectory) -> None:
    """Each of the media stands where it says, with all that the family writes for it, and nothing of it is trained."""
    tokenizer, first = load_tokenizer(ModelConfig(path=str(path))), len(trajectory.prompt_ids)
    for one in trajectory.media:
        start, end = one.span
        assert tokenizer.decode(trajectory.token_ids[start:end]) == part_text(kind, *one.grid[1:])
        if kind == "gemma3":
            assert tokenizer.decode(trajectory.token_ids[start - 2 : start]) == "\n\n"
            assert tokenizer.decode(trajectory.token_ids[end : end + 2]) == "\n\n"
        if start >= first:
            assert not any(trajectory.sampled[start - first : end - first])


@pytest.mark.parametrize("kind", by_default([*KINDS, *EVERY_RUN], "qwen2_5_vl", "qwen3_5", "gemma3"))
def test_log_probs_of_rollout_and_trainer_agree_after_an_image_of_a_tool(
    kind: str, models: Callable[[str], tuple[Path, CausalLM]]
) -> None:
    path, model = models(kind)
    camera = Camera(
        ToolResponse(text="see", image=[png(WIDE)]), ToolResponse(text="and", image=[HIGH, png(GREENS)])
    )
    prompts = prompts_of(path, ("plain", []), ("a<image>b", [HIGH]))
    trajectories = played(model, prompts, setup_of(path, camera), samples=2)
    for one in trajectories:
        if kind in ONE_AXIS:
            check_parts(kind, path, one)
        else:
            check_images(one)
        shown = [medium for medium in one.media if medium.start >= len(one.prompt_ids)]
        assert len(shown) >= 2, "two results, of one or two images each"
    check_exact(model, trajectories)
    check_exact(model, trajectories, max_tokens=max(len(one.token_ids) for one in trajectories))


@dataclasses.dataclass
class SeesImages(ScriptedModel):
    """Also remembers the images of each request."""

    seen: list[Any] = dataclasses.field(default_factory=list)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        self.seen.append(media_of(prompt_ids))
        return await super().generate(request_id, prompt_ids, sampling)


@pytest.fixture(scope="module")
def folder(models: Callable[[str], tuple[Path, CausalLM]]) -> Path:
    return models("qwen2_vl")[0]


def said(setup: AgentSetup, text: str) -> list[int]:
    return list(setup.tokenizer(text, add_special_tokens=False)["input_ids"])


def episode(
    setup: AgentSetup, *answers: str, max_tokens: int = 200, **changes: Any
) -> tuple[Trajectory, SeesImages]:
    """One episode of a scripted model: the first answers are calls, the last one is not."""
    model = SeesImages([said(setup, text + "<|im_end|>") for text in answers])
    tokenizer = setup.tokenizer
    sampling = sampling_of(tokenizer, max_tokens=max_tokens)
    (one,) = play(prompt_of(tokenizer, **changes), model, setup, sampling=sampling)
    return one, model


def result_of(trajectory: Trajectory) -> dict[str, Any]:
    return next(dict(message) for message in trajectory.messages if message["role"] == "tool")


def test_an_image_becomes_tokens_where_the_template_puts_it(folder: Path) -> None:
    # 24 x 17 pixels are resized to 24 x 16: 3 x 2 tokens of 8 x 8 pixels.
    setup = setup_of(folder, Camera(ToolResponse(text="see", image=[png(WIDE)])), max_assistant_turns=2)
    one, model = episode(setup, "a", "b")
    header, image = said(setup, "<|tool|>"), [START_ID, *[IMAGE_ID] * 6, END_ID]
    reply = [*header, *image, *said(setup, "see<|im_end|><|assistant|>")]
    assert list(one.response_ids) == [*said(setup, "a<|im_end|>"), *reply, *said(setup, "b<|im_end|>")]
    assert list(one.sampled) == [True] * 2 + [False] * len(reply) + [True] * 2
    (medium,) = one.media
    assert medium.start == len(one.prompt_ids) + 2 + 2
    assert (medium.grid, medium.size, medium.parts) == ((1, 4, 6), (24, 17), (png(WIDE),))
    assert model.seen == [(), one.media]
    assert model.requests[1][0] == one.prompt_ids + one.response_ids[: 2 + len(reply)]
    assert one.numbers["template_drift"] == 0.0
    turn = result_of(one)
    assert (turn["content"], turn["images"]) == ("[image]\nsee", [{"size": [24, 17], "tokens": [4, 10]}])


def test_images_of_parallel_calls_keep_the_order_of_the_calls(folder: Path) -> None:
    camera = Camera(
        ToolResponse(text="one", image=[png(HIGH)]),
        ToolResponse(text="none"),
        ToolResponse(image=[png(WIDE), png(GREENS)]),
    )
    one, _ = episode(setup_of(folder, camera, num_calls=3, max_assistant_turns=2), "a", "b")
    assert [medium.size for medium in one.media] == [(17, 33), (24, 17), (24, 17)]
    assert [medium.parts[0] for medium in one.media] == [png(HIGH), png(WIDE), png(GREENS)]
    check_images(one)
    turns = [message for message in one.messages if message["role"] == "tool"]
    assert [turn["content"] for turn in turns] == ["[image]\none", "none", "[image]\n[image]"]
    places = [image["tokens"] for turn in turns for image in turn.get("images", ())]
    first = len(one.prompt_ids)
    assert places == [[start - first, end - first] for start, end in (medium.span for medium in one.media)]


def test_a_file_is_read_when_the_tool_returns_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "screen.png"

    def shot() -> ToolResponse:
        path.write_bytes(png(WIDE) if camera.calls == 1 else png(GREENS))
        return ToolResponse(image=[str(path)])

    camera = Camera(shot)
    one, _ = episode(setup_of(folder, camera), "a", "b", "c")
    path.unlink()
    assert [medium.parts for medium in one.media] == [(png(WIDE),), (png(GREENS),)]
    assert one.media[0].key != one.media[1].key


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (b"no picture", "an image of 10 bytes cannot be read as a picture"),
        (png(HIGH)[:-30], "cannot be read as a picture"),
        (half_a_photograph(), "cannot be read as a picture (image file is truncated"),  # its size can be read
        ("/no/such.png", "there is no file '/no/such.png'"),
        ("https://example.org/a.png", "which is not fetched"),
        (7, "has a image of type int"),
        (png(picture(900, 2, RED)), "more than 200 times"),
    ],
)
def test_an_image_that_cannot_be_read_is_an_error_for_the_model(
    folder: Path, image: Any, problem: str
) -> None:
    setup = setup_of(
        folder, Camera(ToolResponse(text="see", image=[png(WIDE), image])), max_assistant_turns=2
    )
    one, _ = episode(setup, "a", "b", max_tokens=500)
    turn = result_of(one)
    assert turn["error"] == "failed"
    assert turn["content"].startswith("Error executing tool 'look': ValueError: ")
    assert problem in turn["content"]
    assert one.media == ()
    assert one.numbers["tool_errors"] == 1.0


def test_a_model_of_text_is_told_that_there_is_an_image(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(text="see", image=[png(WIDE)] * 2)), max_assistant_turns=2)
    setup.images = None
    one, _ = episode(setup, "a", "b")
    turn = result_of(one)
    assert turn["content"] == "see\n(2 images cannot be shown: the model takes text alone)"
    assert turn["error"] == "not_shown"
    assert (one.media, IMAGE_ID in one.response_ids) == ((), False)


def test_a_template_without_images_in_results_is_told_too(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])), max_assistant_turns=2)
    template = setup.tokenizer.chat_template
    setup.tokenizer.chat_template = template.replace(
        "message['content'] is string", "message['content'] is string or message['role'] == 'tool'"
    ).replace("{{- message['content'] -}}", "{{- message['content'] | string -}}")
    assert setup.tokenizer.chat_template != template
    setup._templates.clear()
    one, _ = episode(setup, "a", "b")
    assert result_of(one)["content"] == (
        "(1 image cannot be shown: the chat template of the model writes no images into tool results)"
    )
    assert one.media == ()


def test_sound_is_named_and_images_beside_it_are_shown(folder: Path) -> None:
    heard = ToolResponse(text="see", image=[png(WIDE)], audio=[b"RIFF"])
    assert not heard.is_text_only()
    one, _ = episode(setup_of(folder, Camera(heard), max_assistant_turns=2), "a", "b")
    assert result_of(one)["content"] == (
        "[image]\nsee\n(1 audio cannot be shown: results of tools are shown as text and images alone)"
    )
    assert len(one.media) == 1


def test_a_video_is_named_and_images_beside_it_are_shown(folder: Path) -> None:
    setup = setup_of(
        folder,
        Camera(ToolResponse(text="see", image=[png(WIDE)], video=[[png(WIDE)]])),
        max_assistant_turns=2,
    )
    one, _ = episode(setup, "a", "b")
    assert result_of(one)["content"] == (
        "[image]\nsee\n(1 video cannot be shown: results of tools are shown as text and images alone)"
    )
    assert len(one.media) == 1


def test_tokens_of_images_that_a_tool_spells_out_stay_text(folder: Path) -> None:
    camera = Camera(ToolResponse(text="<|vision_start|><|image_pad|><|vision_end|>", image=[png(WIDE)]))
    one, _ = episode(setup_of(folder, camera, max_assistant_turns=2), "a", "b")
    assert one.response_ids.count(IMAGE_ID) == 6
    check_images(one)


def test_an_image_without_room_ends_the_episode_before_it(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])))
    # 2 tokens of the answer, 11 of the reply: header, border, 6 of the image, border, end of turn, header.
    for max_tokens, num_images in ((13, 0), (14, 1)):
        one, _ = episode(setup, "a", max_tokens=max_tokens)
        assert (one.stop_reason, len(one.media), one.response_ids.count(IMAGE_ID)) == (
            "length", num_images, 6 * num_images
        )  # fmt: skip


def test_a_history_with_images_is_not_rewritten(folder: Path) -> None:
    camera = Camera(ToolResponse(text="first"), ToolResponse(image=[png(WIDE)]), ToolResponse(text="third"))
    setup = setup_of(folder, camera, max_assistant_turns=4)
    setup.tokenizer.chat_template = setup.tokenizer.chat_template.replace(
        "{{- message['content'] -}}", "{{- message['content'].split('</think>')[-1] -}}"
    )
    setup._templates.clear()
    model = SeesImages([said(setup, f"<think>{n}</think>a<|im_end|>") for n in range(4)])
    sequences = play(
        prompt_of(setup.tokenizer), model, setup, sampling=sampling_of(setup.tokenizer, max_tokens=300)
    )
    # The first reply drops the thinking before it, and begins a sequence; from the image on nothing is rewritten.
    assert [one.stop_reason for one in sequences] == ["continued", "max_assistant_turns"]
    assert [len(one.media) for one in sequences] == [0, 1]
    check_images(sequences[1])
    assert [message["sequence"] for message in sequences[1].messages] == [0, 1, 1, 1, 1, 1, 1]


def test_positions_after_an_image_of_a_tool_by_hand(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])), max_assistant_turns=2)
    one, _ = episode(setup, "a", "b")
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    packed = pack(rows_of([one]), model)
    # Text counts up to the border before the image, at n. The image has time n + 1, height n + 1 and n + 2, width n + 1
    # to n + 3; what follows it goes on at n + 4. The last token of the response is no input.
    n = len(one.prompt_ids) + 3
    after = len(one.token_ids) - 1 - (n + 1) - 6
    tail = list(range(n + 4, n + 4 + after))
    text = list(range(n + 1))
    assert packed.position_ids[:, 0].tolist() == [
        text + [n + 1] * 6 + tail,
        text + [n + 1] * 3 + [n + 2] * 3 + tail,
        text + [n + 1, n + 2, n + 3] * 2 + tail,
    ]


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
def test_positions_are_the_models_own_also_where_samples_share_a_prompt(
    kind: str, models: Callable[[str], tuple[Path, CausalLM]]
) -> None:
    path, model = models(kind)
    camera = Camera(ToolResponse(image=[png(HIGH), png(WIDE)]), ToolResponse(text="none"))
    played_ones = played(model, prompts_of(path, ("a<image>b", [HIGH])), setup_of(path, camera), samples=3)
    check_exact(model, played_ones)
    trajectories = [  # which share no more than the prompt
        dataclasses.replace(one, response_ids=(40 + number, *one.response_ids[1:]))
        for number, one in enumerate(played_ones)
    ]
    assert len({one.media for one in trajectories}) > 1, "samples of the group carry different images"
    rows = rows_of(trajectories)
    packed = pack(rows, model)
    num_prompt, suffixes = (
        len(trajectories[0].prompt_ids),
        [len(one.response_ids) - 1 for one in trajectories],
    )
    assert packed.num_tokens == num_prompt + sum(suffixes), "the prompt stands there once"
    assert packed.media is not None
    assert len(packed.media["image_grid_thw"]) == 1 + sum(len(one.media) - 1 for one in trajectories)
    module: Any = model.module
    at = num_prompt
    for one, suffix in zip(trajectories, suffixes, strict=True):
        ids = torch.tensor([one.token_ids])
        expected, _ = module.base_model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == IMAGE_ID).int(),
            image_grid_thw=torch.tensor([medium.grid for medium in one.media]),
        )
        found = packed.position_ids[:, 0]
        torch.testing.assert_close(found[:, :num_prompt], expected[:, 0, :num_prompt])
        torch.testing.assert_close(found[:, at : at + suffix], expected[:, 0, num_prompt:-1])
        at += suffix


def test_another_image_in_the_result_makes_other_answers(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    setup = setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])), max_assistant_turns=2)
    one, _ = episode(setup, "a", "b")
    (medium,) = one.media
    swapped = dataclasses.replace(
        one, media=(dataclasses.replace(medium, parts=(png(GREENS),), key="other"),)
    )
    log_probs, _ = log_probs_of(model, rows_of([one, swapped]), temperature=1.0, max_tokens=10_000)
    first, second = log_probs.view(2, -1)
    before = medium.start - len(one.prompt_ids)
    torch.testing.assert_close(first[:before], second[:before])
    assert (first - second)[-2:].abs().min() > 1e-3


def test_token_ids_without_their_images_are_refused(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])), max_assistant_turns=2)
    one, _ = episode(setup, "a", "b")
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    with pytest.raises(ValueError, match="a sample has 6 tokens .* images, but its images take 12"):
        log_probs_of(
            model,
            make_rows(
                [torch.tensor(one.prompt_ids)], [torch.tensor(one.response_ids)], [(*one.media, one.media[0])]
            ),
            temperature=1.0,
            max_tokens=1000,
        )


def test_answers_that_stand_alone_keep_the_images_before_them(folder: Path) -> None:
    one, _ = episode(
        setup_of(folder, Camera(ToolResponse(image=[png(WIDE)])), max_assistant_turns=2), "a", "b"
    )
    first, second = with_turn_rewards([one], [1.0, 2.0], each_alone=True)
    assert (first.media, second.media) == ((), one.media)
    assert second.token_ids == one.token_ids
    assert list(second.response_ids) == list(one.response_ids)[-2:]


class CallsOnce(AlwaysCalls):
    """Calls in answers that begin with a."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text, calls = await super().extract_tool_calls(responses_ids, tools)
        return text, calls if text.startswith("a") else []


class Listener(BaseInteraction):
    """A user that ends the conversation when it is spoken to, and remembers it."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        self.heard = messages
        return True, "", 1.0, {}


def test_a_user_hears_that_a_tool_gave_an_image(folder: Path) -> None:
    setup = setup_of(folder, Camera(ToolResponse(text="see", image=[png(WIDE)])))
    tool_plugin(setup).parser = CallsOnce(setup.tokenizer)
    listener = Listener({"name": "listener"})
    setup.plugins["interactions"].interactions = {"listener": listener}
    one, model = episode(
        setup,
        "a",
        "b",
        agent_name="interaction_agent",
        extra_info={"interaction_kwargs": {"name": "listener"}},
    )
    assert [(message["role"], message["content"]) for message in listener.heard[2:]] == [
        ("tool", "[image]\nsee"), ("assistant", "b<|im_end|>")
    ]  # fmt: skip
    assert model.seen == [(), one.media]
    check_images(one)


class Sees(AgentLoopBase):
    """A loop of verl: shows the row's images, and after each answer another one."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        images = (await self.process_multi_modal_info(kwargs["raw_prompt"])).get("images", [])
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"], images=images)
        token_ids, mask = list(prompt_ids), []
        for image in (png(WIDE), picture(32, 16, RED), png(HIGH)):
            output = await self.server_manager.generate(
                "any", prompt_ids=token_ids, sampling_params=sampling_params, image_data=images
            )
            reply = {
                "role": "user",
                "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}],
            }
            added = await self.apply_chat_template([reply], images=[image], remove_system_prompt=True)
            token_ids += [*output.token_ids, *added]
            mask += [1] * len(output.token_ids) + [0] * len(added)
            images = [*images, image]
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=token_ids[len(prompt_ids) :], response_mask=mask
        )


@pytest.mark.parametrize("content", ["a<image>b", "plain"])
def test_a_loop_of_verl_shows_images(
    content: str, models: Callable[[str], tuple[Path, CausalLM]], registered: None
) -> None:
    path, model = models("qwen2_vl")
    agents["sees"] = Sees
    images = [GREENS] if "<image>" in content else []
    prompts = [dataclasses.replace(one, agent_name="sees") for one in prompts_of(path, (content, images))]
    trajectories = played(model, prompts, setup_of(path, Camera(ToolResponse(text="x"))), samples=2)
    for one in trajectories:
        assert one.prompt_ids == prompts[0].token_ids
        # The last image was never shown: the sequence ends before it, and nothing that was sampled is lost.
        assert [medium.size for medium in one.media] == [*[(24, 17)] * len(images), (24, 17), (32, 16)]
        check_images(one)
        assert [version for version in one.versions if version >= 0] == [0] * sum(one.sampled)
        turns = [
            1 for before, now in zip((False, *one.sampled), one.sampled, strict=False) if now and not before
        ]
        assert len(turns) == 3
    check_exact(model, trajectories)


@pytest.fixture
def registered() -> Iterator[None]:
    """The registry, as it was before at the end."""
    before = dict(agents)
    yield
    agents.clear()
    agents.update(before)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"image_data": []}, "request .* has 6 tokens that stand .* images take 0"),
        (
            {"image_data": [png(WIDE), png(WIDE)]},
            "6 token ids stand for parts of images, but 2 images take 12",
        ),
        ({"image_data": [b"x"]}, "cannot be read as a picture"),
        ({"image_data": [png(WIDE)], "video_data": [1]}, "agent loops cannot show videos to the model"),
    ],
)
def test_images_of_a_loop_that_do_not_fit_its_tokens_are_refused(
    given: dict[str, Any], match: str, models: Callable[[str], tuple[Path, CausalLM]], registered: None
) -> None:
    path, model = models("qwen2_vl")

    class Wrong(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> None:
            message = {"role": "user", "content": [{"type": "image"}]}
            ids = await self.apply_chat_template([message], images=[png(WIDE)])
            await self.server_manager.generate("any", prompt_ids=ids, **given)

    agents["sees"] = Wrong
    prompts = [dataclasses.replace(one, agent_name="sees") for one in prompts_of(path, ("plain", []))]
    with pytest.raises(ValueError, match=match):
        played(model, prompts, setup_of(path, Camera(ToolResponse(text="x"))))


@pytest.mark.parametrize(
    ("content", "given", "match"),
    [
        ([{"type": "audio"}], {}, "a conversation of an agent loop has sound in message 1"),
        ([{"type": "input_audio"}], {"token_ids": [1]}, "a turn of an agent loop has sound in message 1"),
        ("a", {"audios": [b"RIFF"]}, "agent loops cannot show audio to the model"),
    ],
)
def test_a_loop_cannot_show_sound(
    content: Any, given: dict[str, Any], match: str, folder: Path, registered: None
) -> None:
    class Hears(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> None:
            place = self.ct_merge_non_assistant_msg if "token_ids" in given else self.apply_chat_template
            await place(messages=[{"role": "user", "content": content}], **given)

    agents["hears"] = Hears
    with pytest.raises(ValueError, match=match):
        episode(setup_of(folder, Camera(ToolResponse(text="x"))), agent_name="hears")


def test_a_loop_with_a_model_of_text_cannot_show_images(folder: Path, registered: None) -> None:
    setup = setup_of(folder, Camera(ToolResponse(text="x")))
    setup.images = None
    agents["sees"] = Sees
    with pytest.raises(ValueError, match="the model takes text alone and cannot be shown images"):
        episode(setup, "a", agent_name="sees")
