"""The CUDA sources of a step compile for every architecture, without a GPU, within its limits."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the kernels are loaded by torch")

from slipstream.errors import LoadError
from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.kernels import (
    ATTENTION_KERNELS,
    DRAFT_KERNELS,
    LAYER_KERNELS,
    AttentionBuild,
)
from slipstream.kernels.cuda.sampling import SAMPLING_KERNELS

# Shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_120": 99 << 10,
    "sm_121": 99 << 10,
}
HEADS = (32, 64, 96, 128, 192, 256, 384, 512)


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("padded_dim", HEADS)
def test_every_head_size_fits_every_architecture(padded_dim: int, arch: str) -> None:
    build = AttentionBuild.fitting(padded_dim, SHARED_BYTES[arch])
    assert build.shared_bytes <= SHARED_BYTES[arch]
    assert 1 <= build.stages <= 4
    small = SHARED_BYTES[arch] < 100 << 10
    assert build.one_place == (
        padded_dim > 128 if small else padded_dim in (256, 512) and arch == "sm_80"
    )
    assert padded_dim // build.parts % 32 == 0


def test_a_head_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(LoadError, match="heads of 256 columns do not fit 49152 bytes"):
        AttentionBuild.fitting(256, 48 << 10)


@pytest.fixture(params=SHARED_BYTES)
def arch(request: pytest.FixtureRequest) -> str:
    try:
        compiler.nvrtc_version()
    except LoadError as error:
        pytest.skip(str(error))
    return request.param


def check(source: str, names: tuple[str, ...], arch: str, defines: dict[str, int]) -> None:
    cubin = compiler.compile_cubin(
        compiler.SOURCES / source, names=names, arch=arch, defines=defines
    )
    assert cubin.image[:4] == b"\x7fELF"
    assert not cubin.log.strip()


def test_layers_argmax_and_sampling_compile(arch: str) -> None:
    check("layers.cu", LAYER_KERNELS, arch, {})
    check("argmax.cu", ("argmax",), arch, {})
    check("sampling.cu", SAMPLING_KERNELS, arch, {})
    check("draft.cu", DRAFT_KERNELS, arch, {})


@pytest.mark.parametrize("padded_dim", [32, 128, 256, 512])
@pytest.mark.parametrize(("windowed", "capped"), [(False, False), (True, True)])
def test_attention_compiles(padded_dim: int, windowed: bool, capped: bool, arch: str) -> None:
    build = AttentionBuild.fitting(padded_dim, SHARED_BYTES[arch], windowed=windowed, capped=capped)
    check("attention.cu", ATTENTION_KERNELS, arch, build.defines())
