"""The run folder: event log, ledger, fingerprints, samples and checkpoints of one run.

    folder.py         RunFolder holds them all; each also works alone
    events.py         the event log; records.py: the form of its records
    ledger.py         every issued sample has one fate
    fingerprints.py   a hash chain per step and stage
    samples/          what the model wrote, as Parquet (a guest)
    checkpoints.py    saves that are whole or absent; manifest.py: what one says
    lock.py           one writer per folder

Nothing here imports torch.
"""

from __future__ import annotations

from strop.run.checkpoints import MODEL_FOLDER, CheckpointStore, PendingCheckpoint
from strop.run.config import RunConfig
from strop.run.errors import RunError
from strop.run.events import EventLog
from strop.run.fingerprints import (
    STAGES,
    Fingerprint,
    FingerprintChain,
    digest,
)
from strop.run.folder import RunFolder, is_run
from strop.run.ledger import Fate, Ledger, LedgerError
from strop.run.manifest import Checkpoint, CheckpointError, Manifest

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
