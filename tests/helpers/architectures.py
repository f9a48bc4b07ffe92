"""Small models of transformers, of ten architectures."""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    logging,
)

logging.set_verbosity_error()
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Model type -> kind of model, and what its config is to differ in.
ARCHITECTURES = {
    "gpt2": (AutoModelForCausalLM, {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "llama": (AutoModelForCausalLM, {}),
    "qwen3": (AutoModelForCausalLM, {"tie_word_embeddings": True}),
    "gemma2": (AutoModelForCausalLM, {}),
    "mixtral": (AutoModelForCausalLM, {"num_local_experts": 2}),
    "gpt_neox": (AutoModelForCausalLM, {}),
    "opt": (AutoModelForCausalLM, {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "bert": (AutoModelForMaskedLM, NO_DROPOUT),
    "t5": (
        AutoModelForSeq2SeqLM,
        {
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (AutoModelForImageClassification, NO_DROPOUT | {"image_size": 8, "patch_size": 4, "num_labels": 5}),
}


def build(kind, **changes):
    auto, own = ARCHITECTURES[kind]
    return auto.from_config(AutoConfig.for_model(kind, **SIZES | own | changes))
