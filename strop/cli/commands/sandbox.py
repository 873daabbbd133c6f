"""`strop sandbox check`: check that programs that a model writes can be isolated here, each property tried from inside.

Exit codes: 0 all hold; 1 something is missing, each thing told in a sentence.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

from strop.cli.settings import add_config_arguments, load_settings
from strop.cli.unused_keys import Reads, refuse_unread
from strop.rewards.config import RewardConfig
from strop.sandbox.config import SandboxConfig
from strop.utils.terminal import plain, print_json, print_plain, say

SUMMARY = "check that this machine can isolate programs written by a model"
EPILOG = """\
examples:
  strop sandbox check
  strop sandbox check --config config.yaml
  strop sandbox check reward.sandbox.backend=sandbox_fusion reward.sandbox.url=http://10.0.0.5:8080

Programs of the check try to reach the network, files and processes of this machine, to gain rights, and to use more
than their limits. Training with a sandbox makes the same check by itself when it starts, and refuses to run without it.
"""
READS = Reads(keys=("reward.sandbox",))


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The settings of the command where no file of a run is given."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """Only its sandbox is used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=["check"], help="the action")
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    config = _config(args)
    from strop.sandbox import LocalSandbox, Program, SandboxUnavailable, make_sandbox

    started = time.monotonic()
    results: dict[str, str] = {}
    sandbox = make_sandbox(config)
    try:
        if isinstance(sandbox, LocalSandbox):
            results = {
                property_result.name: "" if property_result.holds else property_result.detail
                for property_result in sandbox.check()
            }
        if not any(results.values()):
            sandbox.start()
            result = sandbox.run_blocking(Program(code="print('ready')"))
            results["program"] = "" if result.text == "ready\n" else result.error or "its output was lost"
    except SandboxUnavailable as error:
        results["start"] = str(error)
    finally:
        sandbox.close()
    missing = {name: detail for name, detail in results.items() if detail}
    if args.json:
        print_json({"backend": config.backend, "holds": {name: not detail for name, detail in results.items()},
                    "missing": missing, "seconds": round(time.monotonic() - started, 2)})  # fmt: skip
        return 1 if missing else 0
    for name, detail in results.items():
        print_plain(f"{name:<14}  {'MISSING: ' + plain(detail, is_one_line=True) if detail else 'ok'}")
    if missing:
        say(f"sandbox: {len(missing)} missing; nothing that a model wrote is run here (docs/sandbox.md)")
        return 1
    print_plain(f"sandbox: {config.backend} ready, checked in {time.monotonic() - started:.1f} s")
    return 0


def _config(args: argparse.Namespace) -> SandboxConfig:
    refuse_unread(args, "sandbox check", READS)
    if args.config:
        return load_settings(args).reward.sandbox
    from strop.compat.key_aliases import key_aliases
    from strop.config import load_config

    return load_config(_Keys, overrides=args.overrides, aliases=key_aliases).reward.sandbox
