"""Which roles a configuration has, where they go, and what is refused before a device is touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_runs import Project

from strop.config import ConfigError, load_config
from strop.controller import Mesh, RoleSpec
from strop.trainer.checks.models import check_models
from strop.trainer.config import Config
from strop.trainer.role_specs import role_specs
from strop.trainer.start import resume_run, start_run
from strop.trainer.worker_groups import rollout_settings


def config(*overrides: str) -> Config:
    return load_config(Config, overrides=["model.path=somewhere", *overrides])


def roles(*overrides: str) -> dict[str, RoleSpec]:  # type: ignore[type-arg]
    settings = config(*overrides)
    return dict(role_specs(settings, rollout_settings(settings), num_steps=10))


def test_grpo_has_an_actor_and_a_rollout() -> None:
    assert list(roles()) == ["actor", "rollout"]


def test_ppo_has_a_critic_and_a_reference_too() -> None:
    assert list(roles("algorithm=ppo")) == ["actor", "critic", "reference", "rollout"]


def test_with_lora_the_actor_is_its_own_reference() -> None:
    settings = ["algorithm.use_kl_loss=true", "reference.engine.max_tokens_per_device=64"]
    assert list(roles(*settings, "model.lora.rank=4")) == ["actor", "rollout"]
    with pytest.raises(
        ConfigError, match="reference.engine.max_tokens_per_device is 64, but one sample may have"
    ):
        roles(*settings)  # where there is one, its limits count


def test_a_horizon_that_a_step_exceeds_is_refused_before_the_run() -> None:
    """A step has 2 x 10 samples, of which a fifth is the whole horizon."""
    settings = ["data.prompts_per_step=2", "rollout.samples_per_prompt=10", "algorithm.kl_ctrl.type=adaptive"]
    with pytest.raises(ConfigError, match=r"horizon is 4 samples, but one step has 20, .* set it above 4"):
        roles(*settings, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=4")
    roles(*settings, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=5")
    roles(*settings, "algorithm.kl_ctrl.horizon=4")  # which nothing follows


def test_a_reward_model_is_a_role_and_lets_the_rollout_keep_texts() -> None:
    specs = roles("reward_model.path=judge")
    assert list(specs) == ["actor", "reward_model", "rollout"]
    assert specs["rollout"].args[-1].keeps_text
    assert not roles()["rollout"].args[-1].keeps_text


def test_meshes_follow_ranks_apart_and_sequence_parallelism() -> None:
    specs = roles(
        "algorithm=ppo", "resources.runtime=ray", "resources.ranks=8", "resources.apart={critic: 4, rollout: 3}",
        "actor.engine.sequence_parallel=2", "critic.engine.sequence_parallel=4",
    )  # fmt: skip
    assert {name: spec.mesh for name, spec in specs.items()} == {
        "actor": Mesh(dp=4, sp=2),
        "critic": Mesh(dp=1, sp=4),
        "reference": Mesh(dp=8),
        "rollout": Mesh(dp=3),
    }
    cut = roles("resources.runtime=ray", "resources.ranks=8", "actor.engine.tensor_parallel=4")
    assert {name: spec.mesh for name, spec in cut.items()} == {
        "actor": Mesh(dp=2, tp=4),
        "rollout": Mesh(dp=8),
    }
    rows = roles("resources.runtime=ray", "resources.ranks=8", "actor.engine.context_parallel=4")
    assert rows["actor"].mesh == Mesh(dp=2, cp=4)
    assert specs["rollout"].args[-1].share_with is None
    assert roles()["rollout"].args[-1].share_with == "actor"


def test_schedules_end_with_the_last_update_of_their_own_role() -> None:
    specs = roles(
        "algorithm=ppo", "data.prompts_per_step=10", "rollout.samples_per_prompt=2", "actor.samples_per_update=8",
        "critic.samples_per_update=5", "critic.epochs=3",
    )  # fmt: skip
    assert specs["actor"].args[-1].num_updates == 10 * 3, "20 samples in parts of 7, 7 and 6"
    assert specs["critic"].args[-1].num_updates == 10 * 4 * 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["resources.ranks=2"], "resources.runtime=inline is one process: set resources.runtime=ray"),
        (["resources.apart={rollout: 1}"], "resources.apart is set, but resources.runtime=inline"),
        (
            ["resources.runtime=ray", "resources.apart={actor: 2}"],
            "'actor', which is no role that can be apart",
        ),
        (
            ["resources.runtime=ray", "resources.apart={critic: 2}"],
            "names critic, but this run has no such role",
        ),
        (["resources.runtime=ray", "resources.apart={rollout: 0}"], "resources.apart.rollout is 0"),
        (
            ["resources.runtime=ray", "resources.ranks=3", "resources.nodes=2"],
            "which 2 nodes cannot share evenly",
        ),
        (
            ["resources.runtime=ray", "resources.ranks=3", "actor.engine.sequence_parallel=2"],
            "actor.engine.sequence_parallel is 2, which does not divide the 3 ranks",
        ),
        (
            ["resources.runtime=ray", "resources.ranks=3", "actor.engine.context_parallel=2"],
            "actor.engine.context_parallel is 2, which does not divide the 3 ranks of the role: choose one of 1, 3",
        ),
        (
            ["actor.engine.tensor_parallel=2"],
            "the role has one rank: more of them come with resources.runtime=ray resources.ranks=2",
        ),
        (
            ["actor.engine.pipeline_chunks=2"],
            "actor.engine.pipeline_chunks=2 says how stages are made, but actor.engine.pipeline_parallel is 1",
        ),
        (
            ["actor.engine.pipeline_schedule=zero_bubble"],
            "actor.engine.pipeline_schedule is zero_bubble, an order of the passes of several stages, but",
        ),
        (
            [
                "actor.engine.pipeline_schedule=zero_bubble",
                "actor.engine.pipeline_parallel=2",
                "actor.engine.pipeline_chunks=2",
            ],
            "actor.engine.pipeline_schedule is zero_bubble and actor.engine.pipeline_chunks is 2, but it is an order",
        ),
        (
            ["actor.engine.pipeline_parallel=2", "actor.engine.pipeline_layers=[5,-1]"],
            "actor.engine.pipeline_layers[1] is -1, but it needs a whole number of at least 1",
        ),
        (
            ["resources.runtime=ray", "resources.ranks=2", "resources.nodes=2", "resources.min_nodes=3"],
            "resources.min_nodes is 3, but the run is asked for 2 nodes",
        ),
        (
            [
                "resources.runtime=ray",
                "resources.ranks=4",
                "resources.nodes=4",
                "resources.min_nodes=1",
                "actor.engine.tensor_parallel=2",
            ],
            "resources.min_nodes is 1, on which the run could not go on: actor.engine.tensor_parallel is 2, but the",
        ),
        (
            ["resources.runtime=ray", "resources.ranks=3", "actor.engine.tensor_parallel=2"],
            "actor.engine.tensor_parallel is 2, which does not divide the 3 ranks",
        ),
        (
            [
                "resources.runtime=ray",
                "resources.ranks=4",
                "actor.engine.tensor_parallel=2",
                "actor.engine.shard_size=4",
            ],
            "actor.engine.shard_size is 4, which does not divide the 4 ranks of the role, of which the other axes leav",
        ),
        (
            [
                "resources.runtime=ray",
                "resources.ranks=4",
                "actor.engine.tensor_parallel=2",
                "actor.engine.sequence_parallel=2",
            ],
            "which both share the tokens of a sequence out",
        ),
        *(
            (
                ["resources.runtime=ray", "resources.ranks=2", "actor.engine.tensor_parallel=2", setting],
                f"actor.engine.tensor_parallel is 2, which does not go with {setting}: set that to ",
            )
            for setting in (
                "actor.engine.offload_activations=true",
                "actor.engine.compile=true",
                "actor.optim.name=adamw_8bit",
            )
        ),
        (
            [
                "resources.runtime=ray",
                "resources.ranks=2",
                "actor.engine.pipeline_parallel=2",
                "actor.engine.pipeline_schedule=zero_bubble",
                "actor.engine.compile=true",
            ],
            "actor.engine.pipeline_schedule is zero_bubble, which does not go with actor.engine.compile=true",
        ),
        (
            [
                "resources.runtime=ray",
                "rollout.engine=vllm",
                "rollout.vllm={tensor_parallel: 2, pipeline_parallel: 2}",
            ],
            "spans tensor_parallel x pipeline_parallel = 4 devices, but the processes of the trainer have one each",
        ),
        (["critic.path=x"], "critic.path is 'x', but algorithm.adv_estimator=grpo uses no values"),
        (["reference.path=x"], "but nothing uses a reference model"),
        (["trainer.critic_warmup=3"], "trainer.critic_warmup is 3, but algorithm.adv_estimator=grpo"),
        (["reward.weight=0"], "every reward would be 0: set reward_model.path"),
        (
            ["algorithm=ppo", "critic.engine.max_tokens_per_device=10"],
            "critic.engine.max_tokens_per_device is 10",
        ),
        (
            ["algorithm.use_kl_loss=true", "model.lora.rank=4", "reference.path=x"],
            "with model.lora the reference is the model without its adapter",
        ),
        (
            ["resources.weight_store=/shared"],
            "to which no weights are sent: set resources.apart={rollout: N}",
        ),
        (
            ["resources.weight_store=weights"],
            "means another folder in each process: give an absolute path or a URL",
        ),
        (["run.hf_model=sometimes"], "run.hf_model"),
        (["resources.call_timeout_s=0"], "resources.call_timeout_s is 0"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_heads_that_ranks_cannot_share_are_refused_before_any_process_starts(
    project: Project, role: str
) -> None:
    settings = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "resources.runtime=ray"]
    divided = project.config(*settings, "resources.ranks=8", f"{role}.engine.sequence_parallel=8")
    with pytest.raises(ValueError, match=rf"^{role}.engine.sequence_parallel is 8, but the 2 attention"):
        check_models(divided)
    check_models(project.config(*settings, "resources.ranks=8", f"{role}.engine.sequence_parallel=2"))
    cut = project.config(*settings, "resources.ranks=4", f"{role}.engine.tensor_parallel=4")
    with pytest.raises(
        ValueError, match=rf"^{role}.engine.tensor_parallel is 4, but the 2 attention heads .* 1, 2$"
    ):
        check_models(cut)
    check_models(project.config(*settings, "resources.ranks=4", f"{role}.engine.tensor_parallel=2"))
    check_models(
        project.config("resources.runtime=ray", "resources.ranks=8", "critic.engine.sequence_parallel=8")
    )


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_positions_that_ranks_cannot_know_are_refused_before_any_process_starts(
    project: Project, role: str
) -> None:
    config = project.config(
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "resources.runtime=ray",
        "resources.ranks=3", f"{role}.engine.context_parallel=3",
    )  # fmt: skip
    check_models(config)  # the 2 heads need not divide
    grows = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    growing = dataclasses.replace(config, model=dataclasses.replace(config.model, override_config=grows))
    with pytest.raises(
        ValueError, match=rf"^{role}.engine.context_parallel is 3, but .* of type 'dynamic' depends"
    ):
        check_models(growing)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["reference.path=nosuch", "algorithm.use_kl_loss=true"], "reference.path"),
        (["reward_model.path=nosuch"], "reward_model.path"),
        (["critic.path=nosuch", "algorithm.adv_estimator=gae"], "critic.path"),
        (["model.path=nosuch", "algorithm.adv_estimator=gae"], "model.path"),
    ],
)
def test_a_model_that_is_not_there_is_named_before_any_other_is_loaded(
    project: Project, settings: list[str], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{key}.*'nosuch' is not a folder"):
        check_models(project.config(*settings))


def test_a_run_is_continued_on_other_resources_only(project: Project, tmp_path: Path) -> None:
    start_run(tmp_path / "run", project.config(), command=["strop", "train"]).run.close()
    start = resume_run(tmp_path / "run", overrides=["resources.call_timeout_s=7"], say=lambda line: None)
    start.run.close()
    assert start.config.resources.call_timeout_s == 7
    assert start.config.actor == project.config().actor
    with pytest.raises(ConfigError, match=r"trainer.seed is .* would make it another one"):
        resume_run(tmp_path / "run", overrides=["trainer.seed=1"], say=lambda line: None)


def test_a_section_at_several_places_says_which_one_was_meant() -> None:
    warm_up = ["critic.optim.warmup_steps=4", "critic.optim.warmup_share=0.1"]
    with pytest.raises(
        ConfigError, match=r"^critic.optim.warmup_steps is 4 and critic.optim.warmup_share is 0.1"
    ):
        load_config(Config, overrides=["algorithm=ppo", *warm_up])
    with pytest.raises(ConfigError, match=r"^critic.lora.path is 'there', but critic.lora.rank is 0"):
        load_config(Config, overrides=["algorithm=ppo", "critic.lora.path=there"])


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        (["actor.samples_per_update=8"], {"actor": 10 * 4}),
        # A policy has no optimizer steps while its critic warms up.
        (
            ["algorithm=ppo", "trainer.critic_warmup=3", "critic.samples_per_update=16"],
            {"actor": 7, "critic": 10 * 2},
        ),
        # The best 3 of each prompt: 12 samples, in two optimizer steps of 6.
        (["actor.samples_per_update=8", "actor.epochs=3", "algorithm.keep.best=3"], {"actor": 10 * 2 * 3}),
        (["actor.samples_per_update=8", "algorithm.keep.best=99"], {"actor": 10 * 4}),
        # A process reward model learns from all of them.
        (
            ["algorithm.adv_estimator=prime", "prm.samples_per_update=8", "algorithm.keep.best=1"],
            {"actor": 10, "prm": 10 * 4},
        ),
    ],
)  # fmt: skip
def test_schedules_end_with_the_last_optimizer_step(overrides: list[str], updates: dict[str, int]) -> None:
    sizes = ["data.prompts_per_step=4", "rollout.samples_per_prompt=8"]
    settings = config(*overrides, *sizes)
    assert {
        name: settings.updates_of_run(getattr(settings, name), num_steps=10) for name in updates
    } == updates
    specs = role_specs(settings, rollout_settings(settings), num_steps=10)
    assert all(specs[name].args[-1].num_updates == number for name, number in updates.items())


def test_the_line_about_sizes_says_how_many_samples_are_kept() -> None:
    settings = config("actor.samples_per_update=6", "algorithm.keep.best=3", "data.prompts_per_step=4")
    assert "32 samples/step, 12 of them trained on -> 2 optimizer steps of 6" in settings.arithmetic()
