"""`python -m torch_core` prints the support matrix, as README.md holds it."""

from .dispatch import matrix

print(matrix())
