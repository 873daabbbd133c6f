"""Scripts as people bring them: with conditions, folders, here-documents, and what stands beside the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.compat.migrate import (
    Migration,
    migrate_openrlhf,
    migrate_trl,
    migrate_verl,
    migrate_verl_sft,
    read_openrlhf,
    read_trl,
    read_verl,
)
from strop.compat.migrate.shell import read_commands

VERL = "python3 -m verl.trainer.main_ppo data.train_files=t.parquet "


def written(folder: Path, text: str, name: str = "run.sh") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def of_verl(folder: Path, text: str) -> Migration:
    return migrate_verl(read_verl([written(folder, text)], {"PWD": str(folder)}).found)


def ours(migration: Migration, key: str) -> object:
    value: object = migration.values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def last(script: str, **variables: str) -> list[str]:
    return [word.text for word in read_commands(script, variables, path="jobs/run.sh")[-1].words]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('X=b\nif [ "$X" = a ]; then Y=1; elif [[ $X == b* ]]; then Y=2; else Y=3; fi\nrun $Y', ["run", "2"]),
        ("if [ -z ${X:-} ]; then Y=1; else Y=2; fi\nrun $Y", ["run", "1"]),
        ("N=4\nif [ $N -gt 2 ]; then A=(x)\nA+=(y)\nfi\nrun ${A[@]}", ["run", "x", "y"]),
        ("A=(a)\n[ -n '' ] && A+=(b) || A+=(c)\nrun ${A[@]}", ["run", "a", "c"]),
        ("X=$(nproc) || X=8\nrun a$X", ["run", "a$(nproc)"]),
        ("if false; then run a; fi\nrun b", ["run", "b"]),
        ('run $(dirname "$0") ${0} $(basename $0 .sh)', ["run", "jobs", "jobs/run.sh", "run"]),
        (
            'H="$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." &> /dev/null && pwd)"\nrun $H/x',
            ["run", "/home/me/x"],
        ),
        ("read -r -d '' CMD <<EOF\nrun $X \\\n  \"b\"\nEOF\nX=2\n$CMD", ["run", "1", '"b"']),
        ("read -r -d '' CMD <<'EOF'\nrun $X\nEOF\n$CMD", ["run", "$X"]),
    ],
)
def test_what_a_script_says_of_itself_is_known(script: str, expected: list[str]) -> None:
    given = {"PWD": "/home/me"} | ({"X": "1"} if "CMD" in script else {})
    assert last(script, **given) == expected


def test_an_entry_on_an_unknown_condition_is_asked_about_and_leaves_the_others_alone(tmp_path: Path) -> None:
    migration = of_verl(
        tmp_path,
        "A=(actor_rollout_ref.rollout.n=4)\nif [ $HAS = 1 ]; then\n  A+=(algorithm.adv_estimator=rloo)\nfi\n"
        f'{VERL} "${{A[@]}}"',
    )
    assert ours(migration, "rollout.samples_per_prompt") == 4
    (row,) = [row for row in migration.rows if row.key == "algorithm.adv_estimator"]
    assert row.outcome.status == "unresolved"
    assert row.outcome.note.startswith("line 2 has a condition that is not known here")


def test_a_configuration_that_the_script_names_is_read_with_it(tmp_path: Path) -> None:
    configs = tmp_path / "config"
    configs.mkdir()
    written(configs, "data: {train_batch_size: 64}\nactor_rollout_ref: {rollout: {n: 3}}\n", "base.yaml")
    written(
        configs,
        "defaults: [ppo_trainer, base, _self_]\ndata: {max_prompt_length: 99, train_batch_size: 32}\n",
        "mine.yaml",
    )
    migration = of_verl(
        tmp_path,
        f'{VERL} --config-path="$(dirname "$0")/config" --config-name=mine data.max_prompt_length=100',
    )
    assert not migration.open_rows
    assert ours(migration, "data.max_prompt_tokens") == 100
    assert ours(migration, "data.prompts_per_step") == 32
    assert ours(migration, "rollout.samples_per_prompt") == 3


@pytest.mark.parametrize(("said", "expected"), [("True", "modelscope:Qwen/Q"), ("False", "Qwen/Q")])
def test_names_are_those_of_modelscope_where_the_script_says_so(
    tmp_path: Path, said: str, expected: str
) -> None:
    text = f"export VERL_USE_MODELSCOPE={said}\n{VERL} actor_rollout_ref.model.path=Qwen/Q critic.model.path=/m/q"
    assert ours(of_verl(tmp_path, text), "model.path") == expected
    inline = f"VERL_USE_MODELSCOPE={said} {VERL} actor_rollout_ref.model.path=Qwen/Q"
    assert ours(of_verl(tmp_path, inline), "model.path") == expected


def test_project_and_name_go_to_trackers_that_show_them(tmp_path: Path) -> None:
    names = "trainer.project_name=p trainer.experiment_name=e"
    shown = of_verl(tmp_path, f'{VERL} {names} trainer.logger=\'["console","wandb"]\'')
    assert ours(shown, "trainer.project_name") == "p"
    assert ours(shown, "trainer.experiment_name") == "e"
    hidden = of_verl(tmp_path, f'{VERL} {names} trainer.logger=\'["console","tensorboard"]\'')
    assert ours(hidden, "trainer.project_name") is None
    assert not hidden.open_rows


@pytest.mark.parametrize("name", ["'a-$(now)'", '"a-$(date +%m)"', "a-$NOW"])
def test_a_name_that_a_shell_makes_stops_nothing(tmp_path: Path, name: str) -> None:
    migration = of_verl(tmp_path, f"{VERL} trainer.experiment_name={name} trainer.logger=wandb")
    assert not migration.open_rows
    assert ours(migration, "trainer.experiment_name") is None


def test_dropout_of_no_size_is_nothing_to_set(tmp_path: Path) -> None:
    settings = (
        "+actor_rollout_ref.model.override_config.embd_pdrop=0. "
        "actor_rollout_ref.model.override_config.rope_theta=1e6"
    )
    migration = of_verl(tmp_path, VERL + settings)
    assert ours(migration, "model.override_config") == {"rope_theta": 1e6}


def test_tools_are_called_in_the_form_that_verl_assumes(tmp_path: Path) -> None:
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
    assert ours(of_verl(tmp_path, VERL + tools), "agent.tool_format") == "hermes"
    assert ours(of_verl(tmp_path, VERL), "agent.tool_format") is None


def test_texts_inside_of_columns_are_named_with_a_dot(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "torchrun --nproc_per_node 2 -m verl.trainer.fsdp_sft_trainer data.prompt_key=extra_info "
        "data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] "
        "model.partial_pretrain=/m/q data.train_files=t.parquet",
    )
    migration = migrate_verl_sft(read_verl([script], {}).found)
    assert not migration.open_rows
    assert ours(migration, "sft.data.prompt_key") == "extra_info.question"
    assert ours(migration, "sft.data.completion_key") == "extra_info.answer"
    assert ours(migration, "resources.ranks") == 2


def test_a_number_of_processes_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    script = written(tmp_path, "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer model.path=/m/q")
    (row,) = migrate_verl_sft(read_verl([script], {}).found).open_rows
    assert row.key == "torchrun.nproc_per_node"


OPENRLHF = """\
D="$(cd "$(dirname "$0")" && pwd)"
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray --actor.model_name_or_path $D/model --data.prompt_dataset $D/p.jsonl \\
  --data.max_len 100 --rollout.max_new_tokens 20 --logger.wandb.key SECRET --logger.wandb.project mine
