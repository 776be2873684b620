"""Tiny random Hugging Face checkpoints, complete enough for every part: weights, tokenizer, stop ids.

In: a folder and the shapes wanted. Out: config.json, model.safetensors, tokenizer.json, chat template and
generation_config.json in that folder. The same arguments give the same bytes.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

UNKNOWN, END_OF_TEXT, TURN_START, TURN_END = "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (UNKNOWN, END_OF_TEXT, TURN_START, TURN_END)
END_OF_TEXT_ID, TURN_END_ID = 1, 3
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    folder: str | Path,
    family: Family = "llama",
    *,
    tied: bool,
    vocab: int = 151,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 192,
    head_dim: int | None = None,
    max_positions: int = 1024,
    stop_ids: tuple[int, ...] = (TURN_END_ID, END_OF_TEXT_ID),
    std: float = 0.15,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write a random model with its tokenizer to `folder` and return the folder as text.

    Every weight is drawn with standard deviation `std`; norms are drawn around 1 and biases around 0, so
    that a norm or bias that a conversion forgets changes the logits. `stop_ids` go to
    generation_config.json; the end-of-sequence token of the tokenizer and of config.json is `<|im_end|>`
    alone. `head_dim` defaults to hidden / heads, which Qwen2 requires; vLLM's CPU attention has no kernel
    for fewer than 32.
    """
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model = model_class(config).to(dtype).eval()
    randomise(model, seed=seed, std=std)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=list(stop_ids), pad_token_id=END_OF_TEXT_ID
    )
    model.save_pretrained(folder, safe_serialization=True)
    make_tokenizer(vocab, max_positions).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def randomise(model: PreTrainedModel, *, seed: int, std: float = 0.15) -> None:
    """Redraw every parameter of `model` in place, reproducibly: norms around 1, everything else around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(noise + 1 if "norm" in name else noise)


def make_tokenizer(vocab: int = 151, max_positions: int = 1024) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, four special tokens, and fillers up to `vocab` ids."""
    known = (*SPECIAL_TOKENS, *CHARACTERS)
    if vocab < len(known):
        raise ValueError(
            f"vocab={vocab} has no room for {len(known)} characters and special tokens; use more"
        )
    tokens = (*known, *(f"<filler_{index}>" for index in range(len(known), vocab)))
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
