"""A run, or several, as one HTML file: the page with what it would ask a server for."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.observability.viewer.page import answers
from strop.observability.viewer.page.catalog import Catalog
from strop.observability.viewer.page.server import PLOTLY, static_files
from strop.observability.viewer.records import RunRecords
from strop.run import RunError
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import open_regular

logger = logging.getLogger(__name__)

_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w.]+)">')
_SCRIPT = re.compile(r'<script src="/static/([\w.]+)" defer></script>')
_MAX_STEPS = 24
"""Of which samples are kept."""


def write_page(path: Path, catalog: Catalog, *, max_samples: int) -> dict[str, int]:
    """Write the page with everything about these runs but most of their samples.

    Args:
        path: the file.
        catalog: the runs.
        max_samples: of each run; they are those of steps from all over it, as many of each.

    Returns:
        num_runs, num_samples and num_found, of all samples.
    """
    listing = answers.runs(catalog, {})
    data: dict[str, Any] = {"runs": listing, "of_run": {}}
    counts = Counter({"num_runs": len(listing["runs"]), "num_samples": 0, "num_found": 0})
    for run in listing["runs"]:
        records = catalog.run(run["id"])
        rows, total = _some_samples(catalog, records, max_samples)
        counts.update({"num_samples": len(rows), "num_found": total})
        words = {"run": run["id"]}
        names = answers.metrics(catalog, words)["names"]
        data["of_run"][run["id"]] = {
            "metrics": answers.metrics(catalog, {**words, "names": ",".join(names)}),
            "events": answers.events(catalog, words),
            "fates": answers.fates(catalog, words),
            "settings": answers.settings(catalog, words),
            "profile": answers.profile(catalog, words),
            "samples": rows,
            "num_samples": total,
        }
    replace_text(path, _page(data))
    return dict(counts)


def _some_samples(catalog: Catalog, records: RunRecords, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Samples of steps from all over the run, as the page shows them, and how many there are."""
    rows: list[dict[str, Any]] = []
    total = 0
    decode = catalog.decode_of(records) if limit else None
    for split in ("train", "val"):
        files = records.samples.files(split=split)
        steps = list(files)
        total += sum(map(_num_rows, itertools.chain.from_iterable(files.values())))
        places = range(_MAX_STEPS if steps else 0)
        chosen = sorted({steps[round(i * (len(steps) - 1) / (_MAX_STEPS - 1))] for i in places})
        share = limit // 2 // max(len(chosen), 1)
        for step in chosen:
            try:
                samples = records.samples.read(step, split=split)
            except RunError as error:
                logger.warning("%s; the page goes without them", error)
                continue
            rows += [{**answers.whole_sample(row, decode), "split": split} for row in samples[:share]]
    return rows, total


def _num_rows(path: Path) -> int:
    """Rows of a file of samples; 0 where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as file:
            return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException):
        return 0


def _page(values: Mapping[str, Any]) -> str:
    """The page with scripts, styles and data in it; it runs the scripts that it was written with and no other."""
    files = {name: path.read_text(encoding="utf-8") for name, path in static_files().items()}
    page = files["index.html"]
    data = json.dumps(values).replace("<", "\\u003c")
    hashes: list[str] = []

    def script(name: str) -> str:
        text = files[name]
        if "</script" in text:
            raise RunError(f"{name} cannot be part of a page")
        hashes.append(base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())
        return f"<script>{text}</script>"

    page = _STYLE.sub(lambda match: f"<style>{files[match[1]]}</style>", page)
    head, _, body = page.partition("</head>")
    scripts = [script(name) for name in (*_SCRIPT.findall(head), PLOTLY)]
    head = _SCRIPT.sub("", head)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; "
        f"style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    head = head.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">')
    kept_data = f'<script type="application/json" id="kept">{data}</script>'
    return f"{head}</head>{body.replace('</body>', kept_data + ''.join(scripts) + '</body>')}"
