"""Every door takes every value: what is written, what workers and services send, what tokenizers are given."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from checkpoint_cases import save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge_cases import completion, serve
from reward_cases import make_prompt, make_trajectory, score_all, write_reward
from transformers import AutoTokenizer
from utils.sanitize import hostile
from utils.sanitize.hostile import ESCAPES, LONE, MAKERS

import strop.cli
from strop.agents.envs.base import EnvironmentFailed, read_observation, read_step
from strop.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolLimits, ToolResponse, ToolSession
from strop.agents.tools.formats import FunctionCall, MalformedCall
from strop.agents.tools.formats.calls import call_from_json, typed_value
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.data.readers import read_rows
from strop.observability.trackers.group import TrackerGroup
from strop.observability.trackers.setup import TrackerSetup, read_metrics
from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.run import CheckpointStore, EventLog, Fate, Ledger, RunFolder, digest
from strop.run.manifest import read_manifest
from strop.run.samples import COLUMNS, SampleStore
from strop.utils.sanitize import usable
from strop.utils.sanitize.values import MAX_ITEMS

quick = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
HOSTILE = [make() for name, make in MAKERS.items() if name != "doubling"]


@pytest.fixture(autouse=True)
def _no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.utils.sanitize.secrets._remembered", set())
    monkeypatch.setattr("strop.utils.sanitize.secrets._forms", ())


# ------------------------------------------------------------------ what is written

JSON_COLUMNS = [name for name, kind in COLUMNS.items() if kind == "json"]
TEXT_COLUMNS = [name for name, kind in COLUMNS.items() if kind == "string" and name not in ("id", "uid")]


@quick
@given(
    st.sampled_from(JSON_COLUMNS), hostile.values, st.sampled_from(TEXT_COLUMNS), hostile.texts, st.integers()
)
def test_the_sample_store_takes_any_value(column: str, value: Any, name: str, text: str, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SampleStore(Path(folder))
        held = value
        if column == "earlier_sequences":  # ours, with a value of an agent's in it
            held = [{"response_ids": [1], "rollout_log_probs": [math.nan], "x": value}]
        row = {"id": "a/0", "uid": "a", "sample_index": 0, column: held, name: text, "num_turns": turns}
        path = store.write(1, [row, {**row, "id": "a/1"}])
        assert [one["id"] for one in store.read(1)] == ["a/0", "a/1"]
        pyarrow.parquet.read_table(path).validate(full=True)


def test_a_file_of_samples_never_grows_beyond_what_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.run.samples.store._MAX_FILE_CHARS", 100_000)
    store = SampleStore(tmp_path)
    facts = {"facts": ["x" * 1000] * 100, **dict.fromkeys(map(str, range(1000)), 1)}
    rows = [
        {
            "id": f"a/{number}",
            "uid": "a",
            "sample_index": number,
            "response": "y" * 99_000,
            "agent_facts": facts,
        }
        for number in range(4)
    ]
    store.write(1, rows)
    found = store.read(1)
    assert sum(len(json.dumps(row)) for row in found) < 150_000
    assert found[0]["response"].endswith("more characters]")


@quick
@given(st.dictionaries(hostile.texts, hostile.values, max_size=3), hostile.texts)
def test_the_event_log_and_the_ledger_take_any_value(fields: dict[str, Any], reason: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        log.append("step", 1, metrics=fields, error=reason)
        ledger = Ledger(log)
        ledger.issue(1, ["u/0", "u/1", "u/2"])
        ledger.settle(
            1,
            {"u/0": Fate("failed", reason), "u/1": Fate("failed", reason + "\ud800"), "u/2": Fate("trained")},
        )
        log.close()
        again = Ledger(EventLog(log.path))
        again.check()
        assert again.counts()["failed"] == 2
        assert len(log.path.read_bytes().split(b"\n")) == 4


def test_a_long_event_of_the_ledger_is_never_cut(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    issued = dict.fromkeys((f"e0-{number:06d}" for number in range(MAX_ITEMS + 1)), "0")
    log.append("issued", 1, samples=issued)
    log.close()
    assert EventLog(log.path).read()[0]["samples"] == issued


def test_fingerprints_and_checkpoints_take_lone_surrogates_and_give_them_back(tmp_path: Path) -> None:
    assert digest(LONE) != digest("half a pair \ufffd")
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    made = save(
        store, 1, lambda folder: (folder / "x").write_text("x") and None, facts={"sampler": [LONE, "é"]}
    )
    assert read_manifest(made.path).facts == {"sampler": [LONE, "é"]}


def test_every_tracker_takes_any_name_and_number(tmp_path: Path) -> None:
    setup = TrackerSetup(folder=tmp_path, total_steps=2)
    with TrackerGroup(["console", "jsonl", "tensorboard"], setup) as trackers:
        for step in (1, 2):
            named = {f"val-core/{ESCAPES}{LONE}/{number}": value for number, value in enumerate(HOSTILE)}
            trackers.log(step, {**named, "reward": 10**5000, "critic/rewards/mean": 10**400})  # type: ignore[dict-item]
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["reward"] == math.inf
    assert not any("\x1b" in name for name in last)


def test_a_run_folder_takes_any_configuration(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={"a": HOSTILE, LONE: LONE}, command=[LONE]):
        pass
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        assert [event["kind"] for event in run.events.read()] == ["created"]


# ------------------------------------------------------------------ rewards

NAMES = [name for name in MAKERS if name not in ("doubling", "deep", "cycle")]
REWARD = """
import sys
sys.path.insert(0, TESTS)
from utils.sanitize.hostile import MAKERS, Mute

