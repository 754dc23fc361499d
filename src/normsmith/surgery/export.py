"""Write a changed model in one of three formats: native, stock or ONNX."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from normsmith.errors import InputError, VerificationError
from normsmith.norms import LinearForm, Norm
from normsmith.surgery.example import make_example
from normsmith.surgery.find import find_norms
from normsmith.surgery.native import changes, save_native, stock_class
from normsmith.surgery.probe import norm_facts
from normsmith.surgery.verify import difference, outputs

Format = Literal["native", "stock", "onnx"]
FORMATS = ("native", "stock", "onnx")
_BIG = 1e12  # an eps beside which no token's mean square counts; √_BIG times the scale is the gain that undoes it
_ONNX_TOLERANCE = 1e-4


def export_model(model: nn.Module, folder: str | Path, format: Format = "native", *, example: Any = None) -> str:  # noqa: A002 (the word users know)
    """Write `model` into `folder` and say in one sentence what was written.

    `native`: a Hugging Face folder with a small modelling file; loads with `trust_remote_code=True` where normsmith is
    not installed. `stock`: the original class, each norm made linear by a huge eps and a gain that undoes it; for
    models whose every norm is linear; brings no speed. `onnx`: `model.onnx`, checked against onnxruntime.

    Raises:
        InputError: the model cannot be written in this format; the message says why and what can be done.
        VerificationError: what was written computes something else.
    """
    if format not in FORMATS:
        raise InputError(f"no format {format!r}; choose one of {', '.join(FORMATS)}")
    model = getattr(model, "_orig_mod", model)
    if format == "native":
        if stock_class(model) is None and hasattr(model, "save_pretrained"):
            cast("Any", model).save_pretrained(
                folder
            )  # normsmith's own models say in their configuration what they are
            return "written as a normsmith model"
        changed = any(changes(model).values())
        save_native(model, folder)
        if not changed:
            return "no norm was changed: written as transformers writes it"
        return "written with a modelling file: load it with trust_remote_code=True"
    if format == "stock":
        return _save_stock(model, Path(folder), example)
    return _save_onnx(model, Path(folder), example)


def _save_stock(model: Any, folder: Path, example: Any) -> str:
    found = changes(model)
    base = stock_class(model)
    if model.dtype == torch.float16:
        raise InputError("stock: gains of a million do not fit into float16; convert the model to bfloat16 or float32")
    if found["biases"]:
        raise InputError(
            f"stock: {base.__name__} has no {next(iter(found['biases']))}, which folding made; "  # pyright: ignore[reportOptionalMemberAccess]
            "write the tapered model before it is folded, or the native format"
        )
    forms = _linear_forms(model, found["sites"], example)
    config = copy.deepcopy(model.config)
    if not _set_eps(config):
        raise InputError(f"stock: {type(config).__name__} has no eps that could be set")
    stock = _filled(base, model, config, forms)
    error = difference(outputs(model, example), outputs(stock, example))
    if not error <= max(1e-3, 10 * torch.finfo(model.dtype).eps):
        raise VerificationError(f"stock: the outputs would change by {error:.1e} (relative); nothing was written")
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    stock.save_pretrained(folder)
    return (
        f"written as {stock.__class__.__name__} with linear norms (eps {_BIG:g}), outputs differ by {error:.1e}; the "
        "norms are still computed, so this format brings no speed"
    )


def _linear_forms(model: nn.Module, sites: dict[str, Any], example: Any) -> dict[str, LinearForm]:
    """The linear map at every place where the stock class has a norm."""
    one = LinearForm(torch.ones((), dtype=torch.float64), None, centred=False)
    forms = {name: one for name, spec in sites.items() if spec is None}
    rest: list[str] = []
    for site in find_norms(model, example):
        form = site.module.linear_form() if isinstance(site.module, Norm) else None
        if form is None:
            rest.append(f"{site.name} ({site.kind})")
        forms |= {} if form is None else dict.fromkeys(site.names, form)
    if rest:
        raise InputError(
            f"stock: {len(rest)} norm(s) still depend on the token: {', '.join(rest[:4])}{', …' if rest[4:] else ''}; "
            "this format needs all of them linear (taper with placement='all'), write the native format otherwise"
        )
    return forms


def _set_eps(config: Any) -> bool:
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict") and value is not config)]
    names = [(part, name) for part in parts for name, v in vars(part).items() if "eps" in name and isinstance(v, float)]
    for part, name in names:
        setattr(part, name, _BIG)
    return bool(names)


def _filled(base: Any, model: Any, config: Any, forms: dict[str, LinearForm]) -> Any:
    stock = base(config).to(model.dtype).eval()
    with torch.device("meta"):
        twin = base(model.config)  # with its usual eps, so that its norms can be recognised
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(tuple(f"{n}." for n in forms))}
    for name, form in forms.items():
        facts = norm_facts(twin.get_submodule(name))
        module = stock.get_submodule(name)
        if facts is None or facts.weight is None or not any(v == _BIG for v in vars(module).values()):
            raise InputError(f"stock: {name} ({type(module).__name__}) has no gain, or an eps that no setting reaches")
        if form.shift is not None and facts.bias is None and bool(form.shift.any()):
            raise InputError(f"stock: {name} ({type(module).__name__}) has no bias for the norm's shift")
        weight = getattr(module, facts.weight)
        state[f"{name}.{facts.weight}"] = (form.scale * _BIG**0.5 - facts.offset).expand(weight.shape).to(weight.dtype)
        if facts.bias is not None:
            shift = torch.zeros(weight.shape) if form.shift is None else form.shift
            state[f"{name}.{facts.bias}"] = shift.to(weight.dtype)
    result = stock.load_state_dict(state, strict=False)
    if left := [*result.unexpected_keys, *(k for k in result.missing_keys if k not in dict(_tied(stock)))]:
        raise InputError(f"stock: {base.__name__} has no place for, or misses, {left[0]}")
    return stock


def _tied(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    first = dict(model.named_parameters())
    return [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if n not in first]


class _First(nn.Module):
    """The model as a function of tensors that returns one tensor: logits, or the last hidden state."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self.names, inputs, strict=True))
        result = self.model(**named, **self.options) if self.names[0] else self.model(*inputs)
        for name in ("logits", "last_hidden_state"):
            if getattr(result, name, None) is not None:
                return getattr(result, name)
        return result[0] if isinstance(result, tuple | list) else result


