"""The commands of a launch script as a shell would see them, without running any of it.

Understood: comments, continued lines, quotes, several commands in a line, redirections, here-documents, assignments
(also with export or as arrays), $NAME, ${NAME}, ${NAME:-default}, ${NAME[@]} and whole-number arithmetic. Everything
else that a shell computes, such as $(commands) and unset variables, stays as it is written, and the word says so; so
does a variable whose value depends on a condition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Quote = Literal["none", "single", "double"]

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"^([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
_SEPARATORS = " \t\r\n;&|()<>"
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$]")
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
class _Piece:
    text: str
    quote: Quote


@dataclass
class _RawWord:
    line: int
    pieces: list[_Piece] = field(default_factory=list)
    array: list[_RawWord] | None = None
    """The entries of NAME=( ... ), whose pieces are `NAME=`."""


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
    for raw in _Lexer(text).commands():
        words = shell.run(raw)
        if words:
            commands.append(Command(words=tuple(words), line=words[0].line))
    return commands


class _Lexer:
    """Cuts a script into commands and words."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line = 1

    def commands(self) -> Iterator[list[_RawWord]]:
        """The raw words of each command; commands without any are left out."""
        words: list[_RawWord] = []
        for word in self._words(closing=""):
            if word is None:
                if words:
                    yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words

    def pieces(self) -> Iterator[_Piece]:
        """The pieces of the whole text as of a single word, whose blanks and separators are characters."""
        while self.position < len(self.text):
            if self.text[self.position] in _SEPARATORS:
                self.position += 1
                yield _Piece(self.text[self.position - 1], "single")
            else:
                yield self._piece()

    def _words(self, closing: str) -> Iterator[_RawWord | None]:
        """Words up to an unquoted `closing` or the end; None where a command ends."""
        word: _RawWord | None = None
        is_target = False  # of a redirection
        documents: list[str] = []
        text = self.text
        while self.position < len(text):
            char = text[self.position]
            if char in _SEPARATORS and word is not None and not self._opens_array(word, char):
                if not is_target and not (char in "<>" and _plain(word).isdigit()):
                    yield word
                is_target = False
                word = None
            if text.startswith("\\\n", self.position):
                self.position += 2
                self.line += 1
            elif char == closing:
                self.position += 1
                break
            elif char in " \t\r":
                self.position += 1
            elif char == "\n":
                self.position += 1
                self.line += 1
                self._skip_documents(documents)
                if not closing:
                    yield None
            elif char == "#" and word is None:
                end = text.find("\n", self.position)
                self.position = len(text) if end < 0 else end
            elif char in "<>" or text.startswith("&>", self.position):
                is_target = self._redirection(documents)
            elif char == "(" and word is not None:
                self.position += 1
                word.array = [entry for entry in self._words(closing=")") if entry is not None]
            elif char in ";&|()":
                self.position += 1
                yield None
            else:
                word = word or _RawWord(line=self.line)
                word.pieces.append(self._piece())
        if word is not None and not is_target:
            yield word

    def _opens_array(self, word: _RawWord, char: str) -> bool:
        return (
            char == "(" and word.array is None and re.fullmatch(r"[A-Za-z_]\w*\+?=", _plain(word)) is not None
        )

    def _redirection(self, documents: list[str]) -> bool:
        """Step over the operator; True where the next word is its target and no argument."""
        read = re.compile(r"&?[<>]+[&|]?-?\s*").match(self.text, self.position)
        assert read is not None, "called at a redirection"
        self.position = read.end()
        if read[0].rstrip().rstrip("-") == "<<":
            delimiter = re.compile(r"[\"']?(\w+)[\"']?").match(self.text, self.position)
            if delimiter:
                documents.append(delimiter[1])
                self.position = delimiter.end()
                return False
        return True

    def _skip_documents(self, documents: list[str]) -> None:
        while documents:
            delimiter = documents.pop(0)
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                body = self.text[self.position : end]
                self.position = min(end + 1, len(self.text))
                self.line += 1
                if body.strip() == delimiter:
                    break

    def _piece(self) -> _Piece:
        """One piece of a word: quoted text, an expansion, or plain characters."""
        start, text = self.position, self.text
        char = text[start]
        if char == "\\":
            self.position += 2
            return _Piece(text[start + 1 : start + 2], "single")
        if char == "'":
            end = text.find("'", start + 1)
            return self._take(end, start + 1, "single", "'")
        if char == '"':
            return self._take(_closing_quote(text, start + 1), start + 1, "double", '"')
        if char in "$`":
            end = expansion_end(text, start)
            self._count(start, end)
            self.position = end
            return _Piece(text[start:end], "none")
        while self.position < len(text) and text[self.position] not in " \t\r\n;&|()<>\\'\"$`":
            self.position += 1
        if self.position == start:  # a lone closing bracket and the like
            self.position += 1
        return _Piece(text[start : self.position], "none")

    def _take(self, end: int, start: int, quote: Quote, mark: str) -> _Piece:
        if end < 0:
            raise ValueError(f"line {self.line}: the quote {mark} that begins there is never closed")
        self._count(start, end)
        self.position = end + 1
        return _Piece(self.text[start:end], quote)

    def _count(self, start: int, end: int) -> None:
        self.line += self.text.count("\n", start, end)


