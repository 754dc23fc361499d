"""From a text source to memory-mapped token ids."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from normsmith.data import sources
from normsmith.data.cache import cached_folder
from normsmith.data.config import DataConfig
from normsmith.data.tokenizer import encode, load_tokenizer, table_size, train_bpe, wrap
from normsmith.data.windows import count_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # raise it when the same documents would give other token ids


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """Tokenised text. Each split is its documents in order, an end-of-text id after each, as a read-only memory map.

    Attributes:
        train: ids `(n,)`, `uint16` or `uint32`.
        validation: ids `(m,)` of the same type.
        tokenizer: what made the ids; `save_pretrained` puts it next to a model.
        data_hash: SHA-256 over the names and contents of all documents.
        documents: how many are in train and in validation.
        characters: of both splits together.
        source: as in the configuration.
        vocab_size: rows an embedding needs; below the configured one where the text has too few pairs to merge.
        test: ids of a third split of the same type, where the configuration asks for one.
        bytes_per_token: UTF-8 bytes of the validation text per validation token, the end-of-text ids counted. A mean
            loss L in nats per token is L / (ln 2 · bytes_per_token) bits per byte, comparable between tokenizers.
    """

    train: npt.NDArray[np.unsignedinteger]
    validation: npt.NDArray[np.unsignedinteger]
    tokenizer: PreTrainedTokenizerFast
    data_hash: str
    documents: tuple[int, int]
    characters: int
    source: str
    vocab_size: int
    bytes_per_token: float
    test: npt.NDArray[np.unsignedinteger] | None = None


def load_text(config: DataConfig, progress: Callable[[str], None] | None = None) -> TextData:
    """Read, split and tokenise the text of `config`; token ids and tokenizer come from the cache where it has them.

    Args:
        config: what to read; `sequence_length` is only checked, each split must hold one window.
        progress: called with one line before each step that takes time.

    Raises:
        InputError: the source, the tokenizer or the cache cannot be used, or a split is shorter than one window.
    """
    say = progress or _silent
    say(f"reading {config.source}")
    documents = sources.read_documents(config)
    splits = sources.split_for(documents, config)
    own = bool(documents[0].split)
    if own:
        sizes = (f"{name} {_characters(split):,} characters" for name, split in splits.items())
        say(f"its files are its splits: {', '.join(sizes)}")
    data_hash = sources.hash_documents(documents)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None

    def build(folder: Path) -> None:
        made = tokenizer or _train(splits["train"], config.vocab_size, folder, say)
        for name, split in splits.items():
            say(f"tokenising {name}: {len(split)} documents, {_characters(split):,} characters")
            np.save(folder / f"{name}.npy", encode(made, (document.text for document in split)))

    folder = cached_folder("text", _key(config, data_hash, tokenizer, own), build, say)
    tokenizer = tokenizer or _saved(folder)
    ids_of = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in splits}
    for name, ids in ids_of.items():
        count_windows(ids, config.sequence_length, f"{name} split")
    return TextData(
        train=ids_of["train"],
        validation=ids_of["validation"],
        test=ids_of.get("test"),
        tokenizer=tokenizer,
        data_hash=data_hash,
        documents=(len(splits["train"]), len(splits["validation"])),
        characters=_characters(documents),
        source=config.source,
        vocab_size=table_size(tokenizer),
        bytes_per_token=sum(len(document.text.encode()) for document in splits["validation"])
        / len(ids_of["validation"]),
    )


def _silent(_: str) -> None: ...


def _key(config: DataConfig, data_hash: str, tokenizer: PreTrainedTokenizerFast | None, own: bool) -> dict[str, object]:
    import tokenizers

    if tokenizer is None:
        made: object = config.vocab_size
    else:
        made = [hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(), tokenizer.eos_token_id]
    return {
        "format": FORMAT,
        "data": data_hash,
        "validation_fraction": config.validation_fraction,
        **({"test_fraction": config.test_fraction} if config.test_fraction else {}),
        **({"own_splits": True} if own else {}),
        "tokenizer": made,
        "tokenizers": tokenizers.__version__,
    }


def _train(
    split: list[sources.Document], vocab_size: int, folder: Path, say: Callable[[str], None]
) -> PreTrainedTokenizerFast:
    say(f"training a byte-level BPE of {vocab_size} tokens on {_characters(split):,} characters")
    bpe = train_bpe((document.text for document in split), vocab_size)
    bpe.save(str(folder / "tokenizer.json"))
    return wrap(bpe)


def _saved(folder: Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    return wrap(Tokenizer.from_file(str(folder / "tokenizer.json")))


def _characters(documents: list[sources.Document]) -> int:
    return sum(len(document.text) for document in documents)
