"""QSA: sparse attention to the groups of tokens that an indexer picks for each query.

torch_core.qsa as pure functions, for jit, scan, while_loop and shard_map. What torch writes in
place is returned: donate rings and compressed caches to the surrounding jit, and XLA writes in
place too. On a CPU every call is the torch reference. On a GPU `via` says how kernels are launched,
with the same bits: "triton" puts them into the XLA program by way of jax-triton, so that no Python
runs in a step; "dlpack" launches them from Python over XLA's buffers, when XLA records its command
buffer; "auto" is "triton" where jax-triton works.
"""

from torch_core.qsa import Metadata as Metadata
from torch_core.qsa import Split as Split
from torch_core.qsa import ring_rows as ring_rows
from torch_core.qsa import split_batch as split_batch

from .api import attend as attend
from .api import attention as attention
from .api import compress as compress
from .api import expand as expand
from .api import select as select
from .metadata import build_metadata as build_metadata
from .query import prepare_query as prepare_query
from .query import rotary_tables as rotary_tables
from .warmup import warmup as warmup
