"""What a shell asks strop for: words that complete a line, and what is installed.

completion.py   `strop completion`, and the lists that the shell asks for
versions.py     `strop --version`
"""
