"""The rows of a fine-tuning as token ids with masks: conversations through the chat template, or recorded tokens."""

from __future__ import annotations

import hashlib
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from strop.data.bad_rows import BadRows, null_in
from strop.data.chat import (
    Chat,
    check_begun,
    control_token_ids,
    from_json_text,
    require_chat_template,
    to_chat,
    to_messages,
)
from strop.data.media import MEDIA_COLUMNS, content_parts
from strop.data.rows import unread_columns, unread_warning, value_inside
from strop.data.sft.answer_ends import AnswerEnds
from strop.data.sft.config import SftDataConfig
from strop.data.sft.conversations import TrainedChat, tokenize_chats
from strop.data.sft.rows import chosen_rows, has_tokens
from strop.data.sft.stored_conversation import (
    SftExample,
    StoredConversation,
    cut,
    longest_parts,
    with_images,
)
from strop.data.sft.token_rows import check_text, token_examples
from strop.utils.embedding_rows import check_tokens_known
from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.engines.multimodal.placeholders import RowMedia

_COMPARED = 16
"""Rows with tokens whose text is compared with them."""
_OTHER_KEYS = ("weight", "loss", "train", "trainable")
"""Keys by which rows for other programs say whether a message is trained."""
_ROWS_AT_ONCE = 256
"""Rows whose conversations are rendered together."""


