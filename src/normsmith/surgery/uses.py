"""What a trace of a model records about its norms and its weights."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reader:
    """A product of some features with a parameter.

    `axis` is the parameter's axis that meets the features, `bounds` the part of it that was used, a (start, stop) per
    axis. `bias` names the parameter that is added to the product, with its bounds; `can_add_bias` says that the module
    would use one if it had it. The features were multiplied by `factor` on the way.
    """

    module: str
    weight: str
    axis: int
    bounds: tuple[tuple[int, int], ...]
    bias: str | None = None
    bias_bounds: tuple[tuple[int, int], ...] | None = None
    can_add_bias: bool = False
    factor: float = 1.0


@dataclass
class Product:
    """A product with a parameter, whoever is read, and what its result is used for besides the one norm."""

    reader: Reader
    site: str | None
    others: list[str] = field(default_factory=list)


@dataclass
class Use:
    """What the trace saw of one norm: products that read it, everything else that does, and where its input is from.

    An entry of `others` is a reason in words, or the name of an operation.
    """

    readers: list[Reader] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    producer: Product | None = None
    from_product: bool = False  # its input is the result of a linear layer, or a rearranged part of it
    runs: int = 0
    order: int = 0
    products_before: int = 0
    is_output: bool = False
    width: int = 0


@dataclass
class Trace:
    """Everything one run of the model showed."""

    uses: dict[str, Use]
    products: list[Product]
    heads: set[str]  # the modules whose product is an output of the model
    reads: dict[str, list[tuple[str, str]]]  # parameter → (module, operation) of reads that are no products
    ran: set[str]  # modules that ran
