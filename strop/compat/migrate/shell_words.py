"""The words of a launch script as they are written: quotes, continued lines, redirections, here-documents, arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import regex  # type: ignore[import-untyped]

_GRAMMAR = r"""(?(DEFINE)
  (?P<double> "(?: [^"\\$`]++ | \\. | (?&expansion) | \$ )*+" )
  (?P<paren> \((?: [^()'"\\`$]++ | \\. | '[^']*' | (?&double) | (?&expansion) | \$ | (?&paren) )*+\) )
  (?P<brace> \{(?: [^{}"\\`$]++ | \\. | (?&double) | (?&expansion) | \$ | (?&brace) )*+\} )
  (?P<expansion> `[^`]*` | \$(?&paren) | \$(?&brace) | \$(?:[A-Za-z_]\w*|[0-9@*\#?!$]) )
  (?P<piece> \\(?!\n). | '[^']*' | (?&double) | (?&expansion) | \$(?![({]) | [^\s;&|()<>\\'"$`]++ )
  (?P<array> \((?: \s++ | \\\n | (?<=[\s(])\#[^\n]*+ | (?&piece) )*+\) )
)"""
_FLAGS = regex.VERBOSE | regex.DOTALL
_TOKEN = regex.compile(
    _GRAMMAR
    + r"""(?P<blank> [ \t\r]++ | \\\n | \#[^\n]*+ | \d*[<>]&\d+ )
    | \d*<<-?[ \t]*["']?(?P<document>\w+)["']?
    | (?P<redirection> (?:&>|\d*[<>])[<>]*[&|]?-? )
    | (?P<word> [A-Za-z_]\w*\+?=(?&array) | (?![A-Za-z_]\w*\+?=\()(?&piece)(?:(?:\\\n)*+(?&piece))*+ )
    | (?P<end> [\n;&|()] )""",
    _FLAGS,
)
PIECE = regex.compile(
    _GRAMMAR
    + r"""\\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<quoted>(?:[^"\\$`]++|\\.|(?&expansion)|\$)*+)"
    | (?P<open>(?&expansion)) | (?P<plain>[^\\'"$`]++|.)""",
    _FLAGS,
)
QUOTED = regex.compile(
    _GRAMMAR + r"""\\(?P<escaped>[$`"\\\n]) | (?P<open>(?&expansion)) | (?P<plain>[^\\$`]++|.)""", _FLAGS
)
_HEREDOC_READ = regex.compile(
    r"""\bread\s+(?:-r\s+)?-d\s*(?:''|"")\s+(?:-r\s+)?(?P<name>\w+)\s*<<-?\s*(?P<quote>['"]?)(?P<end>\w+)['"]?[^\n]*\n"""
    r"(?P<body>.*?)\n[ \t]*(?P=end)[ \t]*$",
    regex.DOTALL | regex.MULTILINE,
)
"""`read -r -d '' NAME <<EOF`: a command that is kept in a variable."""


@dataclass(frozen=True)
class Word:
    """One word of a command, variables filled in."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()
    """Parts of the text that are still as they were written, because their value is unknown."""
    variables: tuple[str, ...] = ()
    """Variables whose values would say it."""
    choices: tuple[str, ...] = ()
    """Values that the variable has one after the other, where it is that of a loop."""
    condition: int = 0
    """Line of the condition, not known, on which the word is there; 0: it is always there."""


@dataclass(frozen=True)
class Command:
    """One command: a program and its arguments."""

    words: tuple[Word, ...]
    line: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script has set before it or in it, where their values are known texts."""
    exported: tuple[str, ...] = ()
    """Names of those that the command gets in its environment."""
    folder: Word | None = None
    """Folder that the script has changed to with `cd`, as a path or as it is written; None where it has not."""


def _as_assignment(match: regex.Match[str]) -> str:
    """A here-document that is read into a variable, as an assignment of as many lines."""
    if match["quote"]:
        return "{}='{}'\n".format(match["name"], match["body"].replace("'", "'\\''"))
    return '{}="{}"\n'.format(match["name"], match["body"].replace('"', '\\"'))


def split_commands(text: str, line: int) -> Iterator[tuple[list[tuple[str, int]], str]]:
    """The words of each command as they are written, with their lines, and what joins it to the one before."""
    words: list[tuple[str, int]] = []
    documents: list[str] = []
    joint = ""
    position, is_target = 0, False  # is_target: of a redirection
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            start = text[position : position + 12]
            raise ValueError(f"line {line}: what begins with {start!r} there is never closed")
        position = token.end()
        if token["document"]:
            documents.append(token["document"])
        elif token["redirection"]:
            is_target = True
        elif token["word"]:
            if not is_target:
                words.append((token["word"], line))
            is_target = False
        elif token["end"]:
            if words:
                yield words, joint
                words, joint = [], ""
            joint += token["end"]
        line += token[0].count("\n")
        while token["end"] == "\n" and documents:
            body = regex.compile(rf"(?m).*?^\s*{documents.pop(0)}\s*?$\n?|.*", regex.DOTALL).match(
                text, position
            )
            position, line = body.end(), line + body[0].count("\n")
    if words:
        yield words, joint


def with_heredoc_assignments(text: str) -> str:
    """The script with here-documents that are read into variables as assignments."""
    written: str = _HEREDOC_READ.sub(_as_assignment, text)
    return written
