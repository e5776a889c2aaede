"""The server over an engine on Ray: real requests, and the death of a role in the middle of a streamed reply.

By default the server has engines in this process, and those on Ray have clients (`runtime/test_ray_backend.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from actors.options import PipelineConfig, PipelineName
from cluster.config.schema import ClusterConfig, ClusterName
from tests.cluster.serving.conftest import RunningServer, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]
pytest.importorskip("ray")

ON_RAY = ClusterConfig(ClusterName.local, dashboard=False, num_cpus=4, oversubscribe=True)
BODY = {"model": "tiny-chat", "prompt": "def f(", "max_tokens": 200, "temperature": 0}
IGNORING = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(chat_checkpoint, half_agreeing_drafter) -> Iterator[RunningServer]:
    pipeline = PipelineConfig(PipelineName.branches, adaptive=False)  # the drafter has a process of its own
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=10, cluster=ON_RAY, pipeline=pipeline) as running:
        running.service.warm_up()
        yield running


@pytest.fixture(scope="module")
def wanted(client: openai.OpenAI) -> str:
    """The text without speculation and without a fault."""
    options = {**IGNORING, "speculative": {"enabled": False}}
    return client.completions.create(**BODY, extra_body=options).choices[0].text


def test_a_request_is_answered(client: openai.OpenAI, wanted):
    reply = client.completions.create(**BODY, extra_body=IGNORING)
    assert reply.choices[0].text == wanted and reply.usage.completion_tokens == 200
    assert reply.metrics["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("role", ["target-0", "draft-0", "coordinator"])
def test_a_reply_goes_on_after_the_death_of_a_role(server: RunningServer, client: openai.OpenAI, wanted, role):
    known = len(server.engine.supervisor.incidents)
    text, usage, reason, killed = "", None, None, False
    with client.completions.create(
        **BODY, stream=True, stream_options={"include_usage": True}, extra_body=IGNORING
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text, reason = text + choice.text, choice.finish_reason or reason
            if text and not killed:
                killed = True
                os.kill(server.engine.pids()[role], signal.SIGKILL)
    assert (text, reason, usage.completion_tokens) == (wanted, "length", 200)
    deadline = time.monotonic() + 60
    while not any(one.identity == role for one in server.engine.supervisor.incidents[known:]):
        assert time.monotonic() < deadline, "the death was not noticed"
        time.sleep(0.05)
    assert server.ask("/health")[0] == 200
