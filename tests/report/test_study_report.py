"""Reports over studies: the same numbers on the page, in Markdown and in CSV; damage is said, never averaged in."""

from __future__ import annotations

import base64
import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from normsmith.errors import InputError
from normsmith.report.account import read_account
from normsmith.report.study_page import write_study_report
from normsmith.studies.study import load_study
from tests.report.synthetic import make
from tests.report.test_report_page import Page

ATTACK = "</script><script>alert('x')</script><img src=http://example.org/x onerror=alert(1)>"


def page(folder: Path, *others: Path) -> Page:
    output = folder / "report.html"
    write_study_report([folder, *others], output)
    return Page(output)


def markdown(folder: Path) -> str:
    write_study_report([folder], folder / "report.md")
    return (folder / "report.md").read_text(encoding="utf-8")


def table(folder: Path) -> list[dict[str, str]]:
    write_study_report([folder], folder / "report.csv")
    return list(csv.DictReader((folder / "report.csv").read_text(encoding="utf-8").splitlines()))


# Numbers


def test_the_numbers_are_those_of_the_run_folders_everywhere(study: Path) -> None:
    losses = {
        arm: [json.loads((study / arm / str(s) / "result.json").read_text())["validation_loss"] for s in range(3)]
        for arm in ("rmsnorm", "dyt")
    }
    difference = np.array(losses["dyt"]) - np.array(losses["rmsnorm"])
    low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
    p = stats.ttest_rel(losses["dyt"], losses["rmsnorm"]).pvalue
    row = next(row for row in table(study) if row["arm"] == "dyt")
    assert float(row["mean"]) == pytest.approx(np.mean(losses["dyt"]), abs=1e-12)
    assert [float(row[f"difference_{k}"]) for k in ("mean", "low", "high")] == pytest.approx(
        [difference.mean(), low, high]
    )
    assert float(row["p_t"]) == pytest.approx(p)
    told = f"{difference.mean():+.4f} [{low:+.4f}, {high:+.4f}]".replace("-", "−")
    html, text = page(study), markdown(study)
    assert told in html.text
    assert told.replace("[", "\\[").replace("]", "\\]") in text
    assert f"{float(row['difference_bootstrap_low']):+.4f}".replace("-", "−") in html.text
    for number in (f"{float(row['difference_effect']):+.2f}".replace("-", "−"), "0.250", row["needed_seeds"]):
        assert number in html.text
        assert number in text
    # Every cell of every table of the page is in the Markdown too.
    for cell in re.findall(r'<td class="number[^"]*" data-value="[^"]+">([^<]+)</td>', html.source):
        assert cell.strip().replace("[", "\\[").replace("]", "\\]") in text, cell


def test_the_test_split_is_reported_and_stability_says_what_diverged(swept: Path) -> None:
    html = page(swept)
    assert "Test loss [95 %]" in html.text
    stability = next(alt for alt in html.alts() if "against training.learning_rate" in alt)
    assert "training.learning_rate=1e-1: 3 diverged" in stability
    assert "rmsnorm: training.learning_rate=1e-3: 3." in stability
    assert stability.count("diverged") == 2
    assert "Runs that diverged: layernorm: 3; dyt: 3." in html.text
    assert "are not finite since step 10" in html.text
    assert "Runs finished: 21 of 27 (6 diverged)." in html.text


def test_a_sweep_is_shown_at_each_arms_best_and_at_the_recipes_own_point(swept: Path, tmp_path: Path) -> None:
    losses = {
        arm: [json.loads(path.read_text())["test_loss"] for path in sorted(swept.glob(f"{arm}/*=1e-2/*/result.json"))]
        for arm in ("rmsnorm", "dyt")
    }
    html, text = page(swept), markdown(swept)
    heading = "All arms at training.learning_rate=1e-2"
    assert heading in html.text
    section = text.partition(heading.replace("_", "\\_"))[2].partition("## ")[0]
    for arm, values in losses.items():
        assert values
        assert f"{np.mean(values):.4f}" in next(line for line in section.splitlines() if line.startswith(f"| {arm} "))
    elsewhere = make(tmp_path / "elsewhere", sweep={"training.learning_rate": ("1e-3", "1e-1")})
    assert "All arms at" not in markdown(elsewhere)


