"""The settings of a run, what they mean, and where two runs differ in theirs: `strop config`.

command.py  `strop config`; describe.py: all keys with their texts
explain.py  `strop config explain`; keys.py: what the tree of settings says of a key
diff.py     `strop config diff`
"""
