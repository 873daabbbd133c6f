"""Errors of the clients of stores as sentences that say what to do."""

from __future__ import annotations

import errno

from strop.utils.hub.repo import Refused, Unreachable, reason

_DENIED = (401, 403)
"""HTTP status of an answer to somebody who may not."""
_EXTRAS = {"s3fs": "'strop[s3]'", "gcsfs": "'strop[gcs]'"}
"""Extras of strop by the client of a store that they bring."""


def convert_error(error: Exception) -> Exception:
    """An error of a store's client as Refused or Unreachable, or one of this machine's disk."""
    if is_of_disk(error):
        return error
    error = root_error(error)
    kind = Refused if is_refusal(error) else Unreachable
    return kind(f"{reason(error)}; {remedy(error)}")


def root_error(error: Exception) -> Exception:
    """The error below an error: fsspec says of whatever fails on the web that there is no such file."""
    below = error.__cause__
    is_web = isinstance(error, FileNotFoundError) and type(below).__module__.startswith("aiohttp")
    return below if is_web and isinstance(below, Exception) and _status(below) != 404 else error


def is_refusal(error: Exception) -> bool:
    """True where asking again is of no use: there is no such thing, or it is not for us, or a package is missing."""
    kinds = (FileNotFoundError, ImportError, ValueError, PermissionError)
    return isinstance(error, kinds) or _status(error) == 404 or _is_denied(error) or _is_of_java(error)


def is_of_disk(error: Exception) -> bool:
    """True where the disk of this machine is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def remedy(error: Exception) -> str:
    """Advice about an error of a store."""
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return "check the address"
    if _is_denied(error):
        return (
            "the store asks who you are: give its client what lets it in (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or AWS_PROFILE for s3://, GOOGLE_APPLICATION_CREDENTIALS for gs://)"
        )
    if _is_of_java(error):
        return (
            "hdfs:// goes through Hadoop's library, which needs JAVA_HOME, HADOOP_HOME and CLASSPATH; pip install "
            "hdfs-native needs none of them, and webhdfs://HOST:PORT/FOLDER the package requests alone"
        )
    if isinstance(error, ImportError):
        package = _package(error)
        return (
            f"pip install {_EXTRAS.get(package, package)}" if package else "install the package that it names"
        )
    if isinstance(error, ValueError) and "rotocol" in str(error):
        return "use a kind of URL that fsspec knows, such as s3://, gs://, https:// or file://"
    if isinstance(error, ConnectionError) and "broke off" in str(error):
        return "start again"
    if isinstance(error, TimeoutError):
        return "check the address, and that this machine can reach it"
    return "check the address, and that this machine may read it"


def _package(error: ImportError) -> str:
    """The package that a client of fsspec lacks, read from its error."""
    below = error if error.name else error.__cause__
    return (getattr(below, "name", None) or "").partition(".")[0]


def _status(error: Exception) -> int | None:
    """The HTTP status that a client's error carries."""
    name = "status" if hasattr(error, "status") else "code"
    value = getattr(error, name, None)
    return int(value) if isinstance(value, int | str) and str(value).isdecimal() else None


def _is_denied(error: Exception) -> bool:
    is_unknown = "credential" in type(error).__name__.lower()
    is_forbidden = isinstance(error, OSError) and str(error).startswith("Forbidden")  # all that gcsfs says
    return isinstance(error, PermissionError) or is_unknown or is_forbidden or _status(error) in _DENIED


def _is_of_java(error: Exception) -> bool:
    return isinstance(error, OSError) and any(
        name in str(error) for name in ("libjvm", "libhdfs", "CLASSPATH")
    )
