"""Models and data sets of a run from hubs: fetched at its start, and the same ones when it goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.model_commits import check_models_same, read_models, with_data
from strop.trainer.model_locations import MODEL_PATHS, Located, locate

Records = Mapping[str, Mapping[str, Any]]


def fetch_inputs(
    config: Config,
    command: Sequence[str],
    *,
    say: Reporter,
    exclude: Collection[str],
    recorded: Records | None,
) -> Located:
    """The inputs of a run that begins.

    Args:
        config: as the user wrote it.
        command: the word of the command.
        say: prints the progress of downloads.
        exclude: keys of models that are not looked at.
        recorded: records of a run that this one repeats.

    Raises:
        ValueError: a model cannot be fetched, or the hub has not a data set.
    """
    keys = [key for key in MODEL_PATHS if key not in exclude]
    located = locate(config, say=say, keys=keys, known=recorded)
    return with_data(located, command, say=say, known=recorded)


def refetch_inputs(config: Config, run: RunFolder, *, say: Reporter) -> Config:
    """The settings of a run that goes on, with the inputs that it began with.

    Raises:
        ValueError: as `fetch_inputs`.
        RunError: they are not the same any more.
    """
    recorded = read_models(run.path)
    located = locate(config, say=say, known=recorded)
    check_models_same(recorded, located)
    return with_data(located, run.info["command"][1:2], say=say, known=recorded).config


def record_inputs(run: RunFolder, models: Records) -> Iterator[str]:
    """A line for each model that was fetched and each data set of a hub, which the log of the run keeps too."""
    for key, model in models.items():
        run.events.append("model", 0, key=key, source=model["source"], revision=model["revision"])
        yield f"{key}: {model['source']}, revision {model['revision']}"
