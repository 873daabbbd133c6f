"""A sentence about a value quotes what was typed, and its advice is for the place where it was typed."""

from __future__ import annotations

import contextlib
import math
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt

from strop.compat.key_aliases import OPTIONS, OWN, WORDS, aliases_beside, key_aliases
from strop.config import ConfigError, build_config, load_config, load_layers
from strop.config.places import place_of
from strop.config.schema import tree
from strop.config.wrong_values import mismatch
from strop.rewards.config import FunctionConfig
from strop.trainer.config import Config
from strop.utils.field_types import fits, type_name, union_members, without_bounds


def refused(*overrides: str, source: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, source=source, overrides=overrides, aliases=key_aliases)
    return str(caught.value)


@pytest.mark.parametrize("typed", ["7e12345", "1_000", "1.10", "1e5", "True", "0", "-0"])
def test_text_that_looks_like_a_number_is_quoted_as_it_was_typed(typed: str) -> None:
    sentence = refused(f"model.revision={typed}")
    assert sentence.startswith(f"model.revision is {typed}, but it needs text; ")
    advice = sentence.rpartition(": ")[2]
    assert advice == f"""'model.revision="{typed}"'"""
    # What is advised works: the shell takes the outer quotes away.
    assert load_config(Config, overrides=[advice.strip("'")]).model.revision == typed


def test_an_entry_of_a_list_is_quoted_as_it_was_typed() -> None:
    sentence = refused("data.train_files=[a.parquet,7e12345]")
    assert sentence == (
        "data.train_files[1] is 7e12345, but it needs text; to make it text, put it in quotes, inside those of the "
        """shell: '"7e12345"'"""
    )


def test_a_value_in_a_file_has_its_line_and_advice_for_files(tmp_path: Path) -> None:
    source = tmp_path / "my.yaml"
    source.write_text(
        "model:\n  path: somewhere\n  revision: 7e12345\ndata:\n  val_files:\n    - a.parquet\n    - 1_0\n"
        "trainer: {seed: 010,\n  max_steps: 1.50}\nreward:\n  pathh: a\n"
    )
    sentence = refused(source=source)
    text = "but it needs text; to make it text, put it in quotes"
    for expected in (
        f'model.revision is 7e12345 (in {source}, line 3), {text}: "7e12345"',
        f'data.val_files[1] is 1_0 (in {source}, line 7), {text}: "1_0"',
        f"trainer.seed is '010' (in {source}, line 8), but it needs a whole number; write 10",
        f"trainer.max_steps is 1.50 (in {source}, line 9), but it needs a whole number of at least 1 or null",
        f"unknown key reward.pathh (in {source}, line 11); the nearest valid key is reward.path",
    ):
        assert expected in sentence
    assert "shell" not in sentence


