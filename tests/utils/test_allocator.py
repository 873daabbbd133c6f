"""torch's allocator in segments that grow: where a process begins, unless the user has set it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from strop.utils.allocator import VARIABLE, allocator_variables, fixed_segments, give_way

GROWING = {VARIABLE: "expandable_segments:True"}
COMMAND = """
import json, os, sys
from strop.cli.main import main
before = "torch" in sys.modules
sys.argv = ["strop", "--help"]
main()
print(json.dumps([before, {name: os.environ[name] for name in os.environ if "ALLOC_CONF" in name}]))
"""


def started(program: str, **variables: str) -> list[object]:
    """The last line of a process with these settings of the allocator and no others."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    result: list[object] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        {"PYTORCH_HIP_ALLOC_CONF": ""},
    ],
    ids=str,
)
def test_a_command_begins_with_segments_that_grow_unless_the_user_has_set_the_allocator(
    own: dict[str, str],
) -> None:
    assert started(COMMAND, **own) == [False, own or GROWING]


def test_a_worker_gets_what_the_command_was_started_with() -> None:
    assert allocator_variables({"HOME": "/"}) == GROWING
    own = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert allocator_variables({**own, "HOME": "/"}) == own
    assert allocator_variables({**own, **GROWING}) == own, "resources.env came behind the command's own"


def test_a_setting_of_the_run_takes_the_place_of_ours() -> None:
    for own in ({"PYTORCH_ALLOC_CONF": "backend:native"}, {VARIABLE: "backend:native"}):
        environment = {**GROWING, **own}
        give_way(environment)
        assert environment == own
    environment = {**GROWING, "HOME": "/"}
    give_way(environment)
    assert environment == {**GROWING, "HOME": "/"}


PARTS = """
import torch
from strop.rollout.weight_sync.cuda_ipc import without_growing_segments
settings = torch._C._accelerator_getAllocatorSettings
seen = [settings()]
try:
    with without_growing_segments():
        seen.append(settings())
        raise KeyError
except KeyError:
    seen.append(settings())
print(json.dumps(seen))
"""


@pytest.mark.parametrize(
    ("own", "inside"),
    [
        (f"{allocator_variables({})[VARIABLE]},max_split_size_mb:64", *fixed_segments(GROWING).values()),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_memory_that_other_processes_open_lies_in_segments_of_fixed_sizes(own: str, inside: str) -> None:
    assert started("import json" + PARTS, **{VARIABLE: own}) == [own, inside, own]


TORCH_2_11 = """
import json, os, sys
import torch
from strop.rollout.weight_sync.cuda_ipc import without_growing_segments
del torch._C._accelerator_getAllocatorSettings
all_said = []
for variables in json.loads(os.environ["CASES"]):
    os.environ.update(variables)
    said = []
    torch._C._accelerator_setAllocatorSettings = said.append
    with without_growing_segments():
        pass
    all_said.append(said)
    for name in variables:
        del os.environ[name]
print(json.dumps(all_said))
"""


def test_a_torch_that_does_not_say_its_settings_has_read_them_from_a_variable() -> None:
    own = f"{GROWING[VARIABLE]},max_split_size_mb:64"
    both = {VARIABLE: "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": own}
    cases = [{VARIABLE: own}, {"PYTORCH_ALLOC_CONF": own}, both, {}]
    changed = [*fixed_segments(GROWING).values(), own]
    of_cuda, of_all, of_both, of_none = started(TORCH_2_11, CASES=json.dumps(cases))
    assert of_cuda == of_all == changed
    assert of_both == [], "it prefers the variable of CUDA, which has no such"
    assert of_none == []


def test_engines_whose_weights_sleep_in_pools_are_told_to_do_without() -> None:
    assert fixed_segments(GROWING) == {VARIABLE: "expandable_segments:False"}
    assert fixed_segments({}) == {}
    assert fixed_segments({VARIABLE: "max_split_size_mb:64"}) == {}
