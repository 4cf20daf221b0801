"""Row buckets: the policy's own, so that a cost is that of the graph that runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the cuda back end needs torch")

from slipstream.kernels.cuda.graphs import LOGIT_BUCKETS, ROW_BUCKETS, bucket_of
from slipstream.policy.cost import DEFAULT_EDGES


def test_row_buckets_are_the_edges_of_the_policy() -> None:
    assert ROW_BUCKETS == DEFAULT_EDGES


@pytest.mark.parametrize("buckets", [ROW_BUCKETS, LOGIT_BUCKETS])
@pytest.mark.parametrize("most", [1, 7, 20, 384, 5000])
def test_a_bucket_holds_its_rows_and_never_more_than_there_is_room_for(
    buckets: tuple[int, ...], most: int
) -> None:
    for count in range(buckets[0], most + 1):
        bucket = bucket_of(count, buckets, most)
        assert count <= bucket <= most
        assert bucket == most or bucket in buckets
        assert bucket_of(bucket, buckets, most) == bucket


def test_every_verify_width_has_a_bucket_of_its_own() -> None:
    assert [bucket_of(count, ROW_BUCKETS, 400) for count in range(1, 18)] == [*range(1, 17), 24]
