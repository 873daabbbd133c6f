"""Sending of a folder of this machine to a hub or a store.

Sent files are then listed there and compared: sizes everywhere, and the hashes that a hub states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.utils.atomic_io import sha256_of_file
from strop.utils.hub.addresses import ModelAddress, parse_address
from strop.utils.hub.models import repo_of
from strop.utils.hub.repo import Listing, Refused, Repo, Sending, Unreachable


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A folder that lies elsewhere now."""

    address: ModelAddress
    revision: str
    """The commit at a hub, where it tells one; else empty."""
    num_files: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Target of a folder that is sent."""

    address: ModelAddress
    repo: Repo
    options: Sending
    key: str
    """Option that named it, for sentences."""

    def send(self, folder: Path) -> Sent:
        """Send all files of a folder and compare what is there with them.

        Raises:
            ValueError: it cannot be sent, or something else arrived.
        """
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        total = sum(sizes.values())
        self.options.say(f"sending {len(sizes)} files, {total / 2**20:.1f} MiB, to {self.address}")
        try:
            listing = self.repo.send(folder, self.options)
        except (Refused, Unreachable, TimeoutError) as error:
            raise ValueError(f"{self.key} {str(self.address)!r}: {error}") from error
        for name, size in sizes.items():
            self._compare(folder / name, name, size, listing)
        return Sent(address=self.address, revision=listing.revision, num_files=len(sizes), num_bytes=total)

    def _compare(self, path: Path, name: str, size: int, listing: Listing) -> None:
        stated = listing.sha256.get(name)
        is_same = listing.sizes.get(name) == size
        if not is_same or (stated is not None and sha256_of_file(path) != stated):
            description = (
                f"has {listing.sizes[name]} bytes of {size}" if name in listing.sizes else "is not there"
            )
            raise ValueError(
                f"{self.key} {str(self.address)!r}: {name} was sent, and {description} or other contents: send it again"
            )


def destination(text: str, options: Sending, *, key: str = "--to") -> Destination:
    """The target that a name means, found ready to take a folder.

    Args:
        text: ORG/NAME, modelscope:ORG/NAME or a URL.
        options: of sending.
        key: option that `text` is from, for error sentences.

    Raises:
        ValueError: it leads nowhere, or it takes nothing from us: the sentence says why, and what to do.
    """
    address = parse_address(text, key)
    if address.is_here:
        raise ValueError(
            f"{key} {text!r} is a folder of this machine: `strop export RUN --out DIR` writes one"
        )
    if address.kind == "url" and options.branch:
        raise ValueError(f"a branch ({options.branch}) is given beside {key} {text!r}, a URL, which has none")
    if address.revision:
        raise ValueError(f"{key} {text!r} names a revision; name the branch that takes it with --branch")
    try:
        repo = repo_of(address)
        repo.prepare(options)
    except (Refused, Unreachable) as error:
        raise ValueError(f"{key} {str(address)!r} takes nothing: {error}") from error
    return Destination(address=address, repo=repo, options=options, key=key)
