"""The rules of the house, read off the source: who may import whom, where upstream's private names may stand,
what is imported before a run starts, and that no file speaks of one machine."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_sparse_rl"
MODULES = sorted(PACKAGE.rglob("*.py"))

PURE = {"algorithms", "kernels"}  # tensor functions: neither engines nor learner
ROOMS = {"learner", "weights", "rollout", "rewards", "data", "observability"}
BASE = {"settings", "config", "trajectory"}
ENGINES = {"vllm": "rollout", "megatron": "learner"}  # upstream package -> the one room that imports it
COMPAT = {
    "vllm": ("rollout/vllm_compat.py", "rollout/sparse_kv/vllm_compat.py"),
    "megatron": ("learner/megatron_compat.py",),
}
HEAVY = ("torch", "transformers", "vllm", "megatron", "numpy", "matplotlib", "pyarrow")


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules and members that the code imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> Iterator[list[str]]:
    """The parts behind `megatron_sparse_rl.` of every import of this package."""
    for name in imports(tree):
        first, *rest = name.split(".")
        if first == "megatron_sparse_rl" and rest:
            yield rest


def place(path: Path) -> str:
    """The room a module is in, or its own name when it stands at the top of the package."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def private_uses(tree: ast.AST, upstream: str) -> Iterator[str]:
    """Names with a leading underscore that the code takes from modules or members of `upstream`."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == upstream:
            parts = f"{node.module}.".split(".")
            yield from (f"{node.module}.{a.name}" for a in node.names if is_private(*parts, a.name))
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == upstream]
            yield from (alias.name for alias in ours if is_private(*alias.name.split(".")))
            bound |= {alias.asname or upstream for alias in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield ast.unparse(node)


def is_private(*names: str) -> bool:
    return any(name.startswith("_") and not name.endswith("__") for name in names)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in MODULES}


def test_pure_rooms_import_only_each_other_and_the_base(trees: dict[Path, ast.Module]) -> None:
    allowed = PURE | BASE
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
        for path, tree in trees.items()
        if place(path) in PURE
        for parts in own_imports(tree)
        if parts[0] not in allowed
    ]
    assert not wrong


def test_rooms_import_nothing_from_above(trees: dict[Path, ast.Module]) -> None:
    """Above the rooms stands every module at the top of the package that is no base: trainer, launch, cli."""
    allowed = ROOMS | PURE | BASE
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
        for path, tree in trees.items()
        if place(path) in ROOMS
        for parts in own_imports(tree)
        if parts[0] not in allowed
    ]
    assert not wrong


def test_rooms_do_not_import_each_other_in_a_circle(trees: dict[Path, ast.Module]) -> None:
    """Settings are exempt: they are declarations, which config.py joins."""
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path, tree in trees.items():
        if place(path) in ROOMS:
            below[place(path)] |= {
                parts[0]
                for parts in own_imports(tree)
                if parts[0] in ROOMS - {place(path)} and "settings" not in parts
            }
    while free := [room for room, needs in below.items() if not needs & below.keys()]:
        for room in free:
            del below[room]
    assert not below


def test_base_modules_import_only_settings(trees: dict[Path, ast.Module]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
        for path, tree in trees.items()
        if place(path) in BASE or path.name == "settings.py"
        for parts in own_imports(tree)
        if "settings" not in parts
    ]
    assert not wrong


@pytest.mark.parametrize(("upstream", "room"), ENGINES.items())
def test_an_upstream_is_imported_in_one_room(trees: dict[Path, ast.Module], upstream: str, room: str) -> None:
    users = {
        place(path) for path, tree in trees.items() if upstream in {n.split(".")[0] for n in imports(tree)}
    }
    assert users <= {room}


@pytest.mark.parametrize(("upstream", "modules"), COMPAT.items())
def test_private_names_of_an_upstream_stand_in_its_modules(
    trees: dict[Path, ast.Module], upstream: str, modules: tuple[str, ...]
) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {use}"
        for path, tree in trees.items()
        if str(path.relative_to(PACKAGE)) not in modules
        for use in private_uses(tree, upstream)
    ]
    assert not found


def test_private_uses_are_seen() -> None:
    """The reader above finds what it looks for."""
    code = """
import vllm.v1._core
from vllm.v1 import worker, _hidden
from vllm._C import ops
class Sub(worker.Base):
    def run(self):
        return worker.Base._secret(self), self._own, worker.__name__
"""
    assert sorted(private_uses(ast.parse(code), "vllm")) == [
        "vllm._C.ops",
        "vllm.v1._core",
        "vllm.v1._hidden",
        "worker.Base._secret",
    ]
    assert not list(private_uses(ast.parse(code), "megatron"))


def test_what_is_imported_before_a_run_is_light() -> None:
    """--help, configuration errors and the launcher's environment for OpenMP depend on it."""
    names = ["megatron_sparse_rl.cli", "megatron_sparse_rl.config", "megatron_sparse_rl.launch"]
    names += [f"megatron_sparse_rl.{room}" for room in sorted(ROOMS | PURE)]
    code = f"import sys, {', '.join(names)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_no_tracked_file_names_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    machine = re.compile(r"(?<![\w.$}])/(?:work|tmp|home|root|opt|mnt|Users)/\w")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path != Path(__file__).resolve() and path.is_file():
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
            found += [f"{name}:{n}: {line}" for n, line in enumerate(lines, 1) if machine.search(line)]
    assert not found
