"""What the device can do at best, measured with the plainest work there is."""

from __future__ import annotations

import torch

from m3compile.bench.clock import Clock
from m3compile.bench.records import Ceilings

# Large enough that launching and the last wave of tiles do not count; random data, since zeros
# cost a card less power and so run faster.
_CUDA_SIZE, _CPU_SIZE = 8192, 1024
_CUDA_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**26
# A card needs some tens of milliseconds of work to reach its clock.
_CUDA_WARM_UPS = 50


def measure_ceilings(clock: Clock, dtype: torch.dtype) -> Ceilings:
    """The rate of a large matrix product, and the bandwidth of a large copy.

    Args:
        dtype: of the matrices; float32 products use no tensor-float unless torch was told to.
    """
    size = _CUDA_SIZE if clock.is_cuda else _CPU_SIZE
    copy_bytes = _CUDA_COPY_BYTES if clock.is_cuda else _CPU_COPY_BYTES
    a, b = (torch.randn((size, size), device=clock.device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    if clock.is_cuda:
        for _ in range(_CUDA_WARM_UPS):
            torch.mm(a, b, out=product)
    matrix_ms = clock.on_device(lambda: torch.mm(a, b, out=product)).median_ms
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = clock.on_device(lambda: target.copy_(source)).median_ms
    return Ceilings(
        dtype=str(dtype).removeprefix("torch."),
        matrix_size=size,
        flops_per_s=1000 * 2 * size**3 / matrix_ms,
        copy_bytes=copy_bytes,
        # Every byte is read and written.
        bytes_per_s=1000 * 2 * copy_bytes / copy_ms,
    )
