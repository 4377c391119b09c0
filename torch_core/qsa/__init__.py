"""QSA: sparse attention to the groups of tokens that an indexer picks for each query."""

from .api import attend as attend
from .api import attention as attention
from .api import compress as compress
from .api import expand as expand
from .api import prepare_query as prepare_query
from .api import select as select
from .metadata import Metadata as Metadata
from .metadata import Split as Split
from .metadata import build_metadata as build_metadata
from .metadata import split_batch as split_batch
from .problem import ring_rows as ring_rows
from .reference import rotary_tables as rotary_tables
from .warmup import warmup as warmup
