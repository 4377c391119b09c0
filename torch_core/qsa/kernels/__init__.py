"""Triton kernels. Parameters: inputs, outputs, then constants, as in the Launch records."""
