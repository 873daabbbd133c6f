"""In-memory inputs of a caller written as files: reward functions, datasets, loaded models.

Processes of a run, and a resume after it, read files. A function of an importable module is named by its file; one of a
notebook, of the program itself or with values around it is written down whole, with its source for a reader.
"""

from __future__ import annotations

import base64
import inspect
import json
import numbers
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Reward = str | Path | Callable[..., Any]
"""A file (`reward.py`, or `reward.py:name`), or a function in any of the forms that files may have."""
Rows = Any
"""Files or a hub name, a `datasets.Dataset`, a pandas DataFrame, or a list of dictionaries."""

_WHOLE = '''\
"""The function {name}, as it was given to strop.{door}: written down whole."""

import base64

import dill

{name} = dill.loads(base64.b64decode("""
{content}
"""))

# Its source:
{source}
'''


def reward_settings(
    rewards: Reward | Sequence[Reward], weights: Sequence[float] | None, folder: Path
) -> dict[str, Any]:
    """The settings that name these functions, by key.

    Args:
        rewards: one or several.
        weights: of each in the sum; None: 1.
        folder: for functions that have no file.

    Raises:
        ValueError: one cannot be used, or the weights are not as many.
    """
    given_rewards = _listed(rewards)
    if weights is not None:
        _check_weights(weights, len(given_rewards))
    references = [_named(function, number, folder) for number, function in enumerate(given_rewards)]
    if not references:
        return {}
    if len(references) == 1 and weights is None:
        return {"reward.path": references[0][0], "reward.name": references[0][1]}
    keys = [name for _, name in references]
    functions = [
        {
            "path": path,
            "name": name,
            "weight": float(1.0 if weights is None else weights[number]),
            "key": name if keys.count(name) == 1 else f"{name}_{number}",
        }
        for number, (path, name) in enumerate(references)
    ]
    return {"reward.functions": functions}


def _listed(rewards: Any) -> list[Reward]:
    """The rewards that were given, as a list.

    Raises:
        ValueError: they are none.
    """
    if isinstance(rewards, str | Path) or callable(rewards):
        return [rewards]
    if isinstance(rewards, Mapping) or not isinstance(rewards, Iterable):
        found = "None" if rewards is None else f"a {type(rewards).__name__}"
        raise ValueError(
            f"rewards is {found}: give a function, a file, or a list of them; left out, the scorer of the data source "
            f"rewards"
        )
    return list(rewards)


def _check_weights(weights: Any, count: int) -> None:
    """Refuse weights that are no numbers, or not as many as rewards."""
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    if not is_list or not all(isinstance(weight, numbers.Real) for weight in weights):
        raise ValueError(f"reward_weights is {weights!r}: give a list of numbers, one for each reward")
    if len(weights) != count:
        raise ValueError(f"there are {count} rewards and {len(weights)} reward_weights: give one for each")


def _named(reward: Reward, number: int, folder: Path) -> tuple[str, str]:
    """File and name of a function."""
    if isinstance(reward, str | Path):
        path, colon, name = str(reward).rpartition(":")
        is_named = bool(colon) and name.isidentifier()
        file = Path(path if is_named else str(reward)).expanduser().absolute()
        if not file.is_file():
            raise ValueError(
                f"the reward {str(reward)!r} is no file ({file}): give a function, or a Python file that has one, "
                f"'reward.py:name'"
            )
        return str(file), name if is_named else "compute_score"
    if not callable(reward):
        raise ValueError(
            f"a reward is a file or a function, but number {number} is a {type(reward).__name__}"
        )
    if inspect.isclass(reward):
        raise ValueError(
            f"a reward is a file or a function, but number {number} is the class {reward.__name__}: give an instance "
            f"that can be called, {reward.__name__}(...)"
        )
    home = _file_of(reward)
    if home is not None:
        return str(home), reward.__name__
    return str(_written(reward, number, folder)), _name_of(reward, number)


def _file_of(function: Callable[..., Any]) -> Path | None:
    """The file that defines a function at its top level, under its name; not the program itself."""
    name, home = getattr(function, "__qualname__", ""), getattr(function, "__module__", "__main__")
    module = sys.modules.get(home)
    if home == "__main__" or module is None or getattr(module, name, None) is not function:
        return None
    file = getattr(module, "__file__", None)
    # A module of a package imports its neighbours by the package's name, which a file by itself cannot.
    return Path(file).absolute() if file and not getattr(module, "__package__", "") else None


def _name_of(function: Callable[..., Any], number: int) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else f"reward_{number}"


