import argparse
import json
import os
import re
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normsmith.data import DataConfig
from normsmith.data.sources import (
    Document,
    hash_documents,
    python_library,
    read_documents,
    split_documents,
    split_for,
)
from normsmith.errors import ConfigError, InputError


def read(source: object, **options: object) -> list[Document]:
    return read_documents(DataConfig(source=str(source), **options))


def refused(source: object, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        read(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_standard_library_is_library_code_in_a_fixed_order():
    documents = read("stdlib")
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} < set(names)
    assert not [
        name for name in names if re.search(r"(^|/)(tests?|site-packages|idlelib|encodings)/|_sysconfigdata", name)
    ]
    assert {d.name: d.text for d in documents}["argparse.py"] == Path(argparse.__file__).read_text("utf-8")
    assert 5e6 < sum(len(document.text) for document in documents) < 12e6


def test_an_interpreter_without_sources_is_refused(tmp_path):
    with pytest.raises(InputError, match="ships no sources of its standard library"):
        python_library(tmp_path)


def test_a_folder_gives_sorted_files_and_json_lines(tmp_path):
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "b" / ".hidden" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "z.md").write_text("# z\r\n")
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    (tmp_path / "c.TXT").write_text("\ufeffx<|endoftext|>y<|endoftext|>\n", encoding="utf-8")
    (tmp_path / "d.py").write_bytes(b"# -*- coding: latin-1 -*-\ns = '\xe9'\n")
    (tmp_path / "e.py").write_text("end = '<|endoftext|>'\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\0")
    assert [(d.name, d.text) for d in read(tmp_path, text_column="body")] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("b/z.md", "# z\n"),
        ("c.TXT#0", "x"),
        ("c.TXT#1", "y"),
        ("d.py", "# -*- coding: latin-1 -*-\ns = 'é'\n"),
        ("e.py", "end = '<|endoftext|>'\n"),
    ]


def test_a_text_file_is_split_at_marks(tmp_path):
    file = tmp_path / "stories.txt"
    file.write_text("Once.\n<|endoftext|>\nTwice.\n\nStill twice.\n<|endoftext|>")
    assert [document.text for document in read(file)] == ["Once.", "Twice.\n\nStill twice."]


# Blank lines often, seldom and never, and lines longer than a piece.
@given(st.lists(st.tuples(st.integers(0, 9000), st.sampled_from(["\n", "\n\n", "\n \n\n", " "])), max_size=30))
def test_pieces_of_a_file_are_the_file(tmp_path_factory, lengths):
    text = "x" + "".join("y" * length + separator for length, separator in lengths)
    file = tmp_path_factory.mktemp("pieces") / "text.txt"
    file.write_text(text)
    pieces = [document.text for document in read(file)]
    assert text.removeprefix("".join(pieces)).strip() == ""  # a last piece without text is left out
    assert all(2048 <= len(piece) <= 8192 for piece in pieces[:-1])
    assert len(pieces[-1]) <= 8192


def test_limits_stop_after_the_document_that_reaches_them(corpus):
    everything = read(corpus)
    assert read(corpus, max_documents=3) == everything[:3]
    limit = len(everything[0].text) + 1
    assert read(corpus, max_characters=limit) == everything[:2]


@given(st.sets(st.integers(), min_size=2), st.floats(0.01, 0.49))
def test_a_split_is_stable_complete_and_never_empty(keys, fraction):
    documents = [Document(str(key), "", str(key)) for key in keys]
    train, validation = split_documents(documents, fraction)
    assert train
    assert validation
    assert sorted(train + validation) == sorted(documents)
    assert [d for d in documents if d in train] == train
    reversed_train, _ = split_documents(documents[::-1], fraction)
    assert reversed_train == train[::-1]


