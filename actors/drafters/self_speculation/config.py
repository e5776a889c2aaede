"""The configuration record of `drafter=self`. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver, Placement
from actors.drafters.model.config import CalibrationPolicy, PassDrafterConfig
from actors.options import PipelineName, VerifyRule
from parallel.ranges import Range, errors_of, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter
    from parallel.model.layer_plan import LayerPlan

_SUBLAYER = re.compile(r"(\d+)([am]?)")


class Search(StrEnum):
    """How the layers to draft with are chosen while requests are served."""

    none = "none"
    swift = "swift"
    clasp = "clasp"
    fly = "fly"
    exit = "exit"


@dataclass(frozen=True, slots=True)
class SelfDrafterConfig(PassDrafterConfig):
    """The target itself with fewer layers, on its ranks and over its KV rows: no second model in memory."""

    name: str = "self"
    exit: Annotated[int, Range(0, zero="all of them; half of them if `skip` is empty and rows=full")] = 0
    """Layers that draft: the first so many, then the target's own norm and head (LayerSkip's early exit)."""
    skip: list[Any] = field(default_factory=list)
    """Sublayers that drafts leave out, by their number from 0: 3a the attention of layer 3, 3m its MLP, 3 both, as
    [3a,3m,4] (Draft & Verify)."""
    layers: str = ""
    """A file written by `job=search`, in place of `skip`: the sublayers that the search found best to leave out."""
    search: Search = Search.none
    """Choose the layers while requests are served: swift (tries masks of sublayers on generated text), clasp (skips
    the layers without which the newest token's hidden state stays closest), fly (skips attention that hardly changes
    the prompt's hidden states), exit (the exit with the most tokens for its weights, DEL); none: as `exit`, `skip` and
    `layers` say."""
    skip_share: Annotated[float, Range(above=0, below=1)] = 0.45
    """search=swift or clasp: share that is skipped, of the sublayers by swift, of the layers by clasp."""
    search_every: Annotated[int, Range(1)] = 8
    """search=swift, clasp or exit: rounds from one look at the text to the next."""
    search_window: Annotated[int, Range(8, cap=1024)] = 32
    """search=swift, exit or fly: generated tokens on which layers are compared; fly: tokens of a prompt."""
    search_trials: Annotated[int, Range(1, cap=10_000)] = 120
    """search=swift: masks to try, at most; it ends earlier once a mask reproduces 95 % of three texts in a row, or
    after a third of them without a better one."""
    least_cosine: Annotated[float, Range(0, below=1)] = 0.95
    """search=fly: attention is skipped where the cosine of the hidden states before and after it is above this."""
    resume: bool = True
    """Verification takes over what draft rows computed in the leading layers that ran whole; false: it starts anew."""

    def check_fields(self, where: str) -> None:
        super(SelfDrafterConfig, self).check_fields(where)
        for entry in self.skip:
            remedy = "names no sublayer; write 3a for the attention of layer 3, 3m for its MLP, 3 for both"
            require(_SUBLAYER.fullmatch(str(entry)) is not None, f"{where}.skip", entry, remedy)
        remedy = "drafts with the target's own layers, on its ranks; use attached or drop it"
        require(self.placement is not Placement.separate, f"{where}.placement", self.placement, remedy)
        chosen = {"exit": self.exit, "skip": self.skip, "layers": self.layers}
        for key in ("exit", "skip", "layers") if self.search is not Search.none else ():
            remedy = f"is chosen by {where}.search={self.search}; drop one of them"
            require(not chosen[key], f"{where}.{key}", chosen[key], remedy)
        remedy = f"lists what {where}.layers={self.layers} does; drop one of them"
        require(not (self.layers and self.skip), f"{where}.skip", self.skip, remedy)
        is_usual = self.calibration_policy is CalibrationPolicy.every and self.calibrate_every == 1
        remedy = "there is nothing to calibrate: the rows of drafts are not kept; drop it and calibrate_every"
        require(is_usual, f"{where}.calibration_policy", self.calibration_policy, remedy)
        remedy = "is the target's own, target.{0}; drop it"
        for key in ("kv_slots", "dtype", "weights", "attention"):
            value = getattr(self, key)
            require(value in (0, "auto"), f"{where}.{key}", value, remedy.format(key))

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        in_turn = pipeline in (PipelineName.sync, PipelineName.plain)
        remedy = f"runs the target's own layers, which are busy while it verifies; use pipeline=sync, not {pipeline}"
        require(in_turn, where, self.name, remedy)
        super(SelfDrafterConfig, self).check_with(rule, pipeline, where)

    def is_attached(self, pipeline: str) -> bool:
        return pipeline == PipelineName.sync

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        config = replace(self, tree=self._tree_file(resolve, f"{where}.tree")) if self.tree else self
        if self.layers:
            path = resolve.file(f"{where}.layers", self.layers, "one made by job=search")
            config = replace(config, layers=path, skip=_skipped_in(path, resolve.target_layers, f"{where}.layers"))
        config.check_layers(resolve.target_layers, where)
        if not self.keeps_all_rows:
            from parallel.kv.row_limits import check_partial
            from parallel.model.families.registry import read_config

            with errors_of(f"{where}.rows={self.rows}"):
                check_partial(read_config(Path(resolve.target)))
        return config

    def check_layers(self, num_layers: int, where: str = "drafter") -> None:
        """Raise ValueError if a target of so many layers cannot draft so."""
        remedy = f"leaves no layer out: the target has {num_layers}; give at most {num_layers - 1}"
        most = num_layers - self.keeps_all_rows
        require(self.exit <= most, f"{where}.exit", self.exit, remedy)
        for entry, (layer, _) in zip(self.skip, self._skipped(), strict=True):
            remedy = f"the target has layers 0 to {num_layers - 1}; give one of them"
            require(layer < num_layers, f"{where}.skip", entry, remedy)
        plan = self.layer_plan(num_layers)
        is_whole = plan.num_sublayers == 2 * num_layers
        remedy = "drafts with all layers and all rows, as the target itself; leave out one of them"
        require(not (is_whole and self.keeps_all_rows), f"{where}.exit", self.exit, remedy)
        require(bool(plan.num_sublayers), f"{where}.skip", self.skip, "leaves no sublayer to draft with; drop some")

    def layer_plan(self, num_layers: int) -> LayerPlan:
        """What runs of a target of so many layers."""
        from parallel.model.layer_plan import LayerPlan

        leaves_out = bool(self.skip) or not self.keeps_all_rows
        stop = self.exit or (num_layers if leaves_out else num_layers // 2)
        skipped = self._skipped()
        attention, mlp = ([layer for layer, part in skipped if part in ("", kind)] for kind in "am")
        return LayerPlan.prefix(stop).without(attention=attention, mlp=mlp)

    def _skipped(self) -> list[tuple[int, str]]:
        """(layer, a or m or nothing for both) of each entry of `skip`."""
        matches = [_SUBLAYER.fullmatch(str(entry)) for entry in self.skip]
        return [(int(match[1]), match[2]) for match in matches if match is not None]

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.self_speculation.drafter import build_self_drafter

        return build_self_drafter(self, setup)


def _skipped_in(path: str, num_layers: int, where: str) -> list[Any]:
    """The sublayers that a file lists for a target of so many layers."""
    from actors.drafters.self_speculation.layer_files import read_layers

    with errors_of(f"{where}={path}"):
        of_layers, skipped = read_layers(Path(path))
    remedy = f"is for a target of {of_layers} layers, not {num_layers}; write one for this target with job=search"
    require(of_layers == num_layers, where, path, remedy)
    remedy = "names what is no sublayer; give a file written by job=search"
    require(all(_SUBLAYER.fullmatch(entry) for entry in skipped), where, path, remedy)
    return list(skipped)
