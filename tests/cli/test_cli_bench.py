"""`bench`: tables for people, JSON for machines, no number for models that disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from normsmith.bench import family
from normsmith.surgery import FoldReport
from tests.cli.conftest import normsmith

NAMES = ["baseline", "fused", "tapered", "folded", "twin"]


def test_decode_json_of_a_trained_model(trained: Path) -> None:
    result = normsmith("bench", "decode", trained / "taper", "--rounds", "2", "--new-tokens", "4", "--json")
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert [row["name"] for row in rows] == NAMES
    assert rows[0]["ratio"] == 1.0
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in rows)


def test_decode_prints_a_table_for_a_random_model() -> None:
    result = normsmith("bench", "decode", "--rounds", "1", "--new-tokens", "4", "--prompt", "8", "--batch", "2")
    assert result.code == 0
    assert result.err.startswith("decoding: 1/1 ")
    head, _, *rows, ceiling = result.out.splitlines()
    assert head.split() == ["model", "batch", "tokens/s", "quartiles", "ratio"]
    assert len(rows) == len(NAMES)
    assert rows[0].split()[-1] == "1.000"
    assert ceiling.startswith("folded / norm-free twin: ")


def test_decode_prints_no_speed_for_models_that_disagree(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fold_ = family.fold_

    def spoiled(model: torch.nn.Module) -> FoldReport:
        report = fold_(model)
        with torch.no_grad():
            model.get_parameter("model.layers.0.self_attn.o_proj.weight").mul_(-3)
        return report

    monkeypatch.setattr(family, "fold_", spoiled)
    result = normsmith("bench", "decode", trained / "taper", "--rounds", "1", "--new-tokens", "16")
    assert (result.code, result.out) == (1, "")
    assert "normsmith: tapered and folded generate different tokens" in result.err


def test_decode_of_several_batches_with_a_static_cache_and_without() -> None:
    for cache in ("static", "none"):
        short = ("--rounds", "1", "--new-tokens", "4", "--prompt", "8", "--json")
        result = normsmith("bench", "decode", "--batch", "1,2", "--cache", cache, *short)
        assert (result.code, result.err) == (0, "")
        rows = json.loads(result.out)
        assert [(row["name"], row["batch"], row["cache"]) for row in rows] == [
            (name, size, cache) for size in (1, 2) for name in NAMES
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "1,x"), "--batch '1,x': write one or several numbers, as 1,4,16"),
        (("--batch", "0"), "--batch '0': write"),
        (("--batch", "2,2"), "--batch '2,2': write"),
        (("--cache", "big"), "cache 'big': write dynamic, static or none"),
        (("--compile",), "a cache that grows cannot be compiled"),
    ],
)
def test_decode_refuses_what_it_cannot_measure(options: tuple[str, ...], message: str) -> None:
    result = normsmith("bench", "decode", *options)
    assert result.code == 2
    assert message in result.err


def test_step_of_a_small_model() -> None:
    result = normsmith(
        "bench",
        "step",
        "--width",
        "48",
        "--layers",
        "1",
        "--eager",
        "--rounds",
        "1",
        "--json",
        "--arms",
        "pre,sphere:p=2,decay=none",
    )
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert [row["case"] for row in rows] == ["pre", "sphere:p=2,decay=none"]
    assert rows[0]["ratio"] == 1.0
    assert all(row["seconds"] > 0 and len(row["quartiles"]) == 2 for row in rows)


def test_step_of_an_unknown_arm() -> None:
    result = normsmith("bench", "step", "--arms", "pre,spere")
    assert result.code == 2
    assert "arm 'spere': unknown name 'spere'" in result.err


def test_depth_in_a_table_and_as_json() -> None:
    small = ("--layers", "1,3", "--width", "16", "--length", "8", "--batch", "1", "--rounds", "1")
    result = normsmith("bench", "depth", "--arm", "sphere:p=2", *small)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0].startswith("layers  ms")
    rows = json.loads(normsmith("bench", "depth", *small, "--json").out)
    assert [row["layers"] for row in rows] == [1, 3]
    assert rows[0]["per_layer"] is None
    assert rows[1]["drift"] < 1e-5
    for layers, message in (("6", "depths 6: at least two"), ("a", "--layers 'a': write one or several numbers")):
        assert message in normsmith("bench", "depth", "--layers", layers).err


def test_collapse_beside_the_plain_model() -> None:
    small = ("--width", "16", "--layers", "1", "--length", "4", "--batch", "1", "--rounds", "2")
    result = normsmith("bench", "collapse", "--norm", "dyt", *small, "--json")
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert [row["case"] for row in rows] == ["plain", "plain again", "gates", "collapsed"]
    assert rows[0]["ratio"] == 1.0
    assert (
        "unknown candidate 'rmsnorm'; did you mean 'layernorm'?"
        in normsmith("bench", "collapse", "--norm", "rmsnorm").err
    )


def test_step_of_an_encoder() -> None:
    small = ("--width", "16", "--heads", "4", "--layers", "1", "--length", "4", "--rounds", "1", "--eager")
    arms = ("--arms", "frozen_ln,autonorm:pool=sequence")
    result = normsmith("bench", "step", "--images", *arms, *small, "--json")
    assert (result.code, result.err) == (0, "")
    assert [row["case"] for row in json.loads(result.out)] == ["frozen_ln", "autonorm:pool=sequence"]
    refused = normsmith("bench", "step", *arms, *small)
    assert refused.code == 2
    assert "is causal" in refused.err
    assert "write pool='token'" in refused.err


def test_a_device_that_is_not_there() -> None:
    result = normsmith("bench", "decode", "--rounds", "1", "--device", "nowhere:7")
    assert (result.code, result.out) == (2, "")
    assert "--device nowhere:7: " in result.err
