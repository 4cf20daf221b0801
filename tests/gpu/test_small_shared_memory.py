"""Builds for GPUs with less shared memory compute the same bytes."""

from __future__ import annotations

import dataclasses

import pytest

from tests.exact.test_row_invariance import prefill
from tests.tiny import make_backend, make_rows, tiny_arch, tiny_model, tiny_tensors

pytestmark = pytest.mark.gpu

CONTEXT = 1100
PAGES = [list(range(90))]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shared_memory_never_changes_a_byte(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_backend("cuda")
    from slipstream.kernels.cuda import compiler, kernels

    device = compiler.current_device()
    results = []
    for shared_bytes in (device.shared_bytes, 163 << 10, 99 << 10):
        if shared_bytes > device.shared_bytes:
            continue
        smaller = dataclasses.replace(device, shared_bytes=shared_bytes)
        monkeypatch.setattr(kernels, "current_device", lambda own=smaller: own)
        arch = tiny_arch(context_len=2048, head_dim=head_dim, num_layers=2)
        model = tiny_model(make_backend("cuda"), tiny_tensors(arch), num_pages=90, max_rows=128)
        prefill(model, 1, PAGES[0], CONTEXT, chunk=100)
        positions = range(CONTEXT, CONTEXT + 12)
        few = model.step(make_rows(range(12), positions, PAGES)).logits.tobytes()
        kv = [part.tobytes() for page in PAGES[0][:69] for part in model.kv.read(1, page)]
        results.append((few, kv))
    assert len(results) >= 2
    assert all(result == results[0] for result in results)
