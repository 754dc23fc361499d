"""Who carries out the runs of a study, by name."""

from __future__ import annotations

from normsmith.errors import InputError, UnknownNameError
from normsmith.studies.execute import Executor, Here
from normsmith.studies.processes import Processes, cores

EXECUTORS = ("local", "ray")


def make_executor(name: str, jobs: int = 1, address: str | None = None, gpus: float = 0.0) -> Executor:
    """The executor called `name`.

    Args:
        name: `local` (this process for one job, processes of their own for more) or `ray`.
        jobs: runs at once on this machine; with Ray each run gets ⌊cores / jobs⌋ cores, wherever it is.
        address: of a Ray cluster.
        gpus: accelerators per run, with Ray.

    Raises:
        InputError: an unknown name, or an option of the other executor.
    """
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    if name == "ray":
        from normsmith.studies.cluster import RayExecutor

        return RayExecutor(address, max(1, cores() // jobs), gpus)
    if address is not None or gpus:
        raise InputError("--address and --gpus belong to --executor ray")
    return Here() if jobs == 1 else Processes(jobs)
