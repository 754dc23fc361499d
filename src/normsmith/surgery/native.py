"""Save a changed Hugging Face model so that it can never be reloaded as what it was.

The folder brings a small modelling file along: the stock class, with the changed sites put in before the weights are
loaded. Its `model_type` is its own, so that loading without `trust_remote_code=True` fails with transformers' message
instead of silently building the old architecture.
"""

from __future__ import annotations

import gc
import inspect
import json
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from normsmith.errors import InputError
from normsmith.norms import Norm, norms
from normsmith.norms.padding import watch_padding
from normsmith.surgery.bundle import all_specs, bundle_norms, norm_spec
from normsmith.traits import is_encoder_decoder

MODELLING_FILE = "modeling_normsmith.py"
_HUB = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")

_CODE = '''"""{base} with other norms, written by normsmith {version}; needs PyTorch and transformers only.

Load with {auto}.from_pretrained(folder, trust_remote_code=True).
"""

from __future__ import annotations

import inspect
from functools import partial

{norms}

from transformers import {config}, {base}


class {prefix}{config}({config}):
    """{config} with the list of changes under `normsmith`."""

    model_type = "{model_type}"


class {prefix}{base}({base}):
    """{base} whose norms are as `config.normsmith` says."""

    config_class = {prefix}{config}
    _keep_in_fp32_modules_strict = {keep}

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        for name, spec in config.normsmith["sites"].items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, nn.Identity() if spec is None else KINDS[spec["kind"]](spec))
        for name, size in config.normsmith["biases"].items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, nn.Parameter(torch.zeros(size)))
        for name, attributes in config.normsmith["attributes"].items():
            for attribute, value in attributes.items():
                setattr(self.get_submodule(name), attribute, value)
{watch}'''

_WATCH = """        for module in self.modules():
            names = list(inspect.signature(module.forward).parameters) if hasattr(module, "from_pretrained") else []
            if "attention_mask" in names:
                see = partial(_see_padding, names.index("attention_mask"), module is not self)
                module.register_forward_pre_hook(see, with_kwargs=True)


def _see_padding(position, inner, model, args, kwargs):
    # Some norms pool over the tokens of a sequence, and must know which of them are padding.
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    if inner and mask is not None and getattr(mask, "ndim", 0) != 2:
        return  # in another form: what the model around it has said holds
    for module in model.modules():
        if hasattr(module, "token_mask"):
            module.token_mask = mask if getattr(mask, "ndim", 0) == 2 else None
"""


