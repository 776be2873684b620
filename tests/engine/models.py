"""What the engine tests compare with: a Transformers forward pass, and small requests and configurations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest

STOP_IDS = (1, 3)


def engine_config(**rollout: Any) -> Config:
    """A float32 engine for sequences of up to 160 tokens, with KV memory for a few of them."""
    settings = {
        "precision": "fp32",
        "max_prompt_tokens": 96,
        "max_response_tokens": 64,
        "kv_cache_gib": 0.01,
        "max_running": 16,
        "max_batched_tokens": 512,
    }
    return from_tree({"rollout": settings | rollout})


def request(name: str, token_ids: Sequence[int], seed: int, **changes: Any) -> SampleRequest:
    fields = {
        "request_id": name,
        "token_ids": np.asarray(token_ids, dtype=np.int64),
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": seed,
        "stop_token_ids": STOP_IDS,
    }
    return SampleRequest(**(fields | changes))


def random_prompts(count: int, length: int = 20) -> list[list[int]]:
    """Prompts of ordinary characters, reproducible, of lengths around `length`."""
    generator = np.random.default_rng(7)
    return [generator.integers(4, 100, size=length + index).tolist() for index in range(count)]


def load_model(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """float32 [T]: log-probs of `response` after `prompt` by one forward pass, after temperature."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def largest_gap(
    model: PreTrainedModel,
    requests: Sequence[SampleRequest],
    sampled: Sequence[SampledTokens],
    temperature: float = 1.0,
) -> float:
    """Largest absolute difference between the engine's log-probs and the model's, over all tokens."""
    return max(
        float(
            np.abs(
                expected_logprobs(model, r.token_ids.tolist(), s.token_ids, temperature) - s.logprobs
            ).max()
        )
        for r, s in zip(requests, sampled, strict=True)
    )
