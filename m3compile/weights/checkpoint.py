"""A checkpoint folder, checked completely before one weight is read.

Only `config.json`, the index and the headers of those shards that hold vision tensors are opened:
the vision encoder is a few gigabytes of a checkpoint that may have hundreds, and nothing of the
rest matters, not even whether it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import NamedTuple

from m3compile.config import (
    PreprocessConfig,
    TowerConfig,
    preprocess_config_for_tower,
    tower_config_from_checkpoint,
)
from m3compile.config.shown import shown
from m3compile.errors import CheckpointError, CheckpointNotFoundError
from m3compile.weights.files import (
    CONFIG_FILE,
    FLOAT_DTYPES,
    INDEX_FILE,
    PREPROCESSOR_FILE,
    RANDOM_KEY,
    SINGLE_FILE,
    ShardTensor,
    file_size,
    listed,
    read_json_object,
    read_shard_header,
)
from m3compile.weights.naming import (
    checkpoint_name,
    detect_naming,
    is_tower_name,
)
from m3compile.weights.table import tower_tensors


class TensorSource(NamedTuple):
    """One tensor of the checkpoint: its name there, its shard, and where it lies in it."""

    name: str
    file: Path
    tensor: ShardTensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has every tensor of the tower, in the right shape, and no other.

    Attributes:
        path: the folder.
        config: sizes of the tower, from `config.json`.
        naming: one of `NAMINGS`.
        tensors: by our name, in the order of the forward pass, the checkpoint tensors whose rows
            make it up.
        files: the shards that hold vision tensors.
        warnings: what the user should know, one line each.
        preprocessor_config: `preprocessor_config.json`, where there is one.
        is_random: whether `init_checkpoint` wrote it: its embeddings mean nothing.
    """

    path: Path
    config: TowerConfig
    naming: str
    tensors: Mapping[str, tuple[TensorSource, ...]]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    preprocessor_config: Path | None
    is_random: bool = False


