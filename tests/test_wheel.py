"""What is built for others to install: the source archive, and the wheel that is made of it."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import strop

ROOT = Path(__file__).parent.parent
_NAME = f"strop-{strop.__version__}"
_BUILD = "import sys, setuptools.build_meta as builder; print(getattr(builder, sys.argv[1])(sys.argv[2]))"


def run(*words: str, cwd: Path, **env: str) -> str:
    """Standard output of a command that must succeed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    done = subprocess.run(
        words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source archive of this tree, built by the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(ROOT / "strop", source / "strop", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", _BUILD, "build_sdist", str(folder), cwd=source)
    with tarfile.open(folder / f"{_NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-c", _BUILD, "build_wheel", str(folder), cwd=folder / _NAME)
    return folder / f"{_NAME}-py3-none-any.whl"


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    built = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(f"{_NAME}.dist-info/")}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "strop").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert built == here
    assert {"strop/py.typed", "strop/compat/migrate/verl.toml"} < built
    assert {"strop/observability/viewer/page/static/index.html", "strop/rollout/native/cpu/decode.c"} < built


def test_the_wheel_works_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    path = {"PYTHONPATH": str(tmp_path / "installed")}
    where = run(sys.executable, "-c", "import strop; print(strop.__file__)", cwd=tmp_path, **path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    version = run(sys.executable, "-m", "strop", "--version", cwd=tmp_path, **path)
    assert version.startswith(f"strop {strop.__version__}\n")
    assert "extras installed: " in version
    shown = run(sys.executable, "-m", "strop", "config", "show", "algorithm=dr_grpo", cwd=tmp_path, **path)
    assert "reward:" in shown
    assert "loss_agg_mode: seq-mean-token-sum-norm" in shown


@pytest.mark.slow
def test_the_wheel_installed_in_an_environment_of_its_own_trains(wheel: Path, tmp_path: Path) -> None:
    python = str(tmp_path / "env" / "bin" / "python")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    # All but strop comes from the environment of the tests.
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    (packages / "beside.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--ignore-installed", "--no-index")
    run(sys.executable, *install, str(wheel), cwd=tmp_path)
    strop = str(tmp_path / "env" / "bin" / "strop")
    assert run(strop, "--version", cwd=tmp_path).startswith(f"{_NAME.replace('-', ' ')}\n")
    settings = ("sft.max_steps=2", "trainer.max_steps=2", "trainer.preflight=false")
    last = run(strop, "quickstart", "--json", *settings, cwd=tmp_path).splitlines()[-1]
    assert 0 <= json.loads(last)["pass_rate_final"] <= 1
