"""Models this small are faster on one thread; a sharded checkpoint for the tests that fold on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.surgery.checkpoints import make, stored
from tests.tiny import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("llama") / "model", make("llama"))


@pytest.fixture
def llama(_llama: Path, tmp_path: Path) -> Path:
    """A sharded Llama of this test's own."""
    return Path(shutil.copytree(_llama, tmp_path / "model"))
