"""The web page in a real browser: what a person sees, does with keys, and what hostile samples cannot do.

With STROP_SCREENSHOTS=docs/images the quickstart is run, and pictures of its page are written there for the docs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_cases import chromium, watched_tab
from observability.viewer.made_runs import MARKUP, TOKEN, Page, make_run, profile_step, served

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    for step in (2, 3):
        profile_step(folder / "first", step)
    make_run(folder / "second", seed=2, is_finished=False)
    with served(folder) as page:
        yield page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    with watched_tab(browser) as tab:
        yield tab
        assert tab.evaluate("window.broken") is None, "a sample ran as a script"


def opened(tab: Any, page: Page, place: str = "") -> None:
    tab.goto(f"{page.url}/?token={TOKEN}")
    tab.wait_for_selector("h2")
    if place:
        tab.goto(f"{page.url}/#/{place}")


def id_of(tab: Any, name: str) -> str:
    return str(tab.evaluate("name => strop.all.runs.find((run) => run.name === name).id", name))


def test_runs_are_chosen_and_drawn_together(tab: Any, page: Page) -> None:
    opened(tab, page)
    assert tab.url == f"{page.url}/", "the token is not left in the address"
    rows = tab.locator("tbody tr")
    assert rows.count() == 2
    first = rows.filter(has=tab.get_by_role("link", name="first")).inner_text()
    assert "20.0 % → 80.0 % (10.0 to 90.0)" in first
    assert "finished" in first
    tab.get_by_label("choose first").check()
    tab.get_by_label("choose second").check()
    tab.get_by_role("button", name="draw the chosen runs").click()
    chart = tab.get_by_role("img", name="reward. ")
    chart.locator(".scatterlayer .trace").nth(1).wait_for()
    label = chart.get_attribute("aria-label")
    assert "first: 0.25 at first, 1 at last" in label
    assert "second: 0.25 at first, 1 at last" in label
    assert tab.get_by_text("the entropy fell").count() == 2, "findings with their sentences"
    assert tab.locator("table", has_text="phases of step 4: 36.000 s").count() == 1


def test_curves_go_against_hours_and_are_smoothed(tab: Any, page: Page) -> None:
    opened(tab, page, "curves?smooth=2&x=hours&also=actor/")
    chart = tab.get_by_role("img", name="reward. ")
    chart.locator(".scatterlayer .trace").first.wait_for()
    assert "0.25 at first" in chart.get_attribute("aria-label")
    data = chart.evaluate("plot => plot.data.map((trace) => [Array.from(trace.x), Array.from(trace.y)])")
    hours = [0.01, 0.02, 0.03, 0.04]
    assert data[0][0] == pytest.approx(hours)
    assert data[1][1] == pytest.approx([0.25, 0.375, 0.625, 0.875]), "means of two steps"
    tab.get_by_role("img", name="actor/entropy. ").wait_for()
    tab.get_by_label("against").select_option("tokens")
    tab.wait_for_url("**x=tokens**")


def test_samples_are_searched_and_hostile_ones_are_only_text(tab: Any, page: Page) -> None:
    opened(tab, page, "samples")
    tab.get_by_label("what became of it").select_option("filtered")
    tab.wait_for_url("**fate=filtered**")
    tab.locator(".detail dl").wait_for()
    assert tab.locator(".results li").count() == 1
    detail = tab.locator(".detail").inner_text()
    assert MARKUP in detail
    assert "\\x1b[2J" in tab.locator(".results").inner_text()
    tab.get_by_label("text in prompt or answer").fill("answer 1 of step 3")
    tab.get_by_label("what became of it").select_option("")
    tab.get_by_label("text in prompt or answer").fill("answer 1 of step 3")
    tab.keyboard.press("Enter")
    tab.get_by_text("3 found in 4 steps").wait_for()
    tab.get_by_text("why samples were dropped").click()
    tab.locator("details td", has_text="24").wait_for()


def test_tokens_have_colours_and_their_values_under_the_arrow_keys(tab: Any, page: Page) -> None:
    opened(tab, page, "samples?first_step=2&last_step=2&prompt=000001")
    tokens = tab.locator(".tokens span")
    tokens.first.wait_for()
    assert tokens.count() == 3
    assert "rgba(210, 50, 30" in tokens.nth(1).evaluate("span => getComputedStyle(span).backgroundColor")
    tab.locator(".tokens").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    values = tab.locator(".values")
    for part in ("token 1", "log-prob -2.5", "entropy 1.7", "advantage 0.5", "ratio 1", "version 1"):
        assert part in values.inner_text()
    tokens.nth(2).hover()
    assert "given, not trained" in values.inner_text()
    choices = tab.get_by_label("tokens coloured by").locator("option").all_inner_texts()
    assert choices == [
        "probability", "entropy", "advantage", "ratio of trainer and rollout", "who wrote it", "version of the policy",
    ]  # fmt: skip
    tab.get_by_label("tokens coloured by").select_option("entropy")


def test_one_prompt_over_the_training_and_two_samples_side_by_side(tab: Any, page: Page) -> None:
    opened(tab, page, "samples?first_step=4&last_step=4&prompt=000002")
    tab.get_by_role("button", name="keep beside others").click()
    tab.get_by_role("button", name="this prompt over the training").click()
    tab.wait_for_url("**oldest_first=true**")
    tab.get_by_text("8 found in 4 steps").wait_for()
    assert tab.locator(".results .head span:first-child").all_inner_texts() == [
        f"step {step}" for step in (1, 1, 2, 2, 3, 3, 4, 4)
    ]
    tab.locator(".pair").wait_for()
    assert tab.locator(".pair dl").count() == 2


def test_an_episode_is_shown_turn_by_turn(tab: Any, page: Page) -> None:
    opened(tab, page, "samples?first_step=4&last_step=4&prompt=000002&lowest_score=1")
    tab.locator(".turn").nth(1).wait_for()
    turns = tab.locator(".turn").all_inner_texts()
    assert turns[0].startswith("turn 1 · assistant")
    assert 'calls calculator {"expression": "6*7"}' in turns[0]
    assert turns[1].startswith("turn 1 · tool calculator")


def test_prompts_and_the_difference_of_two_runs(tab: Any, page: Page) -> None:
    opened(tab, page, "groups")
    tab.get_by_text("3 prompts of step 4: 1 solved, 1 hopeless, 1 learning").wait_for()
    tab.get_by_role("img", name="rewards of this step by prompt. 1 solved, 1 hopeless, 1 learning").wait_for()
    first, second = id_of(tab, "first"), id_of(tab, "second")
    tab.goto(f"{page.url}/#/diff?a={first}&b={second}")
    tab.get_by_text("Step 3 differs first in data; 2 common steps before it are equal.").wait_for()
    assert tab.locator("tbody tr", has_text="trainer.seed").inner_text().split() == ["trainer.seed", "1", "2"]


def test_time_goes_to_phases_and_bars_of_a_profiled_step(tab: Any, page: Page) -> None:
    opened(tab, page)
    tab.get_by_role("link", name="Time").click()
    tab.get_by_role("heading", name="Time").wait_for()
    tab.get_by_label("run").select_option(label="first")
    table = tab.locator("table", has_text="4 steps, 144 s")
    table.wait_for()
    seconds = dict(row.split("\t")[:2] for row in table.locator("tr").all_inner_texts())
    assert [seconds[name] for name in ("gen", "update_actor", "update_weights")] == [
        "80.00 s",
        "40.00 s",
        "24.00 s",
    ]
    part = tab.locator(".finding", has_text="Largest avoidable part")
    assert "generation and training in turns, 40.00 s (27.8 %)" in part.inner_text()
    assert part.locator("code").inner_text() == "rollout.max_staleness=1"
    chart = tab.get_by_role("img", name="timeline of step 3. 10.00 s: ")
    chart.locator(".barlayer .trace").first.wait_for()
    assert "actor 0 busy 3.00 s, rollout 0 busy 6.00 s" in chart.get_attribute("aria-label")
    bars = chart.evaluate(
        "plot => plot.data.flatMap((trace) => Array.from(trace.y, (row, index) =>"
        " [trace.name, row, trace.base[index], trace.x[index]]))"
    )
    assert ["phase", "controller", 0, 6] in bars
    assert ["call", "actor 0", 6, 3] in bars
    assert ["wait", "actor 0", 0, 6] in bars
    assert ["tool", "samples 0.0", 2, 1] in bars
    tab.get_by_label("profiled step").select_option("2")
    tab.wait_for_url("**step=2**")
    tab.get_by_role("img", name="timeline of step 2. ").locator(".barlayer .trace").first.wait_for()
    tab.get_by_label("run").select_option(label="second")
    tab.get_by_text("No step was profiled").wait_for()


def test_everything_can_be_reached_by_keys_and_is_named(tab: Any, page: Page) -> None:
    opened(tab, page)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "to the content"
    for name in ("Runs", "Curves", "Samples", "Prompts", "Time", "Difference"):
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == name
    for place in ("runs", "curves", "samples", "groups", "profile", "diff"):
        tab.goto(f"{page.url}/#/{place}")
        tab.locator(f'nav a[aria-current="page"][href="#/{place}"]').wait_for()
        tab.wait_for_timeout(300)
        unnamed = tab.evaluate(
            """() => [...document.querySelectorAll('main input, main select, main button, main a, main [role=img]')]
              .filter((one) => !one.closest('.plot') || one.matches('.plot'))
              .filter((one) => !(one.labels && one.labels.length) && !one.getAttribute('aria-label'))
              .filter((one) => !one.textContent.trim())
              .map((one) => one.outerHTML.slice(0, 120))"""
        )
        assert unnamed == [], place


def test_a_run_that_goes_on_is_followed(tab: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as page:
        opened(tab, page)
        tab.get_by_text("There is no run here yet.").wait_for()
        make_run(tmp_path / "runs" / "new")
        tab.get_by_role("link", name="new").wait_for()
        assert tab.locator("tbody tr").count() == 1


def test_one_file_needs_no_server(tab: Any, page: Page, tmp_path: Path) -> None:
    from strop.observability.viewer.page.one_file import write_page

    write_page(tmp_path / "runs.html", page.catalog, max_samples=60)
    tab.goto(f"file://{tmp_path}/runs.html")
    tab.get_by_text("a file of its own").wait_for()
    assert tab.locator("tbody tr").count() == 2
    name = id_of(tab, "first")
    tab.goto(f"file://{tmp_path}/runs.html#/curves?runs={name}")
    tab.get_by_role("img", name="reward. ").locator(".scatterlayer .trace").first.wait_for()
    tab.goto(f"file://{tmp_path}/runs.html#/samples?run={name}&text=answer 1 of step 3")
    tab.get_by_text("3 of the 26 samples of the run are in this file").wait_for()
    assert tab.locator(".tokens span").count() == 3
    tab.goto(f"file://{tmp_path}/runs.html#/groups?run={name}")
    tab.get_by_text("3 prompts of step 4: 1 solved, 1 hopeless, 1 learning").wait_for()


@pytest.mark.skipif(
    "STROP_SCREENSHOTS" not in os.environ, reason="STROP_SCREENSHOTS names no folder for pictures"
)
def test_pictures_for_the_docs(tab: Any, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "strop", "quickstart", "--out", str(tmp_path / "quickstart")], check=True
    )
    folder = Path(os.environ["STROP_SCREENSHOTS"])
    tab.set_viewport_size({"width": 1100, "height": 700})
    with served(tmp_path / "quickstart") as page:
        opened(tab, page, "curves")
        tab.get_by_role("img", name="reward. ").locator(".scatterlayer .trace").first.wait_for()
        tab.wait_for_timeout(1000)
        tab.screenshot(path=folder / "view-curves.png")
        tab.goto(f"{page.url}/#/samples?highest_score=0.5&last_step=40")
        tab.locator(".tokens span").first.wait_for()
        tab.get_by_label("tokens coloured by").select_option("entropy")
        tab.locator(".tokens span").nth(1).hover()
        tab.screenshot(path=folder / "view-samples.png")
        tab.goto(f"{page.url}/#/groups")
        tab.get_by_role("img", name="rewards of this step by prompt. ").locator(".trace").first.wait_for()
        tab.wait_for_timeout(1000)
        tab.screenshot(path=folder / "view-prompts.png")
    for name in ("view-curves", "view-samples", "view-prompts"):
        assert (folder / f"{name}.png").stat().st_size > 10_000
