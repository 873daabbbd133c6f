"""The measurements of commits, a line of benchmarks/history.jsonl each.

    python benchmarks/history.py add NAME [ARGUMENTS]   carry out benchmarks/NAME.py and record its JSON line
    python benchmarks/history.py show [NAME]            the lines, newest last

`make bench BENCH=NAME ARGS=... RECORD=1` does the first. A line has `commit`, `date`, `benchmark`, `arguments`,
`machine` (machine.py; with the load when the benchmark started) and `figures`, the benchmark's own. A tree with changes
that are not committed is refused, since no commit has what would be measured; history.jsonl itself may have changed.
Prints one JSON line, the record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ROOT / "benchmarks" / "history.jsonl"
LIKE = ("cpu", "features", "cores")
"""Facts of a machine in which machines that compare are equal, beside their torch."""


class HistoryError(ValueError):
    """A measurement that cannot be recorded, or a history that cannot be read."""


def main() -> None:
    """Add or show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="carry out a benchmark and record it")
    adding.add_argument("name", help="of a file in benchmarks, without .py")
    adding.add_argument("arguments", nargs=argparse.REMAINDER, help="for the benchmark")
    showing = commands.add_parser("show", help="print recorded lines")
    showing.add_argument("name", nargs="?", help="of a benchmark; default: all")
    options = parser.parse_args()
    try:
        if options.command == "add":
            print(json.dumps(add(options.name, options.arguments)))
        else:
            for line in read(HISTORY):
                if options.name in (None, line["benchmark"]):
                    print(json.dumps(line))
    except HistoryError as error:
        sys.exit(str(error))


def add(name: str, arguments: Sequence[str], *, root: Path = ROOT) -> dict[str, Any]:
    """Carry out a benchmark of a checkout, append its record to the history there, and return it.

    Raises:
        HistoryError: the tree has changes, or the benchmark fails or prints no JSON.
    """
    script = root / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise HistoryError(f"there is no benchmark {name!r}: {script} is missing")
    commit = clean_commit(root)
    where = machine()
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # the strop of this tree, whatever is installed
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=root, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode != 0:
        print(done.stdout, end="")  # what it measured before
        raise HistoryError(f"{script} ended with exit status {done.returncode}; nothing is recorded")
    if git(root, "rev-parse", "HEAD") != commit:  # files that the benchmark has written do not matter
        raise HistoryError(f"another commit than {commit[:12]} is checked out now; nothing is recorded")
    record = {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "benchmark": name,
        "arguments": list(arguments),
        "machine": where,
        "figures": figures(last_json(done.stdout), where),
    }
    with (root / "benchmarks" / HISTORY.name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def clean_commit(root: Path) -> str:
    """The commit that is checked out.

    Raises:
        HistoryError: a file differs from it, or is not in it and not ignored.
    """
    changed = [line for line in git(root, "status", "--porcelain").splitlines() if line[3:] != _path_of(root)]
    if changed:
        raise HistoryError(
            f"{root} has {len(changed)} changes that are not committed ({changed[0].strip()}, ...): commit them, and "
            f"measure again, since a line of the history names the commit that it measured"
        )
    return git(root, "rev-parse", "HEAD")


def _path_of(root: Path) -> str:
    """The history as `git status` names it."""
    return str((root / "benchmarks" / HISTORY.name).relative_to(root))


def git(root: Path, *words: str) -> str:
    """Output of a git command in a checkout.

    Raises:
        HistoryError: it fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HistoryError(f"git {' '.join(words)} failed in {root}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def last_json(output: str) -> dict[str, Any]:
    """The object in the last line.

    Raises:
        HistoryError: there is none.
    """
    lines = output.splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise HistoryError(
            f"the last line of a benchmark is one JSON object, but this one's is {lines[-1]!r:.200}"
        )
    return found


def figures(line: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a benchmark without its name and the facts of its machine, which the record has."""
    known = {"benchmark", "name", "machine", *where}
    return {key: value for key, value in line.items() if key not in known}


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of a history, which may not be there yet.

    Raises:
        HistoryError: a line is no record.
    """
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines() if file.is_file() else (), 1):
        try:
            line = json.loads(text)
            _ = line["commit"], line["benchmark"], line["machine"], line["figures"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise HistoryError(f"{file}, line {number} is no record of a measurement ({error!r})") from error
        yield line


def is_like(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Two machines whose figures compare: processor, cores and torch are the same."""
    same = all(one.get(fact) == other.get(fact) for fact in LIKE)
    return same and one.get("versions", {}).get("torch") == other.get("versions", {}).get("torch")


if __name__ == "__main__":
    main()
