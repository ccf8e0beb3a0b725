"""What went wrong on the way to a model's files, in one sentence: the cause and the way out.

No sentence repeats what a server or a library said, so no token and no address with one in it can get into it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from specdemo.core.errors import UserError


def format_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Turn what goes wrong inside into `UserError` about the model of this name."""
    try:
        yield
    except UserError:
        raise
    except (OSError, HFValidationError, NotASafetensorsRepoError, SafetensorsParsingError, EntryNotFoundError) as error:
        raise UserError(_sentence(name, error)) from None
    except Exception as error:
        if not _from_http(error):
            raise
        raise UserError(_sentence(name, error)) from None


def _sentence(name: str, error: BaseException) -> str:
    for kind, sentence in (
        (HFValidationError, "{} is neither a directory here nor a Hugging Face id: check the spelling"),
        (
            GatedRepoError,
            "{0} is gated: accept its licence on huggingface.co/{0}, then sign in here with `hf auth login`",
        ),
        (RevisionNotFoundError, "{} has no such revision on the hub: give another, or none"),
        (DisabledRepoError, "{} has been disabled on the hub: choose another model"),
        (
            RepositoryNotFoundError,
            "there is no model {} on the hub, or it is private: check the spelling, or sign in with `hf auth login`",
        ),
        (
            NotASafetensorsRepoError,
            "{} has no safetensors weights, and other kinds may hold code: choose another model",
        ),
        (SafetensorsParsingError, "the weights of {} on the hub are damaged: choose another model or revision"),
    ):
        if isinstance(error, kind):
            return sentence.format(name)
    if isinstance(error, LocalEntryNotFoundError):
        return _unreachable(name, error)
    if isinstance(error, EntryNotFoundError):
        return f"{name} on the hub lacks a file that a model needs: choose another model or revision"
    if isinstance(error, HfHubHTTPError):
        return _turned_down(name, error.response.status_code)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk filled up while {name} was being fetched: make room, or set HF_HOME to a larger disk"
    if isinstance(error, PermissionError):
        return f"the model cache may not be written to for {name}: set HF_HOME to a directory of your own"
    return f"the download of {name} was interrupted: run it again, and what has come completely is not fetched twice"


def _unreachable(name: str, error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, HfHubHTTPError):
        return _turned_down(name, cause.response.status_code)
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{name} is not on this machine, and offline mode forbids to fetch it: unset HF_HUB_OFFLINE"
    return (
        f"{name} is not a directory here and the hub could not be asked for it: check the spelling and the network, "
        "or give a local directory"
    )


def _turned_down(name: str, status: int) -> str:
    if status == 401:
        return f"the hub turned down this machine's token for {name}: sign in again with `hf auth login`"
    if status == 403:
        return f"this machine's token may not read {name}: give it that right, or accept the licence on the hub"
    if status == 429:
        return f"the hub has had too many requests from here to give {name} now: try again in a few minutes"
    return f"the hub could not give {name} (error {status}): try again later"


def _from_http(error: BaseException) -> bool:
    """Whether the HTTP library under `huggingface_hub`, whose name changes with its version, raised this."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests")