def test_documents_added_later_move_none():
    documents = [Document(f"{i}.py", "", f"{i}.py") for i in range(2000)]
    _, few = split_documents(documents[::2], 0.1)
    _, many = split_documents(documents, 0.1)
    assert few == [document for document in many if document in set(documents[::2])]
    assert 150 < len(many) < 250


def test_equal_documents_share_a_side():
    documents = [Document(str(i), str(i % 40), str(i % 40)) for i in range(400)]
    train, validation = split_documents(documents, 0.2)
    assert not {d.text for d in train} & {d.text for d in validation}


@pytest.mark.parametrize(("count", "message"), [(1, "there is only one document"), (3, "all 3 documents are equal")])
def test_one_distinct_document_cannot_be_split(count, message):
    with pytest.raises(InputError, match=message):
        split_documents([Document(str(i), "same", "same") for i in range(count)], 0.1)


def test_the_hash_covers_names_contents_and_borders():
    base = [Document("a", "bc", ""), Document("d", "e", "")]
    others = [
        base[::-1],
        [Document("a", "bd", ""), base[1]],
        [Document("ab", "c", ""), base[1]],
        base[:1],
    ]
    assert len({hash_documents(documents) for documents in [base, *others]}) == 5
    assert hash_documents([Document(d.name, d.text, "other key") for d in base]) == hash_documents(base)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text"),
        (b" \n\n\t", "has no text"),
        (b"abc\0def", "byte 3 is NUL"),
        (b"ab\xff", "byte 2 is not valid UTF-8"),
        ("text".encode("utf-16-le"), "byte 1 is NUL, so this is a binary or UTF-16 file"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    assert refused(file).startswith(f"{file}: {message}")
    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "x", "id": 1}', "line 3: no key 'text', found ['id', 'txt']; set text_column"),
        ('{"text": "x"', "line 3: not valid JSON"),
        ("[1]", "line 3: expected a JSON object, found list"),
        ('{"text": null}', "line 3: 'text' holds NoneType, expected text"),
        ('{"text": "ab\\ud800"}', "line 3: character 2 of 'text' is half a surrogate pair"),
        ("[" * 100_000, "line 3: not valid JSON"),
    ],
)
def test_a_wrong_json_line_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    assert message in refused(file)


def test_a_python_file_with_an_unknown_encoding_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("# coding: klingon\n")
    assert "unknown encoding: klingon" in refused(tmp_path)


def wikitext(folder, ending=".tokens"):
    for name, words in {"train": 400, "valid": 90, "test": 80}.items():
        (folder / f"wiki.{name}{ending}").write_text(f"\n = {name} = \n\n" + f"the {name} <unk> , \n" * words)
    (folder / "SOURCE.txt").write_text("where it comes from")
    return folder


def test_a_folder_with_files_named_after_splits_keeps_them(tmp_path):
    documents = read(wikitext(tmp_path))
    assert [(d.name, d.split) for d in documents] == [
        ("wiki.test.tokens", "test"),
        ("wiki.valid.tokens", "validation"),
        ("wiki.train.tokens", "train"),
    ]
    settings = DataConfig(source=str(tmp_path), validation_fraction=0.3, test_fraction=0.0)
    splits = split_for(documents, settings)
    assert {name: split[0].name for name, split in splits.items()} == {
        "train": "wiki.train.tokens",
        "validation": "wiki.valid.tokens",
        "test": "wiki.test.tokens",
    }
    # A limit is one of the training text, so that no split is lost to it.
    assert [d.name for d in read(tmp_path, max_characters=10)] == [d.name for d in documents]


