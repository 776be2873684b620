"""Random states of a rank: after a restore every generator goes on where it was captured."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sparse_rl.learner import random_state
from megatron_sparse_rl.learner.megatron_compat import megatron_device

CPU = torch.device("cpu")


def draw() -> list[float]:
    """From each generator what uses all of its state; the Gaussian ones of Python and numpy keep a spare."""
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
    drawn += [*torch.rand(3).tolist(), torch.randn(()).item()]
    return [float(value) for value in drawn] + tracked().tolist()


def tracked() -> torch.Tensor:
    """Three numbers from Megatron's state for what differs between tensor-parallel ranks."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with megatron_device(CPU), get_cuda_rng_tracker().fork("test-state"):
        return torch.rand(3)


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with megatron_device(CPU):
        get_cuda_rng_tracker().reset()
        get_cuda_rng_tracker().add("test-state", 5)


@pytest.mark.parametrize("spare", [0, 1], ids=["no spare Gaussian", "a spare Gaussian"])
def test_restored_states_go_on_where_they_were_captured(tmp_path: Path, spare: int) -> None:
    """Through a file, as a checkpoint does."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(spare):
        draw()  # an odd number of Gaussians leaves one in reserve
    with megatron_device(CPU):
        save_file(random_state.capture(), tmp_path / "states.safetensors")
    wanted = [draw(), draw()]
    assert wanted[0] != wanted[1]
    random.seed(4)
    np.random.seed(5)
    torch.manual_seed(6)
    tracked()
    with megatron_device(CPU):
        random_state.restore(load_file(tmp_path / "states.safetensors"))
    assert [draw(), draw()] == wanted


def test_captured_states_do_not_move_with_the_process() -> None:
    with megatron_device(CPU):
        states = random_state.capture()
        before = {name: state.clone() for name, state in states.items()}
        draw()
        assert any(
            not torch.equal(a, b)
            for a, b in zip(random_state.capture().values(), before.values(), strict=True)
        )
    assert all(torch.equal(states[name], before[name]) for name in before)


def test_capturing_draws_nothing() -> None:
    with megatron_device(CPU):
        first, second = random_state.capture(), random_state.capture()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
