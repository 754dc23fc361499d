"""Surgery on every family: sites as written down by hand, swaps and folds exact against float64, the docs true."""

from __future__ import annotations

import copy
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normsmith.errors import VerificationError
from normsmith.surgery import Site, fold, fold_
from normsmith.surgery.verify import difference, outputs
from tests.surgery import study
from tests.surgery.families import FAMILIES
from tests.surgery.families_table import table
from tests.surgery.family import At, Family

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
each_family = pytest.mark.parametrize("name", FAMILIES)


def expected(family: Family, site: Site) -> At:
    matching = [at for at in family.sites if fnmatchcase(site.name, at.pattern)]
    assert len(matching) == 1, f"{site.name} matches {matching}"
    return matching[0]


@each_family
def test_every_norm_is_found_with_its_role_and_its_readers(name: str) -> None:
    family, sites = FAMILIES[name], study.found(name)
    by_entry: dict[At, int] = dict.fromkeys(family.sites, 0)
    for site in sites:
        at = expected(family, site)
        by_entry[at] += 1
        assert (site.kind, site.role, site.blocked) == (family.kind, at.role, at.blocked), site.name
        assert study.reader_leaves(site) == set(at.readers.split()), site.name
        producer = "" if site.producer is None else site.producer.module.rpartition(".")[2]
        assert not at.producer or producer == at.producer, site.name
        info = site.to_dict()
        gain = {"w·n": "w", "(1 + w)·n": "1 + w", "n": None}[family.formula]
        assert (info["gain"], info["eps_position"]) == (gain, "inside"), site.name
    assert by_entry == {at: at.count for at in family.sites}


@each_family
def test_the_plain_norm_takes_over_exactly_and_restoring_is_exact(name: str) -> None:
    family = FAMILIES[name]
    report, change, restored = study.swapped(name)
    names = {site.name for site in study.found(name) if expected(family, site).plain}
    ours = {site.name for site in study.found(name) if type(site.module).__module__.startswith("normsmith")}
    assert {row[0] for row in report.swapped} == names - ours  # ours are of that kind already
    assert all(row[3] is not None and row[3] <= 1e-6 for row in report.swapped)
    assert change <= 1e-5
    assert restored


@each_family
def test_gains_and_shifts_are_absorbed_exactly(name: str) -> None:
    family, change = FAMILIES[name], study.affine(name)
    right = [s.name for s in study.found(name) if expected(family, s).plain and not expected(family, s).blocked]
    if family.formula == "n" or not right:
        assert change.report is None
        assert "nothing to fold" in change.refused
        return
    assert change.report is not None, change.refused
    assert list(change.report.absorbed) == right
    assert change.error <= 5e-6
    assert change.unchanged == ()
    assert change.embeddings_kept
    assert change.new_biases == tuple(sorted(family.new_biases.split()))
    finals = [s for s in study.found(name) if s.role == "final" and s.name in right]
    assert change.report.untied == (family.tied and bool(finals))
    assert change.config_true


@each_family
def test_linear_norms_of_every_role_are_removed_exactly(name: str) -> None:
    family, change = FAMILIES[name], study.full(name)
    right = [s.name for s in study.found(name) if expected(family, s).folds_fully]
    if not right:
        assert change.report is None
        assert "nothing to fold" in change.refused
        return
    assert change.report is not None, change.refused
    assert list(change.report.removed) == right
    assert change.error <= 1e-6
    assert change.unchanged == ()
    assert change.embeddings_kept
    left = {s.name for s in study.found(name) if expected(family, s).plain} - set(right)
    assert set(change.linear) == left


@pytest.mark.parametrize("name", [name for name in FAMILIES if study.can_reload(name)])
def test_a_model_without_gains_reloads_in_its_own_class(name: str, tmp_path: Path) -> None:
    change, embeddings_kept, problems = study.reloaded(name, tmp_path)
    assert problems == ()
    assert change == 0
    assert embeddings_kept


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_models_fold_within_their_rounding(name: str) -> None:
    family = FAMILIES[name]
    model = family.model().bfloat16()
    exact = study.double(copy.deepcopy(model))
    before = outputs(exact, family.inputs(exact, study.OTHER))
    error_before = difference(before, outputs(model, family.inputs(model, study.OTHER)))
    fold_(model, "affine")
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert difference(before, outputs(model, family.inputs(model, study.OTHER))) <= 2 * error_before


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3", "t5", "clip", "torch_decoder_pre"])
def test_forgetting_any_reader_shows_and_leaves_the_model_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    model = family.model()
    example = family.inputs(model, study.OTHER)
    first_block = [s.name for s in study.found(name) if not s.blocked and ".1." not in s.name]
    readers = sum(len(s.consumers) for s in study.found(name) if s.name in first_block)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    absorb = fold.into_reader
    for forgotten in range(readers):
        calls: list[Any] = []

        def forgetful(*args: Any, calls: list[Any] = calls, forgotten: int = forgotten) -> None:
            calls.append(args[1])
            if len(calls) != forgotten + 1:
                absorb(*args)

        monkeypatch.setattr(fold, "into_reader", forgetful)
        with pytest.raises(VerificationError, match="the model is as it was"):
            fold_(model, "affine", where=first_block, example=example)
        assert len(calls) == readers
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_experts_that_the_traced_token_did_not_reach_are_scaled_too(name: str) -> None:
    family = FAMILIES[name]
    model = study.double(family.model())
    before = outputs(model, family.inputs(model, study.OTHER))
    fold_(model, "affine", example={"input_ids": torch.tensor([[3]])})
    assert difference(before, outputs(model, family.inputs(model, study.OTHER))) <= 1e-6


def test_the_parameters_of_the_families_hide_nothing() -> None:
    for family in FAMILIES.values():
        for norm in (m for m in family.model().modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__):
            for parameter in norm.parameters(recurse=False):
                assert bool((parameter < 0).any())
                assert bool((parameter > 0).any())
                assert float((parameter.detach() - 1).abs().max()) > 0.5


def test_the_committed_table_is_what_this_run_found() -> None:
    text = table()
    if os.environ.get("NORMSMITH_WRITE_DOCS"):
        DOCUMENT.write_text(text, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == text, "docs/families.md is out of date: run `make docs-families`"
