"""Model families that packed computation does not carry: refused by name, from a configuration alone.

The list here spares a person the loading of a large model; it decides nothing else. What passes it is still compared
with its own forward pass when it is loaded (parity.py), models with code of their own included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForSequenceClassification
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)

from strop.engines.linear_attention.packed import ATTENTION, CARRIED, LINEAR
from strop.engines.multimodal.families import media_token_ids, takes_media
from strop.engines.quantised.scheme import READABLE, declared, method_name

_STATE = (
    "has layers ({kinds}) that carry a state from token to token, which packed sequences and the rollout's cache of "
    "keys and values do not have"
)
_OWN_ATTENTION = (
    "computes attention in code of its own and not through the attention interface of transformers, where packed "
    "sequences come in"
)
_NOT_HANDED_ON = (
    "does not hand the arguments of its forward call on to its attention, as packed attention needs"
)
_CHOSEN_KEYS = "chooses by an index which earlier tokens a query sees, which packed attention does not have"
_COMPRESSED = "attends to compressed runs of earlier tokens, which packed attention does not have"
_HEARS = "has a part that hears, and sound is given to no model here (docs/multimodal.md#sound)"
_AUDIO_PARTS = ("audio_config", "audio_encoder", "audio_encoder_config", "talker_config")
"""Parts of configurations that read or make sound."""
_BIDIRECTIONAL = "looks at later tokens too ({setting}), so it cannot generate"

_NAMED = {
    "deepseek_v32": _CHOSEN_KEYS,
    "glm_moe_dsa": _CHOSEN_KEYS,
    "deepseek_v4": _COMPRESSED,
    "diffllama": "attends twice in each layer, and subtracts",
    "doge": "weighs earlier tokens by its own masks of values, which packed attention does not have",
    "nemotron": _NOT_HANDED_ON,
    "phimoe": (
        "draws experts at random in training mode, and whose setting of that noise changes its routing without noise "
        "too"
    ),
    "stablelm": _NOT_HANDED_ON,
}
"""Model type -> what it does."""
_CODE_OF_IMAGES = "reads images by code that lies beside its weights, and transformers has no class for it"
_WITHOUT_CLASS = {
    "internvl_chat": f"{_CODE_OF_IMAGES}; use its form for transformers, a folder whose name ends with -hf",
    "kimi_vl": _CODE_OF_IMAGES,
}
"""Model type in config.json -> what it does; none of that code is run."""


def check_type(settings: Mapping[str, Any], path: str) -> None:
    """Refuse settings of a model that transformers knows nothing of, and that is known not to be carried.

    Args:
        settings: of config.json.
        path: of its folder, for the sentence.

    Raises:
        ValueError: the sentence names the type and says what it does.
    """
    reason = _WITHOUT_CLASS.get(str(settings.get("model_type")))
    if reason:
        raise ValueError(
            f"model folder {path!r} is a {settings['model_type']}, which {reason}; docs/models.md lists what runs"
        )


def check_rotary(config: Any, complaint: str) -> None:
    """Refuse a kind of rotary embedding that transformers does not have: its classes raise a bare KeyError.

    Args:
        config: as transformers reads it; one whose class is not of transformers is left to its own code.
        complaint: beginning of the sentence of an error.

    Raises:
        ValueError: the sentence names the kind, and those that there are.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(rope, Mapping) or not type(config).__module__.startswith("transformers."):
        return
    known = ("default", *ROPE_INIT_FUNCTIONS)
    for settings in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, Mapping))):
        if (kind := settings.get("rope_type", "default")) not in known:
            raise ValueError(f"{complaint}: its rope_type is {kind!r:.80}, and there are {', '.join(known)}")


def _check_media_tokens(config: Any, path: str) -> None:
    """Refuse a configuration whose token of images is not in its vocabulary: its embedding would not be found."""
    token = media_token_ids(config).get("image") if takes_media(config) else None
    if token is not None and not 0 <= token < (vocab_size := config.get_text_config().vocab_size):
        raise ValueError(
            f"model folder {path!r}: the token of an image is {token} by config.json or by default, and the vocabulary "
            f"has {vocab_size} tokens; write image_token_id, and those of videos and of their ends, into config.json"
        )


