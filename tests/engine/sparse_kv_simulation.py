"""What a model computes over a compacted cache, simulated with Transformers in float32.

In: prompt and answer of one request, how many tokens are protected, the settings. Out: the log-probs of the
answer, by feeding the tokens and cutting the model's cache, layer by layer and head by head, where the
settings say. It shares no code with the product: the lengths are counted, the policies are
`tests/sparse_kv_oracle.py`, the cache is Transformers' own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.sparse_kv_oracle import choose

QUERIES: dict[int, torch.Tensor] = {}  # by layer: [heads, tokens so far, dim], of the present request


def recording_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attention of the last tokens to everything in the cache and causally to each other."""
    layer, tokens, length = module.layer_idx, query.shape[2], key.shape[2]
    earlier = QUERIES.get(layer, query[0, :, :0])
    QUERIES[layer] = torch.cat([earlier, query[0]], dim=1)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * named["scaling"]
    hidden = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Let the model attend by the function above."""
    ALL_ATTENTION_FUNCTIONS.register("recording", recording_attention)
    model.set_attn_implementation("recording")
    return model


@torch.no_grad()
def simulated_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    protected: int,
    settings: Any,
    temperature: float = 1.0,
) -> tuple[np.ndarray, list[list[list[int]]]]:
    """float32 [T] log-probs of `response`, and for each layer and KV head the logical positions that are in
    the cache when the last token but one has been fed.
    """
    ids, cache, logits = torch.tensor([*prompt, *response]), DynamicCache(), []
    heads = model.config.num_key_value_heads
    retained: list[list[list[int]]] = [
        [[] for _ in range(heads)] for _ in range(model.config.num_hidden_layers)
    ]
    QUERIES.clear()
    done = 0
    while done < len(ids) - 1:
        room = protected + settings.budget + settings.buffer - cache.get_seq_length()
        end = min(done + room, len(ids) - 1)
        output = model(
            input_ids=ids[None, done:end],
            position_ids=torch.arange(done, end)[None],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits[0].float())
        for positions in (p for layer in retained for p in layer):
            positions.extend(range(done, end))
        if end - done == room:
            for index, layer in enumerate(cache.layers):
                _evict(index, layer, protected, settings, end, retained[index])
        done = end
    logprobs = (torch.cat(logits)[len(prompt) - 1 :] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy(), retained


def _evict(index: int, layer: Any, protected: int, settings: Any, length: int, retained: list) -> None:
    keys, heads = layer.keys[0, :, protected:].double().numpy(), layer.keys.shape[1]
    window = QUERIES[index][:, -settings.window :].double().numpy()
    group = len(window) // heads
    places = []
    for head in range(heads):
        salt = (length << 24) + (index << 12) + head
        judges = window[head * group : (head + 1) * group]
        chosen = choose(settings.policy, keys[head], judges, settings.budget, settings, salt)
        places.append([*range(protected), *(protected + place for place in chosen)])
        retained[head][:] = [retained[head][place] for place in places[-1]]
    index_of = torch.tensor(places)[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[3])
    layer.keys, layer.values = layer.keys.gather(2, index_of), layer.values.gather(2, index_of)
