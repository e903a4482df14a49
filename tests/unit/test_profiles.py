"""What a turn has needed of a worker: its share of the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.profiles import Shares


def test_time_is_divided_among_those_that_are_there() -> None:
    shares = Shares()
    for now, running in ((10.0, 0), (12.0, 1), (16.0, 4), (18.0, 2)):
        shares.tick(now, running)
    assert shares.between(10, 12) == pytest.approx(2.0)
    assert shares.between(12, 16) == pytest.approx(1.0)
    assert shares.between(11, 17) == pytest.approx(1 + 1 + 0.5)
    assert shares.between(17, 17) == 0.0
    assert shares.between(18, 25) == 0.0


@given(st.lists(st.tuples(st.floats(0.01, 2), st.integers(1, 9)), min_size=1, max_size=40))
def test_shares_add_up_to_the_time_that_has_passed(steps: list[tuple[float, int]]) -> None:
    shares = Shares()
    now, total, begin = 5.0, 0.0, 5.0
    shares.tick(now, 0)
    for took, running in steps:
        shares.tick(now + took, running)
        total += running * shares.between(now, now + took)
        now += took
    assert total == pytest.approx(now - begin)
