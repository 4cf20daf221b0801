"""The op set: what a forward may do, and the contract that every back end keeps.

**Row invariance.** A row's output bytes depend only on that row's inputs, the weights and its own
sequence's KV: not on how many rows ride along, its place among them, padding rows, chunk
boundaries or threads. Reduction order is fixed per output element, splits sit at absolute
positions, nothing is accumulated atomically.

A back end offers two things: `Backend`, which repacks weights and owns KV pages, and `Ops`, the
functions that a forward calls. `Backend.compile` runs a Python forward once (recorded and replayed
without Python on fast back ends, called each time on the reference) and returns a `Step`.

Values that flow between ops are opaque `Value`s of shape (R, width), R the rows of the step: torch
tensors on the reference, recorder handles on fast back ends. A forward never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.models.arch import Activation, Arch
from slipstream.models.weights import Tensor, TensorInPieces

Int32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Value = Any  # a back end's own handle, of shape (R, width)
Weight = Any  # a back end's repacked matrix or vector
KVLayer = Any  # a back end's pages of one layer, and that layer's AttentionArch

PAGE_SIZE = 16  # positions a KV page holds; one AVX-512 vector of float32 scores


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """RMS norms of single heads, before rotation.

    Attributes:
        q: weight of shape (D,).
        k: likewise; None where a layer has no keys of its own.
        eps: also that of a norm of v, which has no weight.
    """

    q: Weight
    k: Weight | None
    eps: float


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """A draft vocabulary in clusters.

    Attributes:
        centroids: a matrix of shape (C, D), a row for each cluster.
        members: int32 of shape (W,), the cluster of each draft token, in [0, C).
        top: clusters that are looked into, 1 to C.
    """

    centroids: Weight
    members: Int32
    top: int


@dataclass(frozen=True, kw_only=True)
class Picks:
    """How the tokens of a step are chosen where the step itself samples; see engine/sampling.

    Every array has shape (L,), an entry for each logit row. A temperature of 0 is plain argmax.
    """

    temperatures: F32
    top_k: Int32  # 0 keeps all
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    choices: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint32]  # of the token that is to be chosen


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The sequences that a draft goes on with; B of them, each one row of every draft step.

    Attributes:
        token_ids: int32 of shape (B,), the anchors.
        positions: int32 of shape (B,), the anchors' positions, >= 1; the target's KV holds all
            positions below.
        page_table: int32 of shape (B, P), as in `Rows`.
        kept_rows: int32 of shape (B,), the rows of the target's last step that chose the anchors.
        k: tokens to draft for each.
        temperatures, seeds, choices: how tokens are picked, each of shape (B,), as in `Picks`.
    """

    token_ids: Int32
    positions: Int32
    page_table: Int32
    kept_rows: Int32
    k: int
    temperatures: F32
    seeds: npt.NDArray[np.uint64]
    choices: npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one packed forward.

    Attributes:
        token_ids: int32 of shape (R,).
        positions: int32 of shape (R,); -1 marks a padding row, which attends to nothing, writes no
            KV and whose output is unspecified.
        sequences: int32 of shape (R,), the row of `page_table` that each row reads and writes.
        page_table: int32 of shape (S, P); entry [s, i] is the page of positions [16 i, 16 i + 16).
        logit_rows: int32 of shape (L,), the rows whose logits are wanted, ascending.
        picks: how to sample; None, the only choice of back ends without `samples`, never samples.
    """

    token_ids: Int32
    positions: Int32
    sequences: Int32
    page_table: Int32
    logit_rows: Int32
    picks: Picks | None = None


def page_table(tables: Sequence[Int32]) -> Int32:
    """Return the pages of some sequences as one table, short ones filled up with page 0.

    Nobody reads what is filled up.
    """
    if len(tables) == 1:
        return tables[0][None]
    out = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for index, pages in enumerate(tables):
        out[index, : len(pages)] = pages
    return out


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step returns; arrays are views that the next step overwrites.

    Attributes:
        logits: float32 of shape (L, V). A device may fetch them when they are first read.
        argmax: int32 of shape (L,); equal logits resolve to the lowest id. Where `Rows.picks`
            samples a row, its pick, -1 if no logit is finite or one is +inf.
        run: `Step.runs` as of this step.
    """

    logits: F32
    argmax: Int32
    run: int = 0


