"""The reference policy: the learner's weights as they were at step 0, kept off the device.

In: the live model. Out: a context in which the model computes with the reference weights. Costs one copy of
this rank's weights in host memory, and two copies over the bus each time it is used.
"""

import contextlib
from collections.abc import Iterator

import torch


class ReferenceWeights:
    """A host copy of a model's parameters (pinned where there is CUDA) that can be swapped in."""

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        pin = torch.cuda.is_available()
        self.tensors = {
            name: torch.empty(p.shape, dtype=p.dtype, pin_memory=pin).copy_(p)
            for name, p in model.named_parameters()
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The model holds the reference weights inside, and its own again afterwards."""
        own = {name: p.detach().to("cpu", copy=True) for name, p in self._model.named_parameters()}
        self._write(self.tensors)
        try:
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(tensors[name])
