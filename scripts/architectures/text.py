"""Transformers of language, speech and vision from small random configurations."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .cases import Architecture, Example

__all__ = ["text_architectures"]

_ENCODER = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 1, "pad_token_id": 0}
_MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
# Model class, configuration class, options of the configuration.
_TOKEN_MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", _ENCODER),
    "roberta": ("RobertaModel", "RobertaConfig", _ENCODER),
    "albert": ("AlbertModel", "AlbertConfig", {**_ENCODER, "embedding_size": 8}),
    "electra": ("ElectraModel", "ElectraConfig", {**_ENCODER, "embedding_size": 8}),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    ),
    "deberta": (
        "DebertaModel",
        "DebertaConfig",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "deberta_v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "fnet": ("FNetModel", "FNetConfig", _ENCODER),
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "longformer": (
        "LongformerModel",
        "LongformerConfig",
        {**_ENCODER, "attention_window": 4, "pad_token_id": 1},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 64,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER),
    "gptj": (
        "GPTJModel",
        "GPTJConfig",
        {
            "vocab_size": 64,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "rotary_dim": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_ENCODER, "ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "bloom": (
        "BloomModel",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    "falcon": ("FalconModel", "FalconConfig", {**_ENCODER, "alibi": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**_DECODER, "sliding_window": 3},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": 2}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, **_MOE}),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    "rwkv": (
        "RwkvModel",
        "RwkvConfig",
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2},
    ),
}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
_IMAGE_MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "vit": ("ViTModel", "ViTConfig", _VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", _VISION),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
        },
    ),
    "convnextv2": (
        "ConvNextV2Model",
        "ConvNextV2Config",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]},
    ),
}


def text_architectures() -> Iterator[Architecture]:
    """Yield transformers models."""
    for name, (model, config, options) in _TOKEN_MODELS.items():
        yield Architecture(
            f"transformers/{name}",
            _builder(model, config, options, _tokens),
        )
    for name, (model, config, options) in _IMAGE_MODELS.items():
        yield Architecture(
            f"transformers/{name}",
            _builder(model, config, options, _pixels),
        )
    yield Architecture("transformers/t5", _t5)
    yield Architecture("transformers/bart", _bart)
    yield Architecture("transformers/clip", _clip)
    yield Architecture("transformers/whisper", _whisper)
    yield Architecture("transformers/wav2vec2", _wav2vec2)
    yield Architecture("transformers/gpt2, training", _gpt2_training)
    yield Architecture("transformers/gpt2, padded batch", _gpt2_padded)
    yield Architecture("transformers/llama, eager attention", _llama_eager)


def _builder(
    model: str,
    config: str,
    options: Mapping[str, Any],
    inputs: Callable[[], dict[str, torch.Tensor]],
) -> Callable[[], Example]:
    return lambda: Example(_made(model, config, options), kwargs=inputs())


def _made(model: str, config: str, options: Mapping[str, Any]) -> Any:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made.eval()


def _tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 60, (2, 8))}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _gpt2_training() -> Example:
    model = _made(*_TOKEN_MODELS["gpt2"])
    tokens = _tokens()
    return Example(model.train(), kwargs={**tokens, "labels": tokens["input_ids"]})


def _gpt2_padded() -> Example:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    kwargs = {**_tokens(), "attention_mask": mask, "output_hidden_states": True}
    return Example(_made(*_TOKEN_MODELS["gpt2"]), kwargs=kwargs)


def _llama_eager() -> Example:
    model, config, options = _TOKEN_MODELS["llama"]
    eager = {**options, "attn_implementation": "eager", "output_attentions": True}
    return Example(_made(model, config, eager), kwargs=_tokens())


def _t5() -> Example:
    options = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    model = _made("T5ForConditionalGeneration", "T5Config", options)
    labels = torch.randint(2, 60, (2, 5))
    return Example(model, kwargs={**_tokens(), "labels": labels})


def _bart() -> Example:
    options = {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 40,
    }
    return Example(_made("BartModel", "BartConfig", options), kwargs=_tokens())


def _clip() -> Example:
    from transformers import CLIPConfig, CLIPModel

    text = {**_ENCODER, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=8)
    kwargs = {**_tokens(), "pixel_values": torch.randn(3, 3, 32, 32)}
    model: Any = CLIPModel(config)
    return Example(model.eval(), kwargs=kwargs)


def _whisper() -> Example:
    options = {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    kwargs = {
        "input_features": torch.randn(2, 8, 20),
        "decoder_input_ids": torch.randint(2, 60, (2, 4)),
    }
    return Example(_made("WhisperModel", "WhisperConfig", options), kwargs=kwargs)


def _wav2vec2() -> Example:
    options = {
        **_ENCODER,
        "conv_dim": [8, 8, 8],
        "conv_stride": [5, 4, 2],
        "conv_kernel": [10, 8, 2],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    kwargs = {"input_values": torch.randn(2, 800)}
    return Example(_made("Wav2Vec2Model", "Wav2Vec2Config", options), kwargs=kwargs)
