"""Native engine shared by the processes of a test run: the first process compiles it, the others wait.

As a script it compiles the engine; the process that distributes the tests starts it before the workers import modules.
"""

import os
import sys

from specdemo.native.build import SWITCH, NativeUnavailable, cache_folder, native_library


def compile_once() -> None:
    if os.name != "posix" or os.environ.get(SWITCH) == "0":
        return
    import fcntl

    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with (cache_folder() / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        native_library()


if __name__ == "__main__":
    compile_once()
    if isinstance(library := native_library(), NativeUnavailable):
        print(f"The tests of the native engine will fail: {library}", file=sys.stderr)
