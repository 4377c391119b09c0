"""What depends on JAX's own device, not on torch's."""

import jaxattn
from torch_core import dispatch

GEOMETRY = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16)


def test_jax_on_a_cpu_beside_a_gpu_of_torch(monkeypatch):
    """explain and warmup agree: JAX's calls run on JAX's device."""
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: 90)
    for phase in ("decode", "prefill"):
        kernel = jaxattn.explain(phase, **GEOMETRY).kernel
        assert kernel is not None
        if kernel.name != "reference":  # JAX has a GPU here
            continue
        assert jaxattn.warmup(phase, **GEOMETRY) == ("reference",)
