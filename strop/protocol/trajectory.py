"""A prompt, its media and a trajectory: the records that flow from the data set to the training batch.

All are plain frozen data without torch and numpy, so reward workers and agents load them quickly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop.protocol.routed_experts import RoutedExperts

UNFINISHED = "unfinished"
"""Stop reason of a trajectory to which tokens may still be appended."""
NOT_SAMPLED = -1
"""Version recorded for a token that no policy chose (tool output, environment text)."""


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image or a video of a prompt or a tool: where its pixels come from, and the tokens that stand for it.

    Pixels are made where a model needs them; what travels is what the dataset has: paths, or encoded files.
    """

    kind: str
    """`image` or `video`."""
    parts: tuple[bytes | str, ...] = field(repr=False)
    """The contents or the path of each file: one for an image, one per frame (or one animated file) for a video."""
    size: tuple[int, int]
    """Width and height in pixels, as decoded."""
    grid: tuple[int, int, int]
    """Patches along time, height and width, after resizing; of models that cut images into tiles 1, and rows and
    columns of these."""
    start: int
    """Index of its first token in the token ids that carry it."""
    num_tokens: int
    """Tokens that stand for it, one after another; time stamps of a video, and what separates tiles, are among them."""
    key: str
    """Equal for media with equal pixels; of a video in one file, made from its contents."""
    frames: tuple[int, ...] = ()
    """Numbers of the frames that are taken from a video in one file; empty where each file is a frame."""
    times: tuple[float, ...] = ()
    """Times of these frames in seconds after the first one of the video, as the file says."""
    seconds_per_patch: float = 1.0
    """Time from one patch of time to the next, for models whose positions tell it."""

    @property
    def span(self) -> tuple[int, int]:
        """[start, end) of its tokens."""
        return self.start, self.start + self.num_tokens


class MediaTokens(tuple[int, ...]):
    """Token ids together with the media that some of them stand for: what an engine continues.

    An engine that knows nothing of media sees plain token ids.
    """

    media: tuple[Media, ...]

    def __new__(cls, token_ids: Sequence[int], media: Sequence[Media]) -> MediaTokens:
        tokens = super().__new__(cls, token_ids)
        tokens.media = tuple(media)
        return tokens

    def __getnewargs__(self) -> tuple[tuple[int, ...], tuple[Media, ...]]:  # for copies and other processes
        return tuple(self), self.media


def media_of(token_ids: Sequence[int]) -> tuple[Media, ...]:
    """The media of these token ids; none of a plain sequence."""
    return token_ids.media if isinstance(token_ids, MediaTokens) else ()


def _check_places(media: Sequence[Media], num_tokens: int, where: str) -> None:
    """Refuse media that do not stand one after another within so many tokens."""
    end = 0
    for medium in media:
        if not end <= medium.start < medium.start + medium.num_tokens <= num_tokens:
            raise ValueError(
                f"{where} has {num_tokens} tokens, but its {medium.kind} is said to stand at {list(medium.span)}; "
                f"media are named in order, and none is cut"
            )
        end = medium.start + medium.num_tokens


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if the answer continues the last message, which is the assistant's."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def with_answer(messages: Sequence[Mapping[str, Any]], text: str) -> tuple[Mapping[str, Any], ...]:
    """A conversation with its answer: behind it, or behind the words of a last message that the answer continues."""
    if not continues(messages):
        return (*messages, {"role": "assistant", "content": text})
    *before, last = messages
    content = last.get("content") or ""
    whole = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return (*before, {**last, "content": whole})


