"""Wrong QSA calls, and what they must say."""

from collections.abc import Callable
from typing import Any

import torch

from torch_core import qsa


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def valid(call: str) -> dict[str, Any]:
    """Arguments of a right call: 3 rows of 2 requests."""
    page_table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    metadata = qsa.Metadata(int32(0, 1, 1), int32(20, 4, 5), int32(5, 1, 1), int32(-1, -1, -1))
    caches = dict(key_cache=torch.zeros(4, 16, 2, 16), value_cache=torch.zeros(4, 16, 2, 16))
    compressed_cache, ring = torch.zeros(4, 4, 1, 16), torch.zeros(2, 4, 16)
    tables = dict(weight=torch.zeros(16), cos=torch.ones(32, 4), sin=torch.zeros(32, 4))
    steps = dict(page_table=page_table, metadata=metadata)
    index = dict(compressed_cache=compressed_cache)
    index_key, index_query = torch.ones(3, 16), torch.ones(3, 4, 16)
    query = torch.ones(3, 4, 16)
    return {
        "build_metadata": dict(
            page_table=page_table,
            seq_lens=int32(21, 6),
            cu_seqlens_q=int32(0, 1, 3),
            num_rows=4,
            num_pages=4,
            page_size=16,
            compress_ratio=4,
        ),
        "prepare_query": dict(projection=index_query, positions=int32(20, 4, 5), **tables),
        "compress": dict(
            index_key=index_key,
            ring=ring,
            metadata=metadata,
            seq_lens=int32(21, 6),
            compress_ratio=4,
            **index,
            **tables,
        ),
        "select": dict(index_query=index_query, budget=8, compress_ratio=4, **index, **steps),
        "expand": dict(
            selected=torch.zeros(3, 2, dtype=torch.int32), metadata=metadata, compress_ratio=4
        ),
        "attend": dict(
            query=query,
            token_indices=torch.zeros(3, 11, dtype=torch.int32),
            counts=int32(1, 1, 1),
            compress_ratio=4,
            **caches,
            **steps,
        ),
        "attention": dict(
            query=query,
            index_query=index_query,
            index_key=index_key,
            ring=ring,
            seq_lens=int32(21, 6),
            budget=8,
            compress_ratio=4,
            **caches,
            **index,
            **steps,
            **tables,
        ),
        "warmup": dict(
            key_cache=torch.zeros(4, 16, 2, 64).half(),
            compressed_cache=compressed_cache.half(),
            ring=ring.half(),
            weight=tables["weight"],
            cos=tables["cos"],
            num_qo_heads=4,
            index_heads=4,
            budget=8,
            pages_per_seq=2,
            max_requests=2,
            max_rows=8,
        ),
    }[call]


def wrong(call: str, **changes: Any) -> Callable[[], Any]:
    """The call with some arguments changed: a callable gives the new value from the old one."""

    def run() -> Any:
        arguments = valid(call)
        for name, change in changes.items():
            is_function = callable(change) and not isinstance(change, torch.Tensor)
            arguments[name] = change(arguments[name]) if is_function else change
        return getattr(qsa, call)(**arguments)

    return run