@pytest.mark.parametrize(
    "names", [("a.train.txt", "b-dev.jsonl"), ("TRAIN.txt", "val.raw"), ("dev.txt", "x_train.txt")]
)
def test_the_words_for_splits(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text('{"text": "some"}')
    assert {d.split for d in read(tmp_path)} == {"train", "validation"}


@pytest.mark.parametrize("names", [("train.py", "test.py"), ("train.txt", "more.txt"), ("a/train.txt", "a/test.txt")])
def test_names_that_put_nothing_into_splits(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some")
    assert [(d.name, d.split) for d in read(tmp_path)] == [(name, "") for name in sorted(names)]


def test_own_splits_that_cannot_be_used(tmp_path):
    wikitext(tmp_path)
    (tmp_path / "wiki.train.tokens").unlink()
    documents = read(tmp_path)  # for looking at a model they are text as any other
    with pytest.raises(InputError, match=r"\(wiki.test.tokens, wiki.valid.tokens\) and none has text for train"):
        split_for(documents, DataConfig(source=str(tmp_path)))
    wikitext(tmp_path, ".raw")
    assert "wiki.test.raw and wiki.test.tokens are two versions of one text" in refused(tmp_path)


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "picture.png").touch()
    assert "has no text files; normsmith reads .txt, .md, .py, .jsonl" in refused(tmp_path)


@pytest.mark.parametrize(
    "source", ["no/such/file", "missing.txt", "data/missing.jsonl", "/nowhere", "~nobody-here/x", "a b", "x\0y"]
)
def test_a_source_that_is_no_path_and_no_name_is_refused(source):
    assert refused(source).startswith(f"{source}: no such file or folder, and no name of a Hub data set")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    assert "neither a regular file nor a folder" in refused(tmp_path / "pipe.txt")
    assert "has no text files" in refused(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose first byte cannot be read")
def test_an_unreadable_file_is_refused(tmp_path):
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    assert "a.txt: cannot be read (Input/output error)" in refused(tmp_path)


@pytest.mark.parametrize(
    "options", [{"vocab_size": 256}, {"sequence_length": 1}, {"validation_fraction": 0.5}, {"source": ""}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DataConfig(**options)


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    rows = {"text": [f"row {i} says: {'word ' * i}" for i in range(100)], "number": list(range(100))}
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "train.parquet"))
    datasets.Dataset.from_dict({"text": ["held out"]}).to_parquet(str(folder / "test.parquet"))
    return folder


def test_a_hub_set_is_streamed_up_to_its_limit(hub_folder):
    documents = read(f"hub:{hub_folder}", max_documents=7)
    assert [d.name for d in documents] == list("0123456")
    assert documents[2].text == "row 2 says: word word "
    assert len(read(f"hub:{hub_folder}")) == 100
    assert [d.text for d in read(f"hub:{hub_folder}", split="test")] == ["held out"]


def test_a_hub_set_without_limits_stops_by_itself(hub_folder, monkeypatch):
    monkeypatch.setattr("normsmith.data.sources.HUB_CHARACTERS", 50)
    assert len(read(f"hub:{hub_folder}")) == 3
    assert len(read(f"hub:{hub_folder}", max_documents=9)) == 9


def test_a_hub_set_of_json_lines_in_a_configuration(tmp_path):
    for name in ("en", "de"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text(json.dumps({"content": name}) + "\n")
    configurations = "".join(f"- config_name: {n}\n  data_files: {n}/*.jsonl\n" for n in ("en", "de"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")
    assert [d.text for d in read(f"hub:{tmp_path}", subset="de", text_column="content")] == ["de"]
    assert "Config name is missing" in refused(f"hub:{tmp_path}", text_column="content")


def test_hub_errors_are_one_sentence(hub_folder, tmp_path):
    assert "row 0: no key 'body', found ['number', 'text']" in refused(f"hub:{hub_folder}", text_column="body")
    assert "'number' holds int, expected text" in refused(f"hub:{hub_folder}", text_column="number")
    assert "the data set cannot be read" in refused(f"hub:{tmp_path}/none")
    assert "Available splits: ['train', 'test']" in refused(f"hub:{hub_folder}", split="dev")


def test_an_unreachable_hub_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    expected = "owner/name: no such file or folder here, and the Hub data set cannot be read: Couldn't reach"
    assert refused("owner/name").startswith(expected)
