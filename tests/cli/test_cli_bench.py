"""`bench`: tables for people, JSON for machines, no number for models that disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from normsmith.bench import decode
from tests.cli.conftest import normsmith

NAMES = ["baseline", "tapered", "folded", "twin"]


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
    assert head.split() == ["model", "tokens/s", "quartiles", "ratio"]
    assert len(rows) == len(NAMES)
    assert rows[0].split()[-1] == "1.000"
    assert ceiling.startswith("folded / norm-free twin: ")


def test_decode_prints_no_speed_for_models_that_disagree(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fold_ = decode.fold_

    def spoiled(model: torch.nn.Module) -> None:
        fold_(model)
        with torch.no_grad():
            model.get_parameter("model.layers.0.self_attn.o_proj.weight").mul_(-3)

    monkeypatch.setattr(decode, "fold_", spoiled)
    result = normsmith("bench", "decode", trained / "taper", "--rounds", "1", "--new-tokens", "16")
    assert (result.code, result.out) == (1, "")
    assert "normsmith: tapered and folded generate different tokens" in result.err


def test_step_of_a_small_model() -> None:
    result = normsmith("bench", "step", "--width", "48", "--layers", "1", "--eager", "--rounds", "1", "--json")
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert rows[0]["ratio"] == 1.0
    assert all(row["seconds"] > 0 and len(row["quartiles"]) == 2 for row in rows)
