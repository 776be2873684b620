"""The random states of one rank, as tensors that a safetensors file can hold.

Python's, numpy's, torch's (CPU and CUDA) and Megatron's tracked states. In: nothing, or such tensors. Out:
such tensors, or the states restored.
"""

import random

import numpy as np
import torch

TRACKED = "megatron/"


def capture() -> dict[str, torch.Tensor]:
    """Every random state of this process."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {TRACKED + name: state.cpu().clone() for name, state in tracked.items()}


def restore(states: dict[str, torch.Tensor]) -> None:
    """Put this process where `capture` found it. Call inside `megatron_device`."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_position"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(TRACKED): state for name, state in states.items() if name.startswith(TRACKED)}
    )
