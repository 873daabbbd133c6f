"""Reasons for which a row of verl or TRL has nothing to set here: each is about them, about a name, or shown by a test.

A reason that names a setting or a command is held against those by test_migration_truth.py.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
from test_migration_tables import TABLES
from test_migration_truth import CALLED, KEY
from torch import nn

from strop.algorithms.group_functions.shaping import overlong_penalty
from strop.engines.config import OptimizerConfig
from strop.engines.optimizer import Optimizer, learning_rate
from strop.trainer.validation_metrics import validation_metrics

TESTS = Path(__file__).parents[1]
OWN = "compat/test_migration_reasons.py"
RUN = "cli/test_cli_migration_reasons.py"

ABOUT_THEM = re.compile(
    r"read (with|by|where)|belongs to|names a class of verl|does nothing in verl|the defaults of verl|a detail of verl"
    r"|says what batches of verl|what multi_turn names is played, as in verl|TRL's PPO does not read"
    r"|nsys takes its options on its own|torchrun's own count|its own rows say|settings go after the command"
)
"""What the other library does with the key, or where else the migration reads it."""

NOT_HERE = {
    "multi-token prediction is neither trained nor used",
    "a reference keeps its own routing",
    "a reference is not trained",
    "weights are not quantized in training",
    "a reward model scores; it does not generate",
    "there is one implementation",
    "there is one way to score",
    "the engine has one way to do this",
}
"""There is no such thing in strop, so that there is nothing to see: no setting has the name, which
test_migration_truth.py checks."""

SAID_ELSEWHERE = {
    "the name of the optimizer says it",
    "the model's own processor says it",
    "the role and the model's folder say it",
    "follows the reward model's folder",
    "the command says it",
    "the run folder is what --out names",
    "the number of steps follows from data and epochs",
    "checkpoints are set under run",
    "the reference is read as the policy is",
}
"""The command line, another setting of the same script, or the folder of a model decides it."""

PACKED = (
    "engines/test_packed_forward.py::test_packed_log_probs_equal_the_models_own_forward",
    "engines/test_packed_forward.py::test_any_token_budget_and_order_gives_the_same_numbers",
)
HEAD = "engines/test_log_prob_head.py::test_no_tensor_of_tokens_times_vocabulary_is_made"
ONE_RANK = "workers/test_roles_on_ranks.py::test_two_ranks_equal_one_process_for_any_cut"
BUDGET = "engines/test_micro_batches.py::test_budget_is_never_exceeded_and_no_row_is_lost"
RESUMED = (
    "trainer/test_kill_and_resume.py::test_a_run_killed_again_and_again_is_the_run_that_was_never_killed"
)
BALANCED = "algorithms/test_balance_parts.py::test_a_real_batch_is_balanced_with_almost_every_prompt_whole"
EVERY_STEP = f"{RUN}::test_every_step_has_its_numbers"

PROFILED = "trainer/test_profiled_runs.py::test_two_processes_and_generation_apart"

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "a reward model learns nothing here, and is read from its Hugging Face folder": (
        "trainer/test_megatron_runs.py::test_critic_and_reward_model_are_divided_as_well",
    ),
    "weights are read from and written to Hugging Face folders, by strop's own map": (
        "engines/test_megatron_weights.py::test_checkpoints_move_between_the_engines",
    ),
    "checkpoints are strop's own, and move between engines and meshes": (
        "engines/test_megatron_weights.py::test_checkpoints_move_between_the_engines",
    ),
    "every role and rank is profiled": (PROFILED,),
    "a profile has one form": (PROFILED,),
    "each profiled step has a folder of its own": (PROFILED,),
    "profiles are in the run folder": (PROFILED,),
    "every step is logged": (EVERY_STEP,),
    "log-probs of the starting model are computed once, before the first step": (
        "trainer/preference/test_preference_runs.py::test_what_the_starting_model_said_is_kept_and_missed",
    ),
    "the entropy is always measured": (EVERY_STEP,),
    "how far both differ is always measured": (EVERY_STEP, "workers/test_metrics.py::test_mismatch_by_hand"),
    "critic/score and critic/rewards differ by it": (EVERY_STEP,),
    "the last step is always validated": (f"{RUN}::test_the_last_step_is_validated",),
    "log-probs of sampled tokens are always recorded": (
        f"{RUN}::test_samples_keep_tokens_text_and_log_probs",
    ),
    "the order of validation changes no metric": (f"{OWN}::test_the_order_of_validation_changes_no_metric",),
    "the first step already warms up": (f"{OWN}::test_the_first_step_already_warms_up",),
    "the critic has an optimizer of its own, and a step of Adam does not grow with its loss": (
        f"{OWN}::test_a_step_of_adam_does_not_grow_with_its_loss",
        "workers/test_critic.py::test_loss_gradient_and_metrics_are_those_of_an_independent_reference",
    ),
    "dropout is always off": (
        "engines/test_model_loading.py::test_supported_architectures_load_without_dropout",
    ),
    "sequences are always packed": PACKED,
    "sequences are never padded": PACKED,
    "sequences are always packed, never padded": PACKED,
    "sequences are always packed, each attending to itself alone": PACKED,
    "sequences are always packed, and never cut to fit": (*PACKED, BUDGET),
    "micro-batches are packed, of any length": (BUDGET, PACKED[1]),
    "batches are always cut by tokens": (BUDGET,),
    "tokens are counted, not estimated": (BUDGET,),
    "samples of one prompt share it": (
        "engines/test_packed_forward.py::test_shared_prompt_equals_separate_prompts",
    ),
    "log-probs never need the logits of all tokens at once": (HEAD,),
    "it compiles the entropy; ours is computed in chunks": (HEAD,),
    "always computed in chunks": (HEAD,),
    "always computed in chunks, and recomputed for the gradient": (HEAD,),
    "log-probs are always computed in float32": (
        "engines/test_log_prob_head.py::test_bfloat16_hidden_states_give_float32_log_probs_and_weight_gradients",
    ),
    "terms are not clamped: a log-prob is finite here": (
        "engines/test_log_prob_head.py::test_extreme_logits_stay_finite",
    ),
    "losses are averaged over all ranks": (ONE_RANK,),
    "ranks are always sharded (FSDP2)": ("engines/test_fsdp_invariance.py::test_two_ranks_are_one",),
    "samples are cut in a fixed order": ("algorithms/test_balance.py::test_even_bounds_by_hand",),
    "work is always balanced": (BALANCED,),
    "work is always balanced over the ranks": (BALANCED,),
    "a resume loads everything": (RESUMED,),
    "a checkpoint holds what a resume needs": (RESUMED,),
    "checkpoints hold every role": (
        "workers/test_roles_on_ranks.py::test_roles_saved_by_two_ranks_continue_in_one_process",
    ),
    "rows are shuffled anew for every epoch": (
        "data/test_curriculum.py::test_shuffled_is_the_permutation_of_seed_and_epoch",
        "data/test_sampler.py::test_every_epoch_visits_each_row_once",
    ),
    "tokens are appended turn by turn, and never encoded again": (
        "agents/tools/test_exact_tokens.py::test_every_sampled_token_is_trained_once_and_none_besides",
    ),
    "the conversation is rendered again with its own template": (
        "workers/test_reward_model.py::test_scores_are_those_of_transformers",
    ),
    "tokens are those of the whole conversation": (
        "trainer/sft/test_sft_conversations.py::test_tokens_before_a_turn_are_the_prompt_a_rollout_is_given",
    ),
    "conversations of any number of turns are read": (
        "trainer/sft/test_fine_tuning.py::test_a_conversation_with_several_turns_trains_all_answers_and_no_question",
    ),
    "weights go to the rollout in one verified exchange": (
        "rollout/test_weight_sync.py::test_every_bit_arrives_in_two_syncs_in_a_row",
        "rollout/test_weight_sync.py::test_the_digest_of_all_weights_is_compared_too",
    ),
    "every request is answered for itself, as with async": (
        "rollout/test_native_generation.py::test_requests_that_come_while_others_run_change_nothing",
    ),
    "the place of a failed sample stays empty": (
        "trainer/test_experience.py::test_a_sample_without_score_is_left_out_or_counts_as_zero",
    ),
    "computed when the estimator needs it": (
        "workers/test_actor.py::test_the_sums_of_the_token_baselines_come_with_the_old_log_probs_in_one_pass",
    ),
}
"""What strop does, and the tests that show it, below tests/."""

NOT_SHOWN = {
    "a reference has no entropy to compute",
    "a trace holds tokens as text",
    "answers are scored as they end",
    "columns go from worker to worker",
    "gradients are reduced in float32",
    "gradients go with the parameters",
    "hidden states stay inside the engine",
    "rows are read once",
    "rows are read once, at the start",
    "the filter needs no workers",
    "validation is one batch of any size",
    "weights are read once",
    "workers see the folder that the run was started in",
}
"""How strop is built: nothing that a user sees depends on it, and no test shows it by itself."""


def reasons() -> set[str]:
    """Sentences of rows that have nothing to set, and name neither a setting nor a command."""
    said = {
        row["not_needed"]
        for name, table in TABLES.items()
        if not name.startswith("openrlhf")
        for row in table.rows.values()
        if "not_needed" in row
    }
    return {text for text in said if not KEY.search(text) and not CALLED.search(text)}


@functools.cache
def functions_in(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_reason_is_about_them_or_named_or_shown() -> None:
    groups: tuple[set[str], ...] = (NOT_HERE, SAID_ELSEWHERE, set(SHOWN_BY), NOT_SHOWN)
    found = reasons()
    wrong = {
        text: count
        for text in found
        if (count := bool(ABOUT_THEM.search(text)) + sum(text in group for group in groups)) != 1
    }
    assert wrong == {}
    assert set().union(*groups) - found == set(), "no row says it any more"


@pytest.mark.parametrize("name", sorted({one for tests in SHOWN_BY.values() for one in tests}))
def test_a_test_that_shows_a_reason_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions_in(file)


def test_the_order_of_validation_changes_no_metric() -> None:
    rows = [("a", "p", 1.0), ("a", "p", 0.0), ("b", "q", 0.5), ("a", "r", 1.0), ("a", "r", 1.0)]

    def metrics(order: list[int]) -> dict[str, float]:
        sources, uids, scores = zip(*(rows[number] for number in order), strict=True)
        return validation_metrics(data_sources=sources, uids=uids, variables={"reward": scores})

    assert metrics([0, 1, 2, 3, 4]) == pytest.approx(metrics([3, 2, 0, 4, 1]), abs=1e-12)


def test_the_first_step_already_warms_up() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, None) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_step_of_adam_does_not_grow_with_its_loss() -> None:
    """TRL's vf_coef scales the loss of the values; from its default to 1, the same steps are taken."""

    def trained(coef: float) -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        config = OptimizerConfig(lr=0.1, max_grad_norm=float("inf"), weight_decay=0.0)
        optimizer = Optimizer([("weight", weight)], config, total_steps=None)
        for _ in range(5):
            weight.grad = None
            (coef * (weight - torch.tensor([0.5, 4.0, -1.0], dtype=torch.float64)).square().sum()).backward()
            optimizer.step()
        return weight.detach()

    assert torch.allclose(trained(0.1), trained(1.0), atol=1e-7)
    assert (trained(1.0) - torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)).abs().min() > 0.1


def test_a_missing_end_costs_what_trl_takes_off() -> None:
    """`missing_eos_penalty` p is overlong_buffer=1 with overlong_penalty=p: off full responses, and no other."""
    taken_off = overlong_penalty(torch.tensor([1, 52, 53]), max_tokens=53, buffer_tokens=1, factor=2.0)
    assert taken_off.tolist() == [0.0, 0.0, -2.0]
