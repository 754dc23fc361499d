"""One rank of two: whole recipes, a run that is continued, and errors of one rank alone. Run by torchrun."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from normsmith import ranks
from normsmith.data import TextData, load_shared
from normsmith.errors import InputError, NormsmithError
from normsmith.schedules.overflow import Overflow
from tests.training.shared_runs import distilled, gated, ngpt, noise, numbers, recipe, tapered


def data_of(source: str) -> tuple[TextData, dict[str, Any]]:
    said: list[str] = []
    data = load_shared(recipe(source, 2).data, said.append)
    assert isinstance(data, TextData)
    found = {
        "said": said,
        "train": [len(data.train), int(data.train.astype(int).sum())],
        "validation": [len(data.validation), int(data.validation.astype(int).sum())],
        "ids": data.tokenizer("def parse(self):")["input_ids"],
        "facts": [data.vocab_size, data.data_hash, data.bytes_per_token],
    }
    return data, found


def continued(source: str, folder: Path) -> dict[str, Any]:
    """The tapered run again from its checkpoint of step 3."""

    def forget() -> None:
        shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
        (folder / "result.json").unlink()

    ranks.on_first(forget)
    return numbers(tapered(source, 2), folder, resume=True)


def errors(source: str, folder: Path) -> list[tuple[str, str, int, bool]]:
    def attempt(work: Any) -> tuple[str, str, int, bool]:
        try:
            work()
        except NormsmithError as error:
            return type(error).__name__, str(error), error.exit_code, error.agreed
        return "none", "", 0, False

    def fail() -> None:
        if ranks.rank() == 1:
            raise InputError("only here")

    def occupied() -> None:
        numbers(recipe(source, 2), folder)

    def broken() -> None:
        raise KeyError("key")

    missing = recipe(str(folder / "nowhere.txt"), 2)
    absent = lambda: numbers(missing, folder / "new")  # noqa: E731
    found = [attempt(work) for work in (lambda: ranks.together(fail), occupied, absent)]
    try:
        found.append(attempt(lambda: ranks.on_first(broken)))
    except KeyError:
        found.append(("KeyError", "", 1, False))
    return found


def overflow() -> str:
    """What both ranks say of a site whose input was not finite on the second one, at step 3."""
    seen = Overflow(["first", "second"], torch.device("cpu"))
    for step in (2, 3, 4):
        broken = torch.tensor(float("nan") if ranks.rank() == 1 and step == 3 else 1.0)
        seen.see(step, [torch.tensor(1.0), broken])
    seen.share()
    return str(seen)


def main() -> None:
    source, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    data, found = data_of(source)
    result = {
        "data": found,
        "tapered": numbers(tapered(source, 2), folder / "tapered"),
        "ngpt": numbers(ngpt(source, 2), folder / "ngpt"),
        "gated": gated(source, data, folder / "gated", 2),
        "distilled": distilled(source, data, folder / "distilled", 2),
        "overflow": overflow(),
        "noise": noise(source, data, folder / "noise", 2),
        "errors": errors(source, folder / "tapered"),
        "continued": continued(source, folder / "tapered"),
    }
    (folder / f"rank{ranks.rank()}.json").write_text(json.dumps(result))
    ranks.leave()


if __name__ == "__main__":
    main()