def test_an_override_of_a_value_in_a_file_is_the_one_that_is_quoted(tmp_path: Path) -> None:
    source = tmp_path / "my.yaml"
    source.write_text("model: {revision: 1.50}\n")
    assert refused("model.revision=2.50", source=source).startswith(
        "model.revision is 2.50, but it needs text"
    )


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("trainer.seed=010", "; write 10"),
        ('trainer.seed="1_000"', "; write 1000"),
        ('actor.optim.lr="1e-6"', "; write 1e-6 without quotes"),
        ("data.filter_overlong_prompts=on", "; write true"),
        ("data.filter_overlong_prompts=no", "; write false"),
        ("data.filter_overlong_prompts=1", "; write true"),
        ("eval.every=false", "; write 0"),
        ("trainer.max_steps=None", "; for none, write null"),
        ("trainer.max_steps=-1", "; for none, write null"),
        ("data.val_files=null", "; for none, write 'data.val_files=[]'"),
        ("data.val_files=None", "; for none, write 'data.val_files=[]'"),
        (
            'data.train_files="a.parquet, b.parquet"',
            "; for a list, write 'data.train_files=[a.parquet,b.parquet]'",
        ),
        (
            "data.train_files=a.parquet,b.parquet",
            "for a list, write 'data.train_files=[a.parquet,b.parquet]'",
        ),
        (
            """trainer.trackers="['console','wandb']\"""",
            "; without the quotes around it, it is a list: 'trainer.trackers=[console,wandb]'",
        ),
        ("model.revision=null", '; for none, write ""'),
        ("reward.kwargs=null", "; for none, write {}"),
        ("trainer.seed=null", "; leave it out for its default"),
        ("run.keep=0", "; the nearest valid key is run.keep_last"),
        ("rollout.samples=4", "; the nearest valid key is rollout.samples_per_prompt"),
        ("eval.samples=4", "; the nearest valid key is eval.samples_per_prompt"),
        ("data.prompts=4", "; the nearest valid key is data.prompts_per_step"),
        ("data.train=a.jsonl", "; the nearest valid key is data.train_files"),
        ("model.chat=a.jinja", "; the nearest valid key is model.chat_template"),
        ("rollout.max_response=4", "; the nearest valid key is data.max_response_tokens"),
        ("rollout.sampler=uniform", "; the nearest valid key is data.sampler"),
    ],
)
def test_the_value_that_was_meant_is_named(override: str, advice: str) -> None:
    sentence = refused(override)
    assert sentence.endswith(advice)
    advised = shlex.split(
        advice.rpartition("write ")[2].replace(" without quotes", "")
    )  # what the shell gives
    if "write" in advice:
        (written,), key = advised, override.partition("=")[0]
        load_config(Config, overrides=[written if "=" in written else f"{key}={written}"])  # it is taken


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.keep_special_tokens=<think>", ("<think>",)),
        ("model.keep_special_tokens=[<think>]", ("<think>",)),
        ("model.keep_special_tokens=[<think>, </think>]", ("<think>", "</think>")),
        ('model.keep_special_tokens="<think>"', ("<think>",)),
        ('model.keep_special_tokens="<think>,</think>"', ("<think>", "</think>")),
        ('model.keep_special_tokens="[<think>]"', ("<think>",)),
        ("model.keep_special_tokens=[a,<b>,12.jsonl]", ("a", "<b>", "12.jsonl")),
        ('model.keep_special_tokens="12"', ("12",)),
        ('model.keep_special_tokens="true"', ("true",)),
        ("model.keep_special_tokens='say \"x\"'", ('say "x"',)),
        ("data.train_files=it (1).jsonl", ("it (1).jsonl",)),
        ("data.train_files=it's.jsonl", ("it's.jsonl",)),
        ('data.train_files="a\\b.jsonl"', ("a\\b.jsonl",)),
        ("data.train_files=org/name", ("org/name",)),
        ('actor.optim.betas="0.5,0.9"', (0.5, 0.9)),
        ('actor.optim.betas="[0.5, 0.9]"', (0.5, 0.9)),
        ("reward.functions=a.py", (FunctionConfig(path="a.py"),)),
        ('reward.functions="a (1).py"', (FunctionConfig(path="a (1).py"),)),
    ],
)
def test_what_is_advised_for_a_list_is_taken_from_a_shell(override: str, expected: object) -> None:
    # Two steps at most: quotes around a text, then brackets around it.
    key, typed = override.partition("=")[0], override
    for _ in range(2):
        sentence = refused(typed)
        begin = sentence.rindex(f"{key}=")
        (typed,) = shlex.split(sentence[begin - (sentence[begin - 1] == "'") :])
        with contextlib.suppress(ConfigError):
            config = load_config(Config, overrides=[typed])
            break
    assert attrgetter(key)(config) == expected


@pytest.mark.parametrize("override", ["reward.kwargs={a:<b>,c:12}", "reward.kwargs={a: [<b>, 1.5], c: <d>}"])
def test_texts_of_a_mapping_are_put_in_quotes(override: str) -> None:
    advice = refused(override).rpartition("whole: ")[2]
    (typed,) = shlex.split(advice)
    kwargs = load_config(Config, overrides=[typed]).reward.kwargs
    assert kwargs == ({"a": "<b>", "c": 12} if "12" in override else {"a": ["<b>", 1.5], "c": "<d>"})


