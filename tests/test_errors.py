"""Every kind of error against the contract: the exit code of its family, and the built-in error
that a caller may catch instead.
"""

from __future__ import annotations

import pytest

import m3compile
from m3compile import errors
from m3compile.errors import ExitCode, M3CompileError

# Exit code and built-in error of every kind. One that is missing here has no contract.
CONTRACT: dict[str, tuple[int, type[Exception]]] = {
    "M3CompileError": (4, Exception),
    "VerificationError": (1, RuntimeError),
    "RequestError": (2, ValueError),
    "ConfigError": (2, ValueError),
    "InputError": (2, ValueError),
    "TooLargeError": (2, ValueError),
    "InputNotFoundError": (2, FileNotFoundError),
    "DependencyError": (2, ImportError),
    "CheckpointError": (3, ValueError),
    "CheckpointNotFoundError": (3, FileNotFoundError),
    "ArtifactError": (3, Exception),
    "ArtifactNotFoundError": (3, FileNotFoundError),
    "ArtifactDamagedError": (3, ValueError),
    "ArtifactIncompatibleError": (3, RuntimeError),
    "OperationError": (4, RuntimeError),
    "BuildError": (4, RuntimeError),
    "EncoderClosedError": (4, RuntimeError),
    "ServiceError": (4, RuntimeError),
}
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, M3CompileError)
}


def test_exit_codes_are_those_of_the_contract() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "VERIFICATION": 1,
        "REQUEST": 2,
        "ARTIFACT": 3,
        "FAILED": 4,
        "INTERRUPTED": 130,
    }


def test_every_kind_has_a_contract() -> None:
    assert KINDS.keys() == CONTRACT.keys()


@pytest.mark.parametrize("name", CONTRACT)
def test_a_kind_of_error(name: str) -> None:
    kind = KINDS[name]
    code, builtin = CONTRACT[name]
    assert kind.exit_code == code
    assert issubclass(kind, (M3CompileError, builtin))
    assert issubclass(kind, builtin)
    assert kind.__doc__


@pytest.mark.parametrize("name", CONTRACT)
def test_the_message_is_what_was_said(name: str) -> None:
    """`KeyError` and `OSError` would dress it up."""
    assert str(KINDS[name]("found this, expected that")) == "found this, expected that"


def test_the_package_offers_the_base() -> None:
    assert m3compile.M3CompileError is M3CompileError
