"""Published CLIP, SigLIP and SigLIP 2 models, whose texts and images have towers of their own."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules

_DROPOUTS = {"attention_dropout": 0.0, "dropout": 0.0, "initializer_factor": 1.0, "initializer_range": 0.02}
_CLIP_TEXT: dict[str, Json] = {
    "hidden_act": "quick_gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "model_type": "clip_text_model",
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "projection_dim": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "vocab_size": 49408,
    **_DROPOUTS,
}
_CLIP_VISION: dict[str, Json] = {
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "model_type": "clip_vision_model",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 32,
    "projection_dim": 512,
    **_DROPOUTS,
}
_CLIP: dict[str, Json] = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "initializer_factor": 1.0,
    "logit_scale_init_value": 2.6592,
    "projection_dim": 512,
    "text_config": _CLIP_TEXT,
    "text_config_dict": None,
    "vision_config": _CLIP_VISION,
    "vision_config_dict": None,
    "torch_dtype": "float32",
}
_CLIP_PROCESSOR: dict[str, Json] = {
    "crop_size": 224,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 224,
}
_CLIP_TOKENIZER: dict[str, Json] = {
    "model_max_length": 77,
    "tokenizer_class": "CLIPTokenizer",
    "pad_token": "<|endoftext|>",
}
_SO400M: dict[str, Json] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
}


_SIGLIP_TOKENIZER: dict[str, Json] = {
    "do_lower_case": True,
    "eos_token": "</s>",
    "model_max_length": 64,
    "pad_token": "</s>",
    "processor_class": "SiglipProcessor",
    "tokenizer_class": "SiglipTokenizer",
    "unk_token": "<unk>",
}
_SIGLIP2_TOKENIZER: dict[str, Json] = {
    "model_max_length": 64,
    "pad_token": "<pad>",
    "padding_side": "right",
    "tokenizer_class": "GemmaTokenizer",
}


def _siglip(id: str, kind: str, text: Json, vision: Json, processor: Json, width: int) -> Published:
    return Published(
        id=id,
        config={
            "architectures": [f"{kind}Model"],
            "initializer_factor": 1.0,
            "model_type": kind.lower(),
            "text_config": text,
            "torch_dtype": "float32",
            "vision_config": vision,
        },
        files={
            "preprocessor_config.json": processor,
            "tokenizer_config.json": _SIGLIP2_TOKENIZER if "siglip2" in id else _SIGLIP_TOKENIZER,
        },
        tokens=("<pad>", "<eos>", "</s>"),
        reads=Reads(
            task="embed", score="bi", dimension=width, pooling=("last",), normalize=True, max_tokens=64
        ),
        source="tokenizer_config.json of google/siglip-base-patch16-224 (7c23f8b); discussions/22 of "
        "google/siglip2-base-patch16-224; transformers#43101, convert_siglip_to_hf.py, "
        "convert_siglip2_to_hf.py",
    )


def _fixed(size: int) -> dict[str, Json]:
    return {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "SiglipImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "SiglipProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": size, "width": size},
    }


_NAFLEX: dict[str, Json] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Siglip2ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_num_patches": 256,
    "patch_size": 16,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
}
DUAL = (
    Published(
        id="openai/clip-vit-base-patch32",
        config=_CLIP,
        files={"preprocessor_config.json": _CLIP_PROCESSOR, "tokenizer_config.json": _CLIP_TOKENIZER},
        tokens=("<|startoftext|>", "<|endoftext|>"),
        reads=Reads(
            task="embed", score="bi", dimension=512, pooling=("last",), normalize=True, max_tokens=77
        ),
    ),
    Published(
        id="sentence-transformers/clip-ViT-B-32",
        config=None,
        files={
            "modules.json": modules("CLIPModel", CLIPModel="0_CLIPModel"),
            "0_CLIPModel/config.json": _CLIP,
            "0_CLIPModel/preprocessor_config.json": _CLIP_PROCESSOR,
            "0_CLIPModel/tokenizer_config.json": _CLIP_TOKENIZER,
        },
        tokens=("<|startoftext|>", "<|endoftext|>"),
        tokenizer_folder="0_CLIPModel",
        reads=Reads(
            task="embed", score="bi", dimension=512, pooling=("last",), normalize=False, max_tokens=77
        ),
    ),
    _siglip(
        "google/siglip-so400m-patch14-384",
        "Siglip",
        {**_SO400M, "model_type": "siglip_text_model"},
        {**_SO400M, "image_size": 384, "model_type": "siglip_vision_model", "patch_size": 14},
        _fixed(384),
        1152,
    ),
    _siglip(
        "google/siglip2-base-patch16-224",
        "Siglip",
        {"model_type": "siglip_text_model", "vocab_size": 256000},
        {"model_type": "siglip_vision_model"},
        _fixed(224),
        768,
    ),
    _siglip(
        "google/siglip2-base-patch16-naflex",
        "Siglip2",
        {"model_type": "siglip2_text_model", "vocab_size": 256000},
        {"model_type": "siglip2_vision_model", "num_patches": 256},
        _NAFLEX,
        768,
    ),
)
