"""The run folder: event log, ledger, samples and checkpoints of one run.

    folder.py         RunFolder holds them all; each also works alone
    events.py         the event log; records.py: the form of its records
    ledger.py         every issued sample has one fate
    digests.py        digests of the results of a step's stages; fingerprints.py: a hash chain of them
    samples/          trained and validation samples, as Parquet
    checkpoints.py    atomic checkpoints; manifest.py: their files and facts; sealing.py: sealed in a thread
    lock.py           one writer per folder
    naming.py         RUN on a command line: the run, the checkpoint of it, and its model folder
    processes.py      processes of a run, from its settings
    config.py         settings of the run folder; errors.py: its error
    inputs.py         digests of everything that a run reads from outside; input_files.py, paths.py: its files
    replay_schedule.py     order and versions of generation ahead of training, for a repetition
    first_difference.py    where two runs begin to differ
    profile/          profiled steps: timelines of all processes
    heartbeat.py      what a process does, written every second, for the diagnosis of a run that died or hangs

Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.run.checkpoints import MODEL_FOLDER, CheckpointStore, PendingCheckpoint
from strop.run.config import RunConfig
from strop.run.digests import digest
from strop.run.errors import RunError
from strop.run.events import EventLog
from strop.run.folder import RunFolder, is_run
from strop.run.ledger import Fate, Ledger, LedgerError
from strop.run.manifest import Checkpoint, CheckpointError, Manifest
from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.run.fingerprints import STAGES, Fingerprint, FingerprintChain

__all__ = [
    "MODEL_FOLDER",
    "STAGES",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "EventLog",
    "Fate",
    "Fingerprint",
    "FingerprintChain",
    "Ledger",
    "LedgerError",
    "Manifest",
    "PendingCheckpoint",
    "RunConfig",
    "RunError",
    "RunFolder",
    "digest",
    "is_run",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".fingerprints": "Fingerprint FingerprintChain STAGES",
    },
)
