"""Settings of scoring services over HTTP: address, requests, and limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import regex  # type: ignore[import-untyped]

from strop.config.sections import section
from strop.rewards.judges.rubrics import (
    COMPARING_PLACES,
    CRITERIA_TEMPLATE,
    DEFAULT_RUBRIC,
    DEFAULT_TEMPLATE,
    LIST_TEMPLATE,
    MARK,
    PAIR_TEMPLATE,
    PLACES,
    CriterionConfig,
    check_criteria,
)
from strop.utils.call_limits import CallLimits, check_address
from strop.utils.field_types import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class CallsConfig(CallLimits):
    """Calls of a scoring service: time limits, rates, repeats and cache."""

    ADDRESS: ClassVar[str]
    """Full key of the setting with its address; where that is empty, there is no service."""

    weight: FiniteFloat = 1.0
    """Of this score in the sum, where there are others."""
    timeout_s: PositiveFloat = 60.0
    """Wall-clock limit of one request, in seconds."""
    cache_dir: str = ""
    """Folder that keeps answers by request, so that an equal request is asked once: by several runs, too, and after a
    crash. Empty: nothing is kept."""

    @property
    def key(self) -> str:
        """Full key of the section."""
        return self.ADDRESS.rpartition(".")[0]

    @property
    def address(self) -> str:
        """URL of the service; empty where there is none."""
        return str(getattr(self, self.ADDRESS.rpartition(".")[2]))

    @property
    def scores(self) -> bool:
        """The service is asked."""
        return bool(self.address)

    @property
    def has_price(self) -> bool:
        """True if requests cost something."""
        return False

    @property
    def compares(self) -> bool:
        """True if it compares the answers to a prompt, and scores none by itself."""
        return False

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """The address; see strop.config.sections.code_of."""
        if self.scores:
            secret = f" and your {self.api_key_env}" if self.api_key_env else ""
            yield self.ADDRESS.rpartition(".")[2], f"{self.address} (gets the answers{secret})", ""

    def share(self, rank: int, count: int) -> Self:
        """The limits of process `rank` of `count`, such that all of them together keep those of the run.

        Raises:
            ValueError: there are more processes than requests that may be under way.
        """
        if self.max_concurrent < count:
            raise ValueError(
                f"{self.key}.max_concurrent is {self.max_concurrent}, for the whole run, but {count} rollout "
                f"workers ask, each at least one thing at a time: raise it to {count} or more, or use fewer workers "
                f"(resources.ranks, resources.apart.rollout)"
            )
        return replace(
            self,
            max_concurrent=self.max_concurrent // count + (rank < self.max_concurrent % count),
            requests_per_s=None if self.requests_per_s is None else self.requests_per_s / count,
        )

    def _refuse_settings(self) -> None:
        """Refuse settings of a service without an address, which cannot apply."""
        for setting in fields(self):
            factory = setting.default_factory
            default = factory() if factory is not MISSING else setting.default
            if getattr(self, setting.name) != default:
                raise ValueError(
                    f"{self.key}.{setting.name} is set, but {self.ADDRESS} is empty, so nothing is asked: set the "
                    f"address, or remove the setting"
                )

    def _check_address(self) -> None:
        check_address(self.ADDRESS, self.address)


@section("reward.judge")
class JudgeConfig(CallsConfig):
    """A language model that grades answers, on any server with OpenAI's chat completions."""

    ADDRESS: ClassVar[str] = "reward.judge.base_url"

    base_url: str = ""
    """Address up to and without /chat/completions, such as https://api.openai.com/v1. Empty: no judge."""
    model: str = ""
    """Name of the model on that server."""
    rubric: str = DEFAULT_RUBRIC
    """Question to the judge about the answer; fills {rubric} in the template."""
    criteria: tuple[CriterionConfig, ...] = ()
    """Several things that are scored each for itself, in one request; the score is their weighted mean, and each is a
    part of the reward. In place of rubric."""
    compare: Literal["none", "pairs", "list"] = "none"
    """Compare the answers to a prompt with each other once all have ended, in place of scoring each. pairs: two by two,
    in both orders. list: all in one request, repeated with each of them shown first. The score is the share of the
    others that an answer is better than, from 0 to 1."""
    rounds: PositiveInt | None = None
    """With compare=pairs, each answer meets the so many answers that follow it, and those before it meet it in the same
    way; null: everybody meets everybody."""
    votes: PositiveInt = 1
    """Verdicts per answer, each with a seed of its own; the score is their mean. For judges that think at a temperature
    above 0."""
    template: str = DEFAULT_TEMPLATE
    """The prompt of the judge, with the places {question}, {answer}, {reference} (the ground truth, where there is
    one), {rubric} (or the criteria), {lowest}, {highest}, and {tag}: letters that an answer cannot know, for tags
    around it. Where answers are compared {answers}, which has the tags, in place of {answer}, {lowest} and {highest}.
    As it is, each way of judging has its own. With "id": "{tag}" in it, a verdict counts only with that field."""
    score_field: str = "score"
    """Field of the last JSON object in the judge's reply that holds the score. Not read where pattern is set."""
    pattern: str = ""
    """Regular expression whose first group is the score, read from its last match; for replies without JSON."""
    lowest: FiniteFloat = 0.0
    """Lowest score of the rubric. A reply outside of lowest to highest is no verdict."""
    highest: FiniteFloat = 1.0
    """Highest score of the rubric."""
    temperature: NonNegativeFloat = 0.0
    """Of the judge."""
    max_tokens: PositiveInt = 1024
    """Tokens that a reply may have, thinking included."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as {seed: 1}."""
    price_per_million_input_tokens: NonNegativeFloat = 0.0
    """For metrics and max_cost: price of a million prompt tokens, in any currency."""
    price_per_million_output_tokens: NonNegativeFloat = 0.0
    """For metrics and max_cost: price of a million reply tokens, in the same currency."""
    max_cost: Annotated[PositiveFloat, "null is no limit"] | None = None
    """Cost limit of the judge for the run, over all its starts, in that currency; null: no limit. Once it is spent
    nothing more is asked, and samples get the outcome infrastructure; requests under way then still end. `strop score`
    and `strop eval` count for themselves."""

    def __post_init__(self) -> None:
        if not self.scores:
            self._refuse_settings()
            return
        self._check_address()
        if not self.model:
            raise ValueError("reward.judge.model is empty; name the model that the server at base_url has")
        if self.lowest >= self.highest:
            raise ValueError(
                f"reward.judge.lowest is {self.lowest} and highest {self.highest}; use two numbers in order"
            )
        self._check_ways()
        if self.max_cost is not None and not self.has_price:
            raise ValueError(
                "reward.judge.max_cost is set, but both prices are 0, so nothing would ever be counted: set "
                "reward.judge.price_per_million_input_tokens and price_per_million_output_tokens"
            )
        self._check_texts()

    @property
    def has_price(self) -> bool:
        """True if requests cost something."""
        return self.price_per_million_input_tokens > 0 or self.price_per_million_output_tokens > 0

    @property
    def compares(self) -> bool:
        """True if it compares the answers to a prompt, and scores none by itself."""
        return self.compare != "none"

    @property
    def prompt(self) -> str:
        """The template in force."""
        if self.template != DEFAULT_TEMPLATE:
            return self.template
        default = {"none": DEFAULT_TEMPLATE, "pairs": PAIR_TEMPLATE, "list": LIST_TEMPLATE}[self.compare]
        return CRITERIA_TEMPLATE if self.criteria else default

    @property
    def marks_verdicts(self) -> bool:
        """A verdict counts only with the letters of the prompt's tags in it."""
        return MARK in self.prompt

    def _check_ways(self) -> None:
        """Ways of judging that exclude each other."""
        check_criteria(self.criteria)
        way = "criteria is set" if self.criteria else f"compare is {self.compare}"
        if self.criteria or self.compare != "none":
            for key, is_set in (
                ("pattern", self.pattern),
                ("score_field", self.score_field != "score"),
                ("rubric", self.criteria and self.rubric != DEFAULT_RUBRIC),
                ("compare", self.criteria and self.compare != "none"),
                ("lowest", self.compare != "none" and self.lowest != 0),
                ("highest", self.compare != "none" and self.highest != 1),
                ("votes", self.compare != "none" and self.votes > 1),
            ):
                if is_set:
                    raise ValueError(f"reward.judge.{key} is not used where reward.judge.{way}: remove one")
        if self.rounds is not None and self.compare != "pairs":
            raise ValueError(
                f"reward.judge.rounds is {self.rounds}, but only reward.judge.compare=pairs has rounds: remove it"
            )
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"reward.judge.votes is {self.votes}, but at reward.judge.temperature=0 all votes are the same: raise "
                f"the temperature, or remove it"
            )

    def _check_texts(self) -> None:
        placeholder = "{answers}" if self.compare != "none" else "{answer}"
        if placeholder not in self.prompt:
            raise ValueError(
                f"reward.judge.template has no place {placeholder}, so the judge would not see the answer"
            )
        key = "criteria" if self.criteria else "rubric"
        if "{rubric}" not in self.prompt and (self.criteria or self.rubric != DEFAULT_RUBRIC):
            raise ValueError(
                f"reward.judge.{key} is set, but reward.judge.template has no place {{rubric}} for it"
            )
        places = COMPARING_PLACES if self.compare != "none" else PLACES
        try:
            self.prompt.format(**dict.fromkeys(places, ""))
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"reward.judge.template cannot be filled in ({type(error).__name__}: {error}): its places are "
                f"{', '.join(places)}; other braces are written twice"
            ) from error
        if self.pattern:
            if self.score_field != "score":
                raise ValueError(
                    "reward.judge.score_field is not read where reward.judge.pattern is set: remove one"
                )
            try:
                groups = regex.compile(self.pattern).groups
            except regex.error as error:
                raise ValueError(f"reward.judge.pattern is no regular expression: {error}") from error
            if not groups:
                raise ValueError("reward.judge.pattern has no group: put the score in parentheses")