def check_family(config: Any, auto_class: Any, path: str) -> None:
    """Refuse a configuration whose architecture packed computation is known not to carry, and a classifier where a
    language model is wanted: transformers would make one of it, whose head is the embedding or was never trained.

    Args:
        config: as transformers reads it.
        auto_class: of transformers, which would load the model.
        path: of its folder, for the sentence.

    Raises:
        ValueError: the sentence names the architecture and says what it does, or the token that is not there.
    """
    check_unquantised(config, path)
    is_value_model = auto_class is AutoModelForSequenceClassification
    classifier = next(filter(_is_classifier, config.architectures or ()), None)
    if classifier and not is_value_model:
        raise ValueError(
            f"model folder {path!r} is a {classifier}: it gives scores, as a reward model does, and no text; choose a "
            f"language model"
        )
    _check_media_tokens(config, path)
    model_class = auto_class._model_mapping.get(type(config), None)
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    reason = _reason(config, model_class, is_value_model=is_value_model)
    if reason:
        name = config.model_type if model_class is None else model_class.__name__
        raise ValueError(
            f"model folder {path!r} is a {name}, which {reason}; choose another architecture (docs/models.md lists "
            f"them)"
        )


def check_unquantised(config: Any, path: str) -> None:
    """Refuse a configuration that says that weights are quantised; one of weights that are read does not say it.

    Raises:
        ValueError: the sentence names the method.
    """
    settings = declared(config)
    if settings is None:
        return
    method = method_name(settings)
    raise ValueError(
        f"model folder {path!r} has quantised weights (quantization_config of its config.json"
        f"{f': {method}' if method else ''}) in a form that is not read; read are {READABLE}: give a folder of the "
        f"same model in one of these, in bfloat16 or in float32. If this one is, and the entry is left over: "
        f"model.override_config={{quantization_config: null}}"
    )


def _is_classifier(architecture: str) -> bool:
    return architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))


def _hears(config: Any) -> bool:
    """True if a model reads sound, or makes it: Qwen2-Audio, Qwen2.5-Omni, Gemma 3n, Whisper and others."""
    of_sound = config.model_type in {
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        *MODEL_FOR_CTC_MAPPING_NAMES,
        *MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
    }
    return of_sound or any(getattr(config, name, None) is not None for name in _AUDIO_PARTS)


def _is_encoder(text: Any) -> bool:
    """True for BERT, RoBERTa and others that fill gaps, unless their configuration makes decoders of them."""
    fills_gaps = text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not text.is_encoder_decoder
    return fills_gaps and getattr(text, "is_decoder", None) is False


def _missing(config: object, *, is_value_model: bool) -> str:
    """Reason why transformers has no class for a configuration; empty where the folder's own code may bring one."""
    if getattr(config, "auto_map", None):
        return ""
    if is_value_model:
        return (
            "transformers has in no form with a head of one number (sequence classification), as critics and reward "
            "models have"
        )
    if hasattr(config, "vision_config"):
        return "reads images in a way that is not known here (docs/multimodal.md lists the families that are)"
    return "transformers does not have as a causal language model"


def _reason(config: Any, model_class: Any, *, is_value_model: bool) -> str:
    """Reason for a refusal; empty for a family that is supported, or that nothing is known of."""
    if _hears(config):
        return _HEARS
    text = config.get_text_config()
    named = _NAMED.get(text.model_type) or _NAMED.get(config.model_type)
    if named:
        return named
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return _BIDIRECTIONAL.format(setting="use_bidirectional_attention")
    if _is_encoder(text) and not is_value_model:
        return _BIDIRECTIONAL.format(setting="is_decoder is false")
    kinds = set(getattr(text, "layer_types", None) or ())
    if text.model_type in CARRIED:
        kinds -= {LINEAR}
    if others := sorted(kinds - ATTENTION):
        return _STATE.format(kinds=", ".join(others))
    if model_class is None:
        return _missing(config, is_value_model=is_value_model)
    if model_class._is_stateful and not kinds and text.model_type not in CARRIED:
        return _STATE.format(kinds="recurrent")
    return "" if model_class._supports_attention_backend or model_class._is_stateful else _OWN_ATTENTION
