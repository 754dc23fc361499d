"""Configurations, overrides and registries: what users see when they mistype."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from normsmith.config import Config, apply_overrides, read_mapping
from normsmith.errors import ConfigError, InputError, UnknownNameError
from normsmith.registry import Registry


class Inner(Config):
    kind: Literal["inner"] = "inner"
    eps: float = Field(1e-5, gt=0)


class Outer(Config):
    inner: Inner = Inner()
    steps: int = 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"step": 1}, "Outer: unknown key 'step'; did you mean 'steps'?"),
        ({"inner": {"epz": 1}}, "Inner: unknown key 'epz'; did you mean 'eps'?"),
        ({"inner": {"eps": -1}}, "Inner: eps = -1: input should be greater than 0"),
        ({"steps": "many"}, "Outer: steps = 'many': input should be a valid integer"),
    ],
)
def test_errors_name_the_key_and_the_nearest_one(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=".") as caught:
        Outer(**data)
    assert str(caught.value).startswith(message)


def test_configurations_are_frozen_values() -> None:
    config = Outer(steps=5)
    assert Outer(**config.to_dict()) == config
    with pytest.raises(Exception, match="frozen"):
        config.steps = 6


def test_overrides() -> None:
    mapping = {"training": {"learning_rate": 1.0}, "name": "x"}
    changed = apply_overrides(mapping, ["training.learning_rate=1e-3", "model.heads=[1, 2]", "name=2024-a"])
    assert changed == {"training": {"learning_rate": 0.001}, "model": {"heads": [1, 2]}, "name": "2024-a"}
    assert mapping["training"] == {"learning_rate": 1.0}
    for wrong in ("training", "=3", "name.deep=1", "a=[1"):
        with pytest.raises(InputError, match="--set"):
            apply_overrides(mapping, [wrong])


def test_reading_a_mapping(tmp_path: Path) -> None:
    good = tmp_path / "a.yaml"
    good.write_text("a: {b: 1}\n")
    assert read_mapping(good) == {"a": {"b": 1}}
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, message in [
        ("none.yaml", "no such file"),
        ("list.yaml", "expected a mapping"),
        ("bad.yaml", "not valid YAML"),
        ("binary.yaml", "cannot be read as text"),
        (".", "is a folder"),
    ]:
        with pytest.raises(InputError, match=message):
            read_mapping(tmp_path / name)


def test_registry_refuses_collisions_and_names_the_nearest() -> None:
    registry: Registry[type] = Registry("thing")

    @registry.register("inner", short={"eps": 1.0})
    class Thing:
        Config = Inner

    assert registry.get("short") is Thing
    assert registry.config("short") == Inner(eps=1.0)
    assert registry.config("short", eps=2.0) == Inner(eps=2.0)
    assert registry.config(Inner(), eps=2.0) == Inner(eps=2.0)
    assert registry.config("short:eps=3") == registry.config({"kind": "short", "eps": 3}) == Inner(eps=3.0)
    for name in ("inner", "short"):
        with pytest.raises(ValueError, match=f"{name}' is already registered"):
            registry.register(name)(Thing)
    with pytest.raises(UnknownNameError, match="unknown thing 'iner'; did you mean 'inner'"):
        registry.get("iner")
    with pytest.raises(UnknownNameError, match="unknown thing 'iner'; did you mean 'inner'"):
        registry.config("iner:eps=1")
    with pytest.raises(ConfigError, match="'kind' is missing"):
        registry.config({"eps": 1})