def checkpoint_preprocess(checkpoint: Checkpoint) -> PreprocessConfig:
    """The image processor's settings of a checkpoint; the released ones where it has none.

    Raises:
        CheckpointError: the file is not JSON, or a value is impossible or does not fit the encoder.
    """
    path = checkpoint.preprocessor_config
    document = read_json_object(path) if path is not None else {}
    return preprocess_config_for_tower(document, checkpoint.config, str(path))


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Check a checkpoint folder: config, index, and the headers of the shards that matter.

    Raises:
        CheckpointNotFoundError: the folder, its config, its weights or a shard that holds vision
            tensors is absent.
        CheckpointError: something is damaged, or not this encoder: an unsupported config, a
            malformed index or shard, a missing or unexpected vision tensor, a wrong shape, a dtype
            that is not float.
    """
    folder = Path(path)
    if not os.path.exists(folder):
        raise CheckpointNotFoundError(f"checkpoint {folder} does not exist; expected a folder")
    if not os.path.isdir(folder):
        raise CheckpointError(f"checkpoint {folder} is a file; expected a folder")
    config_path = folder / CONFIG_FILE
    document = read_json_object(config_path)
    config = tower_config_from_checkpoint(document, str(config_path))

    shard_of, source, warnings = _placement(folder)
    names = {name for name in shard_of if is_tower_name(name)}
    naming = detect_naming(names, config, source)
    headers = _headers(folder, names, shard_of)
    warnings += _check_shards(folder, headers, shard_of)

    tensors: dict[str, tuple[TensorSource, ...]] = {}
    wrong: list[str] = []
    for ours in tower_tensors(config):
        sources = []
        for part in ours.parts:
            name = checkpoint_name(part.name, naming)
            shard = shard_of[name]
            found = headers[shard][name]
            if found.dtype not in FLOAT_DTYPES:
                wrong.append(
                    f"{folder / shard}: {name} is {listed([found.dtype])}; expected one of "
                    + ", ".join(FLOAT_DTYPES)
                )
            elif found.shape != part.shape:
                wrong.append(
                    f"{folder / shard}: {name} has shape {list(found.shape)}; expected "
                    f"{list(part.shape)} by {CONFIG_FILE}"
                )
            sources.append(TensorSource(name, folder / shard, found))
        tensors[ours.name] = tuple(sources)
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise CheckpointError(wrong[0] + more)
    return Checkpoint(
        path=folder,
        config=config,
        naming=naming,
        tensors=MappingProxyType(tensors),
        files=tuple(folder / shard for shard in sorted(headers)),
        warnings=tuple(warnings),
        preprocessor_config=_optional_file(folder / PREPROCESSOR_FILE),
        is_random=document.get(RANDOM_KEY) is True,
    )


def _placement(folder: Path) -> tuple[dict[str, str], Path, list[str]]:
    """The shard of every tensor by name, the file that says so, and warnings."""
    index_path, single_path = folder / INDEX_FILE, folder / SINGLE_FILE
    # An index that is a link to nothing is an interrupted download, not a checkpoint without one.
    if not os.path.lexists(index_path):
        if not os.path.lexists(single_path):
            raise CheckpointNotFoundError(
                f"checkpoint {folder} has no weights; expected {INDEX_FILE} or {SINGLE_FILE}"
            )
        return dict.fromkeys(read_shard_header(single_path), SINGLE_FILE), single_path, []
    shard_of = read_json_object(index_path).get("weight_map")
    if not isinstance(shard_of, dict):
        raise CheckpointError(
            f"{index_path}: weight_map is {type(shard_of).__name__}; expected an object"
        )
    for name, shard in shard_of.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                f"{index_path}: weight_map places {listed([name])} in {shown(shard)}; "
                "expected the name of a file in the same folder"
            )
    warnings = []
    if os.path.lexists(single_path) and SINGLE_FILE not in shard_of.values():
        warnings.append(f"{single_path} was not read: {INDEX_FILE} does not name it")
    return shard_of, index_path, warnings


def _is_plain_name(shard: object) -> bool:
    # The Windows rules know both separators, and drives.
    return (
        isinstance(shard, str)
        and shard.isprintable()
        and shard not in ("", "..")
        and PureWindowsPath(shard).name == shard
    )


def _headers(
    folder: Path, names: Iterable[str], shard_of: Mapping[str, str]
) -> dict[str, dict[str, ShardTensor]]:
    """Headers of the shards that hold `names`, by shard; every absence is reported at once."""
    names_of: dict[str, list[str]] = {}
    for name in sorted(names):
        names_of.setdefault(shard_of[name], []).append(name)
    absent = [shard for shard in sorted(names_of) if not os.path.exists(folder / shard)]
    if absent:
        raise CheckpointNotFoundError(
            f"checkpoint {folder} lacks "
            + "; ".join(f"{shard}, which holds {listed(names_of[shard])}" for shard in absent)
            + f"; expected by {INDEX_FILE}"
        )
    headers = {shard: read_shard_header(folder / shard) for shard in sorted(names_of)}
    lacking = [
        f"{folder / shard} lacks {listed(lost)}"
        for shard, held in names_of.items()
        if (lost := [name for name in held if name not in headers[shard]])
    ]
    if lacking:
        raise CheckpointError("; ".join(lacking) + f"; expected there by {INDEX_FILE}")
    return headers


def _check_shards(
    folder: Path, headers: Mapping[str, Mapping[str, ShardTensor]], shard_of: Mapping[str, str]
) -> list[str]:
    """Refuse vision tensors that no index names; warn of second copies that are not read."""
    warnings = []
    for shard, header in headers.items():
        held = sorted(name for name in header if is_tower_name(name))
        unexpected = [name for name in held if name not in shard_of]
        if unexpected:
            raise CheckpointError(
                f"{folder / shard}: unexpected vision tensors ({len(unexpected)}): "
                f"{listed(unexpected)}; expected only what {INDEX_FILE} names"
            )
        copies = [name for name in held if shard_of[name] != shard]
        if copies:
            warnings.append(
                f"{folder / shard} also holds {listed(copies)}, not read: {INDEX_FILE} places "
                "them in another shard"
            )
    return warnings


def _optional_file(path: Path) -> Path | None:
    if not os.path.lexists(path):
        return None
    file_size(path)
    return path
