"""Real text as token ids: documents → train and validation splits → byte-level BPE → packed windows."""

from normsmith.data.config import DataConfig
from normsmith.data.sample import token_windows
from normsmith.data.text import TextData, load_text
from normsmith.data.windows import PackedWindows

__all__ = ["DataConfig", "PackedWindows", "TextData", "load_text", "token_windows"]
