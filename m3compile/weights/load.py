"""The tower's tensors out of a checkpoint, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from m3compile.errors import CheckpointError, RequestError
from m3compile.geometry import inverse_frequencies
from m3compile.weights.checkpoint import Checkpoint, TensorSource
from m3compile.weights.files import listed, read_shard_header, read_tensor
from m3compile.weights.table import tower_tensor_shapes


def load_tower_state(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Read the tower's weights; at most one checkpoint tensor is held beside the result.

    Args:
        checkpoint: from `open_checkpoint`.
        dtype: float dtype of every tensor of the result.
        device: where the result lies.
        progress: called with checkpoint tensors read so far, and their number.

    Returns:
        Contiguous tensors with the names, order and shapes of `tower_tensor_shapes`.

    Raises:
        CheckpointError: a file can no longer be read or has changed since it was opened, or a
            tensor holds a value that is not finite, in its own dtype or in `dtype`.
        RequestError: `dtype` is not a float dtype.
    """
    if not dtype.is_floating_point:
        raise RequestError(f"dtype is {dtype}; expected a float dtype")
    _refuse_changes(checkpoint)
    total = sum(len(sources) for sources in checkpoint.tensors.values())
    done = 0
    state: dict[str, torch.Tensor] = {}
    for name, shape in tower_tensor_shapes(checkpoint.config).items():
        whole = torch.empty(shape, dtype=dtype, device=device)
        row = 0
        for source in checkpoint.tensors[name]:
            rows = source.tensor.shape[0]
            _copy_into(whole[row : row + rows], source)
            row += rows
            done += 1
            if progress is not None:
                progress(done, total)
        assert row == shape[0], f"{name} has {shape[0]} rows, its parts {row}"
        state[name] = whole
    return state


def load_module_state(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Every parameter of the tower's module: the weights, and what derives from the config.

    Arguments and errors as `load_tower_state`, whose result this is with `inverse_frequency`
    (axis_dim / 2,) float32 beside it.
    """
    state = load_tower_state(checkpoint, dtype, device, progress)
    state["inverse_frequency"] = inverse_frequencies(checkpoint.config).to(device)
    return state


def _copy_into(target: torch.Tensor, source: TensorSource) -> None:
    found = read_tensor(source.file, source.tensor)
    if not _is_finite(found):
        count = int(found.numel() - found.isfinite().sum())
        raise CheckpointError(
            f"{source.file}: {listed([source.name])} holds {count} values that are not finite, of "
            f"{found.numel()}; expected none"
        )
    target.copy_(found.reshape(target.shape))
    if found.dtype != target.dtype and not _is_finite(target):
        raise CheckpointError(
            f"{source.file}: {listed([source.name])} reaches {float(found.abs().max()):.3g}; "
            f"expected at most {torch.finfo(target.dtype).max:.3g}, the largest {target.dtype}"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    # One pass without a temporary of the tensor's size; NaN comes through as both.
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


def _refuse_changes(checkpoint: Checkpoint) -> None:
    headers = {file: read_shard_header(file) for file in checkpoint.files}
    for sources in checkpoint.tensors.values():
        for source in sources:
            if headers[source.file].get(source.name) != source.tensor:
                raise CheckpointError(
                    f"{source.file}: {listed([source.name])} has changed since the checkpoint was "
                    "opened; expected files that nobody writes to"
                )
