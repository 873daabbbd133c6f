"""`strop samples` up close: one trajectory token by token, and what became of all of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.observability.viewer.samples import panel
from strop.observability.viewer.token_view import Token, response_tokens, summary, token_text
from strop.observability.viewer.turn_view import turns_text
from strop.run import Fate, RunFolder

ROW = {
    "response_ids": [7, 8, 9, 10],
    "response_mask": [True, False, False, True],
    "rollout_log_probs": [math.log(0.75), 0.0, 0.0, math.log(0.005)],
    "versions": [3, -1, -1, 4],
}


def words(ids: object) -> str:
    return "".join(f"<{one}>" for one in ids)  # type: ignore[attr-defined]


def test_tokens_are_coloured_by_writer_and_probability() -> None:
    tokens = response_tokens(ROW, words)
    assert [token.style for token in tokens] == ["green", "cyan", "cyan", "bold red"]
    text = token_text(tokens)
    assert text.plain == "sampled [1]  <7>\ngiven [2]  <8><9>\nsampled [1]  <10>"
    spans = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (spans["<7>"], spans["<8>"], spans["<10>"]) == ("green", "cyan", "bold red")


def test_the_summary_counts_what_was_sampled_and_by_which_versions() -> None:
    mean = (math.log(0.75) + math.log(0.005)) / 2
    assert summary(response_tokens(ROW, words)) == (
        f"4 tokens, 2 sampled by versions 3 to 4, mean log-prob {mean:.3f}"
    )
    given = Token(position=0, id=1, text="x", is_sampled=False, log_prob=0.0, version=-1)
    assert summary([given]) == "1 tokens, none sampled"


def test_control_characters_of_a_token_do_not_reach_the_terminal() -> None:
    tokens = response_tokens({**ROW}, lambda _: "\x1b[31m")
    assert "\x1b" not in token_text(tokens).plain


def test_a_trajectory_by_id_shows_every_token(trained: Path) -> None:
    with RunFolder.open(trained, read_only=True) as run:
        row = run.samples.read(1)[0]
    result = cli("samples", trained, "--id", row["id"], "--step", 1, "--tokens")
    assert result.code == 0, result.err
    table = [line.split() for line in result.out.splitlines() if "the policy" in line]
    assert [int(cells[0]) for cells in table] == list(range(len(row["response_ids"])))
    assert [int(cells[1]) for cells in table] == row["response_ids"]
    assert [cells[-3] for cells in table] == [f"{value:.4f}" for value in row["rollout_log_probs"]]
    assert "mean log-prob" in result.out


def test_without_a_model_the_trajectory_is_shown_without_colours(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]) as run:
        run.samples.write(1, [{"id": "e0-000004/0", "uid": "e0-000004", "sample_index": 0, **ROW}])
    result = cli("samples", tmp_path / "run", "--id", "e0-000004/0")
    assert result.code == 0
    assert "without token colours: " in result.err
    assert (
        "no valid checkpoint" in cli("samples", tmp_path / "run", "--id", "e0-000004/0", "--tokens").sentence
    )


EPISODE = {
    "id": "e0-000007/1",
    "uid": "e0-000007",
    "sample_index": 1,
    "agent_name": "tool_agent",
    "response_ids": [7, 8, 9, 10, 11],
    "response_mask": [True, True, False, False, True],
    "rollout_log_probs": [math.log(0.75), math.log(0.75), 0.0, 0.0, math.log(0.005)],
    "versions": [3, 3, -1, -1, 4],
    "stop_reason": "stop",
    "agent_facts": {"tool_call_counts": 2.0, "turn_scores": []},
    "messages": [
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {"name": "calculator", "arguments": '{"expression": "3*4"}'},
                {"name": "clock", "malformed": '{"name"', "problem": "Invalid JSON."},
            ],
            "sequence": 0,
            "tokens": [0, 2],
        },
        {"role": "tool", "name": "calculator", "content": "12", "reward": 0.5, "sequence": 0, "tokens": [2, 4]},
        {
            "role": "tool", "name": "clock", "content": "Invalid JSON.", "error": "malformed",
            "sequence": 0, "tokens": [2, 4],
        },
        {"role": "assistant", "content": "=12", "sequence": 0, "tokens": [4, 5]},
    ],
}  # fmt: skip


def test_an_episode_shows_turns_calls_and_results_as_text() -> None:
    assert turns_text(EPISODE).plain.splitlines() == [
        "turn 1  assistant · 2 tokens",
        "    let me see",
        '    calls calculator {"expression": "3*4"}',
        '    broken call: Invalid JSON. {"name"',
        "turn 1  tool calculator · 2 tokens · reward 0.5",
        "    12",
        "turn 1  tool clock · 2 tokens",
        "    Invalid JSON.",
        "    error: malformed",
        "turn 2  assistant · 1 tokens",
        "    =12",
    ]


def test_with_a_tokenizer_the_turns_are_their_tokens_in_colour() -> None:
    text = turns_text(EPISODE, words)
    lines = text.plain.splitlines()
    assert lines[0] == f"turn 1  assistant · 2 tokens · version 3 · mean log-prob {math.log(0.75):.3f}"
    assert [line.strip() for line in lines if "<" in line] == ["<7><8>", "<9><10>", "<11>"]
    spans = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (spans["<7>"], spans["<9>"], spans["<11>"]) == ("green", "cyan", "bold red")


OTHER_PROMPT = (
    "its prompt is another one (the chat template or the agent writes what stands before differently)"
)


@pytest.mark.parametrize(
    ("stop_reason", "why"),
    [
        ({"stop_reason": "continued"}, OTHER_PROMPT),
        ({}, OTHER_PROMPT),
        ({"stop_reason": "turn"}, "an answer is trained by itself (agent.credit=turn)"),
    ],
)
def test_earlier_sequences_of_an_episode_are_shown_before_the_last_one(
    stop_reason: dict[str, str], why: str
) -> None:
    earlier = {
        key: EPISODE[key] for key in ("response_ids", "response_mask", "rollout_log_probs", "versions")
    }
    messages = [
        {"role": "assistant", "content": "a", "sequence": 0, "tokens": [0, 2]},
        {"role": "user", "content": "more", "sequence": 1, "tokens": [0, 0]},
        {"role": "assistant", "content": "b", "sequence": 1, "tokens": [0, 1]},
    ]
    row = {**EPISODE, **{key: [value[-1]] for key, value in earlier.items()}}  # type: ignore[index]
    lines = turns_text(
        {**row, "messages": messages, "earlier_sequences": [earlier | stop_reason]}, words
    ).plain.splitlines()
    assert lines[1].strip() == "<7><8>"
    assert lines[2] == f"sequence 2: {why}"
    assert lines[3:5] == ["turn 1  user · 0 tokens", "    more"]
    assert lines[-1].strip() == "<11>"


def test_numbers_of_a_turn_have_four_digits_that_count() -> None:
    messages = [{"role": "user", "content": "x", "reward": 0.187288490708041, "facts": {"at": [1 / 3, 2]}}]
    (headline, _) = turns_text({**EPISODE, "messages": messages}).plain.splitlines()
    assert headline == 'turn 0  user · reward 0.1873 · facts {"at": [0.3333, 2]}'


def test_control_characters_of_a_tool_result_do_not_reach_the_terminal() -> None:
    messages = [{"role": "tool", "name": "\x1b[2J", "content": "\x1b[31m", "error": "\x07"}]
    shown = turns_text({**EPISODE, "messages": messages}).plain
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_samples_by_id_shows_the_turns_of_an_episode(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]) as run:
        run.samples.write(1, [EPISODE])
        (row,) = run.samples.read(1)
    assert "turn 1  assistant" in str(panel(row, words).renderable)
    shown = cli("samples", tmp_path / "run", "--id", "e0-000007/1").out
    assert 'calls calculator {"expression": "3*4"}' in shown
    assert "turn 2  assistant" in shown
    assert "agent     tool_agent tool_call_counts=2.0" in shown
    assert "ended     stop, 5 tokens" in shown


@pytest.fixture
def lossy(tmp_path: Path) -> Path:
    """Six samples: two trained, three left out for two reasons, one without a fate."""
    with RunFolder.create(tmp_path / "lossy", config={}, command=["strop", "train"]) as run:
        run.ledger.issue(1, [f"e0-000001/{index}" for index in range(4)])
        solved = Fate("filtered", "solved")
        run.ledger.settle(
            1,
            {
                "e0-000001/0": Fate("trained"),
                "e0-000001/1": solved,
                "e0-000001/2": solved,
                "e0-000001/3": Fate("failed", "timeout"),
            },
        )
        run.ledger.issue(2, ["e0-000002/0", "e0-000002/1"])
        run.ledger.settle(2, {"e0-000002/0": Fate("trained")})
    return tmp_path / "lossy"


def test_every_sample_is_accounted_for_with_its_reason(lossy: Path) -> None:
    record = cli("samples", lossy, "--why-dropped", "--json").record
    assert record["num_issued"] == 6
    found = {(one["fate"], one["reason"]): (one["count"], one["examples"]) for one in record["fates"]}
    in_flight = next(key for key in found if key[0] == "in_flight")
    assert found.pop(in_flight) == (1, ["e0-000002/1"])
    assert found == {
        ("filtered", "solved"): (2, ["e0-000001/1", "e0-000001/2"]),
        ("failed", "timeout"): (1, ["e0-000001/3"]),
        ("trained", ""): (2, ["e0-000001/0", "e0-000002/0"]),
    }
    assert record["fates"][-1]["fate"] == "trained"


def test_why_dropped_of_one_step_and_as_a_table(lossy: Path) -> None:
    record = cli("samples", lossy, "--why-dropped", "--json", "--step", 2).record
    assert [(one["fate"], one["count"]) for one in record["fates"]] == [("trained", 1)]
    shown = cli("samples", lossy, "--why-dropped").out
    assert "2 of 6 samples were trained on" in shown
    assert next(line for line in shown.splitlines() if "solved" in line).split()[:3] == [
        "filtered",
        "solved",
        "2",
    ]


def test_why_dropped_goes_with_no_single_sample(lossy: Path, project: Project) -> None:
    assert "leave out --id" in cli("samples", lossy, "--why-dropped", "--id", "e0-000001").sentence
