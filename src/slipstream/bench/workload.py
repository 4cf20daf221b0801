"""What is asked in a benchmark: conversations by category, built in or read from a file.

A file has one JSON object a line, or is one JSON list of them. Two shapes are read: Spec-Bench's
(Xia et al. 2024, arXiv 2401.07851), `category` and `turns`; and OpenAI's, `messages` at the top or
in the `body` of a batch request. Of a conversation that was recorded with its answers, the user's
turns are asked and the answers are made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

# What rows over all categories are called; no category may be.
OVERALL = "overall"
LONGEST_NAME = 80
BUILT_IN = (
    "chat",
    "code",
    "math",
    "extraction",
    "summarisation",
    "translation",
    "creative",
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What one user says, turn after turn.

    Attributes:
        system: the system message, "" for none.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str = ""

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """Return the conversation up to a turn, given the answers to the turns before it."""
        out = [{"role": "system", "content": self.system}] if self.system else []
        for said, answer in zip(self.turns[:turn], answers, strict=True):
            out += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": answer},
            ]
        return [*out, {"role": "user", "content": self.turns[turn]}]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations, at most so many of a category.

    Attributes:
        name: where it comes from.
        sha256: of everything that is asked, in order.
    """

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def sha256(self) -> str:
        """A hash of everything that is asked, in order."""
        asked = [[c.category, c.system, *c.turns] for c in self.conversations]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @property
    def categories(self) -> dict[str, list[Conversation]]:
        """The conversations of each category, categories in the order of their first one."""
        out: dict[str, list[Conversation]] = {}
        for conversation in self.conversations:
            out.setdefault(conversation.category, []).append(conversation)
        return out

    def limited(self, per_category: int, categories: Sequence[str] = ()) -> Workload:
        """Return the first conversations of each category.

        Raises:
            ConfigError: a category is not there.
        """
        own = self.categories
        for name in categories:
            if name not in own:
                raise ConfigError(f"no category {name} in {self.name}; it has {', '.join(own)}")
        kept = [
            conversation
            for name in dict.fromkeys(categories or own)
            for conversation in own[name][:per_category]
        ]
        return Workload(name=self.name, conversations=tuple(kept))


def open_workload(name: str) -> Workload:
    """Return the built-in workload, one category of it, or what a file asks.

    Raises:
        ConfigError: it is neither, or the file is not what it should be.
    """
    if name == "built-in" or name in BUILT_IN:
        wanted = BUILT_IN if name == "built-in" else (name,)
        folder = resources.files("slipstream.bench") / "workloads"
        found = [
            conversation
            for category in wanted
            for conversation in _parse((folder / f"{category}.jsonl").read_text("utf-8"), category)
        ]
        return Workload(name=name, conversations=tuple(found))
    path = Path(name)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"the workload {name} is no file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the workload {name}: {error.strerror}",
            hint=f"a file, or one of built-in, {', '.join(BUILT_IN)}",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the workload {name} is not UTF-8 text: {error.reason}") from error
    found = list(_parse(text, path.name))
    if not found:
        raise ConfigError(f"the workload {name} asks nothing")
    return Workload(name=path.name, conversations=tuple(found))


def _parse(text: str, name: str) -> Iterator[Conversation]:
    """Yield the conversations of a file."""
    if text.lstrip().startswith("["):
        entries = _json(text, name)
        for number, entry in enumerate(entries, 1):
            yield _conversation(entry, f"{name}, entry {number}", str(number))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _conversation(_json(line, where), where, str(number))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are ValueErrors
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _conversation(entry: Any, where: str, number: str) -> Conversation:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a JSON object, got {type(entry).__name__}")
    inner = entry.get("body")
    body: dict[str, Any] = inner if isinstance(inner, dict) else entry
    system, turns = "", entry.get("turns")
    if turns is None and "messages" in body:
        system, turns = _asked(body["messages"], where)
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ConfigError(f"{where} needs `turns`, a list of texts, or `messages`")
    if any("\ud800" <= character <= "\udfff" for character in "".join([system, *turns])):
        raise ConfigError(f"{where} has half of a character, a lone surrogate")
    names = (entry.get(key) for key in ("id", "question_id", "custom_id"))
    name = str(next((name for name in names if name is not None), number))
    category = entry.get("category", "all")
    for what, text in (("an id", name), ("a category", category)):
        if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= LONGEST_NAME:
            raise ConfigError(
                f"{where} must have {what} of 1 to {LONGEST_NAME} printable characters, got "
                f"{ascii(text)[:80]}"
            )
    if category == OVERALL:
        raise ConfigError(f"{where}: no category may be called {OVERALL}")
    return Conversation(id=name, category=category, turns=tuple(turns), system=system)


def _asked(messages: Any, where: str) -> tuple[str, list[str]]:
    """Return the system message and the user's turns of an OpenAI conversation."""
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: `messages` must be a list, got {type(messages).__name__}")
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(_part(part, where) for part in content)
        role = "system" if role == "developer" else role
        if not isinstance(role, str) or role not in texts or not isinstance(content, str):
            raise ConfigError(
                f"{where}: a message must have a role of {', '.join(texts)} and text, got {message}"
            )
        texts[role].append(content)
    return "\n\n".join(texts["system"]), texts["user"]


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ConfigError(f"{where}: a content part must be text, got {part}")
