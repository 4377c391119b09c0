"""One file per kernel: translates our terms to upstream's. How to add one:

1. A row in `torch_core/table.py`: what the kernel can do, before the rows that it beats. `entry` is
   the upstream function, for readers; `rules` return the reason why a call is refused, or None;
   `cubins` says that upstream loads binaries that must be there.
2. A file here, named by the row's `module`. In the simplest form it has

       run(problem, inputs, out, lse, kernel)

   on torch tensors: `problem` (torch_core.problem) holds what is static, `inputs` the arrays and
   scales, `out` and `lse` (or None) take the results. JAX then calls it through Python, uncaptured.
   A compiled TVM-FFI function runs from JAX without Python where the file has instead

       key(problem, kernel)        literals that tell one build from another
       source(*key)                what is built: build.Source
       function(*key)              the compiled function
       scales(problem, inputs)     our scales in upstream's terms
       operands(problem, inputs, scales, ops, sm_count, kernel)
                                   the call's arrays, made with `ops`
       stride_unit(problem)        what strides of a cache are multiples of, in elements
       bind(problem, sm_count, kernel, scaled)
                                   binding.Binding: arguments in the function's order, scratch

   (see `xqa.py`; `torch_core/binding.py` runs it from torch, `jaxattn/_launch.py` from JAX), and
   `plan_size` and `make_plan` for a row that takes plans (see `native.py`).
3. Tests: the row in `SPECIFIED` of tests/torch_core/test_dispatch.py, the table of README.md
   (printed by `python -m torch_core`), a file like tests/torch_core/test_native.py, which holds the
   kernel to the float64 oracle over its dtypes, pages, layouts and features, and a path in
   tests/faults/gpu.py, which gives it the tests of all faults.
"""
