"""Guests: rooms that use the core, and that the core finds by what they declare.

A guest is a package below strop/, or below a room of it, with a file guest.toml that says where it joins the core: at
hooks, and at places where what joins has names.

    "rows that come later" = "strop.data.growing.growth:Growth"

    [section]
    "reward.sandbox" = "strop.sandbox.config:SandboxConfig"

Behind each is an object: `module:attribute`, or a module. Nothing is imported before the core asks for it, so a command
that only reads settings stays quick; and where the folder of a guest is taken away, the core works without it.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent

HOOKS = {
    "check of settings": "a function (configuration of a run) that raises a ValueError where settings of several "
    "sections do not go with what the guest brings; it imports nothing heavy",
    "unread settings": "a function (args, command, what it reads; None: what a training reads) that refuses settings "
    "which somebody typed and the command has no use for",
    "recipes": "advantage estimators and policy losses, a strop.algorithms.registry.Recipes",
    "distance to a teacher": "a function as strop.algorithms.distillation.terms.distance, for algorithm.distillation",
    "reward shaping": "a function (config, reports, rewards by sample id, longest response) that gives the rewards to "
    "train with",
    "rollout correction": "a function (rows, algorithm) that gives columns of all rows of a step, for "
    "algorithm.correction",
    "calling convention": "a module with estimate() and loss_of_tokens(), which call estimators and losses written "
    "for verl (strop.algorithms.registry.verl_convention)",
    "dispatch modes": "a module with mode_named(wanted), for modes by name or as dictionaries",
    "limits of graders": "a module with Guard(tell, timeout_s=), which limits comparisons in a process that scores, "
    "and use(guard) (strop.scorers.budget)",
    "services of a reward": "a class, called as (config, functions, rank=, count=), that asks the sections of place "
    '"reward service" (strop.judges.services.Services)',
    "key translation": "a function from a key of another library, and the section of the command that it was typed "
    "for, to our full keys and a sentence",
    "class translation": "a function from a dotted path of another library's classes to ours; any other path as it is",
    "chat of agents": "a class (tokenizer, variables of the template) that tells which tokens a chat template puts "
    "between the answers of a conversation (AgentContext.template)",
    "files of settings": "a module as strop.compat.config_files, for files beside a configuration, as Hydra has them",
    "interpolation": "a class (root, values) whose value(given, key) puts in what ${...} stands for",
    "bound on templates": "a function that has every chat template compiled within limits from then on",
    "media of rows": "a module as strop.vision.rows",
    "adapters": "a module as strop.engines.lora.adapters",
    "kernels": "a function (module, device) that puts its kernels into a model that was just loaded",
    "products": "a module with linear(), products of layers in place of torch's, and layer_products(parameters), a "
    "context in which layers multiply by it, where that is faster on a processor (strop.engines.products)",
    "carried models": "a module with check_type(settings, path) and check_family(config, auto_class, path), which "
    "raise a ValueError for models that are known not to run, and check_packed(module, device, by_formula=), which "
    "raises one where a loaded model computes something else on packed tokens than alone",
    "layers with a state": "a function (model of transformers) that gives a strop.engines.recurrence.Recurrence, or "
    "None for a model whose layers all attend",
    "changes of a model": "a module with import_external(config), overridden(given, known, override) and "
    "template_text(chosen), for settings of model that change what is read from its folder, and "
    "use_exact(module), for model.dtype=float64",
    "operation counts": "a module with model_work(model), operations of passes over rows, peak_flops(device, dtype), "
    "operations per second of a device (each may be None), precision_hint(dtype), where another precision is faster on "
    "a CPU, and usage_of() and usage_metrics(), what a step made of its devices",
    "threads of a run": "a function (resources, model, run, step=) that sets the CPU threads of tensor operations and "
    "gives a line that says how many there are, and why",
    "several ranks": "a module with joined(), as strop.engines.parallel.join_ranks for several ranks, shard(), "
    "reshard(), sync_gradients() and full_parameters() of a model on them, balanced_rows(), which rows each of them "
    "gets, and parts_of() and load_parts() of a checkpoint (strop.engines.sharding)",
    "offloading": "a module with offload(model), offload_optimizer(optimizer), which give what has restore(), and "
    "activations_on_host(model), a context (strop.engines.sharding.offloading)",
    "sequence parallelism": "a module as strop.engines.tokens.sequence_parallelism describes",
    "model with media": "a module as strop.vision.inputs",
    "sample store": "a class as strop.run.samples.SampleStore, called with the folder",
    "samples as rows": "a function from episodes to rows of that store, as strop.run.samples.rows.saved_rows",
    "metrics of a batch": "a function (rows, algorithm) of all rows of a step, with all their columns, that gives "
    "further metrics",
    "penalties on tokens": "a module as strop.recipes.reward_kl: penalized() rewards, and the class Control of the "
    "factor",
    "dynamic sampling": "a strop.trainer.collecting.RolloutCollector, for algorithm.filter_groups and "
    "rollout.longest_first",
    "choice of samples": "a function (experience, config, step) that gives the rows that are trained on and, by the "
    "ids of the other samples, why they are not; for algorithm.resampling and algorithm.keep",
    "columns of answers": "a module as strop.recipes.answers, for estimators that take single answers (the columns "
    "strop.algorithms.registry.STEP_COLUMNS), parts of the reward (algorithm.reward_keys) or reward_baselines",
    "weights of engines": "a strop.trainer.policy_sync.PolicySync, called as (rollout=, version=, actor=, "
    "shares_process=, probes_weights=), for engines with weights of their own",
    "engines apart": "a module as strop.rollout.processes.joining, for engines that are not the native one",
    "decode steps": "a function (model) that gives a strop.rollout.native.batch.OtherSteps, or None for a model that "
    "has none",
    "compiled decoding": "a module with functions of the native engine, compiled for the processor: a "
    "strop.rollout.native.compiled.CompiledDecoding",
    "kept prefixes": "a class, called without arguments, of computed tokens that may begin a later request of the "
    "native engine (strop.rollout.native.prefill.KeptPrefixes)",
    "weight transfer": "a module as strop.rollout.sync.transfer.WeightTransfer describes, for rollout workers in "
    "other processes",
    "engine checks": "a function (wants_json=) that tries the rollout engines of this installation and gives the exit "
    "code of the command",
    "kept token ids": "a function (encode, tokenizer, chats, num_chats, cache_dir) that gives token ids which it has "
    "kept, or those that encode(tokenizer, chats()) gives",
    "data of a run": "a function of the section data, called once a run has read its data",
    "streamed rows": "a module with open_rows(files, cache_dir), rows that stay in their files, and "
    "StreamedPrompts(rows, tokenizer, config, shown=), a strop.data.drawing.TrainingPrompts of such rows",
    "mixture of sources": "a function (prompts, data, num_epochs, seed) -> the rows of an epoch, or None for all, "
    "and how many epochs there are",
    "interval of a rate": "a function (successes, trials), by prompt, that gives the ends of a 95 % interval of "
    "their rate",
    "interval of a mean": "a function (sums, counts), by prompt, that gives the ends of a 95 % interval of their mean, "
    "or None where nothing shows how they spread",
    "folders of rows": "a module as strop.data.readers.folders describes",
    "digest of weights": "a function (model) that gives a digest of all its weights, the same on every rank, for the "
    "fingerprints of steps",
    "loss scale": "a class as strop.engines.options.loss_scale.LossScale, for models in float16",
    "metrics of a validation": "a function of the reports of scored answers, for val-core/ and val-aux/",
    "trackers": "a module as strop.tracking.group, for trackers beside the metrics file",
    "heartbeat": "a function (log of a process) that gives a context in which what the process does is written down",
    "loop of calls": "a strop.workers.rollout.Runner whose deadlines count only the time of calls",
    "progress of generation": "a module with Tally(logs, rank=), which counts samples in a rollout worker, and "
    "PlayWatch(logs), which shows the counts (strop.tracking.tally)",
    "alarms of a run": "a strop.trainer.loop.Alarm, called as (told=, earlier=)",
    "end of a training": "a function (run folder) that gives what `strop train` prints at its end",
    "what is installed": "a function that gives the lines of `strop --version`",
    "rows that come later": "a class, called as (data, rows, prompts, tokenizer, prepare, max_steps=), that adds rows "
    "while a run goes on (strop.data.growing.growth.Growth)",
    "data generator": "a function of data.datagen and the rows so far that gives an object with new_rows(batch) and "
    "restore(rows)",
    "rows of a class": "a function (config, files, tokenizer, max_samples, seed) that gives the rows of "
    "data.dataset_class",
    "orders of rows": "a module with SAMPLERS, by name, sees_results(name) and ResultsOrder(name, rows, data), a "
    "strop.data.curriculum.ResultsOrder",
    "operations on a batch": "a module with mini_batches() and unfolded(), for methods of strop.protocol.DataProto "
    "that are there for verl's users (strop.compat.batches)",
    "sampler of a class": "a strop.data.curriculum.SamplerObject, with check(name, cls)",
    "export of a role": "a function (checkpoint, out, model, role=) that writes a role of a checkpoint as a folder "
    "that a run can begin with",
    "options of a run": "a function (parser) for commands that make runs",
    "beginning of a run": "a function (args, kind) that gives the configuration that a run begins with, and of --from "
    "a strop.trainer.beginning.weights.Beginning",
    "settings given anew": "a function (config.yaml of a run, overrides, its settings, text=, in_shell=) that gives "
    "the strop.trainer.continuing.Continuation of that run with the overrides, for --resume",
    "received models": "a module with check_entries(folder, complaint) and check_settings(values, complaint), which "
    "raise a ValueError for a model folder that no library should open (strop.received.models)",
    "received settings": "a module as strop.received.settings: load(), which lets no settings of others run what they "
    "name, note() and note_again() for a user's own, check_there() and check_inputs() of a run that is continued",
    "mending of a run": "a class as strop.trainer.restarts.healing.Healing, for worker processes that die",
    "costs of services": "a class as strop.judges.costs.CostTracker, where a service has a price",
    "requests to end": "a strop.trainer.outside.StopRequest",
    "checkpoints in the background": "a strop.trainer.checkpointing.Checkpointer, for run.async_save",
    "watch of checkpoints": "a function (run, step, say=, limit_s=) that gives a context in which the checkpoint of "
    "the step is written, within so many seconds",
    "limits of a run": "a class as strop.trainer.restarts.limits.LimitedEnding: what ends a run before its last step",
    "fingerprints of steps": "a strop.run.folder.StepDigests, called as (event log)",
    "repeated run": "a function (run folder) that gives what the run in it repeats, with last_step and steps (by "
    "step, what generation ahead takes as `recorded`), or None",
    "recorded samples": "a module with check(config, data, first_step=), which refuses those that do not fit the run, "
    "and open_recording(run folder, section reward), a strop.replay.samples.Recording",
    "inputs of a run": "a module as strop.hub.inputs, for models and data sets that are not of this machine",
    "lines of a fresh run": "a function (config, source=, overrides=) that gives what is said as it begins",
    "records of a fresh run": "a function (config, data, run, say) that records what is known of what the run uses, "
    "at no cost",
    "trial of the reward": "a function (config, data, run, say, costs=) that tries the reward of a run before anything "
    "is loaded, and may refuse it",
    "before the first steps": "a function (config, data, roles, run, say, force=) that tries what a fresh run will "
    "do, says and records what it finds, and may refuse the run unless somebody forces it",
}
"""Where a guest joins with one thing: what it is."""

PLACES = {
    "section": "full key of a section of the configuration: its dataclass, with code_named() where it names code "
    "(strop.base.sections); a role has one at the root, by its name (strop.trainer.config.RoleSection)",
    "settings": "full key of a section and a word for them: a dataclass whose fields are among those of the section",
    "changeable settings": "what they are about: full keys of settings that a run may be continued with anew",
    "steering settings": "the same, of those that change what it does from there on; `how long …` end it",
    "command": "word after `strop`: a module with SUMMARY, add_arguments(parser) and run(args); one that makes runs "
    "has a section at the root, by its name (strop.cli.launching)",
    "data command": "word after `strop data`: its strop.data.command.Action",
    "public name": "a dotted name that users import from the core: what it stands for",
    "reward service": "full key of a section below reward: a class, called as (section, rank=, count=), that scores "
    "answers (strop.judges.services.RewardService)",
    "reward worker": "full key of a section below reward: a function that each process that scores calls as it starts, "
    "with the section as plain data",
    "reward form": "a parameter that tells a calling convention: (function, as it was loaded, setup) -> the function",
    "reward loader": "what scores in place of a function of the user's (`built-in scorer`, `manager`): a function from "
    "its setup to a strop.rewards.functions.RewardFunction",
    "tracker": "name of a tracker: a strop.tracking.group.TrackerFactory, with check(), which raises a ValueError "
    "where what it needs is missing",
    "elsewhere": "models, rows or runs: the module that fetches, or sends, what names and URLs "
    "mean that are not of this machine (strop.base.elsewhere)",
    "agent": "name of an agent: the async function (prompt, trajectory, generate, context) that plays it",
    "self-scoring agent": "name of an agent that is given no tools and scores its episodes itself: as above",
    "form of agents": "what agents can be beside async functions: a function from such an object to the async function "
    "that plays it, or None for objects of another form",
    "agent kit": "what agents of this run find in their context, as an attribute of this name: a strop.agents.kits.Kit",
    "agent processes": "full key of the setting that asks for them: a strop.workers.agents.pool.AgentWorkers, called "
    "as (setup, client, model, reward=, seed=)",
    "episode observer": "full key of a section below rollout: a function (section, tokenizer) that gives what hears of "
    "every episode (strop.workers.player.EpisodeObserver), or None",
    "optimizer": "name in optim.name: a function (named parameters, config, names of embeddings) that gives its parts "
    "(strop.engines.optimizer.Part)",
    "runtime": "name in resources.runtime of what runs the roles in processes of their own: a function (resources, "
    "log_dir=) that gives a strop.controller.Runtime",
    "role": "name of a role with a model, as it is in the configuration: a module as strop.trainer.roles.JoinedRole "
    "describes",
    "rollout engine": "name in rollout.engine of an engine in processes of its own: an async function from a "
    "strop.workers.generation.Place to its Generation; its settings are a section of that name below rollout, a "
    "strop.rollout.config.OwnProcesses",
    "remote model": "name in rollout.engine of a server whose weights are not ours: a module as "
    "strop.evaluation.alone.Answering describes; its settings are a section of that name below rollout, a "
    "strop.rollout.config.RemoteModel",
    "form of a batch": "a form that a strop.protocol.DataProto is brought into and made from: its module "
    "(strop.protocol.forms)",
    "evaluation set": "a name, or the beginning of names with a / at its end: a function (name, source) that gives the "
    "rows of that set with its prompts and data_source; an empty source is where it is published",
    "generation ahead": "for samples that are played over several calls, or by a clock of engine steps "
    "(strop.trainer.config.Config.ahead_by): `asked`, a function (config) that gives the setting of its own which asks "
    "for that; `check`, a function (config); `role`, a function (config, playing) that "
    "gives the RoleSpec of the rollout role; `collector`, a function that gives a "
    "strop.trainer.collecting.RolloutCollector, with the arguments of one and (start_step=, recorded=)",
}
"""Where a guest joins with names: what they are, and what is behind them."""


@cache
def guests() -> tuple[str, ...]:
    """The guests that are there, by their folder below strop/, in alphabetical order."""
    found = (*PACKAGE.glob("*/guest.toml"), *PACKAGE.glob("*/*/guest.toml"))
    return tuple(sorted(path.parent.relative_to(PACKAGE).as_posix() for path in found))


@cache
def targets(place: str) -> Mapping[str, str]:
    """What joins at a place, in the order of the guests: each name and where its object is; nothing is imported. At a
    hook, the names are those of the guests.

    Raises:
        ValueError: a guest joins at a place that there is not, or two give the same name.
    """
    known = HOOKS | PLACES
    assert place in known, f"{place} is no place where guests join"
    found: dict[str, str] = {}
    for guest in guests():
        joins = tomllib.loads((PACKAGE / guest / "guest.toml").read_text(encoding="utf-8"))
        for unknown in joins.keys() - known.keys():
            raise ValueError(f"the guest {guest} joins at {unknown!r}; a guest joins at {', '.join(known)}")
        entries = joins.get(place, {})
        if isinstance(entries, str):
            entries = {guest: entries}
        for name, target in entries.items():
            if name in found:
                raise ValueError(f"two guests join at {place!r} as {name!r}: {found[name]} and {target}")
            found[name] = target
    return found


def joined(place: str, name: str) -> Any:
    """The object that joins at a place under a name; KeyError where there is none."""
    module, _, attribute = targets(place)[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def all_joined(place: str) -> dict[str, Any]:
    """Everything that joins at a place, by name."""
    return {name: joined(place, name) for name in targets(place)}


def optional(place: str) -> Any:
    """What joins at a place where one is enough: the first; None where nothing does."""
    return next((joined(place, name) for name in targets(place)), None)


def needed(place: str, why: str, name: str = "") -> Any:
    """What joins at a place where one is enough: the first.

    Args:
        place: of `HOOKS` or `PLACES`.
        why: who needs it, the beginning of a sentence.
        name: under which it joins, where one guest joins under several.

    Raises:
        ValueError: nothing joins there.
    """
    for found in targets(place):
        if name in ("", found):
            return joined(place, found)
    raise ValueError(
        f"{why}, but the part of strop for that is missing from this installation ({place}); install all of strop"
    )
