"""The commands of a launch script as a shell would see them, without running any of it.

Filled in are assignments (also with export or as arrays), $NAME, ${NAME}, ${NAME:-default}, ${NAME[@]} and
whole-number arithmetic. Everything else that a shell computes, such as $(commands) and unset variables, stays as it is
written, and the word says so; so does a variable whose value depends on a condition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strop.config.migration.shell_words import Lexer, Piece, RawWord, expansion_end, plain

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"^([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi", "done", "esac"}
_LEADING = {"then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup", "env"}
_DECLARING = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True)
class Word:
    """One word of a command, variables filled in."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()
    """What in the text is still as it was written, because nothing says what it stands for."""


@dataclass(frozen=True)
class Command:
    """One command: a program and its arguments."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class _Value:
    """What an expansion stands for: one text, or the entries of an array."""

    words: tuple[Word, ...]
    is_array: bool = False


def read_commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in their order, with the assignments before them filled in.

    Args:
        text: of the script.
        variables: values of variables, whatever the script assigns to them.

    Raises:
        ValueError: a quote or a bracket is never closed.
    """
    shell = _Shell(variables or {})
    commands = []
    for raw in Lexer(text).commands():
        words = shell.run(raw)
        if words:
            commands.append(Command(words=tuple(words), line=words[0].line))
    return commands


class _Shell:
    """Variables, as the assignments of a script leave them."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        self.fixed = fixed
        self.values: dict[str, _Value] = {}
        self.depth = 0
        self.conditional: set[str] = set()

    def run(self, raw: Sequence[RawWord]) -> list[Word]:
        """The words of a command; its assignments are remembered and left out."""
        rest = list(raw)
        while rest and (head := plain(rest[0])) in _OPENING | _CLOSING | _LEADING | _DECLARING:
            rest.pop(0)
            self.depth += (head in _OPENING) - (head in _CLOSING)
            while head in _DECLARING and rest and plain(rest[0]).startswith("-"):
                rest.pop(0)
        while rest and self._assign(rest[0]):
            rest.pop(0)
        return [word for part in rest for word in self.words(part)]

    def words(self, raw: RawWord) -> list[Word]:
        """The words that one written word stands for: none, one, or those of an array or of unquoted text."""
        done: list[Word] = []
        now: Word | None = None
        for piece in raw.pieces:
            for value in self._values(piece):
                for index, part in enumerate(_fields(value, piece)):
                    if index and now is not None:
                        done.append(now)
                        now = None
                    now = _joined(now, part, raw.line if now is None and not value.is_array else None)
        return done if now is None else [*done, now]

    def _assign(self, raw: RawWord) -> bool:
        if not raw.pieces or raw.pieces[0].quote != "none":
            return False
        read = _ASSIGNMENT.match(raw.pieces[0].text)
        if read is None:
            return False
        name, adds = read[1], bool(read[2])
        if raw.array is not None:
            value = _Value(tuple(word for entry in raw.array for word in self.words(entry)), is_array=True)
        else:
            first = Piece(raw.pieces[0].text[read.end() :], "none")
            value = self._text((first, *raw.pieces[1:]), raw.line)
        before = self.values.get(name)
        if adds and before is not None:
            words = (*before.words, *value.words)
            value = _Value(words, is_array=True) if before.is_array else _Value((_together(words, raw.line),))
        if self.depth and before != value:
            self.conditional.add(name)
        elif not self.depth:
            self.conditional.discard(name)
        self.values[name] = value
        return True

    def _text(self, pieces: Sequence[Piece], line: int) -> _Value:
        """The one text that pieces stand for where no words are cut, as in an assignment."""
        words = [word for piece in pieces for value in self._values(piece) for word in value.words]
        return _Value((_together(words, line),))

    def _values(self, piece: Piece) -> list[_Value]:
        """What the parts of a piece stand for, in their order."""
        if piece.quote == "single":
            return [_literal(piece.text)]
        found: list[_Value] = []
        text, position, literal = piece.text, 0, ""
        while position < len(text):
            char = text[position]
            if (
                char == "\\"
                and piece.quote == "double"
                and text[position + 1 : position + 2] in tuple('$`"\\\n')
            ):
                literal += text[position + 1].replace("\n", "")
                position += 2
            elif char in "$`" and (end := expansion_end(text, position)) > position + 1:
                if literal:
                    found.append(_literal(literal))
                found.append(self._expand(text[position:end]))
                literal, position = "", end
            else:
                literal += char
                position += 1
        return [*found, _literal(literal)] if literal or not found else found

    def _expand(self, written: str) -> _Value:
        """What $NAME, ${...} or $((...)) stands for; itself where nothing says so."""
        unknown = _Value((Word(written, 0, (written,)),))
        if written.startswith("$(("):
            number = self._arithmetic(written[3:-2])
            return unknown if number is None else _literal(str(number))
        if written.startswith(("$(", "`")):
            return unknown
        read = _PARAMETER.match(written[2:-1] if written.startswith("${") else written[1:])
        if read is None:
            return unknown
        name, entries, operator, default = read.groups()
        value = self._variable(name)
        if name in self.conditional and name not in self.fixed:
            return unknown
        is_empty = value is None or not any(word.text for word in value.words)
        if (operator in ("-", "=") and value is None) or (operator in (":-", ":=") and is_empty):
            return self._text(tuple(Lexer(default).pieces()), 0)
        if operator in ("+", ":+") or value is None:
            return unknown
        if value.is_array and not entries:
            return _Value(value.words[:1] or (Word("", 0),))
        return value

    def _variable(self, name: str) -> _Value | None:
        return _literal(self.fixed[name]) if name in self.fixed else self.values.get(name)

    def _arithmetic(self, text: str) -> int | None:
        """The value of whole-number arithmetic; None where a part of it is unknown or no number."""
        filled = self._text((Piece(text, "double"),), 0).words[0]
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


def _literal(text: str) -> _Value:
    return _Value((Word(text, 0),))


def _fields(value: _Value, piece: Piece) -> Sequence[Word]:
    """The words that a value becomes in a command: text of an unquoted variable is cut at its blanks."""
    is_variable = piece.quote == "none" and piece.text.startswith(("$", "`"))
    if not is_variable:
        return value.words if value.is_array else (_together(value.words, 0),)
    fields = []
    for word in value.words:
        parts = [word.text] if word.text == piece.text else word.text.split()
        fields += [replace(word, text=part, unresolved=_within(part, word.unresolved)) for part in parts]
    return fields


def _within(text: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in text)


def _joined(left: Word | None, right: Word, line: int | None) -> Word:
    """Both texts as one word; the line is `line`, or else that of the part that has one."""
    if left is None:
        return replace(right, line=line or right.line)
    return replace(left, text=left.text + right.text, unresolved=(*left.unresolved, *right.unresolved))


def _together(words: Sequence[Word], line: int) -> Word:
    """The texts of all words as one word."""
    return Word(
        "".join(word.text for word in words), line, tuple(name for word in words for name in word.unresolved)
    )


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
