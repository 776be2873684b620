"""Reinforcement learning with sparse KV rollouts: Megatron-core learner, colocated vLLM engines."""
