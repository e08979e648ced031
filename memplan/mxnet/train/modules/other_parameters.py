"""Refusals of executors of a Module that would have other parameters than those that are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from memplan.errors import ArgumentError


def check_shared(missing: Collection[str]) -> None:
    """ArgumentError where parameters or states are ``missing`` in what shares them, as in MXNet."""
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        raise ArgumentError(
            f"the network has {names}, which the network lacks that it shares parameters with: "
            f"that of the default bucket, or of shared_module, must have all of them"
        )


def check_unchanged(changed: Mapping[str, str], inputs: Mapping[str, tuple[int, ...]]) -> None:
    """ArgumentError if something else than ``inputs`` is ``changed``."""
    for name, shapes in changed.items():
        if name not in inputs:
            raise ArgumentError(
                f"for inputs of the shapes {dict(inputs)} the shape of {name!r} would be {shapes}: "
                f"the network cannot take them with the parameters that it has; resize the inputs, "
                f"or bind another module to them"
            )
