"""Prefix cache: which page already holds the KV of which tokens.

Pages of 16 committed tokens form a tree: a node is a page, its edge the page's token ids, its path
from the root all tokens up to and including them. KV depends on exactly those tokens, so a page
that is found along equal ids is the page that a cold run would write, byte for byte. The ids
themselves are the keys, so a hash that collides finds nothing.

A page that no sequence holds any more stays until the pool needs it. The least recently held goes
first; a sequence gives its last page back first, so a node always outlives its children.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Ids = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A cached page; the root has none (-1)."""

    page: int
    token_ids: Ids
    parent: Node | None
    children: dict[Ids, Node] = field(default_factory=dict, repr=False)


class PrefixCache:
    """The tree, and the order in which idle pages are given up.

    Attributes:
        root: the empty prefix.
        num_added: pages entered so far.
    """

    def __init__(self) -> None:
        self.root = Node(-1, (), None)
        self.num_added = 0
        self._nodes: dict[int, Node] = {}
        self._idle: dict[int, None] = {}  # in order of becoming idle

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def num_idle(self) -> int:
        """Cached pages that no sequence holds."""
        return len(self._idle)

    def add(self, parent: Node, token_ids: Ids, page: int) -> Node:
        """Enter a page that a sequence holds; nothing may be cached there yet."""
        assert token_ids not in parent.children, "these tokens are cached already"
        self.num_added += 1
        node = parent.children[token_ids] = self._nodes[page] = Node(page, token_ids, parent)
        return node

    def rest(self, page: int) -> None:
        """Note that nobody holds a cached page any more."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """Note that an idle page is held again."""
        del self._idle[page]

    def evict(self) -> int:
        """Forget the page that has been idle longest and return it."""
        page = next(iter(self._idle))
        del self._idle[page]
        node = self._nodes.pop(page)
        assert not node.children, "a page outlives the pages that follow it"
        assert node.parent is not None
        del node.parent.children[node.token_ids]
        return page
