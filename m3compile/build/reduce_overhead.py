"""What the engine `reduce-overhead` needs in an artifact: the exported program, and caches."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch.export import ExportedProgram

# Made anew by whoever needs them.
_NOT_CACHED = ("locks",)


def save_exported(exported: ExportedProgram, path: Path) -> None:
    """Write an exported program without its weights, which weights.safetensors holds once.

    `exported` keeps the weights' sizes only.
    """
    state = exported.state_dict
    for name, tensor in list(state.items()):
        state[name] = torch.nn.Parameter(tensor.to("meta"), requires_grad=False)
    torch.export.save(exported, path)


def pack_cache(folder: Path, path: Path) -> None:
    """Write the files of a compiler's cache folder into a zip."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if file.is_file() and name.parts[0] not in _NOT_CACHED:
                archive.write(file, name.as_posix())
