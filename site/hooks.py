"""The repository as a site: README is its first page, docs/all-pages.md gives the order; what pages link to is in it.

Links stay as they are in the repository, where they lead from file to file; here they become links of the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]+)(?=[)#\s])")
_TITLED = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<target>[^)#\s]+)\)")
_ALL_PAGES = "docs/all-pages.md"
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def uri_of(file: str) -> str:
    """Where a file of the repository lies in the site."""
    return "index.md" if file == "README.md" else file.removeprefix("docs/")


def linked(file: str) -> Iterator[str]:
    """Files of the repository that a page links to."""
    for part in _FENCE.split((ROOT / file).read_text(encoding="utf-8"))[::2]:
        yield from filter(None, (_meant(file, match["target"]) for match in _LINK.finditer(part)))


def _meant(page: str, target: str) -> str:
    """The file that a link on a page leads to; empty for addresses of the web."""
    if "://" in target or target.startswith("mailto:"):
        return ""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return posixpath.join(file, "README.md") if (ROOT / file / "README.md").is_file() else file


def on_config(config: Any) -> Any:
    """The sections of the site are those of docs/all-pages.md."""
    text = (ROOT / _ALL_PAGES).read_text(encoding="utf-8")
    nav: list[dict[str, object]] = [{"strop": "index.md"}, {"All pages": uri_of(_ALL_PAGES)}]
    for section in text.split("\n## ")[1:]:
        heading, _, table = section.partition("\n")
        links = [
            {match["title"]: uri_of(_meant(_ALL_PAGES, match["target"]))} for match in _TITLED.finditer(table)
        ]
        nav.append({heading: links})
    config["nav"] = nav
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add README, and every file outside docs/ that a page of the site links to."""
    todo = ["README.md", *(f"docs/{one.src_uri}" for one in files.documentation_pages())]
    seen = set(todo)
    while todo:
        page = todo.pop()
        uri = uri_of(page)
        if files.get_file_from_path(uri) is None and (ROOT / page).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / page)))
        for file in linked(page) if page.endswith(".md") else ():
            if file not in seen and (ROOT / file).is_file():
                seen.add(file)
                todo.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the repository into those of the site."""
    uri = page.file.src_uri
    source = (
        "README.md" if uri == "index.md" else uri if not (ROOT / "docs" / uri).is_file() else f"docs/{uri}"
    )
    here = posixpath.dirname(uri)

    def turned(match: re.Match[str]) -> str:
        file = _meant(source, match["target"])
        return posixpath.relpath(uri_of(file), here or ".") if file else match["target"]

    parts = _FENCE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(turned, part) for number, part in enumerate(parts))