def test_a_value_that_no_quotes_make_readable_is_answered_without_one() -> None:
    assert refused("data.train_files=[<a>").endswith(
        ", within those of the whole: 'data.train_files=\"...\"'"
    )


@pytest.mark.parametrize(
    ("text", "key", "advice"),
    [
        ("model: {keep_special_tokens: <think>}", "model.keep_special_tokens", '["<think>"]'),
        ("data: {train_files: 'a.jsonl,b.jsonl'}", "data.train_files", '["a.jsonl", "b.jsonl"]'),
        ("data: {val_files: }", "data.val_files", "[]"),
        ("reward: {functions: a.py}", "reward.functions", '[{"path": "a.py"}]'),
        ("actor: {optim: {betas: '[0.5, 0.9]'}}", "actor.optim.betas", "[0.5, 0.9]"),
        ("reward: {path: [<a>.py]}", "reward.path", '"<a>.py", without the brackets'),
    ],
)
def test_what_is_advised_for_a_list_in_a_file_is_taken_there(
    tmp_path: Path, text: str, key: str, advice: str
) -> None:
    source = tmp_path / "my.yaml"
    source.write_text(text)
    sentence = refused(source=source)
    assert sentence.endswith((f"write {advice}", f"it is a list: {advice}"))
    sections = key.split(".")
    source.write_text(
        "".join(f"{{{name}: " for name in sections) + advice.partition(", without")[0] + "}" * len(sections)
    )
    load_config(Config, source=source)


def test_a_type_says_of_which_part_null_is_said() -> None:
    assert type_name(tuple[str, ...] | None) == "list, each entry text; or null"
    assert type_name(dict[str, float] | None) == "mapping of names to a number; or null"
    assert type_name(tuple[int, int] | None) == "list of 2: a whole number, a whole number; or null"
    assert type_name(float | None) == "a number or null"


def test_an_empty_choice_is_shown() -> None:
    assert 'but it needs one of "", otlp, mlflow' in refused("rollout.trace.backend=jaeger")


def test_advice_for_a_program_speaks_of_no_shell() -> None:
    for override, advice in {
        "reward.path=12": 'to make it text, put it in quotes: "12"',
        "data.train_files=a.parquet": 'for a list of one, write ["a.parquet"]',
        "data.train_files=[a.parquet,3]": 'to make it text, put it in quotes: "3"',
    }.items():
        with pytest.raises(ConfigError) as caught:
            build_config(Config, load_layers(Config, overrides=[override], in_shell=False))
        assert str(caught.value).endswith(advice)
        assert "shell" not in str(caught.value)


def test_the_infinity_of_yaml_is_taken_on_the_command_line_too() -> None:
    config = load_config(Config, overrides=["actor.optim.max_grad_norm=.inf"])
    assert config.actor.optim.max_grad_norm == math.inf


def _says_never(bound: object) -> bool:
    return (isinstance(bound, Ge) and bound.ge == 0) or (isinstance(bound, Gt) and bound.gt == 0)


COUNTS = [
    key
    for key, found in tree(Config).items()
    if any(
        without_bounds(member) in (int, float) and any(map(_says_never, getattr(member, "__metadata__", ())))
        for member in union_members(found.hint)
    )
]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (tuple[str, ...] | None, "list, each entry text; or null"),
        (dict[str, str] | tuple[str, ...], "mapping of names to text; or list, each entry text"),
        (int | None, "a whole number or null"),
        (Literal["", "a"], 'one of "", a'),
    ],
)
def test_a_type_in_words_says_what_belongs_together(hint: Any, text: str) -> None:
    assert type_name(hint) == text


