"""The page about connections against the registry and against the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from normsmith.connections import connections
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms import Norm

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "connections.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("` "): [cell.strip() for cell in cells]
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 7
}


def test_every_connection_alias_and_option_is_described() -> None:
    assert ROWS.keys() == set(connections)
    for alias in connections.aliases:
        assert f"`{alias}`" in PAGE
    for name in connections:
        for option in connections.get(name).Config.model_fields:
            assert option == "kind" or f"`{option}`" in PAGE, f"{name}: {option}"


@pytest.mark.parametrize("name", list(connections))
def test_the_number_of_norms_is_as_the_table_says(name: str) -> None:
    blocks = 5
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": blocks, "num_attention_heads": 2}
    model = NormsmithForCausalLM(preset_config("llama", **sizes, connection=name))
    count = sum(isinstance(module, Norm) for module in model.modules())
    factor, _, rest = ROWS[name][4].partition("N")
    wanted = int(factor) * blocks + int(rest.replace("+", "") or 0) if "N" in ROWS[name][4] else int(factor)
    assert count == wanted
    assert ("no" if model.model.norm is None else "yes") == ("no" if ROWS[name][3] == "no" else "yes")
    assert (model.model.entry is None) == (ROWS[name][2] == "–")
