"""Arguments of SFTConfig."""

from __future__ import annotations

from strop.config.migration.rules import NotNeeded, To, Unless
from strop.config.migration.tables import Entry, same
from strop.config.migration.values import if_set, integer

_ASSISTANT = (
    "the loss is on what the assistant says; TRL's covers whole rows of `messages` unless told otherwise"
)

ENTRIES = (
    *same(To("sft.data.max_tokens", if_set(integer)), "max_length max_seq_length"),
    Entry("truncation_mode", NotNeeded("conversations over the limit are dropped and counted, never cut")),
    Entry("packing", NotNeeded("sequences are always packed, each attending to itself alone")),
    *same(NotNeeded("sequences are always packed, and never cut to fit"), "packing_strategy eval_packing"),
    *same(NotNeeded("sequences are never padded"), "padding_free pad_to_multiple_of pad_token"),
    Entry("shuffle_dataset", NotNeeded("rows are shuffled anew for every epoch")),
    Entry("dataset_text_field", Unless(
        ("text",), "plain text without turns is not trained: use messages, or prompt and completion",
        "rows have messages, or prompt and completion",
    )),
    Entry("dataset_kwargs", Unless(({},), "rows are read as they are", "not set")),
    Entry("dataset_batch_size", NotNeeded("rows are read once, at the start")),
    Entry("num_of_sequences", NotNeeded("sequences are always packed")),
    Entry("chars_per_token", NotNeeded("tokens are counted, not estimated")),
    *same(Unless((True,), _ASSISTANT, "always"), "completion_only_loss assistant_only_loss"),
    Entry("eos_token", Unless((), "the tokenizer in model.path says it", "the tokenizer's")),
    Entry("chat_template_path", Unless((), "the chat template is that of the tokenizer in model.path", "not set")),
    Entry("loss_type", Unless(("nll", "chunked_nll"), "the loss is the log-likelihood: use nll", "the same")),
    Entry("activation_offloading", To("sft.engine.offload_activations")),
    *same(NotNeeded("log-probs never need the logits of all tokens at once"), "use_liger use_liger_loss"),
)  # fmt: skip
"""What becomes of them."""
