"""Name → class. One registration line per entry; command-line choices, tests, docs and benchmarks derive from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from normsmith.config import Config
from normsmith.errors import ConfigError, UnknownNameError

T = TypeVar("T", bound=type[Any])
Entry = TypeVar("Entry", bound=type[Any])


class Registry(Generic[T]):
    """A named set of classes. Each has (or is) a `Config` whose `kind` is the name the class is entered under."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, T] = {}
        self._aliases: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **aliases: dict[str, Any]) -> Callable[[Entry], Entry]:
        """Class decorator: enter the class as `name`, which it is told as `kind`.

        Each alias names a set of options: `proj={"p": 1}`.
        """

        def enter(cls: Entry) -> Entry:
            for new in (name, *aliases):
                if new in self._classes or new in self._aliases:
                    raise ValueError(
                        f"{self.what} {new!r} is already registered, choose another name for {cls.__name__}"
                    )
            self._classes[name] = cast("T", cls)
            if not issubclass(cls, Config):  # a configuration declares its kind as a field
                setattr(cls, "kind", name)  # noqa: B010 (T is any class)
            self._aliases.update({alias: {"kind": name, **options} for alias, options in aliases.items()})
            return cls

        return enter

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __contains__(self, name: str) -> bool:
        return name in self._classes or name in self._aliases

    @property
    def aliases(self) -> dict[str, dict[str, Any]]:
        """Alias → the options it stands for, `kind` included."""
        return {alias: dict(options) for alias, options in sorted(self._aliases.items())}

    def get(self, name: str) -> T:
        """Return the class called `name` (or the one an alias points to); `UnknownNameError` names the nearest ones."""
        name = self._aliases.get(name, {"kind": name})["kind"]
        if name not in self._classes:
            raise UnknownNameError(self.what, name, [*self._classes, *self._aliases])
        return self._classes[name]

    def config(self, spec: str | dict[str, Any] | Config, **options: Any) -> Config:
        """The validated configuration of the entry that `spec` means.

        `spec` is a name, `name:key=value,key=value` (see `parse_spec`), a mapping with `kind`, or a configuration.
        """
        if isinstance(spec, Config):
            return type(spec)(**{**spec.to_dict(), **options}) if options else spec
        if isinstance(spec, str):
            spec = parse_spec(spec)
        if isinstance(spec, str):
            spec = {"kind": spec}
        if not isinstance(spec, dict):
            raise ConfigError(f"{self.what}: {spec!r} is neither a name nor a mapping with the key 'kind'")
        if "kind" not in spec:
            raise ConfigError(f"{self.what}: the key 'kind' is missing; write for example kind: {next(iter(self))}")
        kind = str(spec["kind"])
        merged = {
            **self._aliases.get(kind, {"kind": kind}),
            **{k: v for k, v in spec.items() if k != "kind"},
            **options,
        }
        entry: Any = self.get(kind)
        return cast("Config", getattr(entry, "Config", entry)(**merged))


def parse_spec(text: str) -> str | dict[str, Any]:
    """Turn `name:key=value,key=value`, as it is written on a command line, into a name or a mapping with `kind`.

    >>> parse_spec("rmsnorm:eps=1e-5")
    {'kind': 'rmsnorm', 'eps': '1e-5'}

    Values stay text; the configuration of the entry reads them.
    """
    name, colon, options = text.partition(":")
    if not colon:
        return name
    pairs = [pair.partition("=") for pair in options.split(",")]
    if wrong := next((key for key, equals, _ in pairs if not (key.strip() and equals)), None):
        raise ConfigError(f"{text!r}: {wrong!r} is no setting; write name:key=value,key=value")
    return {"kind": name, **{key.strip(): value.strip() for key, _, value in pairs}}
