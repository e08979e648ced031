"""A process of its own for what is measured.

Here, what other tests have freed would be taken again unnoticed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_fresh_process(measure: Callable[[], Any]) -> Any:
    """What ``measure`` returns there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(measure).result()
