"""SpinQuant 22: Gemma-2 could not absorb its norms, because half of them stand behind the sublayers.

Kind of fault: sandwich norms. Fold those that linear layers alone read, keep the others, and keep the function.
"""

from __future__ import annotations

import pytest
import torch

from normsmith.surgery import find_norms, fold_
from tests.tiny import output, tiny


@pytest.mark.usefixtures("wide_statistics")
@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_pre_norms_are_folded_and_sandwich_norms_kept(family: str) -> None:
    model = tiny(family).double()
    before = output(model)
    roles = {site.name: site.role for site in find_norms(model)}
    report = fold_(model, "affine")
    assert {roles[name] for name in report.absorbed} == ({"pre", "final"} if family == "gemma2" else {"final"})
    kept = {name for name, why in report.kept if why == "also feeds the residual stream"}
    assert kept == {name for name, role in roles.items() if role == "sandwich"}
    assert len(kept) == 4
    assert len(report.absorbed) == (5 if family == "gemma2" else 1)
    torch.testing.assert_close(output(model), before, rtol=1e-10, atol=1e-10)
