"""The schedule of FakeLN by itself: the published steps, fractions of a run, and what makes no sense."""

from __future__ import annotations

import pytest

import normsmith as ns
from normsmith.errors import ConfigError, InputError
from normsmith.schedules import SequentialConfig
from normsmith.schedules.sequential import PRESETS, Uses
from tests.schedules.test_sequential import model_of
from tests.tiny import tiny

CONFIG = SequentialConfig(start_step=3, gaps=(1, 1, 2), waits=(1, 2))


def uses(layers: int) -> Uses:
    blocks = range(layers)
    return Uses(tuple(f"{i}.ln_2" for i in blocks), tuple(f"{i}.ln_1" for i in blocks), (), ("ln_f",))


@pytest.mark.parametrize(
    ("layers", "table"),
    [
        (12, (20, 44, 68, 104, 106, 116)),
        (24, (20, 68, 116, 188, 190, 200)),
        (36, (30, 174, 318, 534, 536, 546)),
        (48, (50, 242, 434, 722, 724, 734)),
    ],
)
def test_the_presets_give_the_published_steps(layers: int, table: tuple[int, ...]) -> None:
    steps, _, start, gaps, *_ = PRESETS[layers]
    plan = SequentialConfig(start_step=start, gaps=gaps).plan(steps, uses(layers))
    marks = [("whole", "0.ln_2"), ("qk", "0.ln_1"), ("v", "0.ln_1"), ("whole", "ln_f"), ("end", ""), ("first", "")]
    assert tuple(next(r.step for r in plan if (r.what, r.name) == mark) for mark in marks) == table
    assert len(plan) == 3 * layers + 3
    assert [r.name for r in plan if r.what == "v"] == [f"{i}.ln_1" for i in range(layers)]


def test_without_steps_the_schedule_is_a_part_of_the_run() -> None:
    for steps in (40, 300, 10_000):
        plan = SequentialConfig(warmup=0.1, end=0.5).plan(steps, uses(12))
        assert (plan[0].step, plan[-1].step) == (steps // 10, steps // 2)
        assert [r.step for r in plan] == sorted(r.step for r in plan)
    internal = Uses(("a",), (), ("b",), ())
    assert [(r.what, r.name) for r in SequentialConfig().plan(100, internal)] == [
        ("whole", "a"), ("whole", "b"), ("end", ""), ("first", "")
    ]  # fmt: skip


def test_schedules_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="comes at step 116, 26 steps after the end of the run of 90"):
        SequentialConfig(start_step=20, gaps=(2, 2, 3)).plan(90, uses(12))
    with pytest.raises(InputError, match="comes at step 14, 4 steps after the end of the run of 10"):
        ns.remove_one_by_one_(model_of(), CONFIG, steps=10)
    for wrong, message in (
        ({"gaps": (1, 1, 1)}, "need start_step"),
        ({"scale_loss": -1}, "scale_loss = -1"),
        ({"end": 0.1, "warmup": 0.2}, "end=0.1 must lie after warmup=0.2"),
        ({"start_step": 2, "gaps": (1, -1, 1)}, "must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            SequentialConfig(**wrong)
    with pytest.raises(InputError, match="not a pre-norm model"):
        ns.remove_one_by_one_(tiny("bert"), steps=100)
    with pytest.raises(InputError, match="write steps=9"):
        ns.remove_one_by_one_(model_of(), 9)  # pyright: ignore[reportArgumentType]
    model = model_of()
    ns.remove_one_by_one_(model, steps=100)
    with pytest.raises(InputError, match="is being removed already"):
        ns.remove_one_by_one_(model, steps=100)
