import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from normsmith.data import DataConfig, TextData, load_text
from normsmith.data.cache import cached_folder
from normsmith.data.sources import read_documents, split_documents
from normsmith.data.tokenizer import END_OF_TEXT, encode, train_bpe, wrap
from normsmith.errors import InputError

OPTIONS = {"vocab_size": 512, "validation_fraction": 0.2, "sequence_length": 64}


def config(source: object, **options: object) -> DataConfig:
    return DataConfig(**{"source": str(source), **OPTIONS, **options})


def messages_of(settings: DataConfig) -> tuple[TextData, str]:
    messages: list[str] = []
    data = load_text(settings, messages.append)
    return data, "\n".join(messages)


def digest(data: TextData) -> str:
    return hashlib.sha256(data.train.tobytes() + data.validation.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def bpe(corpus):
    return train_bpe([path.read_text("utf-8") for path in sorted(corpus.glob("*.py"))], 512)


def test_ids_are_the_documents_with_an_end_after_each(corpus, shared_cache):
    data = load_text(config(corpus))
    splits = split_documents(read_documents(config(corpus)), 0.2)
    for ids, split in zip((data.train, data.validation), splits, strict=True):
        assert isinstance(ids, np.memmap)
        assert ids.dtype == np.uint16
        assert not ids.flags.writeable
        assert ids[-1] == data.tokenizer.eos_token_id
        assert data.tokenizer.decode(ids).split(END_OF_TEXT) == [*(document.text for document in split), ""]
    assert data.documents == (len(splits[0]), len(splits[1]))
    assert data.characters == sum(len(document.text) for split in splits for document in split)
    assert data.vocab_size == len(data.tokenizer) == 512
    assert data.source == str(corpus)
    size = sum(len(document.text.encode()) for document in splits[1])
    assert data.bytes_per_token == size / len(data.validation)
    assert 2 < data.bytes_per_token < 5


def test_the_tokenizer_sees_the_train_split_only(corpus, shared_cache, tmp_path):
    documents = read_documents(config(corpus))
    train, validation = split_documents(documents, 0.2)
    expected = train_bpe([document.text for document in train], 512)
    assert load_text(config(corpus)).tokenizer.backend_tokenizer.to_str() == wrap(expected).backend_tokenizer.to_str()
    # Validation text that would win every merge leaves the vocabulary as it is.
    changed = tmp_path / "changed"
    shutil.copytree(corpus, changed)
    (changed / validation[0].name).write_text("zqxj " * 100_000)
    other = load_text(config(changed))
    assert other.tokenizer.get_vocab() == load_text(config(corpus)).tokenizer.get_vocab()
    assert not [token for token in other.tokenizer.get_vocab() if "zqx" in token]


def test_splits_that_a_folder_brings_are_trained_and_tested_on(tmp_path, shared_cache):
    for name, count in {"train": 900, "valid": 300, "test": 200}.items():
        (tmp_path / f"wiki.{name}.raw").write_text("".join(f" word {i} of {name} . \n" for i in range(count)))
    data, said = messages_of(config(tmp_path))
    ends = [data.tokenizer.decode(ids) for ids in (data.train, data.validation, data.test)]
    assert [end.split()[:4] for end in ends] == [["word", "0", "of", name] for name in ("train", "valid", "test")]
    assert "its files are its splits: train 1" in said
    assert data.documents == (1, 1)


def test_the_standard_library_gives_real_text():
    data = load_text(config("stdlib", max_characters=500_000))
    assert data.characters >= 500_000
    assert len(data.train) > 100_000
    assert "import " in data.tokenizer.decode(data.validation[:5000])


@given(st.text())
def test_every_text_survives_the_tokenizer(bpe, text):
    tokenizer = wrap(bpe)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    ids = encode(tokenizer, [text, text])
    half = len(ids) // 2
    assert ids[:half].tolist() == ids[half:].tolist()
    assert ids[half - 1] == tokenizer.eos_token_id


def test_text_that_spells_the_end_mark_stays_text(bpe):
    tokenizer = wrap(bpe)
    text = f"end = '{END_OF_TEXT}'  # not the end ."
    ids = encode(tokenizer, [text])
    assert ids.tolist().count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[:-1]) == text


def test_few_characters_give_a_smaller_vocabulary():
    tokenizer = train_bpe(["ab ab ab"], 4096)
    assert tokenizer.get_vocab_size() == 257 + 2  # ab, space + ab
    assert tokenizer.token_to_id(END_OF_TEXT) == 0


