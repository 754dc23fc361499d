"""Real data: text as packed windows of tokens; images, tagged words, sentences and tables as examples with labels."""

from normsmith.data.config import DataConfig, SourceConfig
from normsmith.data.examples import Examples, TaskData, TrainingExamples, collate
from normsmith.data.facts import Facts
from normsmith.data.kinds import data_config, data_kinds, load_data
from normsmith.data.sample import token_windows
from normsmith.data.sentences import SentencesConfig
from normsmith.data.shared import load_shared
from normsmith.data.tabular import TableConfig
from normsmith.data.tagging import TaggingConfig
from normsmith.data.text import TextData, load_text
from normsmith.data.vision import ImagesConfig
from normsmith.data.windows import Ordered, PackedWindows

__all__ = [
    "DataConfig",
    "Examples",
    "Facts",
    "ImagesConfig",
    "Ordered",
    "PackedWindows",
    "SentencesConfig",
    "SourceConfig",
    "TableConfig",
    "TaggingConfig",
    "TaskData",
    "TextData",
    "TrainingExamples",
    "collate",
    "data_config",
    "data_kinds",
    "load_data",
    "load_shared",
    "load_text",
    "token_windows",
]
