"""Runs whose recipe asks for the accuracy under corruptions: files, numbers, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from normsmith.data import load_data
from normsmith.data.corruptions import CORRUPTIONS, corrupt
from normsmith.errors import ConfigError, InputError
from normsmith.evaluation.robustness import measure_official, measure_robustness
from normsmith.models import NormsmithForImageClassification
from normsmith.studies.library import find_recipe
from normsmith.studies.runner import run_recipe
from normsmith.training import Reporter
from tests.cli.conftest import normsmith

SHORT = ["training.max_steps=6", "evaluation.windows=12"]


def test_a_run_measures_its_own_test_images(tmp_path: Path) -> None:
    recipe = find_recipe("digits-vit", [*SHORT, "evaluation.corruptions=generated"])
    run_recipe(recipe, tmp_path / "run", Reporter(quiet=True))
    model = NormsmithForImageClassification.from_pretrained(tmp_path / "run")
    test = load_data(recipe.data).test.columns
    expected = measure_robustness(model, *(np.asarray(test[key])[:12] for key in ("image", "label")))
    written = json.loads((tmp_path / "run/robustness.json").read_text())
    assert written == {"source": "generated", **expected.to_dict()}
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["corrupted_accuracy"] == pytest.approx(expected.mean)
    assert expected.clean == result["test_metric"]
    by_name, by_severity = json.loads((tmp_path / "run/diagnostics.json").read_text())
    means = {name.replace("_", " "): np.mean(values) for name, values in expected.accuracy.items()}
    assert dict(zip(by_name["x"], by_name["series"]["accuracy"], strict=True)) == pytest.approx(means)
    each = np.mean(list(expected.accuracy.values()), axis=0)
    assert by_severity["series"]["accuracy"] == pytest.approx(list(each))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files laid out like CIFAR-10-C's, of digits."""
    folder = tmp_path_factory.mktemp("digits-c")
    test = load_data(find_recipe("digits-vit", []).data).test.columns
    images, labels = (np.asarray(test[key])[:10] for key in ("image", "label"))
    for name in CORRUPTIONS:
        np.save(folder / f"{name}.npy", np.concatenate([corrupt(images, name, s) for s in (1, 2, 3, 4, 5)]))
    np.save(folder / "labels.npy", np.tile(labels, 5))
    return folder


def test_published_files_instead(published: Path, tmp_path: Path) -> None:
    changes = [SHORT[0], "evaluation.windows=7", f"evaluation.corruptions={published}"]
    run_recipe(find_recipe("digits-vit", changes), tmp_path / "run", Reporter(quiet=True))
    model = NormsmithForImageClassification.from_pretrained(tmp_path / "run")
    found = json.loads((tmp_path / "run/robustness.json").read_text())
    assert found == {"source": str(published), **measure_official(model, published, limit=7).to_dict()}
    assert {round(7 * value, 9) % 1 for values in found["accuracy"].values() for value in values} == {0}
    assert found["clean"] is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("fog.npy", None, r"fog\.npy: cannot be read as a NumPy array"),
        ("fog.npy", np.zeros((50, 9, 9, 3), np.uint8), r"fog\.npy holds images of 9×9 pixels and 3 channel\(s\), "),
        ("fog.npy", np.zeros((0, 8, 8, 1), np.uint8), r"fog\.npy holds uint8 \(0, 8, 8, 1\)"),
        ("labels.npy", np.arange(50) // 45 * 10, r"labels\.npy has the class 10 in row 45, digits only 0 to 9"),
        ("labels.npy", -(np.arange(50) // 49), r"labels\.npy has the class -1 in row 49, digits only 0 to 9"),
    ],
)
def test_what_could_not_be_measured_is_refused_before_training(
    published: Path, tmp_path: Path, file: str, content: np.ndarray | None, message: str
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    for path in published.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / file).unlink()
    if content is not None:
        np.save(folder / file, content)
    recipe = find_recipe("digits-vit", [*SHORT, f"evaluation.corruptions={folder}"])
    with pytest.raises(InputError, match=message):
        run_recipe(recipe, tmp_path / "run", Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_leaves_no_study_behind(tmp_path: Path) -> None:
    options = ("--arms", "layernorm,dyt", "--set", "evaluation.corruptions=generate", "-o", tmp_path / "study")
    done = normsmith("compare", "digits-vit", *options)
    done.refused("evaluation.corruptions=generate: there is no such folder; write generated, or the folder")
    assert not (tmp_path / "study").exists()


def test_only_images_can_be_corrupted() -> None:
    with pytest.raises(ConfigError, match="evaluation.corruptions is for images, the data are of the kind 'table'"):
        find_recipe("diabetes", ["evaluation.corruptions=generated"])
