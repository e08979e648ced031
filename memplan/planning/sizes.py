"""One network at any batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.errors import ArgumentError
from memplan.planning.job import Job
from memplan.planning.realisation import Symbol

# What stands for the batch in shapes.
MARK = "N"


class Sizes:
    """The network ``net`` at any size, traced when it is first asked for.

    ``options`` are those of its plans, with the shapes, and ``seconds`` the time limit of each.
    ArgumentError where no shape names the batch.
    """

    def __init__(self, net: Symbol, options: Mapping[str, Any], seconds: float) -> None:
        self.net, self.options, self.seconds = net, options, seconds
        self.jobs: dict[int, Job] = {}
        self.templates = {
            name: tuple(value)
            for name, value in options.items()
            if isinstance(value, tuple | list) and MARK in value
        }
        if not self.templates:
            raise ArgumentError(
                f"no shape names the batch: put {MARK!r} in its place, as in "
                f"data=({MARK!r}, 3, 224, 224)"
            )

    def job(self, size: int) -> Job:
        """The network with batches of this ``size``; ArgumentError where it takes no such batch."""
        if size not in self.jobs:
            shapes = {
                name: tuple(size if n == MARK else n for n in shape)
                for name, shape in self.templates.items()
            }
            arguments = {**self.options, **shapes, "time_limit": self.seconds}
            try:
                self.jobs[size] = Job.prepare(self.net, **arguments)
            except ArgumentError as error:
                if not self.jobs:
                    raise
                raise ArgumentError(
                    f"the network takes a batch of {max(self.jobs)}, but none of {size}, and a "
                    f"search for the largest batch tries any size. Plan sizes that it takes one by "
                    f"one with memplan.plan, the budget in bytes. MXNet says: {error}"
                ) from error
        return self.jobs[size]
