"""Matrices that a back end takes in pieces: the bytes are those of the whole, the peak is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import LoadError
from slipstream.models import weights as module
from slipstream.models.loading.arch_map import GgufSource
from slipstream.models.loading.checkpoint import Source
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.mlx_source import MlxSource
from slipstream.models.loading.safetensors_files import DenseSource, read_files
from slipstream.models.loading.weights_map import load_decoder
from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor, TensorInPieces
from tests.families import (
    MemorySource,
    family_arch,
    peak_of_loading,
    random_checkpoint,
    random_weights,
    write_folder,
)
from tests.gguf_files import BF16, BLOCKS, F16, F32, Entry, gguf_bytes
from tests.mlx_files import write_mlx
from tests.quantized import FORMATS, MLX, random_matrix
from tests.tiny import make_backend, make_rows

PATHS = ("cpu-avx512", "cpu-portable")
N, K = 53, 512  # tiles of sixteen rows, and a rest


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def same(one: Any, other: Any) -> bool:
    """Compare tensors field by field, levels of scales included."""
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(np.array_equal(one, other))


def packed(path: str, part: Any) -> Any:
    """Return what a back end makes of a matrix: its rows, and products with them."""
    backend = make_backend(path)
    weight = backend.matrix([part])
    step = backend.compile(
        lambda ops: ops.logits(ops.embed(weight), weight), max_rows=N, max_logits=N
    )
    return step(make_rows(range(N), range(N), [[0, 1, 2, 3]])).logits.copy()


def tensors() -> Iterator[Any]:
    for name, kind in (FORMATS | MLX).items():
        yield pytest.param(random_matrix(N, K, **kind), id=name)
    values = np.random.default_rng(2).standard_normal((N, K), dtype=np.float32)
    yield pytest.param(DenseTensor(values=values, dtype="f32"), id="f32")
    yield pytest.param(DenseTensor(values=values.astype(np.float16), dtype="f16"), id="f16")
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    yield pytest.param(DenseTensor(values=bits, dtype="bf16"), id="bf16")


@pytest.mark.parametrize("tensor", list(tensors()))
def test_pieces_are_packed_as_the_whole_is(
    path: str, tensor: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read(low: int, high: int) -> Tensor:
        asked.append((low, high))
        return tensor.rows(low, high)

    monkeypatch.setattr(module, "_PIECE", 1)
    got = packed(path, TensorInPieces(shape=(N, K), read=read))
    assert asked[1:] == [(0, 16), (16, 32), (32, 48), (48, N)]
    assert np.array_equal(got, packed(path, tensor))


def dense_source(folder: Path) -> Source:
    write_folder(folder, "llama 2", random_weights(family_arch("llama 2")), dtype="f16")
    return DenseSource(read_files(folder))


def mlx_source(folder: Path, bits: int) -> Source:
    random = np.random.default_rng(0)
    named = {"x.weight": random.standard_normal((N, 128), dtype=np.float32)}
    setting = {"bits": bits, "group_size": 64}
    write_mlx(folder, named, setting)
    return MlxSource(read_files(folder), setting)


def gguf_source(folder: Path) -> Source:
    random, entries = np.random.default_rng(0), []
    for type_id, (block, num_bytes) in BLOCKS.items():
        size = N * K // block * num_bytes
        data = random.integers(0, 60, size, dtype=np.uint8).tobytes()  # finite as floats too
        entries.append(Entry(f"t{type_id}", (K, N), type_id, data=data))
    assert {F32, F16, BF16} < set(BLOCKS)
    (folder / "all.gguf").write_bytes(gguf_bytes({"general.architecture": "llama"}, entries))
    return GgufSource(read_gguf(folder / "all.gguf"))


@pytest.mark.parametrize("format_name", ["dense", "mlx 4", "mlx 5", "mlx 6", "mlx 8", "gguf"])
def test_rows_of_a_file_are_those_of_the_whole(tmp_path: Path, format_name: str) -> None:
    kind, _, bits = format_name.partition(" ")
    if kind == "mlx":
        source = mlx_source(tmp_path, int(bits))
    else:
        source = {"dense": dense_source, "gguf": gguf_source}[kind](tmp_path)
    matrices = [name for name, shape in source.shapes.items() if len(shape) == 2]
    assert matrices
    with source.open() as read:
        for name in matrices:
            n = source.shapes[name][0]
            for low, high in ((0, 16), (16, 48), (48, n), (n - 1, n)):
                assert same(read.rows(name, low, high), read(name).rows(low, high))


@pytest.mark.parametrize("kind", ["none", "q4", "q8"])
@pytest.mark.parametrize("family", ["llama 2", "qwen2", "gemma3", "gemma4, shared"])
def test_a_model_says_the_same_however_it_is_cut(
    path: str, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = dataclasses.replace(random_checkpoint(family_arch(family)), quantize=kind)

    def weights() -> bytes:
        backend = make_backend(path)
        weights = load_decoder(checkpoint, backend)
        step = backend.compile(
            lambda ops: ops.logits(ops.embed(weights.embedding), weights.output),
            max_rows=40,
            max_logits=40,
        )
        return step(make_rows(range(40), range(40), [[0, 1, 2]])).logits.tobytes()

    whole = weights()
    monkeypatch.setattr(module, "_PIECE", 1)
    assert weights() == whole


@pytest.mark.parametrize(
    ("kind", "value", "part"),
    [
        ("none", float("nan"), "holds an infinity or NaN"),
        ("q4", float("nan"), "holds an infinity or NaN"),
        ("q4", 3e38, "cannot hold"),
        ("q8", 3e38, "cannot hold"),
    ],
)
def test_what_is_wrong_in_the_last_piece_is_named(
    kind: str, value: float, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 1)
    arch = family_arch("qwen2")
    weights = random_weights(arch)
    weights["embedding"][-1, 5] = value
    tensors = {name: DenseTensor(values=w, dtype="f32") for name, w in weights.items()}
    checkpoint = dataclasses.replace(
        random_checkpoint(arch), source=MemorySource(tensors), quantize=kind
    )
    with pytest.raises(LoadError, match=f"embedding .*{part}"):
        load_decoder(checkpoint, make_backend("cpu-portable"))


class Taking:
    """A back end that takes pieces and keeps nothing of them but their sizes."""

    takes_pieces = True

    def __init__(self) -> None:
        self.largest = self.held = 0

    def matrix(self, parts: Sequence[TensorInPieces]) -> None:
        for part in parts:
            num_bytes = 0
            for _, piece in part.pieces(16):
                is_codes = isinstance(piece, QuantizedTensor)
                num_bytes += (piece.codes if is_codes else piece.values).nbytes  # type: ignore[union-attr]
            self.largest = max(self.largest, num_bytes)

    def vector(self, tensor: Tensor) -> None:
        assert tensor.shape


@pytest.mark.parametrize("kind", ["none", "q4", "q8"])
def test_no_matrix_is_held_as_a_whole(tmp_path: Path, kind: str) -> None:
    backend = Taking()
    peak = peak_of_loading(tmp_path, kind, backend)
    assert backend.largest >= 1 << 24
    assert peak < backend.largest / 2