class SharedOps(Protocol):
    """What any forward may do. R rows, H hidden, F ffn, D head_dim, V vocabulary.

    A back end that does not run an argument, other than at its default, raises LoadError.
    """

    def embed(self, table: Weight, scale: float = 1.0) -> Value:
        """Return scale * the embedding rows of the rows' tokens, float32 of shape (R, H)."""

    def rms_norm(self, x: Value, weight: Weight, eps: float) -> Value:
        """Return x / sqrt(mean(x**2) + eps) * weight, shape (R, H)."""

    def linear(
        self,
        x: Value,
        weight: Weight,
        residual: Value | None = None,
        bias: Weight | None = None,
    ) -> Value:
        """Return x @ weight.T + bias + residual; shape (R, N), N fused outputs.

        Args:
            bias: a vector of shape (N,), added first.
        """

    def norm_add(
        self, residual: Value, x: Value, weight: Weight, eps: float, scale: float = 1.0
    ) -> Value:
        """Return (residual + rms_norm(x, weight, eps)) * scale, shape (R, H)."""

    def gated(self, gate_up: Value, activation: Activation = "silu") -> Value:
        """Return activation(gate) * up for gate_up of shape (R, 2 F): gate first; shape (R, F).

        silu(x) is x / (1 + exp(-x)); gelu_tanh(x) is x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715
        x**3))) (Hendrycks, Gimpel 2016, arXiv 1606.08415, section 2).
        """


class Ops(SharedOps, Protocol):
    """The functions of a target's forward."""

    def rope_append(self, qkv: Value, kv: KVLayer, norms: HeadNorms | None = None) -> Value:
        """Norm and rotate q and k by their positions, write k and v; return q (R, heads * D).

        Norms come first, then the rotation; v has a norm where `AttentionArch.v_norm` says so, and
        is k as it comes where `k_is_v` does.

        Args:
            qkv: of shape (R, (heads + 2 kv_heads) * D), without the v part where k is v.
            norms: of q and k, where `AttentionArch.qk_norm` says so.
        """

    def rope(self, q: Value, kv: KVLayer, norms: HeadNorms | None = None) -> Value:
        """Norm and rotate q (R, heads * D) of a layer that attends to another's KV."""

    def attention(self, q: Value, kv: KVLayer) -> Value:
        """Return causal attention of q over the pages, this step's own rows included.

        Scale, window and soft-cap are those of the layer's `AttentionArch`. A row at position p
        with a window w sees positions p - w + 1 to p.
        """

    def keep(self, x: Value) -> None:
        """Let x stand until the next step, for drafters that read it; this computes nothing."""

    def logits(self, x: Value, weight: Weight, softcap: float = 0.0) -> Value:
        """Return l = x[Rows.logit_rows] @ weight.T, float32 of shape (L, V).

        Args:
            softcap: above 0, l becomes softcap * tanh(l / softcap), before anything is chosen.
        """


class DraftOps(SharedOps, Protocol):
    """The functions of a draft over the target's KV. Rows are the B sequences of `DraftRows`.

    In draft step j, from 0, a row holds token j at the anchor's position + j, token 0 the anchor.
    """

    def kept(self, index: int) -> Value:
        """Return `DraftRows.kept_rows` of what the target's `keep` was given in its call `index`.

        It may feed a norm only.
        """

    def rope(
        self,
        q: Value,
        kv: KVLayer,
        num_heads: int,
        norms: HeadNorms | None = None,
        *,
        advance: bool = True,
    ) -> Value:
        """Norm and rotate q (R, num_heads * D) by the rows' positions in this draft step.

        Args:
            advance: False takes the anchors' positions in every draft step.
        """

    def attention(self, q: Value, kv: KVLayer, num_heads: int, window: int | None = None) -> Value:
        """Return attention of q over the positions before the anchor, in every draft step.

        Args:
            window: attend to the last so many of them, 0 to all; None is the layer's own window.
        """

    def pick(
        self, x: Value, weight: Weight, token_ids: Int32, clusters: Clusters | None = None
    ) -> None:
        """Choose the rows' next tokens, which end this draft step and begin the next.

        With l = x @ weight.T, of shape (R, W), a row gets token_ids[argmax l] at temperature 0,
        else token_ids[argmax(l / temperature + noise)], the noise that of the position to be filled
        and of the target's ids (see kernels.noise). The first of equals wins; NaN never does.

        Args:
            token_ids: int32 of shape (W,), distinct ids of the target.
            clusters: where given, only tokens of a row's best clusters may be picked: those with
                the largest x @ centroids.T, the first of equals before the others.
        """


