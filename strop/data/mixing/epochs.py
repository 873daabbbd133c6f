"""The rows of the epochs of a run, with what its settings say of data sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strop.data.config import DataConfig
from strop.data.mixing import by_entry, weighted_epochs, weights_of_sources
from strop.data.readers import read_rows


def rows_of_epochs(
    data_sources: Mapping[int, str], data: DataConfig, num_epochs: int | None, seed: int
) -> tuple[Callable[[int], list[int]], int | None]:
    """As `weighted_epochs`, with what data.source_weights or data.source_shares say of training rows.

    Args:
        data_sources: as for `visits_per_epoch`.
        data: settings.
        num_epochs: None for no end.
        seed: of the run.

    Raises:
        ValueError: a name is no source, a source has no share, or no row would ever be visited.
    """
    if not data.dataset_class.path:
        names = {**data.source_weights, **data.source_shares}
        data_sources = by_entry(
            data_sources, names, data.train_files, lambda entry: len(read_rows([entry], data.cache_dir))
        )
    weights = weights_of_sources(data_sources, data.source_weights, data.source_shares)
    return weighted_epochs(data_sources, weights, num_epochs, seed)
