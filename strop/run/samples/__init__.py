"""The samples of a run: texts, tokens, log-probs and rewards, as Parquet in the run folder.

columns.py    The columns of the sample store, and their types in every file
reading.py    Reader of the sample store's files, as untrusted input
selection.py  Rejection sampling
store.py      The sample store
"""

from strop.run.samples.columns import COLUMNS, schema_of
from strop.run.samples.store import SampleStore

__all__ = ["COLUMNS", "SampleStore", "schema_of"]
