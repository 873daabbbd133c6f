"""Tokenizers of characters with chat templates of several families, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- '<|begin|>' }}{%- for m in messages %}
{{- '<|header|>' + m['role'] + '<|/header|>\\n\\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"""

# Thinking of an answer is dropped once another user message follows, as reasoning models' templates do.
FORGETFUL = """\
{%- for m in messages %}
{%- set kept = loop.last or m['role'] != 'assistant' %}
{%- set text = m['content'] if kept else m['content'].split('</think>')[-1] %}
{{- '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The same with the trained text marked; the white space after the end of turn stands inside the block.
MARKED = """\
{%- for m in messages %}
{%- set kept = loop.last or m['role'] != 'assistant' %}
{%- set text = m['content'] if kept else m['content'].split('</think>')[-1] %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}{% generation %}{{ text + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ text + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3_CONTROL = ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>")


def make_tokenizer(
    template: str | None,
    control_tokens: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    merges: Sequence[tuple[str, str]] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer of characters, with control tokens by name, and with merges such as ("a", "b")."""
    names = [*control_tokens, *CHARACTERS, *("".join(pair) for pair in merges)]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in control_tokens])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=control_tokens[-1], clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
