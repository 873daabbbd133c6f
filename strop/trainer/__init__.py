"""The training loop, and everything around it that a run needs from its first line to its last.

api_costs.py           Costs of services of the reward, counted around each rollout call over all starts and processes
                       of a run
callbacks.py           Stop requests (signals and preempted machines are in fault_tolerance/signals.py) and per-step
                       callbacks of a run
checkpointing.py       Training checkpoints, for every kind of training
collecting.py          Training rows of episodes, and the failures that end a run
config.py              The root configuration
crash_event.py         The record of an error that ends a run
early_stopping.py      Early stopping (time, pass rate, patience), and the result of a run
env_certificate.py     A certificate of the environments that a run plays, made before its first step and kept in its
                       event log
environment.py         Variables of the environment: those of `resources.env`, and those of launchers
fetched_inputs.py      Models and data sets of a run from hubs
init_from.py           A run that begins with the weights of another one
learning.py            Update of a step, from scored samples to new weights
loading.py             The configuration of a run
loop.py                The training loop
model_commits.py       Record of the models and data sets that a run has fetched
model_locations.py     The models that a configuration names, in folders of this machine
models.py              Settings that name models, read and replaced by their full keys
named_files.py         Files that settings name, checked before anything slow is begun
policy_sync.py         Weight sync where generation shares the actor's weights
profiling.py           Profiled steps
ray_runtime.py         The Ray runtime as `resources` asks for it
records.py             Record of a step
rehearsal.py           Rehearsal of the longest batch
remote_model.py        A server with OpenAI's API in place of a model folder
remote_weight_sync.py  Weight sync to engines with weights of their own
replay_folder.py       The folder of a run that repeats a recorded one, possibly on other resources
replayed_run.py        Schedule of a run that repeats a recorded one, in its folder
resume.py              Resume of a run from its last valid checkpoint, with or without changed settings
resume_overrides.py    Settings that may be given anew to a run that is continued (the one place that says so)
reward_certificate.py  The certificate of a reward, kept beside its file by `strop reward check --save`, in the log of
                       runs that use it
reward_trial.py        The reward function tried on a few answers, before time is spent on anything else
role_columns.py        Columns that roles add to the rows of a step, each by one call of a worker group, in the order
                       of a step
role_export.py         A role of a checkpoint as an ordinary Hugging Face folder, proved by its log-probs
role_specs.py          Roles of a run: the worker class of each, its settings and its parallel axes
rollout_batch.py       Rollout batches
row_results.py         Results of rows by their samples in a step, for samplers that see results
run_mirror.py          Copies of a run at a URL while it trains
sample_selection.py    Samples chosen for training
saved_role.py          The model of a role, read from a checkpoint of any number of ranks
sections.py            The sections of the root configuration that belong to the loop itself
setup.py               Preparation of a run before its first step, from cheap to expensive, so that bad input ends it
                       in seconds
standalone.py          Generation without a training run, for `strop eval`, `strop generate` and `strop check`
start.py               Starting a run in a folder, and going on with one that is there
step_logging.py        Step metrics and warnings
threads.py             Number of CPU threads for tensor operations of this process, and the reason for it
supervised.py          Steps, records and checkpoints of training on given answers
timing.py              The stages of a step, from outside
token_budgets.py       Token budgets of roles that were lowered because memory ran out
train.py               A training to its end
undecided.py           Data sources whose answers have no verdict
validation.py          Validation
validation_metrics.py  Validation numbers by data source and variable
worker_groups.py       Worker groups of a run from its configuration
checks/                Rules across sections of the configuration, checked before a device is touched
collectors/            Collection of the samples of a step
fault_tolerance/       Runs that outlive the processes and machines that they have, and what ends them
plan/                  Memory and time of a run before it starts, and a placement
preference/            Training on preferences
preflight/             Can this run learn? A few dozen samples of its own first prompts, before anything is trained
sft/                   Supervised fine-tuning
untrusted_runs/        Run folders that somebody else may have made
"""
