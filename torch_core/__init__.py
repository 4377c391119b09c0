"""Paged attention kernels for torch: FlashInfer's, and a plain torch reference for CPUs."""

from . import qsa as qsa
from .decode import decode as decode
from .dispatch import explain as explain
from .dispatch import supported as supported
from .kv_cache import append_kv as append_kv
from .kv_cache import merge_states as merge_states
from .prefill import plan_prefill as plan_prefill
from .prefill import prefill as prefill
from .warmup import warmup as warmup
