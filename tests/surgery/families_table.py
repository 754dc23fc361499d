"""docs/families.md from what the tests found."""

from __future__ import annotations

from collections import Counter

from normsmith.surgery import FoldReport
from tests.surgery import study
from tests.surgery.families import FAMILIES

_HEAD = """# Model families

What surgery does to each family, written by the test run (`make docs-families`); a test fails when it no longer holds.
The models are tiny ones of the real classes, with gains of both signs, shifts, and attention that is not uniform; all
results are compared with a float64 copy on an input that was not the traced one. Nothing here is a list that the code
reads: another family is found, swapped and folded by the same probing and tracing.

- **Norms**: how many of which role; `n` is the normalised input. Two layers each; encoder-decoders have two of each.
  Roles: `pre`, only linear layers read it; `final`, the output head reads it or a model without head returns it;
  `post`, linear layers and the residual stream read it; `sandwich`, on a sublayer's output before it joins the stream;
  `qk`, on queries or keys; `embedding`, before the first sublayer; `other`. `where=` and `--where` take these words.
- **Swapped**: norms that the plain `layernorm` or `rmsnorm` takes over with the same outputs (is one: normsmith's own);
  `restore_` is exact.
- **Affine**: norms whose gain and shift `fold_(model, "affine")` moves into their readers.
- **Full**: norms that `fold_(model)` removes once they are linear (tapered to the end); an arrow names the roles that
  go into the linear layer before them.
- **Left alone**: the norms of neither, with the reason.
- **Reloads**: whether `save_pretrained` after the affine fold loads again in the original class. It does not where a
  shift needs a bias that this class does not have; the other sites can be folded alone with `where=`. –: nothing to
  fold, or no `save_pretrained`.

"""
_COLUMNS = ("Family", "Norms", "Swapped", "Affine", "Full", "Left alone", "Reloads")


def table() -> str:
    """The whole document."""
    rows = [_row(name) for name in FAMILIES]
    lines = [" | ".join(_COLUMNS), "|".join(["---"] * len(_COLUMNS)), *(" | ".join(row) for row in rows)]
    return _HEAD + "\n".join(f"| {line} |" if i != 1 else f"|{line}|" for i, line in enumerate(lines)) + "\n"


def _row(name: str) -> tuple[str, ...]:
    family, sites = FAMILIES[name], study.found(name)
    total = len(sites)
    roles = ", ".join(f"{count} {role}" for role, count in Counter(s.role for s in sites).items())
    report, affine, full = study.swapped(name)[0], study.affine(name), study.full(name)
    exact = [row for row in report.swapped if row[3] is not None and row[3] <= 1e-6]
    ours = [reason for _, reason in report.kept if reason.startswith("already")]
    return (
        family.title,
        f"{roles}; {family.kind} {_formula(name)}",
        f"{len(exact) + len(ours)}/{total}" + (" (is one)" if ours else ""),
        f"{_count(affine.report)}/{total}" + (", head untied" if affine.report and affine.report.untied else ""),
        f"{_count(full.report)}/{total}" + _into_producers(name),
        _left_alone(name),
        _reloads(name),
    )


def _formula(name: str) -> str:
    shift = any(site.facts.bias for site in study.found(name))
    return f"`{FAMILIES[name].formula}{' + b' if shift else ''}`"


def _count(report: FoldReport | None) -> int:
    return 0 if report is None else len(report.removed) + len(report.absorbed)


def _into_producers(name: str) -> str:
    report = study.full(name).report
    removed = () if report is None else report.removed
    roles = dict.fromkeys(s.role for s in study.found(name) if s.name in removed and s.blocked)
    return f" (← {', '.join(roles)})" if roles else ""


def _left_alone(name: str) -> str:
    sites = {site.name: site for site in study.found(name)}
    reasons: dict[str, list[str]] = {}
    for mode, change in (("affine", study.affine(name)), ("full", study.full(name))):
        done = () if change.report is None else (*change.report.absorbed, *change.report.removed)
        kept = [s for s in sites.values() if s.name not in done]
        why = {} if change.report is None else dict(change.report.kept)
        # A fold that was refused as a whole says so for every site; the site knows its own reason.
        words = Counter((s.role, why.get(s.name) or s.blocked or "has neither gain nor shift") for s in kept)
        for (role, reason), count in words.items():
            reasons.setdefault(f"{count} {role}: {reason}", []).append(mode)
    return "; ".join(text if len(modes) == 2 else f"{text} ({modes[0]} only)" for text, modes in reasons.items()) or "–"


def _reloads(name: str) -> str:
    family, biases = FAMILIES[name], study.affine(name).new_biases
    if family.example is not None or study.affine(name).report is None:
        return "–"
    if not biases or family.reloads:
        return "yes"
    text = f"new bias: {', '.join(biases)}"
    return f"{text}; the others yes" if study.can_reload(name) else text
