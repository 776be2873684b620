"""A checkpoint's manifest: any change to any file is noticed and named."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megatron_sparse_rl.learner import manifest
from megatron_sparse_rl.learner.manifest import MANIFEST, damage, write_manifest

FILES = {"trainer.json": b"{}", "learner/shard_0": bytes(range(256)) * 40, "random/empty": b""}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checked-in checkpoint of three files."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def test_untouched_files_match_and_all_are_listed(folder: Path) -> None:
    assert damage(folder) == ""
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert {name: size for name, (size, _) in listed.items()} == {k: len(v) for k, v in FILES.items()}


def test_a_manifest_can_be_written_anew(folder: Path) -> None:
    (folder / "trainer.json").write_text('{"step": 2}')
    write_manifest(folder)
    assert damage(folder) == ""


def test_cut_missing_and_changed_files_are_named(folder: Path) -> None:
    shard = folder / "learner" / "shard_0"
    shard.write_bytes(FILES["learner/shard_0"][:-1])
    assert damage(folder) == "shard_0 has 10239 bytes instead of 10240"
    shard.unlink()
    assert damage(folder) == "shard_0 is missing"
    shard.mkdir()
    assert damage(folder) == "shard_0 is missing"


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(position=st.integers(0, 10239), bit=st.integers(0, 7))
def test_one_flipped_bit_is_noticed(folder: Path, position: int, bit: int) -> None:
    content = bytearray(FILES["learner/shard_0"])
    content[position] ^= 1 << bit
    (folder / "learner" / "shard_0").write_bytes(content)
    assert damage(folder) == "shard_0 has other contents than were written"


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"files"', b"\xff\xfe", b"[]", b"null", b'{"files": null}', b'{"files": {"a": 3}}']
)
def test_a_damaged_manifest_is_damage(folder: Path, text: bytes) -> None:
    (folder / MANIFEST).write_bytes(text)
    assert damage(folder) == f"{MANIFEST} is not readable"


def test_a_missing_manifest_is_damage(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert damage(folder) == f"{MANIFEST} is missing"


def test_files_longer_than_one_read_are_digested_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "READ_BYTES", 1000)
    assert damage(folder) == ""
