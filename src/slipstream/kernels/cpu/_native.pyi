# The compiled kernels, untyped: lets type checkers pass where they are not built.
from typing import Any

def __getattr__(name: str) -> Any: ...