def compute_score(solution_str, **_):
    how, _, name = solution_str.partition("/")
    value = MAKERS[name]()
    match how:
        case "score": return value
        case "part": return {"score": 1.0, "acc": value, "note": value}
        case "key": return {"score": 0.5, **({str(value): 1} if isinstance(value, str) else {})}
        case "raise": raise ValueError(value)
"""


def check_outcome(outcome: Outcome) -> None:
    assert outcome.kind in ("score", "error"), outcome
    json.dumps([outcome.error, dict(outcome.parts)], ensure_ascii=False).encode()
    for value in outcome.parts.values():
        assert isinstance(value, str) or not math.isfinite(value) or abs(value) <= 1e15


def test_whatever_a_reward_function_returns_is_an_outcome(tmp_path: Path) -> None:
    path = write_reward(tmp_path, REWARD.replace("TESTS", repr(str(Path(__file__).parent.parent))))
    texts = [f"{how}/{name}" for how in ("score", "part", "key", "raise") for name in MAKERS if name in NAMES]
    texts += ["raise/deep", "score/deep", "score/doubling"]
    outcomes = dict(
        zip(texts, score_all(RewardConfig(path=path, num_workers=1, timeout_s=20.0), texts), strict=True)
    )
    for outcome in outcomes.values():
        check_outcome(outcome)
    assert outcomes["part/float that overflows float32"].parts["acc"] == math.inf
    assert outcomes["part/integer of 5,000 digits"].score == 1.0
    assert outcomes["part/lone surrogate"].parts["note"] == "half a pair \ufffd"
    sentence = outcomes["score/float that overflows float32"].error
    assert "returned 1e+300; return a finite number from -1e+15 to 1e+15" in sentence


def test_whatever_the_ground_truth_is_the_sample_has_an_outcome() -> None:
    async def scored() -> dict[str, Outcome]:
        async with RewardPool(RewardConfig(num_workers=1, timeout_s=20.0)) as pool:
            outcomes = {}
            for name in NAMES:
                prompt = make_prompt(ground_truth=MAKERS[name](), columns={"more": MAKERS[name]()})
                outcomes[name] = await pool.score(prompt, make_trajectory(), "12")
            return outcomes

    outcomes = asyncio.run(scored())
    assert len(outcomes) == len(NAMES) > 10
    for outcome in outcomes.values():
        check_outcome(outcome)


LONG = b"9" * 400
REPLIES: dict[str, bytes] = {
    "score": json.dumps(completion('{"score": SCORE}')).encode().replace(b"SCORE", LONG),
    "5,000 digits": json.dumps(completion('{"score": SCORE}')).encode().replace(b"SCORE", LONG * 13),
    "text": json.dumps(completion('{"score": "1e999"}')).encode(),
    "tokens": json.dumps(completion('{"score": 1}', prompt_tokens=77)).encode().replace(b"77", LONG),
    "many tokens": json.dumps(completion('{"score": 1}', prompt_tokens=77))
    .encode()
    .replace(b"77", LONG * 13),
    "negative tokens": json.dumps(completion('{"score": 1}', prompt_tokens=-(10**300))).encode(),
    "reason": json.dumps(completion('{"reason": "\\ud83d\\u001b[2J", "score": 1}')).encode(),
    "escaped twice": json.dumps(completion(json.dumps({"reason": LONE, "score": 1}))).encode(),
    "deep": b"[" * 100_000,
    "deep text": json.dumps(completion('{"a":' * 20_000)).encode(),
    "no text": b'{"choices": [{"message": {"content": {"\\ud83d": 1e999}}}]}',
    "surrogate bytes": b'"\xed\xa0\xbd"',
}


def judged(play: Any, **fields: Any) -> Outcome:
    with serve(play) as service:
        judge = JudgeConfig(base_url=service.url, model="m", lowest=0, highest=1, retries=0, **fields)
        (outcome,) = score_all(RewardConfig(judge=judge, num_workers=1), ["an answer"])
    return outcome


@pytest.mark.parametrize("name", REPLIES)
def test_whatever_a_judge_replies_is_an_outcome(name: str) -> None:
    outcome = judged(lambda handler, _, __: handler.send(REPLIES[name]))
    assert outcome.kind in ("score", "error", "infrastructure"), outcome
    assert (outcome.kind == "score") == (
        name in ("tokens", "many tokens", "negative tokens", "reason", "escaped twice")
    )
    json.dumps([outcome.error, dict(outcome.parts)], ensure_ascii=False).encode()
    assert all(math.isfinite(value) for value in outcome.usage.values())
    assert outcome.parts.get("judge/reason", "") in ("", "\ufffd\\x1b[2J", "half a pair \ufffd")


def test_a_judge_that_echoes_the_key_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very/secret+1234")

    def echo(handler: Any, _: Any, number: int) -> None:
        said = handler.headers["Authorization"]
        if number:
            handler.send(f"{'x' * 285}{said}".encode(), status=400)
        else:
            handler.send(completion(json.dumps({"reason": said, "score": 1})))

    with serve(echo) as service:
        judge = JudgeConfig(
            base_url=service.url, model="m", lowest=0, highest=1, retries=0, api_key_env="JUDGE_KEY"
        )
        outcomes = score_all(RewardConfig(judge=judge, num_workers=1), ["one", "two"])
    said = [outcome.error or str(outcome.parts["judge/reason"]) for outcome in outcomes]
    assert all("Bearer [redacte" in one for one in said)
    assert not any("sk-v" in one for one in said)


@pytest.mark.parametrize(
    "body", [b'{"scores": [%s]}' % LONG, b'{"scores": [1e300]}', b'{"scores": ["\\ud83d"]}']
)
def test_whatever_a_reward_server_sends_is_an_outcome(body: bytes) -> None:
    with serve(lambda handler, _, __: handler.send(body)) as service:
        server = ServerConfig(url=service.url, format="items", retries=0)
        (outcome,) = score_all(
            RewardConfig(server=server, num_workers=1),
            ["an answer"],
            make_prompt(ground_truth={"n": 10**5000}),
        )
    assert outcome.kind == "error"
    assert "which is no finite number from -1e+15 to 1e+15" in outcome.error


def test_headers_with_numbers_that_are_none_end_no_run() -> None:
    def odd(handler: Any, _: Any, __: int) -> None:
        handler.wfile.write(
            "HTTP/1.1 200 OK\r\nContent-Length: ²\r\nRetry-After: nan\r\n\r\n{}".encode("latin-1")
        )

    assert judged(odd).kind == "infrastructure"


# ------------------------------------------------------------------ tools and environments


class Anything(BaseTool):
    """Returns what it is told to."""

    def __init__(self, returned: Any) -> None:
        super().__init__(
            {},
            OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "anything"}}),
        )
        self.returned, self.seen = returned, []  # type: ignore[var-annotated]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.seen.append(parameters)
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return self.returned


CALLS = [
    '{"text": "\\ud83d", "\\ud800": 1}',
    '{"size": %s}' % ("9" * 5000),
    '{"a": ' * 5000,
    '{"x": NaN, "y": 1e999}',
    "\ud800",
]
RETURNED = [
    LONE, ESCAPES, (LONE, 1e300), ("x", 10**400), ("x", 1, {LONE: 10**5000}), ToolResponse(text=LONE * 100),
    hostile.Raises(), hostile.Lies(), ValueError(LONE), hostile.Mute(), ("x", hostile.Raises()), 10**5000,
]  # fmt: skip


def test_a_tool_session_takes_any_arguments_and_any_result(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    limits = ToolLimits(max_parallel_calls=99, max_response_tokens=20, truncation="middle", timeout_s=5.0)

    async def episode(returned: Any) -> None:
        tool = Anything(returned)
        session = ToolSession(
            {"anything": tool},
            tools_kwargs={},
            tokenizer=tokenizer,
            limits=limits,
            facts={"request_id": "e0/1"},
        )
        async with session as tools:
            results = await tools.call_all([FunctionCall("anything", text) for text in CALLS])
            for reward in (await tools.calc_rewards()).values():
                assert abs(reward) <= 1e15
        assert [bool(result.error) for result in results[2::2]] == [True, True]
        for result in results:
            tokenizer(result.text)
            assert abs(result.reward) <= 1e15
        assert tool.seen[0] == {"text": "\ufffd", "\ufffd": 1}
        assert tool.seen[1] == {"size": "[integer of 5000 digits]"}

    for returned in RETURNED:
        asyncio.run(episode(returned))


@given(hostile.texts)
@quick
def test_calls_of_any_text_can_be_encoded(text: str) -> None:
    for call in (call_from_json(text), call_from_json(json.dumps({"name": text, "arguments": {text: text}}))):
        if not isinstance(call, MalformedCall):
            (call.name + call.arguments).encode()
    assert typed_value("9" * 5000, "integer") == "[integer of 5000 digits]"


@quick
@given(hostile.texts, hostile.values, st.dictionaries(hostile.texts, hostile.values, max_size=3))
def test_an_environment_may_return_anything(text: str, reward: Any, info: dict[str, Any]) -> None:
    if usable(reward) is None and reward is not None:
        with pytest.raises(EnvironmentFailed, match="the reward is"):
            read_step((text, reward, False, info), "world")
    else:
        read_step((text, reward, False, info), "world").observation.encode()
    read_observation(text, "world").text.encode()
    (message,) = read_observation([{"role": "user", "content": text}], "world").messages
    message["content"].encode()


# ------------------------------------------------------------------ data


def test_rows_with_any_text_and_number_become_prompts(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": LONE, "answer": 10**500, LONE: LONE},
        {"prompt": [{"role": "user", "content": "\udc00" * 9}], "answer": {"\ud800": "\ud800"}},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(
        train_files=("x",), ground_truth_key="answer", default_data_source="s", max_prompt_tokens=60, prompts_per_step=1
    )  # fmt: skip
    for name in ("rows.json", "rows.jsonl"):
        read = read_rows([str(tmp_path / name)])
        dataset = PromptDataset(read, AutoTokenizer.from_pretrained(tiny_model), config, "train")
        assert dataset.prompt(0, "u").messages[0]["content"] == "half a pair \ufffd"
        assert [dataset.prompt(row, "u").ground_truth for row in (0, 1)] == [10**500, {"\ufffd": "\ufffd"}]
    for bad in ("[" * 100_000, '{"a":' * 100_000):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(
            ValueError, match=r"bad.json.* cannot be read as JSON: it is nested more than 100 levels deep"
        ):
            read_rows([str(tmp_path / "bad.json")])


# ------------------------------------------------------------------ the terminal


def test_every_command_prints_through_the_one_function_that_makes_text_harmless() -> None:
    found = []
    for path in sorted(Path(strop.cli.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "print" and path.name != "output.py":
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
