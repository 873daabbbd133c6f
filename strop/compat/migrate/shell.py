"""The commands of a launch script as a shell would see them, without running any of it.

Read are comments, continued lines, quotes, several commands in a line, redirections, here-documents and arrays.
Filled in are assignments (also with export, as arrays, or as the here-document of `read -d ''`), $NAME, ${NAME},
${NAME:-default}, ${NAME[@]}, ${NAME[2]}, ${#NAME}, what shell_parameters.py makes of a text, whole-number arithmetic,
and the names of folders: $(pwd), $(dirname "$0"), $(cd FOLDER && pwd). `cd` is followed. Tests of known values choose
their branch. Everything else that a shell computes, such as $(commands) and unset variables, stays as it is written,
and the word says so; so does a variable whose value depends on a condition that is not known, and an entry of an array
that is there on such a condition.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import regex  # type: ignore[import-untyped]

from strop.compat.migrate.shell_parameters import OPERATORS, expand_parameter
from strop.compat.migrate.shell_tests import command_output, evaluate_test
from strop.compat.migrate.shell_words import (
    PIECE,
    QUOTED,
    Command,
    Word,
    split_commands,
    with_heredoc_assignments,
)

_ASSIGNMENT = regex.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", regex.DOTALL)
_PARAMETER = regex.compile(
    rf"(?P<count>\#)?(?P<name>[A-Za-z_]\w*|[0-9@*])(?:\[(?P<entry>[^\]]*)\])?"
    rf"(?:(?P<operator>:?[-=+?]|{OPERATORS})(?P<operand>.*))?",
    regex.DOTALL,
)
_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi", "done", "esac"}
_LEADING = {"then", "do", "{", "}", "!", "time", "exec", "nohup", "env", "eval"}
_DECLARING = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True)
class _Value:
    """Value of a piece: one text, or the entries of an array."""

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
    for written, joint in split_commands(with_heredoc_assignments(text), 1):
        words = shell.run(written, joint)
        if words:
            commands.append(
                Command(
                    words=tuple(words),
                    line=words[0].line,
                    environment=shell.environment(),
                    exported=tuple(shell.exported),
                    folder=shell.folder,
                )
            )
    return commands


class _Shell:
    """Variables, as the assignments of a script leave them."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        self.fixed = fixed
        self.values: dict[str, _Value] = {}
        self.conditional: set[str] = set()
        self.exported: dict[str, None] = {}
        self.loops: dict[str, tuple[str, ...]] = {}
        """Variables of `for` loops, with the values that they take."""
        self.branches: list[_Branch] = []
        self.status: bool | None = True
        """Success of the last command; None where that is not known."""
        self.folder: Word | None = None
        """Folder that `cd` has led to; None: the one in which the script began."""
        self.outside: list[Word | None] = []
        """The same around each open parenthesis."""

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
        self._parentheses(joint)
        while rest and (head := rest[0][0]) in _OPENING | _CLOSING | _LEADING | _DECLARING | {"elif", "else"}:
            line = rest.pop(0)[1]
            if head in _OPENING:
                test = self._test(rest) if head == "if" else None
                if head == "for":
                    self._loop(rest)
                self.branches.append(_Branch(test, line))
                rest = [] if head == "if" and test is not None else rest
            elif head in _CLOSING and self.branches:
                self.branches.pop()
            elif head in ("elif", "else") and self.branches:
                self.branches[-1] = self.branches[-1].next(self._test(rest) if head == "elif" else True, line)
                rest = [] if head == "elif" and self.branches[-1].test is not None else rest
            while head in _DECLARING and rest and rest[0][0].startswith("-"):
                rest.pop(0)
            if head == "export":
                self.exported |= dict.fromkeys(text.partition("=")[0] for text, _ in rest)
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
        words = [word for text, line in rest for word in self._words(text, line)]
        if words and words[0].text in ("cd", "pushd"):
            self._change(words, condition)
            self.status = True
            return []
        if rest:
            self.status = None
        return words

    def _loop(self, rest: Sequence[tuple[str, int]]) -> None:
        """`for NAME in WORDS`: the variable has one value after the other."""
        if len(rest) < 2 or rest[1][0] != "in":
            return
        words = [word for text, line in rest[2:] for word in self._words(text, line)]
        self.loops[rest[0][0]] = (
            () if any(word.unresolved for word in words) else tuple(w.text for w in words)
        )
        self.values.pop(rest[0][0], None)

    def _parentheses(self, joint: str) -> None:
        """A subshell in parentheses changes the folder for itself alone."""
        for character in joint:
            if character == "(":
                self.outside.append(self.folder)
            elif character == ")" and self.outside:
                self.folder = self.outside.pop()

    def _change(self, words: Sequence[Word], condition: int) -> None:
        """`cd FOLDER`; one on a condition that is not known leads nobody knows where."""
        folders = [word for word in words[1:] if word.text not in ("--", "-P", "-L")]
        if not folders or folders[0].text == "-":
            return
        target, before = folders[0], self.folder.text if self.folder is not None else ""
        unknown = target.unresolved or ((f"the condition in line {condition}",) if condition else ())
        if self.folder is not None and not posixpath.isabs(target.text):
            unknown = (*self.folder.unresolved, *unknown)
        self.folder = Word(
            posixpath.normpath(posixpath.join(before, target.text)), target.line, unknown, target.variables
        )

    def _current_folder(self) -> str | None:
        """The folder that commands run in; None where that is not known."""
        start = self.fixed.get("PWD")
        if self.folder is None:
            return start
        path = self.folder.text if start is None else posixpath.join(start, self.folder.text)
        return None if self.folder.unresolved or not posixpath.isabs(path) else posixpath.normpath(path)

    def _runs(self, joint: str) -> bool | None:
        """True where a command is reached; None where that is not known."""
        tests = [branch.test for branch in self.branches]
        if joint in ("&&", "||"):
            tests.append(self.status if joint == "&&" else None if self.status is None else not self.status)
        if False in tests:
            return False
        return None if None in tests else True

    def _test(self, rest: Sequence[tuple[str, int]]) -> bool | None:
        """Result of a test of known values, such as `[ -n "$X" ]`; None for others and for other commands."""
        if not rest or rest[0][0] not in ("[", "[[", "test", "true", "false"):
            return None
        words = [word for text, line in rest for word in self._words(text, line)]
        if any(word.unresolved for word in words):
            return None
        return evaluate_test([word.text for word in words])

    def _words(self, text: str, line: int) -> list[Word]:
        """Words of the expansion of one written word: none, one, or those of an array or of unquoted text."""
        words: list[Word] = []
        current: Word | None = None
        for value in self._values(text):
            for index, part in enumerate(_fields(value)):
                if index and current is not None:
                    words.append(current)
                    current = None
                first = replace(part, line=part.line if value.is_array and part.line else line)
                current = first if current is None else _concatenated((current, part), current.line)
        return words if current is None else [*words, current]

    def _assign(self, text: str, line: int, condition: int) -> bool:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            return False
        name, adds, right = match.groups()
        if right.startswith("("):
            entries = [word for words, _ in split_commands(right[1:-1], line) for word in words]
            value = _Value(tuple(word for entry in entries for word in self._words(*entry)), is_array=True)
        else:
            value = self._text(right, line)
        before = self.values.get(name)
        if adds and before is not None:
            if before.is_array and condition:
                value = replace(value, words=tuple(replace(w, condition=condition) for w in value.words))
            words = (*before.words, *value.words)
            value = _Value(words, is_array=True) if before.is_array else _Value((_concatenated(words, line),))
        if condition and before != value and not (adds and value.is_array):
            self.conditional.add(name)
        elif not condition:
            self.conditional.discard(name)
        self.values[name] = value
        return True

    def _text(self, text: str, line: int, pattern: regex.Pattern[str] = PIECE) -> _Value:
        """The one text that pieces stand for where no words are cut, as in an assignment."""
        words = [word for value in self._values(text, pattern) for word in value.words]
        return _Value((_concatenated(words, line),))

    def _values(self, text: str, pattern: regex.Pattern[str] = PIECE) -> Iterator[_Value]:
        """Values of the pieces of a written word, in their order."""
        for piece in pattern.finditer(text):
            groups = piece.groupdict()
            if groups["open"] is not None:
                yield replace(self._expand(groups["open"]), is_cut=pattern is PIECE)
            elif groups.get("quoted") is not None:
                inside = list(self._values(groups["quoted"], QUOTED))
                yield from inside or [_literal("")]
            else:
                kinds = ("escaped", "single", "plain")
                literal = next(groups[kind] for kind in kinds if groups.get(kind) is not None)
                yield _literal("" if groups.get("escaped") == "\n" else literal)

    def _expand(self, written: str) -> _Value:
        """Expansion of $NAME, ${...} or $((...)); the text itself where its value is unknown."""
        unknown = _Value((Word(written, 0, (written,)),))
        if written.startswith("$(("):
            number = self._arithmetic(written[3:-2])
            return unknown if number is None else _literal(str(number))
        if written.startswith(("$(", "`")):
            output = self._output(written.strip("`") if written.startswith("`") else written[2:-1])
            return unknown if output is None else _literal(output)
        match = _PARAMETER.fullmatch(written[2:-1] if written.startswith("${") else written[1:])
        if match is None:
            return unknown
        name, operator = match["name"], match["operator"]
        unknown = _Value((Word(written, 0, (written,), (name,), self.loops.get(name, ())),))
        value = self._variable(name)
        if name in self.conditional and name not in self.fixed:
            return unknown
        is_empty = value is None or not any(word.text for word in value.words)
        if (operator in ("-", "=") and value is None) or (operator in (":-", ":=") and is_empty):
            return self._text(match["operand"], 0)
        if operator in ("+", ":+"):
            is_left_out = value is None if operator == "+" else is_empty
            return _literal("") if is_left_out else self._text(match["operand"], 0)
        if value is None:
            return unknown
        words = self._entries(value, match["entry"])
        if words is None:
            return unknown
        if match["count"]:
            all_entries = value.is_array and match["entry"] in ("@", "*")
            return _literal(str(len(words) if all_entries else len(words[0].text)))
        if operator is not None and (operator == ":" or operator.strip(":-=+?")):
            return self._transformed(words, operator, match["operand"]) or unknown
        expanded = (
            replace(word, variables=word.variables or (name,)) if word.unresolved else word for word in words
        )
        return replace(value, words=tuple(expanded), is_array=value.is_array and match["entry"] in ("@", "*"))

    def _entries(self, value: _Value, entry: str | None) -> tuple[Word, ...] | None:
        """The words of a variable, or of an array those that an expression asks for; None where that is not known."""
        if not value.is_array:
            return value.words if entry in (None, "0", "@", "*") else None
        if entry in ("@", "*"):
            return value.words
        number = 0 if entry is None else self._arithmetic(entry)
        if number is None or number >= len(value.words) or number < -len(value.words):
            return None if value.words or number is None else (Word("", 0),)
        return (value.words[number],)

    def _transformed(self, words: Sequence[Word], operator: str, operand: str) -> _Value | None:
        """Each word as an expression changes it; None where that is not known."""

        def fill(written: str) -> str | None:
            word = self._text(written, 0).words[0]
            return None if word.unresolved else word.text

        changed_words = []
        for word in words:
            text = (
                None
                if word.unresolved
                else expand_parameter(word.text, operator, operand, fill, self._arithmetic)
            )
            if text is None:
                return None
            changed_words.append(replace(word, text=text))
        return _Value(tuple(changed_words), is_array=len(changed_words) > 1)

    def _output(self, text: str) -> str | None:
        """Output of commands that only name files and folders; None for others."""
        commands = []
        for written, _ in split_commands(text, 0):
            words = [word for piece, line in written for word in self._words(piece, line)]
            if any(word.unresolved for word in words):
                return None
            commands.append([word.text for word in words])
        return command_output(commands, self._current_folder())

    def _variable(self, name: str) -> _Value | None:
        if name == "PWD":
            folder = self._current_folder()
            return None if folder is None else _literal(folder)
        return _literal(self.fixed[name]) if name in self.fixed else self.values.get(name)

    def _arithmetic(self, text: str) -> int | None:
        """The value of whole-number arithmetic; None where a part of it is unknown or no number."""
        filled = self._text(text, 0, QUOTED).words[0]
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
    """Branch of a condition in which the script is."""

    test: bool | None
    """True where its commands run; None where that is not known."""
    line: int
    was_taken: bool | None = False
    """True where a branch above has run."""

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
        return value.words if value.is_array else (_concatenated(value.words, 0),)
    return [
        replace(word, text=part)
        for word in value.words
        for part in ([word.text] if word.unresolved else word.text.split())  # what nobody knows stays whole
    ]


def _concatenated(words: Sequence[Word], line: int) -> Word:
    """The texts of all words as one word."""
    unresolved = tuple(name for word in words for name in word.unresolved)
    variables = tuple(name for word in words for name in word.variables)
    choices = next((word.choices for word in words if word.choices), ())
    return Word("".join(word.text for word in words), line, unresolved, variables, choices)


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
