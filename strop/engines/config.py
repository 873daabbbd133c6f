"""Configuration of a model and of the engine that trains it."""

from __future__ import annotations

import datetime
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from strop.config.sections import section
from strop.utils.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
)

DecayRate = Annotated[float, Ge(0), Lt(1)]


@section("model.lora")
class LoraConfig:
    """Low-rank adapters instead of all weights: W + alpha / rank * B A, with A and B trained and W frozen.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: Annotated[NonNegativeInt, "0 trains all weights"] = 0
    """Rows of A and columns of B; 0 trains all weights instead."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names, or ends of names, of the linear layers that get an adapter; all-linear: every one but the head. Experts
    that a model keeps as one stacked parameter are no linear layers: they get one, each of its own, where the parameter
    is named, such as experts.gate_up_proj."""
    path: str = ""
    """Continue from this PEFT adapter folder, whose rank must be the one above and whose alpha and targets are used;
    empty to start at zero."""

    def __post_init__(self) -> None:
        if self.path and self.rank == 0:
            raise ValueError(
                f"model.lora.path is {self.path!r}, but model.lora.rank is 0, which trains all weights; set the rank "
                f"of the adapter in that folder"
            )
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                f"model.lora.target_modules is {list(self.target_modules)}; name at least one layer, or use "
                f"[all-linear]"
            )
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(
                f"model.lora.target_modules is {list(self.target_modules)}; all-linear stands alone, other names "
                f"do not add to it"
            )

    @property
    def enabled(self) -> bool:
        """Adapters are trained instead of all weights."""
        return self.rank > 0


def _no_such_attention(name: str) -> str:
    """Reason for which attention of this name of transformers is not here."""
    if name.startswith("flash_attention"):
        return (
            "with sdpa FlashAttention's kernel in PyTorch computes bfloat16 and float16 on CUDA, and the package "
            "flash-attn is not used"
        )
    if name == "flex_attention":
        return "flex attention has no backward pass on a CPU, and is not used"
    return "there is no kernel of that name"


@section("model")
class ModelConfig:
    path: str = ""
    """Model folder with config.json, weights as safetensors, and a tokenizer with a chat template; or where it is
    fetched from: ORG/NAME of the Hugging Face hub, modelscope:ORG/NAME, or a URL such as s3://bucket/folder. The other
    `path` settings of models take the same."""
    revision: str = ""
    """Branch, tag or commit of a model of a hub; empty: its main branch, as it is when the run starts."""
    local_files_only: bool = False
    """Contact no hub and no store: use the copies that are in the cache, as HF_HUB_OFFLINE=1 does."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Settings of config.json that are changed before the model is made, for example {rope_theta: 1000000.0}; for the
    policy, and for a reference and a critic. Generation by vLLM and SGLang does not know them and is refused."""
    tokenizer_path: str = ""
    """Folder of the tokenizer and its chat template, if not `path`; or a name as there."""
    chat_template: str = ""
    """Jinja template in place of the tokenizer's: the text itself, or a file. Saved with the checkpoints."""
    external_lib: str = ""
    """Python module that is imported before the model is made, in every process; it may register model classes."""
    template_date: str = ""
    """Date that a chat template which asks for it is told, as 2026-11-26 or 2026-11-26T14:30; empty: the day on which a
    run begins, which it keeps."""
    keep_special_tokens: tuple[str, ...] | None = None
    """Special tokens that stay in the text of an answer, which rewards get and samples show, such as
    ["<think>", "</think>"]; [] for none. null: pairs that open and close a part of an answer, as these do."""
    attn_implementation: str = "sdpa"
    """Attention on packed tokens, and in the part that reads images. sdpa: PyTorch's fused kernels, on
    CUDA FlashAttention among them, and strop's own kernels for decoding on a CPU; eager: matrix products and a softmax,
    to look for a fault in kernels. For the policy, and for a reference and a critic; engines of their own process
    (vLLM, SGLang) have their own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute precision; master weights stay in float32 (float64 for float64). auto: bfloat16 on an
    accelerator, float32 on a CPU, where bfloat16 is often slower. float16 needs an accelerator; losses are scaled."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Off by default: it is somebody else's program."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more compute."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters instead of all weights."""
    use_liger: bool = False
    """Run norms, SwiGLU and rotary embeddings through liger-kernel; CUDA only (install strop[liger])."""
    freeze_vision_tower: bool = False
    """Train the language part of a vision-language model alone; the part that reads images stays as it is."""

    def __post_init__(self) -> None:
        try:
            datetime.datetime.fromisoformat(self.template_date or "2026-11-26")
        except ValueError as error:
            raise ValueError(
                f"model.template_date is {self.template_date!r}, which is no date: write it as 2026-11-26, with a time "
                f"of day as 2026-11-26T14:30"
            ) from error
        if self.attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"model.attn_implementation is {self.attn_implementation!r}, and strop computes attention on packed "
                f"tokens itself: {_no_such_attention(self.attn_implementation)}; choose sdpa or eager"
            )

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer."""
        return self.tokenizer_path or self.path


@section("optim")
class OptimizerConfig:
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit keeps AdamW's moments in 8 bits (install strop[optim8bit]); muon orthogonalises the update of
    hidden matrices, with AdamW for embeddings, head, norms and biases."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's, so one value serves both."""
    weight_decay: Annotated[NonNegativeFloat, "0 is none"] = 0.01
    """Decoupled weight decay; not applied to biases and normalisation weights."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: NonNegativeFloat = 1e-8
    """AdamW's denominator offset."""
    momentum: DecayRate = 0.95
    """Muon's decay rate of past gradients; unused by the others."""
    max_grad_norm: Annotated[float, Gt(0), ".inf never clips"] = 1.0
    """Gradients are scaled down to this global L2 norm; .inf never clips."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to min_lr_ratio at the last optimizer step. wsd
    (warm-up, stable, decay) stays at the peak and decays linearly over the last decay_share of the steps."""
    decay_share: PositiveShare = 0.1
    """Share of all optimizer steps over which wsd decays; unused by the others."""
    warmup_steps: Annotated[NonNegativeInt, "0 is none"] = 0
    """Optimizer steps of linear warm-up from 0."""
    warmup_share: Share = 0.0
    """The same as a share of all optimizer steps of the run, to the nearest whole step; in place of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end of a decaying schedule, as a share of lr."""

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                f"optim.warmup_steps is {self.warmup_steps} and optim.warmup_share is {self.warmup_share:g}, which "
                f"both say how long the warm-up is: set one of them to 0"
            )


