"""The CUDA back end: kernels in CUDA C++, compiled at run time."""
