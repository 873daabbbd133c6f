"""The page's addresses, who may ask, and in which form answers go out.

It listens on loopback alone, and answers who knows its token: the address that is printed has it, and the browser keeps
it in a cookie. Every answer forbids scripts and connections but our own. It writes nothing.

Concurrency: one asyncio loop; what reads files is done in a few threads.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from strop.observability.viewer.page.answers import ANSWERS
from strop.observability.viewer.page.catalog import Catalog, UnknownRun
from strop.run import RunError
from strop.utils.sanitize import printable

HOST = "127.0.0.1"
PLOTLY = "plotly.min.js"
STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_NUM_THREADS = 3
_DAY_S = 86_400
_COMPRESS_FROM_BYTES = 2048


def plotly_script() -> Path:
    """The script that draws, from the package that carries it."""
    import plotly  # half a second, and only its folder is wanted

    return Path(plotly.__file__).parent / "package_data" / PLOTLY


def static_files() -> dict[str, Path]:
    """Files of the page, by name."""
    ours = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in _TYPES}
    return {**ours, PLOTLY: plotly_script()}


def make_app(catalog: Catalog, token: str) -> web.Application:
    """The server of these runs.

    Args:
        catalog: what is shown.
        token: whoever knows it may look.
    """
    app = web.Application(middlewares=[_guard(token)])
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="page")

    async def close(_: web.Application) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    app.on_cleanup.append(close)
    files = static_files()

    async def static(request: web.Request) -> web.StreamResponse:
        path = files.get(request.match_info.get("name") or "index.html")
        if path is None:
            raise web.HTTPNotFound(text="there is no such page")
        headers = {"Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8"}
        if path == files[PLOTLY]:
            headers["Cache-Control"] = f"private, max-age={_DAY_S}"
        response = web.FileResponse(path, headers=headers)
        response.enable_compression()
        return response

    async def answer(request: web.Request) -> web.Response:
        make = ANSWERS.get(request.match_info["name"])
        if make is None:
            return _told(404, "there is no such answer")
        work = functools.partial(make, catalog, dict(request.query))
        try:
            text = await asyncio.get_running_loop().run_in_executor(pool, lambda: json.dumps(work()))
        except UnknownRun as error:
            return _told(404, str(error))
        except KeyError as error:
            return _told(400, f"{error.args[0]!r} is missing")
        except (RunError, ValueError, OSError) as error:
            return _told(422, str(error))
        return _json(200, text)

    app.router.add_get("/", static)
    app.router.add_get("/static/{name}", static)
    app.router.add_get("/api/{name}", answer)
    return app


def address(port: int, token: str) -> str:
    """URL of the page, with its token."""
    return f"http://{HOST}:{port}/?token={token}"


def _json(status: int, text: str) -> web.Response:
    response = web.Response(
        status=status, text=text, content_type="application/json", headers={"Cache-Control": "no-store"}
    )
    if len(text) >= _COMPRESS_FROM_BYTES:
        response.enable_compression()
    return response


def _told(status: int, sentence: str) -> web.Response:
    return _json(status, json.dumps({"error": printable(sentence)}))


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _guard(token: str) -> Any:
    """Answers only to requests that name this machine and know the token."""

    cookie = f"strop-view-{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # browsers share them among ports

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not _is_loopback(request.host):  # a page of a stranger whose name was bent to this address
            return web.Response(status=403, text="this page answers to 127.0.0.1 and localhost alone")
        sent = request.query.get("token")
        if sent is not None:
            if not _is_same(sent, token):
                return web.Response(status=403, text="this token is not, or no longer, the right one")
            moved = web.Response(status=303, headers={"Location": request.path})
            moved.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            moved.headers.update(_HEADERS)
            return moved
        if not _is_same(request.cookies.get(cookie, ""), token):
            return web.Response(
                status=403, text="open the address that `strop view` printed: it has the token of this page"
            )
        response = await handler(request)
        response.headers.update(_HEADERS)
        return response

    return guard


def _is_same(sent: str, token: str) -> bool:
    return hmac.compare_digest(sent.encode(), token.encode())


def _is_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or host.startswith("[") else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