@section("moe")
class MoEConfig:
    """Training of the routers of a model with experts; a dense model has none."""

    balance_loss_coef: NonNegativeFloat = 0.0
    """Factor of the load-balancing loss of each layer, E sum_i f_i P_i over the tokens of the optimizer batch: 1 where
    all experts are chosen alike. Counting the choices takes one more forward pass. 0: none."""
    z_loss_coef: NonNegativeFloat = 0.0
    """Factor of the router z-loss of each layer, the mean of (log sum exp logits)^2, which keeps logits small; 0: none.
    """

    @property
    def is_on(self) -> bool:
        """Routers have a loss."""
        return self.balance_loss_coef > 0 or self.z_loss_coef > 0


@section("engine.megatron")
class MegatronConfig:
    distributed_optimizer: bool = True
    """Each data-parallel rank holds and updates its share of the optimizer state; false: all hold all of it."""
    transformer_config: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig, such as {moe_permute_fusion: true}."""


@section("engine")
class EngineConfig:
    kind: Literal["torch", "megatron"] = "torch"
    """Implementation of the model and its training: torch, the model of transformers with FSDP2; megatron, the layers,
    pipeline and optimizer of megatron-core (install strop[megatron]), for some families of text models."""
    max_tokens_per_device: PositiveInt = 16384
    """Hard bound on the packed tokens of one forward pass. What rows begin with alike counts once."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each sequence (Ulysses). It divides the number of ranks and of attention heads."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each matrix: heads, hidden units and rows of the vocabulary, and between them the tokens of a
    sequence. It divides the number of ranks and all of these but the vocabulary."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of each sequence and gather keys and values of all: for any number of heads. Together
    with sequence_parallel or tensor_parallel each of them is that many ranks."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that the layers are divided over; micro-batches pass through them one after the other."""
    pipeline_chunks: PositiveInt = 1
    """Runs of layers that each of these ranks has (interleaved stages): they wait less, and send more."""
    pipeline_layers: tuple[PositiveInt, ...] = ()
    """Layers of each stage, in order, such as [5, 6, 6, 5]; empty: as evenly as they can be."""
    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of the passes in training. 1f1b: one forward, one backward, also interleaved; zero_bubble (ZB-H1):
    where a rank would wait for others it computes gradients of weights, and keeps their factors until then."""
    expert_parallel: PositiveInt = 1
    """Ranks that the experts of each layer are divided over; tokens travel to those of theirs. Of the ranks that rows
    and sequences are divided over: it takes no further ones."""
    shard_size: Annotated[NonNegativeInt, "0 is all ranks"] = 0
    """Ranks over which parameters, gradients and optimizer state are sharded; 0: all. A smaller number, a divisor of
    that of the ranks, keeps one copy per such group (hybrid sharding): more memory, less traffic between nodes."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters between its forward and backward pass: less memory, one more gathering."""
    gradient_sync: Literal["last", "each"] = "last"
    """When ranks add up their gradients: after the last micro-batch of an optimizer step, or after each one, which
    needs no memory for a whole gradient but sends it as often as there are micro-batches."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State that lies in host memory of an accelerator's machine: nothing; the optimizer state between steps; or
    parameters, gradients and optimizer state always, with the optimizer step on the host (several ranks only)."""
    offload_activations: bool = False
    """Keep activations in host memory between the forward and the backward pass."""
    compile: bool = False
    """Compile the decoder layers with torch.compile, once for micro-batches of any packing; in half precision on CUDA
    with FlashAttention inside. The first steps take longer."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Settings of kind=megatron."""
