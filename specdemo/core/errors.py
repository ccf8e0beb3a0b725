"""The one exception that speaks to users."""

from collections.abc import Collection


class UserError(ValueError):
    """A request that cannot be met; its text is the one sentence shown: the cause and the way out."""


def check_name(kind: str, name: str, names: Collection[str]) -> None:
    """Refuse a name that is not among `names`."""
    if name not in names:
        raise UserError(f"unknown {kind} {name!r}: known are {', '.join(names)}")
