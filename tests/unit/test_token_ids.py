"""Token ids on awkward text are llama.cpp's, for every kind of vocabulary a GGUF file can have.

`scripts/record_token_ids.py` recorded them.
"""

from __future__ import annotations

import pytest

from slipstream.models.loading.pre_tokenizers import PRE_TOKENIZERS
from tests.json_tokenizers import RECORD
from tests.recorded_tokenizers import CASES, TEXTS, tokenizer


def plain_ids(case: str, text: str, *, parse_special: bool) -> list[int]:
    """Ids without the beginning that `encode` makes sure of; it was off in the recording too."""
    found = tokenizer(case)
    ids = found.encode(text, parse_special=parse_special)
    begins = [found.bos_id] if found.adds_bos else []
    assert ids[: len(begins)] == begins
    return ids[len(begins) :]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_ids_are_llama_cpps(case: str, kind: str) -> None:
    recorded = RECORD["ids"][case][kind]
    assert len(recorded) == len(TEXTS)
    for text, expected in zip(TEXTS, recorded, strict=True):
        if tokenizer(case).adds_bos and expected[:1] == [tokenizer(case).bos_id]:
            expected = expected[1:]  # a beginning that is spelled is not said twice
        assert plain_ids(case, text, parse_special=kind == "special") == expected, text


def test_every_rule_was_recorded() -> None:
    recorded = {
        PRE_TOKENIZERS[case.removeprefix("byte level ")]
        for case in CASES
        if case.startswith("byte level")
    }
    assert recorded == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("smollm2")])
def test_text_comes_back(case: str) -> None:
    found = tokenizer(case)
    for text in TEXTS:
        back = found.decode(found.encode(text, parse_special=False))
        # What SentencePiece cannot tell apart, and the space that it puts in front.
        spelled = text if case.startswith("byte level") else text.replace("▁", " ")
        assert back == (f" {spelled}" if case == "SentencePiece" and text else spelled)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("smollm2")])
def test_streams_join_to_the_whole(case: str) -> None:
    found = tokenizer(case)
    for text in TEXTS:
        ids = found.encode(text, parse_special=False)
        stream = found.detokenizer()
        pieces = [stream.push([index]) for index in ids]
        assert "".join(pieces) + stream.finish() == found.decode(ids)
        assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))
