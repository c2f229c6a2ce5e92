"""Training steps of the Flax models of the transformers library, built from configurations (the extra `fidelity`)."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.fidelity.steps import Step

_TEXT, _WIDTH, _LAYERS, _HEADS = (16, 512), 512, 3, 8
_BERT = dict(
    hidden_size=_WIDTH, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS, intermediate_size=2048, vocab_size=16384
)
_BART = dict(
    d_model=_WIDTH,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=_HEADS,
    decoder_attention_heads=_HEADS,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
    vocab_size=16384,
)
_LLAMA = {**_BERT, "num_key_value_heads": 4, "head_dim": 64}
_IMAGES = (64, 3, 224, 224)

MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("FlaxBertForMaskedLM", "BertConfig", _BERT, "text"),
    "roberta": ("FlaxRobertaForCausalLM", "RobertaConfig", {**_BERT, "is_decoder": True}, "text"),
    "albert": ("FlaxAlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 128}, "text"),
    "electra": ("FlaxElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 128}, "text"),
    "roformer": ("FlaxRoFormerForMaskedLM", "RoFormerConfig", {**_BERT, "embedding_size": _WIDTH}, "text"),
    "distilbert": (
        "FlaxDistilBertForMaskedLM",
        "DistilBertConfig",
        dict(dim=_WIDTH, n_layers=_LAYERS, n_heads=_HEADS, hidden_dim=2048, vocab_size=16384),
        "text",
    ),
    "gpt2": (
        "FlaxGPT2LMHeadModel",
        "GPT2Config",
        dict(n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, vocab_size=16384),
        "text",
    ),
    "gptj": (
        "FlaxGPTJForCausalLM",
        "GPTJConfig",
        dict(n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, rotary_dim=32, vocab_size=16384),
        "text",
    ),
    "gptneo": (
        "FlaxGPTNeoForCausalLM",
        "GPTNeoConfig",
        dict(
            hidden_size=_WIDTH,
            num_layers=2,
            num_heads=_HEADS,
            attention_types=[[["global", "local"], 1]],
            vocab_size=16384,
        ),
        "text",
    ),
    "opt": (
        "FlaxOPTForCausalLM",
        "OPTConfig",
        dict(
            hidden_size=_WIDTH,
            ffn_dim=2048,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            vocab_size=16384,
            word_embed_proj_dim=_WIDTH,
        ),
        "text",
    ),
    "bloom": (
        "FlaxBloomForCausalLM",
        "BloomConfig",
        dict(hidden_size=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, vocab_size=16384),
        "text",
    ),
    "xglm": (
        "FlaxXGLMForCausalLM",
        "XGLMConfig",
        dict(d_model=_WIDTH, ffn_dim=2048, num_layers=_LAYERS, attention_heads=_HEADS, vocab_size=16384),
        "text",
    ),
    "llama": ("FlaxLlamaForCausalLM", "LlamaConfig", _LLAMA, "text"),
    "mistral": ("FlaxMistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 256}, "text"),
    "gemma": ("FlaxGemmaForCausalLM", "GemmaConfig", _LLAMA, "text"),
    "bigbird": ("FlaxBigBirdForMaskedLM", "BigBirdConfig", {**_BERT, "attention_type": "original_full"}, "text"),
    "bart": ("FlaxBartForConditionalGeneration", "BartConfig", _BART, "pair"),
    "mbart": ("FlaxMBartForConditionalGeneration", "MBartConfig", _BART, "pair"),
    "pegasus": ("FlaxPegasusForConditionalGeneration", "PegasusConfig", _BART, "pair"),
    "vit": (
        "FlaxViTForImageClassification",
        "ViTConfig",
        {k: v for k, v in _BERT.items() if k != "vocab_size"},
        "image",
    ),
    "beit": (
        "FlaxBeitForImageClassification",
        "BeitConfig",
        {**{k: v for k, v in _BERT.items() if k != "vocab_size"}, "use_relative_position_bias": True},
        "image",
    ),
    "dinov2": (
        "FlaxDinov2ForImageClassification",
        "Dinov2Config",
        dict(hidden_size=_WIDTH, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS, image_size=224),
        "image",
    ),
    "resnet": (
        "FlaxResNetForImageClassification",
        "ResNetConfig",
        dict(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"),
        "image",
    ),
    "resnet50": (
        "FlaxResNetForImageClassification",
        "ResNetConfig",
        dict(embedding_size=64, hidden_sizes=[256, 512, 1024, 2048], depths=[1, 2, 2, 1]),
        "image",
    ),
    "clip": (
        "FlaxCLIPModel",
        "CLIPConfig",
        dict(
            text_config=dict(
                hidden_size=_WIDTH, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, vocab_size=16384
            ),
            vision_config=dict(
                hidden_size=_WIDTH, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, patch_size=16
            ),
        ),
        "clip",
    ),
    "whisper": (
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        dict(
            d_model=384,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
            vocab_size=16384,
            pad_token_id=0,
        ),
        "speech",
    ),
}


def flax_step(name: str) -> Step:
    """One step of AdamW of a model in float32, or of SGD with momentum in bfloat16, by the parity of its name."""
    import transformers

    class_name, config_name, options, kind = MODELS[name]
    half = len(name) % 2 == 1
    config = getattr(transformers, config_name)(**options)
    model = getattr(transformers, class_name)(config, _do_init=False, dtype=jnp.bfloat16 if half else jnp.float32)
    batch = _batch(kind)
    shape = {"text": (1, 8), "pair": (1, 8), "image": (1, 224, 224, 3), "clip": None, "speech": None}[kind]
    params = jax.eval_shape(lambda key: model.init_weights(key, shape or model.input_shape), jax.random.key(0))
    params, statistics = (params["params"], params["batch_stats"]) if "batch_stats" in params else (params, None)
    inputs = [key for key in batch if key in inspect.signature(model.__call__).parameters]
    optimizer = optax.sgd(0.1, momentum=0.9) if half else optax.adamw(1e-3)
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    state |= {} if statistics is None else {"statistics": statistics}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            if statistics is not None:
                given = {"params": params, "batch_stats": state["statistics"]}
                found, new = model(batch["pixel_values"], params=given, train=True)
                return _loss(kind, found, batch), new["batch_stats"]
            return _loss(kind, model(**{key: batch[key] for key in inputs}, params=params), batch), None

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        found = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return found | ({} if new is None else {"statistics": new}), value

    return Step(step, (state, batch))


def _batch(kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct(_TEXT, jnp.int32)
    images = jax.ShapeDtypeStruct(_IMAGES, jnp.float32)
    text = {"input_ids": ids, "attention_mask": ids}
    labels = jax.ShapeDtypeStruct((_IMAGES[0],), jnp.int32)
    return {
        "text": {**text, "position_ids": ids, "labels": ids},
        "pair": {**text, "decoder_input_ids": ids, "labels": ids},
        "image": {"pixel_values": images, "labels": labels},
        "clip": {"input_ids": jax.ShapeDtypeStruct((64, 77), jnp.int32), "pixel_values": images},
        "speech": {
            "input_features": jax.ShapeDtypeStruct((16, 80, 3000), jnp.float32),
            "decoder_input_ids": jax.ShapeDtypeStruct((16, 128), jnp.int32),
            "labels": jax.ShapeDtypeStruct((16, 128), jnp.int32),
        },
    }[kind]


def _loss(kind: str, found: Any, batch: Any) -> jax.Array:
    if kind == "clip":
        logits, count = found.logits_per_image.astype(jnp.float32), found.logits_per_image.shape[0]
        both = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(count))
        return (both + optax.softmax_cross_entropy_with_integer_labels(logits.T, jnp.arange(count))).mean()
    logits = found.logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
