"""docs/multimodal.md: its commands work with a tiny vision-language model and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doc_pages import ROOT, Session

from references.tiny_vision import save_tiny_vision

PAGE = ROOT / "docs" / "multimodal.md"


def test_the_page_about_images(tmp_path: Path) -> None:
    save_tiny_vision("qwen2_5_vl", tmp_path / "models" / "vl")
    assert Session(folder=tmp_path).follow(PAGE) == 4


@pytest.mark.slow
def test_the_training_on_the_page_about_images(tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    save_tiny_vision("qwen2_5_vl", tmp_path / "models" / "vl")
    assert Session(folder=tmp_path, is_patient=True).follow(PAGE) == 5
    assert (tmp_path / "runs" / "colours" / "model" / "preprocessor_config.json").is_file()
    torch.set_num_threads(num_threads)
