"""`strop generate`: answers to a file of prompts, to lines of standard input, or in a chat."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands.eval import progress_bar
from strop.cli.model_argument import add_step_argument, named_model, with_model
from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings, user_path
from strop.cli.unused_keys import GENERATION, WHICH_MODEL, Reads, reads_with_engine, refuse_unread
from strop.evaluation.models import HELP
from strop.evaluation.offline_answers import check_options, offline_records
from strop.utils.quiet_libraries import quiet_models
from strop.utils.safe_read import read_text
from strop.utils.terminal import UsageError, check_writable, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.data.chat import Chat
    from strop.evaluation.chat import Answerer
    from strop.trainer.config import Config
    from strop.workers.episodes import Episode

SUMMARY = "generate answers to a file of prompts, or chat with a model"
EPILOG = """\
examples:
  strop generate runs/arithmetic
  strop generate runs/arithmetic --prompts questions.txt --out answers.jsonl
  strop generate models/smollm2 --prompts val.parquet --temperature 0.8 --samples 4
  strop generate models/teacher --prompts train.parquet --temperature 1 --top-logprobs 32 --out logs.parquet
  strop generate models/teacher --prompts answers.parquet --given --top-logprobs 32 --out logs.parquet
  echo "7 + 5 = ?" | strop generate runs/arithmetic

Without --prompts, and on a terminal, it is a chat: one message per line, /new begins another conversation,
/quit or Ctrl-D ends. A .txt file has one prompt per line; .jsonl and .parquet rows have a column `prompt`
(data.prompt_key), a string or a list of messages.
"""
READS = Reads(
    keys=(
        *GENERATION, "data.prompt_key", "data.json_messages", "data.continue_final_message",
        "data.max_response_tokens", "data.chat_template_kwargs",
    ),
    but=WHICH_MODEL,
    instead={
        "rollout.temperature": "--temperature", "rollout.top_p": "--top-p", "rollout.top_k": "--top-k",
        "rollout.samples_per_prompt": "--samples", "eval.samples_per_prompt": "--samples", "trainer.seed": "--seed",
        "model.path": "MODEL_OR_RUN", "model.revision": "MODEL_OR_RUN to ORG/NAME@REVISION",
        "model.local_files_only": "HF_HUB_OFFLINE=1",
    },
    is_one_process=True,
)  # fmt: skip


_COMMANDS = "one message per line; /new begins another conversation, /quit ends"


@dataclass(frozen=True, kw_only=True)
class _Question:
    prompt: object
    """As it was given: a string, or a list of messages."""
    chat: Chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_RUN", help=HELP)
    add_config_arguments(parser, source="the settings of the run")
    add_trust_argument(parser)
    add_step_argument(parser)
    parser.add_argument("--prompts", metavar="FILE", type=user_path, help=".txt, .jsonl, .json or .parquet")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=user_path,
        help="write the answers there with their tokens, as JSON lines, or as parquet where the name ends so",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="K",
        help="with --out: also the K most likely tokens in the place of each token and their log-probs at temperature "
        "1, for `strop sft` with sft.distillation",
    )
    parser.add_argument(
        "--given",
        action="store_true",
        help="with --top-logprobs: sample nothing, and log the answers that the rows of --prompts hold (`response`, or "
        "tokens in `prompt_ids` and `response_ids`)",
    )
    parser.add_argument(
        "--temperature", type=float, help="0 takes the most likely token (default: eval.temperature)"
    )
    parser.add_argument(
        "--top-p", type=float, help="sample from this share of probability (default: eval.top_p)"
    )
    parser.add_argument(
        "--top-k", type=int, help="sample from this many most likely tokens (default: eval.top_k)"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="longest answer, in tokens (default: data.max_response_tokens)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled answers (default 0)")
    parser.add_argument("--json", action="store_true", help="print each answer as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    source = named_model(args)
    config = load_settings(args, source=None if source is None else source.config, needs=("rollout",))
    refuse_unread(args, "generate", reads_with_engine(READS, config.rollout.engine))
    config = with_model(config, source, args)
    is_chat = args.prompts is None and sys.stdin.isatty()
    _check_arguments(args, config, is_chat=is_chat)
    if args.given:
        return _log_given(args, config)
    questions = [] if is_chat else _read_questions(args.prompts, config)
    with _answerer(args, config) as answerer:
        if is_chat:
            return _chat(answerer, config)
        answers = _answers(answerer, questions, args)
    _report(questions, answers, args, config)
    return 0


def _log_given(args: argparse.Namespace, config: Config) -> int:
    """Write existing answers to --out with the model's likeliest tokens at each position."""
    quiet_models()
    from strop.data.readers import read_rows
    from strop.data.sft.rows import has_tokens
    from strop.evaluation.answer_files import with_top_log_probs, write_answers

    source = str(args.prompts)
    rows = read_rows([args.prompts])
    chats = [
        None if has_tokens(row) else _row(row, f"row {number} of {source}", config).chat
        for number, row in enumerate(rows)
    ]
    records = offline_records(rows, chats, config, source)
    count = write_answers(args.out, with_top_log_probs(records, config, args.top_logprobs))
    say(f"{count} answers of {source} logged to {args.out}")
    return 0


