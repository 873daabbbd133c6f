"""TrainEngine: log-probs of packed rows, the gradient of a loss over them, and one optimizer step.

Single process. The engine knows no algorithm: a loss is a function of the response tokens' log-probs and
entropies, and returns a sum of weighted per-token terms. Sums add up over micro-batches, so any cut of the
rows gives the same gradient.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.head import token_log_probs
from strop.engines.model import CausalLM
from strop.engines.optimizer import Optimizer, StepReport
from strop.engines.packing import MicroBatch, Row, pack, split_rows

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log_probs [M], entropies [M], token_index [M]) -> scalar: the sum of these tokens' weighted terms.
token_index [M] is each token's place in the flat token axis of all rows of the call."""


def make_rows(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[Row]:
    """Rows of one batch, in order; equal prompts will be computed once.

    Raises:
        ValueError: an empty prompt or response.
    """
    rows, first = [], 0
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(
                f"row {index} has {len(prompt)} prompt and {len(response)} response tokens; each row needs both"
            )
        rows.append(Row(prompt, response, first, prompt.numpy().tobytes()))
        first += len(response)
    return rows


class TrainEngine:
    """One model with its optimizer, on one device."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, optim: OptimizerConfig, *, total_steps: int | None
    ) -> None:
        self.model = model
        self._config = config
        self.optimizer = Optimizer(model.named_parameters(), optim, total_steps=total_steps)

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all response tokens, flat [N] in row order, without gradient."""
        return forward_log_probs(
            self.model, rows, temperature=temperature, max_tokens=self._config.max_tokens_per_device
        )

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, temperature: float) -> float:
        """Add the gradient of the loss over these rows; its value. `step` applies what was accumulated."""
        total = 0.0
        for micro_batch in self._micro_batches(rows):
            log_probs, entropies = _forward(self.model, micro_batch, temperature)
            value = loss(log_probs, entropies, micro_batch.token_index)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def step(self) -> StepReport:
        """One optimizer step on the accumulated gradient, which is cleared."""
        return self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Weights as a Hugging Face folder `model/`, optimizer state as safetensors + JSON."""
        self.model.save(folder / "model")
        tensors, numbers = self.optimizer.state()
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "optimizer.safetensors")
        (folder / "optimizer.json").write_text(json.dumps(numbers))

    def load_optimizer(self, folder: Path) -> None:
        """Continue with the optimizer state that `save` wrote."""
        numbers = json.loads((folder / "optimizer.json").read_text())
        self.optimizer.load_state(load_file(folder / "optimizer.safetensors"), numbers)

    def checksum(self) -> str:
        """SHA-256 over names and bits of all parameters."""
        state = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            state.update(name.encode())
            state.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return state.hexdigest()

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        for part in split_rows(rows, max_tokens=self._config.max_tokens_per_device):
            yield pack(part, device=self.model.device)


@torch.no_grad()
def forward_log_probs(
    model: CausalLM, rows: Sequence[Row], *, temperature: float, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens, flat [N] in row order, on the CPU."""
    num_tokens = sum(len(row.response) for row in rows)
    dtype = torch.float64 if model.compute_dtype == torch.float64 else torch.float32
    log_probs, entropies = torch.zeros(num_tokens, dtype=dtype), torch.zeros(num_tokens, dtype=dtype)
    for part in split_rows(rows, max_tokens=max_tokens):
        micro_batch = pack(part, device=model.device)
        values, entropy = _forward(model, micro_batch, temperature)
        log_probs[micro_batch.token_index] = values.cpu()
        entropies[micro_batch.token_index] = entropy.cpu()
    return log_probs, entropies


def _forward(model: CausalLM, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    hidden = model.hidden(micro_batch.input_ids, micro_batch.position_ids, micro_batch.attention)
    predicting = torch.nn.functional.embedding(micro_batch.hidden_index, hidden)  # [M, D]
    return token_log_probs(
        predicting, model.head_weight, model.head_bias, micro_batch.targets, temperature=temperature
    )
