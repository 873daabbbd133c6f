"""Rows with sound are refused by name, in whatever form they come."""

from __future__ import annotations

from typing import Any

import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset
from strop.data.file_check import examine
from strop.data.sft.config import SftDataConfig
from strop.data.sft.dataset import SftDataset

HEARD = {"array": [0.0, 0.1], "sampling_rate": 16000}
PARTS = [
    {"type": "audio", "audio": "a.wav"},
    {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "https://a.b/c.wav"}},
]


def row(content: Any, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Listen."}, {"role": "user", "content": content}]
    return {"data_source": "strop/exact", "prompt": prompt, "answer": "x", **columns}


ROWS = [
    *[(row("a", **{name: [HEARD]}), f"has sound in column '{name}'") for name in ("audio", "audios")],
    (row("a", audio=HEARD), "has sound in column 'audio'"),
    *[
        (row([{"type": "text", "text": "a"}, part]), f"has sound in message 2 (a part '{part['type']}')")
        for part in PARTS
    ],
]
RULES = DataConfig(ground_truth_key="answer")


@pytest.mark.parametrize(("source", "sentence"), ROWS)
def test_prompts_with_sound_are_refused_by_row(source: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="which no model is given here: use rows with text") as caught:
        PromptDataset([row("b"), source], make_tokenizer(CHATML), RULES, "train")
    assert str(caught.value).startswith(f"train row 1 {sentence}")


@pytest.mark.parametrize(("source", "sentence"), ROWS)
def test_conversations_with_sound_are_refused_by_row(source: dict[str, Any], sentence: str) -> None:
    answer = {"role": "assistant", "content": "x"}
    conversation = {**source, "messages": [*source["prompt"], answer]}
    with pytest.raises(ValueError, match="train row 0 has .*(sound|audios)"):
        SftDataset([conversation], make_tokenizer(CHATML), SftDataConfig())


def test_a_check_of_data_names_the_rows_with_sound() -> None:
    sources = [row("a"), *[source for source, _ in ROWS]]
    report = examine(sources, make_tokenizer(CHATML), RULES)
    assert [line.split(" has sound")[0] for line in report.malformed] == [
        f"row {number + 1}" for number in range(len(report.malformed))
    ]
    assert report.num_malformed == len(ROWS)


def test_empty_columns_and_the_word_audio_are_no_sound() -> None:
    source = row("a <audio> is a word", audio=None, audios=[])
    prompt = PromptDataset([source], make_tokenizer(CHATML), RULES, "train").prompt(0, "e0-000000")
    assert not prompt.media
    assert "audio" not in prompt.columns