def _answers(answerer: Answerer, questions: Sequence[_Question], args: argparse.Namespace) -> list[Episode]:
    done, total = 0, len(questions) * args.samples
    with progress_bar("generate") as show:

        def one_more() -> None:
            nonlocal done
            done += 1
            show(done, total)

        return answerer.answer_all([q.chat for q in questions], samples=args.samples, on_done=one_more)


def _check_arguments(args: argparse.Namespace, config: Config, *, is_chat: bool) -> None:
    temperature = config.eval.temperature if args.temperature is None else args.temperature
    if args.samples < 1:
        raise UsageError(f"--samples is {args.samples}; use at least 1")
    if args.samples > 1 and temperature == 0:
        raise UsageError(
            f"--samples {args.samples} at temperature 0 gives the same answer each time; add --temperature 1.0"
        )
    if is_chat and (args.out is not None or args.json or args.samples > 1):
        raise UsageError("--out, --json and --samples need prompts: name a file with --prompts")
    if args.top_logprobs < 0 or (args.top_logprobs and args.out is None):
        raise UsageError(
            f"--top-logprobs {args.top_logprobs} is how many are written to --out; name a file, and 1 or more"
        )
    if args.top_logprobs and config.rollout.remote:
        raise UsageError(
            f"--top-logprobs computes log-probs with the model folder, and rollout.engine={config.rollout.engine} has "
            f"none here: use another engine"
        )
    if args.given:
        check_options(args)
    if args.out is not None:
        check_writable(args.out)


def _answerer(args: argparse.Namespace, config: Config) -> Answerer:
    quiet_models()
    from strop.evaluation.chat import Answerer
    from strop.rollout.types import Sampling

    sampling = Sampling(
        key=0,
        temperature=config.eval.temperature if args.temperature is None else args.temperature,
        top_p=config.eval.top_p if args.top_p is None else args.top_p,
        top_k=config.eval.top_k if args.top_k is None else args.top_k,
        max_tokens=config.data.max_response_tokens if args.max_tokens is None else args.max_tokens,
    )
    return Answerer(config, sampling, seed=args.seed)


def _read_questions(path: Path | None, config: Config) -> list[_Question]:
    """The prompts of a file, or of standard input.

    Raises:
        ValueError, FileNotFoundError: no such file, no prompt in it, or a row without one.
    """
    source = "standard input" if path is None else str(path)
    if path is None:
        questions = _lines(sys.stdin.read(), source, config)
    elif path.suffix == ".txt":
        if not path.exists():
            raise FileNotFoundError(f"prompt file {path} does not exist; check the path")
        try:
            text = read_text(path)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"prompt file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
            ) from error
        except OSError as error:
            raise ValueError(
                f"prompt file {path} cannot be read: {error.strerror}; check the path"
            ) from error
        questions = _lines(text, source, config)
    else:
        from strop.data.readers import read_rows

        questions = [
            _row(row, f"row {index} of {source}", config) for index, row in enumerate(read_rows([path]))
        ]
    if not questions:
        raise ValueError(f"{source} has no prompts; write one per line, or name a file with --prompts")
    return questions


