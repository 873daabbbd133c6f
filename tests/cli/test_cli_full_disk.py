"""Standard streams and disks that take nothing: one sentence, a resume that goes on, and no damage to the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import Project

PROGRAM = """
import json, subprocess, sys
from cli_calls import cli

config, folder, *sizes = sys.argv[1:]
told = {}
for size in sizes:
    run = folder + "/run"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder]).returncode:
        sys.exit(77)
    trackers = "trainer.trackers=[console,jsonl,tensorboard]"
    full = cli("train", "--config", config, "--out", run, trackers, "trainer.max_steps=2")
    subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
    more = cli("train", "--resume", run)
    told[size] = [full.code, full.err, more.code, more.err]
    subprocess.run(["umount", "-l", folder], check=True)
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment_is_one_sentence_and_the_run_goes_on(
    project: Project, tmp_path: Path
) -> None:
    # In samples of the first validation, its metrics, samples of a step, the first checkpoint, the second.
    sizes = ("56", "72", "80", "120", "400")
    (tmp_path / "disk").mkdir()
    words = [sys.executable, "-c", PROGRAM, str(project.config), str(tmp_path / "disk"), *sizes]
    done = subprocess.run(
        ["unshare", "--mount", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=500
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may mount nothing")
    for code, err, resumed, resumed_err in json.loads(done.stdout.splitlines()[-1]).values():
        assert code == 2
        assert "No space left on device" in err.splitlines()[-1]
        assert "continue with --resume" in err.splitlines()[-1]
        assert "Traceback" not in err
        assert resumed == 0, resumed_err


def test_a_command_whose_standard_error_cannot_be_written_ends_as_it_would() -> None:
    program = (
        "import sys; from strop.cli.main import main; code = main(['nosuch'])\n"
        "from strop.utils.terminal import say; say('a line of progress that nobody can read')\n"
        "sys.exit(code)"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, timeout=60)
    assert done.returncode == 2


def test_a_command_that_is_started_without_standard_streams_ends_as_it_would() -> None:
    # As a service may: the shell closes all three. What is said goes nowhere; the exit code is that of the command.
    for words, code in ("config show", 0), ("nosuch", 2):
        line = f"exec {sys.executable} -m strop.cli.main {words} <&- >&- 2>&-"
        assert subprocess.run(["sh", "-c", line], timeout=60).returncode == code


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed(tmp_path: Path) -> None:
    # What a library writes to descriptor 1 or 2 would otherwise be in the run's own record.
    program = (
        "import os, sys; from strop.utils.standard_error import occupy_descriptors; occupy_descriptors()\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    for number in (0, 1, 2): os.write(number, b'said'); assert os.get_inheritable(number)\n"
        "    file.write('the record')"
    )
    record = tmp_path / "record"
    line = f'exec {sys.executable} -c "$0" {record} <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line, program], timeout=60).returncode == 0
    assert record.read_text() == "the record"
