"""The pages of the documentation as blocks, and a session that does what a page says.

A comment on the line before a fenced block says what it is for; readers do not see it:

    <!-- file: NAME -->        the block is the content of that file
    <!-- not run: REASON -->   the block is not carried out
    <!-- slow: REASON -->      it is carried out only in the tests marked slow
    <!-- exit code N -->       the commands of the block end with this code; without it, with 0
    <!-- output -->            each line stands in the output of the last commands; … is any text

Every other bash block is carried out in the order of the page, and so is every python block.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fork_server import run_program

import strop
from strop.algorithms.losses.policy import STATISTIC
from strop.cli.main import main
from strop.utils.metrics import METRICS, Metric
from strop.workers.metrics import AGENT_NUMBER

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = {".venv", "runs", "build", "node_modules"}

_COMMENT = re.compile(r"<!--\s*(?P<name>file|not run|slow|exit code|output)\b:?\s*(?P<value>.*?)\s*-->")
_SHELL_WORDS = {"|", "||", "&&", ";", "<", ">", ">>", "&"}
_COMMAND_TIMEOUT_S = 900
_PROGRAM_TIMEOUT_S = 240
"""Of a program of Python; below the limit of a test, so that a program that hangs says where it does."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    where: str
    """`docs/own-task.md:40`."""
    language: str
    text: str
    notes: dict[str, str]
    """The comments before it."""

    @property
    def commands(self) -> list[str]:
        """The command lines of a bash block, continued lines joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def markdown_files() -> list[Path]:
    """All pages of the repository."""
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(".md")]
    return sorted(found)


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    language, start, lines = "", 0, None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if lines is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number, []
        elif line.startswith("```") and lines is not None:
            where = f"{path.relative_to(ROOT)}:{start}"
            found.append(Block(where=where, language=language, text="\n".join(lines) + "\n", notes=notes))
            notes, lines = {}, None
        elif lines is not None:
            lines.append(line)
        elif match := _COMMENT.fullmatch(line.strip()):
            notes[match["name"]] = match["value"]
        elif line.strip():
            notes = {}
    assert lines is None, f"{path} has a block that does not end"
    return found


def prose(path: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def code_spans(path: Path) -> list[str]:
    """What stands between backticks in the text of a page."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(path))]


def strop_calls(path: Path) -> Iterator[list[str]]:
    """The words after `strop` of every call that a page shows."""
    lines = [line for block in blocks(path) if block.language == "bash" for line in block.commands]
    lines += [span for span in code_spans(path) if span.startswith("strop ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        while "strop" in words:
            words = words[words.index("strop") + 1 :]
            end = next((i for i, word in enumerate(words) if word in _SHELL_WORDS), len(words))
            if words[:end]:
                yield words[:end]


@dataclass(kw_only=True)
class Session:
    """Somebody who follows pages in one folder."""

    folder: Path
    is_patient: bool = False
    """Also carry out what is marked slow."""
    is_forked: bool = True
    """Programs of Python are forks of one that has imported strop; else they are processes as a user's."""
    output: str = ""
    """Of the last bash block."""
    transcript: list[str] = field(default_factory=list)
    """All output so far."""

    def follow(self, path: Path) -> int:
        """Do what a page says, and compare what it shows; how many blocks of commands and programs were run."""
        has_run, count = False, 0
        for block in blocks(path):
            if "not run" in block.notes or ("slow" in block.notes and not self.is_patient):
                has_run = False
            elif "file" in block.notes:
                file = self.folder / block.notes["file"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
            elif block.language == "bash":
                self._run(block)
                has_run, count = True, count + 1
            elif block.language == "python":
                with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(block.text, block.where, "exec"), {"__name__": "page"})
                count += 1
            elif "output" in block.notes and has_run:
                self._compare(block)
        return count

    def _run(self, block: Block) -> None:
        wanted = int(block.notes.get("exit code", 0))
        parts = []
        for command in block.commands:
            code, text = self._command(command)
            parts.append(text)
            assert code == wanted, f"{block.where}: {command!r} ended with {code}, not {wanted}:\n{text}"
        self.output = "".join(parts)
        self.transcript.append(self.output)

    def _command(self, line: str) -> tuple[int, str]:
        """Carry out one line: in this process when it is a plain call of strop, and in a fork when it is one of Python,
        which saves what they import."""
        words = shlex.split(line, comments=True)
        is_plain = not _SHELL_WORDS & set(words)
        if words[0] == "python" and is_plain and self.is_forked:
            program = run_program(words[1:], cwd=self.folder, timeout_s=_PROGRAM_TIMEOUT_S)
            return program.returncode, program.stdout + program.stderr
        if words[0] != "strop" or not is_plain:
            programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-c", line], cwd=self.folder, env={**os.environ, "PATH": programs}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=_COMMAND_TIMEOUT_S, check=False,
            )  # fmt: skip
            return done.returncode, done.stdout
        text = io.StringIO()
        streams = contextlib.redirect_stdout(text), contextlib.redirect_stderr(text)
        with streams[0], streams[1], contextlib.chdir(self.folder):
            code = main(words[1:])
        return code, text.getvalue()

    def _compare(self, block: Block) -> None:
        shown = [line for line in block.text.splitlines() if line.strip()]
        for line in shown:
            assert matches(line, self.output), (
                f"{block.where} shows {line!r}, but the output is\n{self.output}"
            )


def matches(shown: str, text: str) -> bool:
    """Whether a shown line, in which … is any text, stands in a line of the text."""
    return any(_stand_in_order(shown.split("…"), line) for line in text.splitlines())


def _stand_in_order(parts: list[str], line: str) -> bool:
    place = 0
    for part in parts:
        found = line.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


@cache
def entry_point_groups() -> frozenset[str]:
    """Groups of entry points in which registries look for parts of installed packages."""
    sources = (path.read_text(encoding="utf-8") for path in Path(strop.__file__).parent.rglob("*.py"))
    return frozenset(group for source in sources for group in re.findall(r'group="(strop\.\w+)"', source))


@cache
def declared_metrics() -> Mapping[str, Metric]:
    """All metrics, by name: of every module that declares some, whatever else has been imported."""
    package = Path(strop.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if re.search(r"^\w+ = Metric\(", path.read_text(), re.MULTILINE):
            parts = path.relative_to(package.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    return METRICS


@cache
def metric_patterns() -> tuple[re.Pattern[str], ...]:
    """The declared metrics as regular expressions, without those that take any name."""
    patterns = []
    for name in declared_metrics().keys() - {AGENT_NUMBER, STATISTIC}:
        text = re.sub(r"\\\{(.*?)\\\}", lambda match: f"({match[1].replace(',', '|')})", re.escape(name))
        text = re.sub(r"<(?:data\\ source|statistic|what)>", ".+", text)
        patterns.append(re.compile(re.sub(r"<[^>]*>", "[^/]+", text)))
    return tuple(patterns)


def is_declared(metric: str) -> bool:
    """Whether a metric, or a family of them, has this name."""
    return any(pattern.fullmatch(metric) for pattern in metric_patterns())
