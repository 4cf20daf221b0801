"""Edges of the compiled back end: teams larger than the work, far positions, forks, no threads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.tiny import make_backend, make_rows, tiny_arch, tiny_model, tiny_tensors


@pytest.mark.parametrize("kind", ["q4_1", "f16"])
@pytest.mark.parametrize("threads", [5, 16, 64])
def test_a_team_larger_than_the_rows_computes_the_same(threads: int, kind: str) -> None:
    def logits(size: int) -> list[bytes]:
        model = tiny_model(make_backend("cpu-auto", threads=size), tiny_tensors(kind=kind))
        out = []
        for count in (1, 2, 3, 4, 7):  # the largest step so far has few rows, one logit wanted
            rows = make_rows(range(count), range(count), [[0]], logit_rows=[count - 1])
            out.append(model.step(rows).logits[0].tobytes())
        return out

    assert logits(threads) == logits(1)


def test_positions_far_beyond_a_quarter_million_are_a_row_like_any_other() -> None:
    # The pages of the context are eight, used over and over.
    arch = tiny_arch(num_layers=1, context_len=400_000)
    model = tiny_model(make_backend("cpu-auto", threads=2), tiny_tensors(arch), num_pages=8)
    table = [[page % 8 for page in range(400_000 // 16)]]
    model.step(make_rows(range(64), range(64), table, logit_rows=[]))
    model.step(make_rows(range(64), range(64, 128), table, logit_rows=[]))
    place = 395_000
    alone = model.step(make_rows([7], [place], table)).logits[0].tobytes()
    many = make_rows([7, *range(20)], [place, *[-1] * 20], table, logit_rows=[0])
    assert model.step(many).logits[0].tobytes() == alone
    assert np.isfinite(model.step(make_rows([7], [place], table)).logits).all()


def run_script(text: str) -> str:
    """Run Python of its own and return what it printed."""
    make_backend("cpu-auto")  # skips where it is not built
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="the system has no fork")
def test_a_forked_child_goes_on_with_one_thread() -> None:
    script = """
import os, warnings
warnings.simplefilter("ignore")
from tests.tiny import make_backend, make_rows, tiny_model, tiny_tensors
model = tiny_model(make_backend("cpu-auto", threads=3), tiny_tensors())
rows = make_rows(range(9), range(9), [[0]])
before = model.step(rows).logits.tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if model.step(rows).logits.tobytes() == before else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, model.step(rows).logits.tobytes() == before)
"""
    assert run_script(script) == "0 True"


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space as Linux does")
def test_threads_that_the_system_does_not_grant_are_an_error() -> None:
    script = """
import resource
from slipstream.errors import CapacityError
from slipstream.kernels.cpu import CpuBackend
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
try:
    CpuBackend(threads=200)
except CapacityError as error:
    print(error.message.split(":")[0])
"""
    assert run_script(script) == "the system grants no team of 200 threads"
