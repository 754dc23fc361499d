"""`ls` shows the registries, `validate` completes a recipe or says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from normsmith.connections import connections
from normsmith.evaluation import suites
from normsmith.models import PRESETS
from normsmith.norms import norms
from normsmith.schedules import schedules
from normsmith.studies import Recipe, load_recipe
from normsmith.studies.library import find_recipe, recipe_names
from tests.cli.conftest import normsmith

KINDS = {
    "norms": list(norms),
    "connections": [*connections, *connections.aliases],
    "schedules": list(schedules),
    "presets": list(PRESETS),
    "recipes": recipe_names(),
    "suites": list(suites),
}


def test_ls_json_equals_the_registries() -> None:
    result = normsmith("ls", "--json")
    assert (result.code, result.err) == (0, "")
    listed = json.loads(result.out)
    assert {kind: sorted(names) for kind, names in listed.items()} == {k: sorted(v) for k, v in KINDS.items()}
    assert all(line.strip() for names in listed.values() for line in names.values())


@pytest.mark.parametrize("kind", KINDS)
def test_ls_of_one_kind_prints_a_line_per_name(kind: str) -> None:
    result = normsmith("ls", kind)
    assert (result.code, result.err) == (0, "")
    title, *lines = result.out.splitlines()
    assert title == kind
    assert sorted(line.split()[0] for line in lines) == sorted(KINDS[kind])


def test_ls_of_an_unknown_kind_suggests_the_nearest() -> None:
    normsmith("ls", "nroms").refused("unknown list 'nroms'; did you mean 'norms'")


@pytest.mark.parametrize("name", recipe_names())
def test_validate_prints_a_complete_recipe_that_reads_back_equal(name: str, tmp_path: Path) -> None:
    result = normsmith("validate", name, "--set", "training.batch_size=32")
    assert (result.code, result.err) == (0, "")
    expected = find_recipe(name, ["training.batch_size=32"])
    assert expected.training.batch_size == 32
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.out)
    assert load_recipe(printed) == expected
    assert yaml.safe_load(result.out).keys() == Recipe.model_fields.keys()
    assert "# valid: " in result.out.splitlines()[-1]


def test_validate_json_holds_the_recipe_and_the_size_of_the_run(work: Path) -> None:
    result = normsmith("validate", "tiny.yaml", "--json")
    assert (result.code, result.err) == (0, "")
    facts = json.loads(result.out)
    assert Recipe(**facts["recipe"]) == load_recipe("tiny.yaml")
    # Embedding 300·32; per block: q, k, v, o, three MLP matrices of width 85, two gains; the final gain.
    assert facts["parameters"] == 300 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 85 + 2 * 32) + 32
    assert facts["tokens"] == 12 * 4 * 16


CHANGES = [
    ("norm=rmsnrom", r"unknown norm 'rmsnrom'; did you mean 'rmsnorm'\?"),
    ("norm=rmsnorm:epps=1e-5", r"unknown key 'epps'; did you mean 'eps'\?"),
    ("norm=rmsnorm:1e-5", r"'1e-5' is no setting; write name:key=value"),
    ("norm={kind: rmsnorm, epps: 1e-5}", r"unknown key 'epps'; did you mean 'eps'\?"),
    ("norm=5", r"norm: 5 is neither a name nor a mapping"),
    ("norm={eps: 1e-5}", r"norm: the key 'kind' is missing"),
    ("connection=spere", r"unknown connection 'spere'; did you mean 'sphere'"),
    ("connection=[pre]", r"connection: \['pre'\] is neither a name nor a mapping"),
    ("connection={kind: sphere, p: -1}", r"p = -1.*greater than 0"),
    ("model.preset=lama", r"unknown preset 'lama'; did you mean 'llama'"),
    ("model.hiden_size=8", r"unknown key 'hiden_size'; did you mean 'hidden_size'"),
    ("trainng.max_steps=5", r"unknown key 'trainng'; did you mean 'training'\?"),
    ("training.max_steps=0", r"max_steps = 0.*greater than or equal to 1"),
    ("training.max_steps=many", r"max_steps = 'many'.*integer"),
    ("model.hidden_size=30", r"hidden_size=30 is not divisible by num_attention_heads=4; write 28 or 32"),
    ("model.num_key_value_heads=3", r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ("schedule={kind: taper, warmup: 0.5, end: 0.4}", r"end=0.4 must lie after warmup=0.5"),
    ("schedule={kind: tapr}", r"unknown schedule 'tapr'; did you mean 'taper'"),
    ("name.first=x", r"'name' is a single value and has no keys"),
    ("training.max_steps", r"expected key=value"),
    ("training.max_steps=[1", r"the value is not valid YAML"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("verb", ["validate", "train"])
def test_a_wrong_recipe_is_one_sentence_and_writes_nothing(
    verb: str, change: str, message: str, unchanged: Callable[[], None]
) -> None:
    normsmith(verb, "tiny.yaml", "--set", change, *(["-o", "out"] if verb == "train" else [])).refused(message)


def test_a_schedule_that_does_not_fit_the_model_is_refused_before_anything_is_written(
    unchanged: Callable[[], None],
) -> None:
    for verb, output in (("validate", []), ("train", ["-o", "out"])):
        for change in ("connection=sphere", "norm=dyt"):
            result = normsmith(verb, "taper.yaml", "--set", change, *output)
            assert (result.code, result.out) == (2, "")
            assert "normsmith: " in result.err
            assert "taper" in result.err


@pytest.mark.parametrize(
    ("recipe", "content", "message"),
    [
        ("missing.yaml", None, "missing.yaml: no such file"),
        ("sub/missing", None, "sub/missing: no such file"),
        ("taper-2m", None, "unknown recipe 'taper-2m'; did you mean 'taper-1m'"),
        ("broken.yaml", b"model: {preset: [llama\n", "broken.yaml: not valid YAML"),
        ("list.yaml", b"- 1\n- 2\n", "list.yaml: expected a mapping"),
        ("empty.yaml", b"", "empty.yaml: expected a mapping"),
        ("binary.yaml", b"\xff\xfe\x00\x01", "binary.yaml: cannot be read as text"),
    ],
)
@pytest.mark.parametrize("verb", ["validate", "train"])
def test_a_recipe_that_cannot_be_read(verb: str, recipe: str, content: bytes | None, message: str, work: Path) -> None:
    if content is not None:
        (work / recipe).write_bytes(content)
    before = sorted(work.rglob("*"))
    normsmith(verb, recipe).refused(message)
    assert sorted(work.rglob("*")) == before
