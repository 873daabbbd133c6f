"""The reference model: equal to the policy at the start, and never moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of

from strop.algorithms.config import AlgorithmConfig
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig
from strop.engines.lora.adapters import save_adapter
from strop.engines.model import load_model
from strop.engines.parallel import offload as offloading
from strop.protocol import columns
from strop.workers.config import ReferenceConfig
from strop.workers.reference import ReferenceWorker


def reference(model: Path, path: str = "", max_tokens: int = 100) -> ReferenceWorker:
    return ReferenceWorker(
        ModelConfig(path=str(model), dtype="float32"),
        ReferenceConfig(path=path, engine=EngineConfig(max_tokens_per_device=max_tokens)),
        device="cpu",
    )


def test_the_reference_is_the_policy_of_the_start_and_stays_it(tiny_model: Path) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.1)
    batch = random_batch(torch.float32)
    actor, frozen = make_actor(tiny_model, algorithm, dtype="float32"), reference(tiny_model)

    def differences() -> list[float]:
        ours = columns.rows(actor.compute_log_prob(batch).tensors()["old_log_probs"])
        theirs = columns.rows(frozen.compute_ref_log_prob(batch).tensors()["ref_log_prob"])
        return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]

    before = columns.rows(frozen.compute_ref_log_prob(batch).tensors()["ref_log_prob"])
    assert max(differences()) == 0.0, "the same weights and the same cut"
    actor.update_policy(batch, totals_of(batch))
    assert max(differences()) > 1e-3
    after = columns.rows(frozen.compute_ref_log_prob(batch).tensors()["ref_log_prob"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any(p.requires_grad for _, p in frozen.engine.model.named_parameters())


def test_a_policy_that_continues_an_adapter_is_its_own_reference_with_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has left the device before (resources.offload_idle); here those of the CPU leave."""
    monkeypatch.setattr(offloading, "_on_device", iter)
    earlier = load_model(
        ModelConfig(path=str(tiny_model), dtype="float32", lora=LoraConfig(rank=2)), device="cpu"
    )
    with torch.no_grad():
        for value in [p for p in earlier.module.parameters() if p.requires_grad]:
            value.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    save_adapter(earlier, tmp_path)
    batch, algorithm = random_batch(torch.float32), AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    actor = make_actor(tiny_model, algorithm, dtype="float32", lora=LoraConfig(rank=2, path=str(tmp_path)))

    for parameter in actor.engine.model.module.parameters():
        parameter.data = parameter.data.clone()  # that of a mapped file cannot be freed

    def log_probs() -> tuple[torch.Tensor, torch.Tensor]:
        policy = actor.compute_log_prob(batch).tensors()["old_log_probs"]
        return columns.flat(policy), columns.flat(actor.compute_ref_log_prob(batch).tensors()["ref_log_prob"])

    first, begun = log_probs()
    assert torch.equal(first, begun)
    base = columns.flat(reference(tiny_model).compute_ref_log_prob(batch).tensors()["ref_log_prob"])
    assert float((begun - base).abs().max()) > 0.01, "the adapter says something"
    actor.update_policy(batch, totals_of(batch))
    now, begun_later = log_probs()
    assert float((now - first).abs().max()) > 1e-3
    assert torch.equal(begun_later, begun)
    actor.offload()
    of_reference = actor.compute_ref_log_prob(batch).tensors()["ref_log_prob"]
    assert torch.equal(columns.flat(of_reference), begun)


def test_log_probs_do_not_depend_on_the_token_budget(tiny_model: Path) -> None:
    batch = random_batch(torch.float32)
    rows = [
        columns.rows(
            reference(tiny_model, max_tokens=n).compute_ref_log_prob(batch).tensors()["ref_log_prob"]
        )
        for n in (100, 15)
    ]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-5)


def test_another_folder_can_be_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path, seed=1, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    batch = random_batch(torch.float32)
    own, other = (
        columns.flat(reference(tiny_model, path).compute_ref_log_prob(batch).tensors()["ref_log_prob"])
        for path in ("", str(tmp_path))
    )
    assert float((own - other).abs().max()) > 0.01


def test_reference_settings_without_a_kl_term_are_refused() -> None:
    from strop.trainer.config import Config

    with pytest.raises(ValueError, match="nothing uses a reference model: set algorithm.use_kl_loss=true"):
        Config(reference=ReferenceConfig(path="somewhere"))
