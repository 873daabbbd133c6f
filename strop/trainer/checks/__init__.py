"""Rules across sections of the configuration, checked before a device is touched.

algorithms.py        Settings that do not go with the estimators that are here
async_rollout.py     Settings of generation ahead of training that do not go together, or not with the others
devices.py           Devices and cores of this machine that are not those that a run, its engines and its profile need
dynamic_sampling.py  Settings that do not go with dynamic sampling
held_out.py          Validations on rows that are trained on
idle_settings.py     Warnings about settings that do nothing beside the others
media.py             Settings that do not go with images of prompts
models.py            Models that do not fit each other, or the ranks of their role
parallel.py          Numbers of ranks that the engine of a role cannot have
recording.py         Recorded samples that are trained on (trainer.skip_rollout)
router_replay.py     Settings that rollout.router_replay does not go with
roles.py             Settings that do not go with the roles that are here
schedules.py         Warnings about schedules that a run is too short for
sections.py          Rules across settings of several sections
template_variables.py  Variables that the chat template does not read
"""
