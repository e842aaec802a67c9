"""contract/amounts.py: prices as people read them."""

import pytest

from contract.amounts import dollars


@pytest.mark.parametrize(
    ("price", "shown"),
    [(0, "0"), (0.4, "0.40"), (0.004, "0.004"), (0.01, "0.01"), (7.449, "7.45"), (148.4, "148"), (12_345.6, "12,346")],
)
def test_a_price_shows_what_it_is(price, shown):
    assert dollars(price) == shown
