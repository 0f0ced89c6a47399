"""Published retrievers of pages on SigLIP towers. Their files are recorded from their model cards and from
code that reads them, which `source` names."""

from __future__ import annotations

from typing import Any

from tests.published.catalog import Json, Published, Reads

_PALIGEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<image>")
_PALIGEMMA: dict[str, Any] = {
    "model_type": "paligemma",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "ignore_index": -100,
    "image_token_index": 257152,
    "pad_token_id": 0,
    "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 1024,
        "num_key_value_heads": 1,
        "torch_dtype": "float32",
        "vocab_size": 257216,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 448,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_image_tokens": 1024,
        "patch_size": 14,
        "projection_dim": 2048,
        "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}
_PALIGEMMA_FILES: dict[str, Json] = {
    "preprocessor_config.json": {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": 1024,
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "ColPaliProcessor",
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 448, "width": 448},
    },
    "tokenizer_config.json": {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "tokenizer_class": "GemmaTokenizer",
    },
}


# Of the MultiVectorEncoder of sentence-transformers, which the repositories have besides since August 2026.
PAGE_MODULES: dict[str, Json] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_MultiVectorMask",
            "type": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask",
        },
    ],
    "1_MultiVectorMask/config.json": {
        "skiplist_words": [],
        "skiplist_tasks": ["document"],
        "keep_only_token_ids": None,
    },
    "config_sentence_transformers.json": {
        "model_type": "MultiVectorEncoder",
        "prompts": {"query": "", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "maxsim",
    },
    "sentence_bert_config.json": {"transformer_task": "retrieval"},
}
_SENTENCE_TRANSFORMERS = "sentence-transformers tests/multi_vector_encoder/test_pretrained.py"


def _page(max_tokens: int, end: str, **prompts: str) -> Reads:
    return Reads(
        task="token_embed", score="late", dimension=128, max_tokens=max_tokens, prompts=prompts, end=end
    )


_VBERT: dict[str, Any] = {
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "cls",
    "image_token_id": 50407,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "model_type": "modernvbert",
    "pixel_shuffle_factor": 4,
    "text_config": {
        "attention_bias": False,
        "decoder_bias": True,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "local_attention": 128,
        "local_rope_theta": 160000.0,
        "max_position_embeddings": 7999,
        "mlp_bias": False,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 12,
        "num_hidden_layers": 22,
        "vocab_size": 50408,
    },
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-06,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 12,
        "patch_size": 16,
    },
}
_VBERT_FILES: dict[str, Json] = {
    "preprocessor_config.json": {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Idefics3ImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 512},
        "resample": 1,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 2048},
    },
    "processor_config.json": {"image_seq_len": 64, "processor_class": "ColModernVBertProcessor"},
}
_VBERT_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")

PAGES = (
    Published(
        id="ModernVBERT/colmodernvbert-merged",
        config={
            "architectures": ["ColModernVBertForRetrieval"],
            "embedding_dim": 128,
            "initializer_range": 0.02,
            "model_type": "colmodernvbert",
            "vlm_config": _VBERT,
        },
        files=_VBERT_FILES,
        tokens=_VBERT_TOKENS,
        reads=_page(7999, "<end_of_utterance>" * 10),
        source="vllm-project/vllm transformers_utils/configs/colmodernvbert.py, for sizes that a file may "
        "lack; illuin-tech/colpali processing_colmodernvbert.py",
        unverified="max_position_embeddings, and which sizes its config.json has",
    ),
    Published(
        id="ModernVBERT/colmodernvbert",
        config={
            "architectures": ["ColModernVBert"],
            "model_type": "modernvbert",
            "additional_vocab_size": 40,
            "hidden_size": 768,
            "image_token_id": 50407,
            "text_config": {
                "hidden_size": 768,
                "intermediate_size": 1152,
                "model_type": "modernvbert_text",
                "num_hidden_layers": 22,
                "text_model_name": "jhu-clsp/ettin-encoder-150m",
                "vocab_size": 50368,
            },
            "vision_config": {
                "embed_dim": 768,
                "image_size": 512,
                "model_type": "modernvbert_vision",
                "vision_model_name": "google/siglip2-base-patch16-512",
            },
        },
        refused="colpali-engine's, which leaves the sizes",
        source="config.json of ModernVBERT/modernvbert-embed, which has these keys",
        unverified="whether its repository has a config.json: its model card calls it an adapter",
    ),
    Published(
        id="vidore/colpali-v1.3-hf",
        config={
            "architectures": ["ColPaliForRetrieval"],
            "embedding_dim": 128,
            "model_type": "colpali",
            "vlm_config": _PALIGEMMA,
        },
        files=_PALIGEMMA_FILES | PAGE_MODULES,
        tokens=_PALIGEMMA_TOKENS,
        reads=_page(8192, "<pad>" * 10 + "\n", query="Query: "),
        source=f"{_SENTENCE_TRANSFORMERS}, where its vectors are those of colpali-v1.3-merged",
        unverified="which keys its config.json repeats, and whether its processor's file has query_prefix",
    ),
    Published(
        id="vidore/colpali-v1.3-merged",
        config=_PALIGEMMA | {"architectures": ["ColPali"]},
        files=_PALIGEMMA_FILES,
        tokens=_PALIGEMMA_TOKENS,
        reads=_page(8192, "<pad>" * 10 + "\n", query="Query: "),
        source=f"config.json of colpali-v1.2-merged; {_SENTENCE_TRANSFORMERS} at 8af5a2c",
    ),
    Published(
        id="vidore/colpali-v1.2-merged",
        config=_PALIGEMMA
        | {"architectures": ["ColPali"], "_name_or_path": "vidore/colpaligemma-3b-pt-448-base"},
        files=_PALIGEMMA_FILES,
        tokens=(*_PALIGEMMA_TOKENS, "<unused0>"),
        reads=_page(8192, "<unused0>" * 5 + "\n", query="Question: "),
        source="its config.json (496d826); illuin-tech/colpali e834866, which its git_hash.txt names",
    ),
)
