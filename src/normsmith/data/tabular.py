"""Tables of numbers with targets to predict: scikit-learn's diabetes, and CSV files."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from normsmith.data.config import SourceConfig
from normsmith.data.examples import Examples, TaskData, check_size, hash_parts, split_rows
from normsmith.data.facts import Facts
from normsmith.errors import InputError, UnknownNameError

_MISSING = {"", "nan", "na", "n/a", "null", "none", "?"}
_SHOWN = 5


class TableConfig(SourceConfig):
    """A table with targets to predict.

    Attributes:
        kind: `table`.
        source: `diabetes` (scikit-learn's 442 patients, no download) or a CSV file with a header.
        target: column to predict, or several; default the last one.
        drop: columns that are neither read nor predicted.
        missing: what an empty cell (or NaN) of a feature means: `error`, or `median` of the training rows. A row
            without a target is always an error.
        validation_fraction: share of the rows that decides between models.
        test_fraction: share of the rows that is looked at once.
    """

    kind: Literal["table"] = "table"
    source: str = Field(default="diabetes", min_length=1)
    target: str | tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    missing: Literal["error", "median"] = "error"
    validation_fraction: float = Field(default=0.15, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.15, gt=0, lt=0.5)

    def facts(self) -> Facts:
        """Of diabetes exactly; of a file the targets, as long as it is not read."""
        targets = (self.target,) if isinstance(self.target, str) else self.target or ("target",)
        return Facts(features=tuple(f"x{n}" for n in range(10)), targets=targets)


class Table(NamedTuple):
    """Column names, cells as text by row, and the line of each row in the file."""

    header: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]


def load_table(config: TableConfig) -> TaskData:
    """Read a table, split it by a hash of each row, and measure its training rows.

    A column of text becomes one column of 0 and 1 per value that the training rows have.

    Raises:
        InputError: no table, an unknown column, a cell that is missing or no finite number (with row and column), a
            target that is constant, an empty split.
    """
    table = _diabetes() if config.source == "diabetes" else read_csv(config.source)
    targets = _targets(table, config)
    features = [name for name in table.header if name not in targets and name not in config.drop]
    if not features:
        raise InputError(f"{config.source}: no column is left to read, beside {', '.join([*targets, *config.drop])}")
    # What is dropped, an identifier for instance, would tell equal examples apart.
    kept = [column for column, name in enumerate(table.header) if name not in config.drop]
    keys = ["\x1f".join(row[column] for column in kept) for row in table.rows]
    splits = split_rows(keys, config.validation_fraction, config.test_fraction)
    check_size(splits, config.source)
    names: list[str] = []
    columns: list[npt.NDArray[np.float64]] = []
    notes: list[str] = []
    for name in features:
        found, values, note = _feature(table, name, splits["train"], config)
        names += found
        columns += values
        notes += note
    x = np.stack(columns, axis=1)
    y = np.stack([_numbers(table, name, config, target=True) for name in targets], axis=1)
    moments = {
        "mean": x[splits["train"]].mean(0),
        "scale": _spread(x[splits["train"]], names, config.source),
        "target_mean": y[splits["train"]].mean(0),
        "target_scale": _spread(y[splits["train"]], targets, config.source),
    }
    if constant := [name for name, s in zip(targets, moments["target_scale"], strict=True) if not s]:
        raise InputError(f"{config.source}: the target {constant[0]!r} has one value in all training rows")
    examples = {name: Examples({"features": x[rows], "labels": y[rows]}, finish) for name, rows in splits.items()}
    return TaskData(
        train=examples["train"],
        validation=examples["validation"],
        test=examples["test"],
        facts=Facts(features=tuple(names), targets=tuple(targets)),
        data_hash=hash_parts("\x1f".join(table.header).encode(), *("\x1f".join(row).encode() for row in table.rows)),
        source=config.source,
        notes=(f"{len(table.rows):,} rows, {len(names)} features, target {', '.join(targets)}", *notes),
        moments=moments,
    )


_RESOLVED = 1e-5  # smallest spread, beside the largest value, that leaves float32 a hundred steps or more


def _spread(columns: npt.NDArray[np.float64], names: list[str], source: str) -> npt.NDArray[np.float64]:
    """Standard deviation of each column; 0, without rounding, where all values are equal."""
    spread = np.where(np.ptp(columns, axis=0) == 0, 0.0, columns.std(0))
    largest = np.abs(columns).max(0)
    for name, deviation, size in zip(names, spread, largest, strict=True):
        if 0 < deviation < _RESOLVED * size:
            raise InputError(
                f"{source}: {name!r} varies by {deviation:.3g} around values of {size:.3g}, which float32 cannot tell "
                "apart; subtract a constant from the column, or drop it"
            )
    return spread


def finish(row: dict[str, Any]) -> dict[str, Tensor]:
    """Features (F,) and targets (T,), float32, in the table's units."""
    return {name: torch.from_numpy(np.asarray(values, np.float32)) for name, values in row.items()}


def _diabetes() -> Table:
    from sklearn.datasets import load_diabetes  # type: ignore[import-untyped]  # ships no types

    bunch: Any = load_diabetes(scaled=False)
    rows = [[repr(float(v)) for v in (*x, y)] for x, y in zip(bunch.data, bunch.target, strict=True)]
    return Table((*bunch.feature_names, "progression"), rows, list(range(1, len(rows) + 1)))


def read_csv(source: str) -> Table:
    """The cells of a CSV file with a header, as text; blank lines are left out.

    Raises:
        InputError: no such file, no text, no rows, or a row with another number of cells than the header.
    """
    path = Path(source).expanduser()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = tuple(cell.strip() for cell in next(reader, []))
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source}: cannot be read as CSV ({error}); a table is 'diabetes' or a CSV file") from None
    if len(header) < 2 or not rows:
        raise InputError(f"{source}: is no table; expected a line of two or more column names, and rows below it")
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise InputError(f"{source}: two columns are called {repeated!r}")
    for line, row in rows:
        if len(row) != len(header):
            raise InputError(f"{source}, line {line}: has {len(row)} cells, the header has {len(header)}")
    return Table(header, [row for _, row in rows], [line for line, _ in rows])


