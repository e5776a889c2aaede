"""Attached speculators on a device of the test's own: nothing of target, taps or drafts is left on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.protocol.messages import Admit, Commit, SamplingParams, VerifyBatch, VerifyItem
from actors.worker.factory import build_role
from parallel.comm.group import SINGLE
from tests.parallel import host_kernels
from tests.parallel.fake_accelerator import FakeAccelerator

PROMPT = (3, 4, 5, 3, 4)


@pytest.mark.extended
@pytest.mark.parametrize(
    "recipe",
    [
        *("eagle3", "dspark", "medusa", "streaming", "kangaroo"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("chimera", "mtp", "p_eagle", "glide", "gloeckle", "s3d")
        ),
    ],
)
def test_a_target_with_a_speculator_drafts_what_it_drafts_on_a_cpu(spec, speculator, monkeypatch, recipe):
    host_kernels.use_none(monkeypatch)
    drafter = SpeculatorDrafterConfig(path=str(speculator(recipe)), kv_slots=200)
    spec = replace(spec, drafter=drafter)
    assert drafter.is_attached(spec.pipeline)

    def answers(device, accelerator=None):
        target, _ = build_role(replace(spec, device=device), SINGLE)
        admit = Admit(1, 0, PROMPT, len(PROMPT), SamplingParams())
        (first,) = target.answer(VerifyBatch(7, admits=(admit,), items=(VerifyItem(1, 5, num_draft_tokens=4),)))
        found = [(first.verdicts, [one.tree for one in first.drafts.proposals])]
        (proposal,) = first.drafts.proposals
        (verdict,) = first.verdicts
        commit = Commit(1, verdict.epoch, verdict.prefix_len, verdict.path, verdict.token_ids)
        item = VerifyItem(1, 1, proposal, num_draft_tokens=4)
        if accelerator is not None:
            accelerator.forget()
        (second,) = target.answer(VerifyBatch(8, after=7, commits=(commit,), items=(item,)))
        return [*found, (second.verdicts, [one.tree for one in second.drafts.proposals])]

    expected = answers("cpu")
    assert expected[0][1][0].num_draft_tokens
    with FakeAccelerator() as accelerator:
        assert answers(str(accelerator.device), accelerator) == expected
    assert not accelerator.blocking_uploads, accelerator.blocking_uploads
    resumes = recipe == "kangaroo"  # the next verification, which reads what the draft fed
    waits = "of a round, for the verdict and for the drafts"
    assert accelerator.num_syncs == 2 + resumes, f"{waits}: {accelerator.syncs}"
