"""The CUDA sources compile for every architecture, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="packing is done by torch")

from slipstream.errors import LoadError
from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.layout import layout_of
from slipstream.kernels.cuda.linear_builds import rows_builds
from slipstream.kernels.cuda.linear_kernels import LinearKernels
from slipstream.kernels.cuda.linear_teams import choose_team_build
from slipstream.models.weights import Tensor
from tests.unit.test_cuda_packing import draw_codes, draw_dense, draw_two_levels, in_bfloat16

try:
    compiler.nvrtc_version()
except LoadError as error:
    pytest.skip(str(error), allow_module_level=True)

# Shared memory that a block may have on each architecture, from the CUDA programming guide.
SHARED_BYTES = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
}
PARTS = {
    "4 bits with bias": draw_codes(16, 3840, 4, 0, True, 64),
    "4 bits, two spans of K": draw_codes(16, 5120, 4, 8, False, 16),
    "8 bits": draw_codes(16, 1536, 8, 128, False, 32),
    "5 bits": draw_codes(16, 512, 5, 16, False, 32),
    "4 bits, bfloat16 scales": in_bfloat16(draw_codes(16, 3840, 4, 0, True, 64)),
    "Q4_K": draw_two_levels(16, 4096, 4, 0, True, 32),
    "Q6_K": draw_two_levels(16, 4096, 6, 32, False, 16),
    "float32": draw_dense(16, 576, "f32"),
    "float16": draw_dense(16, 14336, "f16"),
}


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_linear_kernels_compile(part: Tensor, arch: str) -> None:
    device = compiler.Device(arch=arch, processors=48, shared_bytes=SHARED_BYTES[arch])
    layout = layout_of(part)
    kernels = LinearKernels(layout, device, None)
    builds = [*map(kernels.rows_source, rows_builds(layout, device)), kernels.embed_build()]
    builds += [kernels.tile_build(16), kernels.tile_build(128)]
    compiled = [(arch, build) for build in builds]
    for rows in (9, 17, 25):
        if (team := choose_team_build(layout, device, rows)) is not None:
            compiled.append((f"{arch}a", kernels.teams_source(team)))
    for target, (source, names, macros) in compiled:
        cubin = compiler.compile_cubin(
            compiler.SOURCES / source, names=names, arch=target, defines=dict(macros)
        )
        assert cubin.image[:4] == b"\x7fELF"
        # Two terms of three tiles leave too few registers to run ahead: slower, and the same bytes.
        serialized = layout.kind == 17 and source == "linear_teams.cu" and "(C7512)" in cubin.log
        assert serialized or not cubin.log.strip()