def test_the_tokenizer_can_be_saved_next_to_a_model(corpus, shared_cache, tmp_path):
    data = load_text(config(corpus))
    data.tokenizer.save_pretrained(tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "def f(x):\n    return  x + 1 . Größe"
    assert again.encode(text) == data.tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.eos_token == again.pad_token == again.bos_token == again.unk_token == END_OF_TEXT
    # … and be used for another text instead of training one, with the same ids.
    given_tokenizer, messages = messages_of(config(corpus, tokenizer=str(tmp_path / "model"), vocab_size=1000))
    assert digest(given_tokenizer) == digest(data)
    assert "training" not in messages
    assert load_text(config(corpus, tokenizer=str(tmp_path / "model"))).vocab_size == 512


def test_another_given_tokenizer_has_its_own_cache_entry(corpus, bpe, tmp_path):
    wrap(bpe).save_pretrained(tmp_path / "small")
    high = json.loads(bpe.to_str())  # the same tokens under ids that 16 bits cannot hold
    high["model"]["vocab"] = {token: i + 70_000 for token, i in high["model"]["vocab"].items()}
    high["added_tokens"][0]["id"] += 70_000
    wrap(Tokenizer.from_str(json.dumps(high))).save_pretrained(tmp_path / "high")
    small, large = (load_text(config(corpus, tokenizer=str(tmp_path / name))) for name in ("small", "high"))
    assert (small.train.dtype, large.train.dtype) == (np.uint16, np.uint32)
    assert (small.vocab_size, large.vocab_size) == (512, 70_512)
    assert np.array_equal(small.train + np.uint32(70_000), large.train)


@pytest.mark.parametrize("content", [None, {}, {"tokenizer.json": "{"}])
def test_a_folder_without_a_tokenizer_is_refused(corpus, tmp_path, content):
    folder = tmp_path / "tokenizer"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(InputError, match=f"^tokenizer {folder}: ") as caught:
        load_text(config(corpus, tokenizer=str(folder)))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_is_refused(corpus, bpe, tmp_path):
    tokenizer = wrap(bpe)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(InputError, match="has no eos_token"):
        load_text(config(corpus, tokenizer=str(tmp_path / "endless")))


def test_the_second_run_reads_the_cache(corpus, cache):
    first, messages = messages_of(config(corpus))
    assert "training a byte-level BPE" in messages
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    second, messages = messages_of(config(corpus, sequence_length=32))  # windows are cut later
    assert "training" not in messages
    assert "using the cached folder" in messages
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written
    assert digest(second) == digest(first)
    assert second.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("change", [{"vocab_size": 400}, {"validation_fraction": 0.4}, {"max_documents": 15}])
def test_what_matters_has_its_own_cache_entry(corpus, shared_cache, change):
    before = load_text(config(corpus))
    after, messages = messages_of(config(corpus, **change))
    assert "training" in messages
    assert digest(after) != digest(before)


def test_a_changed_document_changes_hash_and_ids(corpus, shared_cache, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(corpus, folder)
    before = load_text(config(folder))
    assert load_text(config(corpus)).data_hash == before.data_hash
    (folder / "charset.py").write_text("changed = True\n")
    after, messages = messages_of(config(folder))
    assert "training" in messages
    assert after.data_hash != before.data_hash


def test_damaged_ids_are_built_again(corpus, cache):
    before = digest(load_text(config(corpus)))
    (ids,) = cache.rglob("train.npy")
    data = bytearray(ids.read_bytes())
    data[len(data) // 2] ^= 1
    ids.write_bytes(data)
    after, messages = messages_of(config(corpus))
    assert "is damaged, building it again" in messages
    assert digest(after) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "file").write_text("dat"),
        lambda entry: (entry / "file").unlink(),
        lambda entry: (entry / "checksums.json").unlink(),
        lambda entry: (entry / "checksums.json").write_text("[1]"),
        lambda entry: (entry / "checksums.json").write_bytes(b"\xff"),
    ],
)
def test_a_damaged_entry_is_built_again(cache, damage):
    def build(folder: Path) -> None:
        (folder / "file").write_text("data")

    messages: list[str] = []
    entry = cached_folder("kind", {"a": 1}, build, messages.append)
    damage(entry)
    assert cached_folder("kind", {"a": 1}, build, messages.append) == entry
    assert (entry / "file").read_text() == "data"
    cached_folder("kind", {"a": 1}, build, messages.append)
    assert [message.split(" ")[0] for message in messages] == ["the", "using"]
    assert list((cache / "kind").iterdir()) == [entry]


def test_an_interrupted_build_leaves_nothing(cache):
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("kind", {"a": 1}, interrupted, print)
    assert list((cache / "kind").iterdir()) == []
    entry = cached_folder("kind", {"a": 1}, lambda folder: (folder / "whole").write_text("whole"), print)
    assert sorted(path.name for path in entry.iterdir()) == ["checksums.json", "whole"]


