import base64
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from normsmith.errors import InputError
from normsmith.report import Arm, Results, write_report


class Page(HTMLParser):
    """Elements with their attributes, the visible text, and what each script holds."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def alts(self) -> list[str]:
        return [image["alt"] or "" for image in self.all("img")]


def written(results: Results, tmp_path: Path) -> Page:
    return Page(write_report(results, tmp_path / "report.html"))


def test_the_page_holds_all_that_was_found(results: Results, tmp_path: Path) -> None:
    page = written(results, tmp_path)
    for text in (results.title, results.summary, results.command, *results.notes, "3.4497", "+0.54 %", "3.4e-06"):
        assert text in page.text
    assert str(results.data["sha256"]) in page.text
    assert "4,194,304" in page.text
    assert "learning_rate: 0.001" in page.text
    assert "kind: tapered_rmsnorm" in page.text
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert len(page.source.encode()) < 1_000_000


def test_the_page_needs_nothing_else(results: Results, tmp_path: Path) -> None:
    page = written(results, tmp_path)
    links = [value for _, a in page.elements for key in ("src", "href", "srcset") if (value := a.get(key))]
    assert len(links) == 9  # four pictures in two themes, and the empty icon
    assert all(link.startswith("data:") for link in links)
    assert "url(" not in page.source
    assert "@import" not in page.source
    for link in links[1:]:
        kind, _, data = link.partition(";base64,")
        assert kind == "data:image/svg+xml"
        picture = ElementTree.fromstring(base64.b64decode(data))
        references = [v for e in picture.iter() for k, v in e.attrib.items() if k.endswith(("href", "src"))]
        assert all(reference.startswith("#") for reference in references)


def test_alternative_texts_state_the_findings(results: Results, tmp_path: Path) -> None:
    loss, gate, stream, decode = written(results, tmp_path).alts()
    assert loss.endswith("RMSNorm (pre): 3.431; Internal taper: 3.450; Sphere, p = 1: 3.409.")
    assert "Internal taper: the gate goes from 1.00 to 0.00 and is settled from step 1,600" in gate
    assert "log scale" in stream
    assert "RMSNorm (pre): from 0.02 at the entry to 3.4 at the end" in stream
    assert decode.endswith(
        "RMSNorm (pre): 1,112 (1.00×); Internal taper: 1,087 (0.98×); "
        "Internal taper, folded: 1,288 (1.16×); Never had norms: 1,291 (1.16×)."
    )


def test_captions_name_the_best(results: Results, tmp_path: Path) -> None:
    page = written(results, tmp_path)
    assert len(page.all("figcaption")) == 4
    assert "Sphere, p = 1 ends lowest, at a validation loss of 3.409, 0.022 below RMSNorm (pre)." in page.text
    assert "Never had norms is fastest: 1,291 tokens/s, 1.16 times RMSNorm (pre)." in page.text


def test_markup_in_the_results_stays_text(results: Results, tmp_path: Path) -> None:
    attack = "</pre><script>alert('x')</script><img src=http://example.org/x \" onerror='y'>"
    clean = written(results, tmp_path)
    arm = results.arms[0].model_copy(update={"label": attack, "description": attack, "config": {attack: attack}})
    row = results.decode[0].model_copy(update={"label": attack})
    changed = {
        "title": attack,
        "summary": attack,
        "command": attack,
        "created": attack,
        "recipe": {"key": attack},
        "data": {attack: attack},
        "environment": {attack: attack},
        "notes": (attack,),
        "arms": (arm, *results.arms[1:]),
        "decode": (row, *results.decode[1:]),
    }
    page = written(results.model_copy(update=changed), tmp_path)
    assert page.scripts == clean.scripts
    assert len(page.all("img")) == len(clean.all("img"))
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert page.text.count("alert('x')") >= len(changed)


def test_pictures_without_data_are_left_out(results: Results, tmp_path: Path) -> None:
    arms = tuple(
        arm.model_copy(
            update={"curve": tuple(p.model_copy(update={"gate": None}) for p in arm.curve), "stream_scale": ()}
        )
        for arm in results.arms
    )
    page = written(results.model_copy(update={"arms": arms, "decode": ()}), tmp_path)
    assert [figure["id"] for figure in page.all("figure")] == ["picture-loss"]
    assert "Decode measurements" not in page.text
    empty = {"arms": (), "decode": (), "recipe": {}, "data": {}, "environment": {}, "notes": ()}
    page = written(results.model_copy(update=empty), tmp_path)
    assert not page.all("figure")
    assert not page.all("table")
    assert results.command in page.text


def test_a_diverged_arm_does_not_break_the_page(results: Results, tmp_path: Path) -> None:
    base = results.arms[0]
    losses = [point.loss or 0 for point in base.curve[:20]] + [1e12, math.inf] + [math.nan] * 18
    curve = tuple(
        point.model_copy(update={"loss": loss, "validation_loss": math.nan, "gate": math.nan})
        for point, loss in zip(base.curve, losses, strict=True)
    )
    lost = base.model_copy(
        update={
            "name": "lost",
            "label": "Post-LN",
            "diverged": True,
            "validation_loss": math.nan,
            "perplexity": math.inf,
            "fold_error": math.inf,
            "curve": curve,
            "stream_scale": (1.0, math.inf),
        }
    )
    row = results.decode[0].model_copy(update={"low": math.nan, "ratio": math.inf})
    page = written(results.model_copy(update={"arms": (*results.arms, lost), "decode": (row,)}), tmp_path)
    assert "Post-LN: diverged" in page.alts()[0]
    assert "Post-LN: from 1 at the entry to not finite at the end" in page.alts()[2]
    assert "A cross marks where an arm diverged. Values above 9.0" in page.text
    assert "not finite" in page.text
    alone = page_of_one(results, lost, tmp_path)
    assert "No arm ended with a finite validation loss." in alone.text


def page_of_one(results: Results, arm: Arm, tmp_path: Path) -> Page:
    return written(results.model_copy(update={"arms": (arm,), "decode": ()}), tmp_path)


@pytest.mark.parametrize("label", ["$x_{$", "_hidden", "bell\x07", "正規化なし 🙂", "نرم", "", "long " * 40])
def test_any_label_can_be_drawn(results: Results, tmp_path: Path, label: str) -> None:
    page = page_of_one(results, results.arms[0].model_copy(update={"label": label}), tmp_path)
    for source in page.all("img"):
        ElementTree.fromstring(base64.b64decode((source["src"] or "").partition(";base64,")[2]))


def test_without_validation_the_loss_is_called_training_loss(results: Results, tmp_path: Path) -> None:
    curve = tuple(point.model_copy(update={"validation_loss": None}) for point in results.arms[0].curve)
    arm = results.arms[0].model_copy(update={"curve": curve, "validation_loss": None})
    assert "Final training loss: RMSNorm (pre): 3." in page_of_one(results, arm, tmp_path).alts()[0]


def test_long_curves_keep_the_page_small_and_their_last_point(results: Results, tmp_path: Path) -> None:
    arms = tuple(
        arm.model_copy(update={"curve": tuple(arm.curve[i % 40].model_copy(update={"step": i}) for i in range(20_001))})
        for arm in results.arms
    )
    page = written(results.model_copy(update={"arms": arms}), tmp_path)
    assert "up to step 20,000" in page.alts()[0]
    assert len(page.source.encode()) < 1_000_000


def test_equal_results_give_equal_bytes_whatever_matplotlib_is_set_to(results: Results, tmp_path: Path) -> None:
    first = write_report(results, tmp_path / "a.html").read_bytes()
    saved = results.save(tmp_path / "results.json")
    code = (
        "import sys; from normsmith.report import *; assert 'matplotlib' not in sys.modules;"
        "import matplotlib as m; m.rcParams['lines.linewidth'] = 9;"
        "write_report(Results.load(sys.argv[1]), sys.argv[2]);"
        "assert m.rcParams['lines.linewidth'] == 9 and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(saved), str(tmp_path / "b.html")], check=True)
    assert (tmp_path / "b.html").read_bytes() == first


def test_a_page_that_cannot_be_written_is_named(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match=r"report\.html: cannot be written"):
        write_report(results, tmp_path / "file" / "report.html")
