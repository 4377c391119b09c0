"""Paged attention for JAX: pure functions over torch_core's kernels, without copies."""

from . import compat as compat
from . import export as export
from . import paging as paging
from . import qsa as qsa
from . import rpa as rpa
from . import speculative as speculative
from .decode import decode as decode
from .interop import to_jax as to_jax
from .interop import to_torch as to_torch
from .kv_cache import append_kv as append_kv
from .kv_cache import merge_states as merge_states
from .paged_cache import PagedKVCache as PagedKVCache
from .prefill import plan_prefill as plan_prefill
from .prefill import prefill as prefill
from .support import explain as explain
from .support import supported as supported
from .support import warmup as warmup
