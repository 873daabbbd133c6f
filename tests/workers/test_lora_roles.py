"""Roles that train an adapter: the policy without it is the reference, and nothing else moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch

from strop.algorithms.config import AlgorithmConfig
from strop.engines.config import LoraConfig, ModelConfig
from strop.protocol import columns
from strop.workers.actor import ActorWorker
from strop.workers.config import ReferenceConfig
from strop.workers.reference import ReferenceWorker

pytest.importorskip("peft")

LORA = LoraConfig(rank=4, alpha=8.0)
ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.1)


def base_weights(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone() for name, p in actor.engine.model.named_parameters() if "lora_" not in name
    }


def test_the_policy_without_its_adapter_is_the_reference(tiny_model: Path) -> None:
    batch = random_batch(torch.float32)
    actor = make_actor(tiny_model, ALGORITHM, dtype="float32", lora=LORA)
    reference = ReferenceWorker(
        ModelConfig(path=str(tiny_model), dtype="float32", lora=LORA), ReferenceConfig(), device="cpu"
    )
    assert not any("lora_" in name for name, _ in reference.engine.model.named_parameters())
    expected = columns.rows(reference.compute_ref_log_prob(batch).tensors()["ref_log_prob"])
    before = base_weights(actor)
    for _ in range(2):
        own = columns.rows(actor.compute_ref_log_prob(batch).tensors()["ref_log_prob"])
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
        actor.update_policy(batch, totals_of(batch))
    now = columns.rows(actor.compute_log_prob(batch).tensors()["old_log_probs"])
    assert max(float((a - b).abs().max()) for a, b in zip(now, expected, strict=True)) > 1e-3
    torch.testing.assert_close(base_weights(actor), before, rtol=0, atol=0)


def test_a_policy_without_adapter_is_no_reference(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="has no adapter to switch off, so it cannot be its own reference"):
        make_actor(tiny_model, ALGORITHM).compute_ref_log_prob(random_batch())


def test_a_saved_adapter_continues_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    batch = random_batch(torch.float32)
    actor = make_actor(tiny_model, ALGORITHM, dtype="float32", lora=LORA)
    actor.update_policy(batch, totals_of(batch))
    actor.save_checkpoint(tmp_path)
    other = make_actor(tiny_model, ALGORITHM, dtype="float32", lora=LORA, checkpoint=tmp_path)
    for one in (actor, other):
        one.update_policy(batch, totals_of(batch))
    assert other.checksum() == actor.checksum()


def test_a_critic_can_train_an_adapter_and_its_head(tiny_model: Path) -> None:
    critic = make_critic(tiny_model, AlgorithmConfig(cliprange_value=1e9), dtype="float32", lora=LORA)
    before = {name: p.detach().clone() for name, p in critic.engine.model.named_parameters()}
    batch = value_batch(torch.float32)
    losses = []
    for _ in range(20):
        metrics = critic.update_critic(batch, totals_of(batch)).metrics
        losses.append(metrics["critic/vf_loss"].value)
    moved = {name for name, p in critic.engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert losses[-1] < 0.7 * losses[0]
    assert any("lora_A" in name for name in moved)
    assert any("score" in name for name in moved)
    assert all("lora_" in name or "score" in name for name in moved)


def test_the_policys_adapter_does_not_reach_the_critic(tiny_model: Path) -> None:
    critic = make_critic(tiny_model, AlgorithmConfig())  # of a policy with an adapter
    names = [name for name, p in critic.engine.model.named_parameters() if p.requires_grad]
    assert len(names) == len(list(critic.engine.model.named_parameters()))
    assert not any("lora_" in name for name in names)
