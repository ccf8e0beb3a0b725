"""The one exception that speaks to users."""


class Refused(ValueError):
    """A request that cannot be met; its text is the one sentence shown: the cause and the way out."""