def _lines(text: str, source: str, config: Config) -> list[_Question]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    return [
        _row({config.data.prompt_key: line}, f"line {number} of {source}", config) for number, line in lines
    ]


def _row(row: Mapping[str, Any], label: str, config: Config) -> _Question:
    from strop.data.chat import check_last, to_chat
    from strop.data.rows import prompt_messages

    key = config.data.prompt_key
    if row.get(key) is None:
        raise ValueError(
            f"{label} has no column {key!r} (the prompt; map it with data.prompt_key); columns found: "
            f"{', '.join(row)}"
        )
    messages = prompt_messages(row, config.data, label)
    check_last(messages, label, may_continue=config.data.continue_final_message)
    chat = to_chat(row, messages, options=config.data.chat_template_kwargs, where=label)
    return _Question(prompt=row[key], chat=chat)


def _report(
    questions: Sequence[_Question], answers: Sequence[Episode], args: argparse.Namespace, config: Config
) -> None:
    """Every answer, `--samples` of them to each question in turn."""
    from strop.workers.reports import episode_report

    reports = [episode_report(answer) for answer in answers]
    records = [
        {
            "row": number // args.samples,
            "sample_index": report.sample_index,
            "prompt": questions[number // args.samples].prompt,
            "response": answer.text,
            "stop_reason": report.stop_reason,
            "num_tokens": report.num_response_tokens,
        }
        for number, (answer, report) in enumerate(zip(answers, reports, strict=True))
    ]
    if args.out is not None:
        _write(records, answers, args, config)
    if args.json:
        for record in records:
            print_json(record)
    elif args.out is None:
        for number, (answer, report) in enumerate(zip(answers, reports, strict=True)):
            sample = f" #{report.sample_index}" if args.samples > 1 else ""
            cut = " [cut at the length limit]" if report.stop_reason == "length" else ""
            question = _last_words(questions[number // args.samples])
            print_plain(f"> {plain(question)}{sample}\n{plain(answer.text)}{cut}\n")


def _write(
    records: Sequence[Mapping[str, Any]],
    answers: Sequence[Episode],
    args: argparse.Namespace,
    config: Config,
) -> None:
    """The file of `--out`: with tokens, unless a server of somebody else's has answered."""
    from strop.evaluation.answer_files import with_tokens, with_top_log_probs, write_answers

    whole = list(records if config.rollout.remote else with_tokens(records, answers))
    written = with_top_log_probs(whole, config, args.top_logprobs) if args.top_logprobs else whole
    say(f"{write_answers(args.out, written)} answers written to {args.out}")


def _last_words(question: _Question) -> str:
    return str(question.chat.messages[-1].get("content", ""))


def _chat(answerer: Answerer, config: Config) -> int:
    """A conversation on the terminal, until /quit or the end of input."""
    from strop.data.chat import Chat

    say(_COMMANDS)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print_plain(file=sys.stderr)
            return 0
        if line == "/quit":
            return 0
        if line == "/new":
            messages = []
        elif line.startswith("/") and line[1:].isalpha():
            say(_COMMANDS)
        elif line:
            turn = [*messages, {"role": "user", "content": line}]
            chat = Chat(
                messages=tuple(turn), where="the conversation", options=config.data.chat_template_kwargs
            )
            try:
                (answer,) = answerer.answer_all([chat])
            except ValueError as error:  # too long, or refused by the template: the chat goes on
                say(str(error))
                continue
            print_plain(plain(answer.text))
            messages = [*turn, {"role": "assistant", "content": answer.text}]
