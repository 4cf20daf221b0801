"""The CUDA back end: kernels in CUDA C++, compiled at run time, replayed as CUDA graphs.

Importing this package needs nothing; `slipstream.kernels.cuda.backend` needs torch.
"""
