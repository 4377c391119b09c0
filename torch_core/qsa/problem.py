"""Frozen, hashable descriptions of QSA calls. Imports neither torch nor jax nor triton."""

from dataclasses import dataclass

from .. import checks

METADATA = ("request_ids", "positions", "visible", "slots")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The least one that is not below `value`."""
    return 1 << (max(value, 1) - 1).bit_length()


def ring_rows(compress_ratio: int, num_draft: int) -> int:
    """Rows of a request's ring: drafts then cannot reach the keys of an unfinished group.

    compress_ratio + num_draft, rounded up to a multiple of compress_ratio.

    Args:
        compress_ratio: tokens of a group, 1 or more.
        num_draft: drafts of a decoding request, 0 or more: decode_query_len - 1.

    Returns:
        Rows, a Python int: axis 1 of `ring` in `compress`.

    Raises:
        ValueError, TypeError: an argument is no Python int in its range.
    """
    compress_ratio = checks.integer("compress_ratio", compress_ratio, 1)
    num_draft = checks.integer("num_draft", num_draft, 0)
    return round_up(compress_ratio + num_draft, compress_ratio)


@dataclass(frozen=True, kw_only=True)
class QSAProblem:
    """Sizes and dtypes of one step. Rows of the `num_decodes` decoding requests come first,
    `decode_query_len` rows each; the rows of the other requests follow, packed.

    A function that does not use a field may leave it at its default."""

    num_rows: int
    num_requests: int
    num_qo_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    index_heads: int = 1
    index_dim: int = 16
    compress_ratio: int
    topk: int = 1  # groups kept per row
    page_size: int
    pages_per_seq: int
    num_pages: int
    query_dtype: str = "bfloat16"  # of the query, the index query and the output
    kv_dtype: str = "bfloat16"
    index_dtype: str = "bfloat16"  # of the compressed cache
    num_decodes: int = 0
    decode_query_len: int = 1

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def budget(self) -> int:
        """Tokens of a full selection, the tail of the unfinished group left out."""
        return self.topk * self.compress_ratio

    @property
    def num_selected(self) -> int:
        """Columns of token_indices."""
        return self.budget + self.compress_ratio - 1

    @property
    def groups_per_page(self) -> int:
        return self.page_size // self.compress_ratio

    @property
    def max_groups(self) -> int:
        """Groups that the page table can hold for one request."""
        return self.pages_per_seq * self.groups_per_page

    @property
    def num_decode_rows(self) -> int:
        return self.num_decodes * self.decode_query_len

    @property
    def num_prefill_rows(self) -> int:
        return self.num_rows - self.num_decode_rows

    @property
    def num_prefills(self) -> int:
        return self.num_requests - self.num_decodes


@dataclass(frozen=True, kw_only=True)
class CompressProblem:
    """Sizes and dtypes of one compress call."""

    num_rows: int
    compress_ratio: int
    ring_shape: tuple[int, int, int]  # [rings, rows of a ring, index_dim]
    cache_shape: tuple[int, int, int, int]  # [num_pages, groups_per_page, 1, index_dim]
    max_positions: int  # rows of the rotary tables
    rotary_dim: int
    key_dtype: str
    index_dtype: str
    weight_dtype: str
    rotary_dtype: str
    eps: float
    ring_ids: bool  # whether requests name their ring
    rotary_positions: bool  # whether rows name their place in the rotary tables

    @property
    def ring_rows(self) -> int:
        return self.ring_shape[1]

    @property
    def index_dim(self) -> int:
        return self.ring_shape[2]
