"""The border: everything that comes from outside passes here before strop uses, writes or shows it.

From outside are the words of a model, arguments and results of tools, replies of judges, servers and environments, what
a reward function returned, texts of exceptions, rows of data. None of these functions raises because of what it is
given (`read_json` says with ValueError that a text is no JSON), and each takes time linear in its input.

secrets.py  remember_secret, redacted: keys that appear in no record; is_secret: a key among settings
text.py     encodable: text that strop works with; storable_text: text that is written; printable: text for a terminal
values.py   read_json: JSON from outside; storable: any value as plain JSON; real, finite, usable, as_number: numbers

control_tokens.py has ControlText: text that spells out control tokens of a tokenizer, and stays text.
"""

from strop.utils.sanitize.secrets import (
    REDACTED,
    is_secret,
    redacted,
    remember_named,
    remember_secret,
    remember_secrets_in,
    secrets_in,
    without_secrets,
)
from strop.utils.sanitize.text import described, encodable, printable, storable_text
from strop.utils.sanitize.values import (
    as_number,
    encodable_value,
    finite,
    read_json,
    read_json_at,
    real,
    storable,
    usable,
)

__all__ = [
    "REDACTED",
    "as_number",
    "described",
    "encodable",
    "encodable_value",
    "finite",
    "is_secret",
    "printable",
    "read_json",
    "read_json_at",
    "real",
    "redacted",
    "remember_named",
    "remember_secret",
    "remember_secrets_in",
    "secrets_in",
    "storable",
    "storable_text",
    "usable",
    "without_secrets",
]
