"""Rollouts without a model: how long steps of given lengths take, on one engine or on thousands.

In: speeds, lengths of answers, settings of a rollout. Out: step times, utilisation, staleness, preemptions.
`event_engine` and `schedule` are an event loop of their own, held against the real scheduling code by tests;
`vllm_scheduler` drives vLLM's scheduler itself.
"""
