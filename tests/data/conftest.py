import os
import shutil
import sysconfig
from pathlib import Path

import pytest

# Before datasets is imported: a forgotten hub access then fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("NORMSMITH_CACHE", str(folder))
    return folder


@pytest.fixture
def shared_cache(cache, tmp_path_factory, monkeypatch):
    """One cache for all tests that read it and do not look at its files."""
    monkeypatch.setenv("NORMSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "shared-cache"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Real text, 21 files and 370 thousand characters: the email package."""
    folder = tmp_path_factory.mktemp("corpus") / "email"
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "email", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
