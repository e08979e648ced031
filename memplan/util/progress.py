"""What a search tells while it runs: records of the logger "memplan", for whoever listens."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("memplan")


def tell(
    message: str,
    *,
    incumbent_seconds: float | None = None,
    bound_seconds: float | None = None,
    unplanned_seconds: float | None = None,
) -> None:
    """Log ``message`` at INFO, with seconds of a step as attributes of the record.

    ``incumbent_seconds`` are those of the best schedule so far; ``bound_seconds`` are proven: no
    schedule takes less; ``unplanned_seconds`` are those of the step without a plan. A message with
    neither of the first two begins another search. Costs next to nothing where nobody listens.
    """
    if LOGGER.isEnabledFor(logging.INFO):
        figures = {
            "incumbent_seconds": incumbent_seconds,
            "bound_seconds": bound_seconds,
            "unplanned_seconds": unplanned_seconds,
        }
        LOGGER.info(message, extra=figures)
