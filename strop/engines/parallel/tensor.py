"""Tensor parallelism: every layer's matrices over the ranks of a group, and its tokens between them.

Each of the T ranks of a tensor-parallel group holds 1/T of the heads of every attention, of the hidden units of every
feed-forward network, and of the rows of embedding and head. Between those, where a layer only adds and normalises, a
rank holds N / T neighbouring tokens of a packed row, so that activations are divided by T as well:

    tokens of a rank  --all-gather-->  all tokens, heads of a rank  --reduce-scatter-->  tokens of a rank, added up

Which matrix is cut by columns and which by rows says the model's plan in transformers (`base_model_tp_plan`); a plan
with other parts than these two is refused by name. Experts are not cut: between regions a rank routes its own tokens,
and the experts are sharded, or divided, over all ranks (experts.py).

An adapter B A of a matrix is cut with it: by columns B has the rows of a rank, by rows A has its columns, and the other
one is whole on every rank.

Gradients: the exchange before a region adds up what the ranks' parts of it say about a token, and the one behind it
hands each rank the gradient of all tokens. A parameter that every rank holds whole (norms) has seen the tokens, or the
heads, of its rank alone, and the whole half of an adapter the outputs or inputs of its rank: its gradient is a partial
sum, which is added up over the group before the step (`DTensor` placements say so).

Concurrency: all ranks of a group pack the same rows and call the same collectives in the same order: four per layer,
one behind the embedding, one before the head, each with its inverse in the backward pass.

Sources: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2
(sequence-parallel regions). Exercised on gloo with CPU tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.moe.layers import has_standard_experts
from strop.engines.parallel.token_exchange import gather_tokens, scatter_tokens
from strop.engines.parallel.ulysses import TokenShare, gather_shares, tokens_per_rank, whole_share
from strop.engines.parallel.vocabulary import VocabularyShard

COLUMNS, ROWS = "colwise", "rowwise"
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_HARMLESS = ("replicated_with_grad_allreduce", "replicate")
"""Parts of a plan that hold whole parameters, as all others do that a plan does not name."""
_OF_EXPERTS = re.compile(r"\.experts(\.|$)")
"""In the name of a part of a plan: it cuts experts, which stay whole here."""


def check_tensor_parallel(config: Any, tp_size: int, *, section: str = "engine") -> None:
    """Refuse a model whose matrices cannot be divided over the ranks.

    Args:
        config: the model's configuration as transformers reads it.
        tp_size: engine.tensor_parallel, ranks of a group.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: heads, key heads or hidden units do not divide; or transformers has no plan for the model, or one
            with parts that strop does not know.
    """
    if tp_size == 1:
        return
    text = config.get_text_config()
    key = f"{section}.tensor_parallel"
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise ValueError(
            f"{key} is {tp_size}, but transformers does not say how the matrices of {text.model_type} are cut; use "
            f"{key}=1, and more ranks of data parallelism or sequence_parallel"
        )
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"{key} is {tp_size}, but layers of {text.model_type} carry a state from token to token, and would see the "
            f"tokens of one rank alone; use {key}=1"
        )
    plan = {name: style for name, style in plan.items() if not _OF_EXPERTS.search(name)}
    unknown = sorted({style for style in plan.values() if style not in (COLUMNS, ROWS, *_HARMLESS)})
    if unknown:
        raise ValueError(
            f"{key} is {tp_size}, but layers of {text.model_type} are cut as {', '.join(unknown)}, which strop does "
            f"not do; use {key}=1"
        )
    heads, key_heads = _num_heads(text)
    counts = {"attention heads": heads}
    if any(style == ROWS and "attn" not in name for name, style in plan.items()):
        units = int(getattr(text, "intermediate_size", None) or 0)
        counts["hidden units of the feed-forward network"] = units
    common = math.gcd(*counts.values())
    # Of fewer key heads than ranks each rank has those that its queries need.
    sizes = [n for n in range(1, common + 1) if not common % n and (not key_heads % n or not n % key_heads)]
    if tp_size not in sizes:
        counts["key-value heads"] = key_heads
        name, count = next((name, count) for name, count in counts.items() if count % tp_size)
        raise ValueError(
            f"{key} is {tp_size}, but the {count} {name} of the model do not divide over {tp_size} ranks; use one "
            f"of {', '.join(map(str, sizes))}"
        )


class TensorParallel:
    """A model's parameters and tokens over the ranks of a tensor-parallel group."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the parameters of a model, and have its layers exchange tokens.

        Args:
            module: of transformers, whole; parameters become DTensors over the mesh under the same names.
            mesh: of one dimension, the group.

        Raises:
            ValueError: the plan names no matrix of the model.
        """
        self._mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        """The ranks that hold the other parts."""
        self._size, self._rank = mesh.size(), mesh.get_local_rank()
        self._embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        self._looked_up = torch.empty(0)
        if (padding := self._embedding.padding_idx) is not None:  # its row has no gradient
            first, size = _share(self._embedding.num_embeddings, self._size, self._rank)
            self._embedding.padding_idx = padding - first if first <= padding < first + size else None
        _, key_heads = _num_heads(module.config.get_text_config())  # type: ignore[union-attr, operator]
        self.key_heads: slice | None = None
        """Key heads, of all, that the queries of this rank attend with; None where it has those alone."""
        if key_heads % self._size:
            first = self._rank * key_heads // self._size
            self.key_heads = slice(first, first + 1)
        styles = dict(_planned(module, cuts_key_heads=self.key_heads is None))
        if not styles:
            raise ValueError(
                f"engine.tensor_parallel of this role is {self._size}, but the plan of transformers names no matrix of "
                f"{type(module).__name__}; set it to 1"
            )
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        for region in {_parent(module, part) for part in styles}:
            region.register_forward_pre_hook(self._gather_input, with_kwargs=True)
        for part, style in styles.items():
            if style == ROWS:
                part.register_forward_hook(self._scatter_output)
        self._embedding.register_forward_pre_hook(self._look_up)
        self._embedding.register_forward_hook(self._scatter_embedding)
        styles |= dict(_inside_adapted(styles))
        styles |= {part: COLUMNS for part in (self._embedding, head) if part is not None}
        parts = [part for part in module.modules() if not has_standard_experts(part)]
        self._cut_parameters(parts, styles)
        for part in parts:
            if part is not head and any(True for _ in part.parameters(recurse=False)):
                part.register_forward_pre_hook(partial(self._show_local, styles.get(part)))
                part.register_forward_hook(self._hide_local, always_call=True)

    def vocabulary(self, num_rows: int) -> VocabularyShard:
        """This rank's part of so many rows of embedding and head."""
        first, size = _share(num_rows, self._size, self._rank)
        return VocabularyShard(first=first, size=size, group=self.group)

    def local(self, parameter: Tensor, style: str | None = None, name: str = "") -> Tensor:
        """This rank's part of a parameter, as a tensor; of one that every rank has, the gradient is a partial sum."""
        if not isinstance(parameter, DTensor):
            return parameter
        is_cut = parameter.placements[-1].is_shard()
        has_gradient = torch.is_grad_enabled() and not is_cut
        local: Tensor = parameter.to_local(grad_placements=[Partial()] if has_gradient else None)
        # What is added on every rank, and then added up, is added once.
        return local / self._size if style == ROWS and name == "bias" else local

    def hidden(
        self,
        run: Callable[[Tensor, Tensor, AttentionContext], Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Hidden states [N, D] of packed tokens, on every rank of the group, which all call this with the same tokens.

        Without gradient; keys and values that `context` sees are those of this rank's heads.

        Args:
            run: the forward pass, which gives those of this rank's share of the tokens.
            input_ids, position_ids: [1, N].
            context: of all tokens.
        """
        num_tokens = input_ids.shape[1]
        padding = tokens_per_rank(num_tokens, self._size) * self._size - num_tokens
        attention = TensorAttention(context, num_tokens, self.key_heads)
        hidden = run(F.pad(input_ids, (0, padding)), F.pad(position_ids, (0, padding)), attention)
        return gather_tokens(hidden, self.group)[:num_tokens]

    def _cut_parameters(self, parts: Sequence[nn.Module], styles: Mapping[nn.Module, str]) -> None:
        cut: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for part in parts:
            for name, parameter in list(part.named_parameters(recurse=False)):
                if id(parameter) not in cut:
                    cut[id(parameter)] = self._cut(parameter, _placement(styles.get(part), name))
                part.register_parameter(name, cut[id(parameter)])

    def _cut(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        whole = parameter.detach()
        local = whole
        if isinstance(placement, Shard):
            first, size = _share(whole.shape[placement.dim], self._size, self._rank)
            local = whole.narrow(placement.dim, first, size).clone()
        tensor = DTensor.from_local(
            local, self._mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)

    def _show_local(self, style: str | None, part: nn.Module, args: Any) -> None:
        """Let the module's own forward pass find this rank's parts under the names of its parameters."""
        for name, parameter in part.named_parameters(recurse=False):
            part.__dict__[name] = self.local(parameter, style, name)

    def _hide_local(self, part: nn.Module, args: Any, output: Any) -> None:
        for name, _ in part.named_parameters(recurse=False):
            part.__dict__.pop(name, None)

    def _gather_input(self, region: nn.Module, args: Any, kwargs: Any) -> Any:
        """All tokens before a region."""
        if args:
            return (self._gathered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gathered(kwargs["hidden_states"])}

    def _gathered(self, hidden: Tensor) -> Tensor:
        tokens = gather_tokens(hidden.reshape(-1, hidden.shape[-1]), self.group)
        return tokens.view(*hidden.shape[:-2], *tokens.shape)

    def _scatter_output(self, part: nn.Module, args: Any, output: Tensor) -> Tensor:
        """This rank's tokens behind a region, added up over the ranks."""
        tokens = scatter_tokens(output.reshape(-1, output.shape[-1]), self.group)
        return tokens.view(*output.shape[:-2], *tokens.shape)

    def _look_up(self, embedding: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self._looked_up = self.vocabulary(self._embedding.num_embeddings).places(args[0])
        return (self._looked_up.clamp(min=0),)

    def _scatter_embedding(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Embeddings of this rank's tokens, whose rows lie on any rank."""
        here = output.masked_fill((self._looked_up < 0)[..., None], 0)
        return scatter_tokens(here[0], self.group)[None]


class TensorAttention:
    """Attention of the heads of one rank, called with all tokens of a row and the padding behind them."""

    def __init__(self, inner: AttentionContext, num_tokens: int, key_heads: slice | None) -> None:
        self._inner, self._num_tokens, self._key_heads = inner, num_tokens, key_heads

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """As of AttentionContext; zeros [., H, Dv] behind the last token."""
        if self._key_heads is not None:
            key, value = key[:, self._key_heads], value[:, self._key_heads]
        padding = len(query) - self._num_tokens
        if padding < 0:
            raise ValueError(
                f"attention of layer {layer} was called with {len(query)} of {self._num_tokens} tokens: the plan of "
                f"transformers does not name its matrices, which engine.tensor_parallel of this role divides; set it "
                f"to 1"
            )
        if not padding:
            return self._inner.attend(layer, query, key, value, form)
        query, key, value = (tensor[: self._num_tokens] for tensor in (query, key, value))
        return F.pad(self._inner.attend(layer, query, key, value, form), (0, 0, 0, 0, 0, padding))


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """A micro-batch of N tokens with U predictions; N' is N with padding, a multiple of the ranks of the group."""

    input_ids: Tensor  # [1, N']
    position_ids: Tensor  # [1, N']
    attention: TensorAttention
    targets: Tensor
    """[U]: every rank has its part of the vocabulary for all of them."""
    hidden_index: Tensor
    """[U]"""
    group: dist.ProcessGroup

    @property
    def num_local(self) -> int:
        """Tokens of this rank between layers, n."""
        return self.input_ids.shape[1] // dist.get_world_size(self.group)

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [U, D] that predict the tokens, from those of this rank's tokens [n, D]."""
        return F.embedding(self.hidden_index, gather_tokens(hidden, self.group))

    def token_share(self, prediction_index: Tensor) -> TokenShare:
        """All response tokens, on every rank."""
        return whole_share(prediction_index)

    def gather(self, values: Tensor) -> Tensor:
        """The results [U, ...] themselves, which are the same on every rank."""
        return values

    def of_each(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Results [U, ...] of a function of hidden states [U, D] that every rank could evaluate: each for its share."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        m = tokens_per_rank(len(hidden), size)
        padded = F.pad(hidden, (0, 0, 0, m * size - len(hidden)))
        return gather_shares(function(padded[rank * m : (rank + 1) * m]), self.group)[: len(hidden)]


def tensor_shard(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention: AttentionContext,
    hidden_index: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    key_heads: slice | None,
    length: int = 0,
) -> TensorShard:
    """A micro-batch as the ranks of a tensor-parallel group run it.

    Args:
        input_ids, position_ids, attention, targets, group: as of `shard_micro_batch`.
        hidden_index: [M], packed position whose hidden state predicts each target.
        key_heads: of `TensorParallel`.
        length: tokens with padding, at least.
    """
    size, num_tokens = dist.get_world_size(group), input_ids.shape[1]
    padding = tokens_per_rank(max(num_tokens, length), size) * size - num_tokens
    return TensorShard(
        input_ids=F.pad(input_ids, (0, padding)),  # token 0 at position 0: nothing looks at it
        position_ids=F.pad(position_ids, (0, padding)),
        attention=TensorAttention(attention, num_tokens, key_heads),
        targets=targets,
        hidden_index=hidden_index,
        group=group,
    )


def _num_heads(text: Any) -> tuple[int, int]:
    """Attention heads, and those of keys and values."""
    heads = int(text.num_attention_heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads)


def _planned(module: nn.Module, *, cuts_key_heads: bool) -> Iterator[tuple[nn.Module, str]]:
    """The matrices that the plan of transformers cuts, each with the style of its cut; those of keys and values only
    where there are enough heads."""
    backbone: Any = module.base_model
    plan: Mapping[str, str] = module.config.get_text_config().base_model_tp_plan  # type: ignore[union-attr, operator]
    patterns = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style
        for name, style in plan.items()
        if style in (COLUMNS, ROWS) and (cuts_key_heads or name.rpartition(".")[2] not in _KEYS_AND_VALUES)
    }
    for name, part in backbone.named_modules():
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                yield part, style


def _inside_adapted(styles: Mapping[nn.Module, str]) -> Iterator[tuple[nn.Module, str]]:
    """The matrices inside of planned ones that have an adapter (PEFT), each with the style of its cut: W, and the half
    of the adapter that is cut with it."""
    for part, style in styles.items():
        if (adapted := getattr(part, "base_layer", None)) is not None:
            halves: Any = part.lora_B if style == COLUMNS else part.lora_A
            yield from ((matrix, style) for matrix in (adapted, *halves.values()))


def _parent(module: nn.Module, part: nn.Module) -> nn.Module:
    return next(parent for parent in module.modules() if any(child is part for child in parent.children()))


def _placement(style: str | None, name: str) -> Placement:
    if style == COLUMNS:
        return Shard(0)
    return Shard(1) if style == ROWS and name == "weight" else Replicate()


def _share(count: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First one and number of a rank's rows, cut as torch.chunk does."""
    each = -(-count // num_ranks)
    first = min(rank * each, count)
    return first, min(each, count - first)