def words_of(message: Mapping[str, Any]) -> str:
    """The text of a message, of which each part may be text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(str(part.get("text", "")) for part in texts)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One visit of a dataset row: what is asked, as token ids, and what the scorer needs."""

    uid: str
    """Id of the visit, shared by the samples of the prompt: `e0-000017` in training, `val-000017` in
    validation."""
    row: int
    """Row number in the dataset, before any filter."""
    token_ids: tuple[int, ...]
    """The prompt through the chat template: everything before the first sampled token."""
    messages: tuple[Mapping[str, Any], ...]
    """The chat messages as they stand in the dataset."""
    data_source: str
    """Selects the default scorer and groups the validation metrics."""
    ground_truth: Any
    """The right answer, for the reward function."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's free dictionary; handed to the reward function and to agents."""
    agent_name: str = "single_turn_agent"
    """Name of the agent loop that plays this prompt."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, under their own names."""
    media: tuple[Media, ...] = ()
    """Images and videos, in the order of their tokens."""

    def __post_init__(self) -> None:
        if not self.uid:
            raise ValueError(f"the prompt of dataset row {self.row} has an empty uid; give each visit an id")
        if self.row < 0:
            raise ValueError(f"prompt {self.uid} has row number {self.row}; rows are counted from 0")
        if not self.token_ids:
            raise ValueError(
                f"prompt {self.uid} (dataset row {self.row}) has no tokens; check its messages and the "
                f"chat template"
            )
        _check_places(self.media, len(self.token_ids), f"prompt {self.uid} (dataset row {self.row})")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode as it was sampled: written once per token, never encoded again from text.

    The per-token fields describe the response and always have the same length.
    """

    uid: str
    """Id of the prompt's visit; the group of this sample."""
    sample_index: int
    """Number of the sample within its group, from 0."""
    prompt_ids: tuple[int, ...]
    """Token ids before the first sampled token."""
    response_ids: tuple[int, ...] = ()
    """Token ids after the prompt: sampled ones, and those given by tools or environments."""
    sampled: tuple[bool, ...] = ()
    """True where the policy chose the token."""
    log_probs: tuple[float, ...] = ()
    """Natural log under the sampling policy; 0.0 where not sampled."""
    versions: tuple[int, ...] = ()
    """Policy version that sampled the token; -1 where not sampled."""
    num_turns: int = 2
    """Messages of the conversation, the prompt counted as one: 2 for a single answer."""
    stop_reason: str = UNFINISHED
    """Reason of its end: `stop`, `length`, `aborted`, or a word of the agent's; `unfinished` before that."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent per activity, for example `generate_s`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Free facts from the agent; the reward function sees them in its extra_info."""
    reward_score: float | None = None
    """The score, where the agent gave one itself; the reward function is not asked then."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the prompt as the agent understood it, for people: role, content, tool calls, and
    which response tokens of which sequence each message is. Empty for a single answer."""
    prompt_messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt in chat messages, where it is not the row's: with what an environment showed at its reset, or of an
    agent of the user's. Of an episode's first sequence; empty: those of the row."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Counts of the agent; each becomes a metric of the step."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards of single answers: the place in the response of the answer's last token, and the reward. Over all
    sequences of an episode they add up to its reward_score. Where the agent gave none, those that a reward manager gave
    to single tokens."""
    stands_alone: bool = False
    """This sequence is a sample of its own, worth the rewards from it on. Otherwise every sequence of an episode is
    worth what the episode is."""
    anchor: str = ""
    """The state in which an answer that stands alone was given, where whoever played it knows it: equal texts are the
    same state of the prompt's environment."""
    media: tuple[Media, ...] = ()
    """Images and videos of the prompt and of what tools gave, in the order of their tokens, which are counted from the
    first token of the prompt."""
    routed_experts: RoutedExperts | None = field(default=None, repr=False)
    """Experts that the first tokens of prompt and response went to when they were generated, where that is recorded."""
    checked: tuple[tuple[Any, ...], ...] = field(default=(), repr=False, compare=False)
    """The very `sampled`, `log_probs` and `versions` that were found to fit each other, so that a copy with other facts
    does not look at every token again. Not for callers."""

    def __post_init__(self) -> None:
        lengths = {
            "response_ids": len(self.response_ids),
            "sampled": len(self.sampled),
            "log_probs": len(self.log_probs),
            "versions": len(self.versions),
        }
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ValueError(
                f"trajectory {self.id} has {counts}; append them together, one call of with_sampled or "
                f"with_given per turn"
            )
        if not self.prompt_ids:
            raise ValueError(f"trajectory {self.id} has no prompt_ids; a response needs a prompt before it")
        if self.sample_index < 0:
            raise ValueError(f"trajectory {self.id} has a negative sample_index; samples are counted from 0")
        self._check_provenance()
        _check_places(self.media, len(self.prompt_ids) + len(self.response_ids), f"trajectory {self.id}")

    def _check_provenance(self) -> None:
        """Refuse log-probs and versions that do not fit their tokens; tokens that were checked are not looked at."""
        columns = (self.sampled, self.log_probs, self.versions)
        checked = self.checked
        if len(checked) == 3 and all(column is other for column, other in zip(checked, columns, strict=True)):
            return
        _check_tokens(self.id, *columns, first=0)
        object.__setattr__(self, "checked", columns)

    @property
    def id(self) -> str:
        """Name of this sample in the ledger: `<uid>/<sample_index>`."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response together: what the engine continues; with their media, where there are any."""
        token_ids = self.prompt_ids + self.response_ids
        return MediaTokens(token_ids, self.media) if self.media else token_ids

    @property
    def is_finished(self) -> bool:
        """True once `finish` was called."""
        return self.stop_reason != UNFINISHED

    def with_sampled(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> Trajectory:
        """This trajectory with tokens appended that the policy chose, one log-prob and version each."""
        self._refuse_if_finished()
        new = ((True,) * len(token_ids), tuple(log_probs), tuple(versions))
        return self._appended(tuple(token_ids), *new, media=self.media)

    def with_given(self, token_ids: Sequence[int]) -> Trajectory:
        """This trajectory with tokens appended that a tool or environment wrote; they carry no loss.

        Media of the tokens (`MediaTokens`) come along.
        """
        self._refuse_if_finished()
        count, length = len(token_ids), len(self.prompt_ids) + len(self.response_ids)
        media = tuple(replace(medium, start=length + medium.start) for medium in media_of(token_ids))
        new = ((False,) * count, (0.0,) * count, (NOT_SAMPLED,) * count)
        return self._appended(tuple(token_ids), *new, media=self.media + media)

    def truncate(self, max_response_tokens: int) -> Trajectory:
        """This trajectory with at most so many response tokens, the media among them being whole.

        Nor does it end with an image: the last token of a response is none that a model reads.
        """
        first = len(self.prompt_ids)
        end = first + min(max_response_tokens, len(self.response_ids))
        media = list(self.media)
        while media and media[-1].start >= first and media[-1].span[1] >= end:
            end = min(end, media.pop().start)
        count = end - first
        columns = (self.sampled[:count], self.log_probs[:count], self.versions[:count])
        shorter = self._with_columns(self.response_ids[:count], columns, media=tuple(media))
        if self.routed_experts is None:
            return shorter
        return replace(shorter, routed_experts=self.routed_experts.first(end))

    def finish(self, stop_reason: str) -> Trajectory:
        """This trajectory, closed: no token can be appended to the result."""
        self._refuse_if_finished()
        if not stop_reason or stop_reason == UNFINISHED:
            raise ValueError(f"trajectory {self.id} needs a stop reason such as 'stop', got {stop_reason!r}")
        return replace(self, stop_reason=stop_reason)

    def _appended(
        self,
        token_ids: tuple[int, ...],
        sampled: tuple[bool, ...],
        log_probs: tuple[float, ...],
        versions: tuple[int, ...],
        *,
        media: tuple[Media, ...],
    ) -> Trajectory:
        """With these tokens at the end; they alone are checked."""
        if len(sampled) == len(log_probs) == len(versions):  # else the lengths are refused below
            _check_tokens(self.id, sampled, log_probs, versions, first=len(self.response_ids))
        columns = (self.sampled + sampled, self.log_probs + log_probs, self.versions + versions)
        return self._with_columns(self.response_ids + token_ids, columns, media=media)

    def _with_columns(
        self,
        response_ids: tuple[int, ...],
        columns: tuple[tuple[bool, ...], tuple[float, ...], tuple[int, ...]],
        *,
        media: tuple[Media, ...],
    ) -> Trajectory:
        """With these tokens, whose columns were checked."""
        sampled, log_probs, versions = columns
        return replace(
            self,
            response_ids=response_ids,
            sampled=sampled,
            log_probs=log_probs,
            versions=versions,
            media=media,
            checked=columns,
        )

    def _refuse_if_finished(self) -> None:
        if self.is_finished:
            raise ValueError(
                f"trajectory {self.id} ended with {self.stop_reason!r} and cannot be changed; finish it last"
            )


def _check_tokens(
    trajectory_id: str,
    sampled: Sequence[bool],
    log_probs: Sequence[float],
    versions: Sequence[int],
    *,
    first: int,
) -> None:
    """Refuse tokens of a response, from position `first` on, whose log-prob or version does not fit who chose them."""
    columns = zip(sampled, log_probs, versions, strict=True)
    for position, (is_sampled, log_prob, version) in enumerate(columns, start=first):
        if is_sampled:
            where = f"trajectory {trajectory_id} was sampled at response position {position}"
            if version < 0:
                raise ValueError(f"{where} by version {version}; the engine must report one of at least 0")
            if not math.isfinite(log_prob):
                raise ValueError(
                    f"{where} with log-prob {log_prob} by version {version} of the weights, which make no numbers any "
                    f"more: mostly the work of too high a learning rate (actor.optim.lr)"
                )
        elif version != NOT_SAMPLED or log_prob != 0.0:
            raise ValueError(
                f"trajectory {trajectory_id} was given its token at response position {position}, but carries "
                f"log-prob {log_prob} and version {version}; given tokens have 0.0 and {NOT_SAMPLED}"
            )