def _targets(table: Table, config: TableConfig) -> list[str]:
    named = config.target or table.header[-1]
    targets = [named] if isinstance(named, str) else list(named)
    for name in (*targets, *config.drop):
        if name not in table.header:
            raise UnknownNameError("column", name, table.header, config.source)
    for name in targets:
        if name in config.drop or targets.count(name) > 1:
            where = "target and drop" if name in config.drop else "target twice"
            raise InputError(f"{config.source}: {name!r} is in {where}; write it once")
    return targets


def _feature(
    table: Table, name: str, train: list[int], config: TableConfig
) -> tuple[list[str], list[npt.NDArray[np.float64]], list[str]]:
    """Names, columns and notes of what one column becomes."""
    there = [cell for cell in _cells(table, name) if cell.lower() not in _MISSING]
    if sum(_number(cell) is None for cell in there) > len(there) / 2:
        return _categories(table, name, train, config)
    values = _numbers(table, name, config)
    missing = np.isnan(values)
    if not missing.any():
        return [name], [values], []
    known = values[train][~missing[train]]
    if not len(known):
        raise InputError(f"{config.source}: the column {name!r} has no value in any training row; drop it")
    median = float(np.median(known))
    values[missing] = median
    note = f"{int(missing.sum())} missing value(s) of {name} are the median of the training rows, {median:g}"
    return [name], [values], [note]


def _categories(
    table: Table, name: str, train: list[int], config: TableConfig
) -> tuple[list[str], list[npt.NDArray[np.float64]], list[str]]:
    missing = np.array([cell.lower() in _MISSING for cell in _cells(table, name)])
    if missing.any() and config.missing == "error":
        raise _bad_cell(table, name, int(np.argmax(missing)), config)
    cells = np.array(_cells(table, name))
    known = sorted({str(c) for c in cells[train][~missing[train]]})
    if len(known) > 100:
        raise InputError(
            f"{config.source}: the column {name!r} is text with {len(known)} different values, which is no category; "
            f"write drop: [{name}]"
        )
    unseen = [row for row, cell in enumerate(cells) if str(cell) not in set(known) and not missing[row]]
    notes = [f"{len(unseen)} row(s) have a {name} that no training row has: all its columns are 0"] if unseen else []
    notes += [f"{int(missing.sum())} row(s) have no {name}: all its columns are 0"] if missing.any() else []
    return [f"{name}={value}" for value in known], [(cells == value).astype(np.float64) for value in known], notes


def _numbers(table: Table, name: str, config: TableConfig, target: bool = False) -> npt.NDArray[np.float64]:
    """The column as numbers, NaN where a value is missing and may be; anything else names its row and column."""
    values = np.empty(len(table.rows))
    for row, cell in enumerate(_cells(table, name)):
        number = _number(cell)
        if cell.lower() in _MISSING and not target and config.missing == "median":
            number = math.nan
        elif number is None or not math.isfinite(number):
            raise _bad_cell(table, name, row, config, target)
        values[row] = number
    return values


def _bad_cell(table: Table, name: str, row: int, config: TableConfig, target: bool = False) -> InputError:
    cell = table.rows[row][table.header.index(name)]
    missing = cell.lower() in _MISSING
    what = "is missing" if missing else f"is {cell!r}, which is no finite number"
    instead = "" if target else "write missing: median, or " if missing else f"write drop: [{name}], or "
    return InputError(f"{config.source}, line {table.lines[row]}: {name!r} {what}; {instead}leave the row out")


def _cells(table: Table, name: str) -> list[str]:
    column = table.header.index(name)
    return [row[column] for row in table.rows]


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)  # Python reads 18_25 as 1825
    except ValueError:
        return None
