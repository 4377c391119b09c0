"""Checks by value of what the rows of a step name: requests, rings, slots, rotary positions."""

from torch import Tensor

from ..reference import check_range
from .metadata import Metadata
from .problem import CompressProblem


def places_of(problem: CompressProblem) -> dict[str, int]:
    """What bounds the places of a compress call."""
    num_pages, groups_per_page = problem.cache_shape[:2]
    return dict(
        compress_ratio=problem.compress_ratio,
        num_rings=problem.ring_shape[0],
        num_pages=num_pages,
        groups_per_page=groups_per_page,
    )


def check_places(
    metadata: Metadata,
    seq_lens: Tensor,
    cos: Tensor,
    ring_ids: Tensor | None,
    rotary_positions: Tensor | None,
    *,
    compress_ratio: int,
    num_rings: int,
    num_pages: int,
    groups_per_page: int,
) -> None:
    """ValueError where a row names a request, a ring, a group's slot or a row of the rotary tables
    that does not exist."""
    rows = check_requests(metadata, len(seq_lens))
    if ring_ids is not None:
        requests = metadata.request_ids[rows].long()
        _check_entries("ring_ids", ring_ids, requests, "num_rings", num_rings)
    rows = (metadata.slots >= 0).nonzero()[:, 0]
    bound = "num_pages * groups_per_page"
    _check_entries("metadata.slots", metadata.slots, rows, bound, num_pages * groups_per_page)
    places = rotary_positions
    if places is None:
        places = metadata.positions - (compress_ratio - 1)
    check_rotary(cos, places[rows])


def check_requests(metadata: Metadata, num_requests: int) -> Tensor:
    """Indices of the rows that are not padding; ValueError where one has no request."""
    ids = metadata.request_ids
    rows = (ids >= 0).nonzero()[:, 0]
    _check_entries("metadata.request_ids", ids, rows, "num_requests", num_requests)
    return rows


def _check_entries(name: str, array: Tensor, entries: Tensor, bound: str, limit: int) -> None:
    """ValueError where one of these entries is not in [0, limit)."""
    if len(entries):
        check_range(name, array[entries].cpu(), bound, limit, entries)


def check_rotary(cos: Tensor, places: Tensor) -> None:
    """ValueError where a place has no row in the rotary tables."""
    if len(places) and (places.min() < 0 or places.max() >= len(cos)):
        raise ValueError(
            f"cos must have a row for each rotary position, {int(places.min())} to "
            f"{int(places.max())}, got {len(cos)} rows"
        )
