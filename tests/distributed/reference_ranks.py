"""Ranks of tests/distributed/test_reference.py: the KL to the reference policy.

Arguments: a checkpoint folder. Prints `ok <layout> <estimator>` lines.
"""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.trajectory import TrajectoryBatch
from megatron_sparse_rl.weights.architecture import read_architecture
from tests.batches import random_batch

LAYOUTS = {
    "dp2": ["learner.precision=fp32"],
    "pp2-bf16": ["learner.precision=bf16", "parallel.pipeline=2"],
}
ESTIMATORS = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.expm1(d) - d,
}


def unmasked(batch: TrajectoryBatch, column: str) -> np.ndarray:
    """float64 values of a column over the tokens of the loss."""
    values = [getattr(t, column)[mask] for t, mask in zip(batch, batch.loss_mask, strict=True)]
    return np.concatenate(values).astype(np.float64)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.parameters().items()}


def check_copy(learner: Learner) -> None:
    """On the host, in memory of its own."""
    live = learner.parameters()
    assert learner.reference.tensors.keys() == live.keys()
    for name, tensor in learner.reference.tensors.items():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().data_ptr() != live[name].untyped_storage().data_ptr()


def fail_under_reference(learner: Learner, policy: dict[str, torch.Tensor]) -> None:
    with learner.reference.active():
        assert not all(torch.equal(learner.parameters()[name], value) for name, value in policy.items())
        raise ZeroDivisionError


def check_restored(learner: Learner, batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with the reference's log-probs; afterwards the policy is what it was, to the bit and in the
    same memory, also after an error."""
    before = weights(learner)
    places = {name: value.data_ptr() for name, value in learner.parameters().items()}
    completed = learner.with_logprobs(batch)
    with pytest.raises(ZeroDivisionError):
        fail_under_reference(learner, before)
    assert {name: value.data_ptr() for name, value in learner.parameters().items()} == places
    assert all(torch.equal(learner.parameters()[name], value) for name, value in before.items())
    return completed


def check(folder: str, layout: str, estimator: str) -> None:
    overrides = [
        *LAYOUTS[layout],
        "algorithm.kl_coefficient=0.5",
        f"algorithm.kl_estimator={estimator}",
        "rollout.max_response_tokens=16",
        "optimizer.lr=1e-2",
    ]
    config = load_config(None, overrides)
    learner = Learner(config, read_architecture(folder), folder, torch.device("cpu"))
    check_copy(learner)
    batch = random_batch()
    initial = learner.logprobs(batch)
    assert learner.update(batch).stats["kl_ref"] == 0, "the first policy is the reference"
    learner.update(batch)
    present = batch.with_trajectories(
        tuple(t.with_columns(old_logprobs=v) for t, v in zip(batch, learner.logprobs(batch), strict=True))
    )
    completed = check_restored(learner, batch)
    for trajectory, column in zip(completed, initial, strict=True):
        assert np.array_equal(trajectory.ref_logprobs, column)
    difference = unmasked(completed, "ref_logprobs") - unmasked(present, "old_logprobs")
    assert np.abs(difference).mean() > 0.1, "the updates changed the policy too little to show anything"
    found = learner.update(batch).stats["kl_ref"]
    assert found == pytest.approx(ESTIMATORS[estimator](difference).mean(), rel=1e-5), estimator
    parallel_state.destroy_model_parallel()
    dist.barrier()


def check_absent(folder: str) -> None:
    """Without a KL no memory is spent."""
    config = load_config(None, LAYOUTS["dp2"])
    learner = Learner(config, read_architecture(folder), folder, torch.device("cpu"))
    assert learner.reference is None
    assert all(t.ref_logprobs is None for t in learner.with_logprobs(random_batch()))
    print("ok absent", flush=True)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    for layout in LAYOUTS:
        for estimator in ESTIMATORS:
            check(folder, layout, estimator)
            print(f"ok {layout} {estimator}", flush=True)
    check_absent(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
