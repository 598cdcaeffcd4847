"""Error kinds and their exit codes.

Every error that m3compile raises on purpose derives from `M3CompileError` and from the built-in
exception that fits, so a caller can catch either. The command line maps an error to its
`exit_code` and prints its message as one line.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the command line returns; part of the contract."""

    OK = 0
    VERIFICATION = 1
    REQUEST = 2
    ARTIFACT = 3
    FAILED = 4
    INTERRUPTED = 130


class M3CompileError(Exception):
    """Base of every error raised on purpose. The message is one readable line."""

    exit_code: ExitCode = ExitCode.FAILED


class VerificationError(M3CompileError, RuntimeError):
    """A compiled path differs from eager by more than its bound."""

    exit_code = ExitCode.VERIFICATION


class RequestError(M3CompileError, ValueError):
    """The request is wrong: an argument, a build config or an input file."""

    exit_code = ExitCode.REQUEST


class ConfigError(RequestError):
    """A build config has an unknown key or an impossible value."""


class InputError(RequestError):
    """What was handed to `encode` is not a valid batch; names the item and the rule."""


class TooLargeError(InputError):
    """What was handed over is well formed but above a limit; names the limit."""


class InputNotFoundError(RequestError, FileNotFoundError):
    """A file that the request names does not exist."""


class DependencyError(RequestError, ImportError):
    """The request needs an optional package that is not installed; names the extra to install."""


class CheckpointError(M3CompileError, ValueError):
    """The checkpoint is damaged or holds something this encoder does not support."""

    exit_code = ExitCode.ARTIFACT


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint, or a shard of it that is needed, does not exist."""


class ArtifactError(M3CompileError):
    """Base of the errors about an artifact on disk."""

    exit_code = ExitCode.ARTIFACT


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """There is no artifact at this path."""


class ArtifactDamagedError(ArtifactError, ValueError):
    """A file of the artifact is missing, truncated, altered or malformed."""


class ArtifactIncompatibleError(ArtifactError, RuntimeError):
    """The artifact is intact, but this machine or this version cannot run it."""


class OperationError(M3CompileError, RuntimeError):
    """The operation failed: compiler, device, memory, disk, or a fault of our own."""


class BuildError(OperationError):
    """The build failed; nothing was published."""


class EncoderClosedError(OperationError):
    """The encoder was used after `close()`."""


class ServiceError(OperationError):
    """A server did not answer: out of reach, starting, draining, full, too slow or failed."""
