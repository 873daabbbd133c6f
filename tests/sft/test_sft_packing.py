"""Fine-tuning packs conversations end to end, and none of them sees, or trains, a token of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.packing import split_rows
from strop.protocol import columns
from strop.sft.conversations import SftExample
from strop.sft.trainer import make_sft_batch, sft_totals
from strop.sft.worker import SupervisedWorker
from strop.workers.rows import data_rows

BUDGET = 40


def worker(model: Path) -> SupervisedWorker:
    return SupervisedWorker(
        ModelConfig(path=str(model), dtype="float64"),
        EngineConfig(max_tokens_per_device=BUDGET),
        OptimizerConfig(lr=1e-3),
        device="cpu",
        num_updates=10,
    )


def conversation(row: int, length: int, seed: int, first: int | None = None) -> SftExample:
    """Random tokens; the second half is trained, or all from `first` on."""
    tokens = torch.randint(10, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    begin = length // 2 if first is None else first
    return SftExample(row=row, token_ids=tuple(tokens), loss_mask=tuple(i >= begin for i in range(length)))


def log_probs(one: SupervisedWorker, examples: Sequence[SftExample]) -> list[torch.Tensor]:
    """Of the responses, one tensor per conversation."""
    return columns.rows(one.compute_log_prob(make_sft_batch(examples)).tensors()["log_probs"])


def test_conversations_share_forward_passes_up_to_the_budget() -> None:
    lengths = [21, 20, 11, 11, 11, 9, 2]
    examples = [conversation(row, length, row) for row, length in enumerate(lengths)]
    rows = data_rows(make_sft_batch(examples))
    # The last token of a conversation predicts nothing and is not computed: 20, 19, 10, 10, 10, 8 and 1 tokens. First
    # fit, largest first, in bins of 40: 20 + 19 + 1 and 10 + 10 + 10 + 8.
    assert [sum(row.num_tokens for row in part) for part in split_rows(rows, max_tokens=BUDGET)] == [40, 38]
    assert sum(len(part) for part in split_rows(rows, max_tokens=BUDGET)) == len(lengths)


def test_no_token_of_a_conversation_reaches_another(tiny_model: Path) -> None:
    one = worker(tiny_model)
    before = [conversation(0, 9, 0), conversation(1, 12, 1), conversation(2, 7, 2)]
    after = [before[0], conversation(1, 12, 99), before[2]]
    assert len(split_rows(data_rows(make_sft_batch(before)), max_tokens=BUDGET)) == 1, "one forward pass"
    first, second = log_probs(one, before), log_probs(one, after)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert not torch.allclose(first[1], second[1])
    for number, example in enumerate(before):
        torch.testing.assert_close(log_probs(one, [example])[0], first[number], rtol=1e-12, atol=1e-12)


def test_no_mask_bit_of_a_conversation_reaches_the_one_before(tiny_model: Path) -> None:
    # The second conversation is trained from its first token that can be: a mask rolled over the boundary would add a
    # term for the last token of the first, or lose one.
    examples = [conversation(0, 9, 0, first=7), conversation(1, 6, 1, first=1)]
    one = worker(tiny_model)
    batch = make_sft_batch(examples)
    terms = torch.cat(log_probs(one, examples))
    assert sft_totals(batch).num_tokens == 2 + 5 == len(terms)
    loss = one.update(batch, sft_totals(batch)).metrics["train/loss"].value
    assert abs(loss + float(terms.mean())) < 1e-6
