"""Triton kernels. Parameters: inputs, outputs, then constants, as in the Launch records.

How to add one:

1. The kernel in a file here. It addresses in int64, reads nothing past what its lengths allow, and
   gets everything whose change must compile nothing by pointer or grid: constants are what may.
2. A Launch of it in `plan.py` or a `plan_*.py`, as data: names of arrays in and out, scratch
   included, constants, warps and stages. torch (`launch.py`) and JAX (`jaxattn/qsa/_run.py`, by
   both ways) run the same record, so neither needs a change. Only jax-triton leaves out `overlaps`.
3. Its classes in `warmup.py`, if its constants follow sizes that vary between calls.
4. Tests: against float64 in tests/torch_core/qsa (Triton's interpreter runs them on a CPU, as if by
   one thread: the fixture `no_races` tells where several would need a barrier), its step in
   `reference.py` if it is a new one, `test_api.py` for what warm-up reaches.
"""
