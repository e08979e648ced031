"""The colours of all pictures: one for each role of a tensor and each fate of a forward op."""

from __future__ import annotations

from memplan.step.liveness import Fate, Role

FIXED = "#9aa3ad"
UNPLANNED = "#7a828c"
BUDGET = "#d43d51"

ROLES = {
    Role.RESULT: "#6f5aa7",
    Role.KEPT: "#3f7fc1",
    Role.RECOMPUTED: "#e8912d",
    Role.GRADIENT: "#3aa07a",
    Role.PASSING: "#a9c7e4",
}
"""From the bottom of a stack to its top."""

FATES = {
    Fate.KEPT: ROLES[Role.KEPT],
    Fate.RECOMPUTED: ROLES[Role.RECOMPUTED],
    Fate.BOTH: "#a05c9f",
    Fate.FREED: "#c3cbd3",
}

CELLS = {
    "waits in memory (S)": "#a9c7e4",
    "computed for the first time (R)": "#2f6ea8",
    "recomputed (R)": FATES[Fate.RECOMPUTED],
}
"""Of the schedule's matrices, a later one above an earlier."""

SERIES = ("#3f7fc1", "#e8912d", "#3aa07a", "#d43d51", "#6f5aa7", "#8c6d46", "#c46fa8", "#4aa7b5")
"""For what has no colour of its own, such as strategies."""
