"""Meaning of the name of a model.

models/qwen               a folder of this machine; a folder that exists always wins
ORG/NAME[@REVISION]       a model of the Hugging Face hub; hub:ORG/NAME where a folder ORG is in the way
modelscope:ORG/NAME[@REVISION]
s3://bucket/folder        any URL that fsspec knows
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.utils.field_types import nearest
from strop.utils.remote_path import folder_here, is_url

Kind = Literal["folder", "huggingface", "modelscope", "url"]

_REVISION = r"(?:@(?P<revision>[\w.][\w./-]*))?"
_ID = re.compile(rf"(?P<name>\w[\w.-]*/\w[\w.-]*){_REVISION}", re.ASCII)
_HUB_ID = re.compile(rf"(?:hub:|hf://)(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?){_REVISION}", re.ASCII)
_SCOPE_ID = re.compile(rf"modelscope:(?P<name>\w[\w.-]*/\w[\w.-]*){_REVISION}", re.ASCII)
_PAGE = re.compile(
    r"https?://(?:www\.)?(?P<site>huggingface\.co|hf\.co|modelscope\.cn)/(?:models/)?(?P<name>[\w.-]+/[\w.-]+)",
)
FORMS = "a model folder, ORG/NAME of the Hugging Face hub, modelscope:ORG/NAME, or a URL (s3://bucket/folder)"


@dataclass(frozen=True, kw_only=True)
class ModelAddress:
    """Location of a model."""

    kind: Kind
    name: str
    """The folder, the ORG/NAME, or the URL."""
    revision: str = ""
    """Branch, tag or commit of a hub; empty: its main one. Of a URL, the state of its files that is asked for."""

    @property
    def is_here(self) -> bool:
        """True if it is a folder of this machine."""
        return self.kind == "folder"

    def __str__(self) -> str:
        prefix = "modelscope:" if self.kind == "modelscope" else ""
        has_revision = self.revision and self.kind != "url"
        return f"{prefix}{self.name}{f'@{self.revision}' if has_revision else ''}"


def parse_address(text: str, key: str = "model.path") -> ModelAddress:
    """The address that a name stands for; nothing is contacted.

    Args:
        text: as somebody wrote it.
        key: setting that it is from, for error sentences.

    Raises:
        ValueError: it is neither a folder nor a name of something elsewhere; the sentence says what it may mean.
    """
    if folder_name := folder_here(text):
        return ModelAddress(kind="folder", name=folder_name)
    if match := _PAGE.match(text):
        prefix = "modelscope:" if match["site"].startswith("modelscope") else ""
        raise ValueError(f"{key} {text!r} is the address of a page: write {prefix}{match['name']}")
    if match := _SCOPE_ID.fullmatch(text):
        return ModelAddress(kind="modelscope", name=match["name"], revision=match["revision"] or "")
    if match := _HUB_ID.fullmatch(text):
        return ModelAddress(kind="huggingface", name=match["name"], revision=match["revision"] or "")
    if text.startswith(("hub:", "hf:", "modelscope:")):
        prefix = text.partition(":")[0].replace("hf", "hub")
        raise ValueError(
            f"{key} {text!r} names no model of a hub: write {prefix}:ORG/NAME or {prefix}:ORG/NAME@REVISION"
        )
    if is_url(text):
        return ModelAddress(kind="url", name=text)
    folder, match = Path(text).expanduser(), _ID.fullmatch(text)
    if match is None or folder.exists() or Path(text).parts[0] == "~" or Path(text).parent.is_dir():
        raise ValueError(_no_folder(text, folder, key, is_id=match is not None))
    return ModelAddress(kind="huggingface", name=match["name"], revision=match["revision"] or "")


def _no_folder(text: str, folder: Path, key: str, *, is_id: bool) -> str:
    if folder.exists():
        return f"{key} {text!r} is not a folder but a file; give {FORMS}"
    complaint = f"{key} {text!r} is not a folder"
    above = folder.parent
    if not above.is_dir():
        missing = next(path for path in reversed([folder, *folder.parents]) if not path.is_dir())
        return f"{complaint}: there is no {missing}; give {FORMS}"
    near = nearest(folder.name, [entry.name for entry in above.iterdir() if entry.is_dir()])
    hint = f": the nearest in {above} is {above / near}" if near else f", and {above} has nothing like it"
    if is_id:
        return f"{complaint}{hint}; for the model of this name of the Hugging Face hub write hub:{text}"
    return f"{complaint}{hint}; give {FORMS}"
