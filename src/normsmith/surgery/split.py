"""Scale the queries and keys that read a norm apart from the values, without taking fused weights apart.

Two versions of a norm that differ only in what a token is divided by, y = x̄/D ⊙ γ + β and y′ = x̄/D′ ⊙ γ + β, give a
linear layer's outputs with W·y′ + b = c + (D/D′)·(W·y + b − c), c = W·β + b. So the norm computes one output, that for
the values, and the outputs of the linear layer that are queries or keys are moved along by a hook, whatever the layout
of a fused layer. When both versions are constant, the constant between them goes into the weight's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normsmith.norms.fakeln import FakeNorm
from normsmith.ops.statistics import widen
from normsmith.surgery.find import Site
from normsmith.surgery.uses import Reader


class _Scaled:
    """One linear layer; `rows` (n,) bool marks its queries and keys."""

    def __init__(self, norm: FakeNorm, module: nn.Module, axis: int, rows: Tensor) -> None:
        self.norm, self.module, self.axis, self.rows = norm, module, axis, rows

    def _constant(self) -> Tensor | None:
        """W·β + b, (n,): what the outputs have that does not depend on D; None for nothing."""
        bias = getattr(self.module, "bias", None)
        if self.norm.beta is None:
            return bias
        weight: Tensor = self.module.weight  # pyright: ignore[reportAssignmentType]
        beta = self.norm.beta.to(weight.dtype)
        product = beta @ (weight.T if self.axis == 1 else weight)
        return product if bias is None else product + bias

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The output with the rows of queries and keys as the norm's other version would have given them."""
        ratio = self.norm.ratio
        assert ratio is not None
        wide, constant = widen(output), self._constant()
        ratio = ratio.reshape(*output.shape[:-1], 1)
        # Not c + ratio·(out − c): while both uses normalise, the ratio is 1 and every bit stays.
        moved = wide + (ratio - 1) * (wide if constant is None else wide - constant.to(wide.dtype))
        self.rows = self.rows.to(output.device)  # kept there: a copy in every pass would be waited for
        return torch.where(self.rows, moved.to(output.dtype), output)

    def scale(self, factor: Tensor) -> None:
        """Multiply W's rows of queries and keys by a 0-dim `factor`, and let b make up for what β had there."""
        weight: Tensor = self.module.weight  # pyright: ignore[reportAssignmentType]
        bias = getattr(self.module, "bias", None)
        rows = self.rows.to(weight.device)
        factors = torch.where(rows, factor.double(), 1.0)
        wide = weight.detach().double()
        if self.norm.beta is not None and bias is not None:
            shift = self.norm.beta.detach().double() @ (wide.T if self.axis == 1 else wide)
            bias.data.copy_(bias.double() + (1 - factors) * shift)
        weight.data.copy_(wide * (factors[:, None] if self.axis == 1 else factors))


class SplitReaders:
    """The linear layers that read one fake norm, some of whose outputs are queries or keys."""

    def __init__(self, norm: FakeNorm, readers: list[_Scaled]) -> None:
        self.norm, self.readers = norm, readers
        self._handles: list[RemovableHandle] = [r.module.register_forward_hook(r.hook) for r in readers]
        norm.split = norm._hooked = True  # pyright: ignore[reportPrivateUsage]

    @torch.no_grad()
    def settle(self) -> None:
        """With y_qk = x̄/σ_qk ⊙ γ + β and y = x̄/σ ⊙ γ + β: W′ = (σ/σ_qk)·W for queries and keys, then σ_qk ← σ."""
        factor = self.norm.sigma.double() / self.norm.sigma_qk.double()
        for reader in self.readers:
            reader.scale(factor)
        self.norm.sigma_qk.copy_(self.norm.sigma)

    def close(self) -> None:
        """Take the hooks off, unless queries and keys still differ from values."""
        if self.norm.linear_form() is None:
            return
        for handle in self._handles:
            handle.remove()


def split_readers(model: nn.Module, site: Site, rows: dict[str, Tensor]) -> dict[Reader, Tensor] | str:
    """The readers of an attention norm that make queries or keys, with those outputs marked; or why it has none apart.

    An empty string for a norm that no attention reads. `rows` is from `query_key_rows`.
    """
    found = {r: rows[r.module] for r in site.consumers if r.module in rows and bool(rows[r.module].any())}
    if not found:
        return ""
    if len(site.names) > 1:
        return "the norm stands in several places"
    if all(bool(mask.all()) for mask in found.values()) and len(found) == len(site.consumers):
        return "only queries and keys read it"
    trained = any(p.requires_grad for p in model.parameters())
    for reader in found:
        module = model.get_submodule(reader.module)
        if trained and not model.get_parameter(reader.weight).requires_grad:
            return f"{reader.module} is frozen"
        bias = getattr(module, "bias", None)
        if reader.weight != f"{reader.module}.weight" or reader.module in site.untie:
            return f"{reader.module} shares its weight"
        if site.facts.bias is not None and bias is None:
            return f"{reader.module} has no bias that could take up the norm's shift"
    return found


def make_split(model: nn.Module, norm: FakeNorm, readers: dict[Reader, Tensor]) -> SplitReaders:
    """Put the hooks on the readers of `norm`."""
    return SplitReaders(
        norm, [_Scaled(norm, model.get_submodule(r.module), r.axis, mask) for r, mask in readers.items()]
    )
