"""`strop push`: the model of a checkpoint to a hub or a store, proved, with a card that says how it was made."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from strop.cli.commands.export import Exported, add_model_arguments, export_checkpoint, exported_run
from strop.cli.settings import add_trust_argument, user_path
from strop.utils.hub.addresses import parse_address
from strop.utils.hub.repo import Sending
from strop.utils.hub.sending import Destination, destination
from strop.utils.remote_path import is_url
from strop.utils.terminal import check_writable, print_json, print_plain, say

SUMMARY = "upload a trained model with its model card to the Hugging Face hub, ModelScope or a URL"
EPILOG = """\
examples:
  strop push runs/arithmetic --to me/arithmetic --private
  strop push runs/arithmetic --to modelscope:me/arithmetic --step best
  strop push runs/arithmetic --to s3://bucket/models/arithmetic --dtype bfloat16
  strop push runs/arithmetic --to me/arithmetic --card card.md --dry-run

The model is exported and proved as by `strop export`, below TMPDIR. The card (README.md) has what the records of the
run say: data, algorithm, pass rates with their intervals, settings. Read it before others do: --dry-run sends nothing.
A hub asks who you are: HF_TOKEN (or `hf auth login`), MODELSCOPE_API_TOKEN.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_folder", metavar="RUN", type=user_path, help="a run folder")
    parser.add_argument(
        "--to",
        required=True,
        metavar="WHERE",
        help="ORG/NAME of the Hugging Face hub, modelscope:ORG/NAME, or a URL of an empty folder",
    )
    add_model_arguments(parser)
    parser.add_argument("--name", metavar="NAME", help="of the model on its card (default: its name there)")
    parser.add_argument("--private", action="store_true", help="a model that is made at a hub is not public")
    parser.add_argument("--branch", default="", metavar="NAME", help="of the hub (default: the main one)")
    parser.add_argument("--message", metavar="TEXT", help="of the commit (default: which step of which run)")
    parser.add_argument("--card", metavar="FILE", type=user_path, help="write the card there too")
    parser.add_argument("--no-card", action="store_true", help="leave README.md at the hub as it is")
    parser.add_argument("--dry-run", action="store_true", help="make model and card, and send nothing")
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    parser.set_defaults(config=None, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    folder = exported_run(args)
    if args.card is not None:
        check_writable(args.card)
    sending = Sending(
        say=say,
        private=args.private,
        branch=args.branch,
        message=args.message or f"A step of {folder.resolve().name}, sent by strop push",
    )
    target = None if args.dry_run else destination(args.to, sending)
    with tempfile.TemporaryDirectory(prefix="strop-push-") as staging:
        exported = export_checkpoint(args, folder, Path(staging) / "model", is_sent=True)
        print_plain(exported.result.describe())
        _write_card(args, folder, exported)
        _send(args, target, exported)
    return 0


def _write_card(args: argparse.Namespace, folder: Path, exported: Exported) -> None:
    from strop.cli.sharing.card import CARD, CardFacts, model_card
    from strop.config.docs import describe
    from strop.config.save import to_flat_dict
    from strop.observability.viewer.records import RunRecords
    from strop.trainer.model_commits import read_models

    records = RunRecords(folder)
    records.read_on()
    defaults = {doc.key: doc.default for doc in describe(type(exported.config))}
    settings = to_flat_dict(exported.config)
    card = model_card(
        CardFacts(
            records=records,
            step=exported.checkpoint.step,
            settings={
                key: value for key, value in settings.items() if key not in defaults or value != defaults[key]
            },
            models=read_models(folder),
            export=exported.result,
            name=args.name
            or (args.to.rstrip("/").rpartition("/")[2] if is_url(args.to) else parse_address(args.to).name),
            is_loadable=not is_url(args.to) and not args.adapter,
            is_adapter=args.adapter,
        )
    )
    if args.card is not None:
        args.card.write_text(card, encoding="utf-8")
    if not args.no_card:
        (exported.result.folder / CARD).write_text(card, encoding="utf-8")


def _send(args: argparse.Namespace, target: Destination | None, exported: Exported) -> None:
    facts: dict[str, object] = {"to": args.to, "step": exported.checkpoint.step, "sent": target is not None}
    if target is None:
        print_plain("nothing was sent (--dry-run)")
    else:
        sent = target.send(exported.result.folder)
        facts |= {"revision": sent.revision, "files": sent.num_files, "bytes": sent.num_bytes}
        at = f", revision {sent.revision}" if sent.revision else ""
        print_plain(f"sent to {sent.address}{at}: {sent.num_files} files, each compared with what is there")
    if args.json:
        print_json(facts)
