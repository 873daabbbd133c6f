"""Results of a shell's tests and commands that need nothing but texts and names of folders."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from fnmatch import fnmatchcase

_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def evaluate_test(words: Sequence[str]) -> bool | None:
    """Result of a test such as `[ a = b ]`; None for one that needs more than texts and numbers.

    Args:
        words: of the command, from `[`, `[[`, `test`, `true` or `false` on.
    """
    head, *inside = words
    if head in ("true", "false"):
        return head == "true"
    closing = {"[": "]", "[[": "]]"}.get(head)
    if closing and inside[-1:] == [closing]:
        inside = inside[:-1]
    if inside[:1] == ["!"]:
        opposite = evaluate_test(["test", *inside[1:]])
        return None if opposite is None else not opposite
    match inside:
        case ["-n", text] | [text]:
            return text != ""
        case ["-z", text]:
            return text == ""
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right) if head == "[[" else left == right
        case [left, "!=", right]:
            return not (fnmatchcase(left, right) if head == "[[" else left == right)
        case [left, operator, right] if operator in _NUMBERS:
            try:
                return bool(_NUMBERS[operator](int(left), int(right)))
            except ValueError:
                return None
    return None


def command_output(commands: Sequence[Sequence[str]], current_folder: str | None) -> str | None:
    """Output of commands that name files and folders and do nothing else; None for others.

    Args:
        commands: with their words.
        current_folder: in which they run; None where that is not known.
    """
    printed = None
    for command in commands:
        match [word for word in command if word != "--"]:
            case ["cd", ("-P" | "-L"), folder] | ["cd", folder]:
                if current_folder is None:
                    return None
                current_folder = posixpath.normpath(posixpath.join(current_folder, folder))
            case ["pwd"] | ["pwd", "-P" | "-L"]:
                printed = current_folder
            case ["dirname", path]:
                printed = posixpath.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")
            case ["basename", path]:
                printed = posixpath.basename(path.rstrip("/"))
            case ["basename", path, ending]:
                printed = posixpath.basename(path.rstrip("/")).removesuffix(ending)
            case ["realpath", path] | ["readlink", "-f", path]:
                printed = (
                    None
                    if current_folder is None
                    else posixpath.normpath(posixpath.join(current_folder, path))
                )
            case ["echo", *words] if not words or not words[0].startswith("-"):
                printed = " ".join(words)
            case _:
                return None
        if printed is None and command[0] != "cd":
            return None
    return printed
