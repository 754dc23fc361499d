"""A text as token windows of a given tokenizer, for looking at a model rather than training one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normsmith.data.config import DataConfig
from normsmith.data.sources import read_documents
from normsmith.errors import InputError

_CHARACTERS = 8  # read per token wanted: more than any tokenizer takes for ordinary text


def token_windows(source: str, tokenizer: Any, length: int, limit: int = 8192, batch: int = 4) -> list[Tensor]:
    """The first `limit` tokens of a text source, in windows of `length`: int64 tensors (batch, length).

    Args:
        source: a text file, a folder, `stdlib` or a Hub data set, as in `DataConfig`.
        tokenizer: of the model that shall read them.
        length: tokens per window; fewer if the text is shorter.
        limit: tokens used.
        batch: windows per tensor.

    Raises:
        InputError: the source cannot be read, or has fewer than two tokens.
    """
    documents = read_documents(DataConfig(source=source, max_characters=_CHARACTERS * limit))
    # Of a source with its own splits the training text, which a model may be fitted to, where there is any.
    documents = [d for d in documents if d.split == "train"] or documents
    text = "\n\n".join(d.text for d in documents)
    ids = tokenizer(text[: _CHARACTERS * limit], add_special_tokens=False, verbose=False)["input_ids"][:limit]
    length = min(length, len(ids))
    if length < 2:
        raise InputError(f"{source}: has {len(ids)} token(s), an audit needs at least two")
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return list(rows.split(batch))
