"""Commands of `strop`, one module each: `add_arguments(parser)` and `run(args) -> int`.

check.py         `strop check`
compare.py       `strop compare`
config.py        `strop config`
data.py          `strop data`
data_check.py    `strop data check`
data_index.py    `strop data index`
data_prepare.py  `strop data prepare`
diff.py          `strop diff`
doctor.py        `strop doctor`
dpo.py           `strop dpo`
engine.py        `strop engine`
env.py           `strop env check`
eval.py          `strop eval`
export.py        `strop export`
generate.py      `strop generate`
incident.py      `strop incident`
migrate.py       `strop migrate`
plan.py          `strop plan`
plot.py          `strop plot`
prefer.py        `strop prefer`
profile.py       `strop profile`
push.py          `strop push`
quickstart.py    `strop quickstart`
replay.py        `strop replay`
reward.py        `strop reward check`
reward_model.py  `strop reward-model`
runs.py          `strop runs`
samples.py       `strop samples`
sandbox.py       `strop sandbox check`
score.py         `strop score`
serve.py         `strop serve`
sft.py           `strop sft`
sweep.py         `strop sweep`
track.py         `strop track`
train.py         `strop train`
view.py          `strop view`
"""
