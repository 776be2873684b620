"""Ranks of tests/distributed/test_faults.py: batches that must not harm the learner.

Arguments: a checkpoint folder. Prints `ok <layout> <check>` lines.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse_rl.algorithms.batch_correction import correct_batch
from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner, UpdateResult
from megatron_sparse_rl.trajectory import TrajectoryBatch
from megatron_sparse_rl.weights.architecture import read_architecture
from tests.batches import random_batch

BASE = ["rollout.max_response_tokens=16", "optimizer.lr=3e-3", "learner.tokens_per_micro_batch=24"]
LAYOUTS = {
    "dp2": ["learner.precision=fp32"],
    "dp2-bf16": ["learner.precision=bf16"],
    "tp2": ["learner.precision=fp32", "parallel.tensor=2"],
    "pp2": ["learner.precision=fp32", "parallel.pipeline=2"],
}
PRESETS = ["none", "sparse_rl", "copris", "sparse_rl_released"]


@contextmanager
def learner_of(folder: str, *overrides: str) -> Iterator[Learner]:
    config = load_config(None, [*BASE, *overrides])
    yield Learner(config, read_architecture(folder), folder, torch.device("cpu"))
    parallel_state.destroy_model_parallel()
    dist.barrier()


def state(learner: Learner) -> list[torch.Tensor]:
    """Copies of the weights, the master weights and the moments of this rank."""
    optimizers = [inner.optimizer for inner in learner.optimizer.inner.chained_optimizers]
    tensors = [
        *learner.parameters().values(),
        *(p.detach() for o in optimizers for group in o.param_groups for p in group["params"]),
        *(v for o in optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    return [tensor.clone() for tensor in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients(learner: Learner) -> list[torch.Tensor]:
    return [p.main_grad.clone() for p in learner.model.parameters()]


def masked(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Every token out of the loss, with the worst values in all of them."""
    return replace(
        batch,
        loss_mask=tuple(np.zeros_like(mask) for mask in batch.loss_mask),
        advantages=tuple(np.full_like(a, np.nan) for a in batch.advantages),
    ).with_trajectories(
        tuple(t.with_columns(sampler_logprobs=np.full(t.length, -np.inf, np.float32)) for t in batch)
    )


def changed(batch: TrajectoryBatch, column: str, value: float, row: int) -> TrajectoryBatch:
    """`value` in the first unmasked token of a trajectory, in its advantages or one of its columns."""
    place = int(batch.loss_mask[row].argmax())
    assert batch.loss_mask[row][place]
    values = batch.advantages[row] if column == "advantages" else getattr(batch.trajectories[row], column)
    values = values.copy()
    values[place] = value
    if column == "advantages":
        return batch.with_advantages((*batch.advantages[:row], values, *batch.advantages[row + 1 :]))
    trajectories = list(batch.trajectories)
    trajectories[row] = trajectories[row].with_columns(**{column: values})
    return batch.with_trajectories(tuple(trajectories))


