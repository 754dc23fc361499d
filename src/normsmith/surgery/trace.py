"""Find out who reads a norm's output: run the model once and watch every operation below autograd.

Watched tensors are followed through everything that only rearranges elements. For a norm's output a *shadow* of the
same shape goes along, holding at every place the number of the feature that stands there, so that any mixture of views,
slices, gathers and permutations is understood by doing the same to the shadow. For weights the shadow is a view of the
parameter, so that a product with a slice, a transpose or a cast copy of it is traced back to the rows it used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from normsmith.surgery.uses import Product, Reader, Trace, Use
from normsmith.surgery.verify import tensors_of
from normsmith.surgery.weights import Weights, storage_of

_aten = torch.ops.aten
_REARRANGE = {
    *(_aten.view, _aten._unsafe_view, _aten.reshape, _aten.permute, _aten.transpose, _aten.t, _aten.expand),
    *(_aten.unsqueeze, _aten.squeeze, _aten.select, _aten.slice, _aten.index, _aten.index_select, _aten.clone),
    *(_aten._to_copy, _aten.detach, _aten.alias, _aten.split, _aten.split_with_sizes, _aten.unbind, _aten.narrow),
    *(_aten.repeat, _aten.flip, _aten.roll, _aten.cat, _aten.stack, _aten.gather, _aten.lift_fresh, _aten.unfold),
}
_SAME_PLACES = {_aten.clone, _aten._to_copy, _aten.detach, _aten.alias, _aten.lift_fresh}
_RESHAPES = {_aten.view, _aten._unsafe_view, _aten.reshape} | _SAME_PLACES
# Products, with the positions of the two factors and of the bias, and the axes that are contracted.
_PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    _aten.mm: (0, 1, None),
    _aten.addmm: (1, 2, 0),
    _aten.bmm: (0, 1, None),
    _aten.baddbmm: (1, 2, 0),
    _aten._grouped_mm: (0, 1, None),
    _aten.mv: (0, 1, None),
}
# May stand between a head and the output.
_POINTWISE = {_aten.mul, _aten.div, _aten.add, _aten.sub, _aten.tanh, _aten.sigmoid, _aten.neg}
_ALLOCATIONS = {_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.new_zeros, _aten.new_empty, _aten.sym_size}
STREAM, RETURNED = "also feeds the residual stream", "the model returns it"
_WORDS = {"add": STREAM, "add_": STREAM}


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module, sites: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.sites = model, sites
        self.weights = Weights(model)
        self.constants = {id(buffer) for buffer in model.buffers() if buffer.ndim <= 1}
        self.uses = {name: Use() for name in sites}
        self.features: dict[int, tuple[str, Tensor, float]] = {}  # id → (site, shadow, factor)
        self.results: dict[int, Product] = {}  # id of a product's result, as it is
        self.descendants: dict[int, str] = {}  # id of a tensor made from one product by pointwise operations → module
        self.alive: list[Any] = []  # keeps ids from being reused
        self.products: list[Product] = []
        self.reads: dict[str, list[tuple[str, str]]] = {}
        self.stack: list[str] = [""]
        self.inside: list[str] = []  # sites that are running
        self.ran: set[str] = set()

    # -- module boundaries

    def enter(self, name: str, args: list[Any]) -> None:
        self.ran.add(name)
        self.stack.append(name)
        if name in self.sites:
            if not self.inside:
                self._site_input(self.uses[name], args)
            self.inside.append(name)

    def _site_input(self, use: Use, args: list[Any]) -> None:
        use.order = use.order or sum(u.runs for u in self.uses.values()) + 1
        use.runs += 1
        if use.runs == 1:
            use.products_before = len(self.products)
        source = next((a for a in args if isinstance(a, Tensor)), None)
        if source is None:
            return
        use.width = source.shape[-1]
        use.from_product = id(source) in self.descendants
        product = self.results.get(id(source))
        if use.runs == 1:
            use.producer = product
        elif product is not use.producer:
            use.producer = None
        if product is not None and product is not use.producer:
            product.others.append("another norm")
        if id(source) in self.features:
            self.uses[self.features[id(source)][0]].others.append("another norm")

    def leave(self, name: str, args: list[Any], output: Any) -> Any:
        """The module's output, as a tensor of its own where a norm hands its input through."""
        self.stack.pop()
        if name not in self.sites:
            return output
        if any(output is a for a in args) and isinstance(output, Tensor):
            output = output.view_as(output)  # else whoever reads the input would be taken for a reader of the norm
        self.inside.pop()
        if not self.inside and isinstance(output, Tensor):
            self.results.pop(id(output), None)
            shadow = torch.arange(output.shape[-1], device="cpu").expand(output.shape)
            self.features[id(output)] = (name, shadow, 1.0)
            self.alive.append(output)
        return output

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.inside:
            self._see(func.overloadpacket, func, args, kwargs, out)
        return out

    def _see(self, op: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        weights = [v for t in tensors if (v := self.weights.view(t)) is not None]
        if op in _ALLOCATIONS or not (
            weights or any(id(t) in d for t in tensors for d in (self.features, self.results, self.descendants))
        ):
            return
        if op in _PRODUCTS:
            self._product(op, args, out)
            return
        if op is _aten.add and len(tensors) == 2 and self._late_bias(tensors, out):
            return
        self._follow_results(op, tensors, out)
        if weights and not self._follow_weights(op, func, args, kwargs, out):
            for view in weights:
                self.reads.setdefault(self.weights.name(view), []).append((str(self.stack[-1]), str(op.__name__)))
        labelled = [self.features[id(t)] for t in tensors if id(t) in self.features]
        if labelled and not self._follow_features(op, func, args, kwargs, out):
            for site in {site for site, _, _ in labelled}:
                self.uses[site].others.append(_WORDS.get(name := str(op.__name__), name))
            if func._schema.is_mutable:  # written over: what stands there now is no norm's output
                self.features.pop(id(args[0]), None)

    def _follow_features(self, op: Any, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        labels = [self.features[id(t)] for t in tensors if id(t) in self.features]
        site, shadow, factor = labels[0]
        if op in (_aten.mul, _aten.div) and not func._schema.is_mutable and len(tensors) <= 2:
            other = args[1] if isinstance(args[0], Tensor) and id(args[0]) in self.features else args[0]
            number = _number(other)
            if number is None or (args[0] is other and op is _aten.div):
                return False
            self._label(out, site, shadow, factor * number if op is _aten.mul else factor / number)
            return True
        if op not in _REARRANGE or any(label[0] != site or label[2] != factor for label in labels):
            return False
        if op in _SAME_PLACES:
            self._label(out, site, shadow, factor)
            return True
        if op is _aten.index and any(isinstance(i, Tensor) and i.is_meta for i in args[1]):
            if len(args[1]) >= args[0].ndim or not _whole(shadow, -1):
                return False
            row = torch.arange(shadow.shape[-1], device="cpu")  # whichever row it is
            self._label(out, site, row.expand(out.shape), factor)
            return True
        try:
            foreign = op in (_aten.cat, _aten.stack)  # joined with other tensors, whose features count as none of ours

            def swap(t: Tensor) -> Tensor:
                if id(t) in self.features:
                    return self.features[id(t)][1]
                return torch.full(t.shape, -1, device="cpu") if foreign else t

            shadows = self._replay(func, args, kwargs, swap)
        except (RuntimeError, NotImplementedError):  # indices without values, on the meta device
            return False
        for result, its_shadow in zip(tree_leaves(out), tree_leaves(shadows), strict=True):
            self._label(result, site, its_shadow, factor)
        return True

    def _label(self, tensor: Tensor, site: str, shadow: Tensor, factor: float) -> None:
        self.features[id(tensor)] = (site, shadow, factor)
        self.alive.append(tensor)

    def _replay(self, func: Any, args: Any, kwargs: Any, swap: Callable[[Tensor], Tensor]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        new = [swap(leaf).cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(new, spec)
        func = _aten.reshape.default if func.overloadpacket in (_aten.view, _aten._unsafe_view) else func
        return func(*args, **kwargs)

    def _follow_weights(self, op: Any, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Go along with views (they share the storage, nothing to do) and copies of parameters."""
        source = args[0] if args and isinstance(args[0], Tensor) else None
        view = None if source is None else self.weights.view(source)
        if view is None:
            return False
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if op in _REARRANGE and all(self.weights.view(t) is not None for t in results):
            return True
        if op in _SAME_PLACES:
            shadows: Any = view
        elif op in (_aten.index, _aten.index_select) and view.ndim == results[0].ndim:
            shadows = view  # a choice of experts: counts as reading all of them, the axes are the same
        elif op in _REARRANGE:
            try:
                shadows = func(view, *args[1:], **kwargs)
            except RuntimeError:
                return False
        else:
            return False
        for result, shadow in zip(results, tree_leaves(shadows), strict=True):
            if storage_of(shadow) not in self.weights.storages:
                return False
            self.weights.copies[id(result)] = shadow
            self.alive.append(result)
        return True

    def _follow_results(self, op: Any, tensors: list[Tensor], out: Any) -> None:
        read = [self.results[id(t)] for t in tensors if id(t) in self.results]
        if len(read) == 1 and op in _RESHAPES:
            self.results[id(out)] = read[0]
            self.alive.append(out)
        else:
            for product in read:
                product.others.append(op.__name__)
        made = {self.descendants[id(t)] for t in tensors if id(t) in self.descendants}
        # The mean and scale of a table's units, which its model holds, are no other tensors.
        others = len(tensors) - len(made) - (op in _POINTWISE and sum(id(t) in self.constants for t in tensors))
        if len(made) == 1 and (op in _REARRANGE or op in _POINTWISE) and others <= (op in _REARRANGE):
            for result in tree_leaves(out):
                self.descendants[id(result)] = next(iter(made))
                self.alive.append(result)

    # -- products

    def _late_bias(self, tensors: list[Tensor], out: Tensor) -> bool:
        """A product and its bias, added in an operation of its own."""
        for result, added in (tensors, tensors[::-1]):
            product, view = self.results.get(id(result)), self.weights.view(added)
            if product is None or view is None or view.ndim != 1 or product.reader.bias is not None:
                continue
            old = product.reader
            product.reader = replace(old, bias=self.weights.name(view), bias_bounds=self.weights.span(view))
            if product.site is not None:
                readers = self.uses[product.site].readers
                readers[:] = [product.reader if reader == old else reader for reader in readers]
            self.results[id(out)], self.descendants[id(out)] = product, product.reader.module
            self.alive.append(out)
            return True
        return False

    def _product(self, op: Any, args: tuple[Any, ...], out: Tensor) -> None:
        first, second, bias = _PRODUCTS[op]
        a, b = args[first], args[second]
        for t in tree_leaves(args):
            if isinstance(t, Tensor) and id(t) in self.results:
                self.results[id(t)].others.append("a product")
        a_axis, b_axis = a.ndim - 1, b.ndim - 2 if b.ndim > 1 else 0
        for x, x_axis, w, w_axis in ((a, a_axis, b, b_axis), (b, b_axis, a, a_axis)):
            view = self.weights.view(w)
            if view is not None and self.weights.view(x) is None:
                added = args[bias] if bias is not None else None
                self._product_with_weight(x, x_axis, view, w_axis, added, out)
                return
        for t in (a, b):
            if id(t) in self.features:
                self.uses[self.features[id(t)][0]].others.append("a product with activations or a computed weight")

    def _product_with_weight(
        self, x: Tensor, x_axis: int, view: Tensor, w_axis: int, added: Tensor | None, out: Tensor
    ) -> None:
        name, place = self.weights.name(view), self.weights.bounds(view, w_axis)
        label = self.features.get(id(x))
        if place is None:
            self.reads.setdefault(name, []).append((self.stack[-1], "an unusual view"))
            if label is not None:
                self.uses[label[0]].others.append(f"reads {name} through an unusual view")
            return
        reader = self._reader(name, place, added, 1.0 if label is None else label[2])
        product = Product(reader, None if label is None else label[0])
        self.products.append(product)
        if label is not None:
            site, shadow, _ = label
            if shadow.shape[x_axis] != self.uses[site].width or not _whole(shadow, x_axis):
                self.uses[site].others.append(f"{reader.module} reads a part of its features")
            elif reader not in self.uses[site].readers:
                self.uses[site].readers.append(reader)
        self.results[id(out)] = product
        self.descendants[id(out)] = reader.module
        self.alive.append(out)

    def _reader(self, name: str, place: Any, added: Tensor | None, factor: float) -> Reader:
        axis, bounds = place
        module = self.stack[-1]
        owner = self.model.get_submodule(module)
        weight = self.weights.named[name]
        whole = bounds == tuple((0, size) for size in weight.shape)
        if whole and getattr(owner, "weight", None) is weight and "bias" in getattr(owner, "_parameters", {}):
            bias = f"{module}.bias" if module else "bias"
            return Reader(module, name, axis, bounds, bias, None, True, factor)
        view = None if added is None else self.weights.view(added)
        if view is not None and view.ndim == 1:
            return Reader(module, name, axis, bounds, self.weights.name(view), self.weights.span(view), False, factor)
        return Reader(module, name, axis, bounds, factor=factor)


def _whole(shadow: Tensor, axis: int) -> bool:
    """Whether the features stand along this axis, all in order."""
    return bool((shadow.movedim(axis, -1) == torch.arange(shadow.shape[axis], device="cpu")).all())


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta and not isinstance(value, nn.Parameter):
        return float(value)
    return None


def trace(model: nn.Module, sites: Mapping[str, nn.Module], run: Callable[[], Any]) -> Trace:
    """Run the model once, in evaluation mode without gradients, by calling `run`, and watch who reads `sites`."""
    watch = _Watch(model, sites)
    modes = {module: module.training for module in model.modules()}
    handles: list[Any] = []

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., Any]]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch.enter(name, [*args, *kwargs.values()])

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return watch.leave(name, [*args, *kwargs.values()], output)

        return enter, leave

    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        for name, module in model.named_modules():
            enter, leave = hooks(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        torch.backends.mha.set_fastpath_enabled(False)  # fused into one operation, nothing could be seen
        model.eval()
        with torch.no_grad(), watch:
            outputs = run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, mode in modes.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    heads: set[str] = set()
    for tensor in tensors_of(outputs):
        if id(tensor) in watch.features:
            use = watch.uses[watch.features[id(tensor)][0]]
            use.is_output = True
            use.others.append(RETURNED)
        if id(tensor) in watch.descendants:
            heads.add(watch.descendants[id(tensor)])
    return Trace(watch.uses, watch.products, heads, watch.reads, watch.ran)
