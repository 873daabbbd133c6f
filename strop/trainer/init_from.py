"""A run that begins with the weights of another one: what it takes over lies in its own folder.

    start/model/        the policy, an ordinary Hugging Face folder
    start/critic/       the critic, where both runs have one
    start/optimizer/    the optimizer's state of both, where it was asked for

The files are links to those of the other run where the file system has them, so that they take no room, and stay when
the other run removes its checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.engines.config import ModelConfig
from strop.run import MODEL_FOLDER, Checkpoint, RunError, RunFolder
from strop.trainer.config import Config
from strop.trainer.start import OPTIMIZER, START
from strop.utils.shell_words import shell_word

CRITIC = "critic"


@dataclass(frozen=True, kw_only=True)
class InitFromRun:
    """Initialization of a run from a checkpoint of another run."""

    run: Path
    """Folder of the other run."""
    info: dict[str, Any]
    """Content of its run.json."""
    checkpoint: Checkpoint
    """Verified."""
    settings: Config | None
    """Settings of the other run, where the new one has them too; None where it has its own."""
    given: Collection[str] = ()
    """Full keys that the command line sets."""
    with_optimizer: bool = False
    """Take over the optimizer's state too."""

    @property
    def model_folder(self) -> Path:
        """The model with which the new run begins, where it is now."""
        return self.checkpoint.path / MODEL_FOLDER

    def configured(self, config: Config, folder: Path) -> Config:
        """The settings of the new run, which read what lies in its folder.

        Args:
            config: as it was asked for.
            folder: of the new run, absolute.

        Raises:
            RunError: the checkpoint has no model folder.
            ValueError: the optimizer's state is asked for, and does not fit.
        """
        if not self.model_folder.is_dir():
            raise RunError(
                f"{self.checkpoint.path} has no model folder (run.hf_model): write one with "
                f"`strop export {shell_word(self.run)} --step {self.checkpoint.step} --out OUT`, "
                f"and begin with model.path=OUT instead of --from"
            )
        self._check_optimizer(config)
        plain = ModelConfig()
        written = {
            name: getattr(plain, name)
            for name in ("revision", "tokenizer_path", "chat_template", "override_config")
            if f"model.{name}" not in self.given
        }  # the folder has them in it
        path = str(folder / START / MODEL_FOLDER)
        lora = dataclasses.replace(config.model.lora, path="")
        model = dataclasses.replace(config.model, path=path, lora=lora, **written)
        changed: dict[str, Any] = {"model": model}
        if self._takes_critic(config):
            critic = config.critic
            lora = dataclasses.replace(critic.lora, path="")
            changed[CRITIC] = dataclasses.replace(critic, path=str(folder / START / CRITIC), lora=lora)
        return dataclasses.replace(config, **changed)

    def overridden_keys(self, config: Config) -> list[str]:
        """Settings that name a model which is in the folder of the new run once `copy_files` was called."""
        return ["model.path", "critic.path"] if self._takes_critic(config) else ["model.path"]

    def copy_files(self, run: RunFolder, config: Config) -> Iterator[str]:
        """Copy the weights of the other run into the new one's folder; lines for the person who watches.

        Args:
            run: the new one.
            config: its settings, as `configured` made them.

        Raises:
            OSError: the disk refused.
            ValueError: the critic cannot be exported.
        """
        start = run.path / START
        _link_all(self.model_folder, start / MODEL_FOLDER)
        parts = ["the weights"]
        if self._takes_critic(config):
            assert self.settings is not None, "else the critic is not taken"
            critic = self.settings.critic
            model = dataclasses.replace(
                self.settings.model, path=critic.path or self.settings.model.path, lora=critic.lora
            )
            from strop.trainer.role_export import export_role  # torch: seconds

            export_role(self.checkpoint.path, start / CRITIC, model, role=CRITIC)
            parts.append("the critic")
        if self.with_optimizer:
            for role in _trained(config):
                _link_all(self.checkpoint.path / role, start / OPTIMIZER / role)
            parts.append("the optimizer's state")
        step = self.checkpoint.step
        run.events.append(
            "started_from", 0, fsync=True, run=str(self.run), id=self.info["id"], from_step=step, taken=parts
        )
        yield f"begins with {' and '.join(parts)} of step {step} of {self.run}"
        if "prm" in config.roles:
            yield f"the process reward model begins anew, from {config.prm.path or config.model.path}"
        if CRITIC in config.roles and "the critic" not in parts:
            yield f"the critic begins anew, from {config.critic.path or config.model.path}"

    def _takes_critic(self, config: Config) -> bool:
        has_critic = (self.checkpoint.path / CRITIC).is_dir()
        is_asked = CRITIC in config.roles and "critic.path" not in self.given
        return has_critic and is_asked and self.settings is not None

    def _check_optimizer(self, config: Config) -> None:
        if not self.with_optimizer:
            return
        if config.model.lora.enabled or (CRITIC in config.roles and config.critic.lora.enabled):
            raise ValueError(
                "--with-optimizer does not go with model.lora or critic.lora: the adapter of the other run is merged "
                "into the weights, and a new one has no state yet; leave --with-optimizer out"
            )
        for role in _trained(config):
            mine = _optimizer_name(config, role)
            theirs = _name_in(self.info["config"], role)
            if not (self.checkpoint.path / role).is_dir() or theirs is None:
                raise ValueError(
                    f"--with-optimizer: {self.checkpoint.path} holds no state of the {role}'s optimizer"
                )
            if mine != theirs:
                raise ValueError(
                    f"--with-optimizer: {role}.optim.name is {mine}, but {self.run} was trained with {theirs}: set "
                    f"{role}.optim.name={theirs}, or leave --with-optimizer out"
                )
        if CRITIC in config.roles and not self._takes_critic(config):
            raise ValueError(
                "--with-optimizer needs the other run's critic too: leave critic.path and --config out"
            )


def take_optimizer(origin: Path, folder: Path) -> None:
    """Let the run in `folder` begin with the optimizer's state that the one in `origin` began with, if any.

    Raises:
        OSError: the disk refused.
    """
    if (origin / START / OPTIMIZER).is_dir():
        _link_all(origin / START / OPTIMIZER, folder / START / OPTIMIZER)


def _trained(config: Config) -> list[str]:
    return ["actor", CRITIC] if CRITIC in config.roles else ["actor"]


def _optimizer_name(config: Config, role: str) -> str:
    return (config.critic if role == CRITIC else config.actor).optim.name


def _name_in(settings: object, role: str) -> str | None:
    for key in (role, "optim", "name"):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings if isinstance(settings, str) else None


def _link_all(source: Path, target: Path) -> None:
    """A copy of a folder whose files are links where that is possible; files of checkpoints are never changed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, copy_function=_link, symlinks=False)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
