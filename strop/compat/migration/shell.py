"""The commands of a launch script as a shell would see them, without running any of it.

Read are comments, continued lines, quotes, several commands in a line, redirections, here-documents and arrays.
Filled in are assignments (also with export, as arrays, or as the here-document of `read -d ''`), $NAME, ${NAME},
${NAME:-default}, ${NAME[@]}, whole-number arithmetic, and the names of folders: $(pwd), $(dirname "$0"),
$(cd FOLDER && pwd). Tests of known values choose their branch. Everything else that a shell computes, such as
$(commands) and unset variables, stays as it is written, and the word says so; so does a variable whose value depends
on a condition that is not known, and an entry of an array that is there on such a condition.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import regex  # type: ignore[import-untyped]

from strop.compat.migration.shell_tests import holds, ran

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
_PIECE = regex.compile(
    _GRAMMAR
    + r"""\\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<quoted>(?:[^"\\$`]++|\\.|(?&expansion)|\$)*+)"
    | (?P<open>(?&expansion)) | (?P<plain>[^\\'"$`]++|.)""",
    _FLAGS,
)
_QUOTED = regex.compile(
    _GRAMMAR + r"""\\(?P<escaped>[$`"\\\n]) | (?P<open>(?&expansion)) | (?P<plain>[^\\$`]++|.)""", _FLAGS
)
_ASSIGNMENT = regex.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", regex.DOTALL)
_PARAMETER = regex.compile(r"([A-Za-z_]\w*|[0-9@*])(\[(?:[@*]|0)\])?(?:(:?[-=+?])(.*))?", regex.DOTALL)
_HELD = regex.compile(
    r"""\bread\s+(?:-r\s+)?-d\s*(?:''|"")\s+(?:-r\s+)?(?P<name>\w+)\s*<<-?\s*(?P<quote>['"]?)(?P<end>\w+)['"]?[^\n]*\n"""
    r"(?P<body>.*?)\n[ \t]*(?P=end)[ \t]*$",
    regex.DOTALL | regex.MULTILINE,
)
"""`read -r -d '' NAME <<EOF`: a command that is kept in a variable."""
_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi", "done", "esac"}
_LEADING = {"then", "do", "{", "}", "!", "time", "exec", "nohup", "env", "eval"}
_DECLARING = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True)
class Word:
    """One word of a command, variables filled in."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()
    """What in the text is still as it was written, because nothing says what it stands for."""
    variables: tuple[str, ...] = ()
    """Variables whose values would say it."""
    condition: int = 0
    """Line of the condition, not known, on which the word is there; 0: it is always there."""


@dataclass(frozen=True)
class Command:
    """One command: a program and its arguments."""

    words: tuple[Word, ...]
    line: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script has set before it or in it, where their values are known texts."""


@dataclass(frozen=True)
class _Value:
    """What a piece stands for: one text, or the entries of an array."""

    words: tuple[Word, ...]
    is_array: bool = False
    is_cut: bool = False
    """Cut at its blanks: an expansion outside of quotes."""


def read_commands(text: str, variables: Mapping[str, str] | None = None, *, path: str = "") -> list[Command]:
    """The commands of a script, in their order, with the assignments before them filled in.

    Args:
        text: of the script.
        variables: values of variables, whatever the script assigns to them.
        path: of the script, as it is started.

    Raises:
        ValueError: a quote or a bracket is never closed.
    """
    shell = _Shell({**(dict.fromkeys(("0", "BASH_SOURCE"), path) if path else {}), **(variables or {})})
    commands = []
    for written, joint in _cut(_HELD.sub(_as_assignment, text), 1):
        words = shell.run(written, joint)
        if words:
            commands.append(Command(words=tuple(words), line=words[0].line, environment=shell.environment()))
    return commands


def _as_assignment(held: regex.Match[str]) -> str:
    """A here-document that is read into a variable, as an assignment of as many lines."""
    if held["quote"]:
        return "{}='{}'\n".format(held["name"], held["body"].replace("'", "'\\''"))
    return '{}="{}"\n'.format(held["name"], held["body"].replace('"', '\\"'))


def _cut(text: str, line: int) -> Iterator[tuple[list[tuple[str, int]], str]]:
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


class _Shell:
    """Variables, as the assignments of a script leave them."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        self.fixed = fixed
        self.values: dict[str, _Value] = {}
        self.conditional: set[str] = set()
        self.branches: list[_Branch] = []
        self.status: bool | None = True
        """Whether the last command succeeded; None where that is not known."""

    def environment(self) -> dict[str, str]:
        """Variables that have a text, known for certain."""
        return {
            name: value.words[0].text
            for name, value in self.values.items()
            if len(value.words) == 1 and not value.words[0].unresolved and name not in self.conditional
        }

    def run(self, written: Sequence[tuple[str, int]], joint: str = "") -> list[Word]:
        """The words of a command; its assignments are remembered and left out.

        Args:
            written: its words.
            joint: what stands between it and the command before.
        """
        rest = list(written)
        while rest and (head := rest[0][0]) in _OPENING | _CLOSING | _LEADING | _DECLARING | {"elif", "else"}:
            line = rest.pop(0)[1]
            if head in _OPENING:
                test = self._test(rest) if head == "if" else None
                self.branches.append(_Branch(test, line))
                rest = [] if head == "if" and test is not None else rest
            elif head in _CLOSING and self.branches:
                self.branches.pop()
            elif head in ("elif", "else") and self.branches:
                self.branches[-1] = self.branches[-1].next(self._test(rest) if head == "elif" else True, line)
                rest = [] if head == "elif" and self.branches[-1].test is not None else rest
            while head in _DECLARING and rest and rest[0][0].startswith("-"):
                rest.pop(0)
        runs = self._runs(joint)
        if runs is False or not rest:
            return []
        if (test := self._test(rest)) is not None:
            self.status = test
            return []
        condition = 0 if runs else (self.branches[-1].line if self.branches else rest[0][1])
        self.status = True
        while rest and self._assign(*rest[0], condition):
            rest.pop(0)
        if rest:
            self.status = None
        return [word for text, line in rest for word in self._words(text, line)]

    def _runs(self, joint: str) -> bool | None:
        """Whether a command is reached; None where that is not known."""
        tests = [branch.test for branch in self.branches]
        if joint in ("&&", "||"):
            tests.append(self.status if joint == "&&" else None if self.status is None else not self.status)
        if False in tests:
            return False
        return None if None in tests else True

    def _test(self, rest: Sequence[tuple[str, int]]) -> bool | None:
        """What a test such as `[ -n "$X" ]` of known values gives; None for others and for other commands."""
        if not rest or rest[0][0] not in ("[", "[[", "test", "true", "false"):
            return None
        words = [word for text, line in rest for word in self._words(text, line)]
        if any(word.unresolved for word in words):
            return None
        return holds([word.text for word in words])

    def _words(self, text: str, line: int) -> list[Word]:
        """The words that one written word stands for: none, one, or those of an array or of unquoted text."""
        done: list[Word] = []
        now: Word | None = None
        for value in self._values(text):
            for index, part in enumerate(_fields(value)):
                if index and now is not None:
                    done.append(now)
                    now = None
                first = replace(part, line=part.line if value.is_array and part.line else line)
                now = first if now is None else _together((now, part), now.line)
        return done if now is None else [*done, now]

    def _assign(self, text: str, line: int, condition: int) -> bool:
        read = _ASSIGNMENT.fullmatch(text)
        if read is None:
            return False
        name, adds, right = read.groups()
        if right.startswith("("):
            entries = [word for words, _ in _cut(right[1:-1], line) for word in words]
            value = _Value(tuple(word for entry in entries for word in self._words(*entry)), is_array=True)
        else:
            value = self._text(right, line)
        before = self.values.get(name)
        if adds and before is not None:
            if before.is_array and condition:
                value = replace(value, words=tuple(replace(w, condition=condition) for w in value.words))
            words = (*before.words, *value.words)
            value = _Value(words, is_array=True) if before.is_array else _Value((_together(words, line),))
        if condition and before != value and not (adds and value.is_array):
            self.conditional.add(name)
        elif not condition:
            self.conditional.discard(name)
        self.values[name] = value
        return True

    def _text(self, text: str, line: int, pattern: regex.Pattern[str] = _PIECE) -> _Value:
        """The one text that pieces stand for where no words are cut, as in an assignment."""
        words = [word for value in self._values(text, pattern) for word in value.words]
        return _Value((_together(words, line),))

    def _values(self, text: str, pattern: regex.Pattern[str] = _PIECE) -> Iterator[_Value]:
        """What the pieces of a written word stand for, in their order."""
        for piece in pattern.finditer(text):
            groups = piece.groupdict()
            if groups["open"] is not None:
                yield replace(self._expand(groups["open"]), is_cut=pattern is _PIECE)
            elif groups.get("quoted") is not None:
                inside = list(self._values(groups["quoted"], _QUOTED))
                yield from inside or [_literal("")]
            else:
                kinds = ("escaped", "single", "plain")
                literal = next(groups[kind] for kind in kinds if groups.get(kind) is not None)
                yield _literal("" if groups.get("escaped") == "\n" else literal)

    def _expand(self, written: str) -> _Value:
        """What $NAME, ${...} or $((...)) stands for; itself where nothing says so."""
        unknown = _Value((Word(written, 0, (written,)),))
        if written.startswith("$(("):
            number = self._arithmetic(written[3:-2])
            return unknown if number is None else _literal(str(number))
        if written.startswith(("$(", "`")):
            said = self._output(written.strip("`") if written.startswith("`") else written[2:-1])
            return unknown if said is None else _literal(said)
        read = _PARAMETER.fullmatch(written[2:-1] if written.startswith("${") else written[1:])
        if read is None:
            return unknown
        name, entries, operator, default = read.groups()
        unknown = _Value((Word(written, 0, (written,), (name,)),))
        value = self._variable(name)
        if name in self.conditional and name not in self.fixed:
            return unknown
        is_empty = value is None or not any(word.text for word in value.words)
        if (operator in ("-", "=") and value is None) or (operator in (":-", ":=") and is_empty):
            return self._text(default, 0)
        if operator in ("+", ":+") or value is None:
            return unknown
        if value.is_array and entries in (None, "[0]"):
            return _Value(value.words[:1] or (Word("", 0),))
        words = (
            replace(word, variables=word.variables or (name,)) if word.unresolved else word
            for word in value.words
        )
        return replace(value, words=tuple(words))

    def _output(self, text: str) -> str | None:
        """What commands that only name files and folders print; None for others."""
        commands = []
        for written, _ in _cut(text, 0):
            words = [word for piece, line in written for word in self._words(piece, line)]
            if any(word.unresolved for word in words):
                return None
            commands.append([word.text for word in words])
        return ran(commands, self.fixed.get("PWD"))

    def _variable(self, name: str) -> _Value | None:
        return _literal(self.fixed[name]) if name in self.fixed else self.values.get(name)

    def _arithmetic(self, text: str) -> int | None:
        """The value of whole-number arithmetic; None where a part of it is unknown or no number."""
        filled = self._text(text, 0, _QUOTED).words[0]
        if filled.unresolved:
            return None
        try:
            return self._evaluate(ast.parse(filled.text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _evaluate(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                value = self._variable(name)
                is_known = value is not None and (name in self.fixed or name not in self.conditional)
                return int(value.words[0].text if value is not None and is_known else name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                return _combine(operator, self._evaluate(left), self._evaluate(right))
        raise ValueError("no whole-number arithmetic")


@dataclass(frozen=True)
class _Branch:
    """Where the script is inside of a condition."""

    test: bool | None
    """Whether its commands run; None where that is not known."""
    line: int
    was_taken: bool | None = False
    """Whether a branch above has run."""

    def next(self, test: bool | None, line: int) -> _Branch:
        """The branch below, with its own test."""
        above = (self.was_taken, self.test)
        was_taken = True if True in above else None if None in above else False
        if was_taken:
            return _Branch(False, line, was_taken)
        return _Branch(test if was_taken is False or test is False else None, line, was_taken)


def _literal(text: str) -> _Value:
    return _Value((Word(text, 0),))


def _fields(value: _Value) -> Sequence[Word]:
    """The words that a value becomes in a command: text of an unquoted variable is cut at its blanks."""
    if not value.is_cut:
        return value.words if value.is_array else (_together(value.words, 0),)
    return [
        replace(word, text=part)
        for word in value.words
        for part in ([word.text] if word.unresolved else word.text.split())  # what nobody knows stays whole
    ]


def _together(words: Sequence[Word], line: int) -> Word:
    """The texts of all words as one word."""
    unresolved = tuple(name for word in words for name in word.unresolved)
    variables = tuple(name for word in words for name in word.variables)
    return Word("".join(word.text for word in words), line, unresolved, variables)


def _combine(operator: ast.operator, left: int, right: int) -> int:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():  # a shell rounds towards 0
            return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        case ast.Mod():
            return abs(left) % abs(right) * (1 if left >= 0 else -1)
    raise ValueError("no whole-number arithmetic")
