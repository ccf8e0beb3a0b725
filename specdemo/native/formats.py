"""Number formats in which the native engine stores weights, see `formats.h`."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes


@dataclass(frozen=True)
class Format:
    """A number format: stored weights of `bits` bits, and `scales` numbers per `group` of inputs and output.

    `scales` is 0 (floats), 1 (scale) or 2 (scale and minimum); a `group` of 0 contains all inputs. `gguf_type` is the
    type of tensors in GGUF files that are stored in this format, or None.
    """

    name: str
    number: int
    bits: int
    group: int = 0
    scales: int = 0
    scale_bits: int = 32
    gguf_type: int | None = None

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


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("F32", 0, 32, gguf_type=0),
        Format("BF16", 1, 16, gguf_type=30),
        Format("F16", 2, 16, gguf_type=1),
        Format("INT8", 3, 8, scales=1),
        Format("CODE4", 4, 4, group=64, scales=1),
        Format("Q8_0", 5, 8, group=32, scales=1, scale_bits=16, gguf_type=8),
        Format("Q4_0", 6, 4, group=32, scales=1, scale_bits=16, gguf_type=2),
        Format("Q4_1", 7, 4, group=32, scales=2, scale_bits=16, gguf_type=3),
        Format("Q4_K", 8, 4, group=32, scales=2, gguf_type=12),
        Format("Q6_K", 9, 8, group=16, scales=1, gguf_type=14),
    )
}
QUANTISED_GGUF = tuple(name for name, form in FORMATS.items() if form.is_coded and form.gguf_type is not None)


def format_differences(library: ctypes.CDLL) -> list[str]:
    """Return the formats that differ from those in C."""
    compiled = {}
    for number, entry in enumerate(library.format_table()):
        if entry.name is None:
            break
        name, bits = entry.name.decode(), 16 if entry.scale_form == FORMATS["F16"].number else 32
        compiled[name] = (name, number, entry.bits, entry.group, entry.scales, bits)
    expected = {name: astuple(form)[:-1] for name, form in FORMATS.items()}
    return sorted(name for name in expected | compiled if expected.get(name) != compiled.get(name))
