"""`strop push` and `strop export --out URL`: what arrives elsewhere, and what its card says."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from cli_calls import Project, cli
from hub_cases import StandIn, asked_here
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from strop.run import RunFolder
from strop.run.folder import RUN_FILE


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with asked_here(tmp_path / "cache", monkeypatch) as stand_in:
        monkeypatch.setenv("HF_TOKEN", "right")
        yield stand_in


def files_of(hub: StandIn, name: str) -> dict[str, bytes]:
    return list(hub.models[name].values())[-1]


def test_a_model_goes_to_the_hub_with_the_facts_of_its_run(
    trained: Path, project: Project, hub: StandIn, tmp_path: Path
) -> None:
    done = cli("push", trained, "--to", "me/sums", "--private", "--message", "the first", "--json")
    assert done.code == 0, done.err
    sent = files_of(hub, "me/sums")
    commit = list(hub.models["me/sums"])[-1]
    assert done.record == {
        "to": "me/sums", "step": 2, "sent": True, "revision": commit, "files": len(sent),
        "bytes": sum(map(len, sent.values())),
    }  # fmt: skip
    assert (hub.private, hub.messages) == ({"me/sums"}, ["the first"])
    for name, body in sent.items():
        (tmp_path / name).write_bytes(body)
    AutoModelForCausalLM.from_pretrained(tmp_path)

    card = ModelCard.load(tmp_path / "README.md")  # the reader of the hub's own client
    with RunFolder.open(trained, read_only=True) as run:
        first, last = run.events.read("validation")[0], run.events.read("validation")[-1]
    assert card.data.library_name == "transformers"
    assert "grpo" in card.data.tags
    assert card.data.eval_results[0].metric_value == last["pass_rate"]
    text = card.text
    for label, one in (("before training", first), ("step 2, this model", last)):
        between = f"{100 * one['low']:.1f} % to {100 * one['high']:.1f} %"
        assert f"| {label} | {100 * one['pass_rate']:.1f} % | {between} | {one['num_answers']} |" in text
    assert "- trained on: `train.parquet`" in text
    assert f"- run: `{json.loads((trained / RUN_FILE).read_text())['id']}`" in text
    assert "| `trainer.max_steps` | `2` |" in text
    assert str(project.folder) not in text, "folders of this machine are nobody's business"

    again = cli("push", trained, "--to", "hub:me/sums", "--no-card")
    assert again.code == 0, again.err
    assert files_of(hub, "me/sums") == sent


def test_weights_of_an_earlier_model_do_not_stay_beside_those_of_the_new_one(
    trained: Path, hub: StandIn
) -> None:
    hub.add(
        "me/old",
        {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}", "own.txt": b"2"},
    )
    assert cli("push", trained, "--to", "me/old", "--no-card").code == 0
    names = set(files_of(hub, "me/old"))
    assert "own.txt" in names
    assert {name for name in names if "safetensors" in name} == {"model.safetensors"}


def test_a_hub_that_refuses_is_a_sentence_before_a_model_is_made(
    trained: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused = cli("push", trained, "--to", "me/sums")
    assert refused.sentence.startswith("strop push: --to 'me/sums' takes nothing: ")
    assert "answers 401: set HF_TOKEN to a token that may write it" in refused.sentence
    assert "export ok" not in refused.out
    here = cli("push", trained, "--to", trained)
    assert "is a folder of this machine: `strop export RUN --out DIR`" in here.sentence
    assert (
        "name the branch that takes it with --branch" in cli("push", trained, "--to", "me/sums@v1").sentence
    )


def test_what_arrives_with_other_contents_is_told(trained: Path, hub: StandIn) -> None:
    hub.spoils = True
    told = cli("push", trained, "--to", "me/spoilt").sentence
    assert "model.safetensors was sent, and has" in told
    assert "send it again" in told


def test_a_dry_run_sends_nothing_and_writes_the_card(trained: Path, hub: StandIn, tmp_path: Path) -> None:
    done = cli("push", trained, "--to", "me/sums", "--dry-run", "--card", tmp_path / "card.md", "--json")
    assert done.record == {"to": "me/sums", "step": 2, "sent": False}
    assert hub.asked == []
    text = (tmp_path / "card.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["tags"][0] == "strop"
    assert 'from_pretrained("me/sums")' in text.replace("'", '"')


def test_a_model_goes_to_a_url_and_is_read_from_there(trained: Path, tmp_path: Path) -> None:
    url = (tmp_path / "store" / "sums").as_uri()
    done = cli("push", trained, "--to", url, "--step", "2")
    assert done.code == 0, done.err
    assert "# sums\n" in (tmp_path / "store" / "sums" / "README.md").read_text()
    taken = cli("export", trained, "--out", url)
    assert "lies there already: name an empty folder" in taken.sentence

    exported = cli("export", trained, "--out", f"{url}-2", "--json")
    assert exported.code == 0, exported.err
    assert exported.record["folder"] == f"{url}-2"
    assert (tmp_path / "store" / "sums-2" / "model.safetensors").is_file()
    assert not (tmp_path / "store" / "sums-2" / "README.md").exists()
    asked = cli("generate", f"{url}-2", "--prompts", _prompts(tmp_path), "--max-tokens", "3", "--json")
    assert asked.code == 0, asked.err


def _prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("1+1=\n")
    return path


def test_the_card_of_a_fine_tuning_names_its_own_settings(tuned: Path, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    assert cli("push", tuned, "--to", "memory://cards/x", "--dry-run", "--card", card).code == 0
    text = card.read_text()
    assert "Made by supervised fine-tuning with strop" in text
    assert "- trained on: `" in text
    assert "| `sft." in text
    assert "`data." not in text
    assert "policy loss" not in text


@pytest.mark.parametrize("base", ["tiny/base", pytest.param("", marks=pytest.mark.slow)])
def test_an_adapter_names_the_model_under_it_as_others_find_it(
    project: Project, hub: StandIn, tmp_path: Path, base: str
) -> None:
    hub.add_folder("tiny/base", project.model)
    settings = [f"model.path={base or project.model}", "model.lora.rank=2"]
    run = tmp_path / "run"
    begun = cli("train", "--config", project.config, "--out", run, "trainer.max_steps=1", *settings)
    assert begun.code == 0, begun.err
    assert cli("push", run, "--to", "me/adapter", "--adapter").code == 0
    sent = files_of(hub, "me/adapter")
    named = json.loads(sent["adapter_config.json"])["base_model_name_or_path"]
    assert named == (base or project.model.name)
    assert not [name for name, body in sent.items() if str(project.folder).encode() in body]
    card = ModelCard(sent["README.md"].decode())
    assert card.data.library_name == "peft"
    assert "`adapter_config.json` names, as `AutoModelForCausalLM` loads it." in card.text
    here = tmp_path / "here"
    assert cli("export", run, here, "--adapter").code == 0
    named = json.loads((here / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == (base or str(project.model))


@pytest.mark.parametrize("lora", [pytest.param([], marks=pytest.mark.slow), ["model.lora.rank=2"]])
def test_a_reward_model_is_sent_as_what_it_is_and_taken_for_no_language_model(
    project: Project, hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture, lora: list[str]
) -> None:
    pairs, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    pairs.write_text(json.dumps({"prompt": "a b c", "chosen": "1", "rejected": "2"}) + "\n")
    words = [
        f"model.path={project.model}",
        f"prefer.data.train_files=['{pairs}']",
        f"prefer.data.val_files=['{pairs}']",
        "prefer.num_epochs=2",
        *lora,
    ]
    begun = cli("reward-model", *words, "--out", run)
    assert begun.code == 0, begun.err
    sent = cli("push", run, "--to", "me/judge")
    assert sent.code == 0, sent.err
    assert "probe value diff 0.0000" in sent.out
    for name, body in files_of(hub, "me/judge").items():
        (tmp_path / name).write_bytes(body)
    ids = torch.tensor([[5, 6, 7]])
    here, there = (
        AutoModelForSequenceClassification.from_pretrained(folder)(ids).logits
        for folder in (run / "model", tmp_path)
    )
    torch.testing.assert_close(here, there)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert "model = AutoModelForSequenceClassification.from_pretrained('me/judge')" in card.text
    # At first every score is 0, so the loss is log 2 = 0.6931.
    assert "Loss on held-out data: " in card.text
    assert "(0.6931 before training)." in card.text
    if lora:
        told = logging.getLogger("transformers")
        told.addHandler(caplog.handler)
        assert cli("push", run, "--to", "me/adapter", "--adapter").code == 0
        told.removeHandler(caplog.handler)
        assert "score.weight" not in caplog.text, "its head is the adapter's"
        text = files_of(hub, "me/adapter")["README.md"].decode()
        assert "as `AutoModelForSequenceClassification` loads it, with `num_labels=1`." in text
    for command in (["eval", run], ["train", f"model.path={run / 'model'}", "--out", tmp_path / "other"]):
        sentence = cli(*command, "--config", project.config).sentence
        assert (
            "is a Qwen3ForSequenceClassification: it gives scores, as a reward model does, and no text"
            in sentence
        )
