"""What a caller may have around a step: MXNet's profiler, scopes of autograd, a bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mxnet as mx


@contextlib.contextmanager
def profiler(tmp_path: Path) -> Iterator[None]:
    mx.profiler.set_config(
        profile_all=True, aggregate_stats=True, filename=str(tmp_path / "profile.json")
    )
    mx.profiler.set_state("run")
    try:
        yield
    finally:
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        mx.profiler.dumps(reset=True)
        mx.profiler.set_config(
            profile_all=False, aggregate_stats=False, filename=str(tmp_path / "profile.json")
        )


AROUND: dict[str, Callable[[Path], Any]] = {
    "profiler": profiler,
    "record": lambda _: mx.autograd.record(),
    "predict": lambda _: mx.autograd.predict_mode(),
    "bulk": lambda _: mx.engine.bulk(100),
}
