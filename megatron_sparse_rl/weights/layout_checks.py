"""Which parallel sizes a model can be split into.

In: an `Architecture` and the sizes asked for. Out: nothing, or a SettingError that names the setting, what it
does not divide and the sizes that work.
"""

from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture

VLLM_VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE


def check_learner_layout(arch: Architecture, tensor_size: int, pipeline_size: int) -> None:
    """Every tensor rank needs whole query groups: Megatron does not replicate KV heads here."""
    counts = {
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "intermediate_size": arch.ffn,
    }
    allowed = [n for n in _divisors(arch.heads) if not any(count % n for count in counts.values())]
    for name, count in counts.items():
        if count % tensor_size:
            raise SettingError(
                f"parallel.tensor={tensor_size} does not divide {name}={count}; use {_either(allowed)}"
            )
    if arch.layers % pipeline_size:
        raise SettingError(
            f"parallel.pipeline={pipeline_size} does not divide num_hidden_layers={arch.layers}; "
            f"use {_either(_divisors(arch.layers))}"
        )


def check_engine_layout(arch: Architecture, tensor_size: int) -> None:
    """vLLM replicates KV heads, and splits the vocabulary after padding it to a multiple of 64."""
    reason = _engine_reason(arch, tensor_size)
    if reason:
        allowed = [n for n in _divisors(arch.heads) if not _engine_reason(arch, n)]
        raise SettingError(f"rollout.tensor={tensor_size} {reason}; use {_either(allowed)}")


def _engine_reason(arch: Architecture, size: int) -> str:
    for name, count in (("num_attention_heads", arch.heads), ("intermediate_size", arch.ffn)):
        if count % size:
            return f"does not divide {name}={count}"
    if arch.kv_heads % size and size % arch.kv_heads:
        return f"neither divides nor is a multiple of num_key_value_heads={arch.kv_heads}"
    if vllm_padded_vocab(arch) % size:
        return f"does not divide the padded vocabulary of {vllm_padded_vocab(arch)} rows"
    return ""


def vllm_padded_vocab(arch: Architecture) -> int:
    """Rows of the engine's embedding over all its ranks, real rows first."""
    return -(-arch.vocab // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _either(sizes: list[int]) -> str:
    *rest, last = map(str, sizes)
    return f"{', '.join(rest)} or {last}" if rest else last
