"""Write docs/configuration.md from the settings' own declarations.

In: the dataclasses below `megatron_sparse_rl.config.Config`. Out: one table a section: key, type, default,
unit, bounds, help. With --check nothing is written: the exit status says whether the file is up to date.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from megatron_sparse_rl.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

After this page you can write the YAML file of a run, replace any setting on the command line, and read what a
refusal means. The tables below list every setting; `tools/generate_config_docs.py` generates them.

## A run is one YAML file

```yaml
output_dir: runs/first
model: smollm2-135m
steps: 50
optimizer:
  lr: 2.0e-6
rollout:
  samples_per_group: 8
```

```
megatron-sparse-rl train run.yaml
megatron-sparse-rl train run.yaml steps=20 optimizer.lr=1e-6 'reward.verifiers={exact: 1.0}'
megatron-sparse-rl train --show-config run.yaml steps=20
```

- **Precedence**: an override on the command line, then the file, then the default in the tables.
- **Overrides** have the form `key.path=value`; the value is YAML, so lists and mappings work when quoted for
  the shell. A mapping or list replaces the default as a whole; it is not merged with it.
- **Interpolation**: `${seed}` stands for another setting that the file or an override gives, and
  `${oc.env:HOME}` for an environment variable.
- **What runs**: `--show-config` prints every setting as it will be used; the run keeps the same text in
  `<output_dir>/config.yaml`.

## What is refused

Everything is checked before a process is started. A refusal is one line per fault, which names the setting,
its value and the remedy; the exit status is 2:

```
error: optimizer.lrr=1: there is no such setting; did you mean optimizer.lr or optimizer.min_lr?
error: steps='20': input should be a valid integer
error: rollout.samples_per_group=1 gives no group baseline; use 2 or more, or algorithm.advantage=reinforce
```

Unknown keys are never ignored and values are never converted: `'20'` and `20.0` are no integers, and `1` is
no boolean. An integer is accepted where a number is meant. Infinity and NaN are refused.
"""
HEADING = "| key | type | default | unit | allowed | meaning |\n|---|---|---|---|---|---|\n"


def main() -> int:
    """Write the page, or compare it with the settings; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when out of date")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/configuration.md)")
    arguments = parser.parse_args()
    text = render()
    if not arguments.check:
        arguments.page.write_text(text, encoding="utf-8")
        return 0
    if arguments.page.is_file() and arguments.page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{arguments.page} is out of date; run python tools/generate_config_docs.py", file=sys.stderr)
    return 1


def render() -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + "".join(f"\n{section}" for section in sections())


def sections() -> Iterator[str]:
    """One section per dataclass, in order of declaration; a class used under several keys is listed once."""
    for cls, prefixes in _classes(Config, "", {}).items():
        title = _listed(prefixes) if prefixes[0] else "The run"
        rows = "".join(_row(prefixes[0], name, info) for name, info in _fields(cls) if not _is_section(info))
        if rows:
            also = f"\nThe same keys exist below {_listed(prefixes[1:])}.\n" if prefixes[1:] else ""
            yield f"## {title}\n\n{_docstring(cls)}\n\n{HEADING}{rows}{also}"


def _classes(cls: Any, prefix: str, found: dict[Any, list[str]]) -> dict[Any, list[str]]:
    """Dotted keys by the dataclass that is found there, outer ones first."""
    found.setdefault(cls, []).append(prefix)
    for name, info in _fields(cls):
        if _is_section(info):
            _classes(info.annotation, f"{prefix}.{name}".strip("."), found)
    return found


def _row(prefix: str, name: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra
    unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
    key = f"{prefix}.{name}".strip(".")
    default = f"`{_default(info)}`"
    meaning = (info.description or "").replace("<", r"\<")
    cells = (f"`{key}`", _type(info.annotation), default, unit, _allowed(info), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(info: FieldInfo) -> str:
    """The default as it is written in YAML, on one line."""
    value = info.get_default(call_default_factory=True, validated_data={})
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, float):
        return f"{plain:g}"
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _type(kind: Any) -> str:
    names = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any value"}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Literal:
        return "choice"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    raise TypeError(f"no name for the type {kind}; add it here")


def _allowed(info: FieldInfo) -> str:
    if get_origin(info.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(info.annotation))
    bounds = []
    for item in info.metadata:
        match item:
            case annotated_types.Ge():
                bounds.append(f"≥ {item.ge}")
            case annotated_types.Gt():
                bounds.append(f"> {item.gt}")
            case annotated_types.Le():
                bounds.append(f"≤ {item.le}")
            case annotated_types.Lt():
                bounds.append(f"< {item.lt}")
            case _:
                raise TypeError(f"no words for the bound {item}; add them here")
    return ", ".join(bounds)


def _fields(cls: Any) -> list[tuple[str, FieldInfo]]:
    return list(cls.__pydantic_fields__.items())


def _is_section(info: FieldInfo) -> bool:
    return dataclasses.is_dataclass(info.annotation)


def _docstring(cls: Any) -> str:
    return " ".join((cls.__doc__ or "").split())


def _listed(prefixes: list[str]) -> str:
    return " and ".join(f"`{prefix}`" for prefix in prefixes)


if __name__ == "__main__":
    sys.exit(main())
