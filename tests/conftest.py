"""What several test folders share: tiny checkpoints, made once a session; no example has a time limit."""

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests.checkpoints import Family, make_checkpoint

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


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
