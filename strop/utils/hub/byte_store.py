"""Bytes under names below a URL, for processes that hand something to each other through a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from strop.utils.hub.repo import Refused, Unreachable, run_with_stall_limit
from strop.utils.hub.stores import converted_errors, has_folders, open_store

T = TypeVar("T")


class ByteStore:
    """A folder of a store, of any kind that fsspec knows; every call ends within a time."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Nothing is made there yet.

        Args:
            url: of the folder.
            timeout_s: limit of each call, in seconds.

        Raises:
            ConnectionError: the store cannot be used; the message says why.
        """
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._system, self._root = self._done(partial(open_store, self._url))
        self._has_folder = False

    def put(self, name: str, data: bytes) -> None:
        """Write one file.

        Raises:
            ConnectionError, TimeoutError: it was not written.
        """
        self._done(partial(self._put, name, data))

    def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Contents of one file, at most so many from its beginning; None where there is none.

        Raises:
            ConnectionError, TimeoutError: it cannot be read.
        """
        return self._done(partial(self._get, name, max_bytes))

    def remove(self, name: str) -> None:
        """Remove one file; nothing where there is none.

        Raises:
            ConnectionError, TimeoutError: it is still there.
        """
        self._done(partial(self._remove, name))

    def remove_all(self) -> None:
        """Remove the folder with what is in it; nothing where there is none.

        Raises:
            ConnectionError, TimeoutError: it is still there.
        """
        self._done(self._remove_all)

    def _put(self, name: str, data: bytes) -> None:
        if not self._has_folder and has_folders(self._system):
            self._system.makedirs(self._root, exist_ok=True)
        self._has_folder = True
        self._system.pipe_file(f"{self._root}/{name}", data)

    def _get(self, name: str, max_bytes: int) -> bytes | None:
        self._system.invalidate_cache()
        try:
            data: bytes = self._system.cat_file(f"{self._root}/{name}", start=0, end=max_bytes)
        except FileNotFoundError:
            return None
        return data

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def _remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._system.rm(self._root, recursive=True)

    def _done(self, call: Callable[[], T]) -> T:
        def converted() -> T:
            with converted_errors():
                return call()

        try:
            return run_with_stall_limit(converted, int, self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"the store {self._url} did not answer within {self._timeout_s:g} s"
            ) from error
        except (Refused, Unreachable) as error:
            raise ConnectionError(f"the store {self._url} cannot be used: {error}") from error
