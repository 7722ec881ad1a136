"""Packages in place of those that have no build for a CPU; whoever imports this one finds them.

Import it before transformers, which imports torchvision. Only SGLang's environment has them: others
collect these tests, too, and hand what they find to processes that they start.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PATH = Path(__file__).parent

if find_spec("sglang") is not None:
    sys.path.insert(0, str(PATH))
