"""The packaged reproductions: every plan builds, its published figures belong to its arms, and its cost is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from normsmith.errors import ConfigError, InputError, UnknownNameError
from normsmith.studies.reproduction import (
    SCALES,
    Reproduction,
    changed_plan,
    costs,
    find_reproduction,
    papers,
    run_reproduction,
)

FILES = {
    "autonorm": ("mnist", "cifar10", "ud_ewt", "sst2_sentences", "california_housing/housing.csv"),
    "spheretnorm": ("tinyshakespeare/input.txt", "tinystories/tiny_stories.txt"),
    "tapernorm": ("tinystories/tiny_stories.txt",),
}
PLANS = [(paper, scale) for paper in ("autonorm", "spheretnorm", "tapernorm") for scale in SCALES]


@pytest.mark.parametrize(("paper", "scale"), PLANS)
def test_every_arm_of_every_plan_builds_and_has_a_cost(paper: str, scale: str, tmp_path: Path) -> None:
    plan = find_reproduction(paper, scale, _files(paper, tmp_path) if scale == "local" else None)
    found = costs(plan)
    assert {c.study for c in found} == set(plan.studies)
    assert all(c.each.parameters > 1000 and c.each.tokens > 0 and c.each.flops > 0 for c in found)
    for study in plan.studies.values():
        ours = [p for p in study.published if p.arm in study.arms]
        assert bool(ours) == bool(study.published), "published figures stand beside arms of ours"
        assert all(p.source for p in study.published)
    # What needs no download is what is small.
    assert all((c.download is None) == (scale in ("smoke", "local")) for c in found) or paper == "autonorm"


def _files(paper: str, folder: Path) -> Path:
    for name in FILES[paper]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("paper", FILES)
def test_the_local_scale_reads_the_files_of_one_folder(paper: str, tmp_path: Path) -> None:
    plan = find_reproduction(paper, "local", _files(paper, tmp_path))
    assert {s.recipe.data.source for s in plan.studies.values()} == {str(tmp_path / name) for name in FILES[paper]}


def test_the_local_scale_and_its_folder_come_together(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--scale local needs --data DIR, a folder with tinyshakespeare/input.txt, tin"
    ):
        find_reproduction("spheretnorm", "local")
    with pytest.raises(InputError, match=r"only --scale local reads files of a folder; the scale is 'smoke'"):
        find_reproduction("spheretnorm", "smoke", tmp_path)
    (tmp_path / "tinystories").mkdir()
    (tmp_path / "tinystories" / "tiny_stories.txt").touch()
    with pytest.raises(InputError, match=r"no tinyshakespeare/input.txt in it"):
        find_reproduction("spheretnorm", "local", tmp_path)


def test_papers_and_scales_have_names() -> None:
    assert papers() == ["autonorm", "spheretnorm", "tapernorm"]
    with pytest.raises(UnknownNameError, match="did you mean 'tapernorm'"):
        find_reproduction("tapernrom", "smoke")
    with pytest.raises(UnknownNameError, match="unknown scale 'smok'; did you mean 'smoke'"):
        find_reproduction("tapernorm", "smok")


def test_settings_of_all_studies_change_together() -> None:
    plan = find_reproduction("autonorm", "smoke")
    other = changed_plan(plan, ["training.max_steps=7"], seeds=4)
    assert {s.recipe.training.max_steps for s in other.studies.values()} == {7}
    assert {len(s.seed_numbers) for s in other.studies.values()} == {4}
    assert [s.arms for s in other.studies.values()] == [s.arms for s in plan.studies.values()]
    with pytest.raises(ConfigError, match="unknown key 'max_step'"):
        changed_plan(plan, ["training.max_step=7"])


def test_a_plan_that_makes_no_sense() -> None:
    mapping = find_reproduction("tapernorm", "smoke").to_dict()
    mapping["studies"]["pretraining"]["decode"] = "taper"
    with pytest.raises(ConfigError, match="decode names 'taper', which is not among the arms"):
        Reproduction(**mapping)


def test_runs_that_many_processes_share_are_not_started_here(tmp_path: object) -> None:
    plan = find_reproduction("spheretnorm", "paper")
    with pytest.raises(InputError, match=r"shares a run among 8 processes"):
        run_reproduction(plan, tmp_path, None, None, command="")  # pyright: ignore


def test_counting_runs() -> None:
    plan = find_reproduction("spheretnorm", "small").studies["twelve-layers"]
    assert plan.runs == len(plan.arms) * 3 * 4
    assert plan.swept == {"training.learning_rate": ("3e-4", "6e-4", "1e-3", "2e-3")}


def test_files_of_the_user_are_missed_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = find_reproduction("autonorm", "paper")
    assert list(plan.studies)[-1] == "ptb-tagging"
    with pytest.raises(InputError, match=r"the study 'ptb-tagging' reads 'ptb', and there is no such file or folder"):
        run_reproduction(plan, tmp_path / "out", None, None, command="")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()
    assert list(changed_plan(plan, [], only=["sst2", "mnist"]).studies) == ["mnist", "sst2"]
    with pytest.raises(UnknownNameError, match=r"unknown study 'mnits'; did you mean 'mnist'"):
        changed_plan(plan, [], only=["sst2", "mnits"])