def spoil_masked(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The worst values in every masked slot, none anywhere else."""
    rows = tuple(zip(batch, batch.advantages, batch.loss_mask, strict=True))
    return replace(
        batch,
        trajectories=tuple(
            t.with_columns(sampler_logprobs=np.where(mask, t.sampler_logprobs, -np.inf))
            for t, _, mask in rows
        ),
        advantages=tuple(np.where(mask, a, np.nan).astype(np.float32) for _, a, mask in rows),
    )


def check_skipped(learner: Learner, result: UpdateResult, before: list[torch.Tensor]) -> None:
    assert result.skipped == 1
    assert [step.applied for step in result.steps] == [False]
    assert same(state(learner), before), "a skipped step changed weights, master weights or moments"


def check_masked(learner: Learner) -> None:
    """No token in the loss: loss 0 over a count of 0, gradients exactly 0, nothing applied."""
    before = state(learner)
    stats, count = learner._forward_backward(masked(random_batch()))
    assert count == 0
    assert stats["loss"].tolist() == [0.0, 0.0]
    assert not any(gradient.any() for gradient in gradients(learner))
    check_skipped(learner, learner.update(masked(random_batch())), before)


def check_not_finite(learner: Learner) -> None:
    """One bad token of one sequence, which only one data-parallel rank has, stops the step on all ranks."""
    rows = [max(range(12), key=lambda i: mask_sum(i)), 11]
    for row in rows:
        for value in (np.nan, np.inf):
            before = state(learner)
            result = learner.update(changed(random_batch(), "advantages", value, row))
            check_skipped(learner, result, before)


def check_gradient(learner: Learner) -> None:
    """A gradient that overflows on one rank, below a finite loss, stops the step on all ranks."""
    weight = next(p for name, p in learner.model.named_parameters() if name.endswith("linear_qkv.weight"))
    for value in (np.nan, np.inf):
        before = state(learner)
        overflow = partial(torch.full_like, fill_value=value)
        hook = weight.register_hook(overflow) if dist.get_rank() == 1 else None
        result = learner.update(random_batch())
        if hook is not None:
            hook.remove()
        assert np.isfinite(result.stats["loss"])
        assert not np.isfinite(result.grad_norm)
        check_skipped(learner, result, before)


def mask_sum(row: int) -> int:
    return int(random_batch().loss_mask[row].sum())


def check_goes_on(folder: str, layout: list[str]) -> None:
    """Faulty batches between two good ones leave no trace: not in weights, moments or gradients."""
    with learner_of(folder, *layout) as learner:
        learner.update(random_batch(seed=1))
        learner.update(random_batch(seed=2))
        undisturbed = state(learner)
    with learner_of(folder, *layout) as learner:
        learner.update(random_batch(seed=1))
        check_masked(learner)
        check_not_finite(learner)
        check_gradient(learner)
        before = state(learner)
        result = learner.update(random_batch(seed=2))
        assert result.skipped == 0
        assert np.isfinite(result.stats["loss"])
        assert not same(state(learner), before)
        assert same(state(learner), undisturbed), "skipped steps left something behind"


def check_presets(folder: str) -> None:
    """Values in masked slots change nothing, to the bit; a NaN where it enters the loss skips the step, a
    sampler's -inf is bounded."""
    clean = random_batch()
    dirty = spoil_masked(clean)
    assert any(not mask.all() for mask in clean.loss_mask)
    for preset in PRESETS:
        name = f"algorithm.correction.preset={preset}"
        with learner_of(folder, *LAYOUTS["dp2"], name, "algorithm.kl_coefficient=0.1") as learner:
            found = []
            for batch in (clean, dirty):
                batch = correct_batch(learner.with_logprobs(batch), learner.config.algorithm.correction)
                stats, count = learner._forward_backward(batch)
                found.append(([*stats.values(), torch.tensor(count)], gradients(learner)))
            for one, other in zip(*found, strict=True):
                assert same(one, other), preset
            if preset != "none":  # which does not read the sampler's log-probs
                before = state(learner)
                check_skipped(learner, learner.update(changed(clean, "sampler_logprobs", np.nan, 11)), before)
            result = learner.update(changed(clean, "sampler_logprobs", -np.inf, 11))
            assert np.isfinite(result.stats["loss"])
            assert all(torch.isfinite(tensor).all() for tensor in state(learner))


def check_infinite_loss(folder: str) -> None:
    """A loss that is not finite although its gradient is: k1 is linear in the reference's log-prob."""
    kl = ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"]
    with learner_of(folder, *LAYOUTS["dp2"], *kl) as learner:
        complete = learner.with_logprobs
        learner.with_logprobs = lambda batch: changed(complete(batch), "ref_logprobs", -np.inf, 11)
        before = state(learner)
        stats, _ = learner._forward_backward(learner.with_logprobs(random_batch()))
        assert not torch.isfinite(stats["loss"]).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(learner))
        check_skipped(learner, learner.update(random_batch()), before)


def check_rejected(folder: str) -> None:
    """Every sequence vetoed: the sampler was certain of tokens that the learner finds unlikely."""
    veto = ["algorithm.correction.preset=sparse_rl", "algorithm.correction.veto_threshold=0.9"]
    with learner_of(folder, *LAYOUTS["dp2"], *veto) as learner:
        batch = random_batch(masked=False)
        batch = batch.with_trajectories(
            tuple(t.with_columns(sampler_logprobs=np.zeros(t.length, np.float32)) for t in batch)
        )
        before = state(learner)
        result = learner.update(batch)
        assert result.stats["correction/accepted_fraction"] == 0
        assert result.stats["loss"] == 0
        check_skipped(learner, result, before)


def check_one_of_two_steps(folder: str) -> None:
    """With two optimizer steps a rollout only the one with the fault is left out."""
    with learner_of(folder, *LAYOUTS["dp2"], "learner.steps_per_rollout=2") as learner:
        before = state(learner)
        result = learner.update(changed(random_batch(groups=4), "advantages", np.nan, 0))
        assert result.skipped == 1
        assert [step.applied for step in result.steps] == [False, True]
        assert learner.optimizer.schedule_position == 2
        assert not same(state(learner), before)
        assert all(torch.isfinite(tensor).all() for tensor in state(learner))


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    for name, layout in LAYOUTS.items():
        check_goes_on(folder, layout)
        print(f"ok {name} goes on", flush=True)
    for check in (check_presets, check_infinite_loss, check_rejected, check_one_of_two_steps):
        check(folder)
        print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
