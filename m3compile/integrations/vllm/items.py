"""The items of a vLLM batch: which modality, whose rows, in which order.

vLLM hands a batch of one modality as keyword arguments: rows of patches under one key, grids
under another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from m3compile.batch import Batch, check_batch
from m3compile.config import TowerConfig
from m3compile.errors import InputError

IMAGE, VIDEO = "image", "video"

# By modality: the keys of its rows (N, patch_dim) and of its grids (num_items, 3).
_KEYS = {
    IMAGE: ("pixel_values", "image_grid_thw"),
    VIDEO: ("pixel_values_videos", "video_grid_thw"),
}


def modalities_in(mm_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The modalities that have items, in the order of their rows' keys."""
    for key in mm_kwargs:
        for modality, (rows_key, _) in _KEYS.items():
            if key == rows_key and mm_kwargs[key] is not None:
                yield modality


def modality_of(mm_kwargs: Mapping[str, Any]) -> str:
    """The one modality of a batch.

    Raises:
        InputError: it has none, or two.
    """
    found = list(modalities_in(mm_kwargs))
    if len(found) != 1:
        expected = " or ".join(" with ".join(keys) for keys in _KEYS.values())
        raise InputError(f"a batch has keys {sorted(mm_kwargs)}; expected {expected}")
    return found[0]


def read_items(mm_kwargs: Mapping[str, Any], modality: str, tower: TowerConfig) -> Batch:
    """A batch's items, checked. Its rows are one tensor, also where vLLM has a list.

    Raises:
        InputError: a key is missing, or an item breaks a rule of the encoder.
    """
    rows_key, grids_key = _KEYS[modality]
    rows, grids = mm_kwargs.get(rows_key), mm_kwargs.get(grids_key)
    if rows is None or grids is None:
        raise InputError(f"a batch of {modality}s needs both {rows_key} and {grids_key}")
    if isinstance(rows, (list, tuple)):
        rows = torch.cat(list(rows)) if rows else torch.empty(0, tower.patch_dim)
    return check_batch(rows, grids, tower)


def select_items(
    mm_kwargs: Mapping[str, Any], indices: Sequence[int], tower: TowerConfig
) -> dict[str, Any]:
    """The keyword arguments of some items, in the order of `indices`.

    Rows come as one tensor; a view of the batch's, where the items are neighbours. Grids stay
    what they were, a tensor or lists.

    Raises:
        InputError: as `read_items`.
    """
    modality = modality_of(mm_kwargs)
    rows_key, grids_key = _KEYS[modality]
    batch = read_items(mm_kwargs, modality, tower)
    grids: Any = [list(batch.grids[index]) for index in indices]
    source = mm_kwargs[grids_key]
    if isinstance(source, Tensor):
        grids = torch.tensor(grids, dtype=source.dtype, device=source.device).reshape(-1, 3)
    return {rows_key: _rows_of(batch, indices), grids_key: grids}


def _rows_of(batch: Batch, indices: Sequence[int]) -> Tensor:
    rows, starts = batch.rows, batch.starts
    assert isinstance(rows, Tensor)
    if not indices:
        return rows[:0]
    if all(after == before + 1 for before, after in pairwise(indices)):
        return rows[starts[indices[0]] : starts[indices[-1] + 1]]
    return torch.cat([rows[starts[index] : starts[index + 1]] for index in indices])
