"""Mixture of data sources: visits of the rows of each source per epoch, by weights or shares.

epochs.py    the rows of the epochs of a run
settings.py  checks of data.source_weights and data.source_shares
"""

from __future__ import annotations

import difflib
import math
import os.path
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from strop.utils.remote_path import is_hub, is_url
from strop.utils.rng import permutation, random_key, uniforms


def visits_per_epoch(
    data_sources: Mapping[int, str], weights: Mapping[str, float], epoch: int, seed: int
) -> list[int]:
    """Row numbers to visit in an epoch, a row as often as it is to be visited.

    Row i of a source with weight w = whole + part is visited

        whole + floor((epoch + 1) part + u_i) - floor(epoch part + u_i)

    times in an epoch. The offsets u_i of the n rows of a source are (rank_i + v) / n with a random order of the
    rows (rank_i in 0..n-1) and one random v in [0, 1), both drawn from the seed. So over the first E epochs a
    row is visited floor(E w) or ceil(E w) times, and by Hermite's identity (the sum of floor(x + k/n) over
    k = 0..n-1 is floor(n x)) a source is visited floor(n E part + v) + n E whole times: neither the rows nor
    the sources drift from their weight, and every row is equally likely to be the one that is visited.

    Args:
        data_sources: data source by row number, in the order of the rows (`PromptDataset.data_sources`).
        weights: visits per epoch of the rows of a source, 0 or more; 1 for sources that are not named.
        epoch: from 0.
        seed: of the run.

    Returns:
        Row numbers in the order of `data_sources`, repeated ones next to each other. May be empty in an epoch
        when the weights are small.
    """
    rows_of: dict[str, list[int]] = {}
    for row, source in data_sources.items():
        rows_of.setdefault(source, []).append(row)
    counts = {
        row: count
        for source, rows in rows_of.items()
        for row, count in zip(rows, _counts(len(rows), source, weights, epoch, seed), strict=True)
    }
    return [row for row in data_sources for _ in range(counts[row])]


def weighted_epochs(
    data_sources: Mapping[int, str], weights: Mapping[str, float], num_epochs: int | None, seed: int
) -> tuple[Callable[[int], list[int]], int | None]:
    """The rows of each round, none twice in one, and how many rounds make up `num_epochs` epochs.

    With weights above 1 an epoch is `max(weights)` rounds on average: the source of the largest weight is visited
    in every one of them, the others in their share.

    Args:
        data_sources, weights, seed: as for `visits_per_epoch`.
        num_epochs: None for no end.
    """
    of_source = {source: weights.get(source, 1.0) for source in set(data_sources.values())}
    most = max([1.0, *of_source.values()])
    shares = {source: weight / most for source, weight in of_source.items()}

    def rows(number: int) -> list[int]:
        return visits_per_epoch(data_sources, shares, number, seed)

    return rows, None if num_epochs is None else math.ceil(num_epochs * most)


def weights_of_sources(
    data_sources: Mapping[int, str],
    weights: Mapping[str, float],
    shares: Mapping[str, float],
    *,
    section: str = "data",
) -> Mapping[str, float]:
    """Visits per epoch of the rows of each source, as weights or shares say; empty where neither does.

    With shares the source that has the smallest share for its number of rows is visited once per epoch, and the others
    so often that the visits are shared as asked.

    Args:
        data_sources: as for `visits_per_epoch`.
        weights, shares: source_weights and source_shares, of which one is empty.
        section: of both, for messages.

    Raises:
        ValueError: a name is no source, a source has no share, or no row would ever be visited.
    """
    if not shares:
        if weights:
            check_source_weights(data_sources, weights, key=f"{section}.source_weights")
        return weights
    key = f"{section}.source_shares"
    check_source_weights(data_sources, shares, key=key)
    rows = Counter(data_sources.values())
    if missing := [source for source in sorted(rows) if source not in shares]:
        raise ValueError(
            f"{key} names no share of {', '.join(map(repr, missing))}: give every source one, 0 where its rows are not "
            f"to be visited"
        )
    density = {source: shares[source] / count for source, count in rows.items()}
    least = min(rate for rate in density.values() if rate > 0)
    return {source: rate / least for source, rate in density.items()}


def by_entry(
    data_sources: Mapping[int, str], names: Iterable[str], entries: Sequence[str], sizes: Callable[[str], int]
) -> Mapping[int, str]:
    """The sources of rows: their data sources, or the entries of train_files that they are from, if the names are of
    these.

    Args:
        data_sources: as for `visits_per_epoch`.
        names: that settings have.
        entries: of train_files, in their order.
        sizes: rows of an entry.
    """
    name_of = entry_names(entries)
    if set(names) <= set(data_sources.values()) or not set(names) <= set(name_of.values()):
        return data_sources
    of_rows = [name_of[entry] for entry in entries for _ in range(sizes(entry))]
    return {row: of_rows[row] for row in data_sources}


def entry_names(entries: Sequence[str]) -> dict[str, str]:
    """Name of each entry: its last part without a suffix. Where others have that name too, a file is named by its path
    from the folder that has them all, and what is fetched by the whole entry."""
    without_revision = {entry: entry.partition("#")[0] if is_hub(entry) else entry for entry in entries}
    short = {entry: Path(name).stem for entry, name in without_revision.items()}
    names = {}
    for entry, name in short.items():
        same = [
            _path(other)
            for other in short
            if short[other] == name and not is_hub(other) and not is_url(other)
        ]
        if list(short.values()).count(name) == 1:
            names[entry] = name
        elif (path := _path(entry)) in same:
            names[entry] = path.relative_to(os.path.commonpath([other.parent for other in same])).as_posix()
        else:
            names[entry] = without_revision[entry]
    return names


def _path(entry: str) -> Path:
    return Path(os.path.normpath(Path(entry).expanduser().absolute()))


def check_source_weights(
    data_sources: Mapping[int, str], weights: Mapping[str, float], *, key: str = "data.source_weights"
) -> None:
    """Raise a ValueError for a weight of a source that no row has, and when no row would ever be visited; `key` is that
    of the weights."""
    sources = sorted(set(data_sources.values()))
    for source in weights:
        if source not in sources:
            near = difflib.get_close_matches(source, sources, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the rows have {', '.join(map(repr, sources))}"
            raise ValueError(f"{key} names {source!r}, but no row has that data source; {hint}")
    if sources and all(weights.get(source, 1.0) == 0 for source in sources):
        raise ValueError(
            f"{key} is 0 for every data source of the rows ({', '.join(map(repr, sources))}), so "
            f"there is nothing to train on; give at least one a weight above 0"
        )


def _counts(num_rows: int, source: str, weights: Mapping[str, float], epoch: int, seed: int) -> list[int]:
    """Visits of each row of one source."""
    weight = weights.get(source, 1.0)
    whole = int(weight)
    part = weight - whole
    if part == 0:
        return [whole] * num_rows
    rank = permutation(random_key(seed, "source_order", source), num_rows)  # [rows]
    shift = uniforms(
        np.array(random_key(seed, "source_shift", source), dtype=np.uint64), np.array(0, dtype=np.int64)
    )
    offset = np.minimum((rank + shift) / num_rows, np.nextafter(1.0, 0.0))  # [rows], below 1 also if rounded
    extra = np.floor((epoch + 1) * part + offset) - np.floor(epoch * part + offset)
    return [whole + int(count) for count in extra]
