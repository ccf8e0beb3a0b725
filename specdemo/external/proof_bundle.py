"""Proof bundles: token ids of runs and of AR decoding, margins where they differ, and digests.

Any engine can write this form, see docs/other-engines.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdemo.core.errors import ListOf, UserError, limited_object, plain_text
from specdemo.core.step import common_prefix

_TOLERANCE = 0.05  # nats between the margins of machines
_REMEDY = "give a file that prove --bundle has written"
_Text = Annotated[str, Field(max_length=400)]
_Facts = dict[_Text, _Text]
_Ids = ListOf[Annotated[int, Field(ge=0, lt=1 << 31)]]
_Margin = Annotated[float, Field(ge=0)] | None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ProvedText(_Part):
    """Texts of AR decoding and of a run after a prompt; `difference`: index of their first different token.

    Margins there: log-probability of the most probable token minus that of the second; None if it is unknown.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    prompt_ids: _Ids
    reference_ids: _Ids
    ids: _Ids
    difference: int | None
    reference_margin: _Margin
    margin: _Margin

    @model_validator(mode="after")
    def _ids_differ_there(self) -> Self:
        first = None if self.ids == self.reference_ids else common_prefix(self.ids, self.reference_ids)
        margins = (self.reference_margin, self.margin)
        if self.difference != first or (first is None and margins != (None, None)):
            raise ValueError("the difference contradicts the ids")
        return self

    def repeats(self, other: ProvedText) -> bool:
        """Return True for equal ids and nearly equal margins, as far as these are known."""
        pairs = ((self.reference_margin, other.reference_margin), (self.margin, other.margin))
        near = all(a is None or b is None or math.isclose(a, b, abs_tol=_TOLERANCE) for a, b in pairs)
        margins = {"reference_margin", "margin"}
        return near and self.model_dump(exclude=margins) == other.model_dump(exclude=margins)


class ProvedRun(_Part):
    """Texts of an engine; the index of a text is its seed."""

    engine: _Text
    options: dict[_Text, str | int | float | bool]
    texts: Annotated[ListOf[ProvedText], Field(min_length=1)]


class ProofBundle(_Part):
    """Runs on the same prompts; versions and digests by engine, SHA-256 of the models by `role/file`."""

    proof_bundle: Literal[1] = 1
    software: dict[_Text, _Facts]
    files: _Facts
    runs: Annotated[ListOf[ProvedRun], Field(min_length=1)]
    digest: str = ""

    @model_validator(mode="after")
    def _prompts_agree(self) -> Self:
        if len({tuple(text.prompt for text in run.texts) for run in self.runs}) > 1:
            raise ValueError("the runs have different prompts")
        return self

    def write(self) -> str:
        values = self.model_dump()
        return json.dumps({**values, "digest": _content_digest(values)}) + "\n"


def read_bundle(text: str) -> ProofBundle:
    """Check form, consistency and digest. Raises `UserError`."""
    try:
        values = json.loads(text, object_pairs_hook=limited_object)
        bundle = ProofBundle.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = plain_text(".".join(map(str, problem["loc"])) or "runs", 80)
        raise UserError(f"the proof bundle is invalid at {place} ({plain_text(problem['msg'])}): {_REMEDY}") from None
    except (ValueError, RecursionError):
        raise UserError(f"the file is no proof bundle: {_REMEDY}") from None
    if bundle.digest != _content_digest(values):
        raise UserError(f"the proof bundle was changed, since its digest is that of another content: {_REMEDY}")
    return bundle


def _content_digest(values: dict[str, Any]) -> str:
    content = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
