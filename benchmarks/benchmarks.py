"""Module path of `python benchmarks/NAME.py`.

Python puts the folder of a script, not the checkout, on the module path. `import benchmarks` then loads this file,
which replaces the folder on the path and acts as the package.
"""

import sys
from pathlib import Path

__path__ = [str(Path(__file__).parent)]
sys.path[0] = str(Path(__file__).parents[1])
