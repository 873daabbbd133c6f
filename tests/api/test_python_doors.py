"""strop.train, strop.sft and strop.evaluate, called as a notebook calls them."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from door_rewards import BONUS, first_letter
from fork_server import run_program

import strop
from strop import GRPO, evaluate, sft, train
from strop.api.calls import run_work
from strop.api.inputs import column_settings, data_files
from strop.cli.quickstart.task import TaskFiles
from strop.config.errors import ConfigError
from strop.data.readers import read_rows
from strop.run import RunFolder
from strop.run.errors import RunError
from strop.trainer.fault_tolerance.signals import SignalRequest

SMALL = {
    "data.max_prompt_tokens": 24,
    "trainer.trackers": ["jsonl"],
    "trainer.preflight": False,
    "eval.every": 0,
    "resources.num_threads": 1,
    "reward.num_workers": 1,
}
SHORT = GRPO(
    prompts_per_step=4, samples_per_prompt=4, max_response_tokens=5, learning_rate=1e-3, steps=2, epochs=9
)


@pytest.fixture
def rows(tiny_task: TaskFiles) -> list[dict[str, Any]]:
    """Prompts in TRL's form."""
    found = datasets.Dataset.from_parquet(str(tiny_task.train)).to_list()[:12]
    return [{"prompt": row["prompt"], "solution": row["reward_model"]["ground_truth"]} for row in found]


