"""Processes with limits of time and memory for files that may contain hostile programs.

In such processes tokenizers and configurations without a schema are tried, and pickled heads are converted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError, plain_text, write_error
from specdemo.worker import interruptible

_ROOT = Path(__file__).parents[2]


class LimitedProcess:
    """Process of a program that calls `serve`, started by the first request, and again after its end."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._program = (module, *arguments)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # the process answers a request at a time

    def request(self, request: Any, seconds: float, subject: str, remedy: str) -> Any:
        """Return the answer. Raises `UserError` about `subject`."""
        with self._lock:
            process, start = self._running(), time.monotonic()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(seconds, _end, [process])
            timer.start()
            reply = ""
            try:
                process.stdin.write(json.dumps(request, default=str) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                pass  # the process ended
            finally:
                timer.cancel()
                timer.join()  # the next request must not use a process that is being ended
        if not reply and time.monotonic() - start >= seconds:
            raise UserError(f"{subject} takes more than {seconds:g} s: {remedy}")
        try:
            answer: dict[str, Any] = json.loads(reply) if reply else {"code": process.wait()}
        except ValueError:  # a limit ended the fork while it wrote
            answer = {"error": "its answer is incomplete"}
        if "code" in answer:
            raise UserError(f"{subject} took too much time or memory (code {answer['code']}): {remedy}")
        if "error" in answer:
            raise UserError(f"{subject} failed ({plain_text(answer['error'], 200)}): {remedy}")
        return answer["value"]

    def try_file(self, path: Path, request: tuple[str, ...], seconds: float, subject: str) -> None:
        """Raise `UserError` about a request that fails; it is repeated only after a change of the file."""
        if problem := _problem(self, request, path.stat().st_mtime_ns, seconds, subject):
            raise UserError(problem)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                cwd=_ROOT,
                start_new_session=True,  # it ends with its forks
            )
        return self._process


@lru_cache(maxsize=16)  # prompts are encoded several times
def _problem(process: LimitedProcess, request: tuple[str, ...], changed: int, seconds: float, subject: str) -> str:
    """Return the error of a request, or an empty text; other jobs use the device meanwhile."""
    try:
        interruptible(lambda: process.request(request, seconds, subject, "choose another model"))
    except UserError as error:
        return str(error)
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    if sys.platform != "win32" and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def serve(respond: Callable[[Any], Any], cpu_seconds: int, max_bytes: int) -> None:
    """Answer the requests of standard input, each in a fork with limits; without forks, a single request."""
    for line in sys.stdin:
        if sys.platform == "win32":
            _send(_answer(respond, line))
            return
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer_in_fork(respond, line, writer, cpu_seconds, max_bytes)
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as file:
            text = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _send(text or json.dumps({"code": code}))


def _send(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _answer_in_fork(respond: Callable[[Any], Any], line: str, writer: int, cpu_seconds: int, max_bytes: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):  # those of the server
            os.dup2(null, standard)
        _limit(cpu_seconds, max_bytes)
        with open(writer, "w", encoding="utf-8") as file:
            file.write(_answer(respond, line))
    finally:
        os._exit(1)


def _limit(cpu_seconds: int, max_bytes: int) -> None:
    if sys.platform != "win32":
        import resource

        limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_CORE: 0}
        if sys.platform == "linux":
            limits[resource.RLIMIT_AS] = max_bytes
        for kind, limit in limits.items():
            most = resource.getrlimit(kind)[1]  # only root may exceed it
            lowest = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(kind, (lowest, lowest))


def _answer(respond: Callable[[Any], Any], line: str) -> str:
    try:
        return json.dumps({"value": respond(json.loads(line))})
    except MemoryError:
        return json.dumps({"error": "it needs too much memory"})
    except RecursionError:
        return json.dumps({"error": "it calls itself too often"})
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


# --- trials ---

