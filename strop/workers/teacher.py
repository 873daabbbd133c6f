"""The frozen model that the policy learns from: its log-probs, or its most likely tokens, on the policy's samples."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.distillation_config import DistillationConfig
from strop.controller import Dispatch, register
from strop.engines.config import ModelConfig
from strop.engines.kinds import frozen_engine
from strop.engines.model import check_language_model, load_model
from strop.engines.multimodal.families import media_token_ids, takes_media
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer, unused_tokens
from strop.engines.tokens import TokenFunction, Tokens
from strop.protocol import DataProto, columns
from strop.workers.config import TeacherConfig
from strop.workers.models import ModelWorker
from strop.workers.rows import log_prob_column


class TeacherWorker(ModelWorker):
    """Holds the teacher."""

    def __init__(
        self, policy: ModelConfig, teacher: TeacherConfig, distillation: DistillationConfig, *, device: str
    ) -> None:
        """Load the teacher.

        Args:
            policy: whose head says which tokens the policy can produce at all.
            teacher, distillation: of the run.
            device: `auto` or a device name.

        Raises:
            ValueError: the teacher has fewer tokens than algorithm.distillation.top_k.
        """
        super().__init__()
        parallel = self.join(teacher.engine, device=device)
        model = load_model(
            ModelConfig(path=teacher.path, dtype=teacher.dtype),
            parallel=parallel,
            holds_half=teacher.engine.kind == "torch",
        )
        self._top_k, self._is_reverse = distillation.top_k, distillation.kind == "reverse_kl"
        self._vocab_size = model.vocab_size
        never = _never_sampled(policy, model.vocab_size)
        if distillation.kind == "forward_kl" and self._top_k > model.vocab_size - len(never):
            raise ValueError(
                f"algorithm.distillation.top_k is {self._top_k}, but policy and teacher share "
                f"{model.vocab_size - len(never)} tokens: lower it to at most that"
            )
        self._never = torch.tensor(never, dtype=torch.int64, device=parallel.device) if never else None
        self.engine = frozen_engine(model, teacher.engine, parallel)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_teacher(self, data: DataProto) -> DataProto:
        """Columns for the update of the policy: log-probs of its tokens, or for a forward KL top_k of each place."""
        return self.compute_teacher_log_prob(data) if self._is_reverse else self.compute_teacher_top_k(data)

    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Column teacher_log_prob [B, R~] of the responses."""
        return self.token_columns(data, log_prob_column("teacher_log_prob", data))

    def compute_teacher_top_k(self, data: DataProto) -> DataProto:
        """Columns teacher_ids (int32) and teacher_logprobs [B, R~, K]: the most likely tokens in the place of each
        response token, among those that the policy can produce."""
        temperature = data.meta_info["temperature"]

        def most_likely(tokens: Tokens) -> dict[str, Tensor]:
            ids, log_probs = tokens.top_k(self._top_k, temperature=temperature, banned=self._never)
            return {"teacher_ids": ids.to(torch.int32), "teacher_logprobs": log_probs}

        return self.token_columns(data, most_likely)

    def token_columns(self, data: DataProto, function: TokenFunction) -> DataProto:
        """As for every role.

        Raises:
            ValueError: a sample has a token that the teacher does not have.
        """
        for name in ("prompts", "responses"):
            token_ids = columns.flat(data.tensors()[name])
            largest = int(token_ids.max()) if len(token_ids) else 0
            if largest >= self._vocab_size:
                raise ValueError(
                    f"a sample has the token {largest}, but the teacher's head ends at {self._vocab_size - 1}: use a "
                    f"teacher with at least the policy's rows of embeddings"
                )
        return super().token_columns(data, function)


def check_teacher(policy: ModelConfig, path: str, *, key: str = "teacher.path") -> None:
    """Refuse a model that numbers tokens in another way than the policy, before any process starts.

    Args:
        policy: whose tokens they are.
        path: folder of a teacher, or of another model that reads the policy's tokens.
        key: setting that names the folder.

    Raises:
        ValueError: no such folder, no tokenizer in it, or a token of the policy with another id in the model, or with
            none.
    """
    try:
        check_language_model(model := ModelConfig(path=path))
        theirs: dict[str, int] = load_tokenizer(model).get_vocab()
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    ours: dict[str, int] = load_tokenizer(policy).get_vocab()
    different = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if different:
        number, token = different[0]
        subject = "teacher" if key == "teacher.path" else "model"
        status = f"the number {theirs[token]}" if token in theirs else "not there"
        raise ValueError(
            f"{key} {path!r} has another vocabulary than the policy: {len(different)} of "
            f"{len(ours)} tokens differ, for example {token!r}, which is number {number} in the policy and {status} in "
            f"the {subject}; log-probs are compared token by token, so use a {subject} with the policy's tokenizer"
        )


def _never_sampled(policy: ModelConfig, vocab_size: int) -> list[int]:
    """Ids of the teacher that the policy gives probability zero: those beyond its head, those of no text, and those of
    media."""
    shape = load_model_config(policy)
    beyond = range(int(shape.get_text_config().vocab_size), vocab_size)
    media_ids = media_token_ids(shape).values() if takes_media(shape) else ()
    of_media = (token for token in media_ids if token < vocab_size)
    return sorted({*beyond, *unused_tokens(policy, vocab_size), *of_media})
