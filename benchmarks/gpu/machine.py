"""Step env: the card, versions, the rates that it reaches, and what small calls cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement

from benchmarks.gpu.look import ROOT, Facts, Look
from benchmarks.gpu.timing import GIB, micros, seconds
from benchmarks.gpu.workload import model_folder, num_parameters
from strop.engines import head
from strop.engines.varlen import runs_on
from strop.utils.triton import has_kernels


def env(look: Look) -> None:
    """Measure the machine, and make the model that later steps share."""
    look.measure("card", lambda facts: _card(look, facts))
    look.measure("versions", _versions)
    look.measure("faster operations that this machine has", lambda facts: _operations(look, facts))
    look.measure("ceilings", lambda facts: _ceilings(look, facts))
    look.measure("small calls, in microseconds", lambda facts: _small_calls(look, facts))
    look.measure("model", lambda facts: _model(look, facts))


def _card(look: Look, facts: Facts) -> None:
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    facts["cores"] = len(os.sched_getaffinity(0))
    if look.device != "cuda":
        facts["device"] = "cpu"
        return
    asked = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    facts["nvidia_smi"] = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    ).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    facts |= {"device": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)}
    cudnn: Any = torch.backends.cudnn  # whose functions have no types
    facts |= {"multiprocessors": properties.multi_processor_count, "cudnn": cudnn.version()}


def _versions(facts: Facts) -> None:
    """Installed versions, and which are not as pyproject.toml declares them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wrong = []
    for text in [*project["dependencies"], "pytest>=9.0", "triton"]:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        facts[requirement.name] = version
        if version == "missing" or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{text}: {version}")
    facts["not_as_declared"] = wrong


def _operations(look: Look, facts: Facts) -> None:
    """Whether strop takes them here; without any of them it takes slower ones."""
    device = torch.device(look.device)
    facts["triton"], facts["flash_attention"] = has_kernels(device), runs_on(device)
    if look.device == "cuda":
        facts["addmm_into_float32"] = head._adds_to_wide_totals()
    facts["allocator"] = {name: os.environ[name] for name in sorted(os.environ) if "ALLOC_CONF" in name}


def _ceilings(look: Look, facts: Facts) -> None:
    size = look.size(8192, 256)
    a, b = (torch.randn(size, size, device=look.device, dtype=torch.bfloat16) for _ in range(2))
    taken = seconds(look, lambda: a @ b, warm=3, repeats=look.size(10, 2))
    facts["bf16_tflops"] = round(2 * size**3 / taken / 1e12, 3)
    size = look.size(4096, 128)
    c, d = (torch.randn(size, size, device=look.device) for _ in range(2))
    taken = seconds(look, lambda: c @ d, warm=2, repeats=look.size(5, 2))
    facts["float32_tflops"] = round(2 * size**3 / taken / 1e12, 3)
    row = torch.empty(look.size(1 << 31, 1 << 20), dtype=torch.uint8, device=look.device)
    other = torch.empty_like(row)
    taken = seconds(look, lambda: other.copy_(row), warm=2, repeats=5)
    facts["copy_tb_per_s"] = round(2 * row.nbytes / taken / 1e12, 3)
    host = torch.empty(look.size(1 << 29, 1 << 20), dtype=torch.uint8)
    target = torch.empty_like(host, device=look.device)
    ways = {
        "pageable_to_device": lambda: target.copy_(host),
        "device_to_pageable": lambda: host.copy_(target),
    }
    if look.device == "cuda":
        begin = time.perf_counter()
        pinned = torch.empty(host.numel(), dtype=torch.uint8, pin_memory=True)
        facts["pinning_s_per_gb"] = round((time.perf_counter() - begin) / (host.nbytes / 1e9), 3)
        ways["pinned_to_device"] = lambda: target.copy_(pinned, non_blocking=True)
    for name, work in ways.items():
        facts[f"{name}_gb_per_s"] = round(host.nbytes / seconds(look, work) / 1e9, 2)


def _small_calls(look: Look, facts: Facts) -> None:
    one, row = torch.ones(1, device=look.device), torch.arange(256)
    on_device = row.to(look.device)
    facts["launch"] = micros(look, lambda: one.add_(1), count=1000)
    facts["item"] = micros(look, one.item, count=200)
    facts["256 numbers to the device"] = micros(look, lambda: row.to(look.device), count=200)
    facts["256 numbers to the host"] = micros(look, on_device.tolist, count=200)


def _model(look: Look, facts: Facts) -> None:
    facts |= {"folder": str(model_folder(look)), "parameters": num_parameters(look)}
