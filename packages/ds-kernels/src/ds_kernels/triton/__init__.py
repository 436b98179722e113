"""Versions of ops in Triton, for CUDA devices: those whose time is matrix products.

[Note: Triton versions]
``tl.dot`` reaches the tensor cores of every generation from one source, which the hand-written CUDA
versions of these ops do not.  A module here is named like its op, is imported when a registry takes
it, and is checked in Triton's interpreter (``TRITON_INTERPRET=1``) on CPU tensors; there bfloat16
products are wrong without a word (Triton 3.7), so operands are widened first.
"""
