import math
import re
from pathlib import Path

import pytest

from normsmith.errors import ConfigError, InputError
from normsmith.report import Arm, Point, Results, markdown_table


def test_saved_results_load_equal(results: Results, tmp_path: Path) -> None:
    path = results.save(tmp_path / "new folder" / "results.json")
    assert Results.load(path) == results
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_values_that_are_not_finite_survive(results: Results, tmp_path: Path) -> None:
    point = Point(step=1, loss=math.inf, validation_loss=-math.inf, gradient_norm=math.nan)
    arm = results.arms[0].model_copy(
        update={"perplexity": math.inf, "curve": (point,), "stream_scale": (1.0, math.nan)}
    )
    loaded = Results.load(results.model_copy(update={"arms": (arm,)}).save(tmp_path / "r.json")).arms[0]
    assert loaded.perplexity == math.inf
    assert loaded.curve[0].loss == math.inf
    assert loaded.curve[0].validation_loss == -math.inf
    assert math.isnan(loaded.curve[0].gradient_norm or 0)
    assert math.isnan(loaded.stream_scale[1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"title": "x", "arms": [{"na', r"not valid JSON at line 1, column \d+ .*complete\?"),
        ("", "not valid JSON at line 1, column 1"),
        ("[1, 2]", "found a JSON list"),
        ('{"titel": "x"}', "unknown key 'titel'; did you mean 'title'"),
        ('{"title": "x"}', "the key 'command' is missing"),
        ('{"title": "x", "command": "", "summary": "", "created": "", "seed": "many"}', "seed = 'many'"),
    ],
)
def test_a_wrong_file_is_named_with_its_problem(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"{re.escape(str(path))}: .*{problem}"):
        Results.load(path)


def test_files_that_cannot_be_read_or_written_are_named(results: Results, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.json: no such file"):
        Results.load(tmp_path / "nothing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="binary: cannot be read as text"):
        Results.load(tmp_path / "binary")
    with pytest.raises(InputError, match="cannot be written"):
        results.save(tmp_path)


def test_two_arms_of_one_name_are_refused(results: Results) -> None:
    values = results.plain()
    with pytest.raises(ConfigError, match="two arms are named 'rmsnorm'"):
        Results.model_validate(values | {"arms": [values["arms"][0]] * 2})


def test_markdown_table(results: Results) -> None:
    lines = markdown_table(results).splitlines()
    assert lines[0] == ("| Arm | Validation loss | Perplexity | Gap | Fold error | Decode ratio | Parameters | Time |")
    assert lines[3] == "| Internal taper | 3.4497 | 31.49 | +0.54 % | 3.4e-06 | 0.98× | 6,822,400 | 7 min 12 s |"
    assert lines[4] == "| Sphere, p = 1 | 3.4088 | 30.23 | −0.65 % | – | – | 6,819,328 | 6 min 45 s |"
    assert len(lines) == 5


def test_markdown_says_what_is_missing_and_escapes(results: Results) -> None:
    arms = (
        Arm(name="a", label="a|b <i>\n*x*", parameters=1, seconds=7500, validation_loss=math.nan, diverged=True),
        Arm(name="c", label="c", parameters=1, seconds=0.25, validation_loss=math.nan, perplexity=2.0),
    )
    lines = markdown_table(results.model_copy(update={"arms": arms, "decode": ()})).splitlines()
    assert lines[0] == "| Arm | Validation loss | Perplexity | Gap | Parameters | Time |"
    assert lines[2] == r"| a\|b &lt;i&gt; \*x\* | diverged | diverged | diverged | 1 | 2 h 05 min |"
    assert lines[3] == "| c | not finite | 2.00 | – | 1 | 0.2 s |"
