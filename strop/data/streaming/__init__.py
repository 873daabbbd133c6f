"""Training rows that are read from their files and encoded when they are visited (data.streaming).

prompts.py  Training prompts that are read and encoded when they are visited
stored.py   Rows that stay in their files and are read one by one, by number
"""

from strop.data.streaming.prompts import StreamedPrompts
from strop.data.streaming.stored import StoredRows, open_rows

__all__ = ["StoredRows", "StreamedPrompts", "open_rows"]
