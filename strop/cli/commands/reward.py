"""`strop reward check`: what can be said of a reward without a model, and a certificate of it.

Exit codes: 0 ok or doubtful; 1 broken, a sentence for each finding.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.commands.score import NEEDS, READS, reward_settings
from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings
from strop.cli.unused_keys import refuse_unread
from strop.rewards import try_loading
from strop.utils.terminal import UsageError, number_text, plain, print_json, print_plain, say, shorten

if TYPE_CHECKING:
    from strop.protocol.trajectory import Prompt
    from strop.rewards.certify.certificate import RewardReport

SUMMARY = "check a reward function for training, without a model"
EPILOG = """\
examples:
  strop reward check reward.py --data train.jsonl
  strop reward check reward.py:strict --data train.parquet --rows 64 --save
  strop reward check builtin --data train.jsonl data.default_data_source=openai/gsm8k --json

The right answer of each row in the usual forms, empty and senseless answers, the answers of other rows, and what an
exploiter would try: each is scored twice, the second time in the opposite order and in other processes. The verdict is
ok, doubtful or broken; --save keeps it beside the file, and runs that train with the function record it.
"""
DEFAULT_ROWS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=["check"], help="the action")
    parser.add_argument("reward", metavar="REWARD", help="FILE.py, FILE.py:NAME or builtin")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="rows with ground truths: .jsonl or .parquet"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=DEFAULT_ROWS,
        metavar="N",
        help=f"rows, at even distances ({DEFAULT_ROWS})",
    )
    parser.add_argument("--save", action="store_true", help="keep the certificate beside FILE.py")
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the certificate as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; use at least 1")
    if args.save and args.reward == "builtin":
        raise UsageError("--save keeps the certificate beside a file, and a built-in scorer has none")
    args.overrides = [*reward_settings(args.reward), *args.overrides]
    config = load_settings(args, needs=NEEDS)
    refuse_unread(args, "reward check", READS)
    if not config.data.default_data_source and args.reward != "builtin":  # a function of one's own needs none
        data = dataclasses.replace(config.data, default_data_source=Path(config.reward.path).stem)
        config = dataclasses.replace(config, data=data)
    from strop.rewards.certify.certificate import inspect_reward

    in_groups = asyncio.run(try_loading(config.reward))
    prompts = _prompts(args, config.data)
    say(f"trying {args.reward} with {len(prompts)} rows")
    certificate = inspect_reward(
        args.reward, config.reward, prompts, tokenizer=config.model.path, in_groups=in_groups
    )
    if args.save:
        from strop.trainer.reward_certificate import save_certificate

        say(
            f"certificate: {save_certificate(Path(config.reward.path), config.reward.name, certificate.as_json())}"
        )
    if args.json:
        print_json(certificate.as_json())
    else:
        _show(certificate)
    return 1 if certificate.verdict == "broken" else 0


def _prompts(args: argparse.Namespace, data: object) -> list[Prompt]:
    from strop.data import DataConfig, read_rows
    from strop.data.prompts import subsample
    from strop.rewards.rescoring import prompt_of_row

    assert isinstance(data, DataConfig), "the section of the configuration"
    rows = read_rows([args.data], data.cache_dir)
    return [prompt_of_row(rows[number], number, data) for number in subsample(range(len(rows)), args.rows)]


def _show(certificate: RewardReport) -> None:
    for label, shown in {
        "scores": f"{number_text(certificate.lowest)} to {number_text(certificate.highest)}",
        "a right answer": plain(certificate.right_example, is_one_line=True) or "none was found",
        "right answers, mean": number_text(certificate.right_mean),
        "empty and senseless, mean": number_text(certificate.junk_mean),
        "cost": f"{1000 * certificate.mean_s:.2f} ms per call, {1000 * certificate.max_s:.1f} ms at most; processes "
        f"of at most {certificate.peak_memory_mib:.0f} MiB",
    }.items():
        print_plain(f"{label:<26} {shown}")
    for finding in certificate.findings:
        print_plain(
            f"{finding.level}: {plain(finding.rule, is_one_line=True)}: {plain(finding.sentence, is_one_line=True)}"
        )
        if finding.answer:
            print_plain(f"  row {finding.row}: {shorten(finding.answer, 120)}")
    print_plain(
        f"{plain(certificate.reward)}: {certificate.verdict}, {certificate.num_calls} calls, "
        f"{certificate.num_rows} rows"
    )
