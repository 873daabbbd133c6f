"""A launch script cut into commands and words as a shell cuts it; nothing in them is filled in yet.

Understood: comments, continued lines, quotes, several commands in a line, redirections, here-documents, and arrays in
assignments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Quote = Literal["none", "single", "double"]

_SEPARATORS = " \t\r\n;&|()<>"
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$]")


@dataclass(frozen=True)
class Piece:
    """A part of a word that is quoted in one way."""

    text: str
    quote: Quote


@dataclass
class RawWord:
    """A word as it is written."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[RawWord] | None = None
    """The entries of NAME=( ... ), whose pieces are `NAME=`."""


class Lexer:
    """Cuts a script into commands and words."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line = 1

    def commands(self) -> Iterator[list[RawWord]]:
        """The raw words of each command; commands without any are left out."""
        words: list[RawWord] = []
        for word in self._words(closing=""):
            if word is None:
                if words:
                    yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the whole text as of a single word, whose blanks and separators are characters."""
        while self.position < len(self.text):
            if self.text[self.position] in _SEPARATORS:
                self.position += 1
                yield Piece(self.text[self.position - 1], "single")
            else:
                yield self._piece()

    def _words(self, closing: str) -> Iterator[RawWord | None]:
        """Words up to an unquoted `closing` or the end; None where a command ends."""
        word: RawWord | None = None
        is_target = False  # of a redirection
        documents: list[str] = []
        text = self.text
        while self.position < len(text):
            char = text[self.position]
            if char in _SEPARATORS and word is not None and not self._opens_array(word, char):
                if not is_target and not (char in "<>" and plain(word).isdigit()):
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
                word = word or RawWord(line=self.line)
                word.pieces.append(self._piece())
        if word is not None and not is_target:
            yield word

    def _opens_array(self, word: RawWord, char: str) -> bool:
        return (
            char == "(" and word.array is None and re.fullmatch(r"[A-Za-z_]\w*\+?=", plain(word)) is not None
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

    def _piece(self) -> Piece:
        """One piece of a word: quoted text, an expansion, or plain characters."""
        start, text = self.position, self.text
        char = text[start]
        if char == "\\":
            self.position += 2
            return Piece(text[start + 1 : start + 2], "single")
        if char == "'":
            end = text.find("'", start + 1)
            return self._take(end, start + 1, "single", "'")
        if char == '"':
            return self._take(_closing_quote(text, start + 1), start + 1, "double", '"')
        if char in "$`":
            end = expansion_end(text, start)
            self._count(start, end)
            self.position = end
            return Piece(text[start:end], "none")
        while self.position < len(text) and text[self.position] not in " \t\r\n;&|()<>\\'\"$`":
            self.position += 1
        if self.position == start:  # a lone closing bracket and the like
            self.position += 1
        return Piece(text[start : self.position], "none")

    def _take(self, end: int, start: int, quote: Quote, mark: str) -> Piece:
        if end < 0:
            raise ValueError(f"line {self.line}: the quote {mark} that begins there is never closed")
        self._count(start, end)
        self.position = end + 1
        return Piece(self.text[start:end], quote)

    def _count(self, start: int, end: int) -> None:
        self.line += self.text.count("\n", start, end)


def plain(word: RawWord) -> str:
    """Its text where nothing in it is quoted; "" where something is."""
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
