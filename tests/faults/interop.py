"""What the tests of faults (a) share."""

import numpy as np
import pytest

from tests import faults, inputs
from tests.inputs import Case

fronts = pytest.mark.parametrize("front", faults.FRONTS)


phases = pytest.mark.parametrize(
    "case",
    [Case("decode", (9, 30, 0, 4)), Case("prefill", (9, 30, 0, 4), q_lens=(3, 5, 0, 4))],
    ids=str,
)


E4M3 = "float8_e4m3fn"


def append_arguments(kv_layout="NHD"):
    """Six tokens for an append_kv call by slots, one of them skipped."""
    rng = np.random.default_rng(3)
    shape = (4, 8, 2, 16) if kv_layout == "NHD" else (4, 2, 8, 16)
    arguments = {
        name: inputs.normal(rng, (6, 2, 16), np.dtype("f4")) for name in ("key", "value")
    } | {name: inputs.normal(rng, shape, np.dtype("f4")) for name in ("key_cache", "value_cache")}
    slots = np.array([31, 0, -1, 9, 8, 7], np.int32)
    return arguments | dict(slots=slots, kv_layout=kv_layout)


CACHE_NAMES = ("key_cache", "value_cache")