def _plain(word: _RawWord) -> str:
    return "".join(piece.text for piece in word.pieces) if all(p.quote == "none" for p in word.pieces) else ""


def _closing_quote(text: str, position: int) -> int:
    """Where a double quote ends; quotes inside $( ) and ${ } are their own. -1 where it never does."""
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text[position] in "$`":
            position = expansion_end(text, position)
        elif text[position] == '"':
            return position
        else:
            position += 1
    return -1


def expansion_end(text: str, start: int) -> int:
    """Where the expansion that begins at a $ or ` ends.

    Raises:
        ValueError: its bracket is never closed.
    """
    if text[start] == "`":
        end = text.find("`", start + 1)
        return _found(end, text, start) + 1
    if text.startswith("$(", start) or text.startswith("${", start):
        opening, closing = text[start + 1], {"(": ")", "{": "}"}[text[start + 1]]
        depth, position = 0, start + 1
        while position < len(text):
            char = text[position]
            if char == "\\":
                position += 1
            elif char == "'" and opening == "(":
                position = _found(text.find("'", position + 1), text, start)
            elif char == '"':
                position = _found(_closing_quote(text, position + 1), text, start)
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    return position + 1
            position += 1
        _found(-1, text, start)
    name = _NAME.match(text, start + 1)
    return name.end() if name else start + 1


def _found(end: int, text: str, start: int) -> int:
    if end < 0:
        line = text.count("\n", 0, start) + 1
        raise ValueError(f"line {line}: what begins with {text[start : start + 12]!r} there is never closed")
    return end


class _Shell:
    """Variables, as the assignments of a script leave them."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        self.fixed = fixed
        self.values: dict[str, _Value] = {}
        self.depth = 0
        self.conditional: set[str] = set()

    def run(self, raw: Sequence[_RawWord]) -> list[Word]:
        """The words of a command; its assignments are remembered and left out."""
        rest = list(raw)
        while rest and (head := _plain(rest[0])) in _OPENING | _CLOSING | _LEADING | _DECLARING:
            rest.pop(0)
            self.depth += (head in _OPENING) - (head in _CLOSING)
            while head in _DECLARING and rest and _plain(rest[0]).startswith("-"):
                rest.pop(0)
        while rest and self._assign(rest[0]):
            rest.pop(0)
        return [word for part in rest for word in self.words(part)]

    def words(self, raw: _RawWord) -> list[Word]:
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

    def _assign(self, raw: _RawWord) -> bool:
        if not raw.pieces or raw.pieces[0].quote != "none":
            return False
        read = _ASSIGNMENT.match(raw.pieces[0].text)
        if read is None:
            return False
        name, adds = read[1], bool(read[2])
        if raw.array is not None:
            value = _Value(tuple(word for entry in raw.array for word in self.words(entry)), is_array=True)
        else:
            first = _Piece(raw.pieces[0].text[read.end() :], "none")
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

    def _text(self, pieces: Sequence[_Piece], line: int) -> _Value:
        """The one text that pieces stand for where no words are cut, as in an assignment."""
        words = [word for piece in pieces for value in self._values(piece) for word in value.words]
        return _Value((_together(words, line),))

    def _values(self, piece: _Piece) -> list[_Value]:
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
            return self._text(tuple(_Lexer(default).pieces()), 0)
        if operator in ("+", ":+") or value is None:
            return unknown
        if value.is_array and not entries:
            return _Value(value.words[:1] or (Word("", 0),))
        return value

    def _variable(self, name: str) -> _Value | None:
        return _literal(self.fixed[name]) if name in self.fixed else self.values.get(name)

    def _arithmetic(self, text: str) -> int | None:
        """The value of whole-number arithmetic; None where a part of it is unknown or no number."""
        filled = self._text((_Piece(text, "double"),), 0).words[0]
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


def _fields(value: _Value, piece: _Piece) -> Sequence[Word]:
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