@pytest.mark.parametrize("key", COUNTS)
def test_minus_one_is_answered_with_what_says_never(key: str) -> None:
    # Elsewhere -1 says never, all or no limit. Here 0, null or .inf does, where the field takes it for that.
    hint = tree(Config)[key].hint
    sentence = mismatch(key, hint, -1)
    if fits(hint, None):
        assert "null" in sentence.removeprefix(f"{key} is -1, but it needs {type_name(hint)}")
    elif without_bounds(hint) is int:
        assert ": 0 " in sentence
    elif fits(hint, math.inf) and not key.endswith(("temperature", "timeout_s")):
        assert ": .inf " in sentence or ": 0 " in sentence


def test_the_place_of_a_key_in_a_file() -> None:
    text = "a:\n  b: [1, 'x',\n   {c: 0x1}]\n  d: >\n    long\n"
    assert place_of(text, "a.b[0]") == (2, "1")
    assert place_of(text, "a.b[1]") == (2, '"x"')
    assert place_of(text, "a.b[2].c") == (3, "0x1")
    assert place_of(text, "a") == (1, "")
    assert place_of(text, "a.z") is None
    assert place_of("a: [", "a") is None


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("model.dtype=bf16", "; did you mean bfloat16?"),
        ("model.dtype=torch.float16", "; did you mean float16?"),
        ("actor.optim.name=AdamW", "; did you mean adamw?"),
        ("actor.optim.schedule=cosine_with_warmup", "; did you mean cosine?"),
        ("algorithm=GRPO", "; did you mean grpo?"),
        ("algorithm.adv_estimator=GRPO", "Did you mean grpo? "),
        ("resources.device=gpu", "the devices are auto, cuda, npu, cpu; did you mean cuda?"),
        ("resources.device='cuda:1'", "set it to cuda, and choose one by CUDA_VISIBLE_DEVICES=1"),
        ("resources.device='cpu:0'", "is 'cpu:0', but it names a kind of device: set it to cpu"),
        ("actor.optim.betas=0.9", "; write 'actor.optim.betas=[0.9,...]'"),
        ("reward.path=[reward.py]", "; write reward.py, without the brackets"),
        ("reward.functions=a.py", "; for a list of one, write 'reward.functions=[{path:a.py}]'"),
        ("reward.functions=[a.py]", "; write {path:a.py}"),
        ("actor.optim.lr=1e-6,", ": leave out the comma at its end"),
        (
            "data.chat_template_kwargs=enable_thinking=false",
            ": an entry of a mapping is written data.chat_template_kwargs.enable_thinking=false",
        ),
        (
            'data.chat_template_kwargs={"enable_thinking": false, "a": ["b", null]}',
            """: names have no quotes here, as in 'data.chat_template_kwargs={enable_thinking:false,a:["b",null]}'""",
        ),
        ("rollout.n=4", "it is verl's, here rollout.samples_per_prompt (`strop"),
        ("rollout.name=vllm", "it is verl's, here rollout.engine (`strop"),
        ("data.custom_cls.path=x", "it is verl's, here data.dataset_class.path (`strop"),
        (
            "data.apply_chat_template_kwargs.thinking=true",
            "it is verl's, here data.chat_template_kwargs (`strop",
        ),
        ("custom_reward_function.reward_kwargs.x=1", "it is verl's, here reward.kwargs (`strop"),
        ("trainer.logger=wandb", "it is verl's, here trainer.trackers (`strop"),
        ("num_generations=4", "is TRL's, here rollout.samples_per_prompt (`strop"),
        ("n_samples_per_prompt=4", "is OpenRLHF's, here rollout.samples_per_prompt (`strop"),
        ("prompt_max_len=64", "is OpenRLHF's, here data.max_prompt_tokens (`strop"),
        ("data.batch_size=4", "here it is data.prompts_per_step or actor.samples_per_update"),
        ("batch_size=4", "here it is data.prompts_per_step or actor.samples_per_update"),
        ("reward.batch_size=4", "the nearest valid key is reward.server.batch_size"),
        ("actor.micro_batch_size=4", "here it is actor.engine.max_tokens_per_device"),
        ("per_device_train_batch_size=4", "here it is data.prompts_per_step or actor.samples_per_update"),
        ("data.path=x", "here it is data.train_files"),
        ("data.max_length=64", "here it is data.max_prompt_tokens or data.max_response_tokens"),
        ("data.n=4", "here it is rollout.samples_per_prompt"),
        ("eval.n=4", "here it is eval.samples_per_prompt"),
        ("eval.steps=4", "here it is eval.every"),
        ("rollout.max_tokens=4", "here it is data.max_response_tokens"),
        ("rollout.num_samples=4", "here it is rollout.samples_per_prompt"),
        ("rollout.backend=vllm", "here it is rollout.engine"),
        ("rollout.temp=1", "the nearest valid key is rollout.temperature"),
        ("trainer.n_gpus=2", "here it is resources.ranks"),
        ("trainer.epochs=2", "here it is trainer.num_epochs"),
        ("trainer.logging_steps=1", "trainer has the keys seed, num_epochs"),
        ("actor.x=1", "actor has the keys optim, engine"),
        ("trainer.lr=1", "the keys of this name are actor.optim.lr, "),
        ("trainer.total_steps=1", "the nearest valid key is trainer.max_steps"),
        ("actor.lr=1", "the nearest valid key is actor.optim.lr"),
        ("critic.lr=1", "the nearest valid key is critic.optim.lr"),
        ("actor.kl_loss_coef=1", "the nearest valid key is algorithm.kl_loss_coef"),
        ("algorithm.loss_type=dapo", "loss_type is TRL's, here algorithm.loss_agg_mode"),
        ("algorithm.kl_beta=1", "here it is algorithm.kl_loss_coef"),
        ("algorithm.name=grpo", "here it is algorithm.adv_estimator"),
        ("algorithm.lambda=1", "the nearest valid key is algorithm.lam"),
        ("model.name=x", "here it is model.path"),
        ("model.model_path=x", "the nearest valid key is model.path"),
        ("model.lora.r=4", "here it is model.lora.rank"),
        ("reward.fn=x", "here it is reward.path"),
        ("run.name=x", "here it is trainer.experiment_name"),
    ],
)
def test_habits_from_other_libraries_are_answered_with_what_is_written_here(
    override: str, advice: str
) -> None:
    assert advice in refused(override)


