"""Files of tasks that are damaged, incomplete or of another form: read right, or refused with the place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from normsmith.data import Examples, TaskData, corruptions, load_data
from normsmith.data.kinds import data_config
from normsmith.data.vision import finish
from normsmith.errors import InputError
from normsmith.evaluation import ACCURACY, score
from normsmith.evaluation.robustness import measure_official, measure_robustness
from normsmith.models import NormsmithForImageClassification, NormsmithVisionConfig

RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (60, 32, 32, 3), np.uint8)
LABELS = np.arange(60) % 10


def load(kind: str, **options: Any) -> TaskData:
    data = load_data(data_config({"kind": kind, **options}))
    assert isinstance(data, TaskData)
    return data


def refuse(kind: str, message: str, source: Path, **options: Any) -> None:
    with pytest.raises(InputError, match=message):
        load(kind, source=str(source), **options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.where(LABELS == 3, np.nan, LABELS), r"train.npz: its labels are float64 of shape \(60,\)"),
        (
            np.eye(10, dtype=np.int64)[LABELS],
            r"its labels are int64 of shape \(60, 10\); expected whole numbers \(n,\)",
        ),
        (np.array(["cat"] * 60), r"its labels are <U3"),
        (LABELS + 0.7, r"its labels are float64"),
    ],
)
def test_labels_that_are_no_classes(labels: Any, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=COLOUR, y=labels)
    refuse("images", message, tmp_path)


def test_labels_in_a_column_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=COLOUR, y=LABELS[:, None].astype(np.uint8))
    np.savez(tmp_path / "test.npz", x=COLOUR[:10], y=LABELS[:10])
    assert load("images", source=str(tmp_path)).test.columns["label"].tolist() == list(range(10))  # pyright: ignore


@pytest.mark.parametrize("damage", [lambda data: data[:500], lambda data: b"", lambda data: data[:-30]])
def test_damaged_archives(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=COLOUR, y=LABELS)
    (tmp_path / "train.npz").write_bytes(damage((tmp_path / "train.npz").read_bytes()))
    refuse("images", r"train.npz: cannot be read as a NumPy archive", tmp_path)


def test_damaged_gzip_files(tmp_path: Path) -> None:
    # The header of gzip, and behind it bytes that no deflate stream begins with.
    for name in ("train-images-idx3-ubyte.gz", "train.tsv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"")[:10] + b"\xff" * 40)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b""))
    refuse("images", r"train-images-idx3-ubyte.gz: cannot be read \(Error -3", tmp_path)
    refuse("tagging", r"train.tsv.gz: cannot be read \(Error -3", tmp_path)


def test_sheets_with_a_gap_or_damaged_labels(tmp_path: Path) -> None:
    for number in (0, 2):
        part = COLOUR[20 * number : 20 * number + 20]
        Image.fromarray(part.reshape(20, 1024, 3)).save(tmp_path / f"c_batch_{number}.png")
    np.save(tmp_path / "c_labels.npy", LABELS)
    refuse("images", "the sheet number 1 is missing, so it is not known which labels the later ones have", tmp_path)
    first = (tmp_path / "c_batch_0.png").rename(tmp_path / "elsewhere")
    refuse("images", "the sheet number 0 is missing", tmp_path)
    first.rename(tmp_path / "c_batch_0.png")
    Image.fromarray(COLOUR[20:40].reshape(20, 1024, 3)).save(tmp_path / "c_batch_1.png")
    assert load("images", source=str(tmp_path)).facts.channels == 3
    (tmp_path / "c_labels.npy").write_bytes(b"")
    refuse("images", "c_labels.npy: its labels cannot be read", tmp_path)


def test_hub_images_of_other_modes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    grey = Image.fromarray(COLOUR[0, ..., 0])

    def read(images: list[Image.Image], folder: str) -> TaskData:
        for split in ("train", "validation", "test"):
            rows = {"image": images * 10, "label": [0, 1] * (5 * len(images))}
            datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / folder / f"{split}.parquet")
        return load("images", source=f"hub:{tmp_path / folder}")

    colour = Image.fromarray(COLOUR[0])
    palette = colour.quantize(16)
    shown = np.asarray(palette.convert("RGB"))
    assert np.array_equal(np.asarray(read([palette, palette], "p").test.columns["image"])[0], shown)
    assert np.array_equal(np.asarray(read([grey.convert("LA")] * 2, "la").test.columns["image"])[0, ..., 0], grey)
    white = read([Image.new("1", (32, 32), 1)] * 2, "bits").test
    assert np.asarray(white.columns["image"]).min() == 255
    deep = Image.fromarray(np.full((32, 32), 300, np.uint16))
    with pytest.raises(InputError, match=r"image 0 of train has pixels of the sort 'I;16'; normsmith reads grey and"):
        read([deep, deep], "deep")


def test_a_hub_split_whose_labels_are_withheld(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    for split in ("train", "validation", "test"):
        labels = [-1] * 60 if split == "test" else [0, 1] * 30
        rows = {"image": [Image.fromarray(c) for c in COLOUR], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    data = load("images", source=f"hub:{tmp_path}")
    assert len(data.test) == 60
    assert any("validation split" in note for note in data.notes)


def test_missing_words_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    places = ["sea" if i % 2 else "hill" for i in range(80)]
    places[4], places[9] = "NaN", ""
    path.write_text("\n".join(["where,y", *(f"{place},{i % 7}" for i, place in enumerate(places))]) + "\n")
    refuse("table", r"t.csv, line 6: 'where' is missing; write missing: median, or leave the row out", path)
    data = load("table", source=str(path), missing="median")
    assert data.facts.features == ("where=hill", "where=sea")
    rows = np.concatenate([np.asarray(s.columns["features"]) for s in (data.train, data.validation, data.test)])
    assert (rows.sum(1) == 0).sum() == 2
    assert "2 row(s) have no where: all its columns are 0" in data.notes


def test_the_label_column_of_a_small_file_is_that_of_the_training_file(tmp_path: Path) -> None:
    lines = [f"{'good' if i % 3 else 'bad'}\ttext number {i}" for i in range(200)]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "dev.tsv").write_text("good\ta fine text\nbad\ta poor text\n")  # both columns have two values
    data = load("sentences", source=str(tmp_path))
    assert data.facts.labels == ("bad", "good")
    assert data.test.columns["labels"] == [1, 0]
    (tmp_path / "dev.tsv").write_text("good\ta fine text\nbad\t \n")
    with pytest.raises(InputError, match=r"dev.tsv, line 2: has the label 'bad' and no text"):
        load("sentences", source=str(tmp_path))
    (tmp_path / "dev.tsv").write_text("good\ta fine text\n\ta poor text\n")
    with pytest.raises(InputError, match=r"dev.tsv, line 2: has no label"):
        load("sentences", source=str(tmp_path))


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        lines = ["label\ttext", *(f"{'good' if i % 3 else 'bad'}\ttext number {i}" for i in range(60))]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    assert load("sentences", source=str(tmp_path)).facts.labels == ("bad", "good")


def test_columns_that_hardly_vary(tmp_path: Path) -> None:
    def table(cell: Callable[[int], str], target: Callable[[int], str] = str) -> Path:
        path = tmp_path / "t.csv"
        path.write_text("a,b,y\n" + "".join(f"{cell(i)},{i * i % 7},{target(i)}\n" for i in range(300)))
        return path

    data = load("table", source=str(table(lambda i: "0.1")))
    assert data.moments is not None
    assert data.moments["scale"][0] == 0  # exactly: then it counts as 1, and another value is not blown up
    refuse("table", "the target 'y' has one value in all training rows", table(str, lambda i: "1.1"))
    refuse("table", "'a' varies by .* around values of 1.7e[+]09, which float32 cannot tell apart; subtract",
           table(lambda i: str(1700000000 + i)))  # fmt: skip
    refuse("table", "'y' varies by .* which float32 cannot tell", table(str, lambda i: str(1e8 + i)))
    load("table", source=str(table(lambda i: str(1.7e9 + 1e5 * i))))
    refuse("table", "'y' is in target twice", table(str), target=["y", "y"])
    refuse("table", "'y' is in target and drop", table(str), target="y", drop=["y"])


def test_a_column_of_words_that_is_mostly_empty_is_one_of_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    alley = ["Pave", "Grvl", "", "", ""]
    path.write_text("alley,y\n" + "".join(f"{alley[i % 5]},{i}\n" for i in range(200)))
    data = load("table", source=str(path), missing="median")
    assert data.facts.features == ("alley=Grvl", "alley=Pave")
    assert "120 row(s) have no alley: all its columns are 0" in data.notes
    path.write_text("age,y\n" + "".join(f"{('18_25', '26_35')[i % 2]},{i}\n" for i in range(200)))
    assert load("table", source=str(path)).facts.features == ("age=18_25", "age=26_35")


def test_what_is_dropped_does_not_part_equal_examples(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,x,y\n" + "".join(f"{i},{i // 2},{i // 2 * 3}\n" for i in range(400)))
    data = load("table", source=str(path), drop=["id"])
    sides = [set(np.asarray(part.columns["features"]).ravel()) for part in (data.train, data.validation, data.test)]
    assert len(set.union(*sides)) == sum(map(len, sides)) == 200


def test_the_first_texts_of_a_sorted_file_have_one_label(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        rows = [f"text number {i} of {name}\t{label}\n" for label in ("neg", "pos") for i in range(60)]
        (tmp_path / f"{name}.tsv").write_text("".join(rows))
    data = load("sentences", source=str(tmp_path), max_sentences=40, vocab_size=300)
    assert (data.facts.labels, len(data.train)) == (("neg", "pos"), 40)


def test_a_tagged_file_with_byte_order_mark_and_header(tmp_path: Path) -> None:
    rows = "".join(f"The\tDET\nend{i}\tNOUN\n\n" for i in range(200))
    (tmp_path / "train.tsv").write_text("\ufeffFORM\tUPOS\n" + rows)
    data = load("tagging", source=str(tmp_path), vocab_size=300)
    assert data.facts.labels == ("DET", "NOUN")
    assert data.notes[0].startswith("400 words in 200 sentences")
    conllu = [f"# text = {i}\n1\tend{i}\t_\tNOUN\tNN\t_\t_\t_\t_\t_\n\n" for i in range(200)]
    (tmp_path / "train.tsv").unlink()
    (tmp_path / "train.conllu").write_text("\ufeff" + "".join(conllu))
    assert load("tagging", source=str(tmp_path), vocab_size=300).facts.labels == ("NOUN",)


def test_two_columns_of_words_and_tags(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("the\tDT\ncat\tNN\n\na\tDT\n\nsees\tVB\n")
    (tmp_path / "test.tsv").write_text("the\tDT\n")
    for tags in ("upos", "xpos"):
        assert load("tagging", source=str(tmp_path), tags=tags).facts.labels == ("DT", "NN", "VB")
    (tmp_path / "test.tsv").write_text("the\n")
    refuse(
        "tagging", r"test.tsv, line 1: has 1 column\(s\) .*expected the columns FORM UPOS XPOS, or FORM TAG", tmp_path
    )
    (tmp_path / "test.tsv").write_text("the\tDET\t_\n")
    refuse("tagging", r"test.tsv, line 1: 'the' has no xpos; write tags: upos", tmp_path, tags="xpos")


def test_words_beyond_the_length_are_counted(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("the\tDT\ncat\tNN\n\nthe\tDT\n\ncat\tNN\n")
    (tmp_path / "test.tsv").write_text("the\tDT\n" * 9)
    data = load("tagging", source=str(tmp_path), sequence_length=6)
    assert "4 of 9 test words lie beyond sequence_length and do not count" in data.notes
    assert len(data.notes) == 2


TREES = """
( (S
    (NP-SBJ (DT The) (NN cat) )
    (VP (VBZ sees)
      (NP (-NONE- *T*-1) ) (-LRB- -LRB-) (NP (NNS dogs) ) (-RRB- -RRB-))
    (. .) ))
