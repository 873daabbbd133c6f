"""Tokens one by one, as clients are told of them: their bytes, their places in the text, and what opens a text."""

from __future__ import annotations

import gateway_cases
import pytest
from gateway_cases import Open, ScriptedEngine, served
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from strop.agents.openai_server.token_bytes import opening_ids, text_offsets, token_bytes
from strop.observability.viewer.token_view import pieces

TEXT = "how 😊 are you 日本"


def byte_level() -> PreTrainedTokenizerFast:
    """A vocabulary of bytes, as of GPT-2 and Qwen, with two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "ho", "how", "<|im_end|>"]
    model = models.BPE(
        vocab={name: number for number, name in enumerate(names)}, merges=[("h", "o"), ("ho", "w")]
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """A vocabulary of words and single bytes that opens a text with <s>, as of Llama 2."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁how", "▁are", "▁you"]
    scores = [-20.0 if name.startswith("<0x") else -1.0 for name in names]
    tokenizer = Tokenizer(models.Unigram(list(zip(names, scores, strict=True)), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = [AddedToken(name, special=True, normalized=False) for name in names[:3]]
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {"bytes": byte_level(), "words": metaspace()}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    parts = token_bytes(tokenizer, [*ids, tokenizer.eos_token_id])
    text = TEXT if kind == "bytes" else f" {TEXT}"  # whose space at the beginning decoding drops
    assert b"".join(parts) == (text + tokenizer.eos_token).encode()
    assert len(parts) > len(ids) > 8
    assert "".join(pieces(ids, lambda some: str(tokenizer.decode(list(some))))) == TEXT


def test_a_tokenizer_of_another_kind_gives_what_it_decodes() -> None:
    tokenizer = gateway_cases.TOKENIZER
    assert token_bytes(tokenizer, tokenizer("a b")["input_ids"]) == [b"a", b" ", b"b"]


def test_a_token_inside_a_character_has_its_place() -> None:
    assert text_offsets([b"a", b"\xe2\x82", b"\xac", b" b", b"c"]) == [0, 1, 1, 2, 4]


def test_a_client_gets_the_bytes_and_its_text_prompt_is_opened_once() -> None:
    tokenizer = TOKENIZERS["words"]
    assert opening_ids(tokenizer) == (1,)
    assert opening_ids(TOKENIZERS["bytes"]) == ()
    engine = ScriptedEngine(tokenizer, [f"{TEXT}</s>"])

    def work(opened: Open) -> tuple[bytes, str]:
        client = opened.client()
        for prompt in ("how are", "<s>how are"):
            made = client.completions.create(model="any", prompt=prompt, logprobs=0)
        chat = opened.client("two").chat.completions.create(
            model="any", messages=[{"role": "user", "content": "how"}], logprobs=True
        )
        parts = [bytes(one.bytes or ()) for one in chat.choices[0].logprobs.content or ()]  # type: ignore[union-attr]
        return b"".join(parts), made.choices[0].text

    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (found, text), _ = served(engine, work, tokenizer=tokenizer)
    assert (found, text) == (f" {TEXT}</s>".encode(), TEXT)
    first, second, _ = engine.prompts
    assert list(first) == tokenizer("how are")["input_ids"]
    assert second.count(1) == 1
