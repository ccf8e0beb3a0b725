"""Python API: exported names, light imports, and the examples in docstrings and docs/library.md."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdemo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LIGHT = ("app", "specdemo", "specdemo.models.spec", "specdemo.models.zoo", "specdemo.recipe", "specdemo.cli")
HEAVY = {"torch", "transformers", "gradio", "bitsandbytes", "accelerate", "huggingface_hub", "numpy"}


def in_new_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_the_bundled_pair_loads_no_modelling_files() -> None:
    code = "import sys\nfrom specdemo import Recipe, generate\n*_, end = generate(Recipe(max_tokens=2), 'def f')\n"
    slow = {"torch._dynamo", "transformers.modeling_utils", "accelerate", "gradio", "bitsandbytes"}
    code += f"print(end.reason, sorted({slow!r} & set(sys.modules)))"
    assert in_new_process(code) == "length []"


def test_every_exported_name_exists() -> None:
    assert set(dir(specdemo)) == set(specdemo.__all__)
    assert all(getattr(specdemo, name) is not None for name in specdemo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        specdemo.absent  # noqa: B018


def test_light_modules_and_help_load_no_framework() -> None:
    code = f"import sys, {', '.join(LIGHT)}\nfrom specdemo.cli.arguments import parser\nparser().format_help()\n"
    code += f"specdemo.Recipe(temperature=0)\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    assert in_new_process(code) == "[]"


KERNEL_CACHE = """
import os
names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "OMP_WAIT_POLICY")
for name in names:
    os.environ.pop(name, None)
import specdemo, app, specdemo.__main__
print([os.environ.get(name) for name in names])
specdemo.set_environment_defaults()
print([os.environ.get(name) for name in names])
"""


def test_only_programs_limit_the_kernel_cache_and_wait_passively() -> None:
    assert in_new_process(KERNEL_CACHE).splitlines() == ["[None, None, None]", "['128', '128', 'PASSIVE']"]
    assert all("set_environment_defaults()" in (ROOT / path).read_text() for path in ("app.py", "specdemo/__main__.py"))


def test_the_docstring_examples_run() -> None:
    result = doctest.testmod(specdemo)
    assert result.attempted >= 5 and result.failed == 0


def test_the_examples_of_the_library_document_run() -> None:
    path = ROOT / "docs" / "library.md"
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted >= 10 and result.failed == 0
    assert path.stat().st_size <= 7000


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    kinds = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert kinds[0] == "plain" and {"correction", "bonus"} & set(kinds)
