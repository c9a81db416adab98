"""Which blocks hold which token prefixes.

A tree of nodes, one per full block of tokens. A node is found from its parent by the block's tokens themselves (plus
tagged extras such as the hash of an image inside the block), so a match *is* the comparison of the tokens: there is
no hash to trust, and no two prefixes can be confused. The root carries what separates whole caches: salt, adapter
generation, weights version. Tags keep the kinds apart: ``("adapter", "x")`` is never ``("salt", "x")``.

A node lives while a block holds its content, a sequence refers to it, or a child lives. A node without a block is a
place in the tree that somebody means to fill: ``leader`` is the sequence that is computing it now, so that others
with the same prefix can wait for it instead of computing it too. Two sequences that fill the same node at once both
keep their block (tables never change under a running step), so a node holds a list of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from paged_backend.errors import PagedBackendError


class PrefixNode:
    """One full block of tokens after ``parent``'s. ``blocks``: blocks that hold its KV, free or used.

    digest: hash of the whole prefix, of which nothing but the growth of the pool depends."""

    __slots__ = ("blocks", "children", "digest", "holders", "key", "leader", "parent")

    def __init__(self, parent: PrefixNode | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.digest: int = hash((parent.digest if parent is not None else 0, key))
        self.children: dict[Hashable, PrefixNode] = {}
        self.blocks: list[int] = []
        self.holders = 0
        self.leader: Any = None


class PrefixCache:
    """The tree and the map from cached blocks to their nodes."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, PrefixNode] = {}
        self._node_of_block: dict[int, PrefixNode] = {}

    @property
    def num_cached_blocks(self) -> int:
        return len(self._node_of_block)

    def root(self, namespace: tuple[Hashable, ...] = ()) -> PrefixNode:
        """The root for tagged namespace parts, e.g. ``(("salt", "a"), ("weights", 3))``."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = PrefixNode(None, namespace)
        return node

    def is_current(self, root: PrefixNode) -> bool:
        """Whether ``root`` is in the tree, and not in one from before a :meth:`reset`."""
        return self._roots.get(root.key) is root

    def reset(self) -> None:
        """Begin an empty tree. Whoever holds nodes of the old one finds nothing there any more."""
        for node in self._node_of_block.values():
            node.blocks.clear()
        self._node_of_block.clear()
        self._roots.clear()

    def child(
        self, parent: PrefixNode, tokens: tuple[int, ...], extras: tuple[Hashable, ...] = ()
    ) -> PrefixNode:
        """The node for ``tokens`` (one full block) after ``parent``, made if it does not exist."""
        key = (tokens, extras) if extras else tokens
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key)
        return node

    def hold(self, node: PrefixNode) -> None:
        """Keep ``node`` and its ancestors while a sequence refers to them."""
        node.holders += 1

    def unhold(self, node: PrefixNode) -> None:
        node.holders -= 1
        self._prune(node)

    def publish(self, node: PrefixNode, block: int) -> None:
        """``block`` now holds the KV of ``node``'s tokens; call only after the step that filled it has succeeded."""
        node.blocks.append(block)
        self._node_of_block[block] = node

    def forget(self, block: int) -> PrefixNode:
        """``block`` is about to be handed to somebody else; returns whose KV it held."""
        node = self._node_of_block.pop(block)
        node.blocks.remove(block)
        self._prune(node)
        return node

    def _prune(self, node: PrefixNode) -> None:
        current: PrefixNode | None = node
        while current is not None and not (current.blocks or current.children or current.holders > 0):
            parent = current.parent
            siblings = self._roots if parent is None else parent.children
            if siblings.get(current.key) is current:
                del siblings[current.key]
            current = parent

    def check(self, used_or_free: Iterable[int]) -> None:
        """Raise if a cached block and its node disagree, or a dead node is still in the tree."""
        known = set(used_or_free)
        for block, node in self._node_of_block.items():
            if block not in known or block not in node.blocks:
                raise PagedBackendError(f"prefix cache names block {block}, which does not hold that prefix")
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for block in node.blocks:
                if self._node_of_block.get(block) is not node:
                    raise PagedBackendError(
                        f"prefix node lists block {block}, which belongs to another prefix"
                    )
            if not (node.blocks or node.children or node.holders > 0):
                raise PagedBackendError("a prefix node without blocks, children or holders was not removed")
            stack.extend(node.children.values())
