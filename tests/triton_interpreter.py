"""Runs a module's Triton kernels on CPU tensors."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """The module of that name, its kernels interpreted; afterwards it is as it was before."""
    pytest.importorskip("triton")
    module = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.reload(module)
        yield module
    importlib.reload(module)