@section("reward.server")
class ServerConfig(CallsConfig):
    """A reward model behind an HTTP address."""

    ADDRESS: ClassVar[str] = "reward.server.url"

    url: str = ""
    """Full address that takes the POST requests. Empty: no server."""
    format: Literal["items", "score", "classify"] = "items"
    """Of the requests. items: strop's own (docs/rewards.md). score, classify: those of vLLM's /score and /classify."""
    model: str = ""
    """Name of the model, for servers that want one (score, classify)."""
    tokenizer: str = ""
    """Folder of the reward model's tokenizer, for format=classify: conversations become text here, by its chat
    template. Empty: each is sent as messages, and the server uses the chat template of its model."""
    use_activation: bool = False
    """For format=classify. false: the raw output of the model, on which reward models were trained. true:
    probabilities."""
    batch_size: PositiveInt = 16
    """Answers per request, at most; a request with messages has one."""
    batch_wait_s: NonNegativeFloat = 0.02
    """Longest wait of an answer for others to share its request, in seconds."""

    def __post_init__(self) -> None:
        if not self.scores:
            self._refuse_settings()
            return
        self._check_address()
        if self.format == "items" and self.model:
            raise ValueError(
                "reward.server.model is not sent with reward.server.format=items: remove it, or use score or "
                "classify"
            )
        if self.format != "classify" and (self.tokenizer or self.use_activation):
            name = "tokenizer" if self.tokenizer else "use_activation"
            raise ValueError(
                f"reward.server.{name} is set, but only reward.server.format=classify uses it, and that is "
                f"{self.format}: remove it"
            )
        if self.sends_messages and self.batch_size not in (1, 16):
            raise ValueError(
                f"reward.server.batch_size is {self.batch_size}, but /classify takes the messages of one conversation "
                f"per request: remove it, or set reward.server.tokenizer, whose texts are sent together"
            )

    @property
    def sends_messages(self) -> bool:
        """True if the server applies its chat template to the conversation."""
        return self.format == "classify" and not self.tokenizer


_CALLS = "timeout_s retries backoff_s max_concurrent requests_per_s api_key_env cache_dir"
CHANGEABLE = (
    "reward.judge.base_url",
    "reward.judge.max_cost",
    *(f"reward.judge.{key}" for key in _CALLS.split()),
    "reward.server.url",
    "reward.server.batch_size",
    "reward.server.batch_wait_s",
    *(f"reward.server.{key}" for key in _CALLS.split()),
)
"""Settings that a run may be continued with anew: where it asks, how patiently, and what that may cost."""
