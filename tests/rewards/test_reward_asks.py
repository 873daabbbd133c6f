"""What a reward asks for before it runs, and its services."""

from __future__ import annotations

import asyncio

import pytest

from strop.config.sections import code_of
from strop.rewards import RewardConfig, RewardPool
from strop.rewards.config import FunctionConfig
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.sandbox import SandboxConfig
from strop.utils import trust


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RewardConfig(path="my.py"), {"reward.path": "my.py"}),
        (
            RewardConfig(functions=(FunctionConfig(), FunctionConfig(path="b.py", key="b"))),
            {"reward.functions": "b.py"},
        ),
        (
            RewardConfig(
                judge=JudgeConfig(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="NO_SUCH_KEY")
            ),
            {"reward.judge.base_url": "http://127.0.0.1:9/v1 (gets the answers and your NO_SUCH_KEY)"},
        ),
        (
            RewardConfig(server=ServerConfig(url="http://127.0.0.1:9")),
            {"reward.server.url": "http://127.0.0.1:9 (gets the answers)"},
        ),
        (
            RewardConfig(sandbox=SandboxConfig(python="/opt/python", read_only_paths=("/data",))),
            {
                "reward.sandbox.python": "/opt/python",
                "reward.sandbox.read_only_paths": "/data (shown to programs of the model)",
            },
        ),
    ],
)
def test_a_pool_asks_for_everything_that_its_settings_name(
    config: RewardConfig, expected: dict[str, str]
) -> None:
    assert {named.key: named.value for named in code_of(config, "reward")} == expected
    for key in expected:  # all others are the user's own
        with trust.door():
            trust.close("a run", own=expected.keys() - {key})
            with pytest.raises(trust.UntrustedCode, match=f"would run what it names: {key} "):
                asyncio.run(RewardPool(config).start())


def test_services_that_score_are_named_as_their_sections() -> None:
    judge, server = JudgeConfig(base_url="http://a", model="m"), ServerConfig(url="http://b")
    assert RewardConfig().services == {}
    assert RewardConfig(judge=judge, server=server).services == {"judge": judge, "server": server}
