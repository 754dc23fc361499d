import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from normsmith.data import PackedWindows
from normsmith.errors import InputError

IDS = np.arange(1000, dtype=np.uint16)


def starts(windows: PackedWindows, **options: object) -> list[int]:
    loader = DataLoader(windows, shuffle=False, **options)
    return torch.cat([batch["input_ids"][:, 0] for batch in loader]).tolist()


def test_windows_without_a_seed_are_the_text_in_order():
    windows = PackedWindows(IDS, 64)
    assert len(windows) == 15
    for i, item in enumerate(windows):
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == list(range(64 * i, 64 * i + 64))
        assert torch.equal(item["input_ids"], item["labels"])
    assert i == 14


def test_items_over_several_epochs_repeat_the_text():
    assert starts(PackedWindows(IDS, 400, num_items=5)) == [0, 400, 0, 400, 0]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(n, length, seed):
    ids = np.arange(n + length - 1, dtype=np.uint32)
    count = len(ids) // length
    windows = PackedWindows(ids, length, seed=seed, num_items=2 * count + 1)
    order = [int(windows[i]["input_ids"][0]) // length for i in range(len(windows))]
    assert sorted(order[:count]) == sorted(order[count : 2 * count]) == list(range(count))


def test_epochs_and_seeds_have_different_orders():
    orders = [starts(PackedWindows(IDS, 10, seed=seed, num_items=200)) for seed in (0, 1)]
    epochs = [tuple(order[i : i + 100]) for order in orders for i in (0, 100)]
    assert len({*epochs, tuple(range(0, 1000, 10))}) == 5
    shared = [np.mean(np.equal(a, b)) for a, b in itertools.combinations(epochs, 2)]
    assert max(shared) < 0.1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_order_depends_on_nothing_but_the_seed():
    expected = starts(PackedWindows(IDS, 10, seed=7, num_items=150))
    torch.manual_seed(123)
    np.random.seed(5)
    longer = PackedWindows(IDS, 10, seed=7, num_items=1000)
    assert starts(longer)[:150] == expected
    for options in ({"batch_size": 7}, {"batch_size": 32, "num_workers": 2, "multiprocessing_context": "fork"}):
        assert starts(PackedWindows(IDS, 10, seed=7, num_items=150), **options) == expected
    backwards = [int(longer[i]["input_ids"][0]) for i in reversed(range(150))]
    assert backwards[::-1] == expected


def test_the_order_never_changes_between_versions():
    assert starts(PackedWindows(IDS, 100, seed=0)) == [0, 800, 900, 300, 700, 500, 100, 200, 600, 400]


def test_a_seeded_item_is_a_window_of_the_text():
    item = PackedWindows(IDS, 64, seed=3)[4]["input_ids"].tolist()
    assert item[0] % 64 == 0
    assert item == list(range(item[0], item[0] + 64))


def test_a_changed_item_leaves_the_text_alone():
    ids = np.arange(20, dtype=np.int64)
    PackedWindows(ids, 10)[0]["input_ids"].zero_()
    assert ids.tolist() == list(range(20))


def test_an_index_out_of_range_ends_iteration():
    windows = PackedWindows(IDS, 100)
    for index in (-1, 10):
        with pytest.raises(IndexError):
            windows[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequence_length": 1001},
            "the text has 1000 tokens, one window needs 1001: lower sequence_length, or give more",
        ),
        ({"sequence_length": 10, "seed": -1}, "seed -1: must not be negative"),
        ({"sequence_length": 10, "num_items": 0}, "num_items 0: must be at least 1"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        PackedWindows(IDS, **options)
