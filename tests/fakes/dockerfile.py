"""Instructions of the Dockerfile."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]
