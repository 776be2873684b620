"""Fixtures that several test folders share: tiny checkpoints, made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import Family, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoint(family, tied=...)`: the folder of a tiny random checkpoint, made on first use."""
    root: Path = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[Family, bool], str] = {}

    def get(family: Family = "llama", *, tied: bool = False) -> str:
        key = (family, tied)
        if key not in made:
            made[key] = make_checkpoint(root / f"{family}-{'tied' if tied else 'untied'}", family, tied=tied)
        return made[key]

    return get
