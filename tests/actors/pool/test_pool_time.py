"""The time of a pool is that of passes, of the host, or idle time, whatever its leases do side by side."""

from __future__ import annotations

import pytest

from actors.pool.pool_time import PoolTime


def test_time_outside_passes_counts_once_and_only_while_a_lease_has_something_to_do():
    now = [0.0]
    pool_time = PoolTime(lambda: now[0])

    def after(seconds: float) -> tuple[float, float]:
        now[0] += seconds
        return pool_time.spent()

    assert after(1.0) == (0.0, 0.0), "without a lease"
    with pool_time.serving():
        assert after(1.0) == (0.0, 1.0)
        with pool_time.passing():
            assert after(2.0) == (2.0, 1.0)
        with pool_time.serving():
            assert after(4.0) == (2.0, 5.0), "of two leases once"
            with pool_time.resting():
                assert after(1.0) == (2.0, 6.0), "the other one works"
                with pool_time.resting():
                    assert after(8.0) == (2.0, 6.0)
                    with pool_time.passing():
                        assert after(0.5) == (2.5, 6.0)
        with pytest.raises(KeyError), pool_time.resting():
            raise KeyError
        assert after(1.0) == (2.5, 7.0)
    assert after(1.0) == (2.5, 7.0)