def stock_class(model: nn.Module) -> type[Any] | None:
    """The class of transformers that the model is, or was before it was changed and saved; None for any other model."""
    return next((c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")), None)


def changes(model: Any) -> dict[str, Any]:
    """How the model differs from what its stock class would build from its configuration.

    Returns:
        `sites` (name → spec of the norm there, None if removed), `biases` (name → shape) and `attributes` (name → eps
        values that differ). All empty for an unchanged model.

    Raises:
        InputError: the class is not one of transformers', or something else than norms and biases was changed.
    """
    base = stock_class(model)
    if base is None:
        raise InputError(
            f"{type(model).__name__} is no class of transformers: save its state_dict() and its code yourself"
        )
    if own := _own_code(model, base):
        raise InputError(
            f"{type(model).__name__} has its own {', '.join(own)}, which the native format cannot describe: it would "
            f"be loaded as {base.__name__}; save its state_dict() and its code yourself"
        )
    with torch.device("meta"):
        twin = base(model.config)
    stock, found = dict(twin.named_modules(remove_duplicate=False)), {"sites": {}, "biases": {}, "attributes": {}}
    for name, module in model.named_modules(remove_duplicate=False):
        there = stock.get(name)
        if there is None or type(module) is type(there) or not name:
            if there is not None and name and (eps := _eps(module)) != _eps(there):
                found["attributes"][name] = {k: v for k, v in eps.items() if v != _eps(there).get(k)}
        elif isinstance(module, Norm):
            found["sites"][name] = norm_spec(module)
        elif isinstance(module, nn.Identity):
            found["sites"][name] = None
        else:
            raise InputError(
                f"{name} is a {type(module).__name__} where {base.__name__} has a {type(there).__name__}: the native "
                "format can describe norms only"
            )
    mine, theirs = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(twin.named_parameters(remove_duplicate=False)),
    )
    below = tuple(f"{name}." for name in found["sites"])
    new = [name for name in mine if name not in theirs and not name.startswith(below or ("\0",))]
    if wrong := [n for n in new if not n.endswith("bias")]:
        raise InputError(
            f"{wrong[0]} is a parameter that {base.__name__} has not: the native format cannot describe it"
        )
    found["biases"] = {name: list(mine[name].shape) for name in new}
    return found


def _own_code(model: nn.Module, base: type[Any]) -> list[str]:
    """Methods and properties that the model's class has beyond those of transformers; not in classes that we wrote."""
    mro = type(model).__mro__
    between = [c for c in mro[: mro.index(base)] if not c.__module__.startswith("transformers.")]
    return [
        name
        for c in between
        if not c.__module__.endswith(MODELLING_FILE.removesuffix(".py"))
        for name, value in vars(c).items()
        if not name.startswith("__")
        and (inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def _eps(module: nn.Module) -> dict[str, float]:
    return {k: v for k, v in vars(module).items() if isinstance(v, float) and ("eps" in k.lower())}


def save_native(model: Any, folder: str | Path, **kwargs: Any) -> None:
    """Write the model with its modelling file; an unchanged model is written as transformers does.

    `AutoModelFor….from_pretrained(folder, trust_remote_code=True)` loads it, also where normsmith is not installed.

    Args:
        model: a model of transformers whose norms were swapped, tapered or folded.
        folder: where to write.
        kwargs: passed on to `save_pretrained`; with `push_to_hub` the finished folder is uploaded.

    Raises:
        InputError: see `changes`.
    """
    import transformers

    import normsmith

    if kwargs.get("push_to_hub"):  # transformers would upload the folder before the modelling file is in it
        hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
        save_native(model, folder, **{**kwargs, "push_to_hub": False})
        model.push_to_hub(hub.pop("repo_id", Path(folder).name), **hub)
        return
    found, base = changes(model), cast("type[Any]", stock_class(model))
    config = next(c for c in type(model.config).__mro__ if c.__module__.startswith("transformers.models."))
    if not any(found.values()):
        base.save_pretrained(model, folder, **kwargs)
        if config is not type(model.config):  # it was changed when it was loaded, and has been restored since
            stock = {"model_type": config.model_type, "architectures": [base.__name__]}
            _rewrite(Path(folder) / "config.json", stock, ("auto_map", "normsmith"))
        return
    specs = [each for spec in found["sites"].values() if spec is not None for each in all_specs(spec)]
    kinds = {spec["kind"]: norms.get(spec["kind"]) for spec in specs}
    autos = _auto_classes(transformers, base, config)
    model_type = f"normsmith_{config.model_type}"
    code = _CODE.format(
        base=base.__name__,
        config=config.__name__,
        prefix="Normsmith",
        version=normsmith.__version__,
        norms=bundle_norms(kinds).strip(),
        model_type=model_type,
        keep=[*(base._keep_in_fp32_modules_strict or ()), *_wide(model, found["sites"])] or None,
        watch=_watch_code(base, model, specs),
        auto=autos[0],
    )
    # The names of the running model, not those of an older checkpoint format that is chosen by model_type.
    base.save_pretrained(model, folder, **{**kwargs, "save_original_format": False})
    if not kwargs.get("is_main_process", True):
        return
    path = Path(folder)
    (path / MODELLING_FILE).write_text(code, encoding="utf-8")
    module = MODELLING_FILE.removesuffix(".py")
    auto_map = {"AutoConfig": f"{module}.Normsmith{config.__name__}"}
    auto_map |= dict.fromkeys(autos, f"{module}.Normsmith{base.__name__}")
    entries = {"model_type": model_type, "architectures": [f"Normsmith{base.__name__}"]}
    _rewrite(path / "config.json", {**entries, "auto_map": auto_map, "normsmith": found}, ())


def _wide(model: Any, sites: dict[str, Any]) -> list[str]:
    """Sites, and buffers of sites (a gate's temperature), whose dtype is not the model's and must survive loading."""
    found: list[str] = []
    for name in sites:
        site = model.get_submodule(name)
        if any(p.dtype != model.dtype for p in site.parameters()):
            found.append(name)
        else:
            buffers = [(k, b.dtype) for k, b in site.named_buffers() if b.is_floating_point()]
            found += [f"{name}.{key}" for key, dtype in buffers if dtype != model.dtype]
    return found


def _watch_code(base: type, model: Any, specs: list[dict[str, Any]]) -> str:
    """What the saved class needs so that norms which pool over a sequence know its padding; nothing without such."""
    pooled = next((spec["kind"] for spec in specs if spec["options"].get("pool") == "sequence"), None)
    names = list(inspect.signature(cast("Any", base).forward).parameters)[1:]
    if pooled is None or "attention_mask" not in names:
        return ""
    if is_encoder_decoder(model):
        raise InputError(
            f"{pooled} with pool='sequence' must know the padding, and in {base.__name__} an attention mask may belong "
            "to the encoder or to the decoder; use pool='token', or collapse_ it first"
        )
    return _WATCH


def _rewrite(path: Path, entries: dict[str, Any], without: tuple[str, ...]) -> None:
    written = json.loads(path.read_text(encoding="utf-8")) | entries
    kept = {key: written[key] for key in sorted(written) if key not in without}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _auto_classes(transformers: Any, base: type, config: type) -> list[str]:
    """The Auto classes that would build `base` for `config`."""
    found: list[str] = []
    for name in dir(transformers.models.auto.modeling_auto):
        mapping = getattr(getattr(transformers.models.auto.modeling_auto, name), "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and config in mapping:
            classes = mapping[config]
            if base in (classes if isinstance(classes, tuple) else (classes,)):
                found.append(name)
    return found or ["AutoModel"]


def adopt_(model: Any) -> None:
    """Put normsmith's own norms where a model loaded from a native folder has those of its modelling file. In place."""
    sites = getattr(getattr(model, "config", None), "normsmith", {}).get("sites", {})
    for name, spec in sites.items():
        parent, _, leaf = name.rpartition(".")
        owner, theirs = model.get_submodule(parent), model.get_submodule(name)
        if spec is None or isinstance(theirs, Norm):
            continue
        setattr(owner, leaf, _adopted(theirs, spec).train(theirs.training))
    if sites:
        watch_padding(model)
        keep_changes(model)


def _adopted(theirs: nn.Module, spec: dict[str, Any]) -> Norm:
    cls = norms.get(spec["kind"])
    ours: Norm = cls(spec["attributes"]["width"], cls.Config(**spec["options"]))
    for key, tensor in [*theirs.named_parameters(recurse=False), *theirs.named_buffers(recurse=False)]:
        setattr(ours, key, tensor)
    # Folders of earlier versions know no norms that are made of others.
    for key, parts in spec.get("parts", {}).items():
        for i, part in enumerate(parts):
            getattr(ours, key)[i] = _adopted(getattr(theirs, key)[i], part)
    return ours


class NativeSaver:
    """Stands in for `save_pretrained` of one changed model, so that no caller (a Trainer's checkpoint, for instance)
    writes a folder that would be read as the old architecture.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`."""
        names = list(inspect.signature(cast("Any", type(self.model)).save_pretrained).parameters)[2:]
        save_native(self.model, save_directory, **dict(zip(names, args, strict=False)), **kwargs)


class AdapterSaver:
    """Stands in for `save_pretrained` of a PEFT model around a changed one: its folder cannot hold the change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As PEFT's, after a warning."""
        warnings.warn(
            "the adapters alone are saved, for the model as it was loaded: the norms that were changed since are not "
            "in the folder. Use merge_and_unload(), and save the model that it returns.",
            stacklevel=2,
        )
        return cast("Any", type(self.model)).save_pretrained(self.model, *args, **kwargs)


def keep_changes(model: nn.Module) -> None:
    """From now on let `save_pretrained` of the model, of those inside it and of those it is part of, write the native
    format; a model that takes it as a part later is not among them.
    """
    for module in (*model.modules(), *wholes(model)):
        if stock_class(module) is not None and hasattr(module, "save_pretrained"):
            module.__dict__["save_pretrained"] = NativeSaver(module)
        elif type(module).__module__.partition(".")[0] == "peft" and hasattr(type(module), "save_pretrained"):
            module.__dict__["save_pretrained"] = AdapterSaver(module)


def wholes(part: nn.Module) -> list[nn.Module]:
    """Every living module that holds `part`: a module does not know who holds it, Python's garbage collector does."""
    if not any(_table_of_modules(each) for each in gc.get_referrers(part)):
        return []  # the usual case; going through all objects in Python takes several times as long
    living: list[Any] = gc.get_objects()
    kinds = {kind for kind in set(map(type, living)) if issubclass(kind, nn.Module)}
    modules: list[nn.Module] = [each for each in living if type(each) in kinds]
    del living
    found: list[nn.Module] = []
    fresh: list[nn.Module] = [part]
    while fresh:
        holders = [m for m in modules if _holds(m, fresh)]
        fresh = [m for m in holders if all(m is not known for known in found)]
        found += fresh
    return found


def _table_of_modules(referrer: Any) -> bool:
    """Whether it may be the dictionary in which a module keeps its children."""
    return isinstance(referrer, dict) and all(
        child is None or isinstance(child, nn.Module) for child in cast("dict[Any, Any]", referrer).values()
    )


def _holds(module: Any, parts: list[nn.Module]) -> bool:
    children = module.__dict__.get("_modules") or {}  # a module whose __init__ has not run has none
    return any(child is part for child in children.values() for part in parts)
