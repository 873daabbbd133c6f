"""`strop engine`: environments of generation engines that are not part of strop's own."""

from __future__ import annotations

import argparse

from strop.cli.settings import user_path
from strop.utils.terminal import print_plain

SUMMARY = "install the environment of a rollout engine such as vLLM"
EPILOG = """\
examples:
  strop engine install vllm
  strop engine install vllm --folder envs/vllm        then: export STROP_VLLM=envs/vllm/bin/python

vLLM pins other versions of PyTorch and transformers than strop, so it needs an environment of its own: in the
user's cache, where rollout.engine=vllm finds it, or in a folder that STROP_VLLM or rollout.vllm.python names
(docs/rollout.md). The same command later updates the environment.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=("install",), help="make the environment of an engine")
    parser.add_argument("engine", choices=("vllm",), help="the engine")
    parser.add_argument(
        "--folder", type=user_path, metavar="DIR", help="of the environment (default: in the user's cache)"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device that it runs on (default: an accelerator where PyTorch finds one here)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from strop.rollout.vllm.environment import VARIABLE, default_folder, install
    from strop.utils.device import device_name

    device = args.device or ("cpu" if device_name("auto") == "cpu" else "cuda")
    folder = (args.folder or default_folder()).expanduser().absolute()
    version = install(folder, device=device, say=print_plain)
    print_plain(f"vLLM {version} is ready in {folder}")
    if folder != default_folder():
        print_plain(f"to use it: export {VARIABLE}={folder / 'bin' / 'python'}")
    return 0
