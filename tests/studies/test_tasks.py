"""Runs of tasks with labels: results, resuming, options, arms, robustness, and wrong recipes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageClassification

from normsmith.data import Facts, TaskData, load_data
from normsmith.errors import ConfigError, DivergedError, InputError
from normsmith.evaluation import ACCURACY, RMSE, predict, score
from normsmith.evaluation.robustness import draw_robustness, measure_robustness
from normsmith.models import NormsmithForImageClassification
from normsmith.studies import Recipe
from normsmith.studies.arms import check_arms
from normsmith.studies.library import find_recipe
from normsmith.studies.runner import Run, build_model, build_scheduled, run_recipe, share_start_
from normsmith.studies.tasks import facts_of, known_facts
from normsmith.training import Reporter, WeightAverage, decayed_names
from tests.cli.conftest import normsmith

NAMES = ["digits-vit", "code-tagging", "code-lines", "diabetes"]
SHORT = ["training.max_steps=6", "evaluation.windows=40", "training.save_every=3", "training.log_every=1"]
SMALL = ["data.max_sentences=60"]


def short(name: str, *changes: str) -> Recipe:
    return find_recipe(name, [*SHORT, *(SMALL if name.startswith("code") else []), *changes])


def run(recipe: Recipe, folder: Path, **options: Any) -> Run:
    return run_recipe(recipe, folder, Reporter(quiet=True), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["norm.kind=dyt", "connection.kind=sphere"])
def test_a_run_leaves_its_scores_and_a_model(name: str, change: str, tmp_path: Path) -> None:
    recipe = short(name, change)
    done = run(recipe, tmp_path / "run")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert {"validation_loss", "test_loss", "validation_metric", "test_metric", "metric", "better"} <= result.keys()
    assert (result["metric"], result["better"]) == (("rmse", "lower") if name == "diabetes" else ("accuracy", "higher"))
    assert result["validation_metric"] == done.validation_metric
    assert isinstance(done.data, TaskData)
    again = type(done.model).from_pretrained(tmp_path / "run")
    metric = RMSE if name == "diabetes" else ACCURACY
    whole = score(again, done.validation, metric, 7)
    assert whole.loss == pytest.approx(done.validation_loss, rel=1e-4)
    assert whole.metric == pytest.approx(done.validation_metric, rel=1e-4)
    facts = json.loads((tmp_path / "run/environment.json").read_text())
    assert facts["data_sha256"] == done.data.data_hash
    assert (tmp_path / "run/tokenizer.json").exists() == name.startswith("code")


def test_images_that_the_patch_does_not_divide_begin_no_study(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).integers(0, 256, (60, 10, 10, 1), np.uint8), np.arange(60) % 10
    for split in ("train", "validation", "test"):
        np.savez(tmp_path / f"{split}.npz", x=images, y=labels)
    options = ("--set", f"data.source={tmp_path}", "--set", "model.patch_size=4", "-o", tmp_path / "study")
    done = normsmith("compare", "digits-vit", "--arms", "layernorm,dyt", *options)
    assert done.code == 2
    assert "patch_size" in done.err.splitlines()[-1]
    assert not (tmp_path / "study").exists()


def test_digits_are_learned(tmp_path: Path) -> None:
    changes = ["training.max_steps=80", "training.weight_average=0.9", "training.label_smoothing=0.1"]
    done = run(find_recipe("digits-vit", changes), tmp_path / "run")
    assert done.validation_metric is not None
    assert done.validation_metric > 0.7
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    assert isinstance(done.data, TaskData)
    images, labels = (np.asarray(done.data.test.columns[key])[:100] for key in ("image", "label"))
    result = measure_robustness(model, images, labels, ["brightness", "gaussian_noise"])
    assert result.clean is not None
    assert result.clean > 0.7
    assert result.mean == pytest.approx(np.mean([*result.accuracy["brightness"], *result.accuracy["gaussian_noise"]]))
    assert f"Mean accuracy over all: {100 * result.mean:.1f} %" in result.markdown()
    assert result.markdown().count("\n") == 5
    picture = draw_robustness({"a": result, "b": result}, tmp_path / "robustness.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match=r"a and b were measured on different corruptions \(gaussian_noise"):
        draw_robustness({"a": result, "b": measure_robustness(model, images, labels, ["brightness"])}, picture)


def test_a_continued_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    recipe = short("digits-vit", "training.weight_average=0.9", "data.mixup=0.4", "data.flip=true")
    whole = run(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "cut" / name).unlink()
    # What an interruption leaves between transformers' last file and ours; the checkpoint before it is whole.
    (tmp_path / "cut/checkpoints/checkpoint-6/weight_average.pt").unlink()
    described = tmp_path / "cut/environment.json"
    described.write_text(json.dumps({**(before := json.loads(described.read_text())), "torch": "2.9.0"}))
    cut = run(recipe, tmp_path / "cut", resume=True)
    assert cut.validation_loss == whole.validation_loss
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "cut/result.json").read_text())["resumed"]
    assert json.loads(described.read_text()) == {**before, "torch": f"2.9.0, then {before['torch']}"}


def test_the_average_of_the_weights_against_its_formula() -> None:
    model = torch.nn.Linear(3, 2)
    state = type("State", (), {"global_step": 0})()
    average = WeightAverage(model, 0.5)
    average.on_train_begin(None, state, None)  # pyright: ignore[reportArgumentType]
    expected = model.weight.detach().double().clone()
    for step in range(1, 12):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        state.global_step = step
        average.on_step_end(None, state, None)  # pyright: ignore[reportArgumentType]
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    average.apply_()
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    arguments = type("Arguments", (), {"output_dir": "nowhere"})()
    with pytest.raises(InputError, match=r"weight_average.pt: is missing"):
        average.on_train_begin(arguments, state, None)  # pyright: ignore[reportArgumentType]


def test_the_average_of_half_precision_moves() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    state = type("State", (), {"global_step": 0})()
    average: Any = WeightAverage(model, 0.999)
    torch.nn.init.ones_(model.weight)
    average.on_train_begin(None, state, None)
    torch.nn.init.constant_(model.weight, 2.0)
    state.global_step = 10_000
    for _ in range(2000):
        average.on_step_end(None, state, None)
    average.apply_()
    assert model.weight.item() == pytest.approx(2 - 0.999**2000, abs=0.01)
    assert model.weight.dtype == torch.bfloat16


def test_the_average_of_unit_weights_has_unit_weights(tmp_path: Path) -> None:
    recipe = short("digits-vit", "training.weight_average=0.9", "connection=ngpt", "training.weight_decay=0")
    model: Any = run(recipe, tmp_path / "out").model
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.normalize_weights_()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_predictions_do_not_depend_on_the_batch(name: str) -> None:
    recipe = short(name, "connection.kind=sphere")
    data = load_data(recipe.data)
    assert isinstance(data, TaskData)
    model = build_model(recipe, facts_of(data)).eval()
    one, many = (predict(model, torch.utils.data.Subset(data.test, range(6)), size) for size in (1, 5))
    assert one[0] == pytest.approx(many[0], rel=1e-4)
    torch.testing.assert_close(one[2], many[2], rtol=1e-3, atol=1e-4)
    if name != "diabetes":
        assert one[0] == pytest.approx(float(F.cross_entropy(one[2], one[1])), rel=1e-4)
        accuracy = float((one[2].argmax(-1) == one[1]).double().mean())
        assert score(model, torch.utils.data.Subset(data.test, range(6)), ACCURACY).metric == accuracy
    else:
        rmse = float((one[2] - one[1]).square().mean().sqrt())
        assert score(model, torch.utils.data.Subset(data.test, range(6)), RMSE).metric == pytest.approx(rmse)


def test_arms_share_their_initial_weights_also_in_patches_and_tokens() -> None:
    for name in ("digits-vit", "diabetes"):
        base = short(name)
        sphere = base.changed(connection={"kind": "sphere"})
        first = build_model(base, known_facts(base))
        torch.manual_seed(5)
        other = build_model(sphere.changed(seed=9), known_facts(base))
        own = {n: p.detach().clone() for n, p in other.named_parameters()}
        assert share_start_(other, first)
        shared = [n for n, p in other.named_parameters() if n in dict(first.named_parameters()) and p.ndim >= 2]
        assert len(shared) > 8
        for n in shared:
            assert torch.equal(other.get_parameter(n), first.get_parameter(n))
            assert not torch.equal(own[n], first.get_parameter(n))
        assert torch.equal(other.class_token.value, first.class_token.value)  # pyright: ignore[reportAttributeAccessIssue]
        assert not any("class_token" in n or "bias" in n for n in decayed_names(first) if n != "tokens.biases")


def test_arms_of_tasks_are_checked_like_others() -> None:
    base = short("digits-vit")
    assert len(check_arms(base, ["layernorm", "dyt", "sphere:p=1", "taper:warmup=0.3"])) == 4
    with pytest.raises(InputError, match="are the same model and training"):
        check_arms(base, ["base", "layernorm"])
    with pytest.raises(InputError, match="data.flip is shared by all arms"):
        check_arms(base, ["base", "set:data.flip=true"])


def test_a_taper_of_an_image_classifier(tmp_path: Path) -> None:
    recipe = short("digits-vit", "schedule.kind=taper", "schedule.warmup=0.3", "norm.kind=rmsnorm")
    done = run(recipe, tmp_path / "run")
    assert done.controller is not None
    assert done.controller.progress()["gate"] == 0


def test_gates_that_nothing_freezes_are_watched(tmp_path: Path) -> None:
    changes = ["norm.kind=autonorm", "norm.tau_end=0.5", "evaluation.diagnostics=true", "training.evaluate_every=3"]
    done = run(short("digits-vit", *changes), tmp_path / "run")
    logged = [entry for entry in done.history if "loss" in entry]
    assert len({entry["gate_entropy"] for entry in logged}) == 6
    assert all(0 < entry["gate_entropy"] <= math.log(2) for entry in logged)
    assert [entry["gate_frozen"] for entry in logged] == [0] * 6
    assert logged[-1]["gate_tau"] == pytest.approx(0.5)
    assert all(0 < entry["gate_tau"] < 1 for entry in logged)
    assert any(name.startswith("site_entropy/") for name in done.history[-1])
    panels = [panel["title"] for panel in json.loads((tmp_path / "run/diagnostics.json").read_text())]
    assert "Gate weights by site" in panels
    assert all(p.requires_grad for p in done.model.parameters())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            ["model.patch_size=3"],
            InputError,
            "patch_size=3 does not divide images of 8×8 pixels; write one of 1, 2, 4, 8",
        ),
        (["data.source=nowhere/else/x"], InputError, "nowhere/else/x"),
        (["data.kind=image"], InputError, "unknown data kind 'image'; did you mean 'images'"),
        (["data.vocab_size=300"], ConfigError, "ImagesConfig: unknown key 'vocab_size'"),
        (["data.mix_probability=2"], ConfigError, "mix_probability = 2"),
        (["training.learning_rate=1e9"], DivergedError, "not finite"),
    ],
)
def test_wrong_recipes(changes: list[str], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        run(short("digits-vit", *changes), tmp_path / "run")
    assert error is DivergedError or not (tmp_path / "run").exists()


def test_options_of_another_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="label_smoothing is for images and sentences, the data are of the kind 'table'"
    ):
        short("diabetes", "training.label_smoothing=0.1")
    with pytest.raises(InputError, match="data.kind is 'table', but this needs a language model"):
        _ = short("diabetes").text
    with pytest.raises(InputError, match="needs more than a vocabulary"):
        build_model(short("diabetes"), 300)
    model, _ = build_scheduled(short("digits-vit"), Facts(labels=("a", "b"), image_size=(4, 6), channels=3))
    assert isinstance(model, NormsmithForImageClassification)
    assert model.config.id2label == {0: "a", 1: "b"}
