"""Trace tensors back to the parameters they are views or copies of."""

from __future__ import annotations

from torch import Tensor, nn


class Weights:
    """Tells which tensors are views, or copies in the same order, of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        self.storages = {storage_of(p): (name, p) for name, p in self.named.items() if type(p.data) is Tensor}
        self.copies: dict[int, Tensor] = {}  # id of a copy → view of the parameter with the same axes

    def view(self, tensor: Tensor) -> Tensor | None:
        """The view of a parameter that the tensor is, or has the axes of; None for any other tensor."""
        if id(tensor) in self.copies:
            return self.copies[id(tensor)]
        return tensor if storage_of(tensor) in self.storages else None

    def name(self, view: Tensor) -> str:
        """The parameter's name."""
        return self.storages[storage_of(view)][0]

    def span(self, view: Tensor) -> tuple[tuple[int, int], ...]:
        """(start, stop) of a view of a one-dimensional parameter."""
        start = int(view.storage_offset()) - int(self.storages[storage_of(view)][1].storage_offset())
        return ((start, start + view.shape[0]),)

    def bounds(self, view: Tensor, axis: int | None) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Which axis of the parameter `axis` of the view is, and (start, stop) per axis of the parameter, if any."""
        parameter = self.storages[storage_of(view)][1]
        offset = int(view.storage_offset()) - int(parameter.storage_offset())
        where: dict[int, int] = {}
        for i, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            matches = [a for a in range(parameter.ndim) if parameter.stride(a) == stride and size <= parameter.shape[a]]
            if size > 1 and not matches:
                return None
            if size > 1:
                where[next((a for a in matches if a not in where), matches[0])] = i
        bounds: list[tuple[int, int]] = []
        for a in range(parameter.ndim):
            start, offset = divmod(offset, parameter.stride(a)) if parameter.stride(a) else (0, offset)
            bounds.append((start, start + (view.shape[where[a]] if a in where else 1)))
        if any(stop > size for (_, stop), size in zip(bounds, parameter.shape, strict=True)):
            return None
        found = next((a for a, i in where.items() if i == axis), None)
        return None if found is None and axis is not None else (found or 0, tuple(bounds))


def storage_of(tensor: Tensor) -> int:
    """A number that tensors sharing their memory have in common; works on the meta device too."""
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage] (data_ptr is 0 on meta)
    except (NotImplementedError, RuntimeError):  # a subclass without storage (quantised, for instance)
        return -id(tensor)