class SftDataset:
    """Tokenised conversations of at most `config.max_tokens` tokens; longer ones are dropped or cut, and counted.

    Rows hold the tokens themselves (`strop.data.sft.token_rows`); or `messages`, or `prompt` and `completion` (each a
    string or a list of messages), and may then hold `tools` and `enable_thinking` for the template. Assistant messages
    of `messages` are trained as `config.trained_turns` or the messages themselves say, and every one of a completion,
    tool calls included; assistant messages in a prompt are not, and neither is what tools answered.

    Args:
        rows: from `read_sft_rows`.
        tokenizer: with a chat template, unless all rows hold tokens.
        config: column names, the longest conversation, the rows that are kept, and variables for the template.
        split: word for the rows in messages.
        sources: of each row, for `sources`; not given: their column `data_source`.

    Raises:
        ValueError: a column is missing, a row is malformed or without an assistant turn, the tokenizer has no
            chat template or one that is not append-only at a turn, recorded tokens are those of another tokenizer, one
            conversation is too long with truncation=error, or none is left.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        *,
        split: str = "train",
        sources: Sequence[str] | None = None,
    ) -> None:
        if not rows:
            raise ValueError(f"{split} data has no rows; check sft.data.{split}_files")
        self.split = split
        self._config, self._tokenizer = config, tokenizer
        self._control = control_token_ids(tokenizer)
        self._num_rows = len(rows)
        self._num_cut = self._num_dropped = 0
        self.ends = AnswerEnds(tokenizer)
        self._unread: Counter[str] = Counter()
        self._examples: list[StoredConversation] = []
        self._sources: list[str] = []
        chosen = chosen_rows(rows, config, split=split)
        self._num_chosen = len(chosen)
        self._check_tokens(rows, chosen)
        shortest: int | None = None
        bad = BadRows(split, len(rows), files=f"sft.data.{split}_files")
        for start in range(0, len(chosen), _ROWS_AT_ONCE):
            for whole in self._tokenize(rows, chosen[start : start + _ROWS_AT_ONCE], bad):
                shortest = len(whole.ids) if shortest is None else min(shortest, len(whole.ids))
                row = rows[whole.row]
                source = sources[whole.row] if sources is not None else str(row.get("data_source") or "")
                with bad.reading(self._where(whole.row)):
                    self._add(whole, source)
        bad.check()
        if not self._examples:
            raise ValueError(
                f"no {split} conversation is left: all {len(chosen)} are longer than "
                f"sft.data.max_tokens={config.max_tokens}; the shortest has {shortest} tokens, so raise it to at "
                f"least {shortest}"
            )

    def _check_tokens(self, rows: Sequence[Mapping[str, Any]], chosen: Sequence[int]) -> None:
        """A template, where one is needed, and tokens of this very tokenizer, where rows hold some."""
        of_tokens = [number for number in chosen if has_tokens(rows[number])]
        if len(of_tokens) < len(chosen):
            require_chat_template(self._tokenizer)
        for number in of_tokens[:_COMPARED]:
            check_text(self._tokenizer, rows[number], self._where(number))

    def _where(self, number: int) -> str:
        return f"{self.split} row {number}"

    def _tokenize(
        self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], bad: BadRows
    ) -> Iterator[StoredConversation]:
        """Tokenised conversations of the rows of these numbers, in order: one each, or every training sequence of a
        sample."""
        tokens: dict[int, list[StoredConversation]] = {}
        chats: dict[int, TrainedChat] = {}
        images: dict[int, RowMedia] = {}
        for number in numbers:
            row, where = rows[number], self._where(number)
            with bad.reading(where):
                if has_tokens(row):
                    examples = [*token_examples(row, number, where=where, num_ids=len(self._tokenizer))]
                    for example in examples:
                        check_tokens_known(self._tokenizer, example.ids, where)
                    tokens[number] = examples
                    continue
                trained_chat = self._to_chat(number, row)
                if trained_chat.chat.media:
                    images[number] = self._images(trained_chat.chat)
                chats[number] = trained_chat
        tokenized = tokenize_chats(self._tokenizer, [*chats.values()], control_ids=self._control)
        for number, result in zip(chats, tokenized, strict=True):
            with bad.reading(self._where(number)):
                if isinstance(result, ValueError):
                    raise result
                check_tokens_known(self._tokenizer, result[0], self._where(number))
                whole = StoredConversation(number, array("i", result[0]), bytes(result[1]))
                tokens[number] = [with_images(whole, images[number]) if number in images else whole]
        for number in numbers:
            yield from tokens.get(number, ())

    def _images(self, chat: Chat) -> RowMedia:
        from strop.data.media_rows import row_media  # torch and Pillow: seconds

        return row_media(self._tokenizer, chat.media, chat.where)

    def _add(self, whole: StoredConversation, source: str) -> None:
        """Add the conversation, or the rest of one that is too long."""
        conversation: StoredConversation | None = whole
        limit, side = self._config.max_tokens, self._config.truncation
        if len(whole.ids) > limit:
            if side == "error":
                raise ValueError(
                    f"{self._where(whole.row)} has {len(whole.ids)} tokens, over sft.data.max_tokens={limit}: raise "
                    f"that, or say with sft.data.truncation what becomes of such rows (drop, left, right)"
                )
            conversation = None if side == "drop" else cut(whole, limit, side)
            self._num_cut += conversation is not None
            self._num_dropped += conversation is None
        if conversation is not None:
            self.ends.add(conversation.ids, conversation.mask)
            self._examples.append(conversation)
            self._sources.append(source)

    @property
    def sources(self) -> dict[int, str]:
        """Source of each example, by its number."""
        return dict(enumerate(self._sources))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> SftExample:
        return self._examples[index].example()

    def identity(self, index: int) -> bytes:
        """Equal for examples with the same tokens, of which the same are trained; empty where it has images."""
        example = self._examples[index]
        if example.media:
            return b""
        return hashlib.blake2b(bytes(example.mask) + example.ids.tobytes(), digest_size=16).digest()

    @property
    def has_media(self) -> bool:
        """A conversation has images."""
        return any(example.media for example in self._examples)

    @property
    def top_k(self) -> int:
        """Logged teacher tokens per position (K), the same in every example; 0 where there is no teacher.

        Raises:
            ValueError: some examples have fewer than others, or none.
        """
        counts = {
            0 if example.teacher is None else example.teacher.ids.shape[1]: example.row
            for example in self._examples
        }
        if len(counts) > 1:
            some = ", ".join(f"row {row} has {count}" for count, row in sorted(counts.items())[:2])
            raise ValueError(
                f"{self.split} rows differ in how many tokens of the teacher they have in each place: {some}; log the "
                f"same number for all, or split the file"
            )
        return next(iter(counts))

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(len(example.ids) for example in self._examples)

    @property
    def longest_parts(self) -> tuple[int, int]:
        """As of `strop.data.sft.stored_conversation.longest_parts`."""
        return longest_parts((len(example.ids), example.mask.index(1)) for example in self._examples)

    def report(self) -> str:
        """One line: how many conversations, how long, how many dropped, and turns that never end."""
        lengths = [len(example.ids) for example in self._examples]
        num_trained = sum(sum(example.mask) for example in self._examples)
        line = (
            f"{self.split}: {len(self)} conversations of {min(lengths)} to {max(lengths)} tokens (median "
            f"{statistics.median_low(lengths)}), {num_trained} of {sum(lengths)} tokens trained"
        )
        if self._config.keep.is_on:
            line += f"; {self._num_chosen} of {self._num_rows} rows kept by their scores"
        counts = {"dropped": self._num_dropped, f"cut ({self._config.truncation})": self._num_cut}
        if shares := [f"{verb} {n} ({100 * n / self._num_chosen:.1f} %)" for verb, n in counts.items() if n]:
            line += f"; {', '.join(shares)} longer than sft.data.max_tokens={self._config.max_tokens}"
        if warning := unread_warning(self._unread):
            line += f"; {warning}"
        if warning := self.ends.warning():
            line += f"; {warning}"
        return line

    def _to_chat(self, number: int, row: Mapping[str, Any]) -> TrainedChat:
        """The row's conversation."""
        config, where = self._config, self._where(number)
        messages, first_trained = self._messages(row, where)
        mapped = (
            () if row.get(config.messages_key) is not None else (config.prompt_key, config.completion_key)
        )
        self._unread.update(unread_columns(row, messages, mapped))
        trained = self._trained(messages, first_trained, where)
        messages = tuple(
            {key: value for key, value in message.items() if key != config.trained_key}
            for message in messages
        )
        options, columns = config.chat_template_kwargs, {**MEDIA_COLUMNS, "image": config.image_key}
        chat = to_chat(row, messages, options=options, where=where, media_columns=columns)
        if any(part.get("type") == "video" for message in chat.messages for part in content_parts(message)):
            raise ValueError(f"{where} has videos, which fine-tuning does not take; use images")
        return TrainedChat(chat, first_trained, trained)

    def _messages(self, row: Mapping[str, Any], where: str) -> tuple[tuple[dict[str, Any], ...], int]:
        """All messages, and the number of the first one that may be trained."""
        config = self._config
        messages_key, prompt_key, completion_key = (
            config.messages_key,
            config.prompt_key,
            config.completion_key,
        )
        if row.get(messages_key) is not None:
            messages = self._read(row[messages_key], role="user", where=where, key=messages_key)
            first_trained = 0
        elif (question := value_inside(row, prompt_key)) is not None and (
            answer := value_inside(row, completion_key)
        ) is not None:
            prompt = self._read(question, role="user", where=where, key=prompt_key)
            completion = self._read(answer, role="assistant", where=where, key=completion_key)
            check_begun(prompt, completion, where)
            messages, first_trained = prompt + completion, len(prompt)
        elif empty := null_in(row, (messages_key, prompt_key, completion_key)):
            raise ValueError(
                f"{where} has {empty}, so there is nothing to imitate: give the text, or remove the row"
            )
        else:
            raise ValueError(
                f"{where} has neither {messages_key!r} nor both {prompt_key!r} and {completion_key!r}; "
                f"columns found: {', '.join(row)}. Map them with sft.data.messages_key, or sft.data.prompt_key and "
                f"sft.data.completion_key"
            )
        if not any(message["role"] == "assistant" for message in messages[max(first_trained, 1) :]):
            raise ValueError(
                f"{where} has no assistant message to train on, after a first one of another role (roles: "
                f"{', '.join(message['role'] for message in messages)}); add the answer, or remove the row"
            )
        return messages, first_trained

    def _read(self, value: object, *, role: str, where: str, key: str) -> tuple[dict[str, Any], ...]:
        """Messages of a column."""
        mode = self._config.json_messages
        value = from_json_text(value, mode, where=where, key=key, setting="sft.data.json_messages")
        return to_messages(value, role=role, where=where, key=key)

    def _trained(
        self, messages: Sequence[Mapping[str, Any]], first_trained: int, where: str
    ) -> Sequence[int] | None:
        """Numbers of the messages that are trained, where not all are that may be.

        Raises:
            ValueError: a message says something else than yes or no, one of another role says yes, or all say no; or
                it seems to be said under another key.
        """
        key = self._config.trained_key
        answers = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= max(first_trained, 1)
        ]
        if not any(key in message for message in messages):
            takes_last = self._config.trained_turns == "last" and not first_trained
            for number in answers[-1:] if takes_last else answers:
                if other := next((name for name in _OTHER_KEYS if messages[number].get(name, 1) == 0), None):
                    raise ValueError(
                        f"{where}: message {number + 1} has {other}={setting_text(messages[number][other])}, and would "
                        f"be trained: set sft.data.trained_key={other}, or remove it"
                    )
            return answers[-1:] if takes_last else None
        for number, message in enumerate(messages):
            value = message.get(key, 0)
            if value not in (0, 1):
                raise ValueError(
                    f"{where}: message {number + 1} has {key}={value!r:.40}; write true or false, 1 or 0"
                )
            if value and number not in answers and number >= first_trained:
                raise ValueError(
                    f"{where}: message {number + 1} ({message['role']}) has {key}={setting_text(value)}, but only what "
                    f"the assistant says in answer to something is trained: remove it there"
                )
        trained = [number for number in answers if messages[number].get(key, True)]
        if not trained:
            raise ValueError(f"{where}: no message is trained, all say {key}=0; remove the row")
        return trained