def _save_onnx(model: nn.Module, folder: Path, example: Any) -> str:
    try:
        import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
        import onnxscript  # noqa: F401 (torch.onnx needs it) # pyright: ignore[reportUnusedImport, reportMissingTypeStubs]
    except ImportError as error:
        raise InputError(f"onnx: {error.name} is missing; pip install 'normsmith[onnx]'") from None
    inputs = {k: _plain(v) for k, v in _inputs(make_example(model) if example is None else example).items()}
    half = next((p.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)), None)
    # A copy, so that the caller's model keeps its device, dtype and mode; onnxruntime's CPU kernels know no bfloat16.
    function = _First(copy.deepcopy(model).cpu().float(), list(inputs)).eval()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    tensors = tuple(inputs.values())
    shapes = tuple(
        dict.fromkeys(range(1 if t.is_floating_point() else t.ndim), torch.export.Dim.DYNAMIC) for t in tensors
    )
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the exporter tells about its own steps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                function, tensors, dynamo=True, dynamic_shapes=(shapes,), verbose=False,
                input_names=[n or "input" for n in inputs], output_names=["output"],
            )  # fmt: skip
            assert program is not None
            program.save(path)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"onnx: torch.onnx cannot export this model ({str(error).strip().splitlines()[0]})") from None
    finally:
        logging.disable(before)
    with torch.no_grad():
        expected = function(*tensors)
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        got = session.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=True)))[0]
    except Exception as error:  # onnxruntime's errors have no class in common
        path.unlink()
        raise InputError(f"onnx: onnxruntime cannot run this model ({' '.join(str(error).split())[:200]})") from None
    error = difference([expected.double()], [torch.from_numpy(got).double()])
    if not error <= _ONNX_TOLERANCE:
        path.unlink()
        raise VerificationError(f"onnx: onnxruntime's outputs differ by {error:.1e} (relative); nothing was written")
    for part in ("config", "generation_config"):  # what tools that run the file ask for
        if hasattr(getattr(model, part, None), "save_pretrained"):
            getattr(model, part).save_pretrained(folder)
    wider = "" if half is None else f" in float32 (the model is {str(half).removeprefix('torch.')})"
    return f"written as {path.name}{wider}, onnxruntime's outputs differ by {error:.1e}"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu()


def _inputs(example: Any) -> dict[str, Tensor]:
    if isinstance(example, Tensor):
        return {"": example}
    if not hasattr(example, "items") or not all(isinstance(v, Tensor) for v in example.values()):
        raise InputError("onnx: the example must be one tensor or a mapping of names to tensors")
    return dict(example.items())
