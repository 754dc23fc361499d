"""Recipes: files, overrides, defaults, and the built-in ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from normsmith.connections import connections
from normsmith.connections.sphere import SphereConfig
from normsmith.errors import ConfigError, InputError, UnknownNameError
from normsmith.norms import norm_config, norms
from normsmith.schedules import TaperConfig
from normsmith.studies import Recipe, load_recipe
from normsmith.studies.library import find_recipe, listing, recipe_names
from normsmith.studies.runner import build_scheduled
from normsmith.studies.tasks import known_facts


@pytest.mark.parametrize("name", recipe_names())
def test_every_built_in_recipe_builds_its_model(name: str, tmp_path: Path) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    model, controller = build_scheduled(recipe, known_facts(recipe))
    assert 0.7e6 < model.num_parameters() < 1.3e6 or recipe.data.kind != "text"
    assert (controller is not None) == (recipe.schedule is not None)
    path = tmp_path / "copy.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


EVERYTHING: dict[str, Any] = {
    "name": "all",
    "seed": 7,
    "data": {"source": "book.txt", "validation_fraction": 0.1, "max_documents": 5},
    "model": {"preset": "gpt", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "norm": {"kind": "layernorm", "eps": 1e-6},
    "connection": {"kind": "sphere", "p": math.inf, "decay": "harmonic"},
    "schedule": {"kind": "taper", "warmup": 0.25, "end": 0.75, "placement": "all"},
    "training": {"max_steps": 40, "report_to": ["tensorboard"], "bf16": True},
    "evaluation": {"windows": 3},
}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (Recipe(**EVERYTHING).to_yaml(), True),
        (yaml.safe_dump(EVERYTHING), True),
        (yaml.safe_dump({**EVERYTHING, "seed": 8}), False),
        (yaml.safe_dump({**EVERYTHING, "unknown": 1}), False),
        (yaml.safe_dump({key: value for key, value in EVERYTHING.items() if key != "evaluation"}), False),
        ("", False),
        ("- 1", False),
        ("a: [", False),
    ],
)
def test_a_text_is_the_recipe_or_not(text: str, same: bool) -> None:
    assert Recipe(**EVERYTHING).is_written_in(text) == same


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_yaml_and_json_round_trips_with_every_part_and_infinite_p(suffix: str, tmp_path: Path) -> None:
    recipe = Recipe(**EVERYTHING)
    assert isinstance(recipe.connection, SphereConfig)
    assert recipe.connection.p == math.inf
    path = tmp_path / f"recipe.{suffix}"
    path.write_text(recipe.to_yaml() if suffix == "yaml" else recipe.model_dump_json())
    again = load_recipe(path)
    assert again == recipe
    assert again.connection == recipe.connection
    assert again.to_yaml() == recipe.to_yaml()
    assert again.schedule == TaperConfig(warmup=0.25, end=0.75, placement="all")


@pytest.mark.parametrize("kind", [*norms])
def test_every_norm_by_name_and_round_trip(kind: str) -> None:
    recipe = Recipe.model_validate({"norm": kind})
    assert recipe.norm == norms.config(kind)
    assert Recipe(**recipe.to_dict()) == recipe


@pytest.mark.parametrize("kind", [*connections, *connections.aliases])
def test_every_connection_and_alias_by_name_and_round_trip(kind: str) -> None:
    recipe = Recipe.model_validate({"connection": kind})
    assert recipe.connection == connections.config(kind)
    assert Recipe(**recipe.to_dict()) == recipe


def test_overrides_reach_every_depth_and_leave_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text("training: {max_steps: 10, beta1: 0.8}\n")
    recipe = load_recipe(
        path,
        ["training.max_steps=25", "training.learning_rate=1e-4", "norm=dyt", "connection.kind=sphere",
         "connection.p=.inf", "data.source=some file.txt", "schedule.kind=taper", "schedule.warmup=0.5", "name=other"],
    )  # fmt: skip
    assert (recipe.training.max_steps, recipe.training.beta1, recipe.training.learning_rate) == (25, 0.8, 1e-4)
    assert recipe.norm is not None
    assert (recipe.norm.kind, recipe.connection.kind, recipe.name) == ("dyt", "sphere", "other")
    assert isinstance(recipe.connection, SphereConfig)
    assert recipe.connection.p == math.inf
    assert recipe.schedule == TaperConfig(warmup=0.5)
    assert recipe.data.source == "some file.txt"
    assert load_recipe(path).training.max_steps == 10
    assert load_recipe(path).name == "base"  # from the file's name


def test_parts_are_written_as_in_arms_or_as_mappings(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("norm: autonorm:pool=sequence,tau=2\nconnection: sphere:p=2\nschedule: gate_freeze:rule=always\n")
    assert load_recipe(path) == Recipe(
        name="a",
        norm={"kind": "autonorm", "pool": "sequence", "tau": 2},
        connection={"kind": "sphere", "p": 2},
        schedule={"kind": "gate_freeze", "rule": "always"},
    )
    assert load_recipe(path, ["norm=dyt:alpha=0.8"]).norm == norm_config("dyt", alpha=0.8)


def test_a_recipe_is_complete_by_default_and_cannot_change() -> None:
    recipe = Recipe()
    assert recipe.connection.kind == "pre"
    assert recipe.schedule is None
    with pytest.raises(Exception, match="frozen"):
        recipe.seed = 3  # pyright: ignore[reportAttributeAccessIssue]
    changed = recipe.changed(seed=3, connection={"kind": "sphere"})
    assert (changed.seed, changed.connection.kind, recipe.seed, recipe.connection.kind) == (3, "sphere", 0, "pre")


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"norm": "rmsnrom"}, UnknownNameError, "did you mean 'rmsnorm'"),
        ({"norm": 5}, ConfigError, "norm: 5 is neither a name"),
        ({"connection": None}, ConfigError, "connection: None is neither a name"),
        ({"sead": 1}, ConfigError, "unknown key 'sead'; did you mean 'seed'"),
        ({"data": {"sequence_lenght": 8}}, ConfigError, "did you mean 'sequence_length'"),
        ({"seed": -1}, ConfigError, "seed = -1"),
        (
            {"schedule": {"kind": "taper", "warmup": 0.5}, "training": {"max_steps": 1}},
            InputError,
            "a run of 1 steps is too short",
        ),
    ],
)
def test_wrong_parts(parts: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recipe(**parts)


def test_a_name_with_a_suffix_or_a_folder_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("taper-1m.yaml", "./sub/taper-1m"):
        with pytest.raises(InputError, match="no such file"):
            find_recipe(name)
    (tmp_path / "taper-1m").write_text("seed: 5\n")  # an own file wins over the built-in recipe
    assert find_recipe("taper-1m").seed == 5


def test_the_listing_names_every_entry_once() -> None:
    known = listing()
    assert list(known["norms"]) == list(norms)
    assert list(known["connections"]) == [*connections, *connections.aliases]
    assert list(known["recipes"]) == recipe_names()
    assert all("\n" not in line for entries in known.values() for line in entries.values())