def test_a_diverged_run_of_the_point_shown_is_drawn_and_not_averaged(tmp_path: Path) -> None:
    folder = make(tmp_path / "st", diverge=lambda cell: (cell.arm, cell.seed) == ("dyt", 1))
    html = page(folder)
    assert "Crosses: where runs diverged (1)." in html.text
    assert "no verdict: 1 of its 3 runs diverged" in html.text or "(1 of its 3 runs diverged)" in html.text
    row = next(row for row in table(folder) if row["arm"] == "dyt")
    assert (row["finished"], row["diverged"]) == ("2", "1")


def test_what_was_logged_appears_without_being_known(study: Path) -> None:
    html = page(study)
    figures = [figure["id"] for figure in html.all("figure")]
    assert {"picture-key-novel_quantity", "picture-key-weights-members", "picture-key-c-members"} <= {
        str(name).replace("novel-quantity", "novel_quantity") for name in figures
    }
    novel = next(alt for alt in html.alts() if alt.startswith("Novel quantity"))
    assert novel.endswith("layernorm: 1 → 20; dyt: 1 → 20.")
    scale = next(alt for alt in html.alts() if alt.startswith("Fixed scale c by layer"))
    assert scale.endswith("layernorm: from 1.01 to 2.11; dyt: from 1.01 to 2.11.")
    assert "rmsnorm" not in novel
    assert figures.index("picture-key-grad-norm") > max(figures.index(f) for f in figures if "novel" in str(f))


def test_panels_of_runs_become_pictures(study: Path) -> None:
    panels = [
        {"title": "Gate weights", "x": ["embed", "layers.0"], "series": {"LN": [0.2, 0.4], "DyT": [0.8, None]}},
        {"title": "Update angle", "x": [1, 2, 3], "series": {"angle": [0.1, 0.2, 0.3]}, "unit": "rad"},
    ]
    for seed in range(3):
        (study / "dyt" / str(seed) / "diagnostics.json").write_text(json.dumps(panels))
    (study / "layernorm/0/diagnostics.json").write_text('[{"title": "x", "x": [1], "series": {"a": [1, 2]}}]')
    html = page(study)
    assert (
        "Gate weights: LN along layer, mean over seeds, smallest and largest value. dyt: from 0.2 to 0.4."
        in html.alts()
    )
    assert any(alt.startswith("Update angle along layer") for alt in html.alts())
    assert "diagnostics.json is left out: entry 1: Panel: the series 'a' has 2 values for 1 places" in html.text


def test_weights_that_add_up_to_one_have_a_linear_axis(study: Path) -> None:
    (study / "dyt/0/diagnostics.json").write_text(
        json.dumps(
            [
                {"title": "Gate weights", "x": [1, 2], "series": {"LN": [0.002, 0.7], "DyT": [0.998, 0.3]}},
                {"title": "Sizes", "x": [1, 2], "series": {"LN": [0.002, 0.7], "DyT": [1, 2]}},
            ]
        )
    )
    html = page(study)
    ticks = {}
    for title in ("Gate weights: LN", "Sizes: LN"):
        image = next(i for i in html.all("img") if str(i["alt"]).startswith(f"{title} along"))
        picture = ElementTree.fromstring(base64.b64decode(str(image["src"]).partition(";base64,")[2]))
        ticks[title] = {e.text for e in picture.iter() if e.tag.endswith("text")}
    assert "0.4" in ticks["Gate weights: LN"]
    assert "0.4" not in ticks["Sizes: LN"]


