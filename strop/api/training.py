"""strop.train, strop.sft, strop.evaluate: the programs of the commands, called with what is in memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from strop.api.arguments import check_names, named_arguments
from strop.api.callbacks import FunctionCallbacks
from strop.api.calls import begun_run, carrying_out, folder_of, resume_hint, run_work, say
from strop.api.inputs import Reward, Rows, column_settings, data_files, model_folder, reward_settings
from strop.api.live_plot import Picture, in_notebook
from strop.api.overrides import Settings, override_of, overrides_of
from strop.api.results import Result
from strop.compat.key_aliases import key_aliases
from strop.run import MODEL_FOLDER, RunFolder, is_run
from strop.run.folder import CONFIG_FILE
from strop.trainer.early_stopping import train_result
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.loading import load
from strop.trainer.named_files import check_named_files
from strop.utils.quiet_libraries import quiet_libraries


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """The settings that a run of GRPO is most often given; None leaves a setting as it is.

    `strop.train(..., algorithm=strop.GRPO(samples_per_prompt=16))` is `algorithm="grpo"` with these.
    """

    samples_per_prompt: int | None = None
    """num_generations in TRL, rollout.n in verl."""
    prompts_per_step: int | None = None
    """Prompts of one step; train_batch_size in verl."""
    learning_rate: float | None = None
    temperature: float | None = None
    max_response_tokens: int | None = None
    kl_coef: float | None = None
    """Coefficient of a KL term in the loss; beta in TRL."""
    clip: float | None = None
    """Clip range of the ratio, on both sides of 1; epsilon in TRL."""
    clip_high: float | None = None
    """Clip range above 1, where that is another one; epsilon_high in TRL."""
    scale_rewards: bool | None = None
    """Divide advantages by the standard deviation of their group."""
    steps: int | None = None
    """At most so many; otherwise the data is visited `epochs` times."""
    epochs: int | None = None
    seed: int | None = None

    def __new__(cls, **given: Any) -> GRPO:
        """Refuse names that are not among these, naming the nearest."""
        check_names("GRPO()", given, _KEYS, elsewhere=_ELSEWHERE)
        return super().__new__(cls)

    def settings(self) -> dict[str, Any]:
        """Arguments that were given, by key of the configuration."""
        arguments = {member.name: getattr(self, member.name) for member in fields(self)}
        values = {_KEYS[name]: value for name, value in arguments.items() if value is not None}
        if self.kl_coef:
            values["algorithm.use_kl_loss"] = True
        return values


_KEYS = {
    "samples_per_prompt": "rollout.samples_per_prompt",
    "prompts_per_step": "data.prompts_per_step",
    "learning_rate": "actor.optim.lr",
    "temperature": "rollout.temperature",
    "max_response_tokens": "data.max_response_tokens",
    "kl_coef": "algorithm.kl_loss_coef",
    "clip": "algorithm.clip_ratio",
    "clip_high": "algorithm.clip_ratio_high",
    "scale_rewards": "algorithm.norm_adv_by_std",
    "steps": "trainer.max_steps",
    "epochs": "trainer.num_epochs",
    "seed": "trainer.seed",
}
_ELSEWHERE = {
    "num_generations": "samples_per_prompt",
    "n": "samples_per_prompt",
    "train_batch_size": "prompts_per_step",
    "lr": "learning_rate",
    "max_completion_length": "max_response_tokens",
    "beta": "kl_coef",
    "epsilon": "clip",
    "epsilon_high": "clip_high",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
}
"""Names of these arguments in TRL and verl."""


def _algorithm_settings(algorithm: str | GRPO | None) -> dict[str, Any]:
    """Settings by key of a preset.

    Raises:
        ValueError: it is neither its name nor GRPO(...).
    """
    if isinstance(algorithm, GRPO):
        return {"algorithm": "grpo", **algorithm.settings()}
    if not isinstance(algorithm, str | None):
        raise ValueError(
            f"algorithm is {algorithm!r}: give the name of a preset ('grpo'), or strop.GRPO(...)"
        )
    return {"algorithm": algorithm} if algorithm else {}


@named_arguments
@quiet_libraries()
def train(
    model: Any = None,
    rewards: Reward | Sequence[Reward] = (),
    data: Rows = None,
    *,
    val_data: Rows = None,
    algorithm: str | GRPO = "",
    reward_weights: Sequence[float] | None = None,
    tokenizer: Any = None,
    config: str | Path | None = None,
    settings: Settings = (),
    out: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    force: bool = False,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    on_samples: Callable[[int, Sequence[Mapping[str, Any]]], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
) -> Result:
    """Reinforcement learning from rewards: `strop train`, with what is in memory.

    Args:
        model: a folder, a name on a hub, or a loaded model of transformers.
        rewards: functions `f(prompts, completions, **columns)` of TRL's form or `compute_score(data_source,
            solution_str, ground_truth, extra_info)` of verl's, or their files; none: the scorer of the data source.
        data: rows with the columns of either: files, a datasets.Dataset, a DataFrame, or a list of dictionaries.
        val_data: rows to validate on.
        algorithm: name of a preset (`grpo`, `dapo`, `rloo`, ...), or GRPO(...).
        reward_weights: of each reward in the sum; 1 where not given.
        tokenizer: of a loaded model, where it does not say where it came from.
        config: a file of settings, beneath all others.
        settings: any others, above all.
        out: the run folder, absent or empty; what is in memory is written to the folder `<out>-inputs` beside it. Not
            given: one below runs/ with the time in its name.
        resume: go on with the run in `out`; settings are those that may be given anew.
        accept_changes: with `resume`, go on although data, models or rewards that the run reads are not what it began
            with; each change is told.
        force: start also where the preflight says that nothing would be learned.
        on_step: called after each step with its number and metrics. A text that it returns ends the run, and is why.
        on_samples: called after each step with its samples, as `Result.samples` has them.
        on_checkpoint: called with each checkpoint, when it is whole, and its folder.

    Raises:
        ConfigError, ValueError, RunError: the sentence says what cannot be used.
        RunRefused: the preflight says that nothing would be learned.
    """
    callbacks = FunctionCallbacks(on_step=on_step, on_samples=on_samples, on_checkpoint=on_checkpoint)
    of_algorithm = _algorithm_settings(algorithm)

    def given(inputs: Path) -> dict[str, Any]:
        return {
            **of_algorithm,
            **_input_settings(
                model, tokenizer, {"data.train_files": data, "data.val_files": val_data}, inputs
            ),
            **column_settings(data),
            **reward_settings(rewards, reward_weights, inputs),
        }

    folder = folder_of(out, "train")
    begun = begun_run(
        folder, given, config, settings, kind="train", resume=resume, accept_changes=accept_changes
    )
    with begun as start:
        stop = SignalRequest()

        def work() -> Result:
            with carrying_out(start.run) as run, _with_picture(folder, callbacks) as all_callbacks:
                if not start.is_finished:
                    from strop.trainer.train import train as train_run  # torch and transformers: seconds

                    train_run(
                        start.config,
                        run,
                        checkpoint=start.checkpoint,
                        say=say,
                        force=force,
                        stop=stop,
                        callbacks=all_callbacks,
                    )
                _link_model(run)
                return _result_of(run)

        with resume_hint("train", folder):
            return run_work(work, stop)


@named_arguments
@quiet_libraries()
def sft(
    model: Any = None,
    data: Rows = None,
    *,
    val_data: Rows = None,
    tokenizer: Any = None,
    config: str | Path | None = None,
    settings: Settings = (),
    out: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
) -> Result:
    """Supervised fine-tuning on conversations: `strop sft`, with what is in memory.

    Args:
        model, tokenizer, config, settings, out, resume, accept_changes: as for `train`.
        data: rows with `messages`, or `prompt` and `completion`.
        val_data: rows to measure the loss on.

    Raises:
        ConfigError, ValueError, RunError: the sentence says what cannot be used.
    """

    def given(inputs: Path) -> dict[str, Any]:
        rows = {"sft.data.train_files": data, "sft.data.val_files": val_data}
        return _input_settings(model, tokenizer, rows, inputs)

    folder = folder_of(out, "sft")
    begun = begun_run(
        folder, given, config, settings, kind="sft", resume=resume, accept_changes=accept_changes
    )
    with begun as start:
        stop = SignalRequest()

        def work() -> Result:
            with carrying_out(start.run) as run:
                from strop.trainer.sft.result import sft_result  # torch and transformers: seconds

                if not start.is_finished:
                    from strop.trainer.sft.trainer import fine_tune

                    fine_tune(start.config, run, checkpoint=start.checkpoint, say=say, stop=stop)
                _link_model(run)
                result = sft_result(run)
            return Result(
                run=result.run,
                steps=result.steps,
                seconds=result.seconds,
                loss=result.loss,
                val_loss=result.val_loss,
            )

        with resume_hint("sft", folder):
            return run_work(work, stop)


@named_arguments
@quiet_libraries()
def evaluate(
    model: Any = None,
    data: Rows = None,
    *,
    rewards: Reward | Sequence[Reward] = (),
    reward_weights: Sequence[float] | None = None,
    tokenizer: Any = None,
    config: str | Path | None = None,
    settings: Settings = (),
) -> Result:
    """The pass rate of a model on a dataset: `strop eval`, with what is in memory.

    Args:
        model: as for `train`; also a run folder, whose settings are used beneath all others.
        data, rewards, reward_weights, tokenizer, config, settings: as for `train`.

    Returns:
        pass_rate_start and pass_rate_final are both that of the model; samples() has the answers.

    Raises:
        ConfigError, ValueError: the sentence says what cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="strop-evaluate-") as name:
        model_settings: dict[str, Any] = {}
        if isinstance(model, str | Path) and is_run(Path(model)):
            config = Path(model) / CONFIG_FILE if config is None else config
            model_settings |= {"model.path": str(Path(model) / MODEL_FOLDER), "resources.runtime": "inline"}
            model_settings |= {"resources.ranks": 1, "resources.nodes": 1, "resources.apart": {}}
            model = None
        model_settings |= _input_settings(
            model, tokenizer, {"data.val_files": data}, Path(name)
        ) | column_settings(data)
        model_settings |= reward_settings(rewards, reward_weights, Path(name))
        overrides = [*map(override_of, model_settings.items()), *overrides_of(settings)]
        loaded = load(config, overrides=overrides, in_shell=False, aliases=key_aliases)
        check_named_files(loaded, "eval")
        from strop.evaluation.evaluate import evaluate as evaluate_model  # torch and transformers: seconds

        evaluation = run_work(lambda: evaluate_model(loaded, say=say), SignalRequest())
    rate = evaluation.total.pass_rate
    return Result(
        run=None,
        seconds=evaluation.seconds,
        pass_rate_start=rate,
        pass_rate_final=rate,
        reward_start=evaluation.total.mean_reward,
        reward_final=evaluation.total.mean_reward,
        interval=evaluation.total.interval(),
        answers=evaluation.answers,
    )


def _input_settings(model: Any, tokenizer: Any, rows: Mapping[str, Rows], inputs: Path) -> dict[str, Any]:
    """The settings of a model and of rows, by their keys, for what is given of it."""
    settings: dict[str, Any] = {} if model is None else {"model.path": model_folder(model, tokenizer, inputs)}
    for key, some in rows.items():
        if some is not None:
            settings[key] = data_files(some, "val_data" if "val" in key and len(rows) > 1 else "data", inputs)
    return settings


@contextlib.contextmanager
def _with_picture(folder: Path, callbacks: FunctionCallbacks) -> Iterator[FunctionCallbacks]:
    """The callbacks, and a picture where the caller is a notebook."""
    if not in_notebook():
        yield callbacks
        return
    picture = Picture(folder)
    try:
        yield callbacks.joined(picture.add)
    finally:
        picture.draw()


def _link_model(run: RunFolder) -> None:
    with contextlib.suppress(OSError):  # a file system without links
        run.link_model()


def _result_of(run: RunFolder) -> Result:
    result = train_result(run)
    return Result(
        run=result.run,
        steps=result.steps,
        seconds=result.seconds,
        pass_rate_start=result.pass_rate_start,
        pass_rate_final=result.pass_rate_final,
        reward_start=result.reward_start,
        reward_final=result.reward_final,
        interval=result.interval_final,
    )