( (NP (NNP End)))
"""


def test_the_penn_treebank_as_it_is_delivered(tmp_path: Path) -> None:
    for section in ("00", "18", "19", "22", "24"):
        (tmp_path / "wsj" / section).mkdir(parents=True)
        for number in range(5 if section == "00" else 1):
            (tmp_path / "wsj" / section / f"wsj_{section}{number:02}.mrg").write_text(TREES)
    data = load("tagging", source=str(tmp_path), tags="xpos")
    assert data.facts.labels == ("-LRB-", "-RRB-", ".", "DT", "NN", "NNP", "NNS", "VBZ")
    assert [len(s) for s in (data.train, data.validation, data.test)] == [12, 2, 4]
    assert data.tokenizer.decode(data.test.columns["input_ids"][0][1:]) == " The cat sees ( dogs ) ."
    labels = [data.facts.labels[n] for n in data.test.columns["labels"][0] if n >= 0]
    assert labels == ["DT", "NN", "VBZ", "-LRB-", "NNS", "-RRB-", "."]
    odd = tmp_path / "wsj/24/wsj_2400.mrg"
    for text, message in (
        ("( (S (NN cat) )\n", r"wsj_2400.mrg: ends within a parse tree, 1 bracket\(s\) are not closed"),
        ("\ncat NN\n", r"wsj_2400.mrg, line 2: 'cat' stands outside of a parse tree"),
        ("( (NN cat) ) )\n", r"line 1: '\)' stands outside"),
    ):
        odd.write_text(text)
        refuse("tagging", message, tmp_path)
    odd.rename(odd.with_name("wsj_2500.mrg"))
    refuse("tagging", r"wsj_2500.mrg: its name tells no section", tmp_path)


def classifier() -> NormsmithForImageClassification:
    sizes = {"image_size": 8, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {"id2label": dict(enumerate("abc")), "label2id": {label: i for i, label in enumerate("abc")}}
    return NormsmithForImageClassification(NormsmithVisionConfig(**sizes, **labels)).eval()


def test_a_label_that_the_model_does_not_know(tmp_path: Path) -> None:
    images = COLOUR[:6, :8, :8]
    labels = np.array([0, 1, 2, 0, 3, 1])
    wrong = r"example 4 has the label 3, but the model knows the classes 0 to 2 only"
    with pytest.raises(InputError, match=wrong):
        score(classifier(), Examples({"image": images, "label": labels}, finish), ACCURACY, 4)
    with pytest.raises(InputError, match=wrong):
        measure_robustness(classifier(), images, labels, ["fog"])
    with pytest.raises(InputError, match="names is empty: name at least one corruption"):
        measure_robustness(classifier(), images, labels % 3, [])
    np.save(tmp_path / "fog.npy", np.tile(images, (5, 1, 1, 1)))
    np.save(tmp_path / "labels.npy", np.tile(labels % 3, 5))
    model = classifier()
    found = measure_official(model, tmp_path, ["fog"])
    once = score(model, Examples({"image": images, "label": labels % 3}, finish), ACCURACY).metric
    assert found.clean is None
    assert found.accuracy["fog"] == (once,) * 5
    np.save(tmp_path / "labels.npy", np.tile(labels, 5))
    with pytest.raises(InputError, match=wrong):
        measure_official(classifier(), tmp_path, ["fog"])


def test_official_files_that_are_cut(tmp_path: Path) -> None:
    (tmp_path / "fog.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"fog.npy: cannot be read as a NumPy array"):
        corruptions.read_official(tmp_path, "fog", 1)
    np.save(tmp_path / "fog.npy", np.uint8(3))
    np.save(tmp_path / "labels.npy", np.arange(5))
    with pytest.raises(InputError, match=r"fog.npy holds a number, not images"):
        corruptions.read_official(tmp_path, "fog", 1)


@pytest.mark.parametrize("sizes", [{"patch_size": 0}, {"image_size": [8]}, {"num_channels": 0}])
def test_sizes_of_images_that_cannot_be(sizes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"write height and width \(or one number for both\), and at least 1 for each"):
        NormsmithVisionConfig(**sizes)
