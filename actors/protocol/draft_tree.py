"""The draft tree: draft-ahead's hypotheses about the next tokens of a request, re-rooted by every verdict.

While the target verifies, the drafter keeps growing this tree. A verdict's tokens are walked from the root: if they
lead to a node, the subtree below it is a draft that is already there (a hit); if not, a new tree starts at the next
token (a miss). A policy chooses which nodes to expand next; the three published families differ only in that. Knows
tokens and values, not where they come from nor when a verdict may arrive.

Sources: PEARL (arXiv 2408.11850), SSD/Saguaro (2603.03251), SwiftSpec (2506.11309).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from actors.protocol.messages import DraftPreview, TokenTree


@dataclass(slots=True)
class DraftNode:
    """One possible next token. `value` is the log-probability of its path from the root.

    `row` is its pending KV row, -1 if it was not fed; `children` are in order of likelihood. `offered`: the last
    proposal contains it.
    """

    token: int
    parent: int
    depth: int
    value: float
    row: int = -1
    expanded: bool = False
    offered: bool = False
    children: list[int] = field(default_factory=list)


class DraftTree:
    """Hypotheses of one request; node 0 is the root, the last committed token."""

    def __init__(self, root_token: int) -> None:
        self.nodes = [DraftNode(root_token, -1, 0, 0.0)]
        self.offered: list[int] = []
        """The nodes of the last proposal with the root, in ascending order: those whose `offered` is set."""

    @staticmethod
    def read(tree: TokenTree, values: Sequence[float]) -> DraftTree:
        """The tree that `written` returned in another process; without values all nodes are equally likely."""
        read = DraftTree(tree.token_ids[0])
        nodes = read.nodes
        for i in range(1, len(tree.token_ids)):
            parent = tree.parents[i]
            nodes.append(DraftNode(tree.token_ids[i], parent, nodes[parent].depth + 1, values[i] if values else 0.0))
            nodes[parent].children.append(i)
        return read

    def written(self, num_leaves: int) -> tuple[TokenTree, list[float]]:
        """All nodes that a proposal may contain: expanded nodes, and of leaves the `num_leaves` likeliest siblings."""
        token_ids, parents, values = [self.root.token], [-1], [self.root.value]
        pending = [(0, 0)]
        for node, place in pending:  # grows while it is walked: breadth first
            for rank, child in enumerate(self.nodes[node].children):
                hypothesis = self.nodes[child]
                if rank < num_leaves or hypothesis.children:
                    pending.append((child, len(token_ids)))
                    token_ids.append(hypothesis.token)
                    parents.append(place)
                    values.append(hypothesis.value)
        return TokenTree(tuple(token_ids), tuple(parents)), values

    @property
    def root(self) -> DraftNode:
        return self.nodes[0]

    def expand(self, node: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Give a fed node its likeliest children, best first. Children of an earlier pass stay, with new values."""
        nodes, parent = self.nodes, self.nodes[node]
        parent.expanded = True
        if not parent.children:
            first, depth, value = len(nodes), parent.depth + 1, parent.value
            kept = zip(token_ids, log_probs, strict=True)
            nodes += [DraftNode(token, node, depth, value + chance) for token, chance in kept if chance != -math.inf]
            parent.children = [*range(first, len(nodes))]
            return
        known = {self.nodes[child].token: child for child in parent.children}
        ranked = []
        for token, log_prob in zip(token_ids, log_probs, strict=True):
            if log_prob == -math.inf:
                continue
            child = known.pop(token, None)
            if child is None:
                child = len(self.nodes)
                self.nodes.append(DraftNode(token, node, parent.depth + 1, parent.value + log_prob))
            else:
                self._shift(child, parent.value + log_prob - self.nodes[child].value)
            ranked.append(child)
        parent.children = ranked + list(known.values())

    def _shift(self, node: int, change: float) -> None:
        """Add to the value of a node and of its subtree."""
        self.nodes[node].value += change
        for child in self.nodes[node].children:
            self._shift(child, change)

    def clear_rows(self) -> None:
        """The KV rows were dropped; the nodes stay."""
        for hypothesis in self.nodes:
            hypothesis.row = -1

    def nodes_to_refresh(self, width: int) -> list[int]:
        """Nodes to feed in the first pass after `clear_rows`: the proposal, and the likeliest that had been fed."""
        offered = self.offered[1:]
        fed = [i for i, node in enumerate(self.nodes) if i and node.expanded and not node.offered]
        fed.sort(key=lambda i: (-self.nodes[i].value, i))  # a parent comes before its child
        return sorted(offered + fed[: max(0, width - len(offered))])

    def best_chain(self, length: int, root: int = 0) -> list[int]:
        """The likeliest child of the likeliest child ..., at most `length` nodes below `root`."""
        nodes, chain = self.nodes, list[int]()
        children = nodes[root].children
        while children and len(chain) < length:
            chain.append(children[0])
            children = nodes[children[0]].children
        return chain

    def best_nodes(self, count: int, root: int = 0) -> list[int]:
        """The `count` likeliest nodes below `root`, a connected set, parents before children."""
        nodes, best = self.nodes, list[int]()
        offered = [(-nodes[child].value, child) for child in nodes[root].children]
        heapify(offered)
        while offered and len(best) < count:
            _, node = heappop(offered)
            best.append(node)
            for child in nodes[node].children:
                heappush(offered, (-nodes[child].value, child))
        return sorted(best)

    def proposal(self, nodes: Sequence[int], root: int = 0) -> TokenTree:
        """These nodes, with `root` a connected set with parents before children, as a tree to verify."""
        found, place = [self.nodes[node] for node in nodes], {root: 0}
        place.update(zip(nodes, range(1, len(nodes) + 1), strict=True))
        token_ids = [node.token for node in found]
        return TokenTree((self.nodes[root].token, *token_ids), (-1, *[place[node.parent] for node in found]))

    def places(self, tree: TokenTree) -> list[int]:
        """The nodes with the paths of the nodes of `tree`, as far as they exist; roots are not compared."""
        places = [0]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            above = places[parent]
            children = self.nodes[above].children if above >= 0 else []
            places.append(next((child for child in children if self.nodes[child].token == token), -1))
        return [node for node in places[1:] if node >= 0]

    def worth(self, nodes: Sequence[int], further: int = 0) -> float:
        """Expected accepted tokens that feeding these nodes adds to later proposals, at most one each; or feeding what
        follows them `further` tokens later, each estimated to be as likely as the mean token of the path so far."""
        reached = (self.nodes[node] for node in nodes)
        return sum(math.exp(node.value * (1 + further / node.depth) if further else node.value) for node in reached)

    def offer(self, nodes: Sequence[int]) -> None:
        """These nodes are the proposal that the next verdict is about."""
        for node in self.offered:
            self.nodes[node].offered = False
        self.offered = [0, *sorted(nodes)]
        for node in self.offered:
            self.nodes[node].offered = True

    def find(self, token_ids: Sequence[int], root: int = 0) -> int | None:
        """The node that this path of tokens leads to from `root`."""
        nodes, node = self.nodes, root
        for token in token_ids:
            for child in nodes[node].children:
                if nodes[child].token == token:
                    node = child
                    break
            else:
                return None
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with this token."""
        return next((child for child in self.nodes[node].children if self.nodes[child].token == token), None)

    def outcomes(self) -> list[float]:
        """Probabilities of the outcomes of the verdict on the proposal, likeliest first, as far as they are known."""
        values = (self.nodes[child].value for child in self.outcome_nodes())
        return sorted(map(math.exp, values), reverse=True)

    def outcome_nodes(self) -> list[int]:
        """The children of the proposal's nodes and of the root that are not themselves of it."""
        nodes = self.nodes
        return [child for node in self.offered for child in nodes[node].children if not nodes[child].offered]

    def reroot(self, node: int) -> tuple[DraftTree, list[int]]:
        """The tree below `node`, with that node as its root, and the KV rows its other nodes hold, renumbered from 0.

        Returns (tree, old rows in their new order): a row kept at index i of the list is row i of the new tree.
        """
        tree = DraftTree(self.nodes[node].token)
        tree.nodes[0].expanded = self.nodes[node].expanded
        base, rows = self.nodes[node], []
        pending = [(child, 0) for child in base.children]
        for old, parent in pending:  # grows while it is walked: breadth first
            was = self.nodes[old]
            place = len(tree.nodes)
            tree.nodes[parent].children.append(place)
            tree.nodes.append(
                DraftNode(was.token, parent, was.depth - base.depth, was.value - base.value, expanded=was.expanded)
            )
            if was.row >= 0:
                tree.nodes[place].row = len(rows)
                rows.append(was.row)
            pending += [(child, place) for child in was.children]
        return tree, rows


@dataclass(frozen=True, slots=True)
class PreviewTree:
    """Drafts that draft-ahead prepared for a verdict still to come, as chains or as a tree: what is below `root`."""

    tree: DraftTree
    is_chain: bool
    root: int = 0

    @staticmethod
    def read(preview: DraftPreview) -> PreviewTree:
        return PreviewTree(DraftTree.read(preview.tree, preview.values), is_chain=not preview.values)

    def after(self, token_ids: Sequence[int]) -> PreviewTree | None:
        """The drafts for a verdict that commits `token_ids`; None if there are none."""
        node = self.tree.find(token_ids, self.root)
        if node is None or not self.tree.nodes[node].children:
            return None
        return PreviewTree(self.tree, self.is_chain, node)

    def best(self, num_draft_tokens: int) -> TokenTree:
        """The likeliest proposal of so many draft tokens."""
        best = self.tree.best_chain if self.is_chain else self.tree.best_nodes
        return self.tree.proposal(best(num_draft_tokens, self.root), self.root)
