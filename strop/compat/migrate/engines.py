"""vLLM and SGLang: settings of the other library's engine as those of rollout.vllm and rollout.sglang.

A run generates with the engine that its script names where that is installed on this machine, or with the one that
`rollout.engine` names beside the script. Otherwise strop's own engine samples, and a row says what it would become.
"""

from __future__ import annotations

import contextlib
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, integer, lack, many, skip
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import NATIVE

ENGINE = "rollout.engine of the run"
"""The fact that says which engine generates; none: strop's own."""
_ARGUMENTS = {"vllm": "rollout.vllm.engine_args", "sglang": "rollout.sglang.server_args"}
_INSTALL = {
    "vllm": "for vLLM: strop engine install vllm, then rollout.engine=vllm behind FILE, which translates its settings",
    "sglang": "for SGLang: name the Python of its environment in STROP_SGLANG, then rollout.engine=sglang behind FILE, "
    "which translates its settings",
}
_NAME = "actor_rollout_ref.rollout.name"
_GONE = ("swap_space", "disable_mm_preprocessor_cache", "num_scheduler_steps", "use_v2_block_manager")
"""Arguments that vLLM had in 2025."""


def engine_of(theirs: object, chosen: object) -> str:
    """The engine that generates.

    Args:
        theirs: what the script names.
        chosen: rollout.engine beside the script; None: nothing.
    """
    if chosen is not None:
        return str(chosen)
    return str(theirs) if theirs in _ARGUMENTS and _is_installed(str(theirs)) else NATIVE


def _is_installed(name: str) -> bool:
    processes = RolloutConfig(engine=name).own_processes
    with contextlib.suppress(ValueError):
        return processes is not None and processes.installed().is_file()
    return False


def _engine(facts: Facts) -> str:
    return str(facts.get(ENGINE) or NATIVE)


def engine(key: str, value: Any, facts: Facts, *, name: str = "") -> Outcome:
    """Engine that generates."""
    theirs = name or value
    if not value:
        return skip("off there too")
    if _engine(facts) != NATIVE:
        return many(
            {"rollout.engine": _engine(facts)}, "" if _engine(facts) == theirs else "given beside FILE"
        )
    if theirs == "hf":
        return skip("strop's own engine samples with the model itself, too")
    install_hint = _INSTALL.get(theirs, f"{theirs} is not here: rollout.engine has others")
    return lack(f"strop's own engine samples, with the trainer's own weights; {install_hint}")


def engine_setting(key: str, value: object, facts: Facts, *, vllm: str = "", sglang: str = "") -> Outcome:
    """A setting of the engine; behind `not` a switch that says the contrary."""
    if value is None or value in ({}, []):
        return skip("not set")
    names = {"vllm": vllm, "sglang": sglang}
    ours = _engine(facts)
    if ours not in names:
        theirs = str(facts.get(_NAME))
        would = theirs if names.get(theirs) else "vllm" if vllm else "sglang"
        name = names[would].removeprefix("not ")
        return lack(f"strop's own engine has no such setting; with rollout.engine={would} it is {name}")
    if not names[ours]:
        return lack(f"rollout.engine={ours} has no such setting")
    is_turned = names[ours].startswith("not ")
    return many({names[ours].removeprefix("not "): not value if is_turned else value})


def engine_argument(key: str, value: object, facts: Facts, *, of: str = "", section: str) -> Outcome:
    """An argument that is passed on to the engine under its own name."""
    theirs = of or str(facts.get(_NAME) or "vllm")
    name = key.removeprefix(f"{section}.")
    first = name.partition(".")[0]
    if value is None or value in ({}, []):
        return skip("not set")
    if theirs not in _ARGUMENTS:
        return lack(f"{theirs} is not here: rollout.engine has others")
    if theirs == "vllm" and first in _GONE:
        return skip(f"vLLM has no argument {first} any more")
    if _is_of_strop(theirs, first):
        return skip(f"{first} follows from other settings here")
    if _engine(facts) == NATIVE:
        return lack(
            f"strop's own engine has no such setting; with rollout.engine={theirs} it is {_ARGUMENTS[theirs]}.{name}"
        )
    if _engine(facts) != theirs:
        return skip(f"read with {theirs} alone")
    return many({f"{_ARGUMENTS[theirs]}.{name}": value})


def _is_of_strop(engine: str, argument: str) -> bool:
    """strop sets the argument itself, so that the engine's section refuses it."""
    section: Any = type(RolloutConfig(engine=engine).own_processes)
    try:
        section(**{_ARGUMENTS[engine].rpartition(".")[2]: {argument: None}})
    except ValueError:
        return True
    return False


def engine_devices(key: str, value: object, facts: Facts) -> Outcome:
    """Devices that share one copy of the model."""
    if value is None or integer(value) <= 1:
        return skip("one device has the whole model, as here")
    return lack(
        "an engine over several devices has processes of its own here: rollout.vllm.tensor_parallel and "
        "pipeline_parallel (or those of rollout.sglang), with resources.apart={rollout: N} for N engines"
    )


def memory_between(key: str, value: object, facts: Facts) -> Outcome:
    """Release of the engine's memory while the trainer works."""
    if value is False:
        return lack("the memory of the engine's cache goes back while the trainer works")
    return skip("the memory of the engine's cache goes back while the trainer works, as here")
