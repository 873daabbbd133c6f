"""What a setting means, and where two runs differ in theirs: `strop config explain` and `strop config diff`.

explain.py  `strop config explain`; keys.py: what the tree of settings says of a key; readers.py: which modules read it
diff.py     `strop config diff`
"""
