"""Random decoders that use the whole description: `models.arch`, feature by feature or mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.kernels.ops import Backend, Weight
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies
from slipstream.models.decoder import DecoderWeights, LayerWeights, forward
from slipstream.models.weights import DenseTensor, Tensor
from tests.tiny import TinyModel, quantize, tiny_arch

# One feature each, or those that go together; a layer has all of a list in turn.
FEATURES: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True},
    "norms of q and k": {"qk_norm": True},
    "a norm of v": {"qk_norm": True, "v_norm": True},
    "keys that are values": {"k_is_v": True, "qk_norm": True, "v_norm": True},
    "an own scale": {"scale": 1.0, "qk_norm": True},
    "a magnitude": {"rope_magnitude": 1.35},
    "a soft-cap of scores": {"softcap": 2.0, "scale": 1.0},
    "a window of one": {"window": 1},
    "a window within a page": {"window": 7},
    "a window of a split": {"window": 64},
    "a window across splits": {"window": 101},
    "halves": {"rope_interleaved": False},
}
WHOLE: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu_tanh"},
    "scaled embeddings": {"embedding_scale": 8.0},
    "post-norms": {"post_norms": True},
    "a soft-cap of logits": {"logit_softcap": 3.0},
}


def described(
    layers: Sequence[dict[str, Any]], kv_layers: Sequence[int] | None = None, **changes: Any
) -> Arch:
    """Return a decoder whose layers have the given changes of the tiny attention."""
    attention = tuple(tiny_arch(**own).attention[0] for own in layers)
    own = tuple(range(len(layers))) if kv_layers is None else tuple(kv_layers)
    return dataclasses.replace(
        tiny_arch(**({"num_layers": len(layers)} | changes)), attention=attention, kv_layers=own
    )


def partial(head_dim: int, turned: int) -> tuple[float, ...]:
    """Return frequencies of which only the first `turned` are not 0."""
    frequencies = plain_frequencies(head_dim, 10_000.0)
    return frequencies[:turned] + (0.0,) * (len(frequencies) - turned)


SMALL = {"window": 24, "qk_norm": True, "v_norm": True, "scale": 1.0, "rope_interleaved": False}
FULL = SMALL | {
    "window": 0,
    "head_dim": 32,
    "num_kv_heads": 1,
    "k_is_v": True,
    "frequencies": partial(32, 4),
}
GEMMA = {
    "activation": "gelu_tanh",
    "embedding_scale": 8.0,
    "post_norms": True,
    "logit_softcap": 5.0,
}
ARCHS: dict[str, Arch] = (
    {name: described([own, own]) for name, own in FEATURES.items()}
    | {name: tiny_arch(**changes) for name, changes in WHOLE.items()}
    | {
        "sizes that no vector divides": described(
            [{}, {"num_heads": 3, "num_kv_heads": 1}], hidden_size=41, ffn_size=73, vocab_size=101
        ),
        "partial rotation": described([{"frequencies": partial(16, 3)}] * 2),
        "mixed layers": described([SMALL, FULL, SMALL], **GEMMA),
        "shared KV": described([SMALL, FULL, SMALL, FULL], [0, 1, 0, 1], **GEMMA),
        "wide heads": described(
            [
                {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1, "window": 40},
                {"head_dim": 512, "num_heads": 3, "num_kv_heads": 1},
            ]
        ),
        "biases among all": described([SMALL | {"qkv_bias": True}, FULL | {"qkv_bias": True}]),
    }
)


def random_description(seed: int) -> Arch:
    """Draw a decoder of two kinds of attention, any features, some of its KV shared."""
    random = np.random.default_rng(seed)

    def coin(chance: float = 0.5) -> bool:
        return bool(random.random() < chance)

    def attention() -> dict[str, Any]:
        heads = int(random.choice([1, 2, 3]))
        head_dim = int(random.choice([16, 32, 48, 80]))
        norms = coin()
        return {
            "num_kv_heads": heads,
            "num_heads": heads * int(random.choice([1, 2, 5])),
            "head_dim": head_dim,
            "frequencies": partial(head_dim, int(random.integers(1, head_dim // 2 + 1))),
            "rope_interleaved": coin(),
            "rope_magnitude": float(random.choice([1.0, 1.2])),
            "scale": float(random.choice([1.0, 1.5])) * head_dim**-0.5,
            "window": int(random.choice([0, 1, 16, 33, 90])),
            "softcap": float(random.choice([0.0, 1.5])),
            "qk_norm": norms,
            "v_norm": norms and coin(),
            "k_is_v": coin(0.3),
            "qkv_bias": coin(0.3),
        }

    kinds = [attention(), attention()]
    which = random.integers(0, 2, 4)
    which[:2] = (0, 1)
    owners = [int(np.argmax(which == kind)) if coin(0.4) else i for i, kind in enumerate(which)]
    return described(
        [kinds[kind] for kind in which],
        owners,
        hidden_size=int(random.choice([32, 96])),
        ffn_size=int(random.choice([64, 160])),
        vocab_size=int(random.choice([97, 131])),
        tied_embedding=coin(),
        activation="gelu_tanh" if coin() else "silu",
        embedding_scale=5.5 if coin() else 1.0,
        post_norms=coin(),
        logit_softcap=4.0 if coin() else 0.0,
    )


def random_weights(
    backend: Backend, arch: Arch, *, kind: str, seed: int = 0, poison: int | None = None
) -> DecoderWeights:
    """Draw and repack the weights of a description; matrices of one kind, vectors of float32.

    Args:
        poison: a token whose embedding is NaN.
    """
    random = np.random.default_rng(seed)

    def tensor(n: int, k: int, gain: float = 1.0) -> Tensor:
        values = random.standard_normal((n, k), dtype=np.float32) * np.float32(gain / k**0.5)
        return quantize(values, kind if k % 32 == 0 else "f32")

    def vector(size: int, low: float = 0.5, high: float = 1.5) -> Weight:
        values = random.uniform(low, high, size).astype(np.float32)
        return backend.vector(DenseTensor(values=values, dtype="f32"))

    def layer(own: AttentionArch, owns_kv: bool) -> LayerWeights:
        hidden, post = arch.hidden_size, arch.post_norms
        sizes = [own.q_size]
        if owns_kv:
            sizes += [own.kv_size] * (1 if own.k_is_v else 2)
        keys = own.qk_norm and owns_kv
        return LayerWeights(
            attn_norm=vector(hidden),
            qkv=backend.matrix([tensor(size, hidden, 2.0) for size in sizes]),
            attn_out=backend.matrix([tensor(hidden, own.q_size)]),
            ffn_norm=vector(hidden),
            gate_up=backend.matrix([tensor(arch.ffn_size, hidden) for _ in range(2)]),
            down=backend.matrix([tensor(hidden, arch.ffn_size)]),
            qkv_bias=vector(sum(sizes), -1, 1) if own.qkv_bias else None,
            q_norm=vector(own.head_dim) if own.qk_norm else None,
            k_norm=vector(own.head_dim) if keys else None,
            post_attn_norm=vector(hidden) if post else None,
            post_ffn_norm=vector(hidden) if post else None,
            scale=0.75 if post else 1.0,
        )

    layers = tuple(layer(own, arch.owns_kv(index)) for index, own in enumerate(arch.attention))
    table = tensor(arch.vocab_size, arch.hidden_size)
    if poison is not None:
        assert isinstance(table, DenseTensor), "only a dense row may be NaN"
        table.values[poison] = np.nan
    embedding, tied = backend.matrix([table]), arch.tied_embedding
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=vector(arch.hidden_size),
        output=embedding if tied else backend.matrix([tensor(arch.vocab_size, arch.hidden_size)]),
    )


def described_model(
    backend: Backend, arch: Arch, *, kind: str = "f32", poison: int | None = None
) -> TinyModel:
    """Compile a description with random weights on a back end."""
    weights = random_weights(backend, arch, kind=kind, poison=poison)
    kv = backend.kv_cache(arch, 40, arch.context_len)
    step = backend.compile(lambda ops: forward(ops, arch, weights, kv), max_rows=64, max_logits=64)
    return TinyModel(arch, backend, kv, step)
