"""The small study, trained once for all tests that read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from normsmith.data import TextData, load_text
from normsmith.studies import Recipe
from normsmith.studies.study import make_study
from tests.cli.conftest import corpus
from tests.studies.small import BASE, plan_of, run


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(corpus())
    return Recipe(**{**BASE, "data": {**BASE["data"], "source": str(path)}})


@pytest.fixture(scope="session")
def data(base: Recipe, tmp_path_factory: pytest.TempPathFactory) -> TextData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_text(base.data)


@pytest.fixture(scope="session")
def finished(base: Recipe, data: TextData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms and three seeds, done; copy it before changing anything."""
    study = make_study(tmp_path_factory.mktemp("studies") / "done", plan_of(base, data))
    run(study, data)
    return study.folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "study"))
