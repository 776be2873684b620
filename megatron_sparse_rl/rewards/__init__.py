"""Verifiers that score answers, and the pool of worker processes that runs them."""
