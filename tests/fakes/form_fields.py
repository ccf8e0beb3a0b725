"""Fields of the page's form of settings."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Field:
    """Attributes of a field, with the titles of its choices by name."""

    attributes: dict[str, str | None]
    choices: dict[str, str] = field(default_factory=dict)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Field] = {}
        self._field = Field({})
        self._choice: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if name := attributes.get("data-setting"):
            self._field = self.fields[name] = Field(attributes)
        elif tag == "option" or (tag == "input" and attributes.get("type") == "checkbox"):
            self._choice = attributes.get("value")

    def handle_data(self, data: str) -> None:
        if self._choice is not None:
            self._field.choices[self._choice] = data
            self._choice = None


def form_markup(blocks: Any) -> str:
    """Return the HTML of the form."""
    (markup,) = (part.value for part in blocks.blocks.values() if part.elem_id == "settings-fields")
    return markup


def form_fields(blocks: Any) -> dict[str, Field]:
    """Return the fields by name of the setting."""
    reader = _Reader()
    reader.feed(form_markup(blocks))
    return reader.fields