EOF
python3 -m $training_commands
"""


def test_a_command_of_openrlhf_that_is_kept_in_a_variable_has_its_variables(tmp_path: Path) -> None:
    flags = read_openrlhf(written(tmp_path, OPENRLHF), {"PWD": str(tmp_path)})
    migration = migrate_openrlhf(flags)
    assert ours(migration, "model.path") == f"{tmp_path}/model"
    # Micro-batches of one sample, which has 100 tokens with its prompt.
    assert ours(migration, "actor.engine.max_tokens_per_device") == 100
    assert ours(migration, "trainer.project_name") == "mine"
    assert "SECRET" not in str(migration.values)


GRPO = """\
import os, re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

PATTERN = re.compile(r"\\d+")  # a number
UNUSED = open("nothing")


def digits(text):
    return PATTERN.findall(text)


def right(completions, answer, **kwargs):
    return [float(digits(c) == [a]) for c, a in zip(completions, answer)]


def main():
    data = load_dataset("json", data_files={"train": "t.jsonl", "test": f"{os.getenv('D', 'd')}/v.jsonl"})
    args = GRPOConfig(output_dir="o", per_device_train_batch_size=4 * 2, num_generations=8, eval_strategy="steps")
    GRPOTrainer(model=os.environ.get("MODEL", "m"), reward_funcs=right, args=args,
                train_dataset=data["train"], eval_dataset=data["test"]).train()


