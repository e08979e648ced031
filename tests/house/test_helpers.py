"""What the tests compare with is as strict as they say."""

from __future__ import annotations

import numpy as np

from helpers.fitting import differing
from helpers.training_runs import differences


def test_bits_are_compared_not_numbers() -> None:
    zero, minus_zero = {"weight": np.array([0.0])}, {"weight": np.array([-0.0])}
    assert not differing(zero, zero)
    assert differing(zero, minus_zero)
    assert differences([zero, zero], [zero, minus_zero]) == ["step 1: weight by 0 (max 0)"]
