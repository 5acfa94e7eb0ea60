import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.grouping import SortedGroups, largest, means, ratio, smallest, sums

VALUES = np.array([3.0, math.nan, 1.0, 5.0, math.nan])
GROUPS = np.array([0, 0, 0, 2, 3])


def test_reductions_leave_nan_out_and_give_nan_for_empty_groups():
    nan = math.nan
    np.testing.assert_array_equal(sums(VALUES, GROUPS, 4), [4, nan, 5, nan])
    np.testing.assert_array_equal(means(VALUES, GROUPS, 4), [2, nan, 5, nan])
    np.testing.assert_array_equal(largest(VALUES, GROUPS, 4), [3, nan, 5, nan])
    np.testing.assert_array_equal(smallest(VALUES, GROUPS, 4), [1, nan, 5, nan])
    np.testing.assert_array_equal(ratio([1, 1, 1], [2, 0, nan]), [0.5, nan, nan])


def test_quantiles_interpolate_linearly():
    # 0, 10, 20, 30: place of the 90th percentile is 0.9 * 3 = 2.7, so 20 + 0.7 * 10.
    found = SortedGroups(np.array([30.0, 0, 20, 10]), np.zeros(4, dtype=np.int64), 1)
    np.testing.assert_allclose(found.quantiles(np.ones(4, dtype=bool), (0.0, 0.5, 0.9, 1.0)), [[0, 15, 27, 30]])


rows = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-1e6, 1e6) | st.just(math.nan), st.booleans()), min_size=1, max_size=60
)


@given(rows)
def test_quantiles_of_any_subset_equal_numpy_group_by_group(rows):
    groups, values, keep = (np.array(column) for column in zip(*rows, strict=True))
    wanted = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
    found = SortedGroups(values, groups, 5).quantiles(keep, wanted)
    for group in range(5):
        members = values[(groups == group) & keep & ~np.isnan(values)]
        expected = np.quantile(members, wanted) if len(members) else np.full(len(wanted), math.nan)
        np.testing.assert_allclose(found[group], expected, rtol=1e-9, atol=1e-9)
