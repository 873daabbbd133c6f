"""Configuration of generation during training."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from annotated_types import Ge, Gt

from strop.config.sections import section
from strop.rollout.openai.config import OpenAIConfig
from strop.rollout.registry import NATIVE, OWN_PROCESSES, REMOTE
from strop.rollout.sglang.config import SglangConfig
from strop.rollout.tracing_config import TraceConfig
from strop.rollout.vllm.config import LEAST_TEMPERATURE, VllmConfig
from strop.utils.field_types import NonEmptyText, NonNegativeInt, PositiveInt, PositiveShare


class SubprocessEngineConfig(Protocol):
    """Settings of an engine in processes of its own."""

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""

    @property
    def memory_share(self) -> float:
        """Share of a device's memory that it takes."""

    @property
    def spans_nodes(self) -> bool:
        """One engine may have its devices on several nodes."""

    @property
    def takes_media(self) -> bool:
        """It is given images and videos, of models that can be read without the model (see engines/multimodal)."""

    def installed(self) -> Path:
        """The Python that it runs in; ValueError, whose sentence says how to get it, where there is none."""


class RemoteModel(Protocol):
    """Settings of a server whose weights are not ours."""

    @property
    def model(self) -> str:
        """Its name on that server."""

    @property
    def base_url(self) -> str:
        """Its address."""

    @property
    def takes_token_ids(self) -> bool:
        """Prompts are sent as ids of the tokenizer of the model folder, which must therefore be named."""

    def check(self) -> None:
        """Raise a ValueError for settings with which nothing can be asked."""


