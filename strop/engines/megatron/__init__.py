"""The Megatron engine (engine.kind=megatron): layers, pipeline schedules and optimizer of megatron-core, with the
weights of Hugging Face models.

checks.py         Models and settings that it does not have
core_fields.py    Names of the fields of megatron-core's TransformerConfig
engine.py         MegatronEngine and MegatronTrainEngine
groups.py         Process groups of megatron-core
layers.py         Layers that compute packed rows as the torch engine does
model.py          A language model divided over ranks
optimizer.py      AdamW of megatron-core, sharded over data-parallel ranks
passes.py         Forward and backward passes by megatron-core's pipeline schedules
routers.py        Routers whose choices are counted and replaced, with losses
stages.py         Numbers of layers of pipeline stages
weight_map.py     Places of the parts of Hugging Face weights
whole_weights.py  Weights joined from all ranks, and in boxes for checkpoints
"""
