"""Labelled data: embedded sources, files of every form, splits, order, augmentation, and every wrong input."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from normsmith.data import ImagesConfig, TaskData, TrainingExamples, collate, data_config, load_data
from normsmith.data.augment import Augmentation, cutmix, random_crop
from normsmith.data.examples import Examples, as_probabilities, smoothed, split_rows
from normsmith.data.python_code import lines_of, tag_source
from normsmith.data.windows import epoch_order
from normsmith.errors import ConfigError, InputError

RANDOM = np.random.default_rng(0)


def load(kind: str, **options: Any) -> TaskData:
    data = load_data(data_config({"kind": kind, **options}))
    assert isinstance(data, TaskData)
    return data


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return load("images")


def test_digits_are_split_for_ever(digits: TaskData) -> None:
    assert [len(split) for split in (digits.train, digits.validation, digits.test)] == [1268, 188, 341]
    assert digits.data_hash[:8] == load("images").data_hash[:8]
    splits = (digits.train, digits.validation, digits.test)
    pixels = [{bytes(image) for image in np.asarray(split.columns["image"])} for split in splits]
    assert len(set.union(*pixels)) == sum(map(len, pixels))  # no image is in two splits
    item = digits.train[0]["pixel_values"]
    assert (item.shape, item.dtype) == ((1, 8, 8), torch.float32)
    assert (item.min(), item.max()) == (0, item.new_tensor(239) / 255)  # its brightest value is 15 of 16
    assert digits.moments is not None
    everything = torch.stack([digits.train[i]["pixel_values"] for i in range(len(digits.train))])
    assert digits.moments["mean"] == pytest.approx(everything.mean().item(), rel=1e-5)
    assert digits.moments["scale"] == pytest.approx(everything.std(correction=0).item(), rel=1e-5)


def test_order_and_augmentation_depend_on_the_seed_alone(digits: TaskData) -> None:
    change = Augmentation(1, True, 0.2, 1.0, 0.7, digits.facts.labels)
    first, same, other = (TrainingExamples(digits.train, seed, 3000, change) for seed in (1, 1, 2))
    backwards = {i: same[i] for i in reversed(range(1260, 1280))}  # across the border of an epoch, in another order
    for i, item in backwards.items():
        assert torch.equal(first[i]["pixel_values"], item["pixel_values"])
        assert torch.equal(first[i]["labels"], item["labels"])
    assert not all(torch.equal(first[i]["pixel_values"], other[i]["pixel_values"]) for i in range(20))
    seen = {bytes(epoch_order(1, 1, 1268)[i : i + 1]): 1268 + i for i in range(1268)}
    again = [(first[i], first[seen[bytes(epoch_order(1, 0, 1268)[i : i + 1])]]) for i in range(10)]
    assert not all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in again)  # another draw in each epoch
    plain = TrainingExamples(digits.train, 1, 3000)
    epochs = [[bytes(plain[i]["pixel_values"].numpy()) for i in range(e * 1268, (e + 1) * 1268)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_mixing_mixes_labels_as_it_mixes_pixels() -> None:
    images = np.stack([np.full((8, 8, 1), value, np.uint8) for value in (0, 255)])
    data = Examples({"image": images, "label": np.array([0, 1])}, _finish)
    for options in ((0, False, 0.5, 0.0, 1.0), (0, False, 0.0, 1.0, 1.0)):
        change = Augmentation(*options, classes=("black", "white"))
        for i in range(50):
            item = change(data, i % 2, np.random.default_rng(i))
            assert item["labels"].sum() == pytest.approx(1)
            assert item["pixel_values"].mean() == pytest.approx(float(item["labels"][1]), abs=1e-5)
    never = Augmentation(0, False, 0.5, 1.0, 0.0, ("black", "white"))
    assert not never.active


def _finish(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    pixels = torch.from_numpy(np.array(row["image"])).movedim(-1, 0).float() / 255
    return {"pixel_values": pixels, "labels": torch.tensor(int(row["label"]))}


def test_cutmix_pastes_a_rectangle_and_counts_its_pixels() -> None:
    a, b = torch.zeros(1, 20, 10), torch.ones(1, 20, 10)
    for seed in range(30):
        mixed, share = cutmix(a, b, 0.6, np.random.default_rng(seed))
        assert 1 - mixed.mean() == pytest.approx(share, abs=1e-6)
        rows, columns = mixed[0].any(1).sum(), mixed[0].any(0).sum()
        assert rows * columns == mixed.sum()
        assert share >= 0.6 - 0.1


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    image = RANDOM.integers(1, 255, (6, 5, 1), np.uint8)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    windows = {bytes(padded[y : y + 6, x : x + 5]) for y in range(5) for x in range(5)}
    crops = {bytes(random_crop(image, 2, np.random.default_rng(seed))) for seed in range(400)}
    assert crops == windows


def test_smoothing_against_its_formula(digits: TaskData) -> None:
    change = smoothed(None, 0.2, 10)
    assert change is not None
    item, label = change(digits.train, 5, RANDOM), int(digits.train[5]["labels"])
    expected = torch.full((10,), 0.02)
    expected[label] = 0.82
    torch.testing.assert_close(item["labels"], expected)
    assert torch.equal(as_probabilities(expected, 10), expected)
    assert smoothed(None, 0.0, 10) is None


def test_batches_are_padded_to_their_longest() -> None:
    items = [{"input_ids": torch.arange(n), "attention_mask": torch.ones(n).long(), "labels": torch.full((n,), 3)}
             for n in (2, 4)]  # fmt: skip
    batch = collate(items)
    assert batch["input_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[3, 3, -100, -100], [3, 3, 3, 3]]


def test_splits_by_hash_stay_when_rows_are_added() -> None:
    keys = [f"row {i}" for i in range(500)]
    before, after = split_rows(keys, 0.1, 0.2), split_rows([*keys, *(f"new {i}" for i in range(200))], 0.1, 0.2)
    assert all(set(before[name]) <= set(after[name]) for name in before)
    assert sum(map(len, before.values())) == 500
    assert 25 < len(before["validation"]) < 80
    assert 70 < len(before["test"]) < 135
    twice = split_rows([*keys, *keys], 0.1, 0.2)
    assert all({i % 500 for i in rows} == set(before[name]) for name, rows in twice.items())


SOURCE = '''"""A module."""
import os.path as p

class Box(dict):
    """Things in a box."""
    def size(self, unit=1):
        # how large it is
        total = p.getsize(self.name, unit=3)
        return f(total)
'''


def test_roles_of_tokens() -> None:
    words, tags = (sum(column, ()) for column in zip(*tag_source(SOURCE), strict=True))
    found = [(w, t) for w, t in zip(words, tags, strict=True) if t not in ("operator", "keyword", "string")]
    assert found == [
        ("os", "import"), ("path", "name"), ("p", "name"), ("Box", "class"), ("dict", "load"), ("size", "function"),
        ("self", "parameter"), ("unit", "parameter"), ("1", "number"), ("total", "store"), ("p", "load"),
        ("getsize", "method"), ("self", "load"), ("name", "attribute"), ("unit", "argument"), ("3", "number"),
        ("f", "call"), ("total", "load"),
    ]  # fmt: skip
    assert list(tag_source("def broken(:")) == []


def test_kinds_of_lines() -> None:
    assert sorted(lines_of(SOURCE)) == [
        ("Things in a box.", "docstring"),
        ("class Box(dict):", "code"),
        ("def size(self, unit=1):", "code"),
        ("import os.path as p", "code"),
        ("total = p.getsize(self.name, unit=3)", "code"),
    ]


def test_code_as_tags_and_as_lines() -> None:
    tags = load("tagging", max_sentences=60)
    assert [len(s) for s in (tags.train, tags.validation, tags.test)] == [60, 8, 8]
    item = tags.train[0]
    assert item["labels"][0] == -100
    assert item["labels"].max() < len(tags.facts.labels)
    lines = load("sentences", max_sentences=90)
    counts = np.bincount(lines.train.columns["labels"])
    assert counts.tolist() == [30, 30, 30]
    assert lines.tokenizer is not None
    splits = (lines.train, lines.validation, lines.test)
    texts = [lines.tokenizer.decode(ids) for split in splits for ids in split.columns["input_ids"]]
    assert len(set(texts)) == len(texts)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


GREY = RANDOM.integers(0, 256, (60, 28, 28), np.uint8)
COLOUR = RANDOM.integers(0, 256, (60, 32, 32, 3), np.uint8)
LABELS = np.arange(60) % 10


def test_idx_files(tmp_path: Path) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte", GREY)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", GREY[:20])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", LABELS[:20])
    data = load("images", source=str(tmp_path), validation_fraction=0.2)
    assert len(data.test) == 20
    assert len(data.train) + len(data.validation) == 60
    assert np.array_equal(np.asarray(data.test.columns["image"])[..., 0], GREY[:20])
    assert "validation split(s) cut from the training split" in " ".join(data.notes)


def test_sheets_and_archives(tmp_path: Path) -> None:
    for number in range(2):
        part = COLOUR[30 * number : 30 * number + 30]
        Image.fromarray(part.reshape(30, 1024, 3)).save(tmp_path / f"c_batch_{number}.png")
    np.save(tmp_path / "c_labels.npy", LABELS)
    np.savez(tmp_path / "test.npz", x=COLOUR[:10], y=LABELS[:10])
    data = load("images", source=str(tmp_path), validation_fraction=0.2, max_train=20)
    assert (len(data.train), len(data.test), data.facts.channels) == (20, 10, 3)
    assert np.array_equal(data.test.columns["image"], COLOUR[:10])
    assert "only 20 of the training images" in " ".join(data.notes)


def test_a_data_set_in_the_hub_s_format(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    for split, count in (("train", 40), ("test", 6)):
        rows = {"img": [Image.fromarray(GREY[i]) for i in range(count)], "kind": [i % 2 for i in range(count)]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "im" / f"{split}.parquet")
        texts = {"text": [f"a text, number {i}" for i in range(count)], "kind": [i % 2 for i in range(count)]}
        words = datasets.Features({"text": datasets.Value("string"), "kind": features["kind"]})
        datasets.Dataset.from_dict(texts, features=words).to_parquet(tmp_path / "tx" / f"{split}.parquet")
    images = load("images", source=f"hub:{tmp_path / 'im'}")
    assert images.facts.labels == ("cat", "dog")
    assert np.array_equal(np.asarray(images.test.columns["image"])[..., 0], GREY[:6])
    texts = load("sentences", source=f"hub:{tmp_path / 'tx'}")
    assert (len(texts.test), texts.facts.labels) == (6, ("cat", "dog"))
    with pytest.raises(InputError, match="needs an image and a class label per row"):
        load("images", source=f"hub:{tmp_path / 'tx'}")


REST = "\t_" * 5 + "\n"
CONLLU = f"# text = a b\n1-2\tab\t_\t_\t_{REST}1\tthe\t_\tDET\tDT{REST}2\tcat\t_\tNOUN\tNN{REST}"


def test_conllu_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "x-dev.conllu").write_text(CONLLU + "\n" + CONLLU)
    (tmp_path / "x-test.conllu").write_text(CONLLU)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b"the\tDET\tDT\ncats\tNOUN\tNN\n\nthe\tDET\tDT\n"))
    for tags, expected in (("upos", ("DET", "NOUN")), ("xpos", ("DT", "NN"))):
        data = load("tagging", source=str(tmp_path), tags=tags, vocab_size=300)
        assert data.facts.labels == expected
        assert [len(s) for s in (data.train, data.validation, data.test)] == [2, 2, 1]
        assert [x for x in data.test.columns["labels"][0] if x >= 0] == [0, 1]
    (tmp_path / "x-test.conllu").write_text(CONLLU.replace("NOUN", "VERB"))
    with pytest.raises(InputError, match=r"sentence 1 of the test split tags 'cat' as 'VERB', a tag that the training"):
        load("tagging", source=str(tmp_path))
    (tmp_path / "x-test.conllu").write_text("1\tthe\tDET\n")
    with pytest.raises(InputError, match=r"x-test.conllu, line 1: has 3 column\(s\)"):
        load("tagging", source=str(tmp_path))


@pytest.mark.parametrize("form", ["text first", "label first"])
def test_tsv_of_sentences(form: str, tmp_path: Path) -> None:
    pairs = [(f"text number {i}", "good" if i % 3 else "bad") for i in range(200)]
    for name, rows in (("train", pairs), ("dev", pairs[:10]), ("test", pairs[:7])):
        first = form == "text first"
        lines = [f"{t}\t{label}" if first else f"{label}\t{t}" for t, label in rows]
        (tmp_path / f"{name}.tsv").write_text("\n".join([*([] if first else ["label\ttext_a"]), *lines]) + "\n")
    data = load("sentences", source=str(tmp_path))
    assert data.facts.labels == ("bad", "good")
    assert [len(s) for s in (data.train, data.validation, data.test)] == [200, 10, 7]
    (tmp_path / "test.tsv").unlink()
    data = load("sentences", source=str(tmp_path))
    assert len(data.test) == 10
    assert len(data.train) + len(data.validation) == 200
    assert "validation split is the test split" in " ".join(data.notes)
    (tmp_path / "dev.tsv").write_text("a text\tugly\nanother\tgood\n")
    with pytest.raises(
        InputError, match=r"text 1 of the test split has the label 'ugly'; the training split has bad, g"
    ):
        load("sentences", source=str(tmp_path))


def csv(path: Path, change: Callable[[list[list[str]]], None] | None = None) -> str:
    random = np.random.default_rng(0)
    rows = [
        [f"{a:.3f}", f"{b:.3f}", "sea" if a > 0 else "hill", f"{a + b:.3f}"] for a, b in random.normal(size=(80, 2))
    ]
    if change is not None:
        change(rows)
    path.write_text("\n".join(",".join(row) for row in [["a", "b", "where", "y"], *rows]) + "\n")
    return str(path)


def test_csv_with_categories_and_missing_values(tmp_path: Path) -> None:
    def change(rows: list[list[str]]) -> None:
        rows[3][0], rows[7][0] = "", "NaN"

    source = csv(tmp_path / "t.csv", change)
    with pytest.raises(InputError, match=r"t.csv, line 5: 'a' is missing; write missing: median"):
        load("table", source=source)
    data = load("table", source=source, missing="median")
    assert data.facts.features == ("a", "b", "where=hill", "where=sea")
    assert data.facts.targets == ("y",)
    rows = np.concatenate([np.asarray(s.columns["features"]) for s in (data.train, data.validation, data.test)])
    known = np.array([r[0] for r in np.asarray(data.train.columns["features"])])
    assert len(rows) == 80
    assert data.moments is not None
    np.testing.assert_allclose(data.moments["mean"][0], known.mean())
    note = next(n for n in data.notes if "missing value(s) of a" in n)
    median = float(note.rsplit(" ", 1)[1])
    assert (np.abs(rows[:, 0] - median) < 1e-5).sum() >= 2
    assert median == pytest.approx(np.median(known), abs=1e-4)  # of the training rows, not of all
    both = load("table", source=source, missing="median", target=["y", "b"], drop=["where"])
    assert (both.facts.features, both.facts.targets) == (("a",), ("y", "b"))


@pytest.mark.parametrize(
    ("row", "column", "cell", "message"),
    [
        (2, 1, "tall", r"line 4: 'b' is 'tall', which is no finite number; write drop: \[b\], or leave"),
        (2, 1, "inf", r"line 4: 'b' is 'inf', which is no finite number"),
        (4, 3, "", r"line 6: 'y' is missing; leave the row out$"),
        (4, 3, "1,2", r"line 6: has 5 cells, the header has 4"),
    ],
)
def test_cells_that_are_no_numbers(row: int, column: int, cell: str, message: str, tmp_path: Path) -> None:
    def change(rows: list[list[str]]) -> None:
        rows[row][column] = cell

    with pytest.raises(InputError, match=message):
        load("table", source=csv(tmp_path / "t.csv", change), missing="median")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    def refuse(kind: str, message: str, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            load(kind, **options)

    source = csv(tmp_path / "t.csv")
    refuse("table", "unknown column 'z' in .*t.csv", source=source, target="z")
    refuse("table", "no column is left to read", source=source, drop=["a", "b", "where"])
    refuse("table", "cannot be read as CSV", source=str(tmp_path / "none.csv"))
    refuse("table", "cannot be read as CSV", source=str(tmp_path))
    (tmp_path / "one.csv").write_text("a,b\n1,2\n")
    refuse("table", "split of 1 examples is empty", source=str(tmp_path / "one.csv"))
    refuse("images", "holds no images that normsmith reads", source=str(tmp_path))
    refuse("tagging", "has no .conllu or .tsv file with 'train'", source=str(tmp_path))
    refuse("sentences", "expected a folder with train.tsv", source=str(tmp_path))
    (tmp_path / "train.npz").write_bytes(b"PK nothing")
    refuse("images", "train.npz: cannot be read as a NumPy archive", source=str(tmp_path))
    np.savez(tmp_path / "train.npz", x=COLOUR.astype(float), y=LABELS)
    refuse("images", "its images are float64", source=str(tmp_path))
    np.savez(tmp_path / "train.npz", x=COLOUR, y=np.where(LABELS == 3, 200, LABELS))
    refuse(
        "images", "image 3 of the training split has the label 200, but the labels must be 0 to 9", source=str(tmp_path)
    )
    np.savez(tmp_path / "train.npz", x=COLOUR, y=LABELS)
    np.savez(tmp_path / "test.npz", x=COLOUR[:4], y=np.array([1, 2, 10, 3]))
    refuse("images", "image 2 of the test split has the label 10, but there are 10 classes", source=str(tmp_path))
    np.savez(tmp_path / "test.npz", x=COLOUR[:4, ..., :1], y=LABELS[:4])
    refuse(
        "images",
        r"test split has an image of 32×32 pixels and 1 channel\(s\), the training split",
        source=str(tmp_path),
    )
    np.savez(tmp_path / "test.npz", x=COLOUR[:0], y=LABELS[:0])
    refuse("images", "the test split is empty", source=str(tmp_path))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x89PNG")
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS)
    refuse("images", "is no IDX file of bytes", source=str(tmp_path))


def test_kinds_are_named() -> None:
    assert isinstance(data_config({"kind": "images"}), ImagesConfig)
    assert data_config({"source": "stdlib"}).kind == "text"
    with pytest.raises(InputError, match="unknown data kind 'image'; did you mean 'images'"):
        data_config({"kind": "image"})
    with pytest.raises(ConfigError, match="no mapping; write for example data"):
        data_config("stdlib")  # pyright: ignore[reportArgumentType]
