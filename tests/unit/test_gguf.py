"""GGUF reading: everything malformed is a LoadError, everything else reads as the format says."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import LoadError
from slipstream.models.arch import plain_frequencies
from slipstream.models.loading import cursor, open_model
from slipstream.models.loading.arch_map import read_checkpoint
from slipstream.models.loading.formats import FORMATS
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor
from tests.gguf_files import (
    BF16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Entry,
    gguf_bytes,
    header,
    real_model,
    string,
    toy_bytes,
    toy_entries,
    toy_metadata,
    write,
)

NUM_TENSORS = len(toy_entries())


class RecordingBackend:
    """Keeps what a loader hands over."""

    takes_pieces = False

    name, reason = "recording", "test"

    def __init__(self) -> None:
        self.matrices: list[list[Tensor]] = []
        self.vectors: list[Tensor] = []

    def matrix(self, parts: Sequence[Tensor]) -> Any:
        self.matrices.append(list(parts))
        return ("matrix", len(self.matrices) - 1)

    def vector(self, tensor: Tensor) -> Any:
        self.vectors.append(tensor)
        return ("vector", len(self.vectors) - 1)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a loader has no business with {name}")


def refusal(folder: Path, content: bytes) -> str:
    """Return the message with which a file is refused."""
    with pytest.raises(LoadError) as caught:
        open_model(write(folder, content))
    assert str(folder) in caught.value.message
    return caught.value.message


# ---- what is read


def test_reading_agrees_with_the_reference_implementation(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    scalars = {
        "u8": (200, kinds.UINT8),
        "i8": (-5, kinds.INT8),
        "u16": (60000, kinds.UINT16),
        "i16": (-300, kinds.INT16),
        "u32": (1 << 31, kinds.UINT32),
        "i32": (-(1 << 30), kinds.INT32),
        "f32": (0.5, kinds.FLOAT32),
        "bool": (True, kinds.BOOL),
        "text": ("grüße 😀", kinds.STRING),
        "u64": (1 << 63, kinds.UINT64),
        "i64": (-(1 << 62), kinds.INT64),
        "f64": (1e300, kinds.FLOAT64),
    }
    for key, (item, kind) in scalars.items():
        writer.add_key_value(key, item, kind)
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("texts", ["", "a", "Ġé", "x" * 5000])
    dense = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("dense", dense)
    writer.add_tensor("half", dense.astype(np.float16)[:1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    for key, (item, _) in scalars.items():
        assert file.metadata[key] == item
        assert type(file.metadata[key]) is type(item)
    assert file.metadata["texts"] == ["", "a", "Ġé", "x" * 5000]
    np.testing.assert_array_equal(file.metadata["ints"], [1, -2, 3])
    np.testing.assert_array_equal(file.metadata["floats"], [0.5, -1.5])
    assert file.tensors["dense"].shape == (3, 4)
    with file.open() as source:
        np.testing.assert_array_equal(file.read_tensor(source, "dense").dequantize(), dense)
        np.testing.assert_array_equal(file.read_tensor(source, "half").dequantize(), dense[:1])


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunk_size_does_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    path = write(tmp_path, toy_bytes())
    whole = read_gguf(path)
    monkeypatch.setattr(cursor, "_CHUNK_BYTES", chunk)
    parts = read_gguf(path)
    assert parts.tensors == whole.tensors
    assert parts.data_offset == whole.data_offset
    assert list(parts.metadata) == list(whole.metadata)
    assert parts.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]


def test_real_file_has_the_known_shape() -> None:
    file = read_gguf(real_model())
    arch = read_checkpoint(file).arch
    assert len(file.tensors) == 272
    assert {item.format.name for item in file.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
    assert (arch.num_layers, arch.hidden_size, arch.ffn_size) == (30, 576, 1536)
    heads = arch.uniform
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (9, 3, 64)
    assert heads.frequencies == plain_frequencies(64, 100000.0)
    assert (arch.vocab_size, arch.context_len) == (49152, 8192)
    assert arch.tied_embedding
    assert heads.rope_interleaved
    assert not arch.features


def test_unused_space_between_tensors_and_behind_them_is_allowed(tmp_path: Path) -> None:
    entries = [Entry("a", (8,)), Entry("b", (8,), offset=4096)]
    content = gguf_bytes({}, entries)
    path = write(tmp_path, content + bytes(8192))
    assert read_gguf(path).tensors["b"].offset == read_gguf(path).data_offset + 4096


# ---- what is refused


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"PK\x03\x04" + bytes(99), bytes(64)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    message = refusal(tmp_path, content)
    assert "GGUF" in message or "truncated" in message


def test_refusal_names_the_magic_found(tmp_path: Path) -> None:
    assert "b'\\x80\\x02}q'" in refusal(tmp_path, b"\x80\x02}q" + bytes(99))


@pytest.mark.parametrize("version", [0, 1, 4, 1 << 31])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    content = bytearray(toy_bytes())
    content[4:8] = struct.pack("<I", version)
    assert f"got {version}" in refusal(tmp_path, bytes(content))


def test_big_endian_files_are_called_so(tmp_path: Path) -> None:
    content = bytearray(toy_bytes())
    content[4:8] = struct.pack(">I", 3)
    assert "big-endian" in refusal(tmp_path, bytes(content))


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    head, _ = header({"a": "text", "b": [1, 2], "c": ["x", "y"]}, [Entry("t", (4, 2))])
    for length in range(len(head)):
        with pytest.raises(LoadError):
            read_gguf(write(tmp_path, head[:length]))


def test_cut_data_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    entries = [Entry("first", (64,)), Entry("last", (64,))]
    content = gguf_bytes({"general.architecture": "llama"}, entries)
    message = refusal(tmp_path, content[:-1])
    assert "'last'" in message
    assert str(len(content)) in message


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [1 << 17, 1 << 40, (1 << 64) - 1])
def test_absurd_counts_are_refused(tmp_path: Path, at: int, count: int) -> None:
    content = bytearray(toy_bytes())
    content[at : at + 8] = struct.pack("<Q", count)
    refusal(tmp_path, bytes(content))


@pytest.mark.parametrize("length", [1 << 20, 1 << 30, (1 << 64) - 1])
@pytest.mark.parametrize("types", [(8,), (9, 8), (9, 0), (9, 12)])
def test_absurd_lengths_are_refused(tmp_path: Path, types: tuple[int, ...], length: int) -> None:
    typed = struct.pack(f"<{len(types)}IQ", *types, length)
    refusal(tmp_path, gguf_bytes({"key": typed}))


def test_nested_arrays_are_refused_at_any_depth(tmp_path: Path) -> None:
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    assert "element type" in refusal(tmp_path, gguf_bytes({"key": nested}))


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        (struct.pack("<IB", 7, 2), "bool"),
        (struct.pack("<I", 13), "value type"),
        (struct.pack("<I", 8) + string(b"\xff\xfe"), "UTF-8"),
        (struct.pack("<IIQ", 9, 8, 1) + string(b"\xff\xfe"), "UTF-8"),
    ],
)
def test_malformed_values_are_refused(tmp_path: Path, typed: bytes, part: str) -> None:
    assert part in refusal(tmp_path, gguf_bytes({"key": typed}))


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ([Entry("t", (4,)), Entry("t", (4,))], ["'t'", "twice"]),
        ([Entry("t", (4,), offset=8)], ["'t'", "multiple of 32", "got 8"]),
        ([Entry("a", (64,)), Entry("b", (64,), offset=32)], ["'a'", "'b'", "overlap"]),
        ([Entry("t", (4,), type_id=10)], ["'t'", "Q2_K", "F32, F16, BF16, Q4_0, Q4_1, Q5_0"]),
        ([Entry("t", (64,), type_id=12)], ["'t'", "Q4_K", "multiple of 256", "got 64"]),
        ([Entry("t", (4,), type_id=777)], ["'t'", "777", "Q8_0"]),
        ([Entry("t", (48, 2), Q4_1)], ["'t'", "multiple of 32", "got 48"]),
        ([Entry("t", ())], ["'t'", "dimensions, got 0"]),
        ([Entry("t", (1, 1, 1, 1, 1))], ["'t'", "dimensions, got 5"]),
        ([Entry("t", (4, 0))], ["'t'", "dimensions"]),
        ([Entry("t", (1 << 40, 1 << 40), data=b"")], ["'t'", "dimensions"]),
        ([Entry("t", (1 << 40,), data=b"")], ["truncated", "'t'"]),
        ([Entry("t", (4,), offset=1 << 62)], ["truncated", "'t'"]),
    ],
)
def test_malformed_tensors_are_refused(
    tmp_path: Path, entries: list[Entry], parts: list[str]
) -> None:
    message = refusal(tmp_path, gguf_bytes({"general.architecture": "llama"}, entries))
    for part in parts:
        assert part in message


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    pair = string("key") + struct.pack("<II", 4, 1)
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair * 2
    assert "'key' appears twice" in refusal(tmp_path, content)


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 20])
def test_impossible_alignments_are_refused(tmp_path: Path, alignment: int) -> None:
    message = refusal(tmp_path, toy_bytes(general__alignment=alignment))
    assert "power of two" in message


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        open_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadError, match="regular file"):
        open_model(tmp_path / "pipe")


TOY = toy_bytes()
TOY_HEADER_BYTES = len(header(toy_metadata(), toy_entries())[0])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_header_bits_raise_load_errors_only(data: st.DataObject) -> None:
    content = bytearray(TOY)
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * TOY_HEADER_BYTES - 1))
        content[bit // 8] ^= 1 << bit % 8
    _open_or_refuse(bytes(content))


@settings(max_examples=100, deadline=None)
@given(
    at=st.integers(0, TOY_HEADER_BYTES),
    patch=st.binary(min_size=1, max_size=12)
    | st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)),
    cut=st.integers(0, len(TOY)) | st.none(),
)
def test_patched_and_cut_files_raise_load_errors_only(
    at: int, patch: bytes, cut: int | None
) -> None:
    content = TOY[:at] + patch + TOY[at + len(patch) :]
    _open_or_refuse(content[:cut])


def _open_or_refuse(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(LoadError):
        open_model(write(Path(folder), content)).load_weights(RecordingBackend())


# ---- what the forward cannot compute


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"general__architecture": "mamba"}, ["llama", "mamba"]),
        ({"general__architecture": None}, ["general.architecture", "missing"]),
        ({"llama__rope__scaling__type": "yarn"}, ["rope.scaling.type", "yarn"]),
        ({"llama__rope__scaling__factor": 4.0}, ["rope.scaling.factor", "4.0"]),
        ({"llama__attention__sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"llama__expert_count": 8}, ["expert_count", "8"]),
        ({"llama__logit_scale": 8.0}, ["logit_scale"]),
        ({"llama__rope__dimension_count": 4}, ["dimension_count", "8", "4"]),
        ({"llama__attention__value_length": 16}, ["value_length", "8", "16"]),
        ({"llama__attention__key_length": 7}, ["even", "7"]),
        ({"llama__attention__head_count": 0}, ["head_count", "got 0"]),
        ({"llama__attention__head_count": 5}, ["multiple", "32", "5"]),
        ({"llama__attention__head_count": [4, 2]}, ["every layer", "2 to 4"]),
        ({"llama__attention__head_count_kv": 3}, ["4", "3"]),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, ["in [1e-18, 1]", "nan"]),
        ({"llama__attention__layer_norm_rms_epsilon": 2.0}, ["in [1e-18, 1]", "2.0"]),
        ({"llama__attention__layer_norm_rms_epsilon": None}, ["missing"]),
        ({"llama__rope__freq_base": float("inf")}, ["in [1, 1e+18]", "inf"]),
        ({"llama__rope__freq_base": -1.0}, ["in [1, 1e+18]", "-1.0"]),
        ({"llama__rope__freq_base": "high"}, ["must be a number", "'high'"]),
        ({"llama__embedding_length": True}, ["must be an integer", "True"]),
        (
            {"llama__embedding_length": 64, "llama__rope__dimension_count": None},
            ["token_embd.weight", "64", "32"],
        ),
        ({"llama__block_count": 3}, ["blk.2.attn_norm.weight", "missing"]),
        ({"llama__block_count": 1}, ["blk.1.", "unexpected"]),
        ({"llama__block_count": 1 << 31}, ["block_count", "got"]),
        ({"llama__vocab_size": 300}, ["300", "270"]),
        ({"general__quantization_version": 1}, ["quantization_version"]),
        ({"split__count": 3}, ["split"]),
    ],
)
def test_unsupported_models_are_refused_with_both_values(
    tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(tmp_path, toy_bytes(**changes))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (Entry("rope_freqs.weight", (4,)), "above 0"),
        (Entry("blk.0.attn_q.bias", (32,)), "unexpected"),
        (Entry("blk.0.attn_q_norm.weight", (8,)), "unexpected"),
    ],
)
def test_extra_tensors_are_refused(tmp_path: Path, extra: Entry, part: str) -> None:
    message = refusal(tmp_path, gguf_bytes(toy_metadata(), [*toy_entries(), extra]))
    assert part in message
    assert extra.name in message


@pytest.mark.parametrize("index", range(NUM_TENSORS))
def test_each_missing_tensor_is_named(tmp_path: Path, index: int) -> None:
    entries = toy_entries()
    gone = entries.pop(index)
    assert f"{gone.name}" in refusal(tmp_path, gguf_bytes(toy_metadata(), entries))


def test_wrong_shapes_name_both_shapes(tmp_path: Path) -> None:
    entries = [
        e if "attn_k" not in e.name else Entry(e.name, (32, 32), Q8_0) for e in toy_entries()
    ]
    message = refusal(tmp_path, gguf_bytes(toy_metadata(), entries))
    assert "[16, 32]" in message
    assert "[32, 32]" in message


def test_quantized_norms_are_refused(tmp_path: Path) -> None:
    entries = [
        Entry(e.name, e.dims, Q8_0) if e.name == "output_norm.weight" else e for e in toy_entries()
    ]
    assert "Q8_0" in refusal(tmp_path, gguf_bytes(toy_metadata(), entries))


def test_vocabulary_and_embedding_must_agree(tmp_path: Path) -> None:
    entries = toy_entries()
    entries[0] = Entry("token_embd.weight", (32, 280), Q8_0)
    message = refusal(tmp_path, gguf_bytes(toy_metadata(), entries))
    assert "280" in message
    assert "270" in message


# ---- weights


def test_weights_are_fused_in_order_and_a_tied_output_is_the_embedding(tmp_path: Path) -> None:
    model = open_model(write(tmp_path, toy_bytes()))
    backend = RecordingBackend()
    weights = model.load_weights(backend)
    assert weights.output is weights.embedding
    assert len(backend.matrices) == 1 + 2 * 4
    assert len(backend.vectors) == 1 + 2 * 2
    shapes = [[part.shape for part in parts] for parts in backend.matrices]
    assert shapes[0] == [(270, 32)]
    assert shapes[1:5] == [
        [(32, 32), (16, 32), (16, 32)],
        [(32, 32)],
        [(64, 32), (64, 32)],
        [(32, 64)],
    ]


@pytest.mark.parametrize("type_id", [Q4_K, Q5_K, Q6_K])
def test_k_quants_are_read_from_where_they_lie(tmp_path: Path, type_id: int) -> None:
    form = FORMATS[type_id]
    raw = np.random.default_rng(type_id).integers(0, 200, 6 * form.block_bytes, dtype=np.uint8)
    entries = [Entry("a", (3,)), Entry("t", (512, 3), type_id, raw.tobytes())]
    content = gguf_bytes({"general.architecture": "llama"}, entries)
    file = read_gguf(write(tmp_path, content))
    with file.open() as source:
        tensor = file.read_tensor(source, "t")
    assert tensor.shape == (3, 512)
    expected = form.decode(raw, (3, 512)).dequantize()
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    assert "truncated" in refusal(tmp_path, content[:-40])


def test_an_output_of_its_own_is_loaded(tmp_path: Path) -> None:
    entries = [*toy_entries(), Entry("output.weight", (32, 270), Q4_0)]
    model = open_model(write(tmp_path, gguf_bytes(toy_metadata(), entries)))
    weights = model.load_weights(RecordingBackend())
    assert not model.arch.tied_embedding
    assert weights.output != weights.embedding


@pytest.mark.parametrize("weight", [F32, BF16, Q4_0, Q4_1, Q5_0, Q5_1])
def test_every_weight_kind_arrives_in_its_own_precision(tmp_path: Path, weight: int) -> None:
    content = gguf_bytes(toy_metadata(), toy_entries(weight))
    backend = RecordingBackend()
    open_model(write(tmp_path, content)).load_weights(backend)
    parts = [part for parts in backend.matrices for part in parts]
    if weight in (F32, BF16):
        expected = "f32" if weight == F32 else "bf16"
        assert all(isinstance(part, DenseTensor) and part.dtype == expected for part in parts)
    else:
        assert all(isinstance(part, QuantizedTensor) and part.group == 32 for part in parts)


@pytest.mark.parametrize(
    ("type_id", "data"),
    [
        (F32, np.full(270 * 32, np.nan, "<f4").tobytes()),
        (BF16, b"\x80\x7f" * (270 * 32)),
        (Q8_0, (b"\x00\x7c" + bytes(32)) * 270),
        (Q4_1, (b"\x00\x00\x01\xfe" + bytes(16)) * 270),
    ],
)
def test_tensors_with_infinities_or_nans_are_refused(
    tmp_path: Path, type_id: int, data: bytes
) -> None:
    entries = toy_entries()
    entries[0] = Entry("token_embd.weight", (32, 270), type_id, data)
    model = open_model(write(tmp_path, gguf_bytes(toy_metadata(), entries)))
    with pytest.raises(LoadError, match=r"token_embd.weight holds an infinity or NaN"):
        model.load_weights(RecordingBackend())


def test_a_file_that_changes_between_header_and_weights_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, toy_bytes())
    model = open_model(path)
    path.write_bytes(toy_bytes() + b"x")
    with pytest.raises(LoadError, match="changed"):
        model.load_weights(RecordingBackend())
    path.unlink()
    with pytest.raises(LoadError, match="no such file"):
        model.load_weights(RecordingBackend())


def test_a_tensor_read_short_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path, toy_bytes()))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TOY[: file.data_offset + 5])
    with (
        cut.open("rb") as short,
        pytest.raises(LoadError, match=r"truncated: tensor token_embd.weight"),
    ):
        file.read_tensor(short, "token_embd.weight")


def test_fingerprint_follows_header_and_weights(tmp_path: Path) -> None:
    plain = open_model(write(tmp_path, TOY)).fingerprint
    assert open_model(write(tmp_path, TOY)).fingerprint == plain
    assert open_model(write(tmp_path, TOY[:-1] + b"\x01")).fingerprint != plain
    other = toy_bytes(llama__rope__freq_base=500000.0)
    assert open_model(write(tmp_path, other)).fingerprint != plain


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, slipstream.models.loading\n"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
