"""The errors normsmith raises: each says what is wrong, where, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NormsmithError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1
    agreed = False
    """Whether every process of the run fails with it, so that one of them speaks for all."""


class InputError(NormsmithError):
    """The user's input cannot be used as it is: a wrong name, value, file or folder."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that no registry entry, option or key has."""

    def __init__(self, what: str, name: str, known: Iterable[str], where: str = "") -> None:
        self.name, self.known = name, sorted(known)
        place = f" in {where}" if where else ""
        super().__init__(f"unknown {what} {name!r}{place}{suggest(name, self.known)}")


class ConfigError(InputError):
    """A configuration that does not validate."""


class NotFoldableError(InputError):
    """A norm that cannot be absorbed by its neighbours; the message lists each site with its reason."""


class DivergedError(InputError):
    """Training met a loss that is not finite; the message names the step and the last good checkpoint."""


class VerificationError(NormsmithError):
    """A transform changed what it must keep; the model has been put back as it was."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` for close names, else the list of all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.55)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known: " + ", ".join(names) if names else ""
