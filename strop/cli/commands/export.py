"""`strop export`: the model of a checkpoint as an ordinary Hugging Face folder, proved by its log-probs."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.model_argument import add_step_argument
from strop.cli.settings import (
    add_accept_argument,
    add_trust_argument,
    check_unchanged,
    is_setting,
    load_settings,
    user_path,
)
from strop.cli.unused_keys import Reads, refuse_unread
from strop.run import Checkpoint, RunError, RunFolder, is_run
from strop.run.naming import choose_checkpoint, run_in
from strop.utils.hub.addresses import parse_address
from strop.utils.hub.repo import Sending
from strop.utils.hub.sending import destination
from strop.utils.quiet_libraries import quiet_models
from strop.utils.remote_path import is_url
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.trainer.config import Config
    from strop.trainer.role_export import Export

SUMMARY = "export the model of a checkpoint as a Hugging Face folder, verified by its log-probs"
EPILOG = """\
examples:
  strop export runs/arithmetic --out models/arithmetic
  strop export runs/arithmetic --out models/arithmetic-200 --step 200 --dtype bfloat16
  strop export runs/arithmetic --out models/best --step best
  strop export runs/ppo --out models/critic --role critic
  strop export runs/prime --out models/prm --role prm
  strop export runs/lora --out models/adapter --adapter
  strop export runs/arithmetic --out s3://bucket/models/arithmetic

The folder is loaded again with plain transformers, and its log-probs on a few sequences are compared with those of
the checkpoint's own weights; it appears only when they agree. Any number of ranks may have written the checkpoint;
the export runs in one process and needs the memory of one model. To a URL of any kind that fsspec knows, the folder is
sent once it is proved; until then it lies below TMPDIR. `strop push` sends it with a card that says how it was made.
"""
READS = Reads(keys=())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_folder", metavar="RUN", type=user_path, help="a run folder")
    parser.add_argument("words", nargs="*", metavar="OUT", help="the same as --out OUT")
    parser.add_argument("--out", metavar="OUT", help="folder of the model, or a URL; absent or empty")
    add_model_arguments(parser)
    parser.add_argument(
        "--role",
        choices=("actor", "critic", "prm"),
        default="actor",
        help="model to export (default: actor); prm: the process reward model",
    )
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    parser.set_defaults(config=None)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the exported model: --step, --dtype, --adapter."""
    add_step_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="precision of the weights (default: as they were trained)",
    )
    add_accept_argument(parser)
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA: the adapter alone, as a PEFT folder"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    args.overrides = [word for word in args.words if is_setting(word)]
    refuse_unread(args, "export", READS)
    folder = exported_run(args)
    out = _named(args)
    if not is_url(out):
        exported = export_checkpoint(args, folder, _writable(user_path(out)), role=args.role)
        _report(args, exported, str(exported.result.folder))
        return 0
    target = destination(out, Sending(say=say), key="--out")
    with tempfile.TemporaryDirectory(prefix="strop-export-") as staging:
        exported = export_checkpoint(args, folder, Path(staging) / "model", role=args.role, is_sent=True)
        target.send(exported.result.folder)
    _report(args, exported, out)
    return 0


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model that was written, and what it was made of."""

    result: Export
    checkpoint: Checkpoint
    config: Config
    """Configuration of the run."""


def exported_run(args: argparse.Namespace) -> Path:
    """The run of the command line, after a look at what is asked of it.

    Raises:
        UsageError: options that exclude each other.
        ValueError: it is no run.
    """
    if args.adapter and args.dtype is not None:
        raise UsageError("--dtype has no place beside --adapter: an adapter stays as it was trained")
    folder = run_in(args.run_folder)
    _check_run(folder)
    return folder


def export_checkpoint(
    args: argparse.Namespace, folder: Path, out: Path, *, role: str = "actor", is_sent: bool = False
) -> Exported:
    """Write the model that the command line names as a Hugging Face folder.

    Args:
        args: of `add_model_arguments`, with what `load_settings` reads.
        folder: the run.
        out: absent or empty.
        role: actor, critic or prm.
        is_sent: it will be read on other machines.
    """
    checkpoint = _checkpoint(folder, args.step)
    config = load_settings(args, source=folder / "config.yaml", needs=())
    quiet_models()
    import torch

    from strop.engines.config import LoraConfig
    from strop.trainer.model_commits import read_models
    from strop.trainer.model_locations import locate
    from strop.trainer.role_export import export_role

    located = config
    if config.model.lora.enabled or config.critic.lora.enabled:  # the weights under the adapter
        check_unchanged(args, folder, config, only=("model.path", "model.lora.path", "critic.path"))
        located = locate(config, say=say, known=read_models(folder)).config
    model, base = located.model, config.model.path
    if role == "critic":
        base = config.critic.path or base
        critic = located.critic
        model = dataclasses.replace(model, path=critic.path or model.path, lora=critic.lora)
    elif (
        role == "prm"
    ):  # the weights that it began with are not in the checkpoint: they are those of this folder
        check_unchanged(args, folder, config, only=("model.path", "prm.path"))
        model = dataclasses.replace(model, path=located.prm.path or model.path, lora=LoraConfig())
    result = export_role(
        checkpoint.path,
        out,
        model,
        role=role,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        adapter_only=args.adapter,
        base=_base_name(base, is_sent=is_sent) if args.adapter else "",
    )
    return Exported(result, checkpoint, config)


def _base_name(path: str, *, is_sent: bool) -> str:
    """The model under an adapter as its readers find it; others get the last name of a folder of this machine."""
    address = parse_address(path)
    if address.kind == "huggingface":
        return address.name
    return Path(address.name).name if is_sent and address.is_here else str(address)


def _report(args: argparse.Namespace, exported: Exported, location: str) -> None:
    result = exported.result
    print_plain(result.describe())
    if args.json:
        print_json(
            {
                "folder": location,
                "step": exported.checkpoint.step,
                "role": args.role,
                "tensors": result.num_tensors,
                "bytes": result.num_bytes,
                "difference": result.difference,
                "rounding": result.rounding,
            }
        )


def _check_run(folder: Path) -> None:
    if not is_run(folder):
        inside = [folder.absolute(), *folder.absolute().parents]
        steps = [
            path.name.removeprefix("global_step_") for path in inside if path.name.startswith("global_step_")
        ]
        run = next(filter(is_run, inside), None)
        if run is not None and steps:
            raise ValueError(
                f"{folder} is part of a run: strop export {shell_word(run)} --step {steps[0]} --out OUT"
            )
        problem = "is no run folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {problem}; give the folder that --out named when the run started")


def _named(args: argparse.Namespace) -> str:
    """OUT: a folder or a URL."""
    names = [*args.words, *([] if args.out is None else [args.out])]
    if len(names) != 1:
        raise UsageError("name one folder for the model: strop export RUN --out OUT")
    return str(names[0])


def _writable(out: Path) -> Path:
    """The folder; told before a checkpoint is read that it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.exists():
            out.mkdir()
            out.rmdir()  # it appears when it is whole
    except OSError as error:
        raise UsageError(f"cannot write --out {out}: {error.strerror}; choose another folder") from error
    return out


def _checkpoint(folder: Path, step: int | str | None) -> Checkpoint:
    """The checkpoint to export, every byte of it verified."""
    with RunFolder.open(folder, read_only=True) as run:
        checkpoint, lines = choose_checkpoint(run, step)
    for line in lines:
        say(line)
    if checkpoint is None:
        raise RunError(f"{folder} has no valid checkpoint to export; continue the run until it saves one")
    say(f"checkpoint {checkpoint.step} of {folder}")
    return checkpoint
