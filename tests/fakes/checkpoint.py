"""Small random checkpoints as Hugging Face saves them, with a byte-level tokenizer."""

from pathlib import Path

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_checkpoint(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_position_embeddings: int = 128,
    **save: object,
) -> Path:
    """A random two-layer Llama over the 256 bytes; `save` goes to save_pretrained."""
    from transformers import LlamaForCausalLM

    config = two_layers(max_position_embeddings=max_position_embeddings, eos_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, **save)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def two_layers(**more):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )


def byte_llama(folder: Path, *, head_dim: int, max_position_embeddings: int) -> Path:
    """A Hugging Face folder of two layers with random weights, whose tokens are bytes."""
    from transformers import LlamaForCausalLM

    config = two_layers(
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = '"'  # of byte-level BPE the token 1
    tokenizer.save_pretrained(folder)
    return folder
