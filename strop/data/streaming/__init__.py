"""Training rows that are read from their files and encoded when they are visited (data.streaming).

stored.py    rows by number, from their files
prompts.py   the training prompts of such rows
"""

from strop.data.streaming.prompts import StreamedPrompts
from strop.data.streaming.stored import StoredRows, open_rows

__all__ = ["StoredRows", "StreamedPrompts", "open_rows"]
