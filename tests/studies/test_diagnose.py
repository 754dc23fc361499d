"""What runs measure inside their models: equal to the parts it is made of, deterministic, and shown by the report."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normsmith.connections import connections
from normsmith.data import TextData
from normsmith.diagnostics import anchoring, gate_report, profile_stream, stream_layers, stream_scale
from normsmith.norms.tapered import TaperedNorm
from normsmith.report.account import read_account
from normsmith.report.attached import Panel, read_panels
from normsmith.report.diagnostic_pictures import diagnostic_pictures
from normsmith.schedules import GateController
from normsmith.studies import Recipe
from normsmith.studies.diagnose import EXAMPLES, diagnose
from normsmith.studies.library import find_recipe
from normsmith.studies.memory import PeakMemory
from normsmith.studies.reproduction import find_reproduction
from normsmith.studies.runner import Run, build_model, build_scheduled, run_recipe
from normsmith.studies.study import make_study
from normsmith.studies.tasks import facts_of, parts_of
from normsmith.training import Reporter
from tests.studies.small import plan_of, run

TRAINING = {"max_steps": 6, "batch_size": 4, "learning_rate": 1e-2, "log_every": 3, "save_every": 3}


def watched(base: Recipe, **changes: Any) -> Recipe:
    training = {**TRAINING, "evaluate_every": 3}
    return base.changed(training=training, evaluation={"windows": 30, "diagnostics": True}, **changes)


def train(recipe: Recipe, folder: Path, data: Any = None, **options: Any) -> Run:
    return run_recipe(recipe, folder, Reporter(quiet=True), data=data, **options)


def panels_of(folder: Path) -> dict[str, Panel]:
    found = read_panels(folder / "diagnostics.json")
    assert len({panel.title for panel in found}) == len(found)
    return {panel.title: panel for panel in found}


def ids_of(done: Run) -> torch.Tensor:
    return torch.stack([done.validation[i]["input_ids"] for i in range(EXAMPLES)])


def test_a_language_models_panels_are_what_its_parts_measure(base: Recipe, data: TextData, tmp_path: Path) -> None:
    recipe = watched(base, norm="rmsnorm", schedule={"kind": "taper", "warmup": 0.3, "momentum": 0.3})
    done = train(recipe, tmp_path / "run", data)
    panels = panels_of(tmp_path / "run")
    ids = ids_of(done)
    assert panels["RMS of the stream"].series["rms"] == tuple(stream_scale(done.model, input_ids=ids))
    profile = profile_stream(done.model, [ids], probes=0)
    assert panels["Update angle of each block"].series["angle"] == tuple(layer.angle for layer in profile.layers[1:])
    sites = {name: float(m.scale) for name, m in done.model.named_modules() if isinstance(m, TaperedNorm)}
    fixed = panels["Fixed scale c of the tapered norms"]
    assert dict(zip(fixed.x, fixed.series["c"], strict=True)) == sites
    assert 1.0 not in sites.values()
    expected = anchoring(done.model, [ids])
    gradients = panels["Gradient norm by kind of weight"]
    assert dict(zip(gradients.x, gradients.series["norm"], strict=True)) == expected.gradients
    result = json.loads((tmp_path / "run/result.json").read_text())
    names = ("radial_product", "logit_norm", "stream_scale_mean", "stream_scale_std")
    assert [result[n] for n in names] == [
        expected.radial, expected.logit_norm, expected.scale_mean, expected.scale_std
    ]  # fmt: skip
    evaluations = [entry for entry in done.history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert all(math.isfinite(entry[n]) for entry in evaluations for n in names[1:])
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in done.model.parameters())


def test_without_the_option_nothing_is_added(base: Recipe, data: TextData, tmp_path: Path) -> None:
    plain = base.changed(training={**TRAINING, "evaluate_every": 3})
    one, two = train(plain, tmp_path / "plain", data), train(watched(base), tmp_path / "watched", data)
    assert not (tmp_path / "plain/diagnostics.json").exists()
    assert "logit_norm" not in (tmp_path / "plain/metrics.jsonl").read_text()
    assert "logit_norm" not in json.loads((tmp_path / "plain/result.json").read_text())
    assert one.validation_loss == two.validation_loss  # looking changes nothing
    assert [e.get("loss") for e in one.history] == [e.get("loss") for e in two.history]


def test_scoring_the_weights_is_no_part_of_what_an_evaluation_logs(
    base: Recipe, data: TextData, tmp_path: Path
) -> None:
    logged: list[list[tuple[float, float]]] = []
    for keep in ("last", "best"):
        training = {**TRAINING, "evaluate_every": 2, "keep": keep}
        recipe = base.changed(training=training, evaluation={"windows": 30, "diagnostics": True})
        entries = [e for e in train(recipe, tmp_path / keep, data).history if "eval_loss" in e]
        logged.append([(entry["logit_norm"], entry["stream_scale_mean"]) for entry in entries])
    assert len(logged[0]) == 3
    assert logged[0] == logged[1]


def test_a_continued_run_measures_the_same(base: Recipe, data: TextData, tmp_path: Path) -> None:
    recipe = watched(base, norm="autonorm", schedule={"kind": "gate_freeze", "momentum": 0.3})
    train(recipe, tmp_path / "whole", data)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("result.json", "diagnostics.json", "metrics.jsonl"):
        (tmp_path / "cut" / name).unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/checkpoint-6")
    train(recipe, tmp_path / "cut", data, resume=True)
    for name in ("diagnostics.json", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def check_gates(done: Run, folder: Path) -> None:
    panels = panels_of(folder)
    assert isinstance(done.controller, GateController)
    gates = gate_report(done.controller).gates
    weights, entropy = panels["Gate weights by site"], panels["Gate entropy by site"]
    assert weights.x == entropy.x == tuple(gate.site for gate in gates)
    assert entropy.series["entropy"] == tuple(gate.entropy for gate in gates)
    assert done.controller.decided is not None
    assert entropy.series["at the decision"] == tuple(done.controller.decided[gate.site] for gate in gates)
    assert panels["Frozen gates by site"].series["frozen"] == tuple(float(gate.frozen) for gate in gates)
    for i, gate in enumerate(gates):
        assert tuple(series[i] for series in weights.series.values()) == gate.weights
    last = [entry for entry in done.history if "eval_loss" in entry][-1]
    assert {key for key in last if key.startswith("site_entropy/")} == {f"site_entropy/{g.site}" for g in gates}
    assert last[f"site_entropy/{gates[0].site}"] == gates[0].entropy
    assert len({gate.entropy for gate in gates}) > 1


@pytest.mark.parametrize("name", ["digits-vit", "code-tagging", "diabetes"])
def test_other_tasks_measure_stream_and_gates(name: str, tmp_path: Path) -> None:
    short = ["training.max_steps=6", "evaluation.windows=40", "evaluation.diagnostics=true"]
    short += ["training.evaluate_every=6", "model.num_hidden_layers=2"]
    if name == "code-tagging":
        short.append("data.max_sentences=60")
    recipe = find_recipe(name, short).changed(norm={"kind": "autonorm"}, schedule={"kind": "gate_freeze"})
    done = train(recipe, tmp_path / "run")
    panels = panels_of(tmp_path / "run")
    assert panels.keys() == {
        "RMS of the stream",
        "Gate weights by site",
        "Gate entropy by site",
        "Frozen gates by site",
    }
    assert len(panels["RMS of the stream"].x) == 5
    assert "logit_norm" not in json.loads((tmp_path / "run/result.json").read_text())
    check_gates(done, tmp_path / "run")


@pytest.mark.parametrize("kind", [*connections])
def test_every_connection_can_be_looked_into(kind: str, base: Recipe, data: TextData) -> None:
    recipe = base.changed(connection=kind, model={**base.model.to_dict(), "num_hidden_layers": 2})
    model = build_model(recipe, facts_of(data))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    said: list[str] = []
    panels, numbers = diagnose(model, None, parts_of(recipe, data).validation, True, said.append)
    assert said == []
    assert [len(panel.x) for panel in panels[:2]] == [5, 2]
    assert {"radial_product", "logit_norm"} <= numbers.keys()
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    ids = torch.stack([parts_of(recipe, data).validation[i]["input_ids"] for i in range(2)])
    assert stream_layers(model, [ids])[1:] == tuple(
        type(layer)(**{**vars(layer), "skip": None, "sink": None, "sink_head": None})
        for layer in profile_stream(model, [ids], probes=0).layers[1:]
    )


def test_what_cannot_be_measured_is_said_and_loses_nothing_else(base: Recipe, data: TextData) -> None:
    model, controller = build_scheduled(base, facts_of(data))
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data.fill_(math.nan)
    panels, numbers = diagnose(model, controller, parts_of(base, data).validation, True, print)
    assert panels[0].series["rms"][-1] is None
    assert numbers == {}


def test_arms_with_other_sites_share_a_picture(base: Recipe, data: TextData, tmp_path: Path) -> None:
    arms = ("taper:placement=internal,warmup=0.3,momentum=0.3", "taper:placement=all,warmup=0.3,momentum=0.3")
    study = make_study(tmp_path / "study", plan_of(watched(base, norm="rmsnorm"), data, arms=arms, seeds=(0,)))
    run(study, data)
    pictures = {picture.title: picture for picture in diagnostic_pictures(read_account(study.folder))}
    picture = pictures["Fixed scale c of the tapered norms"]
    assert all(f"{arm}: from" in picture.alt for arm in arms)
    assert "Norm of the logits" in pictures
    every = [read_panels(cell.folder / "diagnostics.json")[1].x for cell in study.cells]
    assert len(every[1]) == len(every[0]) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator counts per run")
def test_the_peak_of_memory_is_the_runs_or_absent(
    base: Recipe, data: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(name: str, given: TextData | None) -> float | None:
        train(base, tmp_path / name, given)
        return json.loads((tmp_path / name / "result.json").read_text()).get("peak_memory_bytes")

    monkeypatch.setattr(PeakMemory, "_runs", 0)
    monkeypatch.setenv("NORMSMITH_CACHE", str(tmp_path / "cache"))
    own, second = peak("a", None), peak("b", None)
    assert own is not None
    resident = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
    assert 0.5 * resident < own < 10 * resident  # bytes, not kilobytes
    assert second is None
    monkeypatch.setattr(PeakMemory, "_runs", 0)
    assert peak("c", data) is None  # who has the data did something before


def test_reproductions_that_show_the_inside_of_models() -> None:
    for paper in ("autonorm", "spheretnorm", "tapernorm"):
        scales = ("smoke", "small", "paper") if paper == "tapernorm" else ("smoke",)
        for scale in scales:
            plans = find_reproduction(paper, scale).studies.values()
            assert all(plan.recipe.evaluation.diagnostics for plan in plans)