def test_decode_speeds_of_several_batches_are_told_apart(study: Path) -> None:
    rows = [
        {"name": name, "batch": batch, "median": speed, "low": speed, "high": speed, "ratio": ratio}
        for batch, scale in ((1, 100.0), (4, 300.0))
        for name, speed, ratio in (("baseline", scale, 1.0), ("folded", scale * 1.2, 1.2 + batch / 100))
    ]
    (study / "decode.json").write_text(json.dumps(rows))
    html = page(study)
    assert "folded, batch 4 gains most: 1.24 times the baseline of the same batch." in html.text
    assert "ratios: relative to baseline of the same batch" in html.text
    (study / "decode.json").write_text(json.dumps(rows[:2]))
    assert "folded is fastest: 120 tokens/s, 1.21 times baseline." in page(study).text


def test_published_figures_stand_beside_ours_and_are_marked(study: Path) -> None:
    figures = [
        {
            "arm": "dyt",
            "metric": "validation loss",
            "value": 2.97,
            "unit": "nats",
            "source": "arXiv 2503.10622, table 9",
        },
        {"arm": "derf", "metric": "Validation loss", "value": 2.94, "source": "arXiv 2512.10938"},
        {"arm": "dyt", "metric": "accuracy", "value": 82.5, "unit": "%", "source": "arXiv 2503.10622, table 1"},
    ]
    (study / "published.json").write_text(json.dumps(figures))
    html, text = page(study), markdown(study)
    cells = re.findall(r'<td class="number[^"]* published"[^>]*>([^<]*)<', html.source)
    assert [cell.strip() for cell in cells] == ["–", "–", "2.97", "2.97 nats", "2.94", "82.5 %"]
    assert html.source.count('<em class="badge">published</em>') == 2
    assert "not in this study" in html.text
    assert "arXiv 2503.10622, table 9" in html.text
    assert "| Validation loss (nats) (published) |" in text
    row = next(row for row in table(study) if row["arm"] == "dyt")
    assert (row["published validation loss"], row["published accuracy"]) == ("2.97", "82.5")
    assert float(row["mean"]) != 2.97


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "expected a JSON list, found dict"),
        ("[3]", "entry 1: expected an object"),
        ('[{"arm": "dyt", "metric": "loss", "value": 1}]', "entry 1: Published: the key 'source' is missing"),
        ('[{"arm": "dyt", "metric": "loss", "value": NaN, "source": "x"}]', "entry 1: .*no finite number"),
        (
            '[{"arm": "dyt", "metrik": "loss", "value": 1, "source": "x"}]',
            "unknown key 'metrik'; did you mean 'metric'",
        ),
    ],
)
def test_damaged_published_figures_are_refused(content: str, message: str, study: Path) -> None:
    (study / "published.json").write_text(content)
    with pytest.raises(InputError, match=f"published.json: .*{message}"):
        markdown(study)


def test_decode_speeds_and_further_results_are_shown(study: Path) -> None:
    speeds = [{"name": "baseline", "median": 200.0, "low": 190.0, "high": 205.0, "ratio": 1.0, "more": 3}]
    (study / "decode.json").write_text(json.dumps([*speeds, {**speeds[0], "name": "folded", "ratio": 1.17}]))
    for seed in range(3):
        path = study / "dyt" / str(seed) / "result.json"
        more = {
            "peak_memory_bytes": 3 * 2**20,
            "metric": "accuracy",
            "validation_metric": 0.5 + seed,
            "better": "higher",
        }
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    html = page(study)
    assert "1.17×" in html.text
    assert "3.0 MiB" in html.text
    assert "Validation accuracy" in html.text
    row = next(row for row in table(study) if row["arm"] == "dyt")
    assert (row["peak_memory_bytes"], row["measured validation accuracy"]) == ("3145728.0", "1.5")


def test_where_runs_differ_in_their_environment_it_is_said(study: Path) -> None:
    assert "Runs differ" not in markdown(study)
    path = study / "dyt/1/environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch threads": "1"}))
    html, text = page(study), markdown(study)
    for written in (html.text, text):
        assert "Runs differ in their environment" in written
        assert "2 (8 runs); 1 (1 runs)" in written
    assert "- torch threads" not in text