main()
"""


def test_a_script_of_trl_with_its_functions_inside_is_moved_in_whole(tmp_path: Path) -> None:
    copy = tmp_path / "grpo_rewards.py"
    script = read_trl(written(tmp_path, GRPO, "train.py"), {"D": "e"}, rewards=copy)
    migration = migrate_trl(script.found, script.kind)
    assert not migration.open_rows
    assert ours(migration, "model.path") == "m"
    assert ours(migration, "data.train_files") == ["t.jsonl"]
    assert ours(migration, "data.val_files") == ["e/v.jsonl"]  # not the rows that are trained
    assert ours(migration, "data.prompts_per_step") == 1
    assert ours(migration, "reward") == {"path": str(copy), "name": "right"}
    made: dict[str, object] = {}
    exec(compile(script.copied, "copy", "exec"), made)
    assert made["right"](["x 12", "3"], ["12", "4"]) == [1.0, 0.0]  # type: ignore[operator]
    assert "UNUSED" not in script.copied
    assert "# a number" in script.copied


def test_a_function_that_needs_trl_is_not_copied(tmp_path: Path) -> None:
    text = GRPO.replace("import os, re", "import os, re\nfrom trl.rewards import helper").replace(
        "return PATTERN", "helper()\n    return PATTERN"
    )
    script = read_trl(written(tmp_path, text, "train.py"), {}, rewards=tmp_path / "r.py")
    (row,) = [row for row in migrate_trl(script.found, "GRPO").rows if row.key.endswith("reward_funcs")]
    assert script.copied == ""
    assert row.outcome.status == "refused"


OWN = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse()
    training_args.beta = 0.04
    if model_args.x:
        training_args.temperature = 0.5
    dataset = load_dataset("o/rows", split="train")
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=right, args=training_args, train_dataset=dataset
    )
"""


def test_flags_of_a_script_of_ones_own_stand_where_it_has_no_value(tmp_path: Path) -> None:
    written(tmp_path, OWN, "train_own.py")
    text = "accelerate launch --num_processes 2 train_own.py --model_name_or_path Q/q --learning_rate 1e-5 --use_peft"
    script = read_trl(written(tmp_path, text), {}, rewards=tmp_path / "r.py")
    assert (script.kind, script.processes) == ("GRPO", 2)
    assert script.copied
    migration = migrate_trl(script.found, script.kind, processes=2)
    assert ours(migration, "model.path") == "Q/q"
    assert ours(migration, "actor.optim.lr") == 1e-5
    assert ours(migration, "reward.name") == "right"
    assert ours(migration, "algorithm.kl_loss_coef") == 0.04
    assert ours(migration, "model.lora.rank") == 16, "what TRL assumes with --use_peft"
    assert ours(migration, "model.lora.alpha") == 32
    (row,) = migration.open_rows
    assert "training_args.temperature = 0.5 stands under a condition" in row.outcome.note


def own(folder: Path, script: str, flags: str) -> Migration:
    written(folder, script, "train_own.py")
    launch = written(folder, f"python train_own.py --model_name_or_path Q/q {flags}")
    script_read = read_trl(launch, {}, rewards=folder / "r.py")
    return migrate_trl(script_read.found, script_read.kind)


