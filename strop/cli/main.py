"""`strop`: one program, one command per module.

Exit codes: 0 done; 1 `strop diff` or `strop config diff` found a difference, `strop check` or `strop score
--check` found a fault, a run of `strop sweep` failed, or strop itself is broken (with a traceback); 2 the input
cannot be used, with one sentence about what and what to do; 75 a scheduler's warning (SIGUSR1) or a machine that is
taken away ended the run, which is saved and wants to be started again; 130 interrupted; 143 and 129 asked to end by
SIGTERM and by SIGHUP.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from strop.utils import trust
from strop.utils.allocator import allocator_variables
from strop.utils.gc_freeze import look_rarely
from strop.utils.sanitize import encodable, redacted, remember_named, remember_secrets_in
from strop.utils.standard_error import occupy_descriptors, unfailing
from strop.utils.terminal import UsageError, plain, print_plain

BROKEN, USER_ERROR = 1, 2
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""
TRY_AGAIN = os.EX_TEMPFAIL
"""75: what schedulers know as `start it again`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and where it lives."""

    module: str
    """Has `add_arguments(parser)` and `run(args) -> int`."""
    summary: str = ""
    """One line for `strop --help`; empty where the module has it as SUMMARY."""

    def line(self) -> str:
        """Its summary."""
        return self.summary or str(importlib.import_module(self.module).SUMMARY)


COMMANDS = {
    "train": Command(
        summary="train with reinforcement learning from rewards", module="strop.cli.commands.train"
    ),
    "check": Command(module="strop.cli.commands.check"),
    "plan": Command(module="strop.cli.commands.plan"),
    "env": Command(module="strop.cli.commands.env"),
    "reward": Command(module="strop.cli.commands.reward"),
    "migrate": Command(module="strop.cli.commands.migrate"),
    "data": Command(module="strop.cli.commands.data"),
    "doctor": Command(module="strop.cli.commands.doctor"),
    "eval": Command(module="strop.cli.commands.eval"),
    "compare": Command(module="strop.cli.commands.compare"),
    "generate": Command(module="strop.cli.commands.generate"),
    "score": Command(module="strop.cli.commands.score"),
    "config": Command(module="strop.cli.commands.config"),
    "serve": Command(module="strop.cli.commands.serve"),
    "prefer": Command(module="strop.cli.commands.prefer"),
    "dpo": Command(module="strop.cli.commands.dpo"),
    "reward-model": Command(module="strop.cli.commands.reward_model"),
    "quickstart": Command(module="strop.cli.commands.quickstart"),
    "replay": Command(module="strop.cli.commands.replay"),
    "engine": Command(module="strop.cli.commands.engine"),
    "sandbox": Command(module="strop.cli.commands.sandbox"),
    "export": Command(module="strop.cli.commands.export"),
    "push": Command(module="strop.cli.commands.push"),
    "completion": Command(module="strop.cli.completion"),
    "sft": Command(module="strop.cli.commands.sft"),
    "sweep": Command(module="strop.cli.commands.sweep"),
    "track": Command(module="strop.cli.commands.track"),
    "view": Command(module="strop.cli.commands.view"),
    "profile": Command(module="strop.cli.commands.profile"),
    "runs": Command(module="strop.cli.commands.runs"),
    "plot": Command(module="strop.cli.commands.plot"),
    "samples": Command(module="strop.cli.commands.samples"),
    "diff": Command(module="strop.cli.commands.diff"),
    "incident": Command(module="strop.cli.commands.incident"),
}

_EPILOG = """\
examples:
  strop quickstart
  strop train --config examples/arithmetic/config.yaml --out runs/arithmetic trainer.max_steps=20

