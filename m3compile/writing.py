"""Writing a file whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path

from m3compile.errors import OperationError


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` under a name; what was there is replaced, and stays if this fails.

    Raises:
        OperationError: the file cannot be written.
    """
    # Aside first: a full disk must not leave half a file under the name.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
