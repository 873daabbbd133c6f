"""`strop view`: a local web page over run folders, or one run as a file."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket

from strop.cli.commands.runs import DEFAULT_FOLDER
from strop.cli.settings import user_path
from strop.utils.terminal import UsageError, print_json, print_plain, say

SUMMARY = "show curves, samples, prompts and differences of runs on a web page of this machine"
EPILOG = """\
examples:
  strop view
  strop view runs/arithmetic runs/sweep --port 8600
  strop view runs/arithmetic --html arithmetic.html

It shows runs while they train, listens on 127.0.0.1 alone, and asks for the token in the address that it prints. From
another machine: ssh -L 8520:127.0.0.1:8520 HOST. --html writes one file that needs no server, to send to somebody: with
all numbers of the runs, and some of their samples.
"""
DEFAULT_PORT = 8520
_MAX_TRIES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        type=user_path,
        help="run folders, or folders of runs (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help=f"port to listen on (default: {DEFAULT_PORT}, or the next free one)",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=user_path, help="write one file that needs no server, and end"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=400,
        metavar="N",
        help="with --html: samples of each run at most (default 400)",
    )
    parser.add_argument("--json", action="store_true", help="print address and token as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from strop.observability.viewer.page.catalog import Catalog

    catalog = Catalog(args.runs or [DEFAULT_FOLDER])
    count = len(catalog.runs())
    for text in catalog.unreadable.values():
        say(text)
    if args.html is not None:
        return _write_file(args, catalog)
    listener = _listen(args.port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    from strop.observability.viewer.page.server import address, make_app

    if args.json:
        print_json({"address": address(port, token), "port": port, "token": token, "num_runs": count})
    else:
        print_plain(f"{count} run{'s' * (count != 1)}: {address(port, token)}\n(Ctrl-C ends it)")
    asyncio.run(_serve(make_app(catalog, token), listener))
    return 0


def _write_file(args: argparse.Namespace, catalog: object) -> int:
    from strop.observability.viewer.page.catalog import Catalog
    from strop.observability.viewer.page.one_file import write_page
    from strop.utils.terminal import check_writable

    assert isinstance(catalog, Catalog)
    if args.samples < 0:
        raise UsageError(f"--samples is {args.samples}; use at least 0")
    if not catalog.runs():
        raise UsageError(f"no run is below {', '.join(map(str, args.runs or [DEFAULT_FOLDER]))}")
    check_writable(args.html)
    counts = write_page(args.html, catalog, max_samples=args.samples)
    if args.json:
        print_json({"file": str(args.html), **counts})
    else:
        runs = f"{counts['num_runs']} run{'s' * (counts['num_runs'] != 1)}"
        print_plain(f"{args.html}: {runs}, {counts['num_samples']} of {counts['num_found']} samples")
    return 0


async def _serve(app: object, listener: socket.socket) -> None:
    """Until a signal ends it."""
    from aiohttp import web

    assert isinstance(app, web.Application)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, shutdown_timeout=1.0).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _listen(port: int | None) -> socket.socket:
    """A socket on loopback.

    Raises:
        UsageError: the port is taken.
    """
    from strop.observability.viewer.page.server import HOST

    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"--port is {port}; ports are from 1 to 65535, and 0 takes any that is free")
    tries = range(DEFAULT_PORT, DEFAULT_PORT + _MAX_TRIES) if port is None else (port,)
    for candidate in tries:
        try:
            return socket.create_server((HOST, candidate))
        except OSError as error:
            last = error
    raise UsageError(f"cannot listen on port {tries[0]}: {last.strerror}; name another one with --port")
