"""Rules across sections of the configuration, checked before a device is touched.

algorithms.py        Settings that do not go with the estimators that are here
devices.py           Devices and cores of this machine that are not those that a run, its engines and its profile need
held_out.py          Validations on rows that are trained on
idle_settings.py     Warnings about settings that do nothing beside the others
media.py             Settings that do not go with images of prompts
models.py            Models that do not fit each other, or the ranks of their role
parallel.py          Numbers of ranks that the engine of a role cannot have
recording.py         Recorded samples that are trained on (trainer.skip_rollout)
roles.py             Settings that do not go with the roles that are here
rollout.py           Settings of generation that do not go together, or not with the others
schedules.py         Warnings about schedules that a run is too short for
sections.py          Rules across settings of several sections
template_variables.py  Variables that the chat template does not read
"""
