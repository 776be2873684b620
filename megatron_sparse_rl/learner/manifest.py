"""A checkpoint folder's manifest: the size and digest of every file, made by all ranks together.

In: a folder that every rank can read. Out: manifest.json, or the reason why the folder does not match its
manifest.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

MANIFEST = "manifest.json"
READ_BYTES = 16 * 2**20


def write_manifest(folder: Path) -> None:
    """Digest all files of `folder`, each by one rank, and let rank 0 write the manifest; all of it is on the
    disk, beyond a power loss, when this returns. Collective."""
    entries = _share_out(
        _from_rank_0(lambda: _files(folder)),
        lambda name: [(folder / name).stat().st_size, _digest(folder / name, flush=True)],
    )
    if dist.get_rank() == 0:
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump({"files": entries}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def damage(folder: Path, *, digests: bool = True) -> str:
    """Why the checkpoint in `folder` cannot be trusted, or "" when every file matches; without `digests`
    only the sizes are looked at. Collective, same answer everywhere."""
    listed: dict[str, tuple[int, str]] | str = _from_rank_0(lambda: _read(folder / MANIFEST))
    if isinstance(listed, str):
        return listed
    found = _share_out(sorted(listed), lambda name: _compare(folder / name, *listed[name], digests))
    return next((reason for reason in found.values() if reason), "")


def _read(path: Path) -> dict[str, tuple[int, str]] | str:
    """Size and digest of every file that the manifest lists, or why it cannot be used."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: (int(size), str(digest)) for name, (size, digest) in listed.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, or not what write_manifest writes
        return f"{MANIFEST} is not readable"


def _compare(path: Path, size: int, digest: str, digests: bool) -> str:
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
    if not digests or _digest(path) == digest:
        return ""
    return f"{path.name} has other contents than were written"


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def _share_out(names: list[str], work: Callable[[str], Any]) -> dict[str, Any]:
    """`work(name)` for every name, spread over the ranks, the results on all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {name: work(name) for name in names[rank::world]})
    merged = {name: value for part in gathered for name, value in part.items()}
    return {name: merged[name] for name in names}


def _from_rank_0(work: Callable[[], Any]) -> Any:
    """`work()` of rank 0 on every rank, which may see a shared file system at another moment."""
    result: list[Any] = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def _digest(path: Path, *, flush: bool = False) -> str:
    """The file's digest; with `flush` its content is on the disk afterwards."""
    value = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            value.update(block)
        if flush:
            os.fsync(file.fileno())
    return value.hexdigest()
