"""What other families have, on the GPU: near the reference, the same bytes in any company."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream.kernels.ops import F32, Backend
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.decoder import DecoderWeights, LayerWeights, forward
from slipstream.models.weights import DenseTensor
from tests.parity.test_cpu_kernels import logits_over
from tests.tiny import TinyModel, make_backend, make_rows, quantize, tiny_arch

pytestmark = pytest.mark.gpu


def attention(**changes: Any) -> AttentionArch:
    """Return a layer's attention: heads of 16 columns unless said otherwise."""
    head_dim = changes.get("head_dim", 16)
    plain: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "frequencies": plain_frequencies(head_dim, 10000.0),
        "rope_interleaved": False,
        "scale": score_scale(head_dim),
    }
    return AttentionArch(**(plain | changes))


def arch_of(layers: list[AttentionArch], **changes: Any) -> Arch:
    return tiny_arch(
        **({"num_layers": len(layers), "attention": tuple(layers), "context_len": 1024} | changes)
    )


def partial(head_dim: int, turned: int) -> tuple[float, ...]:
    """Return frequencies of which all but the first `turned` are 0."""
    return (*plain_frequencies(head_dim, 1e6)[:turned], *(0.0,) * (head_dim // 2 - turned))


_GEMMA = {"activation": "gelu_tanh", "embedding_scale": 8.0, "post_norms": True}
_LOCAL = attention(window=40, qk_norm=True, scale=0.3, head_dim=32)
_FULL = attention(qk_norm=True, scale=0.2, head_dim=32, frequencies=partial(32, 6))
_LOCAL_4 = attention(window=300, qk_norm=True, v_norm=True, scale=0.08, head_dim=256, num_heads=2)
_FULL_4 = attention(
    qk_norm=True,
    v_norm=True,
    k_is_v=True,
    scale=0.06,
    head_dim=512,
    num_heads=3,
    num_kv_heads=1,
    frequencies=partial(512, 64),
)

ARCHS: dict[str, Arch] = {
    "biases of q, k and v": arch_of([attention(qkv_bias=True)] * 2),
    "norms of q and k": arch_of([attention(qk_norm=True, head_dim=128)] * 2),
    "a magnitude of the rotation": arch_of([attention(rope_magnitude=1.2)] * 2),
    "a window": arch_of([attention(window=24), attention(window=300, num_heads=16)]),
    "soft-caps": arch_of(
        [attention(softcap=2.0, window=100), attention(softcap=2.0)], logit_softcap=1.5, **_GEMMA
    ),
    "local and full layers": arch_of([_LOCAL, _LOCAL, _FULL], **_GEMMA),
    "a norm of v": arch_of([attention(qk_norm=True, v_norm=True)] * 2),
    "keys that are values": arch_of([attention(qk_norm=True, k_is_v=True)] * 2),
    "shared KV": arch_of([attention(qk_norm=True)] * 4, kv_layers=(0, 1, 1, 0)),
    "heads of 512 columns": arch_of([attention(head_dim=512, num_kv_heads=1)] * 2),
    "heads of 192 columns": arch_of([attention(head_dim=192, rope_interleaved=True)] * 2),
    "heads of 384 columns": arch_of([attention(head_dim=384, window=90)] * 2),
    "all of it": arch_of(
        [_LOCAL_4, _FULL_4, _LOCAL_4, _FULL_4], kv_layers=(0, 1, 0, 1), logit_softcap=30.0, **_GEMMA
    ),
}


def draw_weights(backend: Backend, arch: Arch, kind: str = "f32", seed: int = 3) -> DecoderWeights:
    """Draw a random decoder of any description whose activations keep an ordinary size."""
    random = np.random.default_rng(seed)

    def matrix(n: int, k: int, gain: float = 1.0) -> Any:
        values = random.standard_normal((n, k), dtype=np.float32) * np.float32(gain / k**0.5)
        return backend.matrix([quantize(values, kind)])

    def vector(n: int, low: float = 0.5, high: float = 1.5) -> Any:
        values = random.uniform(low, high, n).astype(np.float32)
        return backend.vector(DenseTensor(values=values, dtype="f32"))

    layers = []
    for index, of in enumerate(arch.attention):
        owns = arch.owns_kv(index)
        width = of.q_size + (of.kv_size * (1 if of.k_is_v else 2) if owns else 0)
        hidden = arch.hidden_size
        layers.append(
            LayerWeights(
                attn_norm=vector(hidden),
                qkv=matrix(width, hidden, 1.5),
                attn_out=matrix(hidden, of.q_size),
                ffn_norm=vector(hidden),
                gate_up=matrix(2 * arch.ffn_size, hidden),
                down=matrix(hidden, arch.ffn_size),
                qkv_bias=vector(width, -1, 1) if of.qkv_bias else None,
                q_norm=vector(of.head_dim) if of.qk_norm else None,
                k_norm=vector(of.head_dim) if of.qk_norm and owns else None,
                post_attn_norm=vector(hidden) if arch.post_norms else None,
                post_ffn_norm=vector(hidden) if arch.post_norms else None,
                scale=0.7 if arch.post_norms else 1.0,
            )
        )
    embedding = matrix(arch.vocab_size, arch.hidden_size)
    return DecoderWeights(
        embedding=embedding, layers=tuple(layers), norm=vector(arch.hidden_size), output=embedding
    )


def model_of(name: str, backend: Backend, kind: str = "f32") -> TinyModel:
    arch = ARCHS[name]
    weights = draw_weights(backend, arch, kind)
    kv = backend.kv_cache(arch, 128, arch.context_len)
    step = backend.compile(lambda ops: forward(ops, arch, weights, kv), max_rows=64, max_logits=64)
    return TinyModel(arch, backend, kv, step)


@pytest.mark.parametrize("context", [90, 700])
@pytest.mark.parametrize("name", ARCHS)
def test_logits_agree_with_the_reference(name: str, context: int) -> None:
    fast = logits_over(model_of(name, make_backend("cuda")), context)
    reference = make_backend("reference", bfloat16_activations=True)
    slow = logits_over(model_of(name, reference), context)
    error = np.abs(fast - slow)
    print(f"{name}: mean {error.mean() / slow.std():.2e}, max {error.max() / slow.std():.2e}")
    assert slow.std() > 0.05
    assert error.mean() < 1e-2 * slow.std()
    assert error.max() < 8e-2 * slow.std()


@cache
def text(name: str) -> list[int]:
    ids = np.random.default_rng(7).integers(0, ARCHS[name].vocab_size, 640)
    return [int(i) for i in ids]


def last_logits(model: TinyModel, ids: list[int], chunk: int, rows: int, first: int = 0) -> F32:
    """Read a prompt in chunks, then its last `rows` tokens at once; return their logits."""
    pages = [[(first + 3 * i) % model.kv.num_pages for i in range(-(-len(ids) // 16))]]
    start = len(ids) - rows
    for at in range(0, start, chunk):
        end = min(at + chunk, start)
        model.step(make_rows(ids[at:end], range(at, end), pages, logit_rows=[]))
    return model.step(make_rows(ids[start:], range(start, len(ids)), pages)).logits.copy()


@pytest.mark.parametrize("kind", ["q4_1", "bf16"])
@pytest.mark.parametrize("name", ARCHS)
def test_bytes_depend_on_nothing_but_the_sequence(name: str, kind: str) -> None:
    ids = text(name)
    model = model_of(name, make_backend("cuda"), kind)
    alone = np.concatenate([last_logits(model, ids[: len(ids) - 15 + i], 64, 1) for i in range(16)])
    assert len(set(map(bytes, alone))) == 16
    for rows, chunk, first in ((16, 64, 0), (16, 7, 5), (5, 33, 1), (12, 64, 64)):
        assert np.array_equal(last_logits(model, ids, chunk, rows, first), alone[-rows:])
    for kernel in ("gemv", "tile"):
        other = model_of(name, make_backend("cuda", kernel=kernel), kind)
        assert np.array_equal(last_logits(other, ids, 64, 16), alone)
        for layer in range(ARCHS[name].num_layers):  # `model` read the same ids into its pages
            last_logits(model, ids, 33, 16)
            for page in (0, 3, 117):
                pairs = zip(model.kv.read(layer, page), other.kv.read(layer, page), strict=True)
                assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("name", ARCHS)
def test_bytes_do_not_depend_on_batch_mates(name: str) -> None:
    ids = text(name)
    model = model_of(name, make_backend("cuda"), "q4_1")
    lengths = (610, 37, 333)
    alone = {}
    tables = [[40 * s + i for i in range(40)] for s in range(3)]
    for s, length in enumerate(lengths):
        for at in range(0, length, 60):
            end = min(at + 60, length)
            rows = make_rows(ids[at:end], range(at, end), [tables[s]], logit_rows=[])
            model.step(rows)
        rows = make_rows(ids[length : length + 4], range(length, length + 4), [tables[s]])
        alone[s] = model.step(rows).logits.copy()
    for order in ([0, 1, 2], [2, 0], [1, 2]):
        together = make_rows(
            [i for s in order for i in ids[lengths[s] : lengths[s] + 4]],
            [p for s in order for p in range(lengths[s], lengths[s] + 4)],
            [tables[s] for s in order],
            sequences=[place for place, _ in enumerate(order) for _ in range(4)],
        )
        found = model.step(together).logits
        assert np.array_equal(found, np.concatenate([alone[s] for s in order]))
