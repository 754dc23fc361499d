"""Choose sites by role, by a pattern on their names, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from normsmith.errors import InputError
from normsmith.surgery.find import NONE_FOUND, Site, Sites

ROLES = ("pre", "post", "sandwich", "qk", "final", "embedding", "other")
Where = str | Iterable[str] | Callable[[Site], bool] | None


def select_sites(sites: Sites, where: Where) -> list[Site]:
    """The sites that `where` means.

    Args:
        sites: what `find_norms` returned.
        where: a role (`pre`, `post`, `sandwich`, `qk`, `final`, `embedding`, `other`), a glob on the name
            (`*.0.ln_1`), several of these (any may match; in one string with commas), a function of a `Site`, or None
            for all sites.

    Raises:
        InputError: there is no norm, or one of the words matches none; the message lists what there is.
    """
    if not sites:
        raise InputError(NONE_FOUND)
    if where is None:
        return list(sites)
    if callable(where):
        chosen = [site for site in sites if where(site)]
        if not chosen:
            raise InputError(f"the function given as where chose none of the {len(sites)} sites:\n{sites}")
        return chosen
    words = [w.strip() for w in where.split(",")] if isinstance(where, str) else list(where)
    if not words:
        raise InputError("where is empty, so it chooses no site; leave it out for all sites")
    for word in words:
        if not any(_matches(site, word) for site in sites):
            roles = ", ".join(dict.fromkeys(site.role for site in sites))
            names = ", ".join(site.name for site in sites[:3]) + (", …" if len(sites) > 3 else "")
            raise InputError(
                f"no site matches where={word!r}; roles here: {roles}; names: {names} (patterns like '*.0.*' work)"
            )
    return [site for site in sites if any(_matches(site, word) for word in words)]


def _matches(site: Site, word: str) -> bool:
    return site.role == word if word in ROLES else any(fnmatchcase(name, word) for name in site.names or (site.name,))
