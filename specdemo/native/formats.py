"""Number formats in which the native engine stores weights, read from `formats.h`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from specdemo.native.interface import CONSTANTS, SOURCES


@dataclass(frozen=True)
class Format:
    """A number format: stored weights of `bits` bits, and `scales` numbers per `group` of inputs and output.

    `scales` is 0 (floats), 1 (scale) or 2 (scale and minimum); a `group` of 0 contains all inputs.
    """

    name: str
    number: int
    bits: int
    group: int = 0
    scales: int = 0
    scale_bits: int = 32

    @property
    def is_coded(self) -> bool:
        """Return True for integers and codes, which are multiplied by quantised activations."""
        return self.scales > 0

    @property
    def has_codes(self) -> bool:
        """Return True if the weights are indices into a table of values."""
        return self.name == "CODE4"

    @property
    def has_bytes(self) -> bool:
        """Return True if the weights are bytes, stored for four inputs at a time."""
        return self.bits == 8

    def matrix_bytes(self, outputs: int, inputs: int, block: int) -> int:
        """Return the bytes of a matrix, without bias, in blocks of `block` outputs."""
        outputs += -outputs % block
        stored = inputs + -inputs % 4 if self.has_bytes else inputs
        groups = inputs // self.group if self.group else 1
        tables = 16 * 4 + 32 if self.has_codes else 0
        return outputs * (stored * self.bits + groups * self.scales * self.scale_bits) // 8 + tables


def _formats() -> Iterator[Format]:
    """Yield the entries `X(name, bits, group, scales, form of the scales, ...)` of FORMAT_LIST."""
    entries = re.findall(r"X\((\w+), (\d+), (\d+), (\d+), (\w+),", (SOURCES / "formats.h").read_text("utf-8"))
    for name, bits, group, scales, scale_form in entries:
        yield Format(
            name=name,
            number=CONSTANTS[name],
            bits=int(bits),
            group=int(group),
            scales=int(scales),
            scale_bits=16 if scale_form == "F16" else 32,
        )


FORMATS: dict[str, Format] = {form.name: form for form in _formats()}
QUANTISED_GGUF = tuple(name for name in FORMATS if name.startswith("Q"))  # types of tensors in GGUF files
