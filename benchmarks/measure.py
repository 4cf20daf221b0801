"""What is measured of each side, as functions from a contender to seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import HERE, Contender, Measure, Side, SideError, environment, num_cores

CONTEXT = 256
ROW_COUNTS = (1, 2, 3, 4, 5, 8, 16)
# llama.cpp attends to a multiple of 256 positions, so after 256 tokens it has just begun to pay for
# 512; after 240 it has not, with up to 16 rows. The bars' row counts are timed there too.
KIND_CONTEXT = 240
BAR_ROW_COUNTS = (1, 4, 8)
PREFILL = 512
PROMPT = 64
SHORT, LONG = 16, 128  # tokens of the two generations whose difference is the decode rate


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Slices of the sample text's ids, at least 640 of them."""

    token_ids: list[int]

    def rows(self, context: int, count: int) -> list[int]:
        """The anchor and drafts of a step that comes after `context` tokens."""
        return self.token_ids[context : context + count]


def step_seconds(prompts: Prompts, context: int, num_rows: int, repeat: int) -> Measure:
    """Median seconds of a whole step over `num_rows` rows of one sequence, all logits wanted."""

    def measure(contender: Contender) -> float:
        answer = contender.side.ask(
            "step",
            prefix=prompts.token_ids[:context],
            token_ids=prompts.rows(context, num_rows),
            repeat=repeat,
            **contender.options,
        )
        return statistics.median(answer["seconds"])

    return measure


def prefill_seconds(prompts: Prompts) -> Measure:
    """Seconds of a 512-token prompt, up to the last token's logits."""

    def measure(contender: Contender) -> float:
        ids = prompts.token_ids[:PREFILL]
        return contender.side.ask("prefill", token_ids=ids, **contender.options)["seconds"][0]

    return measure


def decode_seconds(prompts: Prompts) -> Measure:
    """Seconds a token of classic greedy decoding, by the outside clock.

    Prompt, prefill and protocol are in both generations and cancel.
    """

    def elapsed(contender: Contender, num_tokens: int) -> float:
        prompt = prompts.token_ids[:PROMPT]
        answer = contender.side.ask(
            "generate", prompt=prompt, num_tokens=num_tokens, **contender.options
        )
        got = len(answer["token_ids"])
        if got != num_tokens:
            raise SideError(f"emitted {got} tokens instead of {num_tokens}")
        return answer["elapsed"]

    def measure(contender: Contender) -> float:
        short = elapsed(contender, SHORT)
        return (elapsed(contender, LONG) - short) / (LONG - SHORT)

    return measure


def check_invariance(contenders: Sequence[Contender], prompts: Prompts) -> dict[str, bool]:
    """Check that our argmax of a row is the same among 1 and 16 rows and on any threads."""
    if not contenders:
        return {}
    rows = prompts.rows(CONTEXT, max(ROW_COUNTS))
    prefix = prompts.token_ids[:CONTEXT]
    wide = [c.side.ask("step", prefix=prefix, token_ids=rows, repeat=1) for c in contenders]
    alone = {
        i: contenders[0].side.ask(
            "step", prefix=prompts.token_ids[: CONTEXT + i], token_ids=[rows[i]], repeat=1
        )["argmax"][0]
        for i in (0, 1, 7, 15)
    }
    texts = [
        contender.side.ask("generate", prompt=prompts.token_ids[:PROMPT], num_tokens=LONG)
        for contender in contenders
    ]
    return {
        "a row's argmax does not depend on rows or threads": all(
            answer["argmax"][i] == token for answer in wide for i, token in alone.items()
        ),
        "same reply on any number of threads": all(
            answer["token_ids"] == texts[0]["token_ids"] for answer in texts
        ),
    }


def start_up(
    start: Callable[[], Side], path: Path, num_trials: int, *, is_ours: bool
) -> dict[str, Any]:
    """Load the model in fresh processes; then run 512 tokens and see what memory was taken.

    Returns:
        Bytes beyond the interpreter with its imports, and seconds of loading once imported.
    """
    options: dict[str, Any] = {} if is_ours else {"threads": num_cores(), "variant": (1, PREFILL)}
    seconds, rss, peak = [], [], []
    for _ in range(num_trials):
        side = start()
        seconds.append(side.ask("load", path=str(path))["elapsed"])
        text = (HERE / "data" / "ordinary_text.txt").read_text(encoding="utf-8")
        ids = side.ask("tokenize", text=text)["token_ids"][:PREFILL]
        side.ask("generate", prompt=ids, num_tokens=1, **options)
        now = side.ask("memory")
        rss.append(now["rss_bytes"] - side.facts["rss_bytes"])
        peak.append(now["peak_bytes"] - side.facts["rss_bytes"])
        side.close()
    return {
        "load_s": statistics.median(seconds),
        "load_trials": seconds,
        "rss_bytes": statistics.median(rss),
        "peak_bytes": statistics.median(peak),
    }


def first_token_seconds(path: Path) -> float:
    """Seconds from the start of `slipstream generate` to the first byte of its reply."""
    command = Path(sys.executable).parent / "slipstream"
    program = [str(command)] if command.exists() else [sys.executable, "-m", "slipstream.cli"]
    flags = ["--raw", "--max-tokens", "8", "-p", "The river rises in the hills and"]
    start = time.perf_counter()
    with subprocess.Popen(
        [*program, "generate", str(path), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        got = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not got:
        raise SideError(f"slipstream generate printed nothing, exit code {process.returncode}")
    return seconds
