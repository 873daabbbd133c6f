"""The run folder: event log, ledger, fingerprints, samples and checkpoints of one run.

`RunFolder` holds them all; each also works alone. Nothing here imports torch.
"""

from __future__ import annotations

from strop.run.checkpoints import CheckpointStore
from strop.run.config import RunConfig
from strop.run.errors import RunError
from strop.run.events import EventLog
from strop.run.fingerprints import (
    STAGES,
    Difference,
    Fingerprint,
    FingerprintChain,
    common_steps,
    compare,
    digest,
)
from strop.run.folder import RunFolder, is_run
from strop.run.ledger import Fate, Ledger, LedgerError
from strop.run.manifest import Checkpoint, CheckpointError, Manifest
from strop.run.pending import PendingCheckpoint
from strop.run.samples import SampleStore

__all__ = [
    "STAGES",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Difference",
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
    "SampleStore",
    "common_steps",
    "compare",
    "digest",
    "is_run",
]
