"""The search tool over an index of its own, and the tool that runs programs."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import stat
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from agent_cases import make_session

from strop.agents.tools.python_sandbox import PythonSandboxTool, SandboxFailed
from strop.agents.tools.search import SearchTool
from strop.agents.tools.search_index import SearchIndex, build_index
from strop.cli.main import main
from strop.sandbox import Program, SandboxResult

PASSAGES = [
    {"id": "a", "contents": '"Heron"\nThe heron stands in shallow water and waits for fish.'},
    {"id": "b", "contents": '"Kettle"\nWater boils in a kettle. Water, then tea.'},
    {"id": "c", "contents": '"Razor"\nA razor is drawn along the strop.'},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES), encoding="utf-8")
    return path


def called(tool: Any, **arguments: Any) -> Any:
    async def run() -> Any:
        async with make_session({tool.name: tool}) as session:
            return await session.call(tool.name, arguments)

    return asyncio.run(run())


def test_the_command_builds_an_index_that_the_tool_reads(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "index.sqlite"
    assert main(["data", "index", str(corpus), "--out", str(index)]) == 0
    assert "3 passages" in capsys.readouterr().out
    index.chmod(stat.S_IRUSR)
    tool = SearchTool({"index": str(index), "topk": 1})
    result = called(tool, query_list=["who waits for fishes", "tea water", "nothing else"])
    assert result.text.split("\n---\n") == [
        "Doc 1 (Title: Heron)\nThe heron stands in shallow water and waits for fish.",
        "Doc 1 (Title: Kettle)\nWater boils in a kettle. Water, then tea.",
        "No passage found.",
    ]  # fmt: skip
    assert result.facts == {"num_passages": 2}
    assert called(tool, query="water", topk=5).facts == {"num_passages": 2}


def test_a_call_is_bounded_in_queries_and_passages(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(
        "".join(json.dumps({"text": f"heron {number}"}) + "\n" for number in range(60)), encoding="utf-8"
    )
    build_index(corpus, tmp_path / "many")
    tool = SearchTool({"index": str(tmp_path / "many")})
    assert called(tool, query="heron", topk=1000).facts == {"num_passages": 50}
    assert called(tool, query="heron", topk=0).facts == {"num_passages": 1}
    result = called(tool, query_list=["heron"] * 9)
    assert result.facts == {"num_passages": 8 * 3}


def test_passages_are_ranked_and_the_better_one_has_the_larger_score(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "i")
    kettle, heron = SearchIndex(tmp_path / "i").search("water", 3)
    assert (kettle.id, heron.id) == ("b", "a"), "twice in one of them"
    assert kettle.score > heron.score


def test_words_of_the_index_language_are_only_words(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "i")
    index = SearchIndex(tmp_path / "i")
    for query in (
        '"',
        "NEAR(",
        "title:razor AND",
        "a* OR -",
        "'; DROP TABLE passages; --",
        "\u0000",
        "x" * 100_000,
    ):
        index.search(query, 3)
    assert index.search("AND strop NOT", 3)[0].id == "c"
    assert index.search("?!", 3) == []


def test_a_parquet_corpus_is_indexed_at_first_use(tmp_path: Path) -> None:
    rows = [{"title": "T", "text": f"number {n}"} for n in range(25)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    tool = SearchTool({"index": str(tmp_path / "i"), "corpus": str(tmp_path / "c.parquet")})
    assert called(tool, query_list=["17"]).text == "Doc 1 (Title: T)\nnumber 17"
    assert called(tool, query_list=["number"]).facts == {"num_passages": 3}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "config has no index"),
        ({"index": "/no/such"}, "there is no search index /no/such; make it with"),
        ({"index": "{corpus}"}, "is no search index"),
        ({"index": "/no/such", "colour": 1}, "unknown key 'colour'"),
    ],
)
def test_mistakes_are_one_sentence(config: dict[str, Any], sentence: str, corpus: Path) -> None:
    given = {key: str(corpus) if value == "{corpus}" else value for key, value in config.items()}
    with pytest.raises(ValueError, match=sentence):
        SearchTool(given)


def test_an_empty_or_broken_corpus_leaves_no_index(tmp_path: Path) -> None:
    for text, sentence in {"": "has no passages", '{"a": 1}\n': "has no text", "no\n": "line 1 of"}.items():
        (tmp_path / "c.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
            build_index(tmp_path / "c.jsonl", tmp_path / "i")
        assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl"}


def test_two_workers_that_need_the_index_at_once_build_it_once(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "index.partial").write_bytes(b"of a build that was killed")
    (tmp_path / "index.partial-journal").write_bytes(b"and its journal")
    (tmp_path / "index.lock").touch()
    with corpus.open("a", encoding="utf-8") as file:  # enough for the builds to overlap
        file.writelines(json.dumps({"contents": f"passage {number}"}) + "\n" for number in range(5_000))
    processes = multiprocessing.get_context("fork")  # a fresh interpreter would take seconds to import
    both, titles = processes.Barrier(2), processes.Queue()

    def first_use() -> None:
        both.wait(30)
        tool = SearchTool({"index": str(tmp_path / "index"), "corpus": str(corpus)})
        titles.put(called(tool, query="kettle", topk=1).text.splitlines()[0])

    workers = [processes.Process(target=first_use) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [titles.get(timeout=60) for _ in workers] == ["Doc 1 (Title: Kettle)"] * 2
    for worker in workers:
        worker.join(60)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "index"}


def test_an_index_that_cannot_be_written_is_one_sentence(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the search index .*none/index cannot be made of .*No such file"):
        build_index(corpus, tmp_path / "none" / "index")
    with pytest.raises(ValueError, match=r"cannot be made of .*missing.jsonl: .*No such file"):
        build_index(tmp_path / "missing.jsonl", tmp_path / "index")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


def test_without_a_sandbox_no_program_runs() -> None:
    with pytest.raises(SandboxFailed, match="no sandbox for programs is set up"):
        called(PythonSandboxTool({}), code="print(1)")


def test_what_a_program_prints_is_shown_and_a_failing_sandbox_is_an_error() -> None:
    asked: list[str] = []

    class Scripted:
        async def run(self, program: Program) -> SandboxResult:
            asked.append(program.code)
            if "crash" in program.code:
                return SandboxResult(outcome="infrastructure", error="no room")
            if "loop" in program.code:
                return SandboxResult(outcome="timeout", stdout=b"begun\n", error="it ran longer than 10 s")
            return SandboxResult(outcome="ok", stdout=b"3\n", stderr=b"\xff")

    tool = PythonSandboxTool({})
    tool.sandbox = Scripted()  # type: ignore[assignment]
    assert called(tool, code="```python\nprint(3)\n```").text == "3\n\ufffd"
    assert asked == ["print(3)"]
    assert called(tool, code="loop").text == "begun\nError: it ran longer than 10 s"
    with pytest.raises(SandboxFailed, match="no room"):  # no text for the model, which did nothing wrong
        called(tool, code="crash")
    assert "'code' must be string, but is 3" in called(tool, code=3).text
