"""Wrong options of connections: one sentence that says what is wrong and what to write."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normsmith.connections import connection_config, create_connection
from normsmith.errors import ConfigError, InputError, NormsmithError


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "sphere", "p": 0}, "p = 0: input should be greater than 0"),
        ({"kind": "sphere", "p": -2}, "p = -2"),
        ({"kind": "sphere", "p": math.nan}, "p = nan"),
        ({"kind": "sphere", "p": "fast"}, "p = 'fast'"),
        ({"kind": "sphere", "alpha": -1}, "alpha = -1"),
        ({"kind": "sphere", "alpha": math.nan}, "alpha = nan"),
        ({"kind": "sphere", "alpha": math.inf}, "alpha = inf"),
        ({"kind": "sphere", "decay": -0.5}, "decay = -0.5: input should be 'sqrt', 'harmonic', 'linear' or 'none'"),
        ({"kind": "sphere", "step": "tanh"}, "step = 'tanh': input should be 'softplus', 'sigmoid' or 'raw'"),
        ({"kind": "sphere", "count": "layer"}, "count = 'layer': input should be 'sublayer' or 'block'"),
        ({"kind": "sphere", "final_norm": "rms"}, "final_norm = 'rms': input should be 'gain' or 'none'"),
        ({"kind": "sphere", "step": "sigmoid", "alpha": 1}, "a sigmoid step starts below 1; write for example alpha"),
        ({"kind": "sphere", "p": 2, "clamp": 0.5}, "only the exponential map is clamped; write p: inf or no clamp"),
        ({"kind": "geo", "clamp": -1}, "clamp = -1"),
        ({"kind": "geo", "clamp": 4}, "clamp = 4"),
        ({"kind": "geo", "learn_p": True}, "learn_p starts from a finite p; write for example p: 2"),
        ({"kind": "sphere", "perchannel": True}, "unknown key 'perchannel'; did you mean 'per_channel'"),
        ({"kind": "sphere", "decya": "sqrt"}, "unknown key 'decya'; did you mean 'decay'"),
        ({"kind": "mixln", "fraction": 1.5}, "fraction = 1.5: input should be less than or equal to 1"),
        ({"kind": "mixln", "fraction": -0.1}, "fraction = -0.1: input should be greater than or equal to 0"),
        ({"kind": "mixln", "fraction": math.nan}, "fraction = nan"),
        ({"kind": "mixln", "fractoin": 0.5}, "unknown key 'fractoin'; did you mean 'fraction'"),
        ({"kind": "hybridnorm", "stars": True}, "unknown key 'stars'; did you mean 'star'"),
        ({"kind": "peri", "embeding_norm": False}, "unknown key 'embeding_norm'; did you mean 'embedding_norm'"),
        ({"kind": "ngpt", "alpha": 0}, "alpha = 0"),
        ({"kind": "pre", "float23": True}, "unknown key 'float23'; did you mean 'float32'"),
        ({"kind": "peryln"}, "unknown connection 'peryln'"),
        ({"kind": "sandwhich"}, "unknown connection 'sandwhich'; did you mean 'sandwich'"),
        ({"kind": "geonrom"}, "unknown connection 'geonrom'; did you mean 'geonorm'"),
        ({"p": 2}, "the key 'kind' is missing"),
    ],
)
def test_wrong_options(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(NormsmithError) as caught:
        connection_config(spec)
    assert isinstance(caught.value, ConfigError | InputError)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("width", "index", "total"), [(0, 1, 2), (-3, 1, 2), (8, 0, 2), (8, 3, 2)])
def test_wrong_places(width: int, index: int, total: int) -> None:
    with pytest.raises(InputError, match=r"(width|index) must be .*, got -?\d+"):
        create_connection("pre", width, index, total)


@pytest.mark.parametrize(("fraction", "blocks", "post"), [(0, 4, 0), (0.25, 12, 3), (0.25, 3, 0), (0.29, 100, 29),
                                                          (0.0625, 32, 2), (1, 5, 5), (0.999, 5, 4)])  # fmt: skip
def test_the_number_of_post_norm_blocks(fraction: float, blocks: int, post: int) -> None:
    roles = [create_connection("mixln", 4, i, 2 * blocks, fraction=fraction).roles() for i in range(1, 2 * blocks + 1)]
    assert roles == [{"norm": "post"}] * 2 * post + [{"norm": "pre"}] * 2 * (blocks - post)
