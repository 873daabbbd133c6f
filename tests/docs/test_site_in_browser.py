"""The site that `make docs` builds, in a real browser: it is served from one folder, and its search finds words."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_cases import chromium, watched_tab
from http_server import LocalServer

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Nothing is said of requests."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("mkdocs", reason="strop[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = (
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        "site/mkdocs.yml",
        "--site-dir",
        str(folder),
    )
    subprocess.run([sys.executable, "-m", *build], cwd=ROOT, check=True, timeout=200)
    handler = functools.partial(_Quiet, directory=str(folder))
    with LocalServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def test_a_word_is_typed_and_its_page_is_found(browser: Any, address: str) -> None:
    with watched_tab(browser) as tab:
        tab.goto(f"{address}/index.html")
        assert tab.title() == "strop"
        tab.get_by_role("textbox", name="Search").press_sequentially("bubblewrap")
        first = tab.locator(".md-search-result__link").first
        first.wait_for()
        assert "bubblewrap" in tab.locator(".md-search-result__list").inner_text().lower()
        first.click()
        tab.wait_for_url(re.compile(rf"{address}/[a-z-]+\.html.*"))
        assert "bubblewrap" in tab.locator("article").inner_text().lower()


def test_links_between_pages_of_the_repository_lead_through_the_site(browser: Any, address: str) -> None:
    with watched_tab(browser) as tab:
        tab.goto(f"{address}/index.html")
        tab.locator("article").get_by_role("link", name="Install", exact=True).click()
        tab.wait_for_url(f"{address}/install.html")
        tab.locator("article").get_by_role("link", name="upgrading", exact=True).click()
        tab.wait_for_url(f"{address}/upgrading.html")
        assert tab.locator("article h1").inner_text().startswith("Upgrading")
