"""How a setting is declared and refused.

Every part of the system declares its settings as a frozen dataclass in a `settings.py` of its own folder,
with `@settings` and one `setting(...)` per field; `config.py` joins them. In: nothing. Out: the declaration
helpers and `SettingError`, the one exception a user sees for a wrong configuration.
"""

from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")


class SettingError(ValueError):
    """A configuration that cannot run. The message names the setting, its value and the remedy."""


def setting(default: Any, help: str, *, unit: str = "", **bounds: Any) -> Any:
    """A field with a default, one sentence of help, a unit for the documentation and pydantic bounds
    (`ge`, `lt`, ...)."""
    extra: dict[str, Any] = {"unit": unit}
    if callable(default):
        return Field(default_factory=default, description=help, json_schema_extra=extra, **bounds)
    return Field(default=default, description=help, json_schema_extra=extra, **bounds)


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are type-checked; unknown keys, NaN and infinity are
    refused.
    """
    return cast(type[T], dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls))
