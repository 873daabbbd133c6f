"""The rows of the epochs of a run, by the weights or shares of data sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strop.config.sections import where_on
from strop.data.config import DataConfig
from strop.data.mixture import by_entry, weighted_epochs, weights_of_sources
from strop.data.prompts import PromptDataset
from strop.data.readers import read_rows


def rows_of_epochs(
    prompts: PromptDataset, data: DataConfig, num_epochs: int | None, seed: int
) -> tuple[Callable[[int], list[int]] | None, int | None, int]:
    """Rows and number of epochs as of `weighted_epochs`, by data.source_weights or data.source_shares of the training
    rows, and how many rows no epoch has; all rows, as many epochs, and 0, where neither is set.

    Args:
        prompts: of training.
        data: settings.
        num_epochs: None for no end.
        seed: of the run.

    Raises:
        ValueError: a name is no source, a source has no share, or no row would ever be visited.
    """
    names = {**data.source_weights, **data.source_shares}
    if not names:
        return None, num_epochs, 0
    data_sources: Mapping[int, str] = prompts.data_sources
    if where_on(data.dataset_class) is None:
        data_sources = by_entry(
            data_sources, names, data.train_files, lambda entry: len(read_rows([entry], data.cache_dir))
        )
    weights = weights_of_sources(data_sources, data.source_weights, data.source_shares)
    num_never = sum(weights.get(source, 1.0) == 0 for source in data_sources.values())
    return *weighted_epochs(data_sources, weights, num_epochs, seed), num_never