def _written(function: Callable[..., Any], number: int, folder: Path) -> Path:
    """A file that has the function in it, whatever it refers to.

    Raises:
        ValueError: it refers to something that cannot be written down.
    """
    import dill  # comes with datasets; only functions without a file need it

    name = _name_of(function, number)
    try:
        content = dill.dumps(function, recurse=True)
    except Exception as error:
        raise ValueError(
            f"the reward {name} cannot be taken to the processes that score: {type(error).__name__}: {error}. Put it "
            f"into a file of its own and give that: rewards='reward.py:{name}'"
        ) from error
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = "(not known)"
    text = _WHOLE.format(
        name=name,
        door="train",
        content="\n".join(textwrap.wrap(base64.b64encode(content).decode(), 100)),
        source=textwrap.indent(source, "# ", lambda line: True).rstrip(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"reward_{number}.py"
    file.write_text(text)
    return file


ANSWERS = ("ground_truth", "solution", "answer")
"""Columns that have the right answer, where no row says it in verl's place."""


def column_settings(rows: Rows) -> dict[str, Any]:
    """The settings that rows of memory need which say less than those of files: no source of data, and perhaps no
    right answer, or one in a column of TRL's habit."""
    columns = _columns(rows)
    settings: dict[str, Any] = {}
    if columns and not _have_sources(rows, columns):
        settings["data.default_data_source"] = "data"
    if columns and "reward_model" not in columns:
        settings["data.ground_truth_key"] = next((name for name in ANSWERS if name in columns), None)
    return settings


def _columns(rows: Rows) -> frozenset[str]:
    """Column names of rows in memory."""
    if isinstance(rows, str | Path) or rows is None:
        return frozenset()
    if isinstance(rows, Sequence):  # dictionaries, or files
        return frozenset(name for row in rows if isinstance(row, Mapping) for name in row)
    names: Any = getattr(rows, "column_names", None) or getattr(rows, "columns", rows)
    return frozenset(map(str, names))


def _have_sources(rows: Rows, columns: frozenset[str]) -> bool:
    """True if every row names its source of data, as far as the rows say without being read."""
    return "data_source" in columns and not (
        isinstance(rows, Sequence)
        and any(isinstance(row, Mapping) and row.get("data_source") is None for row in rows)
    )


def data_files(rows: Rows, name: str, folder: Path) -> list[str]:
    """Files with these rows.

    Args:
        rows: as `Rows`; files are given back as they are.
        name: of the argument and of the file, for errors and for who looks.
        folder: where the file goes.

    Raises:
        ValueError: it is nothing that has rows.
    """
    if isinstance(rows, str | Path):
        return [str(rows)]
    if isinstance(rows, Sequence) and rows and all(isinstance(path, str | Path) for path in rows):
        return [str(path) for path in rows]
    from datasets import Dataset, DatasetDict  # half a second

    if isinstance(rows, DatasetDict):
        raise ValueError(
            f"{name} is a DatasetDict of {', '.join(rows)}: give one of them, {name}=dataset['train']"
        )
    if isinstance(rows, Mapping):
        rows = Dataset.from_dict(dict(rows))
    elif isinstance(rows, Sequence):
        bad_row = next((number for number, row in enumerate(rows) if not isinstance(row, Mapping)), None)
        if bad_row is not None or not rows:
            problem = (
                "has no row" if bad_row is None else f"has a {type(rows[bad_row]).__name__} as row {bad_row}"
            )
            raise ValueError(
                f"{name} {problem}: give files, a datasets.Dataset, a DataFrame, or dictionaries"
            )
        plain_rows = [{key: _plain(value) for key, value in row.items()} for row in rows]
        if (lines := _json_lines(plain_rows)) is not None:
            return [_written_lines(lines, name, folder)]
        rows = _set_of(plain_rows, name)
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = Dataset.from_pandas(rows, preserve_index=False)
    if not isinstance(rows, Dataset):
        raise ValueError(
            f"{name} is a {type(rows).__name__}: give files, a datasets.Dataset, a DataFrame, or a list of dictionaries"
        )
    if not len(rows):
        raise ValueError(f"{name} has no row")
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.parquet"
    try:
        rows.to_parquet(str(file))
    except pyarrow.ArrowException as error:  # an object without keys, which Parquet has no form for
        file.unlink(missing_ok=True)
        if (lines := _json_lines(rows.to_list())) is None:
            raise ValueError(f"{name} cannot be written as Parquet: {error}") from error
        return [_written_lines(lines, name, folder)]
    return [str(file.absolute())]


def _written_lines(lines: Sequence[bytes], name: str, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_bytes(b"".join(lines))
    return str(file.absolute())


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> list[bytes] | None:
    """The rows as JSON lines, which keep the keys, nulls and empty objects of each, but for nulls in chats and tools:
    a list that came from a table has those that the table filled in. None where a value is of a type that JSON has not.
    """
    from strop.data.readers import without_filled_nulls  # pyarrow

    try:
        rows = list(map(without_filled_nulls, rows))
        if all(map(_is_json, rows)):
            return [json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows]
    except (ValueError, RecursionError):  # a number that is not finite, a text that is no Unicode, a cycle
        pass
    return None


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def _set_of(plain_rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The `datasets.Dataset` of these rows.

    Raises:
        ValueError: a value is of a type that no file of rows holds.
    """
    import pyarrow
    from datasets import Dataset

    from strop.data.rows import columns_of

    try:
        return Dataset.from_dict(columns_of(plain_rows))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        for number, row in enumerate(plain_rows):
            for key, value in row.items():
                try:
                    pyarrow.array([value])
                except (pyarrow.ArrowException, TypeError, ValueError):
                    raise ValueError(
                        f"{name} has a {type(value).__name__} in row {number}, column {key!r}, which no file of rows "
                        f"holds ({value!r:.80}): give text, numbers, lists or dictionaries of them"
                    ) from error
        raise ValueError(
            f"{name} has columns whose rows do not fit together: {error}; give every row of a column one type"
        ) from error


def _plain(value: object) -> Any:
    """A value with its UUIDs as text, for which `datasets` has no type."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, uuid.UUID) else value


def model_folder(model: Any, tokenizer: Any, folder: Path) -> str:
    """Path or hub name of a model as it was given, or the folder that a loaded one is written to.

    Raises:
        ValueError: it is no model, or its tokenizer is not known.
    """
    if isinstance(model, str | Path):
        return str(model)
    if not hasattr(model, "save_pretrained"):
        raise ValueError(
            f"model is a {type(model).__name__}: give a folder, a name on a hub, or a model of transformers"
        )
    if tokenizer is None:
        source = getattr(model, "name_or_path", "")
        if not source:
            raise ValueError(
                "the model does not say where it came from: give its tokenizer too, tokenizer=..."
            )
        from transformers import AutoTokenizer  # seconds

        tokenizer = AutoTokenizer.from_pretrained(source)
    target = folder / "model"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target.absolute())