@section("rollout")
class RolloutConfig:
    engine: NonEmptyText = "native"
    """Engine that generates: native, in the process of the policy and with its own weights; vllm or sglang, in
    processes of their own; openai, a server somewhere that answers for `strop eval`, `generate` and `check` and cannot
    be trained (docs/rollout.md); or one of your own (algorithm.extensions) or of an installed package
    (docs/packages.md)."""
    replicas: PositiveInt = 1
    """Engines of each rollout process, with the same weights: of those in processes of their own, so that several
    devices of one trainer generate, and the others go on where one is lost."""
    load_balance: bool = True
    """Rollout processes with nothing to do take over requests of those with much. false: each generates for the prompts
    that it was given, so that a run on several ranks has the same bits each time (native engine on a CPU)."""
    samples_per_prompt: PositiveInt = 8
    """Trajectories per prompt. Group-relative advantages need at least 2."""
    temperature: Annotated[
        float, Gt(0), "greedy decoding has no sampling distribution; for greedy evals set eval.temperature=0"
    ] = 1.0
    """Sampling temperature; the same value divides the logits when log-probs are recomputed."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off. Recorded log-probs stay those of
    the whole distribution, so that they can be compared with the trainer's."""
    top_k: Annotated[NonNegativeInt, "0 is off"] = 0
    """Sample from this many most likely tokens; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the end-of-sequence tokens of the model folder."""
    max_staleness: Annotated[float, Ge(0), "0 is none"] = 0.0
    """Versions of the policy by which generation may run ahead of training. 0: each step waits for its own samples. 1:
    the samples of the next step are begun while this one trains, and those that have not ended go on with the new
    weights. A fraction (0.5) runs ahead by that share of a step. The loss takes its ratio to the policy that sampled,
    unless algorithm.correction says otherwise (docs/asynchronous.md)."""
    over_issue: Annotated[float, Ge(0), "0 is none"] = 0.0
    """Prompts that a step begins beyond those that it trains, as a share of them; it takes those that end first, and
    does not wait for the others (rollout.slowest). To keep what the slowest have, use max_staleness in its place."""
    slowest: Literal["later", "drop"] = "later"
    """Fate of prompts that a step with rollout.over_issue did not wait for. later: they are played afresh in a
    step of their own, as soon as there are enough of them. drop: they are not trained, which favours short answers."""
    longest_first: bool = False
    """Begin with the prompts whose answers were longest at earlier visits, so that a step does not end with a long one
    alone. For runs of several epochs with more sequences in a step than max_running. Samples stay the same."""
    max_running: PositiveInt = 256
    """Sequences decoded together; more wait and enter as others finish."""
    deterministic: bool = False
    """Compute each request alone and from its beginning: on a CPU, tokens and log-probs are then the same to the bit
    whatever runs beside it. Otherwise log-probs differ by rounding, which hardly ever changes a token. Slow: to compare
    runs. For rollout.engine=native."""
    router_replay: bool = False
    """Train a model with experts on the routing of the rollout (R3): the experts that each token went to while it was
    generated are recorded, and log-probs and updates send it to the same ones, with weights from the trainer's own
    router logits. For rollout.engine=native and vllm, and samples that are played for their own step.
    Source: Ma et al. 2025, arXiv:2510.11370."""
    timeout_s: Annotated[float, Gt(0), ".inf is no limit"] = 600.0
    """Wall-clock limit of one generation request, in seconds, from its first token on. The wait for a free place does
    not count, unless an engine in a process of its own neither begins nor ends a request for so long."""
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    @property
    def is_streamed(self) -> bool:
        """Samples are played over several calls, and a step takes those that have ended."""
        return self.max_staleness > 0 or self.over_issue > 0

    @property
    def remote(self) -> RemoteModel | None:
        """The settings of the server that generates, where its weights are not ours; None of every engine of ours."""
        model: RemoteModel | None = getattr(self, self.engine) if self.engine in REMOTE else None
        return model

    @property
    def own_processes(self) -> SubprocessEngineConfig | None:
        """The settings of the engine in processes of its own that generates; None of every other engine."""
        settings: SubprocessEngineConfig | None = (
            getattr(self, self.engine) if self.engine in OWN_PROCESSES else None
        )
        return settings

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return 1 if self.own_processes is None else self.own_processes.num_devices

    @property
    def spans_nodes(self) -> bool:
        """One engine may have its devices on several nodes."""
        return self.own_processes is not None and self.own_processes.spans_nodes

    def __post_init__(self) -> None:
        if self.over_issue and self.max_staleness:
            raise ValueError(
                f"rollout.over_issue is {self.over_issue:g} and rollout.max_staleness {self.max_staleness:g}: with the "
                f"latter what a step does not wait for is kept for the next one; set one of them to 0"
            )
        for name in (*OWN_PROCESSES, *REMOTE):
            section = getattr(self, name)
            if self.engine != name and section != type(section)():
                raise ValueError(
                    f"a setting of rollout.{name} is given, but rollout.engine={self.engine} does not read it: set "
                    f"rollout.engine={name}, or remove it"
                )
        if self.replicas > 1 and (self.engine == NATIVE or self.remote):
            raise ValueError(
                f"rollout.replicas is {self.replicas}, and rollout.engine={self.engine} has one engine in each rollout "
                f"process: use resources.apart={{rollout: N}} for more processes, or rollout.engine=vllm"
            )
        cuts = self.top_p < 1 or self.top_k > 0
        if self.engine == "vllm" and cuts and self.vllm.engine_args.get("speculative_config"):
            raise ValueError(
                f"rollout.vllm.engine_args has speculative_config, with which vLLM gives log-probs of the distribution "
                f"that rollout.top_p={self.top_p:g} and rollout.top_k={self.top_k} cut, and the trainer computes those "
                f"of the whole one: set rollout.top_p=1 rollout.top_k=0, or remove it"
            )
        if self.engine == "vllm" and 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature is {self.temperature:g}, and vLLM samples at {LEAST_TEMPERATURE:g} whatever is "
                f"asked for between 0 and that, while the trainer computes with yours: set at least that"
            )
        if self.deterministic and self.engine != "native":
            raise ValueError(
                f"rollout.deterministic is true, but rollout.engine={self.engine} decides itself what it computes "
                f"together: use rollout.engine=native, or remove it"
            )
        if self.remote:
            self.remote.check()


def check_trainable(rollout: RolloutConfig) -> None:
    """Refuse an engine whose weights cannot be trained.

    Raises:
        ValueError: the model is somebody else's.
    """
    if remote := rollout.remote:
        raise ValueError(
            f"rollout.engine={rollout.engine} asks {remote.model} at {remote.base_url}, whose weights nobody here can "
            f"train: it serves `strop eval`, `strop generate` and `strop check`; use "
            f"{', '.join((NATIVE, *OWN_PROCESSES))} or one of your own"
        )
