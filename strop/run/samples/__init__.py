"""The samples of a run: what the model wrote, with tokens, log-probs and rewards, as Parquet in the run folder.

store.py    SampleStore: a file per step and writer
columns.py  the columns, and their types
reading.py  files that somebody else may have written
sample_rows.py     episodes as rows
selection.py  which samples of a prompt are good enough, by their scores

Nothing here but sample_rows.py imports torch.
"""

from strop.run.samples.columns import COLUMNS, schema_of
from strop.run.samples.store import SampleStore

__all__ = ["COLUMNS", "SampleStore", "schema_of"]
