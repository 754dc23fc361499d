"""Byte-level BPE trained on the text itself, or a saved tokenizer of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from normsmith.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
HUB = "hub:"
_BATCH = 256  # documents encoded at once: enough for every core, and few enough to keep their token lists small


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with at most `vocab_size` tokens: the end-of-text token (id 0), 256 bytes, merges.

    Every text encodes without unknown tokens and decodes to itself; the same texts give the same tokenizer. A short
    text runs out of pairs to merge and gives fewer tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The transformers form of a tokenizer of `train_bpe`; begin, end, padding, unknown are its end-of-text token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # cleaning would break "a ." → "a ." on the way back
    )


def load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer saved in `folder`, or that of the Hub for `hub:NAME`.

    `InputError` where there is none or it has no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    hub, path = folder.removeprefix(HUB), Path(folder).expanduser()
    if hub == folder and not path.is_dir():
        raise InputError(
            f"tokenizer {folder}: no such folder; give one written by tokenizer.save_pretrained, or {HUB}NAME"
        )
    try:
        if hub != folder:
            tokenizer = AutoTokenizer.from_pretrained(hub)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many types for a folder that it cannot read
        reason = " ".join(str(error).split())
        raise InputError(f"tokenizer {folder}: transformers cannot load a tokenizer from it ({reason})") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(
            f"tokenizer {folder}: {type(tokenizer).__name__} is no fast tokenizer, it has no tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {folder}: has no eos_token, which must separate the documents")
    return tokenizer


def table_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows an embedding needs for this tokenizer: its highest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> npt.NDArray[np.unsignedinteger]:
    """Token ids of all texts, one end-of-text id after each: `uint16` where every id fits, else `uint32`."""
    from tokenizers import Tokenizer

    # A copy: the caller's tokenizer keeps its truncation, and text that spells a special token stays text.
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    dtype = np.uint16 if table_size(tokenizer) < 65536 else np.uint32
    end = np.array([tokenizer.eos_token_id], dtype)
    parts: list[npt.NDArray[np.unsignedinteger]] = []
    for batch in _batches(texts):
        for encoding in plain.encode_batch_fast(batch, add_special_tokens=False):
            parts += [np.array(encoding.ids, dtype), end]
    return np.concatenate(parts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
