"""GRPO, written out: what happens in a step, and in which order, stands here and nowhere else.

python examples/own_loop/loop.py actor.optim.lr=1e-3
"""

import sys

import torch

from strop import Pieces

PROMPTS, SAMPLES, SAMPLES_PER_UPDATE = 32, 8, 128


def advantages_of(rewards, groups):
    """How much better each answer is than the others to its prompt, in standard deviations."""
    advantages = torch.zeros(len(rewards))
    for group in groups:
        own = rewards[group]
        advantages[group] = (own - own.mean()) / (own.std() + 1e-6)
    return advantages


def main(settings, config="examples/own_loop/config.yaml", model="runs/own_loop-model"):
    rates = []
    with Pieces(config, settings) as pieces:
        rates.append(pieces.validate().score)
        for step in range(1, pieces.num_steps + 1):
            samples = pieces.play(pieces.prompts(PROMPTS), SAMPLES)
            samples = samples.with_advantages(advantages_of(samples.rewards, samples.groups()))
            samples = pieces.with_columns(samples, "old_log_probs")
            for part in samples.split(SAMPLES_PER_UPDATE):
                metrics = pieces.update(part)
            pieces.update_weights()
            if step % 20 == 0 or step == pieces.num_steps:
                rates.append(pieces.validate().score)
                print(f"step {step}: reward {samples.rewards.mean():.3f}, validation {rates[-1]:.3f}, "
                      f"clipped {metrics['actor/pg_clipfrac']:.3f}")  # fmt: skip
        pieces.save(model)
    return rates


if __name__ == "__main__":
    main(sys.argv[1:])
