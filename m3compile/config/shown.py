"""How a value from a file is quoted in an error message: on one line, and never at length."""

from __future__ import annotations

import reprlib
from typing import Any

_MAX_CHARS = 120
_MAX_BITS = 256


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python itself does not print whole numbers of many thousand digits.
        return repr(x) if x.bit_length() <= _MAX_BITS else f"<a number of {x.bit_length()} bits>"


_repr = _Repr()
_repr.maxstring = _repr.maxother = _MAX_CHARS
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdict = 8
# An alias in YAML can make a few lines into a structure of billions: look only near its top.
_repr.maxlevel = 3


def shown(value: Any) -> str:
    """`value` as Python would write it, shortened; one line whatever it holds."""
    text = _repr.repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def one_line(error: Exception) -> str:
    """An error's own text on one line, whatever names from a file it quotes; shortened."""
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error)
    )
    return text if len(text) <= 4 * _MAX_CHARS else f"{text[: 4 * _MAX_CHARS]}..."
