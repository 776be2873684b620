"""Who holds what: the layouts of a Hugging Face checkpoint, a Megatron learner and a vLLM engine.

In: an `Architecture` and the coordinates of one process. Out: its `Layout`, every parameter in the
coordinates of the Hugging Face tensors. This is the one place that knows fused projections, interleaved
query groups, tied embeddings and padded vocabularies; loading, resharding, export and checksums follow from
it. Names and shapes are those of megatron-core 0.16/0.19 `GPTModel` and vLLM 0.32 `LlamaForCausalLM`,
`Qwen2ForCausalLM` and `Qwen3ForCausalLM`.
"""

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout, LocalTensor, Span, shard, stack
from megatron_sparse_rl.weights.layout_checks import (
    check_engine_layout,
    check_learner_layout,
    vllm_padded_vocab,
)

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def huggingface_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in file order; a tied model has no lm_head."""
    query, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab, arch.hidden)}
    for index in range(arch.layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (arch.hidden,)
        for projection, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{projection}_proj.weight"] = (rows, arch.hidden)
            if arch.qkv_bias:
                shapes[f"{prefix}self_attn.{projection}_proj.bias"] = (rows,)
        if arch.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (arch.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (arch.hidden, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (arch.hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (arch.ffn, arch.hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (arch.ffn, arch.hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (arch.hidden, arch.ffn)
    shapes[FINAL_NORM] = (arch.hidden,)
    if not arch.tied:
        shapes[HEAD] = (arch.vocab, arch.hidden)
    return shapes


def huggingface_layout(arch: Architecture) -> dict[str, LocalTensor]:
    """A process that holds every Hugging Face tensor whole."""
    return {
        name: stack([(name, (0, shape[0]))], (0, shape[1]) if len(shape) == 2 else None)
        for name, shape in huggingface_shapes(arch).items()
    }


def megatron_layout(
    arch: Architecture,
    tensor_size: int,
    tensor_rank: int,
    pipeline_size: int,
    pipeline_rank: int,
    *,
    transformer_engine: bool,
) -> dict[str, LocalTensor]:
    """The parameters of one rank of a Megatron `GPTModel`, under the names of `named_parameters()`.

    `transformer_engine`: the layer spec that fuses the norms into the projections after them. The layers
    are split evenly over the stages and numbered from 0 in each. A tied model has one embedding on one
    stage; with more stages the last one holds a copy as its output layer. Raises SettingError where
    `check_learner_layout` does.
    """
    check_learner_layout(arch, tensor_size, pipeline_size)
    first, last = pipeline_rank == 0, pipeline_rank == pipeline_size - 1
    rows = arch.padded_vocab(tensor_size)
    layout: dict[str, LocalTensor] = {}
    if first:
        layout["embedding.word_embeddings.weight"] = _vocabulary(
            arch, EMBEDDING, rows, tensor_size, tensor_rank
        )
    start, stop = shard(arch.layers, pipeline_size, pipeline_rank)
    for index in range(start, stop):
        layer = _megatron_layer(
            arch, f"model.layers.{index}.", tensor_size, tensor_rank, transformer_engine=transformer_engine
        )
        layout |= {f"decoder.layers.{index - start}.{name}": tensor for name, tensor in layer.items()}
    if last:
        layout["decoder.final_layernorm.weight"] = _vector(FINAL_NORM, arch.hidden)
    if last and not (first and arch.tied):
        source = EMBEDDING if arch.tied else HEAD
        layout["output_layer.weight"] = _vocabulary(arch, source, rows, tensor_size, tensor_rank)
    return layout


def vllm_layout(arch: Architecture, tensor_size: int, tensor_rank: int) -> dict[str, LocalTensor]:
    """The parameters of one rank of a vLLM engine, under the names of `named_parameters()`.

    A tied model has no `lm_head.weight`. With more ranks than KV heads each KV head is held by
    tensor_size / kv_heads ranks. Raises SettingError where `check_engine_layout` does.
    """
    check_engine_layout(arch, tensor_size)
    rows = vllm_padded_vocab(arch)
    layout = {"model.embed_tokens.weight": _vocabulary(arch, EMBEDDING, rows, tensor_size, tensor_rank)}
    for index in range(arch.layers):
        prefix = f"model.layers.{index}."
        layer = _vllm_layer(arch, prefix, tensor_size, tensor_rank)
        layout |= {prefix + name: tensor for name, tensor in layer.items()}
    layout["model.norm.weight"] = _vector(FINAL_NORM, arch.hidden)
    if not arch.tied:
        layout["lm_head.weight"] = _vocabulary(arch, HEAD, rows, tensor_size, tensor_rank)
    return layout


def learner_layouts(
    arch: Architecture, parallel: ParallelSettings, processes: int, *, transformer_engine: bool
) -> list[Layout]:
    """The layout of each learner rank, in Megatron's order: tensor fastest, then data, then pipeline."""
    data = processes // (parallel.tensor * parallel.pipeline)
    shards = {
        (stage, rank): megatron_layout(
            arch, parallel.tensor, rank, parallel.pipeline, stage, transformer_engine=transformer_engine
        )
        for stage in range(parallel.pipeline)
        for rank in range(parallel.tensor)
    }
    return [
        shards[stage, rank]
        for stage in range(parallel.pipeline)
        for _ in range(data)
        for rank in range(parallel.tensor)
    ]


def engine_layouts(arch: Architecture, tensor_size: int, processes: int) -> list[Layout]:
    """The layout of each of `processes` engine ranks: engines of `tensor_size` consecutive ranks."""
    shards = [vllm_layout(arch, tensor_size, rank) for rank in range(tensor_size)]
    return [shards[rank % tensor_size] for rank in range(processes)]