def note_of(migration: Migration, key: str) -> str:
    return next(row.outcome.note for row in migration.open_rows if row.key == key)


def test_what_a_script_sets_after_its_flags_stays(tmp_path: Path) -> None:
    migration = own(tmp_path, OWN, "--beta 0.1 --temperature 0.7")
    assert ours(migration, "algorithm.kl_loss_coef") == 0.04
    assert "stands under a condition" in note_of(migration, "GRPOConfig.temperature")


@pytest.mark.parametrize(
    "loaded",
    [
        'load_dataset("o/rows", split="train").train_test_split(0.1)["train"]',
        'load_dataset("o/rows", split="train").filter(len)',
        "load_rows(script_args)",
    ],
)
def test_the_data_set_of_a_script_is_never_that_of_its_flags(tmp_path: Path, loaded: str) -> None:
    script = OWN.replace('load_dataset("o/rows", split="train")', loaded)
    for flags in ("", "--dataset_name o/whole --eval_strategy steps"):
        migration = own(tmp_path, script, flags)
        assert "o/whole" not in str(migration.values)
        assert "whole" not in str([row.value for row in migration.rows])


def test_the_adapter_of_a_script_has_its_own_settings(tmp_path: Path) -> None:
    adapter = "args=training_args, peft_config=LoraConfig(r=64, lora_alpha=128)"
    migration = own(tmp_path, OWN.replace("args=training_args", adapter), "--use_peft --lora_dropout 0.2")
    assert (ours(migration, "model.lora.rank"), ours(migration, "model.lora.alpha")) == (64, 128)
    assert [row.key for row in migration.rows if row.key == "LoraConfig.lora_dropout"] == []


def test_arguments_from_a_dictionary_are_reported_beside_flags(tmp_path: Path) -> None:
    migration = own(tmp_path, OWN.replace("args=training_args", "args=training_args, **more"), "")
    assert "settings from a dictionary cannot be read" in note_of(migration, "GRPOTrainer.**")


