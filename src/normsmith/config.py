"""Frozen, validated configuration objects that survive a YAML or JSON round trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import pydantic
import yaml

from normsmith.errors import ConfigError, InputError, suggest


class Config(pydantic.BaseModel):
    """Base of every configuration: immutable, strict about keys, equal when equal in value.

    An unknown key or a wrong value raises `ConfigError` with the configuration's name, the key and the nearest known
    key.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True, ser_json_inf_nan="strings")

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: Callable[[Any], Self]) -> Self:
        # ConfigError is no ValueError, so pydantic lets it through from any depth of nesting with its message intact.
        if isinstance(data, dict):
            unknown = [str(key) for key in cast("dict[Any, Any]", data) if key not in cls.model_fields]
            if unknown:
                raise ConfigError(f"{cls.__name__}: unknown key {unknown[0]!r}{suggest(unknown[0], cls.model_fields)}")
        try:
            config = handler(data)
            config.check()
        except pydantic.ValidationError as error:
            raise ConfigError(_first_error(cls.__name__, error)) from None
        except ValueError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None
        return config

    def check(self) -> None:
        """Raise `ValueError` for values that are valid one by one and make no sense together."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary of JSON values; `type(self)(**d)` gives an equal object."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The configuration as YAML, keys in declaration order."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def _first_error(name: str, error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return f"{name}: {message}"
    if first["type"] == "missing":
        return f"{name}: the key {key!r} is missing"
    return f"{name}: {key} = {first['input']!r}: {message[0].lower()}{message[1:]}"


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping; a missing, unreadable or malformed file raises `InputError`."""
    path = Path(path)
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, expected a YAML or JSON file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    except yaml.YAMLError as error:
        kind = "JSON" if path.suffix in (".json", ".jsonl") else "YAML"
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not valid {kind}, it may be cut short or edited by hand ({reason})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected a mapping of keys to values, found {type(loaded).__name__}")
    return cast("dict[str, Any]", loaded)


def apply_overrides(mapping: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Apply `a.b=value` overrides (values in YAML) to a nested mapping and return a new one."""
    result = _copy(mapping)
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator or not path.strip():
            raise InputError(f"--set {override!r}: expected key=value, for example training.max_steps=100")
        *parents, leaf = path.strip().split(".")
        node = result
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise InputError(f"--set {override!r}: {parent!r} is a single value and has no keys")
            node = cast("dict[str, Any]", child)
        try:
            node[leaf] = _number(yaml.safe_load(value))
        except yaml.YAMLError:
            raise InputError(f"--set {override!r}: the value is not valid YAML") from None
    return result


def _copy(mapping: dict[str, Any]) -> dict[str, Any]:
    return {k: _copy(cast("dict[str, Any]", v)) if isinstance(v, dict) else v for k, v in mapping.items()}


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 as text because it has no dot; people who train models write it all the time.
    if isinstance(value, str) and any(character.isdigit() for character in value):
        try:
            return float(value)
        except ValueError:
            return value
    return value
