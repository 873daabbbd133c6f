"""A driver of CUDA that has a device and computes nothing, which torch's builds for a CPU take for one: autograd asks
it for devices and streams. torch looks for a driver once, so this one is loaded before torch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
};
namespace at { REGISTER_CUDA_HOOKS(CUDAHooks); }
"""
"""With torch's own stand-in for devices and streams."""


def load() -> None:
    """Compile it and load it into this process, which has not imported torch."""
    assert "torch" not in sys.modules, "torch has looked for a driver"
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is installed"
    assert spec.submodule_search_locations is not None, "it is a package"
    torch_folder = Path(spec.submodule_search_locations[0])
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder / "lib" / name), ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "driver.cpp", Path(folder) / "driver.so"
        source.write_text(_SOURCE)
        words = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source)]
        words += ["-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(words, check=True, timeout=100)
        ctypes.CDLL(str(library))