def test_a_killed_build_is_no_entry_and_importing_is_light(cache):
    code = (
        "import os, signal, sys\nfrom normsmith.data.cache import cached_folder\n"
        "print({'datasets', 'transformers', 'tokenizers'} & set(sys.modules), flush=True)\n"
        "def build(folder):\n    (folder / 'half').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached_folder('kind', {'a': 1}, build, print)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "set()\n")
    assert list((cache / "kind").rglob("half"))
    entry = cached_folder("kind", {"a": 1}, lambda folder: (folder / "whole").write_text("whole"), print)
    assert not (entry / "half").exists()


def test_who_builds_second_uses_the_entry_of_the_first():
    def slow(folder: Path) -> None:
        first = cached_folder("kind", {"a": 1}, lambda other: (other / "x").write_text("first"), print)
        assert (first / "x").exists()
        (folder / "x").write_text("second")

    assert (cached_folder("kind", {"a": 1}, slow, print) / "x").read_text() == "first"


def test_processes_at_the_same_time_make_the_same_entry(corpus, cache, monkeypatch):
    code = (
        "import hashlib, sys\nfrom normsmith.data import *\n"
        f"d = load_text(DataConfig(source=sys.argv[1], **{OPTIONS}))\n"
        "print(hashlib.sha256(d.train.tobytes() + d.validation.tobytes()).hexdigest())"
    )
    # Hash seeds and thread counts differ: neither may reach the merges.
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(corpus)],
            env={**os.environ, "PYTHONHASHSEED": str(i), "RAYON_NUM_THREADS": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in (1, 2)
    ]
    printed = {run.communicate()[0].strip() for run in runs}
    data, messages = messages_of(config(corpus))
    assert printed == {digest(data)}
    assert "using the cached folder" in messages
    assert len(list((cache / "text").iterdir())) == 1
    monkeypatch.setenv("NORMSMITH_CACHE", str(cache / "other"))
    assert digest(load_text(config(corpus))) == digest(data)


def test_a_cache_that_cannot_be_written_is_refused(corpus, cache):
    cache.write_text("a file where a folder is needed")
    with pytest.raises(InputError, match=r"the cache cannot be written .*; set NORMSMITH_CACHE to another folder"):
        load_text(config(corpus))


def test_a_split_shorter_than_a_window_is_refused(corpus, shared_cache):
    data = load_text(config(corpus))
    short, long = sorted([len(data.train), len(data.validation)])
    assert short == len(data.validation)
    load_text(config(corpus, sequence_length=short))
    one_more = (
        rf"the validation split has {short} tokens, one window needs {short + 1}: lower sequence_length or raise val"
    )
    with pytest.raises(InputError, match=one_more):
        load_text(config(corpus, sequence_length=short + 1))
    with pytest.raises(
        InputError, match=f"the train split has {long} tokens, .*: lower sequence_length, or give more text"
    ):
        load_text(config(corpus, sequence_length=long + 1))


def test_a_test_split_leaves_the_others_as_they_are_where_it_is_not_asked_for(corpus, cache):
    before = load_text(config(corpus))
    entries = {path.name for path in (cache / "text").iterdir()}
    assert before.test is None
    assert load_text(config(corpus, test_fraction=0.0)).test is None
    assert {path.name for path in (cache / "text").iterdir()} == entries
    after = load_text(config(corpus, test_fraction=0.2))
    assert len(list((cache / "text").iterdir())) == len(entries) + 1
    assert after.data_hash == before.data_hash
    texts = [after.tokenizer.decode(ids).split(END_OF_TEXT)[:-1] for ids in (after.train, after.validation, after.test)]
    assert texts[1] == before.tokenizer.decode(before.validation).split(END_OF_TEXT)[:-1]  # the same documents
    everything = [document.text for document in read_documents(config(corpus))]
    assert sorted(text for split in texts for text in split) == sorted(everything)
    assert all(texts)
    train, _ = split_documents(read_documents(config(corpus)), 0.2)
    again, test = split_documents(train, 0.4)
    assert (texts[0], texts[2]) == ([d.text for d in again], [d.text for d in test])


def test_three_splits_need_three_documents(tmp_path, shared_cache):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 2000)
    load_text(config(tmp_path))
    with pytest.raises(InputError, match="only one document, but training, validation and test need one each"):
        load_text(config(tmp_path, test_fraction=0.1))
    long = len(load_text(config(tmp_path)).train)
    (tmp_path / "c.txt").write_text("c")
    with pytest.raises(InputError, match="split has .* tokens, one window needs .*: lower sequence_length"):
        load_text(config(tmp_path, test_fraction=0.1, sequence_length=long))
