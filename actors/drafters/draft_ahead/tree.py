"""Which nodes of a draft tree to feed next: the policies in which the asynchronous pipelines differ.

Pure functions of a `DraftTree`; they know tokens and log-probabilities, not where those come from.

Sources: PEARL (arXiv 2408.11850), SSD/Saguaro (2603.03251), SwiftSpec (2506.11309).
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.protocol.draft_tree import DraftTree


def _unfed_offer(tree: DraftTree, width: int) -> list[int]:
    """Nodes of the proposal that were not fed: without them nothing after a fully accepted proposal is known."""
    return [i for i in tree.offered[1:] if tree.nodes[i].row < 0 and _can_feed(tree, i)][:width]


def _can_feed(tree: DraftTree, node: int) -> bool:
    parent = tree.nodes[node].parent
    return parent == 0 or tree.nodes[parent].row >= 0


def run_ahead(tree: DraftTree, width: int, length: int) -> list[int]:
    """`pearl`: extend the likeliest chain by `length` nodes beyond the proposal, assuming that all of it is
    accepted."""
    unfed = _unfed_offer(tree, width)
    if unfed:
        return unfed
    offered = max(tree.nodes[node].depth for node in tree.offered)
    chain = tree.best_chain(offered + 1 + length)
    if len(chain) > offered + length:
        return []
    return [node for node in chain if tree.nodes[node].row < 0 and _can_feed(tree, node)][:1]


def enumerate_outcomes(tree: DraftTree, width: int, length: int) -> list[int]:
    """`branches`: the likeliest outcomes at every node of the proposal, each continued as a chain of `length`.

    An outcome is a child of the last accepted node. Outcomes compete by the probability of their whole path, which
    replaces the geometric fan-out table of SSD: the deeper the last accepted node, the fewer outcomes it keeps.
    """
    nodes, unfed = tree.nodes, _unfed_offer(tree, width)
    outcomes = sorted([(-nodes[node].value, node) for node in tree.outcome_nodes()])
    tips = list[tuple[int, float, int]]()
    for _, outcome in outcomes:
        if len(tips) == width - len(unfed):
            break
        tip, node, steps = outcome, nodes[outcome], 1
        while node.row >= 0 and node.children and steps < length:
            tip, steps = node.children[0], steps + 1
            node = nodes[tip]
        if node.row < 0:
            tips.append((steps, -node.value, tip))
    # The pass that feeds the end of the proposal also feeds the first step of the other outcomes.
    return unfed + [tip for *_, tip in sorted(tips)]


def grow_best(tree: DraftTree, width: int, length: int) -> list[int]:
    """`tree`: expand the likeliest unfed nodes of the whole tree; `length` is not needed."""
    del length
    leaves = [i for i, node in enumerate(tree.nodes) if i and node.row < 0 and _can_feed(tree, i)]
    return sorted(leaves, key=lambda i: -tree.nodes[i].value)[:width]


def num_chained(pipeline: str, tree: DraftTree, chosen: Sequence[int], length: int) -> int:
    """Passes, at least one, in which the policy of this pipeline would continue the chosen nodes by their likeliest
    children, whatever these are. `tree` has none, since every value may change its choice."""
    nodes = tree.nodes
    if any(nodes[node].children for node in chosen):
        return 1
    match pipeline:
        case "pearl":
            (node, *others), unfed = chosen, _unfed_offer(tree, 2)
            depth = nodes[node].depth
            if others or tree.best_chain(depth)[-1:] != [node] or any(other != node for other in unfed):
                return 1
            return max(nodes[node].depth for node in tree.offered) + length + 1 - depth
        case "branches":
            return length + 1 - max(_num_behind_offer(tree, node) or length for node in chosen)
    return 1


def _num_behind_offer(tree: DraftTree, node: int) -> int:
    """Nodes from the proposal to this one, itself included; 0 for one of the proposal, whose children are outcomes."""
    count = 0
    while not tree.nodes[node].offered:
        node, count = tree.nodes[node].parent, count + 1
    return count


AHEAD_WORTH = 0.03
"""Accepted tokens that a pass of draft-ahead must be expected to add. A pass worth less wastes energy and, where the
roles share memory or caches, slows the target: on two cores of one machine a drafter without pauses slows target passes
by 10 % and more. On devices of their own the pauses cost at most 2 % of the speed (simulated)."""

REDRAFT_WORTH = 0.5
"""Accepted tokens that a pass must be expected to add to a draft while the target waits for it."""


def redraft(tree: DraftTree, width: int, depth: int) -> list[int]:
    """Drafts after a miss, while the target waits: a chain (`width` 1) or levels of `width` nodes, up to `depth`.

    Ends when the next pass would add too little: a target pass yields about E tokens, so a draft pass that takes a
    fifth of its time must add about E / 5. In simulation one to three passes are best for any acceptance.
    """
    if width == 1:
        nodes = [node for node in tree.best_chain(depth - 1) if tree.nodes[node].row < 0][:1]
    else:
        nodes = [node for node in grow_best(tree, width, depth) if tree.nodes[node].depth < depth]
    return nodes if tree.worth(nodes, 1) > REDRAFT_WORTH else []


AHEAD = {"pearl": run_ahead, "branches": enumerate_outcomes, "tree": grow_best}
"""Policy of each asynchronous pipeline: (tree, width, length) -> nodes to feed next; none ends draft-ahead."""
