"""Options that say who carries out the runs of a study."""

from __future__ import annotations

from typing import Annotated

import typer

EngineOption = Annotated[
    str, typer.Option("--executor", help="local (processes of this machine) or ray (a cluster; extra `ray`).")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster, or `auto`; default: one of this machine, for this study.")
]
GpusOption = Annotated[float, typer.Option("--gpus", min=0, help="Ray: accelerators per run; fractions share one.")]
