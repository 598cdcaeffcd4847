"""Matrix products in shapes that a compiler does not choose by itself.

`add_product_` adds to the residual where it lies: cuBLAS reads and writes it in the product's
epilogue, which costs nothing measurable, while a product of its own and a pass that adds it move
twice the bytes. `split_product` cuts the sum of a product into parts that run side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRODUCT_SCHEMA = "add_product_(Tensor(a!) x, Tensor y, Tensor weight) -> ()"

SPLIT_SCHEMA = "split_product(Tensor y, Tensor weight, int splits) -> Tensor"


def _add_product(x: Tensor, y: Tensor, weight: Tensor) -> None:
    x.addmm_(y, weight.t())


def _split_product(y: Tensor, weight: Tensor, splits: int) -> Tensor:
    parts = y.unflatten(1, (splits, -1)).transpose(0, 1)
    return torch.bmm(parts, weight.unflatten(1, (splits, -1)).permute(1, 2, 0))


_LIBRARY = torch.library.Library("m3compile", "FRAGMENT")
_LIBRARY.define(PRODUCT_SCHEMA)
_LIBRARY.impl("add_product_", _add_product, "CPU")
_LIBRARY.impl("add_product_", _add_product, "CUDA")
_LIBRARY.define(SPLIT_SCHEMA)
_LIBRARY.impl("split_product", _split_product, "CPU")
_LIBRARY.impl("split_product", _split_product, "CUDA")


@torch.library.register_fake("m3compile::add_product_", lib=_LIBRARY)
def _fake_add(x: Tensor, y: Tensor, weight: Tensor) -> None:
    return None


@torch.library.register_fake("m3compile::split_product", lib=_LIBRARY)
def _fake_split(y: Tensor, weight: Tensor, splits: int) -> Tensor:
    return y.new_empty(splits, y.shape[0], weight.shape[0])


def add_product_(x: Tensor, y: Tensor, weight: Tensor) -> None:
    """`x += y @ weight.T` in place: `x` (P, H), `y` (P, K), `weight` (H, K), one dtype."""
    torch.ops.m3compile.add_product_(x, y, weight)


def split_product(y: Tensor, weight: Tensor, splits: int) -> Tensor:
    """The parts of `y @ weight.T`: (splits, P, H), whose sum over the first dim is the product.

    Args:
        y, weight: (P, K) and (H, K), contiguous, K a multiple of `splits`.
    """
    parts: Tensor = torch.ops.m3compile.split_product(y, weight, splits)
    return parts