TOKENIZER_TRIAL = LimitedProcess(__name__, "tokenizer")
_ARCHITECTURE_TRIAL = LimitedProcess(__name__, "architecture")
_TOKENIZER_S, _ARCHITECTURE_S = 30.0, 120.0
_MARK = "\ufdd0"  # see `chat_prompt.py`
_MOST_BYTES = 1 << 30  # memory of a model without weights


def try_tokenizer(subject: str, path: Path, text: str) -> None:
    """Raise `UserError` if a tokenizer.json with unknown rules fails or takes too long for a text."""
    TOKENIZER_TRIAL.try_file(path, (str(path), text), _TOKENIZER_S, subject)


def try_architecture(name: str, folder: Path) -> None:
    """Raise `UserError` if a configuration needs too much time or memory; its other errors are raised by its use."""
    config = folder / "config.json"
    _ARCHITECTURE_TRIAL.try_file(config, (str(folder),), _ARCHITECTURE_S, f"the configuration of {name}")


def _encode(path: str, text: str) -> int:
    """Return the number of tokens of a text, which are decoded again."""
    from tokenizers import Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(path)
        unmark = [normalizers.Replace(_MARK, ""), *filter(None, [tokenizer.normalizer])]
        tokenizer.normalizer = normalizers.Sequence(unmark)
        tokens = tokenizer.encode(text).ids
        tokenizer.decode(tokens)
    except BaseException as error:  # panics of Rust are no `Exception`
        raise ValueError(str(error)) from error
    return len(tokens)


def _build(folder: str) -> None:
    """Build a model without weights."""
    import torch
    from transformers import AutoConfig

    from specdemo.models.engines.generic import auto_class
    from specdemo.models.memory import is_out_of_memory, peak_process_bytes

    before = peak_process_bytes()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, RecursionError):
            raise
    if (used := peak_process_bytes() - before) > _MOST_BYTES:
        raise MemoryError(f"{used:,} bytes")


# --- conversion of pickled heads ---

_CONVERSION_S = 600


def convert_head(source: Path, folder: Path) -> int:
    """Write the tensors of `source` to `folder`, with the config.json next to it; return their number.

    Raises `UserError` for files with other content than tensors.
    """
    if not source.is_file():
        raise UserError(f"there is no file {source}: give a file like pytorch_model.bin or medusa_lm_head.pt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        request = [os.fspath(source.resolve()), os.fspath(folder.resolve() / "model.safetensors")]
        with closing(LimitedProcess(__name__, "conversion")) as process:
            count: int = process.request(request, _CONVERSION_S, f"the conversion of {source}", "choose another file")
        config = source.with_name("config.json")
        if config.is_file() and not (folder / config.name).exists():
            shutil.copyfile(config, folder / config.name)
    except OSError as error:
        raise write_error(f"the head to {folder}", error) from None
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json: copy that of the head")
    return count


def _convert(request: list[str]) -> int:
    import torch
    from safetensors.torch import save_file

    source, to = request
    stored = torch.load(source, "cpu", weights_only=True)
    if not isinstance(stored, dict) or not stored:
        raise ValueError("it contains no tensors by name")
    others = [key for key, value in stored.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    if others:
        raise ValueError(f"{others[0]!r} is not a tensor")
    part = f"{to}.{os.getpid()}.part"
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, part, {"format": "pt"})
    os.replace(part, to)
    return len(stored)


if __name__ == "__main__":  # what requests need is imported before the forks
    if sys.argv[1] == "tokenizer":
        import tokenizers  # noqa: F401

        serve(lambda request: _encode(*request), cpu_seconds=3, max_bytes=4 << 30)
    elif sys.argv[1] == "architecture":
        import transformers.modeling_utils  # noqa: F401

        import specdemo.models.engines.generic  # noqa: F401

        serve(lambda request: _build(*request), cpu_seconds=6, max_bytes=16 << 30)
    else:
        import torch  # noqa: F401

        serve(_convert, cpu_seconds=300, max_bytes=32 << 30)
