"""docs/concepts.md: its table of columns is that of the program."""

from __future__ import annotations

import re
from typing import get_args

from doc_pages import ROOT

from strop.protocol.schema import COLUMNS, STAGES, ColumnStage

PAGE = ROOT / "docs" / "concepts.md"


def test_the_table_of_columns_is_that_of_the_program() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("| stage | who works | columns |")[2].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines[: lines.index("")]]
    told = {row[0].strip(" `"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    assert told == {
        maker: {name for name, column in COLUMNS.items() if column.made_by == maker}
        for maker in get_args(ColumnStage)
    }
    assert list(told) == list(get_args(ColumnStage))


def test_the_page_names_every_stage_of_the_hash_chain() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("The **fingerprints** are")[2].partition(").")[0]
    told = set(re.findall(r"\w+", text))
    assert {"data", *STAGES, "loss", "weights", "critic_weights"} <= told
