"""An op that adds a matrix product to the residual where it lies.

cuBLAS reads and writes the residual in the product's epilogue, which costs nothing measurable; a
product of its own and a pass that adds it move twice the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRODUCT_SCHEMA = "add_product_(Tensor(a!) x, Tensor y, Tensor weight) -> ()"


def _add_product(x: Tensor, y: Tensor, weight: Tensor) -> None:
    x.addmm_(y, weight.t())


_LIBRARY = torch.library.Library("m3compile", "FRAGMENT")
_LIBRARY.define(PRODUCT_SCHEMA)
_LIBRARY.impl("add_product_", _add_product, "CPU")
_LIBRARY.impl("add_product_", _add_product, "CUDA")


@torch.library.register_fake("m3compile::add_product_", lib=_LIBRARY)
def _fake(x: Tensor, y: Tensor, weight: Tensor) -> None:
    return None


def add_product_(x: Tensor, y: Tensor, weight: Tensor) -> None:
    """`x += y @ weight.T` in place: `x` (P, H), `y` (P, K), `weight` (H, K), one dtype."""
    torch.ops.m3compile.add_product_(x, y, weight)