def test_a_function_rows_and_a_model_are_a_run(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    steps: list[tuple[int, float]] = []
    samples: list[int] = []
    checkpoints: list[tuple[int, bool]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        steps.append((step, metrics["critic/score/mean"]))

    others = set(multiprocessing.active_children())
    result = train(
        model=tiny_model,
        rewards=[first_letter],
        data=rows,
        val_data=rows[:3],
        algorithm=SHORT,
        settings=SMALL,
        out=tmp_path / "x",
        on_step=on_step,
        on_samples=lambda step, found: samples.append(len(found)),
        on_checkpoint=lambda step, folder: checkpoints.append((step, (folder / "manifest.json").is_file())),
    )
    assert result.run == tmp_path / "x"
    assert result.steps == 2
    assert (result.pass_rate_start, result.pass_rate_final) == (None, None), (
        "a share of letters is no verdict"
    )
    assert result.reward_start is not None
    assert result.reward_final is not None
    assert [step for step, _ in steps] == [1, 2]
    assert samples == [16, 16]
    assert checkpoints == [(2, True)]
    table = result.samples()
    assert len(table) == 32
    assert len(result.samples(1)) == 16
    assert len(result.samples(2, split="val")) == 3
    assert table["score"].min() >= BONUS, "the function and what it refers to reached the process that scores"
    expected = [ord((text or " ")[0]) % 8 / 10 + BONUS for text in table["response"]]
    assert table["score"].tolist() == pytest.approx(expected)
    metrics = result.metrics()
    assert metrics.loc[1, "critic/score/mean"] == pytest.approx(steps[0][1])
    assert result.model().config.hidden_size > 0
    assert result.tokenizer().vocab_size > 0
    assert result.plot().get_axes()[0].get_title() == "x"
    assert result.plot()._repr_png_()[:4] == b"\x89PNG", "what a notebook shows"
    assert set(multiprocessing.active_children()) == others


def test_the_run_is_that_of_the_command(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files and settings, given to `strop train`, give the same hash chain."""
    from strop.cli.main import main

    train(tiny_model, first_letter, rows, algorithm=SHORT, settings=SMALL, out=tmp_path / "door")
    words = ["train", "--config", str(tmp_path / "door" / "config.yaml"), "--out", str(tmp_path / "command")]
    assert main([*words, "--trust-code"]) == 0, capsys.readouterr().err
    chains = []
    for name in ("door", "command"):
        with RunFolder.open(tmp_path / name, read_only=True) as run:
            chains.append([one.chain for one in run.fingerprints.read()])
    assert chains[0] == chains[1]
    assert len(chains[0]) == 2


def test_a_text_of_a_callback_ends_the_run_and_it_goes_on(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"algorithm": GRPO(**{**vars(SHORT), "steps": 3}), "settings": SMALL}
    first = train(
        tiny_model, first_letter, rows, **given, out=tmp_path / "x", on_step=lambda step, _: "enough"
    )
    assert first.steps == 1
    with RunFolder.open(tmp_path / "x", read_only=True) as run:
        assert run.events.read("finished")[-1]["reason"] == "enough"
    model = str(tmp_path / "x" / "model")
    with pytest.raises(ConfigError, match="which resume=True cannot: ") as refused:
        train(out=tmp_path / "x", resume=True, settings={"trainer.seed": 7})
    assert f"the weights of this one: model={model!r} and another out" in str(refused.value)
    assert "--" not in str(refused.value)
    rest = train(out=tmp_path / "x", resume=True, settings={"trainer.max_steps": 4})
    assert rest.steps == 4
    inputs = {file: file.read_bytes() for file in (tmp_path / "x-inputs").iterdir()}
    with pytest.raises(RunError, match="already holds a run: go on with it by resume=True"):
        train(tiny_model, first_letter, rows[:3], **given, out=tmp_path / "x")
    assert {file: file.read_bytes() for file in inputs} == inputs, "what a resume reads"


@pytest.mark.parametrize(
    "form", ["dataset", "frame", "columns", "files", pytest.param("file", marks=pytest.mark.slow)]
)
def test_rows_come_in_any_form(
    tiny_model: Path, tiny_task: TaskFiles, rows: list[dict[str, Any]], form: str
) -> None:
    forms: dict[str, Any] = {
        "dataset": datasets.Dataset.from_list(rows[:2]),
        "frame": pd.DataFrame(rows[:2]),
        "columns": {name: [row[name] for row in rows[:2]] for name in rows[0]},
        "files": [tiny_task.val],
        "file": str(tiny_task.val),
    }
    found = evaluate(
        tiny_model,
        forms[form],
        rewards=[] if form.startswith("file") else first_letter,
        settings={"data.max_response_tokens": 5, "data.max_val_prompts": 2, "resources.num_threads": 1},
    )
    assert len(found.samples()) == 2
    assert found.pass_rate_start == found.pass_rate_final
    assert found.run is None
    with pytest.raises(ValueError, match="an evaluation leaves no run"):
        found.plot()


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
UNLIKE: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": "b", "solution": "c", "agent_name": "tool_agent", "tools": [TOOL], "extra_info": {}},
    {"prompt": "d", "data_source": "other", "extra_info": {"limit": None}},
]
"""Rows with other keys, and objects without any."""


def test_rows_of_memory_are_those_of_the_run(tmp_path: Path) -> None:
    (file,) = data_files(UNLIKE, "data", tmp_path)
    assert list(read_rows([file], tmp_path)) == UNLIKE
    (file,) = data_files(
        datasets.Dataset.from_list([row | {"extra_info": {}} for row in UNLIKE]), "x", tmp_path
    )
    assert [row["extra_info"] for row in read_rows([file], tmp_path)] == [{}, {}, {}]


def test_nulls_that_a_table_filled_into_chats_and_tools_are_left_out(tmp_path: Path) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}},
        }
        for name in "xy"
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    chats = [
        [{"role": "user", "content": "q"}],
        [{"role": "user", "content": "q", "name": "Ann"}, {"role": "assistant", "tool_calls": [call]}],
    ]
    given: list[dict[str, Any]] = [
        {"prompt": chat, "tools": [tool]} for chat, tool in zip(chats, tools, strict=True)
    ]
    table = datasets.Dataset.from_list(given)
    assert table.to_list() != given
    (file,) = data_files(table.to_list(), "rows", tmp_path)
    assert read_rows([file], tmp_path) == given
    # An object without keys has no form in Parquet.
    (file,) = data_files(
        datasets.Dataset.from_list([row | {"extra_info": {}} for row in given]), "set", tmp_path
    )
    assert read_rows([file], tmp_path) == [row | {"extra_info": {}} for row in given]


def test_a_row_with_bytes_keeps_what_the_first_one_lacks(tmp_path: Path) -> None:
    given = [{"prompt": "a"}, {"prompt": "b", "solution": "c", "images": [b"x"]}]
    (file,) = data_files(given, "data", tmp_path)
    none = {"solution": None, "images": None}
    assert list(read_rows([file], tmp_path)) == [none | row for row in given]


def test_columns_of_later_rows_count_for_the_settings(tmp_path: Path) -> None:
    assert column_settings(UNLIKE) == {
        "data.default_data_source": "data",
        "data.ground_truth_key": "solution",
    }
    assert column_settings([{**row, "data_source": "x"} for row in UNLIKE]) == {
        "data.ground_truth_key": "solution"
    }
    assert column_settings([tmp_path / "a.jsonl"]) == {}


def test_a_loaded_model_is_trained_and_what_came_of_it_is_evaluated(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    chats = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["solution"]}]} for row in rows
    ]
    tuned = sft(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        chats,
        val_data=chats[:2],
        settings={"sft.num_epochs": 2, "sft.data.max_tokens": 32, "trainer.trackers": ["jsonl"]},
        out=tmp_path / "sft",
    )
    assert tuned.loss is not None
    assert tuned.val_loss is not None
    assert tuned.pass_rate_final is None
    done = train(tuned.model_path, first_letter, rows, algorithm=SHORT, settings=SMALL, out=tmp_path / "rl")
    assert done.run is not None
    again = evaluate(done.run, rows[:3], settings={"eval.samples_per_prompt": 2, "eval.temperature": 1.0})
    assert len(again.samples()) == 6
    assert again.samples()["score"].min() >= BONUS, "the run's own reward"


def test_it_works_where_an_event_loop_runs(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """As in a cell of a notebook."""

    async def cell() -> strop.Result:
        return train(tiny_model, first_letter, rows, algorithm=SHORT, settings=SMALL, out=tmp_path / "x")

    assert asyncio.run(cell()).steps == 2


def in_a_cell(work: Callable[[], object]) -> None:
    """Called where a loop runs, with the handler of SIGINT that kernels have."""

    async def cell() -> None:
        work()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()


def interrupt() -> None:
    """The button of a notebook."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupted_cell_saves_its_step_and_goes_on(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x"

    def press(step: int, metrics: Mapping[str, float]) -> None:
        interrupt()
        time.sleep(0.2)  # the main thread hears of it within this step

    def begun() -> None:
        train(tiny_model, first_letter, rows, algorithm=SHORT, settings=SMALL, out=out, on_step=press)

    with pytest.raises(KeyboardInterrupt):
        in_a_cell(begun)
    assert f"go on with train(out={str(out)!r}, resume=True)" in capsys.readouterr().err
    assert RunFolder.open(out, read_only=True).checkpoints.steps() == [1]


def test_an_interrupt_ends_a_fine_tuning_after_its_step(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "x"
    chats = [{"prompt": row["prompt"], "completion": row["solution"]} for row in rows]

    def press() -> None:
        while not (out / "metrics.jsonl").is_file():
            time.sleep(0.01)
        interrupt()

    threading.Thread(target=press, daemon=True).start()
    settings = {"sft.num_epochs": 1000, "trainer.trackers": ["jsonl"], "resources.num_threads": 1}
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: sft(tiny_model, chats, settings=settings, out=out))
    (step,) = RunFolder.open(out, read_only=True).checkpoints.steps()
    assert 1 <= step < 1000


def test_an_interrupt_outside_of_a_step_ends_the_work_where_it_is() -> None:
    ended: list[bool] = []

    def work() -> None:
        threading.Timer(0.1, interrupt).start()
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_work(work, SignalRequest()))
    assert ended == [True]


PROGRAM = """
import strop

SCALE = 0.5

def half(completions, **columns):
    return [SCALE for _ in completions]

print("once")
result = strop.train({model!r}, half, {rows!r}, algorithm=strop.GRPO(**{short!r}), settings={small!r}, out={out!r})
print(set(result.samples()["score"]))
"""


def test_a_program_without_a_guard_is_run_once(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Its functions are of `__main__`, which no other process may import."""
    text = PROGRAM.format(
        model=str(tiny_model), rows=rows, short=vars(SHORT), small=SMALL, out=str(tmp_path / "x")
    )
    (tmp_path / "program.py").write_text(text)
    done = run_program([tmp_path / "program.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["once", "{0.5}"]
    assert "SCALE for _ in completions" in (tmp_path / "x-inputs" / "reward_0.py").read_text(), "for a reader"


def test_several_rewards_have_weights_and_names(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    def brief(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [-float(len(one[0]["content"])) for one in completions]

    result = train(
        tiny_model,
        [first_letter, brief],
        rows,
        reward_weights=[1.0, 0.01],
        algorithm=SHORT,
        settings=[
            *(f"{key}={value}" for key, value in SMALL.items() if key != "trainer.trackers"),
            "trainer.trackers=[jsonl]",
        ],
        out=tmp_path / "x",
    )
    table = result.samples(1)
    for _, row in table.iterrows():
        parts = row["reward_parts"]
        assert row["score"] == pytest.approx(parts["first_letter"] + 0.01 * parts["brief"])


class BonusFor:
    """A reward that is made with what it looks for."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(self.letter in str(one)) for one in completions]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"data": []}, "data has no row"),
        ({"data": [1]}, "data has a int as row 0"),
        ({"data": 5}, "data is a int: give files"),
        (
            {"data": datasets.DatasetDict(train=datasets.Dataset.from_list([{"a": 1}]))},
            "data is a DatasetDict of train",
        ),
        ({"rewards": [5]}, "a reward is a file or a function, but number 0 is a int"),
        ({"rewards": [None]}, "a reward is a file or a function, but number 0 is a NoneType"),
        (
            {"rewards": None},
            "rewards is None: give a function, a file, or a list of them; left out, the scorer",
        ),
        ({"rewards": {"a": first_letter}}, "rewards is a dict: give a function, a file, or a list of them"),
        ({"rewards": 5}, "rewards is a int: give a function"),
        (
            {"rewards": "accuracy"},
            "the reward 'accuracy' is no file .*/accuracy.: give a function, or a Python file",
        ),
        ({"rewards": ""}, "the reward '' is no file"),
        ({"rewards": [BonusFor]}, r"number 0 is the class BonusFor: give an instance .* BonusFor\(...\)"),
        ({"rewards": lambda given, wanted: 1.0}, "asks for given, wanted, which strop does not pass"),
        ({"reward_weights": [1.0, 2.0]}, "there are 1 rewards and 2 reward_weights"),
        ({"reward_weights": 0.5}, "reward_weights is 0.5: give a list of numbers"),
        ({"reward_weights": ["half"]}, r"reward_weights is \['half'\]: give a list of numbers"),
        ({"data": None}, "data.train_files"),
        ({"model": None}, "model.path is not set"),
        ({"algorithm": GRPO}, r"algorithm is <class .*GRPO'>: give the name of a preset \('grpo'\)"),
        ({"settings": None}, "settings is None: give a dictionary"),
        ({"settings": "trainer.max_steps=1"}, "settings is 'trainer.max_steps=1': give a dictionary"),
        ({"on_step": 5}, "on_step is a int: give a function"),
        ({"out": 5}, "out is a int: give the path of the run folder"),
        ({"model": 5}, "model is a int: give a folder"),
        ({"algorithm": "grppo"}, "grpo"),
        ({"settings": {"actor.optim.rl": 1}}, "actor.optim.lr"),
        ({"settings": {"trainer.output_dir": "x"}}, "here it is the argument out=$"),
    ],
)
def test_what_cannot_be_used_is_said(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path, given: dict[str, Any], sentence: str
) -> None:
    usual: dict[str, Any] = {"model": tiny_model, "rewards": first_letter, "data": rows, "settings": SMALL}
    with pytest.raises((ValueError, ConfigError), match=sentence):
        train(**{**usual, "out": tmp_path / "x", **given})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_taken_to_another_process_is_said(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    def endless() -> Iterator[float]:
        yield 0.0

    numbers = endless()

    def scored(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [next(numbers) for _ in completions]

    told = "the reward scored cannot be taken to the processes .*generator.*rewards='reward.py:scored'"
    with pytest.raises(ValueError, match=told):
        train(tiny_model, scored, rows, out=tmp_path / "x")


def test_a_function_that_fails_ends_before_training_and_its_folder_is_free_again(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    def broken(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [one["text"] for one in completions]

    with pytest.raises(ValueError, match="broken in reward_0.py raised TypeError"):
        train(tiny_model, broken, rows, algorithm=SHORT, settings=SMALL, out=tmp_path / "x")
    assert (
        train(tiny_model, first_letter, rows, algorithm=SHORT, settings=SMALL, out=tmp_path / "x").steps == 2
    )


def test_settings_become_words_that_mean_them() -> None:
    from strop.api.overrides import override_of
    from strop.config.overrides import parse_override

    for value in (
        None, True, 3, 1e-6, "plain", "with 'quotes' and \\ and = and ,", "a b", "end\\", "\\'", "null", ["x y", 2],
        {"rollout": 1, "other": [None]},
    ):  # fmt: skip
        assert parse_override(override_of(("some.key", value))).value == value, value


def test_import_is_light() -> None:
    code = "import strop, sys; strop.train, strop.GRPO; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_advice_about_a_setting_given_in_python_speaks_of_no_shell(tmp_path: Path) -> None:
    refused: dict[str, Any] = {
        'reward.path is 12, but it needs text; to make it text, put it in quotes: "12"': {"reward.path": 12},
        '; for a list of one, write ["a b.jsonl"]': {"data.train_files": "a b.jsonl"},
    }
    for sentence, settings in refused.items():
        for call in (train, sft, evaluate):
            with pytest.raises(ConfigError) as caught:
                call(settings=settings, **({} if call is evaluate else {"out": tmp_path / "run"}))
            assert str(caught.value).endswith(sentence)


def test_a_run_without_recorded_samples_leaves_nothing_behind(
    tiny_model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    settings = {**SMALL, "trainer.skip_rollout": str(tmp_path / "empty")}
    with pytest.raises(RunError, match="holds no training samples"):
        train(tiny_model, first_letter, rows, algorithm=SHORT, settings=settings, out=tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
