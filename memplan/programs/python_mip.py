"""python-mip, which is loaded when something of it is first used, to make a model.

It takes 2 MB, which a process that trains by what its child has planned need not have.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("mip"), name)
