"""Mutation testing of the formulas: which small mistakes in them, and in their checks, would the tests not see?

    python tests/mutation/run.py                          its FORMULAS; continues where it stopped
    python tests/mutation/run.py --module algorithms.losses --sample 100 --seed 1
    python tests/mutation/run.py --report                 what the session holds, without a run

The last line of the output is a JSON object: `score` is the share of mutants that a test saw, in percent, of those
that change what the code does (`raw_score`: of all). equivalent.txt names the others, each with its reason.

A copy of the package and its tests is what runs, so work in the checkout may go on. Each mutant runs only the tests
that execute its lines, cheapest first, until one fails (server.py). Results are appended to
build/mutation/session.jsonl; one counts again as long as its module (and, for a survivor, the tests) are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants import Mutant, module_name, mutants_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / "mutation"
TREE = WORK / "tree"
SESSION = WORK / "session.jsonl"
EQUIVALENT = HERE / "equivalent.txt"
FORMULAS = (
    "algorithms/**/*.py", "engines/parallel/balance.py", "run/samples/selection.py",
)  # fmt: skip
TESTS = (
    "tests/algorithms", "tests/workers/test_metrics.py",
    "tests/workers/test_batch_estimates.py", "tests/workers/test_answer_columns.py",
    "tests/workers/test_chosen_samples.py", "tests/evaluation/test_votes.py",
    "tests/evaluation/test_votes_boundaries.py",
)  # fmt: skip
"""Unit tests of the formulas; no training run takes part."""
FIRST_BATCH_S = 3.0
"""Seconds of tests that a change at import meets first, before those that are left are collected."""
OUTCOMES = ("killed", "timeout", "survived")

Result = dict[str, Any]


class Server:
    """A process of server.py, and the pipes to it."""

    def __init__(self, kind: str) -> None:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, HERE / "server.py", kind, str(to_read), str(from_write), *TESTS],
            cwd=TREE,
            env=environment(),
            pass_fds=(to_read, from_write),
        )
        os.close(to_read)
        os.close(from_write)
        self._write = os.fdopen(to_write, "w", encoding="utf-8")
        self._read = os.fdopen(from_read, encoding="utf-8")
        self._answer()

    def run(self, mutant: Mutant, source: str, tests: Sequence[tuple[str, float]]) -> Result:
        names = {"module": mutant.module, "function": mutant.function, "is_default": mutant.is_default}
        request = {**names, "source": source, "tests": tests}
        self._write.write(json.dumps(request) + "\n")
        self._write.flush()
        return self._answer()

    def close(self) -> None:
        self._write.close()
        self._process.wait()

    def _answer(self) -> Result:
        line = self._read.readline()
        if not line:
            raise RuntimeError(
                "the server of tests ended; run tests/mutation/server.py's tests with pytest first"
            )
        return dict(json.loads(line))


class TestChoice:
    """Which tests a mutant gets, in which order."""

    def __init__(self, facts: dict[str, Any], budget: float) -> None:
        self.budget = budget
        self.lines: dict[str, dict[str, list[str]]] = facts["lines"]
        self.seconds: dict[str, float] = {
            test: seconds for test, seconds in facts["seconds"].items() if test not in set(facts["failed"])
        }
        executing = {test for lines in self.lines.values() for tests in lines.values() for test in tests}
        self._without_lines = self.seconds.keys() - executing
        self._num_lines: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for module, lines in self.lines.items():
            for tests in lines.values():
                for test in tests:
                    self._num_lines[test][module] += 1
        self._kills: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def of_lines(self, mutant: Mutant) -> list[tuple[str, float]]:
        """Tests that execute a line of the mutant."""
        lines = self.lines.get(mutant.module, {})
        return self._ordered(mutant, {test for line in mutant.lines for test in lines.get(str(line), ())})

    def of_module(self, mutant: Mutant) -> list[tuple[str, float]]:
        """Tests of every file that has one which executes anything of the module, as what is declared at import may be
        seen without; and tests that execute nothing, as they look at declarations. All tests, where the module has
        nothing else."""
        found = {test for tests in self.lines.get(mutant.module, {}).values() for test in tests} - {
            "(import)"
        }
        if not found:  # nothing but declarations, which any test may use
            return self._ordered(mutant, self.seconds)
        files = {test.partition("::")[0] for test in found}
        beside = {test for test in self.seconds if test.partition("::")[0] in files}
        return self._ordered(mutant, found | beside | self._without_lines)

    def runs_at_import(self, mutant: Mutant) -> bool:
        lines = self.lines.get(mutant.module, {})
        return any("(import)" in lines.get(str(line), ()) for line in mutant.lines)

    def note(self, mutant: Mutant, test: str | None) -> None:
        if test:
            self._kills[mutant.module, mutant.function][test] += 1

    def _ordered(self, mutant: Mutant, tests: Iterable[str]) -> list[tuple[str, float]]:
        """Those that saw a change of this function, then the cheapest; half of the budget is for the tests that run
        the least of other modules, as they ask the most of this one."""
        kills = self._kills[mutant.module, mutant.function]
        known = [test for test in tests if test in self.seconds]
        by_focus = sorted(
            known, key=lambda test: (self._elsewhere(test, mutant.module), self.seconds[test], test)
        )
        by_price = sorted(known, key=lambda test: (self.seconds[test], test))
        chosen = set(self._affordable(by_focus, self.budget / 2))
        chosen.update(self._affordable(by_price, self.budget / 2))
        order = sorted(chosen, key=lambda test: (not kills[test], self.seconds[test], test))
        return [(test, self.seconds[test]) for test in order]

    def _elsewhere(self, test: str, module: str) -> int:
        """Lines of other modules that a test runs."""
        lines = self._num_lines[test]
        return lines.total() - lines[module]

    def _affordable(self, tests: Sequence[str], budget: float) -> Iterator[str]:
        spent = 0.0
        for number, test in enumerate(tests):
            spent += self.seconds[test]
            if not number or spent <= budget:
                yield test


class Runner:
    """The two servers, started when they are first needed."""

    def __init__(self, choice: TestChoice) -> None:
        self.choice = choice
        self._servers: dict[str, Server] = {}

    def run(self, mutant: Mutant, source: str) -> Result:
        """Outcome of one mutant, the test that saw it, and the seconds it took."""
        start = time.monotonic()
        result: Result = {"outcome": "survived", "test": None}
        if mutant.is_default:
            result = self._server("warm", mutant).run(mutant, source, self.choice.of_module(mutant))
        if (mutant.runs_at_import and not mutant.is_default) or result["outcome"] == "unpatched":
            result = self._cold(mutant, source)
        elif not mutant.is_default:
            tests = self.choice.of_lines(mutant)
            if tests:
                result = self._server("warm", mutant).run(mutant, source, tests)
            if result["outcome"] == "unpatched" or (
                result["outcome"] == "survived" and self.choice.runs_at_import(mutant)
            ):
                result = self._cold(mutant, source)
        self.choice.note(mutant, result["test"])
        return result | {"seconds": round(time.monotonic() - start, 3)}

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _cold(self, mutant: Mutant, source: str) -> Result:
        tests = self.choice.of_module(mutant)
        first = 0
        spent = 0.0
        while first < len(tests) and (not first or spent < FIRST_BATCH_S):
            spent += tests[first][1]
            first += 1
        for batch in (tests[:first], tests[first:]):
            if batch:
                result = self._server("cold", mutant).run(mutant, source, batch)
                if result["outcome"] != "survived":
                    return result
        return {"outcome": "survived", "test": None}

    def _server(self, kind: str, mutant: Mutant) -> Server:
        """The server, which has shown with the first mutant's module that code without a change survives."""
        if kind not in self._servers:
            self._servers[kind] = Server(kind)
            path = TREE / "strop" / Path(*mutant.module.split(".")).with_suffix(".py")
            unchanged = path.read_text(encoding="utf-8")
            result = self._servers[kind].run(mutant, unchanged, self.choice.of_module(mutant))
            if result["outcome"] not in ("survived", "unpatched"):
                raise RuntimeError(f"{result['test']} fails without a mutant on the {kind} server")
        return self._servers[kind]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def module_paths() -> dict[str, Path]:
    """Files of the packages in the copy, by dotted name below strop."""
    package = TREE / "strop"
    paths = sorted(path for name in FORMULAS for path in package.glob(name))
    return {module_name(path, package): path for path in paths}


