"""Well-known data sets, from their raw rows to verl's schema.

A raw row is one of the data set as its authors publish it; COMPAT 3.1 describes the result. Answers are
found in the text by searching and counting braces; nothing is evaluated.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from strop.data.rows import columns_of

_GSM8K_TOOL = "calc_gsm8k_reward"
_TOOL_AGENT = "tool_agent"
_LINE_OF_ANSWER = "Think step by step. End with a line that reads Answer: and then the final answer."

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """One raw row."""

    values: Mapping[str, Any]
    index: int
    split: str
    with_tool: bool

    def text(self, *names: str) -> str:
        """The first of these columns that holds a text.

        Raises:
            ValueError: none does.
        """
        for name in names:
            if isinstance(self.values.get(name), str) and self.values[name].strip():
                return str(self.values[name]).strip()
        raise ValueError(
            f"raw row {self.index} has no text in {' or '.join(map(repr, names))}; columns found: "
            f"{', '.join(self.values)}. Is this the raw data set?"
        )

    def row(self, source: str, prompt: str, truth: object, ability: str, **extra_info: Any) -> Row:
        """The row of verl's schema."""
        return {
            "data_source": source,
            "prompt": [{"role": "user", "content": prompt}],
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": self.split, "index": self.index, **extra_info},
        }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Conversion of the raw rows of a data set."""

    convert: Callable[[Raw], Row]
    source: str
    """Published raw rows, as an entry of data.train_files."""
    is_repeated: bool = False
    """The raw set repeats its prompts; each is kept once."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The rows of a data set."""

    rows: list[Row]
    num_repeated: int
    """Raw rows left out because an earlier one has the same prompt."""


