"""The training loop, and everything around it that a run needs from its first line to its last.

api_costs.py           Costs of services of the reward
callbacks.py           What comes to a run from outside while it goes on
checkpointing.py       What a training checkpoint holds, for every kind of training
collecting.py          Training rows of episodes, and the failures that end a run
config.py              The root configuration
early_stopping.py      What ends a run, and how it ended
env_certificate.py     A certificate of the environments that a run plays, made before its first step and kept in its
                       event log
environment.py         Variables of the environment that `resources.env` gives to the processes of a run
fetched_inputs.py      What a run reads from elsewhere
learning.py            From scored samples to new weights
loading.py             The configuration of a run
loop.py                The training loop
model_commits.py       What a run remembers of the models and data sets that it has fetched
model_locations.py     The models that a configuration names, in folders of this machine
models.py              Settings that name models, read and replaced by their full keys
named_files.py         Files that settings name, checked before anything slow is begun
policy_sync.py         Generation at the policy's weights, which it shares with the actor
ray_runtime.py         The Ray runtime as `resources` asks for it
records.py             A step
remote_model.py        How a server with OpenAI's API answers in place of a model folder
                       (strop.trainer.standalone.ModelBackend)
remote_weight_sync.py  Engines at the policy's weights
replay_folder.py       The folder of a run that repeats a recorded one, possibly on other resources
replayed_run.py        What a run follows that repeats a recorded one
resume.py              How a run is continued
resume_overrides.py    Settings that may be given anew to a run that is continued (the one place that says so)
reward_certificate.py  The certificate of a reward, kept beside its file by `strop reward check --save`, in the log of
                       runs that use it
reward_trial.py        The reward function tried on a few answers, before time is spent on anything else
role_columns.py        Columns that roles add to the rows of a step, each by one call of a worker group, in the order
                       of a step
role_export.py         A role of a checkpoint as an ordinary Hugging Face folder, proved by its log-probs
rollout_batch.py       The samples of a step on their way through the roles
row_results.py         Results of rows by their samples in a step, for samplers
run_mirror.py          Copies of a run at a URL while it trains
sample_selection.py    Samples chosen for training
sections.py            The sections of the root configuration that belong to the loop itself
setup.py               What a run needs before its first step, from cheap to expensive, so that bad input ends it in
                       seconds
standalone.py          Generation without a training run
start.py               Starting a run in a folder, and going on with one that is there
step_logging.py        What a step tells people
threads.py             How many threads tensor operations of this process use on a CPU, and who decided that
timing.py              The stages of a step, from outside
validation.py          Validation
validation_metrics.py  Validation numbers by data source and variable
worker_groups.py       From the configuration to the roles of a run
checks/                Rules across sections of the configuration, checked before a device is touched
collectors/            Collection of the samples of a step
fault_tolerance/       Runs that outlive the processes and machines that they have, and what ends them
init_from/             A run that begins with the weights of another one
preference/            Training on preferences
preflight/             Can this run learn? A few dozen samples of its own first prompts, before anything is trained
sft/                   Supervised fine-tuning
untrusted_runs/        Run folders that somebody else may have made
"""