`strop COMMAND --help` shows the options of a command, with examples.
"""

_LATE_ERRORS = (
    ("strop.run.errors", "RunError"),
    ("strop.workers.reports", "EpisodesFailed"),
    ("strop.workers.reports", "StaleSamples"),
    ("strop.trainer.collecting", "TooFewGroups"),
    ("strop.controller.errors", "WorkerFailed"),
    ("strop.controller.errors", "CallTimeout"),
    ("strop.rollout.client", "RolloutTimeout"),
    ("strop.rollout.client", "NoEngine"),
    ("strop.rollout.weight_sync.types", "SyncError"),
    ("strop.rollout.types", "EngineDied"),
    ("strop.engines.token_budget", "OutOfMemory"),
)
"""Errors with a sentence for users, besides ValueError and OSError. Looked up among the modules already
loaded: a module that was never imported has raised nothing."""


_FILE = "a file of settings is given with --config FILE; files and folders beside it are found from there"
_OPTIONS_OF_HYDRA = {
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"), _FILE),
    **dict.fromkeys(("--multirun", "-m"), "several runs are `strop sweep`"),
    **dict.fromkeys(
        ("--cfg", "-c", "--resolve", "--info", "-i"), "`strop config show` prints the settings of a run"
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are sentences like all others."""

    def error(self, message: str) -> NoReturn:
        """Report a command line that cannot be read."""
        hint = ""
        if message.startswith("unrecognized arguments: -"):
            option = message.split()[2].partition("=")[0]
            advice = _OPTIONS_OF_HYDRA.get(option) or self._instead_of(option)
            hint = f"; {advice}" if advice else ""
        elif not message.endswith("?") and (example := _first_example(self.epilog or "")):
            hint = f", as in `{example}`"
        raise UsageError(f"{message}{hint}; see `{self.prog} --help`")

    def _instead_of(self, option: str) -> str:
        """Advice in place of an option that there is not: the nearest one, or a key; "" for none."""
        if near := difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.8):
            return f"did you mean {near[0]}?"
        from strop.compat.key_aliases import key_aliases
        from strop.config.schema import tree
        from strop.trainer.config import Config
        from strop.trainer.sections import SECTION_OF_COMMAND

        section = SECTION_OF_COMMAND.get(self.prog.rpartition(" ")[2], "")
        options = {
            name: f"the option --{name}"
            for name in ("out", "resume")
            if f"--{name}" in self._option_string_actions
        }
        word = option.lstrip("-").replace("-", "_")
        ours, sentence = key_aliases(word, section, tree(Config), options=options)
        if sentence and not ours:
            return sentence
        if all(action.dest != "overrides" for action in self._actions):  # it takes no settings
            return ""
        written = "settings are given as key=value, without dashes"
        return f"{written}: {sentence}" if ours else written