def check_layouts(arch: Architecture, parallel: ParallelSettings, rollout_tensor: int) -> None:
    """Raise SettingError for a learner or engine layout that the model cannot be split into."""
    check_learner_layout(arch, parallel.tensor, parallel.pipeline)
    check_engine_layout(arch, rollout_tensor)


def _megatron_layer(
    arch: Architecture, prefix: str, size: int, rank: int, *, transformer_engine: bool
) -> dict[str, LocalTensor]:
    attention, mlp = "self_attention.", "mlp."
    input_norm = (
        attention + "linear_qkv.layer_norm_weight" if transformer_engine else "input_layernorm.weight"
    )
    mlp_norm = mlp + "linear_fc1.layer_norm_weight" if transformer_engine else "pre_mlp_layernorm.weight"
    layer = {input_norm: _vector(prefix + "input_layernorm.weight", arch.hidden)}
    for kind, columns in _qkv_kinds(arch):
        parts = _interleaved_qkv(arch, f"{prefix}self_attn.", kind, size, rank)
        layer[f"{attention}linear_qkv.{kind}"] = stack(parts, columns)
    if arch.qk_norm:
        for letter in "qk":
            source = f"{prefix}self_attn.{letter}_norm.weight"
            layer[f"{attention}{letter}_layernorm.weight"] = _vector(source, arch.head_dim)
    layer[attention + "linear_proj.weight"] = _output_projection(arch, prefix, size, rank)
    layer[mlp_norm] = _vector(prefix + "post_attention_layernorm.weight", arch.hidden)
    layer[mlp + "linear_fc1.weight"] = _gate_up(arch, prefix, size, rank)
    layer[mlp + "linear_fc2.weight"] = _down(arch, prefix, size, rank)
    return layer


def _vllm_layer(arch: Architecture, prefix: str, size: int, rank: int) -> dict[str, LocalTensor]:
    """Names without the prefix `model.layers.N.`, which vLLM shares with Hugging Face."""
    layer = {"input_layernorm.weight": _vector(prefix + "input_layernorm.weight", arch.hidden)}
    for kind, columns in _qkv_kinds(arch):
        query, kv = _vllm_head_rows(arch, size, rank)
        parts = [(f"{prefix}self_attn.{x}_proj.{kind}", query if x == "q" else kv) for x in "qkv"]
        layer[f"self_attn.qkv_proj.{kind}"] = stack(parts, columns)
    if arch.qk_norm:
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            layer[name] = _vector(prefix + name, arch.head_dim)
    layer["self_attn.o_proj.weight"] = _output_projection(arch, prefix, size, rank)
    norm = "post_attention_layernorm.weight"
    layer[norm] = _vector(prefix + norm, arch.hidden)
    layer["mlp.gate_up_proj.weight"] = _gate_up(arch, prefix, size, rank)
    layer["mlp.down_proj.weight"] = _down(arch, prefix, size, rank)
    return layer


def _qkv_kinds(arch: Architecture) -> list[tuple[str, Span | None]]:
    weight: tuple[str, Span | None] = ("weight", (0, arch.hidden))
    return [weight, ("bias", None)] if arch.qkv_bias else [weight]


def _interleaved_qkv(
    arch: Architecture, prefix: str, kind: str, size: int, rank: int
) -> list[tuple[str, Span]]:
    """Megatron's order: for each KV head of this rank its query heads, then its key, then its value."""
    query_rows = arch.heads // arch.kv_heads * arch.head_dim
    parts: list[tuple[str, Span]] = []
    for group in range(*shard(arch.kv_heads, size, rank)):
        parts.append((f"{prefix}q_proj.{kind}", (group * query_rows, (group + 1) * query_rows)))
        for letter in "kv":
            rows = (group * arch.head_dim, (group + 1) * arch.head_dim)
            parts.append((f"{prefix}{letter}_proj.{kind}", rows))
    return parts


def _vllm_head_rows(arch: Architecture, size: int, rank: int) -> tuple[Span, Span]:
    """Rows of the query and of the key (or value) projection that an engine rank holds."""
    query = shard(arch.heads * arch.head_dim, size, rank)
    if arch.kv_heads >= size:
        return query, shard(arch.kv_heads * arch.head_dim, size, rank)
    head = rank // (size // arch.kv_heads)
    return query, (head * arch.head_dim, (head + 1) * arch.head_dim)


def _output_projection(arch: Architecture, prefix: str, size: int, rank: int) -> LocalTensor:
    columns = shard(arch.heads * arch.head_dim, size, rank)
    return stack([(prefix + "self_attn.o_proj.weight", (0, arch.hidden))], columns)


def _gate_up(arch: Architecture, prefix: str, size: int, rank: int) -> LocalTensor:
    rows = shard(arch.ffn, size, rank)
    return stack([(f"{prefix}mlp.{x}_proj.weight", rows) for x in ("gate", "up")], (0, arch.hidden))


def _down(arch: Architecture, prefix: str, size: int, rank: int) -> LocalTensor:
    return stack([(prefix + "mlp.down_proj.weight", (0, arch.hidden))], shard(arch.ffn, size, rank))


def _vector(name: str, rows: int) -> LocalTensor:
    return stack([(name, (0, rows))], None)


def _vocabulary(arch: Architecture, name: str, padded: int, size: int, rank: int) -> LocalTensor:
    start, stop = shard(padded, size, rank)
    real = (min(start, arch.vocab), min(stop, arch.vocab))
    return stack([(name, real)], (0, arch.hidden), rows=stop - start)
