"""What a model computes when plain transformers runs it, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from strop.engines.model_facts import max_positions

_CHANGE = 0.3
"""Size of the noise that makes other weights, as a share of a weight's own spread: far beyond any tolerance."""
_ADAPTER_RANK = 2


class ReferenceModel:
    """A model folder as transformers runs it, and the same model with other weights."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Load it, in host memory.

        Args:
            folder: of a causal language model.
            dtype: what the engine computes in.
        """
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        self._model = loaded.eval()
        self._stored = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._hooks: list[Any] = []
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        """Rows of the head: ids from here on are no tokens."""
        self.max_positions = max_positions(self._model.config)
        """Longest sequence that the positions are made for; None when the configuration names none."""

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The next tokens by `generate` of transformers."""
        ids = torch.tensor([list(prompt_ids)])
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in made[0, len(prompt_ids) :]]

    @torch.inference_mode()
    def log_probs(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> Tensor:
        """Log-probs [R + 1, V] float64 of every possible next token, from one forward pass over prompt and response.

        Args:
            prompt_ids: at least one.
            token_ids: R tokens behind the prompt; row r is what comes at their place, the last row what follows.
            temperature: divides the logits.
        """
        ids = torch.tensor([[*prompt_ids, *token_ids]])
        logits: Tensor = self._model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].double()
        return (logits / temperature).log_softmax(-1)

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The weights of these Hugging Face names, as they are now.

        Raises:
            KeyError: the model folder has no weight of a name.
        """
        state = self._model.state_dict()
        return {name: state[name].clone() for name in names}

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """Give every matrix other values; the same for the same seed."""
        self.restore()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._model.parameters():
            if parameter.dim() >= 2:
                noise = torch.empty(parameter.shape).normal_(generator=generator)
                parameter.add_((_CHANGE * float(parameter.float().std()) * noise).to(parameter.dtype))

    @torch.no_grad()
    def add_adapter(self, seed: int) -> Mapping[str, Tensor]:
        """Compute with a low-rank adapter beside the linear layers, which stay as they are.

        Returns:
            What merging means for each of their weights: W + B A, by Hugging Face name. Empty without such layers.
        """
        self.restore()
        generator = torch.Generator().manual_seed(seed)
        head = self._model.get_output_embeddings()
        merged = {}
        for name, layer in self._model.named_modules():
            if type(layer) is nn.Linear and layer is not head:
                weight = layer.weight
                spread = (_CHANGE * float(weight.float().std()) / _ADAPTER_RANK**0.5) ** 0.5
                a = spread * torch.empty(_ADAPTER_RANK, weight.shape[1]).normal_(generator=generator)
                b = spread * torch.empty(weight.shape[0], _ADAPTER_RANK).normal_(generator=generator)
                self._hooks.append(
                    layer.register_forward_hook(_adapted(a.to(weight.dtype), b.to(weight.dtype)))
                )
                merged[f"{name}.weight"] = (weight.float() + b @ a).to(weight.dtype)
        return merged

    @torch.no_grad()
    def restore(self) -> None:
        """The weights of the folder again, without an adapter."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(self._stored[name])


def _adapted(a: Tensor, b: Tensor) -> Any:
    def hook(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + inputs[0] @ a.T @ b.T

    return hook