@pytest.mark.parametrize(
    ("section", "override", "advice"),
    [
        ("sft", "optim.lr=1", "the nearest valid key is sft.optim.lr"),
        ("sft", "lr=1", "the nearest valid key is sft.optim.lr"),
        ("sft", "learning_rate=1e-5", "is TRL's, here sft.optim.lr (`strop"),
        ("sft", "max_len=512", "is OpenRLHF's, here sft.data.max_tokens"),
        ("sft", "data.max_length=512", "it is verl's, here sft.data.max_tokens (`strop"),
        ("prefer", "beta=0.1", "the nearest valid key is prefer.beta"),
        ("prefer", "learning_rate=1e-6", "is TRL's, here prefer.optim.lr (`strop"),
        ("prefer", "loss_type=ipo", "is TRL's, here prefer.loss (`strop"),
        ("sft", "batch_size=4", "here it is sft.examples_per_update"),
        ("prefer", "train_batch_size=4", "here prefer.examples_per_update"),
        ("", "optim.lr=1", "the keys of this name are actor.optim.lr, "),
        ("", "learning_rate=1e-6", "is TRL's, here actor.optim.lr (`strop"),
    ],
)
def test_an_unknown_key_is_looked_for_among_those_of_the_command(
    section: str, override: str, advice: str
) -> None:
    layers = load_layers(Config, overrides=[override], section=section, aliases=key_aliases)
    (problem,) = layers.problems
    assert advice in problem


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward_model.max_length=9", "reward_model.max_tokens"),
        ("reward.judge.max_length=9", "reward.judge.max_tokens"),
        ("sft.epochs=1", "sft.num_epochs"),
        ("sft.data.max_length=9", "sft.data.max_tokens"),
        ("sft.data.path=x", "sft.data.train_files"),
        ("prefer.data.file=x", "prefer.data.train_files"),
        ("critic.micro_batch_size=1", "critic.engine.max_tokens_per_device"),
        ("critic.engine.micro_batch_size=1", "critic.engine.max_tokens_per_device"),
        ("critic.mini_batch_size=1", "critic.samples_per_update"),
        ("critic.batch_size=1", "critic.samples_per_update"),
        ("reward_model.batch_size=1", "reward_model.engine.max_tokens_per_device"),
        ("reference.per_device_eval_batch_size=1", "reference.engine.max_tokens_per_device"),
        ("critic.learning_rate=1", "critic.optim.lr"),
        ("critic.model.name=x", "critic.path"),
        ("reference.tp=1", "reference.engine.tensor_parallel"),
        ("rollout.sglang.tp=1", "rollout.sglang.tensor_parallel"),
        ("reward.judge.name=x", "reward.judge.model"),
    ],
)
def test_the_section_that_is_written_in_a_key_counts_first(override: str, key: str) -> None:
    assert refused(override) == f"unknown key {override.partition('=')[0]}; here it is {key}"