# The page


def test_markup_in_names_stays_text_and_nothing_is_loaded(study: Path) -> None:
    figures = [{"arm": ATTACK, "metric": ATTACK, "value": 1, "unit": ATTACK, "source": ATTACK, "note": ATTACK}]
    (study / "published.json").write_text(json.dumps(figures))
    (study / "decode.json").write_text(json.dumps([{"name": ATTACK, "median": 1, "low": 1, "high": 1, "ratio": 1}]))
    panel = {"title": ATTACK, "x": [ATTACK, "b"], "series": {ATTACK: [1, 2]}, "unit": ATTACK, "x_label": ATTACK}
    (study / "dyt/0/diagnostics.json").write_text(json.dumps([panel]))
    path = study / "dyt/1/metrics.jsonl"
    path.write_text(path.read_text().replace("novel_quantity", ATTACK.replace('"', "")))
    mapping = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**mapping, "command": ATTACK}))
    environment = study / "dyt/2/environment.json"
    environment.write_text(json.dumps({**json.loads(environment.read_text()), ATTACK: ATTACK}))
    html = page(study)
    assert len(html.scripts) == 1
    assert "alert" not in html.scripts[0]
    assert not any("onerror" in attributes for _, attributes in html.elements)
    assert html.text.count("alert('x')") >= 8
    outside = re.sub(r"^```.*?^```", "", markdown(study), flags=re.DOTALL | re.MULTILINE)
    assert "alert" in outside
    assert "<script>" not in outside
    links = [value for _, a in html.elements for key in ("src", "href", "srcset") if (value := a.get(key))]
    assert all(link.startswith("data:") for link in links)
    for link in links[1:]:
        ElementTree.fromstring(base64.b64decode(link.partition(";base64,")[2]))
    assert "url(" not in html.source
    assert all(image.get("alt") for image in html.all("img"))


def test_arm_names_with_markup_are_escaped(tmp_path: Path) -> None:
    arm = "set:model.hidden_act='<script>alert(1)</script>'"
    # No such activation exists, so the name is put where the page reads it.
    folder = make(tmp_path / "st")
    read_account(folder)
    for name in ("study.json", ".recipes.json"):
        (folder / name).write_text((folder / name).read_text().replace('"dyt"', json.dumps(arm)))
    known = json.loads((folder / ".recipes.json").read_text())
    from normsmith.studies.checked import _plan_hash  # pyright: ignore[reportPrivateUsage]

    known["plan"] = _plan_hash(json.loads((folder / "study.json").read_text()))
    (folder / ".recipes.json").write_text(json.dumps(known))
    html = page(folder)
    assert arm in html.text
    assert len(html.scripts) == 1
    assert "&lt;script&gt;" in markdown(folder)


def test_several_studies_share_a_page_and_keep_their_names_apart(study: Path, swept: Path) -> None:
    html = page(study, swept)
    ids = [a["id"] for _, a in html.elements if a.get("id")]
    assert len(ids) == len(set(ids))
    assert [a["href"] for a in html.all("a")] == ["#s1-study", "#s2-study"]
    rows = csv.DictReader(write_rows(study, swept))
    assert [(row["study"], row["metric"]) for row in rows][2:4] == [("st", "validation loss"), ("swept", "test loss")]


def write_rows(*folders: Path) -> list[str]:
    output = folders[0] / "both.csv"
    write_study_report(folders, output)
    return output.read_text(encoding="utf-8").splitlines()


def test_each_run_has_its_command(study: Path) -> None:
    html = page(study)
    assert f"normsmith train {study}/rmsnorm/1/recipe.yaml -o runs/again/rmsnorm/1" in html.text
    assert f"normsmith train {study}/dyt/1/recipe.yaml --start {study}/rmsnorm/1/recipe.yaml -o" in html.text
    assert load_study(study).plan.command in html.text
    assert "not set → dyt(alpha=0.5, " in html.text