class KVCache(Protocol):
    """The KV pages of every layer that owns its keys and values.

    All positions are kept, those that a window no longer sees included, so that a rollback is no
    more than a shorter length.
    """

    num_pages: int

    def layer(self, index: int) -> KVLayer:
        """Return a layer's attention and the pages that it attends to, as the ops take them."""

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D), for tests."""

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""


class Step(Protocol):
    """A compiled forward.

    Attributes:
        runs: how often it ran; what the forward kept is that of the last run.
    """

    runs: int

    def __call__(self, rows: Rows) -> StepResult:
        """Run the forward over `rows` (1 <= R <= max_rows, L >= 0)."""


class DraftStep(Protocol):
    """A compiled draft."""

    def __call__(self, rows: DraftRows) -> Int32:
        """Return the drafted ids, int32 of shape (B, k), for 1 <= B <= max_rows, k <= max_k."""


class Backend(Protocol):
    """Repacks weights, owns pages, compiles forwards."""

    name: str  # "reference", "cpu", "cuda"
    reason: str  # why this one was chosen, e.g. "AVX-512 VNNI"
    takes_pieces: bool  # whether it is one that `TakesPieces`

    def matrix(self, parts: Sequence[Tensor]) -> Weight:
        """Repack matrices of equal K, stacked along N in order, into one fused weight."""

    def vector(self, tensor: Tensor) -> Weight:
        """Take a vector of shape (N,), e.g. a norm's weight."""

    def kv_cache(self, arch: Arch, num_pages: int, max_len: int) -> KVCache:
        """Allocate zeroed pages for every owner, with RoPE tables for positions < max_len.

        Raises:
            LoadError: the decoder has what this back end does not run; it is named.
        """

    def compile(self, forward: Callable[[Ops], Value], *, max_rows: int, max_logits: int) -> Step:
        """Return a step that runs `forward`, whose result is the logits value."""

    def compile_draft(
        self, forward: Callable[[DraftOps], None], target: Step, *, max_rows: int, max_k: int
    ) -> DraftStep:
        """Return a step that runs `forward`, which picks max_k times, as far as k asks.

        Args:
            target: the step, of this back end, whose kept values and KV the draft reads.
        """

    def weight_bytes(self) -> int:
        """Return the bytes of weights held so far."""


class TakesPieces(Protocol):
    """What `Backend`s with `takes_pieces` do besides."""

    takes_pieces: bool

    def matrix(self, parts: Sequence[Tensor | TensorInPieces]) -> Weight:
        """Repack matrices as `Backend.matrix`; of one in pieces never more than one is held."""


class DeviceMemory(Protocol):
    """Memory of a device that is shared out before it is taken; `Backend`s that have one offer it
    as `memory`."""

    def limit_bytes(self, fraction: float) -> int:
        """Return the bytes that this process may have in all, what it has already included."""

    def page_bytes(self, arch: Arch) -> int:
        """Return the bytes of one KV page, all layers together."""

    def workspace_bytes(self, arch: Arch, *, max_rows: int, max_logits: int, max_len: int) -> int:
        """Return what a step takes besides weights and pages."""

    def draft_bytes(self, arch: Arch, *, max_rows: int, max_len: int) -> int:
        """Return what an assistant's draft takes besides weights, for a target of this shape."""
