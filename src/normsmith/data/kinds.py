"""The kinds of data a recipe can name, and the way from its configuration to the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from normsmith.config import Config
from normsmith.data.config import DataConfig, SourceConfig
from normsmith.data.examples import TaskData
from normsmith.data.sentences import SentencesConfig, load_sentences
from normsmith.data.tabular import TableConfig, load_table
from normsmith.data.tagging import TaggingConfig, load_tagging
from normsmith.data.text import TextData, load_text
from normsmith.data.vision import ImagesConfig, load_images
from normsmith.errors import ConfigError
from normsmith.registry import Registry

data_kinds: Registry[type[SourceConfig]] = Registry("data kind")
for _name, _config in {
    "text": DataConfig,
    "images": ImagesConfig,
    "tagging": TaggingConfig,
    "sentences": SentencesConfig,
    "table": TableConfig,
}.items():
    data_kinds.register(_name)(_config)


def data_config(spec: dict[str, Any] | Config) -> SourceConfig:
    """The validated configuration of a mapping; without a `kind` it is text."""
    if not isinstance(spec, dict | Config):
        raise ConfigError(f"data: {spec!r} is no mapping; write for example data: {{source: my/texts}}")
    return cast("SourceConfig", data_kinds.config({"kind": "text", **spec} if isinstance(spec, dict) else spec))


def load_data(config: SourceConfig, progress: Callable[[str], None] | None = None) -> TextData | TaskData:
    """Read the data that a configuration describes; `progress` gets one line before each step that takes time.

    Raises:
        InputError: what the loader of that kind refuses.
    """
    if isinstance(config, DataConfig):
        return load_text(config, progress)
    if progress is not None:
        progress(f"reading {config.source}")
    loaders: dict[type[SourceConfig], Callable[[Any], TaskData]] = {
        ImagesConfig: load_images,
        TaggingConfig: load_tagging,
        SentencesConfig: load_sentences,
        TableConfig: load_table,
    }
    data = loaders[type(config)](config)
    if progress is not None:
        progress("; ".join(data.notes))
    return data