def _first_example(epilog: str) -> str:
    """The first command line of the examples of a command; empty without any."""
    lines = epilog.partition("examples:\n")[2].splitlines()
    return lines[0].partition("  #")[0].strip() if lines else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Args:
        argv: the words after `strop`; None takes those of the process.
    """
    if argv is None:
        occupy_descriptors()
        look_rarely()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    remember_named(
        os.environ
    )  # of every key that a library or a user's file may read, and repeat in an error
    for word in words:  # an override, also one that cannot be read
        name, _, value = word.partition("=")
        remember_secrets_in(value.strip("'\""), name)
    if argv is None:  # else torch may be there already
        os.environ.update(allocator_variables(os.environ))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    sys.stderr = unfailing(sys.stderr)
    try:
        code = _dispatch(words)
        if sys.stdout is not None:  # a service may start the command without one
            sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse, after --help
        return end.code if isinstance(end.code, int) else USER_ERROR
    except KeyboardInterrupt as error:
        return _signalled(error, debug=debug, command="".join(words[:1]))
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  (the end of the program: strop itself is broken, and the traceback is shown)
        user_error = _user_error(error)
        if user_error is None or debug:
            print_plain("".join(traceback.format_exception(error)), end="", file=sys.stderr)
        if user_error is None:
            return BROKEN
        name = words[0] if words and words[0] in COMMANDS else ""
        print_plain(f"{f'strop {name}'.strip()}: {_sentence(user_error, name)}", file=sys.stderr)
        return USER_ERROR


def _signalled(error: KeyboardInterrupt, *, debug: bool, command: str) -> int:
    """Say which signal ended the command, and what failed after it."""
    number = getattr(error, "number", signal.SIGINT)
    failed = error.__cause__
    if failed is not None and debug:
        print_plain("".join(traceback.format_exception(failed)), end="", file=sys.stderr)
    if failed is not None:
        print_plain(f"after {signal.Signals(number).name}: {_sentence(failed, command)}", file=sys.stderr)
    ending = {
        signal.SIGINT: "\ninterrupted",
        signal.SIGUSR1: "ended before the machine's end, as its scheduler asked (SIGUSR1)",
    }.get(number, f"ended by {signal.Signals(number).name}")
    print_plain(f"{ending}{f'; {error}' if str(error) else ''}", file=sys.stderr)
    return TRY_AGAIN if number == signal.SIGUSR1 else SIGNALLED + number


def command_parser(name: str) -> tuple[Parser, ModuleType]:
    """The parser of a command and its module."""
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(
        prog=f"strop {name}",
        description=f"{command.line()[0].upper()}{command.line()[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and each warning every time")
    return parser, module


def _dispatch(words: list[str]) -> int:
    for word in words:
        if not word.isascii() and encodable(word) != redacted(word):  # a name of a file in another encoding
            raise UsageError(f"{word} holds bytes that are no UTF-8; rename the file or folder")
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        from strop.cli.completion import complete

        return complete(COMMANDS, lambda name: command_parser(name)[0])
    if words[:1] == ["--version"]:
        from strop.cli.versions import describe_installation

        print_plain(describe_installation())
        return 0
    if not words or words[0] not in COMMANDS:
        _top_parser().parse_args(words)
        _top_parser().print_help()
        return 0 if not words else USER_ERROR
    name, rest = words[0], words[1:]
    parser, module = command_parser(name)
    args = parser.parse_intermixed_args(rest)
    args.command_line = ["strop", *words]
    from strop.utils.quiet_libraries import share_cores, terminal_log

    with terminal_log(debug=args.debug), trust.door():
        share_cores()
        code = module.run(args)
    assert isinstance(code, int), "every command returns an exit code"
    return code


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.line()}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="strop",
        description=f"Reinforcement-learning post-training for language models.\n\ncommands:\n{listed}",
        epilog=_EPILOG,
        usage="strop COMMAND [options] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="store_true", help="versions of the installed packages and extras"
    )
    parser.add_argument("command", nargs="?", type=_known_command, help=argparse.SUPPRESS)
    return parser


def _known_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise argparse.ArgumentTypeError(f"there is no command {name!r}; {hint}")


def _user_error(error: BaseException) -> BaseException | None:
    """The error whose message is a sentence for the user; None when it is not one of those."""
    if isinstance(error, BaseExceptionGroup):  # of concurrent tasks that failed together
        user_errors = [_user_error(inner) for inner in error.exceptions]
        return user_errors[0] if all(inner is not None for inner in user_errors) else None
    if isinstance(error, (ValueError, OSError)) or _lacks_device_memory(error):
        return error
    for module, name in _LATE_ERRORS:
        if module in sys.modules and issubclass(type(error), getattr(sys.modules[module], name)):
            return error
    return None


def _sentence(error: BaseException, command: str) -> str:
    text = plain(str(error)) or type(error).__name__
    if _lacks_device_memory(error):
        return _out_of_memory(text, command)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    return text if _is_raised_by_strop(error) else f"{text} ({type(error).__name__}; --debug shows where)"


_DRIVERS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""Beginnings of errors of a device's driver, also where other processes have all of its memory."""
_WANTS = (": out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words of these errors for want of memory; the second are those of cuBLAS."""


def _lacks_device_memory(error: BaseException) -> bool:
    """torch's error, whose text has the request and the device's memory, or that of a driver, which has no class."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    is_of_driver = text.startswith(_DRIVERS) and any(want in text for want in _WANTS)
    return type(error).__name__ == "OutOfMemoryError" or is_of_driver


_LESS_MEMORY = {
    "sft": "sft.engine.max_tokens_per_device",
    **dict.fromkeys(("prefer", "dpo", "reward-model"), "prefer.engine.max_tokens_per_device"),
}
"""Setting that bounds the tokens trained at one time, by command."""


def _out_of_memory(text: str, command: str) -> str:
    facts = ". ".join(text.partition("\n")[0].split(". ")[:3]).rstrip(".")
    running = "rollout.max_running (how many answers are generated at one time)"
    if command in ("eval", "generate", "serve"):
        advice = f"Lower {running}"
    elif command in _LESS_MEMORY:
        advice = (
            f"Lower {_LESS_MEMORY[command]} (how many tokens are trained at one time), or set "
            f"model.gradient_checkpointing=true"
        )
    else:
        advice = (
            f"Lower actor.engine.max_tokens_per_device (of the other roles too: how many tokens are trained at one "
            f"time), set model.gradient_checkpointing=true, or lower {running}"
        )
    return f"the device has no memory left: {facts}. {advice}; --debug shows where"


def _is_raised_by_strop(error: BaseException) -> bool:
    """False when the message is a library's, which a user may find hard to place."""
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parent.parent)


if __name__ == "__main__":
    sys.exit(main())
