"""Packages in place of those that have no build for a CPU; whoever imports this one finds them.

Import it before transformers, which imports torchvision.
"""

import sys
from pathlib import Path

PATH = Path(__file__).parent

sys.path.insert(0, str(PATH))
