"""The CUDA sources compile for every architecture, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="packing is done by torch")

from slipstream.errors import LoadError
from slipstream.kernels.cuda import compiler, packing
from tests.unit.test_cuda_packing import draw_codes, draw_dense

try:
    compiler.nvrtc_version()
except LoadError as error:
    pytest.skip(str(error), allow_module_level=True)

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_120", "sm_121")
KERNELS = {
    "linear_rows.cu": ("multirow<1>", "multirow<2>"),
    "linear_tile.cu": ("tile<16>", "tile<128>"),
    "linear_embed.cu": ("embed",),
}
PARTS = {
    "4 bits with bias": draw_codes(16, 3840, 4, 0, True, 64),
    "4 bits, two spans of K": draw_codes(16, 5120, 4, 8, False, 16),
    "8 bits": draw_codes(16, 1536, 8, 128, False, 32),
    "float32": draw_dense(16, 576, "f32"),
    "float16": draw_dense(16, 14336, "f16"),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_linear_kernels_compile(source: str, arch: str) -> None:
    for part in PARTS.values():
        defines = {
            **packing.layout_of(part).defines(),
            "STAGES": 2,
            "AHEAD": 0,
            "ABREAST": 2,
            "TILE_STAGES": 3,
        }
        cubin = compiler.compile_cubin(
            compiler.SOURCES / source, names=KERNELS[source], arch=arch, defines=defines
        )
        assert cubin.image[:4] == b"\x7fELF"
        assert not cubin.log.strip()
