"""Arms that differ in what they name, and the plans made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normsmith.errors import InputError
from normsmith.studies import Recipe
from normsmith.studies.arms import arm_recipe, check_arms, split_arms
from normsmith.studies.runner import build_model, share_start_
from normsmith.studies.study import plan_study, read_seeds, read_sweep

# Arms


def test_commas_between_arms_and_inside_them() -> None:
    text = "rmsnorm,sphere:p=1,decay=none,taper,set:training.clip=0,training.beta1=0.8+dyt"
    expected = ["rmsnorm", "sphere:p=1,decay=none", "taper", "set:training.clip=0,training.beta1=0.8+dyt"]
    assert split_arms([text]) == expected
    assert split_arms([*expected]) == expected
    assert split_arms(["a, b"]) == ["a", "b"]


def differing(one: Any, two: Any, path: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        return {d for key in one.keys() | two.keys() for d in differing(one.get(key), two.get(key), f"{path}.{key}")}
    return set() if one == two else {path[1:]}


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("base", set()),
        ("layernorm:eps=1e-4", {"norm.kind", "norm.eps", "norm.bias", "norm.cast_first"}),
        ("rmsnorm:eps=1e-4", {"norm.eps"}),
        ("cay", {"connection.p"}),  # of the base's own sphere: decay and radius stay
        ("taper:scale_loss=0", {"schedule.scale_loss"}),  # warmup stays
        ("set:training.learning_rate=1e+3", {"training.learning_rate"}),
        ("rmsnorm:eps=1e-4+cay+set:model.hidden_size=24", {"norm.eps", "connection.p", "model.hidden_size"}),
        ("set:schedule=null", {"schedule"}),
        ("no-schedule", {"schedule"}),
    ],
)
def test_an_arm_changes_what_it_names_and_nothing_else(arm: str, expected: set[str], base: Recipe) -> None:
    connection = {"kind": "sphere", "p": 1, "decay": "none"}
    rich = base.changed(norm="rmsnorm", connection=connection, schedule={"kind": "taper", "warmup": 0.5})
    assert differing(rich.to_dict(), arm_recipe(rich, arm).to_dict()) == expected


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["rmsnorm"], "needs at least two arms"),
        (["rmsnorm", "layernrom"], "arm 'layernrom': unknown name 'layernrom'; did you mean 'layernorm'"),
        (["rmsnorm", "sphere:decai=none"], "unknown key 'decai'; did you mean 'decay'"),
        (["rmsnorm", "sphere:p=-1"], "arm 'sphere:p=-1': SphereConfig: p = '-1'"),
        (["rmsnorm", "sphere:p"], "'p' is no setting"),
        (["rmsnorm", "set"], "write set:training.learning_rate=2e-3"),
        (["rmsnorm", "set:training.learning_rte=1"], "did you mean 'learning_rate'"),
        (["rmsnorm", "set:training.max_steps=9"], "training.max_steps is shared by all arms"),
        (["rmsnorm", "set:data.max_documents=9"], "data.max_documents is shared by all arms"),
        (["rmsnorm", "set:seed=9"], "seed is shared"),
        (["rmsnorm", ""], "an arm is empty"),
        (["rmsnorm", "layernorm", "rmsnorm"], "'rmsnorm' and 'rmsnorm' are the same"),
        (["base", "rmsnorm"], "'base' and 'rmsnorm' are the same model and training"),
        (["proj", "sphere:p=1.0"], "'proj' and 'sphere:p=1.0' are the same"),
        (["sphere", "layernorm+sphere"], "'sphere' and 'layernorm.sphere' are the same"),  # a sphere has no norm inside
        (["sphere", "dyt+taper"], "arm 'dyt.taper': .*only RMSNorm and LayerNorm sites can be tapered"),
    ],
)
def test_arms_that_make_no_comparison(arms: list[str], message: str, base: Recipe) -> None:
    with pytest.raises(InputError, match=message):
        check_arms(base, arms)


def test_arms_start_from_the_same_weights_where_shapes_allow(base: Recipe) -> None:
    first = build_model(base, 280)
    same = build_model(arm_recipe(base, "sphere:p=2"), 280)
    theirs = dict(first.named_parameters())
    shared = [name for name, p in same.named_parameters() if name in theirs and p.ndim == 2]
    assert len(shared) >= 8
    assert all(torch.equal(p, theirs[name]) for name, p in same.named_parameters() if name in shared)
    # A first layer of another width shifts the random numbers of all later ones; sharing puts them right.
    wide = build_model(arm_recipe(base, "set:model.intermediate_size=70"), 280)
    key = "model.layers.0.mlp.down_proj.weight"
    attention = "model.layers.0.self_attn.o_proj.weight"
    with torch.no_grad():
        wide.get_parameter(attention).zero_()
    assert share_start_(wide, first) == len(shared) - 3 + 1  # all but the three of the MLP; the tied head counts too
    assert torch.equal(wide.get_parameter(attention), first.get_parameter(attention))
    assert wide.get_parameter(key).shape != first.get_parameter(key).shape
    other = build_model(arm_recipe(base, "set:model.initializer_range=0.3"), 280)
    before = other.get_parameter(attention).clone()
    assert share_start_(other, first) == 0
    assert torch.equal(other.get_parameter(attention), before)
    for rival in ("deepnorm", "ngpt"):  # their own initial spread is part of the method
        assert share_start_(build_model(arm_recipe(base, rival), 280), first) == 0
    assert share_start_(build_model(arm_recipe(base, "peri"), 280), first) == len(shared) + 1
    assert build_model(base.changed(seed=1), 280).get_parameter(attention).ne(first.get_parameter(attention)).any()


# Seeds, sweeps, plans


def test_seeds_and_sweeps_as_written() -> None:
    assert read_seeds("3", 7) == (7, 8, 9)
    assert read_seeds("3, 5", 0) == (3, 5)
    for text, message in [("0", "at least one"), ("1,2,1", "seed 1 is there twice"), ("x", "write a number"),
                          ("-1", "write a number"), ("1,", "write a number")]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            read_seeds(text, 0)
    assert read_sweep(["training.learning_rate=1e-3,2e-3", "training.clip=0"]) == {
        "training.learning_rate": ("1e-3", "2e-3"),
        "training.clip": ("0",),
    }
    for texts, message in [
        (["training.clip"], "write for example"),
        (["training.clip=1,"], "write for example"),
        (["training.clip=1,1"], "there twice"),
        (["training.clip=1", "training.clip=2"], "there twice"),
        (["training.batch_size=1,2"], "shared by all arms"),
    ]:
        with pytest.raises(InputError, match=message):
            read_sweep(texts)


def test_a_sweep_must_be_free_of_what_arms_name_and_brings_a_test_split(base: Recipe) -> None:
    sweep = {"training.learning_rate": ("1e-3",)}
    with pytest.raises(InputError, match="'set:training.learning_rate=1' changes training.learning_rate, which is swe"):
        plan_study(base, ["rmsnorm", "set:training.learning_rate=1"], [0], sweep)
    with pytest.raises(InputError, match="learning_rate = 'many'"):
        plan_study(base, ["rmsnorm", "layernorm"], [0], {"training.learning_rate": ("many",)})
    assert plan_study(base, ["rmsnorm", "layernorm"], [0], {}) == base
    assert plan_study(base, ["rmsnorm", "layernorm"], [0], sweep).data.test_fraction == 0.2
    evaluated = base.changed(training={**base.training.to_dict(), "evaluate_every": 2})
    best = evaluated.changed(training={**evaluated.training.to_dict(), "keep": "best"})
    assert plan_study(best, ["rmsnorm", "layernorm"], [0], {}).data.test_fraction == 0.2
    one = plan_study(evaluated, ["rmsnorm", "layernorm+set:training.keep=best"], [0], {})
    assert one.data.test_fraction == 0.2, "else its minimum over the run would stand beside the other's last value"
