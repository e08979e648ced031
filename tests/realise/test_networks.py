"""Networks train by any schedule as MXNet trains them, bit for bit."""

from __future__ import annotations

import pytest

from helpers.cases import CASES, assert_identical_to_mxnet


@pytest.mark.parametrize("name", CASES)
def test_identical_to_mxnet(name: str) -> None:
    assert_identical_to_mxnet(name, explicit=4, packed=2)