def strided(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(0, 1).contiguous().transpose(0, 1)


def with_fields(**fields: torch.Tensor) -> Callable[[qsa.Metadata], qsa.Metadata]:
    return lambda metadata: metadata._replace(**fields)


def with_gradient(array: torch.Tensor) -> torch.Tensor:
    return array.clone().requires_grad_()


FLOATS = "bfloat16 or float16 or float32"
INDEX_CACHE = "[num_pages, groups_per_page, 1, index_dim]"
UNIFORM = "QSA decode rows must form a uniform request batch"
HUGE = 2**31 - 1

# name, trigger, error, start of the message
WRONG = [
    ("page_table_dtype", wrong("build_metadata", page_table=lambda x: x.long()), TypeError,
     "page_table must be int32 [num_requests, pages_per_seq], got int64 [2, 2]"),
    ("seq_lens_size", wrong("build_metadata", seq_lens=int32(1)), ValueError,
     "seq_lens must be int32 [num_requests] = [2], got int32 [1]"),
    ("cu_seqlens_q_size", wrong("build_metadata", cu_seqlens_q=int32(0, 3)), ValueError,
     "cu_seqlens_q must be int32 [3], got int32 [2]"),
    ("cu_seqlens_q_rows", wrong("build_metadata", num_rows=2), ValueError,
     "cu_seqlens_q must rise from 0 to at most num_rows = 2, got [0, 1, 3]"),
    ("cu_seqlens_q_falls", wrong("build_metadata", cu_seqlens_q=int32(0, 3, 2)), ValueError,
     "cu_seqlens_q must rise from 0 to at most num_rows = 4, got [0, 3, 2]"),
    ("seq_lens_long", wrong("build_metadata", seq_lens=int32(21, 33)), ValueError,
     "seq_lens must be in [0, pages_per_seq * page_size = 32], got 21 to 33 (row 1)"),
    ("seq_lens_negative", wrong("build_metadata", seq_lens=int32(-5, 6)), ValueError,
     "seq_lens must be in [0, pages_per_seq * page_size = 32], got -5 to 6 (row 0)"),
    ("num_rows_array", wrong("build_metadata", num_rows=torch.zeros(3)), TypeError,
     "num_rows must be a Python int known before the call, got Tensor"),
    ("page_size", wrong("build_metadata", page_size=18), ValueError,
     "page_size must have pages of a multiple of compress_ratio = 4 tokens, got 18"),
    ("compress_ratio", wrong("build_metadata", compress_ratio=3), ValueError,
     "compress_ratio must be one of (2, 4, 8), got 3"),
    ("slots", wrong("build_metadata", num_pages=HUGE), ValueError,
     f"num_pages must give at most 2^31 - 1 groups, got {4 * HUGE}"),
    ("uniform", wrong("build_metadata", max_decode_query_len=2), ValueError,
     f"{UNIFORM}: every decoding request needs the same number of rows, got 1 and 2"),
    ("uniform_given", wrong("build_metadata", num_decodes=2, decode_query_len=1), ValueError,
     f"{UNIFORM}: every decoding request needs the same number of rows, got 1 and 2"),
    ("uniform_length", wrong("build_metadata", num_decodes=1, decode_query_len=2), ValueError,
     f"{UNIFORM} of decode_query_len = 2 rows each, got 1"),
    ("uniform_host", lambda: qsa.split_batch([0, 1, 4, 8], 3), ValueError,
     f"{UNIFORM}: every decoding request needs the same number of rows, got 1 and 3"),
    ("split_falls", lambda: qsa.split_batch([0, 4, 2]), ValueError,
     "cu_seqlens_q must rise from 0, got [0, 4, 2]"),
    ("split_starts", lambda: qsa.split_batch([1, 2]), ValueError,
     "cu_seqlens_q must rise from 0, got [1, 2]"),
    ("split_empty", lambda: qsa.split_batch([]), ValueError,
     "cu_seqlens_q must rise from 0, got []"),
    ("split_float", lambda: qsa.split_batch([0, 1.5]), TypeError,
     "cu_seqlens_q[1] must be a Python int known before the call, got float"),
    ("split_none", lambda: qsa.split_batch(None), TypeError,
     "cu_seqlens_q must be a sequence of integers, got NoneType"),
    ("split_most", lambda: qsa.split_batch([0, 1], -1), ValueError,
     "max_decode_query_len must be in [0, 2147483647], got -1"),
    ("split_decodes", wrong("build_metadata", num_decodes=3, decode_query_len=1), ValueError,
     "num_decodes must be at most num_requests = 2, got 3"),
    ("num_decodes", wrong("select", num_decodes=3), ValueError,
     "num_decodes must be at most num_requests = 2, got 3"),
    ("decode_rows", wrong("select", num_decodes=2, decode_query_len=2), ValueError,
     f"{UNIFORM}: num_decodes * decode_query_len = 4 rows do not fit into 3"),
    ("num_decodes_bool", wrong("attend", num_decodes=True), TypeError,
     "num_decodes must be a Python int known before the call, got bool"),
    ("projection", wrong("prepare_query", projection=torch.ones(3, 16)), ValueError,
     f"projection must be {FLOATS} [num_rows, index_heads, index_dim], got float32 [3, 16]"),
    ("weight", wrong("prepare_query", weight=torch.ones(8)), ValueError,
     f"weight must be {FLOATS} [index_dim] = [16], got float32 [8]"),
    ("eps_of_query", wrong("prepare_query", eps=torch.tensor(1.0)), TypeError,
     "eps must be a Python number, got an array"),
    ("positions_of_query", wrong("prepare_query", positions=int32(0, 32, -1)), ValueError,
     "cos must have a row for each rotary position, 0 to 32, got 32 rows"),
    ("query_gradient", wrong("prepare_query", projection=with_gradient), NotImplementedError,
     "torch_core.qsa.prepare_query is for inference"),
    ("index_key", wrong("compress", index_key=torch.ones(3, 16).int()), TypeError,
     f"index_key must be {FLOATS} [num_rows, index_dim], got int32 [3, 16]"),
    ("index_dim", wrong("compress", index_key=torch.ones(3, 0), ring=torch.ones(2, 4, 0),
                        compressed_cache=torch.ones(4, 4, 1, 0)), ValueError,
     "index_key must have index_dim >= 1, got [3, 0]"),
    ("ring_dtype", wrong("compress", ring=lambda x: x.half()), TypeError,
     "ring must be float32 [num_rings, ring_rows, index_dim] = [num_rings, ring_rows, 16], "
     "got float16 [2, 4, 16]"),
    ("ring_rows", wrong("compress", ring=torch.zeros(2, 6, 16)), ValueError,
     "ring must have a multiple of compress_ratio = 4 rows a request, and at least 4 for "
     "decode_query_len = 1, got 6"),
    ("ring_rows_drafts", wrong("compress", decode_query_len=2), ValueError,
     "ring must have a multiple of compress_ratio = 4 rows a request, and at least 8 for "
     "decode_query_len = 2, got 4"),
    ("rings", wrong("compress", ring=torch.zeros(1, 4, 16)), ValueError,
     "ring must have a ring for each of 2 requests, or ring_ids be given, got 1"),
    ("ring_ids", wrong("compress", ring_ids=int32(0)), ValueError,
     "ring_ids must be int32 [num_requests] = [2], got int32 [1]"),
    ("ring_ids_negative", wrong("compress", ring_ids=int32(-1, 0)), ValueError,
     "ring_ids must be in [0, num_rings = 2), got -1 to 0 (row 0)"),
    ("ring_ids_high", wrong("compress", ring_ids=int32(1, 5)), ValueError,
     "ring_ids must be in [0, num_rings = 2), got 1 to 5 (row 1)"),
    ("request_high", wrong("compress", metadata=with_fields(request_ids=int32(0, -1, 2))),
     ValueError, "metadata.request_ids must be in [0, num_requests = 2), got 0 to 2 (row 2)"),
    ("select_request_high", wrong("select", metadata=with_fields(request_ids=int32(0, -1, 2))),
     ValueError, "metadata.request_ids must be in [0, num_requests = 2), got 0 to 2 (row 2)"),
    ("attend_request_high", wrong("attend", metadata=with_fields(request_ids=int32(0, -1, 2))),
     ValueError, "metadata.request_ids must be in [0, num_requests = 2), got 0 to 2 (row 2)"),
    ("plain_tuple", wrong("select", metadata=tuple), TypeError,
     "metadata must be what build_metadata returns, got tuple"),
    ("slot_high", wrong("compress", metadata=with_fields(slots=int32(-1, -1, 16))), ValueError,
     "metadata.slots must be in [0, num_pages * groups_per_page = 16), got 16 to 16 (row 2)"),
    ("ring_strides", wrong("compress", ring=strided), ValueError,
     "ring must be contiguous, got strides [16, 32, 1]"),
    ("compressed_dtype", wrong("compress", compressed_cache=lambda x: x.half()), TypeError,
     f"compressed_cache must be float32 or float8_e4m3fn {INDEX_CACHE}"),
    ("metadata_kind", wrong("compress", metadata=int32(1)), TypeError,
     "metadata must be what build_metadata returns, got Tensor"),
    ("metadata_rows", wrong("compress", metadata=with_fields(slots=int32(1))), ValueError,
     "metadata.slots must be int32 [num_rows] = [3], got int32 [1]"),
    ("cos_columns", wrong("compress", cos=torch.ones(32, 9), sin=torch.ones(32, 9)), ValueError,
     "cos must have 1 to index_dim / 2 = 8 columns, got 9"),
    ("sin_rows", wrong("compress", sin=torch.ones(31, 4)), ValueError,
     "sin must be float32 [max_positions, rotary_dim / 2] = [32, 4], got float32 [31, 4]"),
    ("rotary_positions_size", wrong("compress", rotary_positions=int32(1)), ValueError,
     "rotary_positions must be int32 [num_rows] = [3], got int32 [1]"),
    ("rotary_positions", wrong(
        "compress", rotary_positions=int32(7, 32, 7),
        metadata=with_fields(slots=int32(0, 1, -1))), ValueError,
     "cos must have a row for each rotary position, 7 to 32, got 32 rows"),
    ("table_too_short", wrong(
        "compress", cos=torch.ones(8, 4), sin=torch.ones(8, 4),
        metadata=with_fields(slots=int32(3, -1, -1))), ValueError,
     "cos must have a row for each rotary position, 17 to 17, got 8 rows"),
    ("eps", wrong("compress", eps=torch.tensor(1.0)), TypeError,
     "eps must be a Python number, got an array"),
    ("eps_negative", wrong("compress", eps=-1.0), ValueError,
     "eps must be a positive finite float32 number, got -1.0"),
    ("index_query", wrong("select", index_query=None), TypeError,
     "index_query must be an array, got NoneType"),
    ("index_heads", wrong("select", index_query=torch.ones(3, 0, 16)), ValueError,
     "index_query must have index_heads >= 1, got [3, 0, 16]"),
    ("groups_per_page", wrong("select", compressed_cache=torch.ones(4, 0, 1, 16)), ValueError,
     "compressed_cache must have groups_per_page >= 1, got [4, 0, 1, 16]"),
    ("compressed_device", wrong("select", compressed_cache=lambda x: x.to("meta")), ValueError,
     "compressed_cache must be on cpu like the others, got meta"),
    ("budget", wrong("select", budget=10), ValueError,
     "budget must be a multiple of compress_ratio = 4, got 10"),
    ("budget_0", wrong("select", budget=0), ValueError, "budget must be in [1, 2147483647], got 0"),
    ("workspace", wrong("select", workspace_bytes=-1), ValueError,
     "workspace_bytes must be in [0, "),
    ("tokens", wrong("select", page_table=torch.empty(2, 2**27, dtype=torch.int32, device="meta")),
     ValueError, f"page_table must give at most 2^31 - 1 tokens a request, got {2**31}"),
    ("topk_0", wrong("expand", selected=torch.zeros(3, 0, dtype=torch.int32)), ValueError,
     "budget must be in [1, 2147483647], got 0"),
    ("selected", wrong("expand", selected=torch.zeros(3, 2)), TypeError,
     "selected must be int32 [num_rows, topk], got float32 [3, 2]"),
    ("query_dtype", wrong("attend", query=torch.ones(3, 4, 16).to(torch.float8_e4m3fn)), TypeError,
     f"query must be {FLOATS} [num_rows, num_qo_heads, head_dim], got float8_e4m3fn [3, 4, 16]"),
    ("cache_dtype", wrong("attend", query=lambda x: x.half()), TypeError,
     "key_cache must have the query's dtype float16 or be float8_e4m3fn, got float32"),
    ("heads", wrong("attend", query=torch.ones(3, 3, 16)), ValueError,
     "query must have a positive multiple of num_kv_heads = 2 heads, got 3"),
    ("cache_pages", wrong("attend", key_cache=torch.ones(4, 18, 2, 16),
                          value_cache=torch.ones(4, 18, 2, 16)), ValueError,
     "key_cache must have pages of a multiple of compress_ratio = 4 tokens, got 18"),
    ("cache_strides", wrong("attend", value_cache=strided), ValueError,
     "value_cache must be contiguous, got strides [32, 128, 16, 1]"),
    ("token_columns", wrong("attend", token_indices=torch.zeros(3, 12, dtype=torch.int32)),
     ValueError, "token_indices must have budget + compress_ratio - 1 columns, budget a positive "
     "multiple of compress_ratio = 4, got 12"),
    ("counts", wrong("attend", counts=int32(1)), ValueError,
     "counts must be int32 [num_rows] = [3], got int32 [1]"),
    ("gate", wrong("attend", gate=torch.ones(3, 4, 8)), ValueError,
     "gate must be float32 or float32 [num_rows, num_qo_heads, head_dim] = [3, 4, 16]"),
    ("v_scale", wrong("attend", v_scale=0), ValueError,
     "v_scale must be a positive finite float32 number, got 0"),
    ("return_lse", wrong("attend", return_lse=1), TypeError,
     "return_lse must be True or False, got 1"),
    ("out_count", wrong("attend", out=torch.ones(3, 4, 16), return_lse=True), ValueError,
     "out must be (out, lse), got 1 tensors"),
    ("out_dtype", wrong("attend", out=torch.ones(3, 4, 16).half()), TypeError,
     "out must be float32 [3, 4, 16] on cpu, got float16"),
    ("pages_differ", wrong("attention", compressed_cache=torch.ones(4, 8, 1, 16)), ValueError,
     f"compressed_cache must be {FLOATS} or float8_e4m3fn [num_pages, 4, 1, index_dim] = "
     "[4, 4, 1, index_dim], got float32 [4, 8, 1, 16]"),
    ("ring_rows_ratio", lambda: qsa.ring_rows(compress_ratio=0, num_draft=0), ValueError,
     "compress_ratio must be in [1, 2147483647], got 0"),
    ("ring_rows_negative", lambda: qsa.ring_rows(compress_ratio=4, num_draft=-1), ValueError,
     "num_draft must be in [0, 2147483647], got -1"),
    ("ring_rows_kind", lambda: qsa.ring_rows(compress_ratio=4.0, num_draft=0), TypeError,
     "compress_ratio must be a Python int known before the call, got float"),
    ("rotary_odd", lambda: qsa.rotary_tables(max_positions=8, rotary_dim=7, theta=1e4), ValueError,
     "rotary_dim must be even, got 7"),
    ("rotary_none", lambda: qsa.rotary_tables(max_positions=8, rotary_dim=0, theta=1e4), ValueError,
     "rotary_dim must be in [2, 2147483647], got 0"),
    ("rotary_kind", lambda: qsa.rotary_tables(max_positions=8, rotary_dim=8.0, theta=1e4),
     TypeError, "rotary_dim must be a Python int known before the call, got float"),
    ("rotary_rows", lambda: qsa.rotary_tables(max_positions=-1, rotary_dim=8, theta=1e4),
     ValueError, "max_positions must be in [0, 2147483647], got -1"),
    ("theta", lambda: qsa.rotary_tables(max_positions=8, rotary_dim=8, theta=-1), ValueError,
     "theta must be a positive finite float32 number, got -1"),
    ("theta_kind", lambda: qsa.rotary_tables(
        max_positions=8, rotary_dim=8, theta=torch.tensor(1e4)), TypeError,
     "theta must be a Python number, got an array"),
    ("max_rows", wrong("warmup", max_rows=0), ValueError,
     "max_rows must be in [1, 2147483647], got 0"),
    ("warmup_ratio", wrong("warmup", compressed_cache=torch.zeros(4, 16, 1, 16)), ValueError,
     "compress_ratio must be one of (2, 4, 8), got 1"),
    ("warmup_groups", wrong("warmup", compressed_cache=torch.zeros(4, 32, 1, 16)), ValueError,
     "compressed_cache must have page_size / compress_ratio groups a page, got 32 for"),
    ("no_kernel_topk", wrong("warmup", budget=2**14), NotImplementedError,
     "qsa.select on a GPU needs topk = budget / compress_ratio in 1 to 2048, got 4096"),
    ("no_kernel_head_dim", wrong("warmup", key_cache=torch.zeros(4, 16, 2, 80).half()),
     NotImplementedError, "qsa.attend on a GPU needs head_dim in (64, 128, 256), got 80"),
]  # fmt: skip
