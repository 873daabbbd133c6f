"""The web page's server over real HTTP: who may ask, and what it answers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observability.viewer.made_runs import MARKUP, Page, ask, asked, make_run, profile_step, sample, served

from strop.observability.viewer.page import server as page_server
from strop.observability.viewer.page.catalog import Catalog
from strop.observability.viewer.page.one_file import write_page
from strop.observability.viewer.page.timeline_rows import timeline_rows
from strop.run import RunFolder
from strop.run.profile.chrome_trace import StepTimeline
from strop.utils.timeline import TimelineSpan, Track


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    make_run(folder / "second", seed=2, is_finished=False)
    for step in (2, 3, 9):  # a resume took back the ninth
        profile_step(folder / "first", step)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    with served(folder) as page:
        yield page


def ids(page: Page) -> dict[str, str]:
    return {run["name"]: run["id"] for run in asked(page, "/api/runs")["runs"]}


# ---------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/main.js"])
def test_nobody_without_the_token_gets_anything(page: Page, path: str) -> None:
    for token in (None, "", "another-token"):
        status, _, body = ask(page, path, token=token)
        assert status == 403
        assert b"first" not in body


def test_a_page_of_a_stranger_cannot_ask_under_another_name(page: Page) -> None:
    assert ask(page, "/api/runs", Host="evil.example:80")[0] == 403
    assert ask(page, "/api/runs", Host="127.0.0.1.evil.example")[0] == 403
    assert ask(page, "/api/runs", Host=f"localhost:{page.port}")[0] == 200, "as through a tunnel"


def test_the_token_leaves_the_address_and_every_answer_forbids_other_scripts(page: Page) -> None:
    for path in ("/", "/api/runs", "/static/base.js"):
        status, headers, _ = ask(page, path)
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:  # type: ignore[override]
            return None

    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.build_opener(Stay).open(f"{page.url}/?token=a-token-of-the-tests", timeout=10)
    assert (found.value.code, found.value.headers["Location"]) == (303, "/")
    cookie = found.value.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_it_only_reads(page: Page) -> None:
    request = urllib.request.Request(f"{page.url}/api/runs", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(request, timeout=10)
    assert found.value.code in (403, 405)


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/nothing", 404, "no such answer"),
        ("/static/../server.py", 404, ""),
        ("/static/..%2Fserver.py", 404, ""),
        ("/api/metrics", 400, "'run' is missing"),
        ("/api/metrics?run=nobody", 404, "no run nobody"),
        ("/api/samples?run={first}&first_step=x", 422, "first_step is 'x', which is no number"),
        ("/api/samples?run={first}&colour=red", 422, "not looked for by 'colour'"),
        ("/api/groups?run={first}&step=99", 422, "has no train samples of step 99"),
        ("/api/sample?run={first}&step=1&id=e9-1/1", 422, "has no train sample"),
        ("/api/profile?run={first}&step=9", 422, "step 9 of"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(page: Page, path: str, status: int, sentence: str) -> None:
    found, _, body = ask(page, path.format(first=ids(page)["first"]))
    assert found == status
    assert sentence in body.decode()


# ---------------------------------------------------------------------------- what it answers


def test_runs_are_told_apart_by_their_settings_and_numbers(page: Page) -> None:
    answer = asked(page, "/api/runs")
    first, second = sorted(answer["runs"], key=lambda run: run["name"])
    assert answer["differing_settings"] == ["trainer.seed"]
    assert (first["settings"], second["settings"]) == ({"trainer.seed": "1"}, {"trainer.seed": "2"})
    assert (first["status"], second["status"]) == ("finished", "stopped")
    assert (first["pass_rate_start"], first["pass_rate_final"], first["best_step"]) == (0.2, 0.8, 4)
    assert first["step"] == 4
    assert first["seconds"] == 4 * 36.0
    assert first["device_hours"] == pytest.approx(4 * 36 / 3600 * 3), "two ranks and a rollout worker apart"
    assert (first["tokens"], first["samples"]) == (400.0, 24.0)


def test_numbers_lie_on_four_axes(page: Page) -> None:
    run = ids(page)["first"]
    answer = asked(page, f"/api/metrics?run={run}&names=critic/rewards/mean,val-core/math/acc/mean@1")
    assert answer["axes"]["step"] == [0, 1, 2, 3, 4]
    assert answer["axes"]["samples"] == [0, 6, 12, 18, 24]
    assert answer["axes"]["tokens"] == [0, 100, 200, 300, 400]
    assert answer["axes"]["hours"] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert answer["columns"]["critic/rewards/mean"] == [None, 0.25, 0.5, 0.75, 1.0]
    assert answer["columns"]["val-core/math/acc/mean@1"] == [0.2, None, None, None, 0.8]
    assert "actor/entropy" in answer["names"]


def test_events_have_their_sentences_and_phases_their_seconds(page: Page) -> None:
    answer = asked(page, f"/api/events?run={ids(page)['first']}")
    kinds = {event["kind"]: event for event in answer["events"]}
    assert kinds["health"]["text"].startswith("the entropy fell")
    assert kinds["finished"]["text"] == "step 4 is the last one"
    assert answer["steps"] == [1, 2, 3, 4]
    assert answer["phases"] == {"gen": [20.0] * 4, "update_actor": [10.0] * 4, "update_weights": [6.0] * 4}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", 24),
        ("first_step=2&last_step=3", 12),
        ("text=ANSWER 1 of step 3", 3),
        ("text=what is 2", 8),
        ("prompt=000002&oldest_first=true", 8),
        ("source=math", 8),
        ("fate=filtered", 1),
        ("stop=length", 0),
        ("lowest_score=0.5", 12),
        ("highest_score=0.5", 12),
        ("least_tokens=4", 0),
        ("most_tokens=3&least_tokens=3", 24),
        ("part=style", 24),
        ("part=style&lowest_part=0.2", 12),
        ("part=nothing", 0),
        ("split=val", 2),
        ("split=val&prompt=000007", 2),
        ("source=words&lowest_score=0.5&last_step=1", 3),
    ],
)
def test_samples_are_found_by_what_they_are(page: Page, words: str, expected: int) -> None:
    answer = asked(page, f"/api/samples?run={ids(page)['first']}&{words}")
    assert len(answer["rows"]) == expected
    assert answer["goes_on_at"] is None
    steps = [row["step"] for row in answer["rows"]]
    assert steps == sorted(steps, reverse="oldest_first" not in words)
    assert all(row["num_tokens"] == 3 for row in answer["rows"])


def test_a_look_ends_after_enough_samples_and_goes_on_from_there(tmp_path: Path) -> None:
    from strop.observability.viewer.page.sample_search import Query, search

    with RunFolder.open(make_run(tmp_path / "run"), read_only=True) as run:
        first = search(run.samples, Query(), limit=7)
        assert ([row["step"] for row in first.rows], first.goes_on_at, first.num_steps) == (
            [4] * 6 + [3] * 6,
            2,
            2,
        )
        rest = search(run.samples, Query(), limit=100, start_at=first.goes_on_at)
        assert ([row["step"] for row in rest.rows], rest.goes_on_at) == ([2] * 6 + [1] * 6, None)
        out_of_time = search(run.samples, Query(oldest_first=True), budget_s=0.0)
        assert (len(out_of_time.rows), out_of_time.goes_on_at) == (6, 2), "a step is looked at all the same"


def test_a_sample_has_its_tokens_with_their_numbers(page: Page) -> None:
    run = ids(page)["first"]
    answer = asked(page, f"/api/sample?run={run}&step=2&id=e1-000001/1")
    (tokens,) = answer["sequences"]
    assert tokens["id"] == [70, 71, 72]
    assert tokens["sampled"] == [True, True, False]
    assert tokens["version"] == [1, 1, -1]
    assert tokens["log_prob"] == pytest.approx([-0.1, -2.5, 0.0])
    assert tokens["entropy"] == pytest.approx([0.3, 1.7, 0.0])
    assert tokens["old_log_prob"] == pytest.approx([-0.2, -2.5, 0.0])
    assert tokens["advantage"] == [0.5, 0.5, 0.0]
    assert all(len(text) == 1 for text in tokens["text"]), "the tiny model's tokens are letters"
    assert (answer["row"], answer["has_texts"]) == ("000001", True)
    assert "entropy" in tokens
    assert (
        asked(page, f"/api/sample?run={run}&step=0&split=val&id=e0-000007/0")["sequences"][0].get("advantage")
        is None
    )


def test_an_episode_has_its_turns(page: Page) -> None:
    answer = asked(page, f"/api/sample?run={ids(page)['first']}&step=4&id=e3-000002/1")
    assistant, tool = answer["messages"]
    assert assistant["tool_calls"][0]["name"] == "calculator"
    assert tool["tokens"] == [2, 3]


def test_nothing_that_a_terminal_would_act_on_goes_out(page: Page) -> None:
    run = ids(page)["first"]
    for path in (
        f"samples?run={run}&fate=filtered",
        f"sample?run={run}&step=4&id=e3-000000/0",
        f"groups?run={run}",
        f"profile?run={run}",
    ):
        text = json.dumps(asked(page, f"/api/{path}"), ensure_ascii=False)
        assert "window.broken" in text, "it is text"
        assert not {"\x1b", "\x07", "\u202e"} & set(text), path
    found = asked(page, f"/api/sample?run={run}&step=4&id=e3-000000/0")
    assert found["response"] == f"{MARKUP} \\x1b[2J\\x1b]0;title\\x07 \\u202edesrever"


def test_prompts_are_solved_hopeless_or_learned(page: Page) -> None:
    answer = asked(page, f"/api/groups?run={ids(page)['first']}&step=2")
    kinds = {group["row"]: (group["kind"], group["mean"], group["scores"]) for group in answer["groups"]}
    assert kinds == {
        "000000": ("solved", 1.0, [1.0, 1.0]),
        "000001": ("hopeless", 0.0, [0.0, 0.0]),
        "000002": ("learning", 0.5, [0.0, 1.0]),
    }
    assert (answer["steps"], answer["step"], answer["num_groups"]) == ([1, 2, 3, 4], 2, 3)


def test_fates_and_the_difference_of_two_runs(page: Page) -> None:
    both = ids(page)
    assert asked(page, f"/api/fates?run={both['first']}")["fates"][0] | {"examples": []} == {
        "fate": "trained", "reason": "", "count": 24, "first_step": 1, "last_step": 4, "examples": [],
    }  # fmt: skip
    answer = asked(page, f"/api/diff?a={both['first']}&b={both['second']}")
    assert (answer["step"], answer["stage"], answer["num_equal_steps"]) == (3, "data", 2)
    assert answer["settings"] == {"trainer.seed": [1, 2]}


def test_time_goes_to_phases_and_profiled_steps_have_rows(page: Page) -> None:
    both = ids(page)
    answer = asked(page, f"/api/profile?run={both['first']}")
    seconds = {phase["name"]: phase["seconds"] for phase in answer["phases"]}
    assert (seconds["gen"], seconds["update_weights"], answer["num_steps"]) == (80.0, 24.0, 4)
    assert [step["step"] for step in answer["profiled"]] == [2, 3]
    assert answer["step"] == 3
    rows = {row["name"]: row["bars"] for row in answer["timeline"]["rows"]}
    assert list(rows) == ["controller", "actor 0", "rollout 0", "samples 0.0"]
    assert rows["controller"] == [[0.0, 6.0, "phase", "gen"]]
    assert rows["actor 0"] == [
        [0.0, 6.0, "wait", "waits for rollout"], [6.0, 3.0, "call", "update_policy"],
        [9.0, 1.0, "wait", "waits for controller"],
    ]  # fmt: skip
    assert [bar[:3] for bar in rows["samples 0.0"]] == [[0.0, 5.0, "episode"], [2.0, 1.0, "tool"]]
    assert answer["timeline"]["num_left_out"] == 0
    assert asked(page, f"/api/profile?run={both['first']}&step=2")["step"] == 2
    without = asked(page, f"/api/profile?run={both['second']}")
    assert (without["step"], without["timeline"], without["profiled"]) == (None, None, [])


def test_the_longest_bars_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.observability.viewer.page.timeline_rows.MAX_BARS", 2)
    spans = [
        TimelineSpan(name=str(seconds), category="call", track=Track("actor"), start_s=0, end_s=seconds)
        for seconds in (1.0, 3.0, 2.0)
    ]
    drawn = timeline_rows(StepTimeline(step=1, seconds=3.0, spans=tuple(spans)))
    assert [bar[3] for bar in drawn["rows"][0]["bars"]] == ["3.0", "2.0"]
    assert drawn["num_left_out"] == 1


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with served(folder) as page:
        assert asked(page, "/api/runs")["runs"] == []
        make_run(folder / "new", is_finished=False)
        (found,) = asked(page, "/api/runs")["runs"]
        assert (found["step"], found["status"]) == (4, "stopped")
        with RunFolder.open(folder / "new") as run:
            assert asked(page, "/api/runs")["runs"][0]["status"] == "running"
            with (folder / "new" / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": 5, "critic/rewards/mean": 0.1}) + '\n{"step": 6, "cri')
            run.events.append("step", 5, seconds=36.0, phases={"gen": 1.0})
            numbers = asked(page, f"/api/metrics?run={found['id']}&names=critic/rewards/mean")
            assert numbers["columns"]["critic/rewards/mean"][-1] == 0.1
            assert numbers["axes"]["step"][-1] == 5, "a line that is being written is not there yet"
            run.events.rollback(2)
            (folder / "new" / "metrics.jsonl").unlink()
            (folder / "new" / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.25}\n')
            assert asked(page, f"/api/metrics?run={found['id']}&names=")["axes"]["step"] == [1]
            assert asked(page, f"/api/events?run={found['id']}")["steps"] == [1, 2]
        shutil.rmtree(folder / "new")
        assert asked(page, "/api/runs")["runs"] == []


def test_a_damaged_run_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    with served(tmp_path / "runs") as page:
        answer = asked(page, "/api/runs")
    assert [run["name"] for run in answer["runs"]] == ["good"]
    ((path, sentence),) = answer["unreadable"].items()
    assert path.endswith("bad")
    assert "holds no run that can be read" in sentence


# ---------------------------------------------------------------------------- the command, and one file


def test_the_command_serves_until_it_is_ended(folder: Path) -> None:
    command = [sys.executable, "-m", "strop", "view", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        record = json.loads(process.stdout.readline())
        assert record["num_runs"] == 2
        assert re.fullmatch(
            rf"http://127\.0\.0\.1:{record['port']}/\?token={re.escape(record['token'])}", record["address"]
        )
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(
            record["address"], timeout=20
        ) as page:
            assert b"<title>strop</title>" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_one_file_has_all_numbers_and_some_samples(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "strop",
        "view",
        str(folder / "first"),
        "--html",
        str(tmp_path / "a.html"),
        "--samples",
        "20",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    record = json.loads(done.stdout)
    assert (record["num_runs"], record["num_samples"], record["num_found"]) == (1, 10, 26)
    text = (tmp_path / "a.html").read_text()
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", text.partition("<body>")[0]), (
        "nothing from elsewhere"
    )
    kept = json.loads(text.partition('id="kept">')[2].partition("</script>")[0])
    (run,) = kept["of_run"].values()
    assert run["metrics"]["columns"]["actor/entropy"][1:] == [1.0, 0.5, 1 / 3, 0.25]
    assert {row["step"] for row in run["samples"]} == {0, 1, 2, 3, 4}
    assert text.count("<script>window.broken") == 0, "what a model wrote is no markup of the page"
    assert "script-src 'sha256-" in text


def test_one_file_goes_without_samples_that_cannot_be_read(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "first", run)
    damaged = run / "samples/step-000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    whole, counts = (
        write_page(tmp_path / "a.html", Catalog([path]), max_samples=100) for path in (folder / "first", run)
    )
    assert 0 < counts["num_samples"] < whole["num_samples"]
    assert counts["num_found"] < whole["num_found"]
    assert f"cannot read the samples in {damaged}" in caplog.text


def test_a_sample_of_more_than_one_token_per_letter(tmp_path: Path) -> None:
    from strop.observability.viewer.token_view import pieces

    letters = {1: b"a", 2: b"\xe2", 3: b"\x82", 4: b"\xac", 5: b"\xff"}
    decode = lambda ids: b"".join(letters[one] for one in ids).decode(errors="replace")  # noqa: E731
    assert pieces([1, 2, 3, 4, 1], decode) == ["a", "", "", "€", "a"]
    assert "".join(pieces([1, 5, 1], decode)).count("a") == 2, (
        "bytes that are no character hide nothing for long"
    )
    assert sample(1, 1, 1)["response_ids"]


DRAW = """
globalThis.strop = {
  el: (tag, attributes, ...children) => children.flat().filter((one) => one !== null).join(" "),
  tokenBox: (sequence, start, end) => `tokens ${start} to ${end} of ${sequence.name}`,
};
const source = require("fs").readFileSync(process.argv[1], "utf8");
new Function(source)();
console.log(JSON.stringify(strop.turns(JSON.parse(process.argv[2]), null)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_an_observation_without_tokens_of_its_own_is_shown_as_text() -> None:
    # Two answers with credit per turn: the observation between them is in the prompt of the second sequence.
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "3", "sequence": 0, "tokens": [0, 2]},
        {"role": "user", "content": "higher", "sequence": 0, "tokens": [2, 2]},
        {"role": "assistant", "content": "9", "sequence": 1, "tokens": [0, 2]},
        {"role": "user", "content": "cut off", "sequence": 1, "tokens": [2, 5]},
    ]
    sequences = [{"name": name, "id": [5, 6]} for name in ("first", "second")]
    sample = json.dumps({"messages": messages, "sequences": sequences})
    script = Path(page_server.__file__).parent / "static" / "samples.js"
    ran = subprocess.run(
        ["node", "-e", DRAW, str(script), sample], capture_output=True, text=True, check=True, timeout=60
    )
    assert [one.strip() for one in json.loads(ran.stdout)] == [
        "turn 1 · assistant  tokens 0 to 2 of first",
        "turn 1 · user  higher",
        "turn 2 · assistant  tokens 0 to 2 of second",
        "turn 2 · user  cut off",
    ]
