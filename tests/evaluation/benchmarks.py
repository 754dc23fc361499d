"""Small benchmarks in the formats that are published, and a model with a tokenizer to answer them."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

import torch

from normsmith.data.tokenizer import train_bpe, wrap
from tests.tiny import tiny

TEXT = (
    "The man turned on the faucet, therefore water flowed from the spout. Question: which part of the plant makes "
    "food? Answer: the leaf. Sarah was a better surgeon than Maria, so she got the harder cases. "
)
CHOICES = [
    {"query": "Question: which part of the plant makes food?\n", "choices": ["the root", "the green leaf"], "gold": 1},
    {"query": "Question: what flowed?", "choices": ["water", "the man", "food from the spout"], "gold": 0},
    {"query": "Question: who was better?", "choices": ["Maria the surgeon", "Sarah"], "gold": 1},
    {"query": "Question: what turned?", "choices": ["the faucet", "a hard case, or two", "Sarah"], "gold": 0},
    {"query": "Question: which is food?", "choices": ["leaf", "the spout of the faucet"], "gold": 1},
    {"query": "Question: what makes the plant?", "choices": ["water and food", "Maria"], "gold": 0},
]
CONTEXTS = [
    {"context_options": ["Sarah was better than Maria so Sarah", "Sarah was better than Maria so Maria"],
     "continuation": "got the harder cases.", "gold": 0},
    {"context_options": ["The plant was at the faucet so the plant", "The plant was at the faucet so the faucet"],
     "continuation": "was turned on.", "gold": 1},
    {"context_options": ["The man saw a leaf and the man", "The man saw a leaf and the leaf"],
     "continuation": "makes food.", "gold": 1},
]  # fmt: skip
LAST_WORDS = [
    {"context": "The man turned on the", "continuation": "faucet"},
    {"context": "Sarah was a better surgeon than", "continuation": "Maria"},
    {"context": "water flowed from the", "continuation": "spout"},
]
PAGES = """
 = The Plant =

 The plant makes food . It has 2 @.@ 5 leaves .

 = = Water = =

 Water flowed from the spout , and the man turned on the faucet . Sarah got the harder cases .
 = Surgeons =

 Maria was a surgeon .
"""


def tokenizer(vocab_size: int = 300) -> Any:
    """A byte-level BPE on the text above, its ids below `vocab_size`."""
    return wrap(train_bpe([TEXT * 3], vocab_size))


def model(**changes: Any) -> Any:
    """A scrambled Llama that has an opinion on every item."""
    torch.manual_seed(0)
    made = tiny("llama", vocab_size=300, max_position_embeddings=96, bos_token_id=0, eos_token_id=0, **changes)
    made.config._attn_implementation = "sdpa"
    return made


def jsonl(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def fill(folder: Path) -> Path:
    """Every format once; HellaSwag and the rest in folders of their own, as they are downloaded."""
    (folder / "json").mkdir(parents=True)
    (folder / "text").mkdir()
    jsonl(folder / "json/piqa.jsonl", CHOICES)
    jsonl(folder / "json/openbook_qa.jsonl", [item | {"query": item["query"].strip()} for item in CHOICES])
    jsonl(folder / "json/winogrande.jsonl", CONTEXTS)
    jsonl(folder / "json/lambada_openai.jsonl", LAST_WORDS)
    six = [line for item in CHOICES[:2] for line in (item["query"].strip(), str(item["gold"]), *_four(item["choices"]))]
    (folder / "text/hellaswag_val_full.txt.bz2").write_bytes(bz2.compress("\n".join([*six, ""]).encode()))
    (folder / "text/wiki.test.raw").write_text(PAGES, encoding="utf-8")
    return folder


def _four(choices: list[str]) -> list[str]:
    return (choices * 4)[:4]