@pytest.mark.parametrize("name", ["grpo_mine.py", "sft_then_grpo.py"])
def test_a_script_of_ones_own_that_is_named_as_trls_is_read(tmp_path: Path, name: str) -> None:
    written(tmp_path, OWN, name)
    launch = written(tmp_path, f"accelerate launch {name} --model_name_or_path Q/q --learning_rate 1e-5")
    script = read_trl(launch, {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    assert script.kind == "GRPO"
    assert ours(migration, "reward.name") == "right"
    assert ours(migration, "actor.optim.lr") == 1e-5


def test_the_script_with_a_trainer_is_the_training_and_the_line_chooses(tmp_path: Path) -> None:
    written(tmp_path, "import datasets\n", "prep.py")
    written(tmp_path, OWN, "train_own.py")
    one = "python prep.py --out x\naccelerate launch train_own.py --model_name_or_path Q/a\n"
    script = read_trl(written(tmp_path, one), {}, rewards=tmp_path / "r.py")
    assert ours(migrate_trl(script.found, script.kind), "model.path") == "Q/a"
    launch = written(tmp_path, one + "accelerate launch train_own.py --model_name_or_path Q/b\n")
    with pytest.raises(ValueError, match="starts 2 trainings, in lines 2, 3"):
        read_trl(launch, {}, rewards=tmp_path / "r.py")
    script = read_trl(launch, {}, rewards=tmp_path / "r.py", line=3)
    assert ours(migrate_trl(script.found, script.kind), "model.path") == "Q/b"


def test_what_is_assigned_to_a_configuration_is_read_however_the_trainer_gets_it(tmp_path: Path) -> None:
    by_position = OWN.replace(
        "model=model_args.model_name_or_path, reward_funcs=right, args=training_args",
        '"Q/q", right, training_args',
    )
    migration = own(tmp_path, by_position + "    trainer.args.learning_rate = 1e-4\n", "--learning_rate 1e-5")
    assert ours(migration, "algorithm.kl_loss_coef") == 0.04
    note = note_of(migration, "GRPOConfig.learning_rate")
    assert "trainer.args.learning_rate = 0.0001 is assigned when the trainer has been made" in note


def test_a_script_whose_settings_are_flags_says_so_without_them(tmp_path: Path) -> None:
    script = read_trl(written(tmp_path, OWN, "train_own.py"), {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    notes = [row.outcome.note for row in migration.open_rows]
    assert any(
        "its settings come from elsewhere, such as flags: give the launch script" in note for note in notes
    )


def test_an_adapter_without_a_rank_has_that_of_peft(tmp_path: Path) -> None:
    text = OWN.replace("args=training_args", "args=GRPOConfig(), peft_config=LoraConfig(lora_alpha=4)")
    script = read_trl(written(tmp_path, text, "train_own.py"), {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    assert (ours(migration, "model.lora.rank"), ours(migration, "model.lora.alpha")) == (8, 4)


def test_the_command_line_of_trl_is_read(tmp_path: Path) -> None:
    written(
        tmp_path, "learning_rate: 1.0e-5\nnum_train_epochs: 3\nreport_to: [wandb]\nrun_name: a\n", "c.yaml"
    )
    text = (
        'accelerate launch --num_processes 4 trl/scripts/sft.py --config "$(dirname "$0")/c.yaml" '
        "--model_name_or_path Q/q --dtype bfloat16 --model_revision v1 --num_train_epochs 2 --use_peft --lora_r 4 "
        "--per_device_train_batch_size 2 --dataset_name o/rows --eval_strategy steps --dataset_test_split held"
    )
    script = read_trl(written(tmp_path, text), {}, rewards=tmp_path / "r.py")
    assert (script.kind, script.processes) == ("SFT", 4)
    migration = migrate_trl(script.found, script.kind, processes=4)
    assert not migration.open_rows
    assert ours(migration, "model.path") == "Q/q"
    assert ours(migration, "model.revision") == "v1"
    assert ours(migration, "model.lora.rank") == 4
    assert ours(migration, "sft.optim.lr") == 1e-5
    assert ours(migration, "sft.num_epochs") == 2  # of the command, over the file's
    assert ours(migration, "sft.examples_per_update") == 8
    assert ours(migration, "sft.data.train_files") == ["hub:o/rows@train"]
    assert ours(migration, "sft.data.val_files") == ["hub:o/rows@held"]
    assert ours(migration, "trainer.experiment_name") == "a"


REWARD = """\
parser = HfArgumentParser((ScriptArguments, RewardConfig, ModelConfig))
script_args, training_args, model_config = parser.parse_args_into_dataclasses()
model = AutoModelForSequenceClassification.from_pretrained(model_config.model_name_or_path, num_labels=1)
dataset = load_dataset(script_args.dataset_name)
trainer = RewardTrainer(
    model=model, args=training_args, train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
)
"""


def test_rows_of_a_script_that_takes_them_from_flags_are_those_of_the_flags(tmp_path: Path) -> None:
    written(tmp_path, REWARD, "score.py")
    launch = "python score.py --model_name_or_path Q/q --eval_strategy steps --eval_steps 50"
    text = f"{launch} --dataset_name o/pairs --dataset_train_split prefs"
    script = read_trl(written(tmp_path, text), {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    assert not migration.open_rows
    assert ours(migration, "prefer.data.train_files") == ["hub:o/pairs@prefs"]
    assert ours(migration, "prefer.data.val_files") == ["hub:o/pairs@test"]
    # Flags without the data set, or none at all, leave the question open.
    for path in (written(tmp_path, launch), tmp_path / "score.py"):
        script = read_trl(path, {}, rewards=tmp_path / "r.py")
        unsaid = migrate_trl(script.found, script.kind).open_rows
        assert "give the launch script" in next(
            row.outcome.note for row in unsaid if row.key == "RewardTrainer.train_dataset"
        )


def test_a_recipe_may_be_a_word_by_itself(tmp_path: Path) -> None:
    """As alignment-handbook starts its scripts, in the names of older versions of transformers."""
    recipe = "model_name_or_path: Q/q\nmax_length: 20000\nevaluation_strategy: steps\neval_steps: 7\ndataset_name: o/p"
    written(tmp_path, f"{recipe}\nchat_template: '{{{{ messages }}}}'\n", "recipe.yaml")
    text = "accelerate launch --num_processes 2 scripts/run_sft.py recipe.yaml --load_in_4bit=false"
    script = read_trl(written(tmp_path, text), {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    assert not migration.open_rows
    assert ours(migration, "model.chat_template") == "{{ messages }}"
    assert ours(migration, "eval.every") == 7
    assert ours(migration, "sft.data.val_files") == ["hub:o/p@test"]
    assert ours(migration, "sft.engine.max_tokens_per_device") == 20000
    with pytest.raises(ValueError, match=r"names the file other\.yaml, which is not there"):
        read_trl(written(tmp_path, "python run_sft.py other.yaml"), {}, rewards=tmp_path / "r.py")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("num_generations: 8\nmodel_name_or_path: m\n", "GRPO"),
        ("packing: true\nmodel_name_or_path: m\n", "SFT"),
        ("desirable_weight: 1.0\nmodel_name_or_path: m\n", "KTO"),
    ],
)
def test_a_yaml_file_of_trl_says_which_training_it_is_for(tmp_path: Path, text: str, kind: str) -> None:
    assert read_trl(written(tmp_path, text, "c.yaml"), {}, rewards=tmp_path / "r.py").kind == kind


def test_a_yaml_file_that_could_be_for_any_training_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "learning_rate: 1.0e-5\n", "c.yaml")
    with pytest.raises(ValueError, match="does not say which training it is for"):
        read_trl(path, {}, rewards=tmp_path / "r.py")


LOOP = (
    "for algo in grpo rloo; do\n  for s in 1 2; do\n"
    + VERL
    + "algorithm.adv_estimator=$algo data.seed=$s\ndone; done\n"
)


def test_of_a_loop_a_value_is_chosen(tmp_path: Path) -> None:
    notes = {row.key: row.outcome.note for row in of_verl(tmp_path, LOOP).open_rows}
    assert "--set algo=grpo, which is one of grpo, rloo in a loop" in notes["algorithm.adv_estimator"]
    assert "--set s=1, which is one of 1, 2 in a loop" in notes["data.seed"]
    chosen = migrate_verl(read_verl([tmp_path / "run.sh"], {"algo": "rloo", "s": "2"}).found)
    assert not chosen.open_rows
    assert (ours(chosen, "algorithm.adv_estimator"), ours(chosen, "trainer.seed")) == ("rloo", 2)


def test_of_several_trainings_one_is_named_by_its_line(tmp_path: Path) -> None:
    sft = "torchrun -m verl.trainer.sft_trainer data.train_files=s.parquet"
    path = written(tmp_path, f"{sft}\n{VERL} data.train_batch_size=7\n")
    with pytest.raises(
        ValueError, match="starts 2 trainings, in lines 1, 2: say which one, such as --line 1"
    ):
        read_verl([path], {})
    assert ours(migrate_verl(read_verl([path], {}, line=2).found), "data.prompts_per_step") == 7
    assert read_verl([path], {}, line=1).is_sft
    with pytest.raises(ValueError, match="starts no training in line 3, but in 1, 2"):
        read_verl([path], {}, line=3)
    two = written(tmp_path, "trl sft --model_name_or_path a\ntrl dpo --model_name_or_path b\n", "two.sh")
    assert read_trl(two, {}, rewards=tmp_path / "r.py", line=2).kind == "DPO"
    openrlhf = written(tmp_path, "openrlhf.cli.train_sft --l2 0\nopenrlhf.cli.train_rm --l2 1\n", "o.sh")
    assert read_openrlhf(openrlhf, {}, line=2).program == "train_rm"


def test_true_and_false_are_no_texts_among_flags(tmp_path: Path) -> None:
    path = written(
        tmp_path, "trl sft --model_name_or_path m --gradient_checkpointing False --use_liger_kernel true"
    )
    script = read_trl(path, {}, rewards=tmp_path / "r.py")
    migration = migrate_trl(script.found, script.kind)
    assert ours(migration, "model.gradient_checkpointing") is False
    assert ours(migration, "model.use_liger") is True
