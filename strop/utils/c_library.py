"""Functions in C, compiled once for a machine: with gcc, into the user's cache, in about a second."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 60.0
WIDE_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
"""Words for gcc: AVX-512 is used in full where there is one. On other processors gcc does not know them."""
FUSED_SUMS = ("--param=avoid-fma-max-bits=0",)
"""A word for gcc: a product and the sum that it goes into are one instruction everywhere. For some processors (AMD's
Zen 2 and 3 among them) it would take two in a loop with one sum, and a row alone got other last digits than one beside
others."""
VECTORS = Path(__file__).with_name("vectors.h")
"""Header of the functions of several folders."""


def c_library(
    source: Path, *, flags: Sequence[str], doing: str, included: Sequence[Path] = ()
) -> Path | None:
    """The shared library of one C file; None where gcc is missing or fails.

    Args:
        source: the file.
        flags: words for gcc, definitions included.
        doing: what runs in torch then, for the log: a failure is told, a missing gcc is not.
        included: files that it includes, by their names alone, beside those of the compiler.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    try:
        library = cache_folder() / f"{source.stem}-{_made_of(compiler, [source, *included], flags)}.so"
        if not library.is_file():
            folders = dict.fromkeys(f"-I{file.parent}" for file in included)
            _compile(compiler, source, [*flags, *folders], library)
        ctypes.CDLL(str(library))
        return library
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("%s runs in torch, which is slower than compiled: %s", doing, error)
        return None


def cache_folder() -> Path:
    """Folder of compiled functions, in the user's cache; nobody else may write there.

    Raises:
        PermissionError: somebody else may.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "strop" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(
            f"{folder} would hold compiled code and can be changed by others; make it yours alone (chmod 700)"
        )
    return folder


def _made_of(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    """A word for everything that the compiled function depends on: sources, compiler, and what the processor can do."""
    parts = (*(source.read_bytes() for source in sources), _target(compiler), " ".join(flags).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


@cache
def _target(compiler: str) -> bytes:
    """The compiler's version, and each instruction set with whether it takes this processor to have it.

    Asked apart: gcc that is asked for its version says nothing else.
    """
    questions = (("--version",), ("-march=native", "-Q", "--help=target"))
    answers = [
        subprocess.run([compiler, *words], capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
        for words in questions
    ]
    return b"\0".join(answers)


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """In two steps: a link with -ffast-math would change how the whole process rounds small numbers."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        part, whole = f"{folder}/part.o", f"{folder}/whole.so"
        for words in (
            [compiler, *flags, "-c", str(source), "-o", part],
            [compiler, "-shared", "-fopenmp", part, "-o", whole, "-lm"],
        ):
            result = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            if result.returncode:
                raise RuntimeError(f"gcc could not compile {source.name}: {result.stderr.strip()[-500:]}")
        Path(whole).replace(library)  # whole or not at all, also beside other processes