def prepare_rows(
    name: str, raw_rows: Sequence[Mapping[str, Any]], *, split: str, with_tool: bool = False
) -> Prepared:
    """Rows of verl's schema from the raw rows of a known data set.

    Args:
        name: one of RECIPES.
        raw_rows: from `read_rows`.
        split: goes to extra_info.
        with_tool: gsm8k only: each row names the tool that checks an answer and gives it the right one.

    Raises:
        ValueError: the name is unknown, has no form with a tool, or a raw row is not as published.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe for {name!r}; known: {', '.join(RECIPES)}")
    if with_tool and name != "gsm8k":
        raise ValueError(f"{name} has no form with a tool; only gsm8k has")
    recipe = RECIPES[name]
    rows: list[Row] = []
    seen: set[str] = set()
    for index, values in enumerate(raw_rows):
        row = recipe.convert(Raw(values=values, index=index, split=split, with_tool=with_tool))
        identity = json.dumps(row["prompt"], default=repr)
        if recipe.is_repeated and identity in seen:
            continue
        seen.add(identity)
        rows.append(row)
    return Prepared(rows=rows, num_repeated=len(raw_rows) - len(rows))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a .parquet or .jsonl file in one step.

    Raises:
        ValueError: another suffix, or rows with images as .jsonl.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"cannot write {path}: the name must end in .parquet or .jsonl")
    if path.suffix == ".jsonl" and any("images" in row for row in rows):
        raise ValueError(f"cannot write {path}: rows with images need parquet; use the suffix .parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.parent) as folder:
        staging = Path(folder) / path.name
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns_of(rows)), staging)
        else:
            staging.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        staging.replace(path)


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} or \\fbox{...}; None without one."""
    boxes = {opening.end() for opening in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for piece in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # \{ is no brace of a group
        if piece[0] == "{":
            opened.append(piece.end())
        elif piece[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and (last is None or start > last[0]):
                last = start, piece.start()
    return None if last is None else text[last[0] : last[1]].strip()


def _gsm8k(raw: Raw) -> Row:
    question, solution = raw.text("question"), raw.text("answer")
    _, mark, after = solution.rpartition("####")
    truth = re.sub(r"[\s,$]", "", after)
    if not mark or re.fullmatch(r"-?\d+(\.\d+)?", truth) is None:
        raise ValueError(
            f"raw row {raw.index} ends in {solution[-40:]!r}, but solutions of GSM8K end in '#### NUMBER'"
        )
    prompt = f"{question}\n\nThink step by step, then write the final number on a line of its own after ####."
    row = raw.row("openai/gsm8k", prompt, truth, "math", question=question, answer=solution)
    if raw.with_tool:
        prompt = (
            f"{question}\n\nThink step by step. Check your answer with the tool {_GSM8K_TOOL} before you give it, "
            f"and correct it if the tool says it is wrong. Then write the final number on a line of its own after "
            f"####."
        )
        row["prompt"] = [{"role": "user", "content": prompt}]
        row["agent_name"] = _TOOL_AGENT
        row["extra_info"] |= {
            "need_tools_kwargs": True,
            "tools_kwargs": {_GSM8K_TOOL: {"create_kwargs": {"ground_truth": truth}}},
        }
    return row


def _math(raw: Raw) -> Row:
    problem, solution = raw.text("problem"), raw.text("solution")
    truth = last_boxed(solution)
    if truth is None:
        raise ValueError(
            f"raw row {raw.index} has no \\boxed{{...}} in its solution, where the answer should stand"
        )
    prompt = f"{problem}\n\nThink step by step, then put the final answer in \\boxed{{}}."
    more = {key: str(raw.values[key]) for key in ("level", "type", "subject") if raw.values.get(key)}
    return raw.row("DigitalLearningGmbH/MATH-lighteval", prompt, truth, "math", **more)


def _math500(raw: Raw) -> Row:
    problem, truth = raw.text("problem"), raw.text("answer")
    prompt = f"{problem}\n\nThink step by step, then put the final answer in \\boxed{{}}."
    more = {key: str(raw.values[key]) for key in ("subject", "level", "unique_id") if raw.values.get(key)}
    return raw.row("HuggingFaceH4/MATH-500", prompt, truth, "math", **more)


def _aime(year: str) -> Callable[[Raw], Row]:
    def convert(raw: Raw) -> Row:
        problem, answer = raw.text("problem", "Problem", "question"), None
        for name in ("answer", "Answer"):
            answer = raw.values.get(name) if answer is None else answer
        number = re.fullmatch(r"(\d{1,3})(\^\\circ|°)?", str(answer).strip())
        if number is None:
            raise ValueError(
                f"raw row {raw.index} has the answer {answer!r}, but those of AIME are whole numbers from 0 to 999"
            )
        return raw.row(f"aime{year}", f"{problem}\n\n{_LINE_OF_ANSWER}", str(int(number[1])), "math")

    return convert


def _geo3k(raw: Raw) -> Row:
    problem, truth = raw.text("problem"), raw.text("answer")
    images = raw.values.get("images")
    if not isinstance(images, list) or problem.count("<image>") != len(images):
        raise ValueError(
            f"raw row {raw.index} has {problem.count('<image>')} placeholders <image> and "
            f"{len(images) if isinstance(images, list) else 'no'} images; they must be as many"
        )
    prompt = f"{problem}\n\nThink step by step, then put the final answer in \\boxed{{}}."
    return {**raw.row("hiyouga/geometry3k", prompt, truth, "math", answer=truth), "images": images}


def _dapo_math(raw: Raw) -> Row:
    prompt = raw.values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
        text = str(prompt[0].get("content") or "").strip()  # with the instruction of its authors
        truth = (raw.values.get("reward_model") or {}).get("ground_truth")
    else:
        text, truth = f"{raw.text('prompt')}\n\n{_LINE_OF_ANSWER}", raw.text("solution", "answer")
    if not text or not isinstance(truth, str | int | float):
        raise ValueError(
            f"raw row {raw.index} is not as DAPO-Math-17k is published: it needs a prompt, and the answer in "
            f"reward_model.ground_truth or solution; columns found: {', '.join(raw.values)}"
        )
    return raw.row("math_dapo", text, str(truth), "math")


def _countdown(raw: Raw) -> Row:
    numbers, target = raw.values.get("nums"), raw.values.get("target")
    are_whole = isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
    if not are_whole or not numbers or not isinstance(target, int):
        raise ValueError(
            f"raw row {raw.index} needs whole numbers in 'nums' and one in 'target', but has nums={numbers!r}, "
            f"target={target!r}"
        )
    listed = ", ".join(map(str, numbers))
    prompt = (
        f"Reach {target} with the numbers {listed}, each used exactly once, with +, -, *, / and brackets. Think step "
        f"by step, then write the expression between <answer> and </answer>, for example <answer>(1 + 2) / 3"
        f"</answer>."
    )
    return raw.row("countdown", prompt, {"target": target, "numbers": numbers}, "arithmetic")


RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(convert=_gsm8k, source="hub:openai/gsm8k:main"),
    "math": Recipe(convert=_math, source="hub:DigitalLearningGmbH/MATH-lighteval"),
    "math500": Recipe(convert=_math500, source="hub:HuggingFaceH4/MATH-500"),
    "aime24": Recipe(convert=_aime("24"), source="hub:HuggingFaceH4/aime_2024"),
    "aime25": Recipe(convert=_aime("25"), source="hub:math-ai/aime25"),
    "geo3k": Recipe(convert=_geo3k, source="hub:hiyouga/geometry3k"),
    "dapo_math": Recipe(convert=_dapo_math, source="hub:BytedTsinghua-SIA/DAPO-Math-17k", is_repeated=True),
    "countdown": Recipe(convert=_countdown, source="hub:Jiayi-Pan/Countdown-Tasks-3to4"),
}