@pytest.mark.parametrize("override", ["critic.gae_lambda=1", "reward_model.epochs=1", "eval.max_length=9"])
def test_a_word_of_the_loop_means_nothing_in_another_part(override: str) -> None:
    assert "here it is" not in refused(override)


@pytest.mark.parametrize(
    ("section", "override", "key"),
    [
        ("sft", "tp=1", "sft.engine.tensor_parallel"),
        ("sft", "epochs=1", "sft.num_epochs"),
        ("sft", "data.path=x", "sft.data.train_files"),
        ("sft", "model.name=x", "model.path"),
        ("sft", "gpus=2", "resources.ranks"),
        ("prefer", "micro_batch_size=1", "prefer.engine.max_tokens_per_device"),
    ],
)
def test_words_are_those_of_the_command(section: str, override: str, key: str) -> None:
    layers = load_layers(Config, overrides=[override], section=section, aliases=key_aliases)
    assert layers.problems == [f"unknown key {override.partition('=')[0]}; here it is {key}"]
    (other,) = load_layers(Config, overrides=["group_size=2"], section=section, aliases=key_aliases).problems
    assert "here it is" not in other


@pytest.mark.parametrize(
    ("override", "option"), [("trainer.output_dir=x", "out"), ("trainer.resume_mode=auto", "resume")]
)
def test_options_are_named_where_there_are_any(override: str, option: str) -> None:
    def advice(*options: str) -> str:
        (problem,) = load_layers(Config, overrides=[override], aliases=aliases_beside(options)).problems
        return problem

    assert advice("out", "resume").endswith(f"; here it is the option --{option}")
    assert "option" not in advice()
    assert "option" not in advice({"out": "resume", "resume": "out"}[option])


def test_every_word_that_people_try_leads_to_a_key_and_is_none_itself() -> None:
    keys = tree(Config)
    for word, ours in WORDS.items():
        assert set(ours) <= set(keys), word
        assert word not in keys, word
    for word, ends in OWN.items():
        for end in ends:
            assert any(key.endswith(f".{end}") for key in keys), word
    assert not set(OPTIONS) & {*keys, *WORDS, *OWN}


def test_what_is_advised_for_json_is_taken() -> None:
    advised = 'data.chat_template_kwargs={enable_thinking:false,a:["b",null]}'
    config = load_config(Config, overrides=[advised])
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "a": ["b", None]}


def test_a_bound_that_nothing_tests_is_an_error_and_not_passed_over() -> None:
    with pytest.raises(KeyError):
        fits(Annotated[int, object()], 1)
