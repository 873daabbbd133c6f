"""CausalLM: one model object for training, scoring and native generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.engines.attention import ATTENTION_NAME, FORMULA_NAME
from strop.engines.attention_form import AttentionContext
from strop.engines.compiled_layers import in_compiled_layers, uncompiled
from strop.engines.cpu_products import HalfProducts, layer_products, steady_rows
from strop.engines.head import Head
from strop.engines.linear_attention.states import recurrence_of
from strop.engines.model_facts import check_saved, logit_form, max_positions
from strop.engines.moe.layers import moe_layers
from strop.engines.moe.routing import RouterPass, Routers, RoutingRecord, routers_of
from strop.engines.multimodal.vl_model import Vision
from strop.engines.parallel.experts import ExpertParallel
from strop.engines.parallel.pipeline import Pipeline
from strop.engines.parallel.tensor import TensorParallel
from strop.engines.parallel.token_exchange import gather_tokens
from strop.engines.parallel.vocabulary import VocabularyShard
from strop.engines.transformers4 import write_older_config
from strop.utils.atomic_io import share_as_usual

HALF = (torch.bfloat16, torch.float16)
"""Precisions of computation whose parameters are kept in float32."""
P = ParamSpec("P")
T = TypeVar("T")


class CausalLM:
    """A causal language model whose forward pass takes packed tokens and an attention context.

    Training and native generation use one such object: the same parameters, the same functions. Its head gives
    logits of the next token, or, for a value or reward model, one number per token.
    """

    def __init__(self, module: nn.Module, *, compute_dtype: torch.dtype, media: Vision | None = None) -> None:
        self.module = module
        self.media = media
        """Vision part of the model; None for a model that takes text alone."""
        self.compute_dtype = compute_dtype
        self.config: Any = module.config
        self.root: nn.Module | None = None
        """While parameters are sharded over ranks: what every forward pass goes through, so that the hooks of sharding
        see, gather and cast all parameters that are used in it."""
        self.tensor_parallel: TensorParallel | None = None
        """While every matrix is cut over several ranks: what cut them."""
        self.pipeline: Pipeline | None = None
        """While layers are divided over several ranks: what divided them."""
        self.expert_parallel: ExpertParallel | None = None
        """While the experts have ranks of their own: what divided them."""
        self.copy_group: dist.ProcessGroup | None = None
        """The ranks that generate together, each with its part of one copy of the model; None where this one has all
        of it."""
        self._backbone = _backbone(module)
        self._forward: Callable[..., Any] = (media.hidden if media else None) or self._backbone
        self._head = head_of(module)
        self._logit_form = logit_form(module)
        self.unused_tokens: tuple[int, ...] = ()
        """Ids of rows of the head that no text has (unused_tokens.py); before the first pass."""
        self._banned: Tensor | None = None
        self._is_compiled = False
        self.num_changes = 0
        """Times that somebody has said that the weights are others; whoever keeps copies of them compares it. Not every
        optimizer of torch moves the version of a tensor that it writes to."""
        self.device = self._head.weight.device
        self.recurrence = recurrence_of(module)
        """Layers that carry a state from token to token; None where all attend."""
        _disable_randomness(module)
        experts = moe_layers(module)
        self._routers = routers_of(experts, self._layers() or []) if experts else None

    @property
    def routers(self) -> Routers | None:
        """The routers of its experts, of all stages; None for a dense model, or one whose layers are compiled or of no
        known form."""
        return None if self._is_compiled else self._routers

    @property
    def is_sharded(self) -> bool:
        """The parameters are sharded over ranks."""
        return self.root is not None

    @property
    def is_value_model(self) -> bool:
        """The head gives one number per token in place of logits."""
        return self.module.get_output_embeddings() is None  # type: ignore[operator]

    @property
    def head_weight(self) -> Tensor:
        """[V, D] of the head; [1, D] of a value head. While parameters are sharded, only inside `run`."""
        return self._head.weight

    @property
    def head(self) -> Head:
        """The head as a function. While parameters are sharded, only inside `run`."""
        is_half = self.compute_dtype in HALF and self.device.type != "cpu"
        if self.pipeline is not None and not self.pipeline.has_head:  # of no tokens it says nothing
            nothing = torch.zeros(1, self.hidden_size, dtype=self.compute_dtype, device=self.device)
            return Head(nothing.expand(self.head_weight.shape))
        weight: Tensor = self._head.weight
        bias: Tensor | None = self._head.bias
        if self.tensor_parallel is not None:
            weight = self.tensor_parallel.local(weight)
            bias = None if bias is None else self.tensor_parallel.local(bias)
        return Head(
            weight,
            bias,
            self._banned_ids,
            *self._logit_form,
            product_dtype=self.compute_dtype if is_half else None,
            vocabulary=self.vocabulary,
        )

    @property
    def vocabulary(self) -> VocabularyShard | None:
        """Tokens that this rank has the logits of; None where it has all of them, or a value head."""
        if self.tensor_parallel is None or self.is_value_model:
            return None
        return self.tensor_parallel.vocabulary(self.vocab_size)

    @property
    def key_heads(self) -> slice | None:
        """Key heads, of all, that the queries of this rank attend with; None where it has those alone."""
        return None if self.tensor_parallel is None else self.tensor_parallel.key_heads

    @property
    def _banned_ids(self) -> Tensor | None:
        """`never_sampled`, which have probability zero everywhere; None without any."""
        if self.never_sampled and (self._banned is None or self._banned.device != self.device):
            with torch.inference_mode(False):  # generation asks first, and training saves it for backward
                self._banned = torch.tensor(self.never_sampled, device=self.device)
        return self._banned

    @property
    def media_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for media."""
        return () if self.media is None else tuple(sorted(self.media.token_ids.values()))

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Ids of the tokens that are never sampled: those that stand for media, and those that no text has."""
        return tuple(sorted({*self.media_tokens, *self.unused_tokens}))

    @property
    def vocab_size(self) -> int:
        """Rows of the language-model head; a tokenizer may use fewer."""
        return int(self.head_weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return int(self.config.get_text_config().hidden_size)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model's positions are made for; None when the configuration names none."""
        return max_positions(self.config)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order.

        Raises:
            ValueError: the architecture keeps them in an unknown place.
        """
        layers = self._layers()
        if layers is None:
            raise ValueError(
                f"{type(self.module).__name__} has no list of its layers, which sharding and compilation need; run "
                f"this role in one process without engine.compile"
            )
        return layers

    def _layers(self) -> list[nn.Module] | None:
        """The decoder layers; None where they are in an unknown place."""
        count = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        decoder = self._backbone if self.media is None else self.module.get_decoder()  # type: ignore[operator]
        for part in decoder.modules():
            if isinstance(part, nn.ModuleList) and len(part) == count:
                return list(part)
        return None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` as one forward pass of the model: a tensor or a tuple of tensors.

        Whatever uses parameters runs in here: backbone, head, and what is between them.
        """
        if self.root is None:
            return function(*args, **kwargs)
        result: T = self.root(partial(function, *args, **kwargs))
        return result

    def backbone(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        media: Mapping[str, Tensor] | None = None,
        received: Tensor | None = None,
        routing: RouterPass | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] of packed tokens [1, N]; part of a `run`.

        Args:
            input_ids: [1, N].
            position_ids: [1, N]; [3, 1, N] where a token stands for media.
            context: which token looks at which.
            media: of the tokens, in their order (`strop.engines.multimodal.vl_model.Vision.arguments`).
            received: hidden states [N, D] of the stage before this one, in place of embeddings; results are then, as on
                the first of several stages, those of this stage.
            routing: that the routers of a model with `routers` take part in.
        """
        if self.recurrence is not None:
            context = self.recurrence.packed(context)
        if self._is_compiled:
            context = in_compiled_layers(context)
        # Of one token a compiler would make another function: sizes of 1 are not sizes to it.
        is_eager = self._is_compiled and input_ids.shape[1] == 1
        with self.precision(), self._routed(routing), uncompiled() if is_eager else contextlib.nullcontext():
            start = {"input_ids": input_ids} if received is None else {"inputs_embeds": received[None]}
            output = self._forward(
                **start,
                position_ids=position_ids,
                use_cache=False,
                strop_context=context,
                strop_positions=position_ids,
                **(media or {}),
            )
            hidden: Tensor = output.last_hidden_state.squeeze(0)
            if media is None and self.media is not None and self.is_sharded:
                hidden = self.media.touched(hidden)
        return hidden

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        media: Mapping[str, Tensor] | None = None,
        routing: RouterPass | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] of packed tokens [1, N], as a `run` of its own; arguments as of `backbone`.

        Where several ranks hold a copy of the model, all of them call this with the same tokens, and have all states.
        """
        if self.tensor_parallel is not None:
            assert media is None, "images are refused where ranks share each sequence"
            hidden = self.tensor_parallel.hidden(
                partial(self._of_all_stages, routing=routing), input_ids, position_ids, context
            )
            if isinstance(routing, RoutingRecord):  # of this rank's tokens
                routing.gather(partial(gather_tokens, group=self.tensor_parallel.group), input_ids.shape[1])
                self._join_stages(routing, input_ids.shape[1])
            return hidden
        # Shapes change with every decode step here; compiled layers are for training.
        with uncompiled() if self._is_compiled else contextlib.nullcontext():
            hidden = self._of_all_stages(input_ids, position_ids, context, media, routing=routing)
        if isinstance(routing, RoutingRecord):
            self._join_stages(routing, input_ids.shape[1])
        return hidden

    def _of_all_stages(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        media: Mapping[str, Tensor] | None = None,
        *,
        routing: RouterPass | None,
    ) -> Tensor:
        """As `backbone`, a `run` for each stage that is here; with tensor parallelism of this rank's share of the
        tokens."""
        if self.pipeline is None or self.pipeline.is_whole:
            return self.run(self.backbone, input_ids, position_ids, context, media, routing=routing)
        num_tokens = input_ids.shape[1]
        if self.tensor_parallel is not None:
            num_tokens //= self.tensor_parallel.group.size()
        return self.pipeline.hidden(
            lambda received, own: self.run(
                self.backbone, input_ids, position_ids, own, received=received, routing=routing
            ),
            context,
            shape=(num_tokens, self.hidden_size),
            dtype=self.compute_dtype,
        )

    def _join_stages(self, record: RoutingRecord, num_tokens: int) -> None:
        """Tell the routing of every stage to each, after a pass that went through them."""
        if self.pipeline is not None and not self.pipeline.is_whole and self.routers is not None:
            count = self.routers.num_layers
            record.join(partial(self.pipeline.of_layers, num_layers=count, num_tokens=num_tokens))

    def _routed(self, routing: RouterPass | None) -> contextlib.AbstractContextManager[None]:
        if routing is None or self.routers is None:
            return contextlib.nullcontext()
        return self.routers.routed(routing)

    def compile_layers(self) -> None:
        """Compile the decoder layers (compiled_layers.py)."""
        for layer in self.layers:
            layer.compile(dynamic=True)
        self._is_compiled = True

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Compute in bfloat16 or float16 when the configuration says so; the parameters stay as they are. On a CPU
        layers multiply by cpu_products.py."""
        # Elsewhere no parameter is looked at.
        is_computed_here = self.device.type == "cpu" and self._is_computed_here
        with contextlib.ExitStack() as entered:
            if self.compute_dtype in HALF and not self.is_sharded:
                entered.enter_context(torch.autocast(self.device.type, dtype=self.compute_dtype))
                if is_computed_here and self.compute_dtype == torch.bfloat16:
                    entered.enter_context(HalfProducts())
            elif is_computed_here:
                entered.enter_context(layer_products(self.module.parameters()))
            elif self.device.type == "cpu" and not self._is_compiled:
                entered.enter_context(steady_rows())
            yield

    @property
    def _is_computed_here(self) -> bool:
        """Layers are not computed again, or by a compiler, outside of a forward pass."""
        return not self.is_sharded and not self._is_compiled and not self.is_recomputed

    @property
    def is_recomputed(self) -> bool:
        """The backward pass computes the layers again (model.gradient_checkpointing)."""
        return bool(self.module.is_activation_checkpointing)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; tied ones once."""
        return self.module.named_parameters()

    def embedding_names(self) -> frozenset[str]:
        """Names of the parameters of embeddings and head, whose rows are tokens and not directions."""
        modules = self.module.modules()
        outer = [part for part in modules if isinstance(part, nn.Embedding) or part is self._head]
        ids = {id(parameter) for part in outer for parameter in part.parameters(recurse=False)}
        return frozenset(name for name, parameter in self.named_parameters() if id(parameter) in ids)

    def save(self, folder: Path) -> None:
        """Write config and weights as an ordinary Hugging Face folder (safetensors); not for a sharded model."""
        self.module.save_pretrained(folder)  # type: ignore[operator]
        self.save_media_settings(folder)
        self.finish_saved(folder)

    def finish_saved(self, folder: Path) -> None:
        """Open saved weights to others, give their config.json the names of transformers 4 too, and compare the two.

        Raises:
            ValueError: they are of two models.
        """
        share_as_usual(*folder.glob("*.safetensors"))
        write_older_config(folder)
        if self.module.get_output_embeddings() is not None:  # type: ignore[operator]
            check_saved(folder)

    def save_media_settings(self, folder: Path) -> None:
        """Write how media are read beside saved weights; nothing for a model that takes text alone."""
        if self.media is not None:
            self.media.save_settings(folder)


def use_packed_attention(module: Any, media: Vision | None, *, by_formula: bool) -> None:
    """Give a model attention over packed tokens; with `by_formula` also the part that reads media computes by it."""
    name = FORMULA_NAME if by_formula else ATTENTION_NAME
    module.set_attn_implementation(name if media is None else media.attention(name, by_formula=by_formula))


def _backbone(module: Any) -> nn.Module:
    """Module that gives the final hidden states."""
    # Llama 4 names a base that it does not have, with images and without, and is then its own.
    base: Any = module.base_model
    if base is module:
        base = getattr(module, "language_model", module).model
    backbone: nn.Module = base
    return backbone


def head_of(module: Any) -> nn.Linear:
    """The language-model head, or the head of a sequence-classification model."""
    head = module.get_output_embeddings()
    linear: nn.Linear = module.score if head is None else head
    return linear


def _disable_randomness(module: nn.Module) -> None:
    """Set every dropout and every noise of a router to 0: a sampled log-prob must be the trained one."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():  # OPT and others keep rates as plain numbers
            if isinstance(value, float) and any(word in name for word in ("drop", "jitter", "noise")):
                setattr(part, name, 0.0)
