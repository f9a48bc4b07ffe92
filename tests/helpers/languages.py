"""Small language models of transformers with a tokenizer, as folders of files."""

import sysconfig
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = 384
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make_tokenizer():
    """Byte pairs of the standard library's source; padding is token 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<pad>", "<s>", "</s>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(Path(sysconfig.get_path("stdlib")) / f"{name}.py") for name in ("abc", "ast", "bisect")], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def save_model(folder, masked=False):
    """Write a model, drawn by one seed, and its tokenizer."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": WORDS, "max_position_embeddings": 64}
    if masked:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
