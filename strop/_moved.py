"""Old dotted names of public modules: an import of one gives the new module's names, with a DeprecationWarning.

They work until 0.3. `MOVED` maps an old name to the modules that hold its public names now; a name below an old
package is looked for at the same place below the first of them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # with files of packages, temporary files and archives

MOVED: dict[str, tuple[str, ...]] = {
    old: tuple(new.split())
    for old, new in (
        ("strop.algorithms.stream_functions", "strop.algorithms.group_functions"),
        ("strop.base", "strop.utils"),
        ("strop.base.randomness", "strop.utils.rng"),
        ("strop.base.sections", "strop.config.sections"),
        ("strop.border", "strop.utils.sanitize"),
        ("strop.border.control", "strop.utils.sanitize.control_tokens"),
        ("strop.chat_template", "strop.utils.chat_template"),
        ("strop.compat.agent_loops", "strop.agents.verl_loops"),
        ("strop.compat.datasets", "strop.data"),
        ("strop.compat.datasets.custom", "strop.data.dataset_class"),
        ("strop.compat.datasets.generator", "strop.data.data_generator"),
        ("strop.compat.datasets.rlhf", "strop.data.rlhf_dataset"),
        ("strop.compat.datasets.samplers", "strop.data.sampler_class"),
        ("strop.compat.dispatch_modes", "strop.controller.dispatch_modes"),
        ("strop.compat.migration", "strop.compat.migrate"),
        ("strop.compat.reward_managers", "strop.rewards.verl_managers"),
        ("strop.compat.worker_groups", "strop.controller.verl_groups"),
        ("strop.data.mixing", "strop.data.mixture"),
        ("strop.data.tiny", "strop.data.tiny_model"),
        ("strop.engines.carried", "strop.engines.model_support"),
        (
            "strop.engines.sharding",
            (
                "strop.engines.parallel.balance strop.engines.parallel.fsdp strop.engines.parallel.process_group "
                "strop.engines.parallel.sharded_saving"
            ),
        ),
        ("strop.environments", "strop.agents.envs"),
        ("strop.gateway", "strop.agents.openai_server"),
        ("strop.health", "strop.observability.health"),
        ("strop.interactions", "strop.agents.interactions"),
        ("strop.judges", "strop.rewards.judges"),
        ("strop.preferences", "strop.trainer.preference"),
        ("strop.preferences.losses", "strop.algorithms.losses.preference"),
        ("strop.protocol.batch", "strop.protocol.data_proto"),
        ("strop.python", "strop.api"),
        ("strop.python.doors", "strop.api.training"),
        ("strop.python.pieces", "strop.api.toolkit"),
        ("strop.quickstart", "strop.cli.quickstart"),
        ("strop.recipes", "strop.algorithms.advantages strop.algorithms.losses"),
        ("strop.recipes.anchored", "strop.algorithms.advantages.gigpo"),
        ("strop.recipes.batch_whitened", "strop.algorithms.advantages.reinforce_pp"),
        ("strop.recipes.correction", "strop.algorithms.rollout_correction"),
        ("strop.recipes.covariance", "strop.algorithms.losses.covariance"),
        ("strop.recipes.geometric", "strop.algorithms.losses.gmpo"),
        ("strop.recipes.greedy_baseline", "strop.algorithms.advantages.remax"),
        ("strop.recipes.group_baselines", "strop.algorithms.advantages.group_baselines"),
        ("strop.recipes.imitation", "strop.algorithms.advantages.raft"),
        ("strop.recipes.masked", "strop.algorithms.masked_ops"),
        ("strop.recipes.plain", "strop.algorithms.losses.policy_gradient"),
        ("strop.recipes.returns", "strop.algorithms.advantages.reward_to_go"),
        ("strop.recipes.sequence", "strop.algorithms.losses.gspo"),
        ("strop.recipes.smooth", "strop.algorithms.losses.smooth"),
        ("strop.recipes.token_baseline", "strop.algorithms.advantages.optimal_token_baseline"),
        ("strop.recipes.trust_region", "strop.algorithms.losses.dppo"),
        ("strop.recipes.weighted", "strop.algorithms.losses.cispo"),
        ("strop.roles", "strop.workers"),
        ("strop.roles.gae", "strop.algorithms.advantages.gae"),
        ("strop.roles.value_loss", "strop.algorithms.losses.value"),
        ("strop.rollout.sync", "strop.rollout.weight_sync"),
        ("strop.scorers", "strop.rewards.scorers"),
        ("strop.supervised", "strop.trainer.sft"),
        ("strop.supervised.dataset", "strop.data.sft.dataset"),
        ("strop.tools", "strop.agents.tools"),
        ("strop.tracking", "strop.observability.trackers"),
        ("strop.trainer.trackers", "strop.observability.trackers.setup"),
        ("strop.trajectory", "strop.protocol.trajectory"),
        ("strop.workers.generation", "strop.rollout.engine_group"),
    )
}


class _MovedModule(types.ModuleType):
    """An old name: attributes come from the new modules."""

    _homes: tuple[types.ModuleType, ...]

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):
            for home in self._homes:
                if hasattr(home, name):
                    value: object = getattr(home, name)
                    return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _MovedModules:
    """Finds old names, after all that is there under its own name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not homes_of(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, cast("Loader", self), is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MovedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        assert isinstance(module, _MovedModule)
        homes = homes_of(module.__name__)
        warnings.warn(
            f"{module.__name__} is {' and '.join(homes)} now; the old name is removed in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        module._homes = tuple(importlib.import_module(home) for home in homes)


def homes_of(name: str) -> tuple[str, ...]:
    """The modules that an old dotted name stands for; empty for any other name, or where there is none of that name."""
    above, below = name, ""
    while above not in MOVED:
        above, _, last = above.rpartition(".")
        if not above:
            return ()
        below = f".{last}{below}"
    if not below:
        return MOVED[above]
    home = MOVED[above][0] + below
    return (home,) if _is_module(home) else ()


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def keep_old_names() -> None:
    """Let old names be imported; the warning is shown for files of the user's too, which Python keeps silent about."""
    sys.meta_path.append(_MovedModules())
    if not sys.warnoptions:
        warnings.filterwarnings("default", r"strop\..* the old name is removed", DeprecationWarning)
