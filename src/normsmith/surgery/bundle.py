"""Write the source of norms into one text that needs PyTorch only, so that a saved model can bring its norms along."""

from __future__ import annotations

import builtins
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from normsmith.errors import InputError
from normsmith.norms import Norm

# Methods that a model which only runs and trains does without.
_LEFT_OUT = {"__init__", "reference", "linear_form", "match", "from_site", "extra_repr"}
_PLAIN = (bool, int, float, str, type(None))

_BASE = '''
class _Norm(nn.Module):
    """A norm with the options, parameters and buffers that the configuration lists."""

    def __init__(self, spec):
        super().__init__()
        self.config = SimpleNamespace(**spec["options"])
        for name, value in spec["attributes"].items():
            setattr(self, name, value)
        for name, shape in spec["parameters"].items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.ones(shape)))
        for name, (shape, dtype) in spec["buffers"].items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
        for name, specs in spec["parts"].items():
            setattr(self, name, nn.ModuleList(KINDS[part["kind"]](part) for part in specs))
'''


def norm_spec(norm: Norm) -> dict[str, Any]:
    """What the bundled class needs to make a norm of this structure, as JSON types."""
    attributes = {k: v for k, v in vars(norm).items() if k[0] != "_" and k != "training" and isinstance(v, _PLAIN)}
    return {
        "kind": norm.config.kind,
        "options": norm.config.to_dict(),
        "attributes": attributes,
        "parameters": {n: None if p is None else list(p.shape) for n, p in vars(norm)["_parameters"].items()},
        "buffers": {n: [list(b.shape), str(b.dtype).rpartition(".")[2]] for n, b in norm.named_buffers(recurse=False)},
        "parts": {n: [norm_spec(cast("Norm", part)) for part in parts] for n, parts in part_lists(norm).items()},
    }


def part_lists(norm: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of norms that a norm is made of, by attribute."""
    return {name: parts for name, parts in norm.named_children() if isinstance(parts, nn.ModuleList)}


def all_specs(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The spec of a norm and those of all norms that it is made of."""
    return [spec, *(each for parts in spec["parts"].values() for part in parts for each in all_specs(part))]


def bundle_norms(classes: dict[str, type[Norm]]) -> str:
    """Source of `classes` (kind → class) as subclasses of one small base, and of every function they call.

    Raises:
        InputError: a norm uses something that cannot be written down, a class of another package for instance.
    """
    parts = _Parts()
    written = [_class_source(cls, parts) for cls in classes.values()]
    kinds = ", ".join(f"{kind!r}: {cls.__name__}" for kind, cls in classes.items())
    imports = ["from types import SimpleNamespace", "import torch", "from torch import nn", *parts.imports]
    definitions = [*parts.constants.values(), *parts.definitions.values(), _BASE.strip(), *written]
    return "\n".join(dict.fromkeys(imports)) + "\n\n\n" + "\n\n\n".join([*definitions, f"KINDS = {{{kinds}}}"]) + "\n"


class _Parts:
    """Imports, constants and definitions that the bundled code needs, each once, what is needed first."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.constants: dict[str, str] = {}
        self.definitions: dict[str, str] = {}
        self.seen: dict[str, Any] = {}

    def need(self, function: Callable[..., Any]) -> None:
        """Add every global that the function uses."""
        for name in _names(function.__code__):
            if name in function.__globals__ and not hasattr(builtins, name):
                self.add(name, function.__globals__[name])

    def add(self, name: str, value: Any) -> None:
        """Add one global."""
        if name in self.seen:
            if self.seen[name] is not value:
                raise InputError(f"two different things are called {name!r} in the norms that are saved together")
            return
        self.seen[name] = value
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, types.ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, types.FunctionType) and home.startswith("normsmith"):
            self.need(value)
            self.definitions[name] = textwrap.dedent(inspect.getsource(value)).strip()
        elif inspect.isclass(value) and home.startswith("normsmith"):
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType) and function.__module__ == home:
                    self.need(function)
            self.definitions[name] = textwrap.dedent(inspect.getsource(value)).strip()
            self.imports.append("from typing import NamedTuple")
            self._bases(value)
        elif _plain(value):
            self.constants[name] = f"{name} = {value!r}"
        elif callable(value) and home.partition(".")[0] in ("torch", "math", "typing"):
            self.imports.append(f"from {home} import {value.__name__} as {name}")
        else:
            raise InputError(f"{name} ({type(value).__name__}) cannot be written into the model folder")

    def _bases(self, cls: type) -> None:
        for base in cls.__bases__:
            if base.__module__.startswith("normsmith"):
                self.add(base.__name__, base)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(k) and _plain(v) for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple | list | set):
        return all(_plain(v) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(value, _PLAIN)


def _names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _class_source(cls: type[Norm], parts: _Parts) -> str:
    body: dict[str, str] = {}
    for owner in cls.__mro__:
        if not issubclass(owner, Norm) or owner is Norm:
            continue
        for name, member in vars(owner).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if name in body or name in _LEFT_OUT or name == "kind":
                continue
            if isinstance(function, types.FunctionType):
                parts.need(function)
                body[name] = textwrap.dedent(inspect.getsource(function)).strip()
            elif _plain(member) and not name.startswith("__"):
                body[name] = f"{name} = {member!r}"
    body.setdefault("centred", f"centred = {cls.centred!r}")
    doc = f'"""{(cls.__doc__ or "").strip().splitlines()[0]}"""'
    return f"class {cls.__name__}(_Norm):\n" + textwrap.indent("\n\n".join([doc, *body.values()]), "    ")
