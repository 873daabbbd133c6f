"""Finding commands, help, exit codes, and errors as sentences."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cli_calls import cli

import strop
from strop.cli import main as main_module
from strop.cli.main import COMMANDS, Command
from strop.rollout.client import RolloutTimeout
from strop.run import CheckpointError, RunError
from strop.trainer.collecting import TooFewGroups
from strop.trainer.fault_tolerance.signals import Terminated
from strop.utils.terminal import Interrupted
from strop.workers.reports import EpisodesFailed, StaleSamples


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_two_examples_of_its_own(name: str) -> None:
    result = cli(name, "--help")
    assert result.code == 0
    examples = [line for line in result.out.split("examples:\n")[1].splitlines() if f"strop {name}" in line]
    assert len(examples) >= 2
    assert "--debug" in result.out


def test_help_lists_the_commands_and_no_command_is_help() -> None:
    result = cli("--help")
    assert result.code == 0
    assert all(f"\n  {name} " in result.out for name in COMMANDS)
    assert cli() == result


def test_version_says_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / f"strop-{strop.__version__}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: strop\nVersion: {strop.__version__}\n"
        "Provides-Extra: whole\nProvides-Extra: old\nProvides-Extra: gone\nProvides-Extra: test\n"
        "Requires-Dist: torch>=2.11\nRequires-Dist: rich>=999\n"
        'Requires-Dist: numpy>=2; extra == "whole"\n'
        'Requires-Dist: numpy>=2; extra == "old"\nRequires-Dist: pyyaml>=99; extra == "old"\n'
        'Requires-Dist: no-such-package; extra == "gone"\nRequires-Dist: nor-this; extra == "test"\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = cli("--version").out.splitlines()
    assert lines[:3] == [
        f"strop {strop.__version__}",
        f"python {platform.python_version()} ({platform.system()} {platform.machine()})",
        f"torch {version('torch')}",
    ]
    assert lines[-5:] == [
        "ray " + version("ray"),
        f"rich>=999 is needed, and {version('rich')} installed",
        "extras installed: whole",
        "extras not installed: old, gone",
        f"  old: pyyaml>=99 is needed, and {version('pyyaml')} installed",
    ]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from strop.cli.main import main\n"
        "codes = [main(['--help']), *(main([name, '--help']) for name in ('train', 'eval', 'diff', 'config'))]\n"
        "print(codes, sorted({'torch', 'transformers', 'tensordict', 'datasets'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?; see `strop --help`"),
        (["zzz"], "there is no command 'zzz'; there are train, check"),
        (
            ["train", "--lr", "3"],
            "unrecognized arguments: --lr; settings are given as key=value, without dashes",
        ),
        (["train", "--confg", "a.yaml"], "unrecognized arguments: --confg; did you mean --config?"),
        (
            ["train", "--output-dir", "x"],
            "unrecognized arguments: --output-dir; here it is the option --out; see",
        ),
        (["samples", "x", "--resume"], "unrecognized arguments: --resume; see `strop samples --help`"),
        (["samples", "x", "--n", "3"], "unrecognized arguments: --n 3; see `strop samples --help`"),
        (["train", "--learning-rate", "3"], "without dashes: learning_rate is TRL's, here actor.optim.lr"),
        (["sft", "--learning_rate", "3"], "without dashes: learning_rate is TRL's, here sft.optim.lr"),
        (["train", "--actor_learning_rate=3"], "actor_learning_rate is OpenRLHF's, here actor.optim.lr"),
        (
            ["config"],
            "required: show|explain|diff, as in `strop config show --docs`; see `strop config --help`",
        ),
        (["diff", "runs/a"], "strop diff: the following arguments are required: RUN_B"),
        (["train", "rollout.temperature"], "'rollout.temperature' is not an override: write key=value"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_sentence(words: list[str], expected: str) -> None:
    result = cli(*words)
    assert expected in result.sentence
    assert len(result.err.splitlines()) == 1
    assert result.out == ""


def test_options_and_settings_may_come_in_any_order() -> None:
    result = cli("config", "show", "trainer.seed=3", "--json", "eval.every=7")
    assert (result.record["trainer"]["seed"], result.record["eval"]["every"]) == (3, 7)


def raising(make: Callable[[], object]) -> ModuleType:
    """A command that fails."""
    module = ModuleType("failing_command")
    vars(module).update(add_arguments=lambda parser: None, run=lambda args: make())
    return module


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | Callable[[], object]], None]:
    """Makes `strop fail` a command that raises."""

    def install(error: BaseException | Callable[[], object]) -> None:
        def fail() -> object:
            if isinstance(error, BaseException):
                raise error
            return error()

        monkeypatch.setitem(sys.modules, "failing_command", raising(fail))
        monkeypatch.setitem(COMMANDS, "fail", Command(summary="fails", module="failing_command"))

    return install


@pytest.mark.parametrize(
    "error",
    [
        ValueError("what and what to do"),
        FileNotFoundError("what and what to do"),
        RunError("what and what to do"),
        CheckpointError("what and what to do"),
        EpisodesFailed("what and what to do"),
        StaleSamples("what and what to do"),
        TooFewGroups("what and what to do"),
        RolloutTimeout("what and what to do"),
        ExceptionGroup("tasks", [RunError("what and what to do"), RunError("another")]),
    ],
)
def test_errors_of_users_are_sentences_with_code_2(
    error: Exception, failing: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(error)
    monkeypatch.setattr(main_module, "_is_raised_by_strop", lambda error: True)
    result = cli("fail")
    assert (result.code, result.err) == (2, "strop fail: what and what to do\n")
    debug = cli("fail", "--debug")
    assert debug.code == 2
    assert "Traceback (most recent call last)" in debug.err
    assert debug.err.endswith(result.err)


def test_a_device_without_memory_is_a_sentence_with_what_to_set(
    failing: Callable[[BaseException], None],
) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.10 GiB is "
        "free. Process 7 has 78 GiB memory in use. If reserved but unallocated memory is large try setting a variable."
    )
    failing(torch.OutOfMemoryError(text))
    result = cli("fail")
    assert result.code == 2
    assert result.err.startswith(
        "strop fail: the device has no memory left: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    )
    for setting in (
        "actor.engine.max_tokens_per_device",
        "model.gradient_checkpointing=true",
        "rollout.max_running",
    ):
        assert setting in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "want", ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_so_is_one_whose_memory_other_processes_have(
    failing: Callable[[BaseException], None], want: str
) -> None:
    failing(RuntimeError(f"CUDA error: {want}\nSearch for `cudaErrorMemoryAllocation' in the manual."))
    result = cli("fail")
    assert result.code == 2
    assert result.err.startswith(f"strop fail: the device has no memory left: CUDA error: {want}. Lower ")
    failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert "Traceback" in cli("fail").err


def test_our_own_bugs_are_no_sentences(failing: Callable[[BaseException], None]) -> None:
    for error in (
        KeyError("a bug\x1b"),
        ExceptionGroup("tasks", [RunError("a sentence"), KeyError("a bug\x1b")]),
    ):
        failing(error)
        result = cli("fail")
        assert result.code == 1
        assert "Traceback (most recent call last)" in result.err
        assert "a bug\\x1b" in result.err


def test_a_sentence_of_a_library_says_that_debug_tells_more(
    failing: Callable[[Callable[[], object]], None],
) -> None:
    failing(lambda: json.loads("{"))
    assert "(JSONDecodeError; --debug shows where)" in cli("fail").sentence
    failing(lambda: open("/nowhere/at/all"))  # noqa: PTH123, SIM115
    assert cli("fail").sentence.startswith("strop fail: No such file or directory: /nowhere/at/all")


def test_untrusted_text_in_an_error_is_escaped(failing: Callable[[BaseException], None]) -> None:
    failing(RunError("it returned '\x1b[2Jboo'"))
    assert "\\x1b[2Jboo" in cli("fail").sentence


def test_an_interrupt_is_code_130_and_says_how_to_go_on(failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    assert (cli("fail").code, cli("fail").err) == (130, "\ninterrupted\n")
    failing(Interrupted("continue with that", cause=KeyboardInterrupt()))
    assert (cli("fail").code, cli("fail").err) == (130, "\ninterrupted; continue with that\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_asks_to_end_has_its_usual_code_and_is_named(
    number: signal.Signals, code: int, failing: Callable[[BaseException], None]
) -> None:
    failing(Interrupted("continue with that", cause=Terminated(number)))
    assert (cli("fail").code, cli("fail").err) == (code, f"ended by {number.name}; continue with that\n")


def test_what_fails_after_a_signal_is_said(failing: Callable[[Callable[[], object]], None]) -> None:
    def fail() -> None:
        raise Interrupted("continue with that", cause=Terminated(signal.SIGTERM)) from RunError("no room\x1b")

    failing(fail)
    assert cli("fail").code == 143
    assert cli("fail").err == "after SIGTERM: no room\\x1b\nended by SIGTERM; continue with that\n"


def test_the_exit_code_of_a_command_is_handed_on(failing: Callable[[Callable[[], object]], None]) -> None:
    failing(lambda: 1)
    assert cli("fail").code == 1


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.utils.quiet_libraries import share_cores

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    share_cores()
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["KMP_BLOCKTIME"]) == ("30000", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("KMP_BLOCKTIME")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    share_cores()
    assert not {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strop", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("strop ")
