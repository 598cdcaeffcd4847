"""What a loaded encoder takes of the device."""

from __future__ import annotations

import torch

from m3compile.bench.records import Memory


class MemoryGauge:
    """Device memory taken since it was made; the device must be used by nobody else meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self._used, self._reserved = self._now()

    def read(self, weights_bytes: int) -> Memory:
        """Split by owner; `weights_bytes` of it are the weights'."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        used, reserved = self._now()
        pool = sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._device.index
            and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        )
        allocated = reserved - self._reserved
        return Memory(
            weights_bytes=weights_bytes,
            pool_bytes=pool,
            buffers_bytes=max(0, allocated - pool - weights_bytes),
            graphs_bytes=max(0, used - self._used - allocated),
        )

    def _now(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, torch.cuda.memory_reserved(self._device)
