"""Networks train by any schedule as MXNet trains them, bit for bit."""

from __future__ import annotations

import pytest

from helpers.amounts import long_except
from helpers.cases import CASES, assert_identical_to_mxnet


@pytest.mark.parametrize("name", long_except(CASES, CASES.keys() - {"some_added", "lstm"}))
def test_identical_to_mxnet(name: str) -> None:
    assert_identical_to_mxnet(name, explicit=4, packed=2)
