"""The scripts under tools/, as modules and as commands.

In: a name. Out: the module, imported as the scripts import one another; what a benchmark wrote.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

TOOLS = Path(__file__).resolve().parents[1] / "tools"
BENCHMARKS = TOOLS / "bench"


@contextmanager
def tool_modules(folder: Path = TOOLS) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of `folder`, in which siblings are top-level modules; they are forgotten afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for name in [name for name, module in sys.modules.items() if _lies_in(module, folder)]:
            del sys.modules[name]


def quick_result(benchmark: str, path: Path) -> dict[str, Any]:
    """What `<benchmark>.py --quick` writes to `path`."""
    command = [sys.executable, str(BENCHMARKS / f"{benchmark}.py"), "--quick", "--json", str(path)]
    subprocess.run(command, check=True, timeout=300)
    return dict(json.loads(path.read_text()))


def _lies_in(module: ModuleType, folder: Path) -> bool:
    return str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}")
