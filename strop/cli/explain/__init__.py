"""The settings of a run, what they mean, and where two runs differ in theirs: `strop config`.

config.py  `strop config`; docs.py: all keys with their texts
explain.py  `strop config explain`; keys.py: what the tree of settings says of a key; readers.py: which modules read it
diff.py     `strop config diff`
"""