def copy_tree() -> None:
    """The package and the tests as they are now, away from work that goes on."""
    shutil.rmtree(TREE, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("strop", "tests"):
        shutil.copytree(ROOT / name, TREE / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", TREE)


def coverage_facts(chosen: Iterable[str]) -> dict[str, Any]:
    """Durations, failures and lines of all tests: what coverage_map.py finds, per file of tests.

    A file is recorded again when it or one of the `chosen` modules has changed.
    """
    files = [path for name in TESTS for path in _files(TREE / name) if path.name.startswith("test_")]
    digests = {module: digest([path]) for module, path in module_paths().items()}
    maps = {str(path.relative_to(TREE)): WORK / f"map-{digest([path])}.json" for path in files}
    parts = {file: json.loads(kept.read_text()) if kept.exists() else {} for file, kept in maps.items()}
    missing = [
        file
        for file, part in parts.items()
        if any(part.get("modules", {}).get(module) != digests[module] for module in chosen)
    ]
    if missing:
        print(f"recording which test runs which line, of {len(missing)} files of tests", flush=True)
        out = WORK / "map.json"
        command = [sys.executable, HERE / "coverage_map.py", out, *missing]
        subprocess.run(command, cwd=TREE, env=environment(), check=True, stdout=subprocess.DEVNULL)
        recorded = json.loads(out.read_text(encoding="utf-8"))
        for file in missing:
            parts[file] = _of_file(recorded, file) | {"modules": digests}
            maps[file].write_text(json.dumps(parts[file]), encoding="utf-8")
    facts: dict[str, Any] = {"seconds": {}, "failed": [], "lines": {}}
    for part in parts.values():
        facts["seconds"] |= part["seconds"]
        facts["failed"] += part["failed"]
        for module, lines in part["lines"].items():
            merged = facts["lines"].setdefault(module, {})
            for line, tests in lines.items():
                merged[line] = sorted({*merged.get(line, ()), *tests})
    if facts["failed"]:
        print(f"left out, because they fail without a mutant: {', '.join(facts['failed'])}", flush=True)
    return facts


def _of_file(recorded: dict[str, Any], file: str) -> dict[str, Any]:
    def is_here(test: str) -> bool:
        return test == "(import)" or test.partition("::")[0] == file

    return {
        "seconds": {test: seconds for test, seconds in recorded["seconds"].items() if is_here(test)},
        "failed": [test for test in recorded["failed"] if is_here(test)],
        "lines": {
            module: {line: [test for test in tests if is_here(test)] for line, tests in lines.items()}
            for module, lines in recorded["lines"].items()
        },
    }


def listed_mutants(path: Path) -> list[tuple[Mutant, str]]:
    """The mutants of a file, from a cache while the file and the operators are the same."""
    package = TREE / "strop"
    made_of = digest([path, HERE / "operators.py", HERE / "mutants.py"])
    cache = WORK / f"mutants-{module_name(path, package)}-{made_of}.jsonl"
    if not cache.exists():
        lines = [
            json.dumps([vars(mutant) | {"lines": [mutant.lines.start, mutant.lines.stop]}, source])
            for mutant, source in mutants_of(path, package)
        ]
        cache.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = []
    for line in cache.read_text(encoding="utf-8").splitlines():
        fields, source = json.loads(line)
        found.append((Mutant(**fields | {"lines": range(*fields["lines"])}), source))
    return found


def equivalents() -> dict[str, str]:
    """Reason of each key of equivalent.txt: keys on lines of their own, the reason indented below them."""
    reasons: dict[str, str] = {}
    keys: list[str] = []
    reason = ""
    for line in [*EQUIVALENT.read_text(encoding="utf-8").splitlines(), "(end)"]:
        if line.startswith(" "):
            reason = f"{reason} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            if reason:
                reasons |= dict.fromkeys(keys, reason)
                keys, reason = [], ""
            keys.append(line.strip())
    return reasons


def earlier_results(digests: dict[str, str], tests: str) -> dict[str, Result]:
    """Results of the session that still hold, by key."""
    results: dict[str, Result] = {}
    if SESSION.exists():
        for line in SESSION.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            module = result["key"].partition("::")[0]
            if result["digest"] == digests.get(module) and (
                result["outcome"] != "survived" or result["tests"] == tests
            ):
                results[result["key"]] = result
    return results


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts and scores; a mutant that was killed is never counted as equivalent."""
    reasons = equivalents()
    per_module: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        outcome = result["outcome"]
        if outcome == "survived" and result["key"] in reasons:
            outcome = "equivalent"
        per_module[result["key"].partition("::")[0]][outcome] += 1
    total: Counter[str] = Counter()
    for counts in per_module.values():
        total.update(counts)
    seconds = round(sum(result["seconds"] for result in results), 1)
    return {
        **scores(total),
        "seconds": seconds,
        "per_module": {module: scores(counts) for module, counts in sorted(per_module.items())},
    }


def scores(counts: Counter[str]) -> dict[str, float]:
    total = sum(counts.values())
    seen = counts["killed"] + counts["timeout"]
    return {
        "score": round(100 * seen / max(1, total - counts["equivalent"]), 2),
        "raw_score": round(100 * seen / max(1, total), 2),
        **{outcome: counts[outcome] for outcome in (*OUTCOMES, "equivalent")},
        "total": total,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    if not (options.report and TREE.exists()):
        copy_tree()
    paths = module_paths()
    chosen = [
        module
        for name in options.module or [""]
        for module in paths
        if not name or module == name or module.startswith(f"{name}.")
    ]
    digests = {module: digest([paths[module]]) for module in chosen}
    tests = digest(path for name in TESTS for path in _files(TREE / name))
    mutants = [pair for module in dict.fromkeys(chosen) for pair in listed_mutants(paths[module])]
    known = {mutant.key for mutant, _ in mutants}
    for key in equivalents():
        if key.partition("::")[0] in digests and key not in known:
            print(f"out of date, there is no such mutant: {key}")
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    results = {} if options.fresh else earlier_results(digests, tests)
    if not options.report:
        todo = [(mutant, source) for mutant, source in mutants if mutant.key not in results]
        # In any order, so that what an interrupted run has done is a fair sample; but last those that are known to cost
        # every test that there is.
        explained = equivalents()
        random.Random(options.seed).shuffle(todo)
        todo.sort(key=lambda pair: pair[0].key in explained)
        print(f"{len(mutants)} mutants, {len(todo)} of them to run", flush=True)
        run_all(todo, results, digests, tests, options.budget)
    held = [results[mutant.key] for mutant, _ in mutants if mutant.key in results]
    reasons = equivalents()
    for result in held:
        if result["outcome"] == "survived" and result["key"] not in reasons:
            print(f"survived: {result['key']}")
        elif result["outcome"] != "survived" and result["key"] in reasons:
            print(f"not equivalent, {result['test']} sees it: {result['key']}")
    print(json.dumps(summary(held) | {"not_run": len(mutants) - len(held)}))
    return 0


def run_all(
    todo: Sequence[tuple[Mutant, str]],
    results: dict[str, Result],
    digests: dict[str, str],
    tests: str,
    budget: float,
) -> None:
    if not todo:
        return
    runner = Runner(TestChoice(coverage_facts({mutant.module for mutant, _ in todo}), budget))
    with SESSION.open("a", encoding="utf-8") as session:
        for number, (mutant, source) in enumerate(todo, start=1):
            result = runner.run(mutant, source)
            result |= {"key": mutant.key, "digest": digests[mutant.module], "tests": tests}
            results[mutant.key] = result
            session.write(json.dumps(result) + "\n")
            session.flush()
            if result["outcome"] == "survived" or number % 100 == 0:
                print(f"{number}/{len(todo)} {result['outcome']}: {mutant.key}", flush=True)
    runner.close()


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mutation testing of the formulas.")
    parser.add_argument(
        "--module", action="append", help="only this module, or those of this package; repeatable"
    )
    parser.add_argument("--sample", type=int, help="only so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of tests per mutant, by their usual durations"
    )
    parser.add_argument("--fresh", action="store_true", help="run again what an earlier session ran")
    parser.add_argument("--report", action="store_true", help="only report what the session holds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
